// Which blocks a query attends to, best first: by the product with each block's mean key, or by the weight of
// these in a softmax, summed over the heads that share keys. Ties go to the later block, NaN is the best.
#include "parallel.h"
#include "span.h"

#include <cmath>

namespace headgate {

// Mirrored by a ctypes.Structure in blocks_native.py.
struct ChooseCall {
    SpanCall span;          // q, and as k the means
    int64_t* chosen;        // (B,heads,Tq,slots), heads being those of the keys where the choice is by weight
    const int32_t* counts;  // (Tq): how many blocks each query chooses
    int64_t slots, block, offset, by_weight;
};

namespace {

HEADGATE_INLINE vec ranked(vec score) { return select((ivec)(score == score), score, broadcast(__builtin_inff())); }

template <int D>
struct Choose {
    const ChooseCall& of;
    const SpanCall& call;
    const int64_t b, unit;  // the head, or the group of heads
    const int64_t g = of.by_weight ? unit : unit / call.repeat, first_head = of.by_weight ? unit * call.repeat : unit;
    const int64_t heads = of.by_weight ? call.repeat : 1;
    const float factor = of.by_weight ? LOG2E / std::sqrt(float(D)) : 1.0f;

    int64_t before(int64_t t) const { return (of.offset + t) / of.block; }  // complete blocks before the own one
    int64_t* chosen(int64_t t) const {
        const int64_t units = of.by_weight ? call.groups : call.heads();
        return of.chosen + ((b * units + unit) * call.queries + t) * of.slots;
    }

    // A tile of queries in lanes, means in rows.
    void tile(int64_t first) {
        const int count = int(std::min<int64_t>(BLOCK, call.queries - first));
        const int rows = up_to_rows(int(before(first + count - 1)));
        Pieces pieces(Scratch::of_thread().floats(size_t(2 * BLOCK * D + CHUNK * D + 2 * rows * BLOCK)));
        float *q_rows = pieces.take(BLOCK * D), *q_lanes = pieces.take(BLOCK * D), *room = pieces.take(CHUNK * D);
        float *s = pieces.take(rows * BLOCK), *ranks = pieces.take(rows * BLOCK);
        Segment segment{};
        for (int i = 0; i < BLOCK; ++i)
            segment.hi[i] = int32_t(before(first + std::min(i, count - 1)));
        segment.end = segment.hi[count - 1];
        if (of.by_weight) std::fill(ranks, ranks + rows * BLOCK, 0.0f);
        for (int64_t r = 0; r < heads; ++r) {
            query_rows<D>(call.q, b, first_head + r, first, count, factor, q_rows);
            transpose<D, BLOCK>(q_rows, q_lanes, BLOCK);
            float* to = of.by_weight ? s : ranks;
            for (int chunk = 0; chunk < segment.end; chunk += CHUNK) {
                const int keys = std::min(CHUNK, segment.end - chunk);
                const float* k = key_rows<D>(call.k, b, g, chunk, keys, call.keys, room);
                for_panels<BLOCK>(count, [&](int lane, auto n) {
                    Rows all;
                    all.end = up_to_rows(keys);
                    scores<D, n()>(NoBias(), k, q_lanes, to + chunk * BLOCK, all, segment, lane, chunk);
                });
            }
            if (of.by_weight) add_weights(s, ranks, rows);
        }
        pick(first, count, segment, ranks, rows);
    }

    // All lanes at once.
    void add_weights(float* s, float* ranks, int rows) {
        for (int lane = 0; lane < BLOCK; lane += LANES) {
            vec highest = broadcast(LOWEST), total{};
            for (int r = 0; r < rows; ++r) highest = max(load(s + r * BLOCK + lane), highest);
            for (int r = 0; r < rows; ++r) {
                const vec weight = exp2(load(s + r * BLOCK + lane) - highest);
                store(s + r * BLOCK + lane, weight);
                total += weight;
            }
            for (int r = 0; r < rows; ++r) {
                float* to = ranks + r * BLOCK + lane;
                store(to, load(to) + load(s + r * BLOCK + lane) / total);
            }
        }
    }

