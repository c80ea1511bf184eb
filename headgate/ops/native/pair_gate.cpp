// Pair-gated attention, forward and backward: softmax(a s) v or softmax(a + log s) v over j <= i or a window.
//
// As span attention, with the gate between scores and softmax. Nothing is kept per pair: the backward
// computes each tile again from the inputs, the greatest score of each query and its sum.
#include "pair_gate.h"
#include "parallel.h"

#include <cmath>

namespace headgate {

// Mirrored by a ctypes.Structure in pair_gate/native.py. `span` has a window at most; its lse is not used.
struct PairGateCall {
    SpanCall span;
    int64_t hidden, log_form;
    View query_half, key_half, d_query_half, d_key_half;  // (B,H,T,M)
    float *w2, *b2, *d_w2, *d_b2;                         // (H,M) and (H)
    float* softmax;  // (B,H,Tq,2): the greatest score, in log2, and the sum of 2^(score - greatest)
};

namespace {

// Rows as columns [width][BLOCK], times `factor`, with zeros up to BLOCK.
void to_lanes(const View& view, int64_t b, int64_t h, int64_t first, int count, int width, float factor,
              float* out) {
    std::fill(out, out + width * BLOCK, 0.0f);
    for (int i = 0; i < count; ++i)
        for (int m = 0; m < width; ++m) out[m * BLOCK + i] = view.row(b, h, first + i)[m] * factor;
}

// One thread's memory and steps for blocks of queries of the head h of batch b.
template <int D>
class Attention {
public:
    Attention(const PairGateCall& call, int64_t b, int64_t h, bool backward)
        : call(call), span(call.span), b(b), h(h), g(h / span.repeat), M(int(call.hidden)) {
        const size_t block = BLOCK * D, room = CHUNK * D, tile = CHUNK * BLOCK, halves = (CHUNK + LANES) * M;
        const size_t keys = backward ? span.keys + ROWS : 0;
        const size_t per_query = 5 * D + 2 * M + 4, pieces_of_a_line = 18 * 16;
        Pieces pieces(Scratch::of_thread().floats(per_query * BLOCK + 2 * room + 2 * tile + 2 * halves +
                                                  keys * (2 * D + M) + pieces_of_a_line));
        q_rows = pieces.take(block), q_lanes = pieces.take(block), out = pieces.take(block);
        d_rows = pieces.take(block), d_lanes = pieces.take(block);
        k_room = pieces.take(room), v_room = pieces.take(room);
        query_half = pieces.take(M * BLOCK), key_half = pieces.take(halves);
        top = pieces.take(BLOCK), total = pieces.take(BLOCK);
        delta = pieces.take(BLOCK), shrink = pieces.take(BLOCK);
        gate.scores = pieces.take(tile), gate.d_scores = pieces.take(tile);
        gate.d_query_half = pieces.take(M * BLOCK), gate.d_key_half = pieces.take(halves);
        d_k = pieces.take(keys * D), d_v = pieces.take(keys * D), d_key_half = pieces.take(keys * M);
        for (int m = 0; m < M; ++m) w2[m] = call.w2[h * M + m] * (0.5f / UNIT);
        gate.query_half = query_half, gate.key_half = key_half, gate.w2 = w2, gate.b2 = call.b2[h];
        gate.top = top, gate.share = total, gate.delta = delta, gate.unit = 1 / std::sqrt(float(D));
        gate.d_w2 = d_w2, gate.d_b2 = &d_b2;
        pass = (call.log_form ? gate_pass<true> : gate_pass<false>)(M, backward);
    }

