// Span attention, forward: a block of queries against its keys in chunks, with a running maximum.
#include "parallel.h"
#include "span.h"

#include <cmath>

namespace headgate {
namespace {

template <int D>
struct Forward {
    const SpanCall& call;
    float *q_lanes, *rows, *s, *out, *k_room, *v_room;
    float *top, *total, *shrink, *bias;

    static size_t floats() { return size_t(3 * BLOCK * D + 2 * CHUNK * D + CHUNK * BLOCK + 4 * BLOCK); }

    explicit Forward(const SpanCall& c) : call(c) {
        Pieces pieces(Scratch::of_thread().floats(floats()));
        q_lanes = pieces.take(BLOCK * D), rows = pieces.take(BLOCK * D), out = pieces.take(BLOCK * D);
        k_room = pieces.take(CHUNK * D), v_room = pieces.take(CHUNK * D), s = pieces.take(CHUNK * BLOCK);
        top = pieces.take(BLOCK), total = pieces.take(BLOCK);
        shrink = pieces.take(BLOCK), bias = pieces.take(BLOCK);
    }

    void block(int64_t b, int64_t g, int64_t h, int64_t first, const Tables& tables) {
        const int count = int(std::min<int64_t>(BLOCK, call.queries - first));
        query_rows<D>(call.q, b, h, first, count, LOG2E / std::sqrt(float(D)), rows);
        transpose<D, BLOCK>(rows, q_lanes, BLOCK);
        const Biases biases(call, tables, b, h, first, count);
        std::fill(out, out + BLOCK * D, 0.0f);
        std::fill(top, top + BLOCK, LOWEST);
        std::fill(total, total + BLOCK, 0.0f);
        for (int part = 0; part < PARTS; ++part) {
            Segment segment{};
            if (!find_segment(call, Part(part), b, first, count, segment)) continue;
            if (segment.ring) load_bias(call.ring_log_weight + call.per_query(b, h, first), count);
            for (int chunk = segment.begin; chunk < segment.end; chunk += CHUNK)
                attend(b, g, chunk, std::min(CHUNK, segment.end - chunk), count, segment, biases);
        }
        finish(b, h, first, count);
    }

    void load_bias(const float* log_weight, int count) {
        for (int i = 0; i < BLOCK; ++i) bias[i] = i < count ? log_weight[i] * LOG2E : 0.0f;
    }

    void attend(int64_t b, int64_t g, int chunk, int keys, int queries, const Segment& segment,
                const Biases& biases) {
        const float* k = key_rows<D>(call.k, b, g, chunk, keys, call.keys, k_room);
        const float* v = key_rows<D>(call.v, b, g, chunk, keys, call.keys, v_room);
        bool shrunk = false;
        for_panels<BLOCK>(queries, [&](int lane, auto n) {
            const Rows seen(segment, lane, n() * LANES, chunk, keys);
            biases.choose(
                [&](const auto& of) { scores<D, n()>(of, k, q_lanes, s, seen, segment, lane, chunk); });
            shrunk |= weigh<n()>(seen, segment, lane);
            clear_rest<n()>(s, seen, lane, keys);
        });
        if (shrunk)
            for (int i = 0; i < queries; ++i)
                for (int d = 0; d < D; d += LANES) store(out + i * D + d, load(out + i * D + d) * shrink[i]);
        add_over_keys<D>(s, v, out, segment, queries, chunk, keys);
    }

    // Scores become weights relative to the running maximum; true if that rose, so that what was summed must
    // shrink.
    template <int N>
    HEADGATE_INLINE bool weigh(const Rows& seen, const Segment& segment, int lane) {
        vec highest[N], sum[N], before[N];
        for (int j = 0; j < N; ++j) {
            highest[j] = before[j] = load(top + lane + j * LANES);
            sum[j] = vec{};
        }
        for (int r = seen.begin; r < seen.end; ++r)
            for (int j = 0; j < N; ++j) {
                float* p = s + r * BLOCK + lane + j * LANES;
                if (segment.ring) store(p, load(p) + load(bias + lane + j * LANES));
                highest[j] = max(load(p), highest[j]);
            }
        for (int r = seen.begin; r < seen.end; ++r)
            for (int j = 0; j < N; ++j) {
                float* p = s + r * BLOCK + lane + j * LANES;
                const vec weight = exp2(load(p) - highest[j]);
                store(p, weight);
                sum[j] += weight;
            }
        bool rose = false;
        for (int j = 0; j < N; ++j) {
            const vec factor = exp2(before[j] - highest[j]);
            store(shrink + lane + j * LANES, factor);
            store(total + lane + j * LANES, load(total + lane + j * LANES) * factor + sum[j]);
            store(top + lane + j * LANES, highest[j]);
            for (int i = 0; i < LANES; ++i) rose |= factor[i] != 1.0f;
        }
        return rose;
    }

    void finish(int64_t b, int64_t h, int64_t first, int count) {
        float* lse = call.lse + call.per_query(b, h, first);
        float logs[BLOCK];
        for (int i = 0; i < BLOCK; i += LANES) store(logs + i, (load(top + i) + log2(load(total + i))) * LN2);
        std::copy(logs, logs + count, lse);
        for (int i = 0; i < count; ++i) {
            const bool seen = total[i] > 0;  // a query beyond a window may have no key in its document
            if (!seen) lse[i] = -__builtin_inff();
            const float factor = seen ? 1.0f / total[i] : 0.0f;
            float* to = call.out.row(b, h, first + i);
            for (int d = 0; d < D; d += LANES) store(to + d, load(out + i * D + d) * factor);
        }
    }
};

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_span_forward(const headgate::SpanCall* call) {
    using namespace headgate;
    if (call->queries <= FEW && !call->first_keys) return attend_few(*call);
    const int64_t blocks = call->blocks(), repeat = call->repeat;
    const Tables tables(*call);
    for_width(call->width, [&](auto width) {
        // Late blocks first: under a full span they are the longest. Heads that share keys follow each other.
        parallel_for(call->batch * call->groups * blocks * repeat, int(call->threads), [&](int64_t item) {
            const int64_t r = item % repeat, block = blocks - 1 - item / repeat % blocks;
            const int64_t pair = item / repeat / blocks, g = pair % call->groups, h = g * repeat + r;
            Forward<width()>(*call).block(pair / call->groups, g, h, block * BLOCK, tables);
        });
    });
}
