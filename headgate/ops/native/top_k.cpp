// Attention over the keys of highest logit, exactly; ties go to the later key.
//
// Scores are computed in tiles, the latest keys first, and of each query those above the lowest of its best so
// far go to a short list, which is cut back to the best whenever it is full. Where that begins is found by
// bisection over the first tiles, all lanes at once, so that few go to the list in vain. All else is work on k_i keys: they
// are few, so values and gradients are gathered and scattered row by row. What the backward pass needs to know
// of the choice is each query's last chosen key and its score; it computes the scores anew, by the same code.
#include "parallel.h"
#include "span.h"

#include <cmath>
#include <functional>

namespace headgate {

// Mirrored by a ctypes.Structure in top_k.py.
struct TopKCall {
    SpanCall span;
    const int32_t* counts;  // (Tq): how many keys each query chooses
    uint64_t* borders;      // (B,H,Tq): the last chosen entry
};

namespace {

constexpr int SPAN = 4 * CHUNK;  // keys whose scores are held at once

// A score and its key as one number that is higher for the better: the later key wins a tie. NaN is the best.
uint64_t entry(float score, int32_t key) {
    score += 0.0f;  // -0 is 0
    if (score != score) score = __builtin_inff();
    int32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    const uint32_t ordered = uint32_t(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
    return uint64_t(ordered) << 32 | uint32_t(key);
}
int32_t key_of(uint64_t entry) { return int32_t(uint32_t(entry)); }
float score_of(uint64_t entry) {
    const int32_t ordered = int32_t(uint32_t(entry >> 32) ^ 0x80000000u);
    const int32_t bits = ordered ^ (ordered >> 31 & 0x7fffffff);
    float score;
    std::memcpy(&score, &bits, sizeof score);
    return score;
}

template <int D>
struct TopK {
    const TopKCall& top;
    const SpanCall& call;
    const int64_t b, g, h, first;
    const int count, most;
    float *rows, *q_lanes, *s, *k_room, *weights, *d_weights;
    Segment segment{};
    std::vector<uint64_t> lists;
    int sizes[BLOCK] = {};

    TopK(const TopKCall& t, int64_t batch, int64_t head, int64_t query)
        : top(t),
          call(t.span),
          b(batch),
          g(head / t.span.repeat),
          h(head),
          first(query),
          count(int(std::min<int64_t>(BLOCK, t.span.queries - query))),
          most(t.counts[query + count - 1]) {
        const size_t weighed = Pieces::rounded(most + LANES);
        Pieces pieces(Scratch::of_thread().floats(2 * BLOCK * D + SPAN * BLOCK + CHUNK * D + 2 * weighed));
        rows = pieces.take(BLOCK * D), q_lanes = pieces.take(BLOCK * D);
        s = pieces.take(SPAN * BLOCK), k_room = pieces.take(CHUNK * D);
        weights = pieces.take(weighed), d_weights = pieces.take(weighed);
        query_rows<D>(call.q, b, h, first, count, 1.0f, rows);
        transpose<D, BLOCK>(rows, q_lanes, BLOCK);
        find_segment(call, NEAR, b, first, count, segment);
        lists.resize(size_t(BLOCK) * capacity());
    }

    int capacity() const { return 2 * most + 32; }
    uint64_t* list(int i) { return lists.data() + size_t(i) * capacity(); }

    static float log2_scale() { return LOG2E / std::sqrt(float(D)); }

    // q . k of SPAN keys, without the scale, whose rounding would break ties; one function for both passes,
    // which must agree on every bit.
    __attribute__((noinline)) void score(int first_key, int keys) {
        for (int chunk = 0; chunk < keys; chunk += CHUNK) {
            const int count_here = std::min(CHUNK, keys - chunk), at = first_key + chunk;
            const float* k = key_rows<D>(call.k, b, g, at, count_here, call.keys, k_room);
            for_panels<BLOCK>(count, [&](int lane, auto n) {
                Rows all;
                all.end = up_to_rows(count_here);
                scores<D, n()>(NoBias(), k, q_lanes, s + chunk * BLOCK, all, segment, lane, at);
            });
        }
    }

    // take(i, key, score) for the pairs of which wanted(scores, key, lane), a comparison of vectors, is true;
    // begin(keys) when the first scores are there.
    template <class Begin, class Wanted, class Take>
    void each(const Begin& begin, const Wanted& wanted, const Take& take) {
        const int last = (segment.end - 1) / SPAN * SPAN;
        for (int at = last; at >= 0; at -= SPAN) {
            const int keys = std::min(SPAN, segment.end - at);
            score(at, keys);
            if (at == last) begin(keys);
            for (int r = keys - 1; r >= 0; --r)
                for (int lane = 0; lane < count; lane += LANES) {
                    const float* row = s + r * BLOCK + lane;
                    for (unsigned found = bits(wanted(load(row), at + r, lane)); found; found &= found - 1) {
                        const int i = __builtin_ctz(found);
                        take(lane + i, at + r, row[i]);
                    }
                }
        }
    }

    // Below the lowest of each query's best among the keys at hand, and not far; -inf where these are too few.
    void find_lowest(int keys, float* lowest) {
        for (int lane = 0; lane < count; lane += LANES) {
            const vec none = broadcast(-__builtin_inff());
            vec high = none, low = -none;
            for (int r = 0; r < keys; ++r) {
                const vec score = load(s + r * BLOCK + lane);
                high = max(score, high), low = min(select((ivec)(score > none), score, low), low);
            }
            ivec wanted;
            for (int i = 0; i < LANES; ++i) wanted[i] = top.counts[first + std::min(lane + i, count - 1)];
            auto reached = [&](vec border) {
                ivec found{};
                for (int r = 0; r < keys; ++r) found -= (ivec)(load(s + r * BLOCK + lane) >= border);
                return (ivec)(found >= wanted);
            };
            const ivec enough = reached(low);
            for (int n = 0; n < 8; ++n) {
                const vec middle = low + (high - low) * 0.5f;
                const ivec here = reached(middle);
                low = select(here, middle, low), high = select(here, high, middle);
            }
            // What equals the border must pass: the next number below it.
            const vec below = low - max(low, -low) * 2.4e-7f - 1e-37f;
            store(lowest + lane, select(enough, below, none));
        }
    }

    void keep_best(int i, int keep, float* lowest) {
        uint64_t* begin = list(i);
        std::nth_element(begin, begin + keep - 1, begin + sizes[i], std::greater<uint64_t>());
        sizes[i] = keep;
        lowest[i] = score_of(begin[keep - 1]);
    }

    void forward() {
        alignas(64) float lowest[BLOCK];
        std::fill(lowest, lowest + BLOCK, -__builtin_inff());
        each([&](int keys) { find_lowest(keys, lowest); },
             [&](vec scores, int, int lane) { return ~(ivec)(scores <= load(lowest + lane)); },
             [&](int i, int key, float score) {
                 if (i >= count) return;
                 list(i)[sizes[i]++] = entry(score, key);
                 if (sizes[i] == capacity()) keep_best(i, top.counts[first + i], lowest);
             });
        for (int i = 0; i < count; ++i) {
            const int64_t at = call.per_query(b, h, first + i);
            const int kept = std::min(sizes[i], int(top.counts[first + i]));
            float* to = call.out.row(b, h, first + i);
            if (kept < 1) {  // only where every logit is -inf
                std::fill(to, to + D, __builtin_nanf(""));
                call.lse[at] = -__builtin_inff(), top.borders[at] = ~uint64_t(0);
                continue;
            }
            keep_best(i, kept, lowest);
            top.borders[at] = list(i)[kept - 1];
            attend(i, kept, to, call.lse + at);
        }
    }

    void attend(int i, int kept, float* to, float* lse) {
        const uint64_t* entries = list(i);
        const float highest = score_of(*std::max_element(entries, entries + kept));
        for (int n = 0; n < kept + LANES; ++n)
            weights[n] = n < kept ? (score_of(entries[n]) - highest) * log2_scale() : -__builtin_inff();
        vec total{};
        for (int n = 0; n < kept; n += LANES) {
            const vec weight = exp2(load(weights + n));
            store(weights + n, weight);
            total += weight;
        }
        const float all = sum(total);
        *lse = (highest * log2_scale() + log2(broadcast(all))[0]) * LN2;
        vec out[D / LANES] = {};
        for (int n = 0; n < kept; ++n) {
            const float* v = call.v.row(b, g, key_of(entries[n]));
            for (int d = 0; d < D / LANES; ++d) out[d] += weights[n] * load(v + d * LANES);
        }
        for (int d = 0; d < D / LANES; ++d) store(to + d * LANES, out[d] / all);
    }

    // Adds to d_k and d_v, rows of D floats for every key.
    void backward(float* d_k, float* d_v) {
        alignas(64) float lowest[BLOCK];
        alignas(64) int32_t last_key[BLOCK];
        for (int i = 0; i < BLOCK; ++i) {
            const uint64_t border = i < count ? top.borders[call.per_query(b, h, first + i)] : ~uint64_t(0);
            lowest[i] = i < count ? score_of(border) : __builtin_inff(), last_key[i] = key_of(border);
        }
        each([](int) {},
             [&](vec scores, int key, int lane) {
                 const vec least = load(lowest + lane);
                 return (scores > least) |
                        ((scores == least) & (broadcast(int32_t(key)) >= load(last_key + lane)));
             },
             [&](int i, int key, float score) {
                 if (i < count && sizes[i] < capacity()) list(i)[sizes[i]++] = entry(score, key);
             });
        for (int i = 0; i < count; ++i) differentiate(i, d_k, d_v);
    }

    void differentiate(int i, float* d_k, float* d_v) {
        const int64_t t = first + i;
        const int kept = sizes[i];
        const uint64_t* entries = list(i);
        const float *q = call.q.row(b, h, t), *d_out = call.d_out.row(b, h, t), *out = call.out.row(b, h, t);
        const float log2_sum = call.lse[call.per_query(b, h, t)] * LOG2E, scale = 1 / std::sqrt(float(D));
        vec dot{};
        for (int d = 0; d < D; d += LANES) dot += load(out + d) * load(d_out + d);
        const float delta = sum(dot);
        for (int n = 0; n < kept; n += LANES) {
            vec parts[LANES], score{};
            for (int r = 0; r < LANES; ++r) {
                const uint64_t of = entries[std::min(n + r, kept - 1)];
                const float* v = call.v.row(b, g, key_of(of));
                parts[r] = load(d_out) * load(v);
                for (int d = LANES; d < D; d += LANES) parts[r] += load(d_out + d) * load(v + d);
                score[r] = score_of(of);
            }
            const vec weight = exp2(score * log2_scale() - log2_sum);
            store(weights + n, weight);
            store(d_weights + n, weight * (lane_sums(parts) - delta) * scale);
        }
        vec d_q[D / LANES] = {};
        for (int n = 0; n < kept; ++n) {
            const int64_t key = key_of(entries[n]);
            const float* k = call.k.row(b, g, key);
            float *to_k = d_k + key * D, *to_v = d_v + key * D;
            for (int d = 0; d < D / LANES; ++d) {
                const int at = d * LANES;
                d_q[d] += d_weights[n] * load(k + at);
                store(to_k + at, load(to_k + at) + d_weights[n] * load(q + at));
                store(to_v + at, load(to_v + at) + weights[n] * load(d_out + at));
            }
        }
        float* to = call.d_q.row(b, h, t);
        for (int d = 0; d < D / LANES; ++d) store(to + d * LANES, d_q[d]);
    }
};

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_top_k_forward(const headgate::TopKCall* top) {
    using namespace headgate;
    const SpanCall& call = top->span;
    const int64_t blocks = call.blocks(), heads = call.heads();
    for_width(call.width, [&](auto width) {
        parallel_for(call.batch * heads * blocks, int(call.threads), [&](int64_t item) {
            const int64_t head = item / blocks, block = blocks - 1 - item % blocks;
            TopK<width()>(*top, head / heads, head % heads, block * BLOCK).forward();
        });
    });
}

// Queries that share keys are cut into as many parts as keep the threads busy, each with gradients of its own
// for the keys; these are added in the order of the parts.
extern "C" __attribute__((visibility("default"))) void headgate_top_k_backward(const headgate::TopKCall* top) {
    using namespace headgate;
    const SpanCall& call = top->span;
    const int64_t pairs = call.batch * call.groups, size = call.keys * call.width;
    const int64_t parts =
        std::clamp<int64_t>((2 * call.threads + pairs - 1) / pairs, 1, std::max<int64_t>(1, call.blocks()));
    float* sums = allocate(size_t(pairs * parts * 2 * size));
    for_width(call.width, [&](auto width) {
        constexpr int D = width();
        parallel_for(pairs * parts, int(call.threads), [&](int64_t item) {
            const int64_t pair = item / parts, b = pair / call.groups, g = pair % call.groups;
            float* d_k = sums + item * 2 * size;
            std::fill(d_k, d_k + 2 * size, 0.0f);
            for (int64_t block = item % parts; block < call.blocks(); block += parts)
                for (int64_t r = 0; r < call.repeat; ++r)
                    TopK<D>(*top, b, g * call.repeat + r, block * BLOCK).backward(d_k, d_k + size);
        });
        parallel_for(pairs, int(call.threads), [&](int64_t pair) {
            const float* in = sums + pair * parts * 2 * size;
            for (int64_t key = 0; key < call.keys; ++key)
                for (int d = 0; d < D; d += LANES) {
                    vec of_k{}, of_v{};
                    for (int64_t n = 0; n < parts; ++n) {
                        of_k += load(in + 2 * n * size + key * D + d);
                        of_v += load(in + (2 * n + 1) * size + key * D + d);
                    }
                    store(call.d_k.row(pair / call.groups, pair % call.groups, key) + d, of_k);
                    store(call.d_v.row(pair / call.groups, pair % call.groups, key) + d, of_v);
                }
        });
    });
    std::free(sums);
}