    void forward(int64_t first) {
        const int count = enter(first);
        std::fill(top, top + BLOCK, LOWEST);
        std::fill(total, total + BLOCK, 0.0f);
        for_chunks([&](int chunk, int keys) {
            const float* k = key_rows<D>(span.k, b, g, chunk, keys, span.keys, k_room);
            const float* v = key_rows<D>(span.v, b, g, chunk, keys, span.keys, v_room);
            score(k, count, chunk, keys);
            pass(gate);
            for (int i = 0; i < gate.vectors; ++i) weigh(i, keys);
            for (int i = 0; i < count; ++i)
                for (int d = 0; d < D; d += LANES) store(out + i * D + d, load(out + i * D + d) * shrink[i]);
            add_over_keys<D>(gate.scores, v, out, segment, count, chunk, keys);
        });
        for (int i = 0; i < count; ++i) {
            float* to = span.out.row(b, h, first + i);
            float* softmax = call.softmax + 2 * span.per_query(b, h, first + i);
            softmax[0] = top[i], softmax[1] = total[i];
            for (int d = 0; d < D; ++d) to[d] = out[i * D + d] / total[i];
        }
    }

    // Every `step`th block of the head's queries; the gradients of all its keys are then in d_k, d_v and
    // d_key_half.
    void backward(int64_t block, int64_t step) {
        std::fill(d_k, d_k + (span.keys + ROWS) * D, 0.0f);
        std::fill(d_v, d_v + (span.keys + ROWS) * D, 0.0f);
        std::fill(d_key_half, d_key_half + (span.keys + ROWS) * M, 0.0f);
        std::fill(d_w2, d_w2 + M, vec{});
        d_b2 = vec{};
        for (; block < span.blocks(); block += step) backward_block(block * BLOCK);
        for (int64_t i = 0; i < span.keys; ++i)
            for (int m = 0; m < M; ++m) d_key_half[i * M + m] *= half_factor(m);
    }

    float half_factor(int m) const { return UNIT * CUBE * w2[m]; }

    const PairGateCall& call;
    const SpanCall& span;
    const int64_t b, h, g;
    const int M;
    float *d_k, *d_v, *d_key_half;
    vec d_w2[MOST_HIDDEN], d_b2;

private:
    int enter(int64_t first) {
        const int count = int(std::min<int64_t>(BLOCK, span.queries - first));
        query_rows<D>(span.q, b, h, first, count, LOG2E / std::sqrt(float(D)), q_rows);
        transpose<D, BLOCK>(q_rows, q_lanes, BLOCK);
        to_lanes(call.query_half, b, h, first, count, M, UNIT, query_half);
        std::fill(out, out + BLOCK * D, 0.0f);
        find_segment(span, NEAR, b, first, count, segment);
        gate.vectors = (count + LANES - 1) / LANES;
        return count;
    }

    template <class Work>
    void for_chunks(const Work& work) {
        for (int chunk = segment.begin; chunk < segment.end; chunk += CHUNK) {
            const int keys = std::min(CHUNK, segment.end - chunk);
            gate.rows = up_to_rows(keys);
            std::fill(key_half + keys * M, key_half + gate.rows * M, 0.0f);
            for (int i = 0; i < keys; ++i) {
                const float* half = call.key_half.row(b, h, chunk + i);
                for (int m = 0; m < M; ++m) key_half[i * M + m] = half[m] * UNIT;
            }
            for (int i = 0; i < gate.vectors; ++i)
                gate.seen[i] = Rows(segment, i * LANES, LANES, chunk, keys);
            work(chunk, keys);
        }
    }

    void score(const float* k, int count, int chunk, int keys) {
        for_panels<BLOCK>(count, [&](int lane, auto n) {
            const Rows seen(segment, lane, n() * LANES, chunk, keys);
            scores<D, n()>(NoBias(), k, q_lanes, gate.scores, seen, segment, lane, chunk);
        });
    }

    // Scores become weights relative to the running maximum.
    void weigh(int i, int keys) {
        const int lane = i * LANES;
        const Rows seen = gate.seen[i];
        const vec before = load(top + lane);
        vec highest = before, sum{};
        float* scores = gate.scores + lane;
        for (int r = seen.begin; r < seen.end; ++r) highest = max(load(scores + r * BLOCK), highest);
        for (int r = seen.begin; r < seen.end; ++r) {
            const vec weight = exp2(load(scores + r * BLOCK) - highest);
            store(scores + r * BLOCK, weight);
            sum += weight;
        }
        const vec factor = exp2(before - highest);
        store(shrink + lane, factor);
        store(total + lane, load(total + lane) * factor + sum);
        store(top + lane, highest);
        clear_rest<1>(gate.scores, seen, lane, keys);
    }

