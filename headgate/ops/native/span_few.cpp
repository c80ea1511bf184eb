// Span attention, forward, for the one or few queries of a decoding step: there is no tile to fill, so head
// width lies in the vector lanes and time is what reading keys and values takes.
//
// The keys are cut into pieces of fixed length, so that one long sequence still occupies all threads; each
// piece yields a maximum, a sum and an output for every query, and these are merged in the order of the
// pieces.
#include "parallel.h"
#include "span.h"

#include <cmath>
#include <vector>

namespace headgate {
namespace {

constexpr int PIECE = 1024;  // keys
constexpr int TILE = 64;     // keys whose rows stay in the first cache while all queries of their head pass

template <int D>
struct Few {
    const int64_t b, g;
    SpanCall call;

    Few(const SpanCall& c, int64_t batch, int64_t group) : b(batch), g(group), call(c) {
        if (call.windows) call.window = call.windows[g];
    }

    // What one query has seen so far.
    struct State {
        float top, total;
        float out[D];
    };

    void piece(int64_t begin, int64_t end, State* states) {
        const int64_t rows = call.repeat * call.queries;
        for (int64_t i = 0; i < rows; ++i) {
            states[i].top = LOWEST, states[i].total = 0;
            std::fill(states[i].out, states[i].out + D, 0.0f);
        }
        for (int64_t tile = begin; tile < end; tile += TILE)
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t h = g * call.repeat + i / call.queries, t = i % call.queries;
                if (!call.is_active(b, h)) continue;
                const int64_t near = call.first_key(b, t), last = std::min<int64_t>(end, tile + TILE);
                auto see = [&](int64_t from, int64_t to, float bias) {
                    from = std::max(from, tile), to = std::min(to, last);
                    if (from < to) attend(h, t, from, int(to - from), bias, states[i]);
                };
                see(near, call.own_key(t) + 1, 0.0f);
                if (call.ring_log_weight)
                    see(call.first_ring_key(b, t), near, call.ring_log_weight[call.per_query(b, h, t)] * LOG2E);
                if (call.window >= 0) see(0, std::min(near, call.pinned_keys()), 0.0f);
            }
    }

    // The biases of LANES keys from `key` on, `count` of which there are, in units of log 2.
    vec biases(int64_t h, int64_t t, int64_t key, int count) const {
        const int64_t own = call.own_key(t);
        const float* of_key = call.key_bias ? call.key_bias + call.per_key(b, h, 0) : nullptr;
        const float* of_distance = call.distance_bias + h * call.distances + own;
        vec found{};
        if (of_key && count >= LANES)
            found = load(of_key + key);
        else
            for (int r = 0; r < std::min(count, LANES); ++r)
                found[r] = of_key ? of_key[key + r] : of_distance[-(key + r)];
        return (of_key ? found - of_key[own] : found) * LOG2E;
    }

    void attend(int64_t h, int64_t t, int64_t first, int count, float bias, State& state) {
        alignas(64) float s[TILE];
        const float* q = call.q.row(b, h, t);
        const bool biased = call.key_bias || call.distance_bias;
        const float* k = call.k.row(b, g, first);
        const vec factor = broadcast(LOG2E / std::sqrt(float(D)));
        vec highest = broadcast(state.top);
        for (int j = 0; j < count; j += LANES) {
            // LANES dot products at once: their partial sums are transposed, so that adding them needs no
            // more shuffles.
            vec parts[LANES];
            for (int r = 0; r < LANES; ++r) {
                const float* key = k + std::min(j + r, count - 1) * call.k.token;
                parts[r] = load(q) * load(key);
                for (int d = LANES; d < D; d += LANES) parts[r] += load(q + d) * load(key + d);
            }
            vec score = lane_sums(parts) * factor + bias;
            if (biased) score += biases(h, t, first + j, count - j);
            if (j + LANES > count) {
                for (int r = count - j; r < LANES; ++r) score[r] = -__builtin_inff();
            }
            store(s + j, score);
            highest = max(score, highest);
        }
        float top = state.top;
        for (int r = 0; r < LANES; ++r) top = std::max(top, highest[r]);
        vec total{};
        for (int j = 0; j < count; j += LANES) {
            const vec weight = exp2(load(s + j) - top);
            store(s + j, weight);
            total += weight;
        }
        const float shrink = exp2(broadcast(state.top - top))[0];
        vec out[D / LANES];
        for (int d = 0; d < D / LANES; ++d) out[d] = load(state.out + d * LANES) * shrink;
        for (int j = 0; j < count; ++j) {
            const float* v = call.v.row(b, g, first + j);
            for (int d = 0; d < D / LANES; ++d) out[d] += s[j] * load(v + d * LANES);
        }
        for (int d = 0; d < D / LANES; ++d) store(state.out + d * LANES, out[d]);
        state.total = state.total * shrink + sum(total);
        state.top = top;
    }

    void merge(const State* states, int64_t pieces) {
        const int64_t rows = call.repeat * call.queries;
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t h = g * call.repeat + i / call.queries, t = i % call.queries;
            if (!call.is_active(b, h)) {
                std::fill(call.out.row(b, h, t), call.out.row(b, h, t) + D, 0.0f);
                call.lse[call.per_query(b, h, t)] = -__builtin_inff();
                continue;
            }
            float top = LOWEST, total = 0;
            for (int64_t n = 0; n < pieces; ++n) top = std::max(top, states[n * rows + i].top);
            float* out = call.out.row(b, h, t);
            std::fill(out, out + D, 0.0f);
            for (int64_t n = 0; n < pieces; ++n) {
                const State& state = states[n * rows + i];
                const float factor = exp2(broadcast(state.top - top))[0];
                total += state.total * factor;
                for (int d = 0; d < D; d += LANES)
                    store(out + d, load(out + d) + load(state.out + d) * factor);
            }
            for (int d = 0; d < D; d += LANES) store(out + d, load(out + d) / total);
            call.lse[call.per_query(b, h, t)] = (top + log2(broadcast(total))[0]) * LN2;
        }
    }
};

}  // namespace

void attend_few(const SpanCall& call) {
    const int64_t pairs = call.batch * call.groups, rows = call.repeat * call.queries;
    const int64_t pieces = (call.keys + PIECE - 1) / PIECE;
    for_width(call.width, [&](auto width) {
        using Kernel = Few<width()>;
        std::vector<typename Kernel::State> states(size_t(pairs * pieces * rows));
        parallel_for(pairs * pieces, int(call.threads), [&](int64_t item) {
            const int64_t pair = item / pieces, begin = item % pieces * PIECE;
            Kernel(call, pair / call.groups, pair % call.groups).piece(
                begin, std::min<int64_t>(call.keys, begin + PIECE), states.data() + item * rows);
        });
        for (int64_t pair = 0; pair < pairs; ++pair)
            Kernel(call, pair / call.groups, pair % call.groups).merge(states.data() + pair * pieces * rows,
                                                                       pieces);
    });
}

}  // namespace headgate