    void pick(int64_t first, int count, const Segment& segment, float* ranks, int rows) {
        const vec lowest = broadcast(-__builtin_inff());
        for (int lane = 0; lane < BLOCK; lane += LANES)
            for (int r = 0; r < rows; ++r) {
                float* at = ranks + r * BLOCK + lane;
                const vec rank = of.by_weight && r == 0 ? -lowest : ranked(load(at));
                store(at, select(broadcast(int32_t(r)) < load(segment.hi + lane), rank, lowest));
            }
        alignas(64) int32_t index[BLOCK];
        for (int64_t slot = 0; slot < of.slots; ++slot) {
            for (int lane = 0; lane < BLOCK; lane += LANES) {
                vec best = lowest;
                ivec at = broadcast(int32_t(-1));
                for (int r = rows - 1; r >= 0; --r) {
                    const vec rank = load(ranks + r * BLOCK + lane);
                    const ivec better = (ivec)(rank > best);
                    best = max(rank, best);
                    at = better ? broadcast(int32_t(r)) : at;
                }
                std::memcpy(index + lane, &at, sizeof at);
            }
            for (int i = 0; i < count; ++i) {
                const bool taken = slot < of.counts[first + i] && index[i] >= 0;
                chosen(first + i)[slot] = taken ? index[i] : -1;
                if (taken) ranks[index[i] * BLOCK + i] = -__builtin_inff();
            }
        }
    }

    // One query, with means in lanes.
    void one(int64_t t) {
        const int count = int(before(t)), room = (count + LANES) / LANES * LANES;
        Pieces pieces(Scratch::of_thread().floats(size_t(2 * room)));
        float *s = pieces.take(room), *ranks = pieces.take(room);
        std::fill(ranks, ranks + room, 0.0f);
        for (int64_t r = 0; r < heads; ++r) {
            const float* q = call.q.row(b, first_head + r, t);
            vec highest = broadcast(LOWEST), total{};
            for (int j = 0; j < count; j += LANES) {
                vec parts[LANES];
                for (int i = 0; i < LANES; ++i) {
                    const float* mean = call.k.row(b, g, std::min(j + i, count - 1));
                    parts[i] = load(q) * load(mean);
                    for (int d = LANES; d < D; d += LANES) parts[i] += load(q + d) * load(mean + d);
                }
                vec score = lane_sums(parts) * factor;
                for (int i = count - j; i < LANES; ++i) score[i] = -__builtin_inff();
                store(s + j, score);
                highest = max(score, highest);
            }
            float top = LOWEST;
            for (int i = 0; i < LANES; ++i) top = std::max(top, highest[i]);
            if (of.by_weight)
                for (int j = 0; j < count; j += LANES) {
                    const vec weight = exp2(load(s + j) - top);
                    store(s + j, weight);
                    total += weight;
                }
            const float share = of.by_weight ? 1 / sum(total) : 1.0f;
            for (int j = 0; j < count; j += LANES) store(ranks + j, load(ranks + j) + load(s + j) * share);
        }
        for (int j = 0; j < count; j += LANES) store(ranks + j, ranked(load(ranks + j)));
        if (of.by_weight && count) ranks[0] = __builtin_inff();
        for (int j = count; j < room; ++j) ranks[j] = -__builtin_inff();
        for (int64_t slot = 0; slot < of.slots; ++slot) {
            vec highest = broadcast(-__builtin_inff());
            for (int j = 0; j < room; j += LANES) highest = max(load(ranks + j), highest);
            float top = highest[0];
            for (int i = 1; i < LANES; ++i) top = std::max(top, highest[i]);
            int at = -1;
            for (int j = room - LANES; j >= 0 && top > -__builtin_inff() && at < 0; j -= LANES) {
                const unsigned found = bits((ivec)(load(ranks + j) == top));
                if (found) at = j + 31 - __builtin_clz(found);
            }
            const bool taken = slot < of.counts[t] && at >= 0;
            chosen(t)[slot] = taken ? at : -1;
            if (taken) ranks[at] = -__builtin_inff();
        }
    }
};

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_choose_blocks(const headgate::ChooseCall* of) {
    using namespace headgate;
    const SpanCall& call = of->span;
    const int64_t units = of->by_weight ? call.groups : call.heads(), each = call.queries <= FEW ? 1 : BLOCK;
    const int64_t tiles = (call.queries + each - 1) / each;
    for_width(call.width, [&](auto width) {
        parallel_for(call.batch * units * tiles, int(call.threads), [&](int64_t item) {
            const int64_t unit = item / tiles, first = (tiles - 1 - item % tiles) * each;
            Choose<width()> choose{*of, call, unit / units, unit % units};
            if (each == 1)
                choose.one(first);
            else
                choose.tile(first);
        });
    });
}