    void backward_block(int64_t first) {
        const int count = enter(first);
        query_rows<D>(span.q, b, h, first, count, 1.0f, q_rows);
        query_rows<D>(span.d_out, b, h, first, count, 1.0f, d_rows);
        transpose<D, BLOCK>(d_rows, d_lanes, BLOCK);
        for (int i = 0; i < BLOCK; ++i) top[i] = total[i] = delta[i] = 0;
        for (int i = 0; i < count; ++i) {
            const float* softmax = call.softmax + 2 * span.per_query(b, h, first + i);
            const float* attended = span.out.row(b, h, first + i);
            vec dot{};
            for (int d = 0; d < D; d += LANES) dot += load(attended + d) * load(d_rows + i * D + d);
            top[i] = softmax[0], total[i] = 1 / softmax[1], delta[i] = sum(dot);
        }
        std::fill(gate.d_query_half, gate.d_query_half + M * BLOCK, 0.0f);
        for_chunks([&](int chunk, int keys) {
            const float* k = key_rows<D>(span.k, b, g, chunk, keys, span.keys, k_room);
            const float* v = key_rows<D>(span.v, b, g, chunk, keys, span.keys, v_room);
            score(k, count, chunk, keys);
            for_panels<BLOCK>(count, [&](int lane, auto n) {
                const Rows seen(segment, lane, n() * LANES, chunk, keys);
                for (int r = seen.begin; r < seen.end; r += ROWS)
                    product<n(), D, 1, BLOCK, false>(v + r * D, d_lanes + lane,
                                                     gate.d_scores + r * BLOCK + lane, BLOCK, D);
            });
            pass(gate);
            for (int i = 0; i < gate.vectors; ++i) {
                clear_rest<1>(gate.scores, gate.seen[i], i * LANES, keys);
                clear_rest<1>(gate.d_scores, gate.seen[i], i * LANES, keys);
            }
            add_over_queries<D>(gate.scores, d_rows, d_v + int64_t(chunk) * D, segment, count, chunk, keys);
            add_over_queries<D>(gate.d_scores, q_rows, d_k + int64_t(chunk) * D, segment, count, chunk, keys);
            add_over_keys<D>(gate.d_scores, k, out, segment, count, chunk, keys);
            for (int i = 0; i < keys * M; ++i) d_key_half[int64_t(chunk) * M + i] += gate.d_key_half[i];
        });
        for (int i = 0; i < count; ++i) {
            std::copy(out + i * D, out + (i + 1) * D, span.d_q.row(b, h, first + i));
            float* half = call.d_query_half.row(b, h, first + i);
            for (int m = 0; m < M; ++m) half[m] = gate.d_query_half[m * BLOCK + i] * half_factor(m);
        }
    }

    float *q_rows, *q_lanes, *out, *d_rows, *d_lanes, *k_room, *v_room, *query_half, *key_half;
    float *top, *total, *delta, *shrink;  // per query; in the backward total holds its inverse
    float w2[MOST_HIDDEN];
    Segment segment{};
    GateTile gate{};
    GatePass pass;
};

// How the backward is cut: every head's blocks of queries are dealt out to `slices` workers in turn, so that
// all have as many pairs. What several of them add to one key's gradient is kept apart and added in the end,
// in a fixed order.
int64_t slices_of(const SpanCall& span) {
    const int64_t heads = span.batch * span.heads();
    const auto balanced = [&](int64_t workers) {
        return workers % span.threads == 0 || workers >= 4 * span.threads;
    };
    int64_t slices = 1;
    while (!balanced(heads * slices) && slices < span.blocks()) ++slices;
    return slices;
}

}  // namespace
}  // namespace headgate

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void headgate_pair_gate_forward(const headgate::PairGateCall* call) {
    using namespace headgate;
    const SpanCall& span = call->span;
    const int64_t heads = span.batch * span.heads(), blocks = span.blocks();
    for_width(span.width, [&](auto width) {
        parallel_for(heads * blocks, int(span.threads), [&](int64_t item) {
            const int64_t head = item % heads, block = blocks - 1 - item / heads;  // the longest first
            Attention<width()>(*call, head / span.heads(), head % span.heads(), false).forward(block * BLOCK);
        });
    });
}

EXPORT void headgate_pair_gate_backward(const headgate::PairGateCall* call) {
    using namespace headgate;
    const SpanCall& span = call->span;
    const int64_t heads = span.batch * span.heads(), slices = slices_of(span);
    const int64_t D = span.width, M = call->hidden;
    const int64_t shared = slices * span.repeat;  // workers whose sums make one key's gradient
    const int64_t keys = span.keys * D, halves = span.keys * M, weights = M + 1;
    // Per worker: the sums of w2 and b2, and, unless they are final, those of the keys and of their halves.
    const int64_t each = weights + (shared > 1 ? 2 * keys : 0) + (slices > 1 ? halves : 0);
    float* parts = allocate(size_t(heads * slices * each));
    for_width(span.width, [&](auto width) {
        parallel_for(heads * slices, int(span.threads), [&](int64_t item) {
            const int64_t head = item / slices, b = head / span.heads(), h = head % span.heads();
            Attention<width()> attention(*call, b, h, true);
            attention.backward(item % slices, slices);
            float* part = parts + item * each;
            for (int m = 0; m < M; ++m) *part++ = sum(attention.d_w2[m]) * (0.5f / UNIT);
            *part++ = sum(attention.d_b2);
            const auto deliver = [&](const float* sums, int64_t row, const View& view, bool final) {
                if (!final) part = std::copy(sums, sums + span.keys * row, part);
                for (int64_t i = 0; final && i < span.keys; ++i)
                    std::copy(sums + i * row, sums + (i + 1) * row, view.row(b, h, i));
            };
            deliver(attention.d_k, D, span.d_k, shared == 1);
            deliver(attention.d_v, D, span.d_v, shared == 1);
            deliver(attention.d_key_half, M, call->d_key_half, slices == 1);
        });
    });
    // view[b][at] = the sum of `count` workers' sums, which lie `offset` floats into their parts
    const auto gather = [&](const View& view, int64_t b, int64_t at, int64_t worker, int64_t count,
                            int64_t offset, int64_t row) {
        for (int64_t i = 0; i < span.keys; ++i) {
            float* to = view.row(b, at, i);
            std::fill(to, to + row, 0.0f);
            for (int64_t n = worker; n < worker + count; ++n)
                for (int64_t d = 0; d < row; ++d) to[d] += parts[n * each + offset + i * row + d];
        }
    };
    if (shared > 1)
        parallel_for(span.batch * span.groups, int(span.threads), [&](int64_t item) {
            const int64_t b = item / span.groups, g = item % span.groups;
            gather(span.d_k, b, g, item * shared, shared, weights, D);
            gather(span.d_v, b, g, item * shared, shared, weights + keys, D);
        });
    if (slices > 1)
        parallel_for(heads, int(span.threads), [&](int64_t item) {
            gather(call->d_key_half, item / span.heads(), item % span.heads(), item * slices, slices,
                   weights + 2 * keys, M);
        });
    for (int64_t h = 0; h < span.heads(); ++h)
        for (int64_t m = 0; m < weights; ++m) {
            float& total = m < M ? call->d_w2[h * M + m] : call->d_b2[h];
            total = 0;
            for (int64_t b = 0; b < span.batch; ++b)
                for (int64_t n = 0; n < slices; ++n)
                    total += parts[((b * span.heads() + h) * slices + n) * each + m];
        }
    std::free(parts);
}
