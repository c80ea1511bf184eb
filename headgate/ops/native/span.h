// Span attention: what a call consists of, and which keys a block of queries sees.
//
// Shapes: q, out (B,H,Tq,D); k, v (B,G,Tk,D), H = G * repeat; lse, ring_log_weight (B,H,Tq); key_bias
// (B,H,Tk); distance_bias (H,distances). Queries lie in vector lanes and scores are stored [key][query], so
// that maxima, sums and masks need no operation across lanes.
//
// Of a key's bias only its difference to that of the query's own key enters the scores and the log-sum-exp:
// a running sum may then grow as long as it likes, and the softmax cannot tell.
#pragma once

#include "products.h"

#include <algorithm>
#include <vector>

namespace headgate {

constexpr int BLOCK = 48;   // queries at a time: a multiple of ROWS and of every LANES
constexpr int CHUNK = 192;  // keys at a time, likewise
constexpr int FEW = 4;      // up to so many queries go the way of span_few.cpp
constexpr int MARGIN = 64;  // how far beyond the first and the last key a tile may reach

// A (B,H,T,D) tensor whose last dimension is contiguous; strides count floats.
struct View {
    float* data;
    int64_t batch, head, token;
    float* row(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

// Mirrored by a ctypes.Structure in span/native.py.
struct SpanCall {
    int64_t batch, groups, repeat, queries, keys, width, threads;
    int64_t window, dense_prefix, pinned, ring, start;  // window < 0: none
    View q, k, v, out, d_out, d_q, d_k, d_v;
    float *lse, *ring_log_weight, *d_lse, *d_ring_log_weight;  // contiguous; null where there is none
    // (B,H), for few queries alone: the heads to compute, the others' outputs being 0; null for all.
    const uint8_t* active;
    float *key_bias, *d_key_bias, *distance_bias, *d_distance_bias;
    int64_t distances;  // in a row of the table; at least as many as keys
    const int64_t* windows;  // (G), for few queries alone: a window for each key head in place of one for all
    // (B,Tq), for many queries: the first key of each query's document, which rises; null for one document.
    const int64_t* first_keys;

    int64_t heads() const { return groups * repeat; }
    bool is_active(int64_t b, int64_t h) const { return !active || active[b * heads() + h]; }
    int64_t blocks() const { return (queries + BLOCK - 1) / BLOCK; }
    int64_t own_key(int64_t query) const { return keys - queries + query; }
    int64_t per_query(int64_t b, int64_t h, int64_t t) const { return (b * heads() + h) * queries + t; }
    int64_t per_key(int64_t b, int64_t h, int64_t j) const { return (b * heads() + h) * keys + j; }
    // Where the query's document begins; beyond the query's own key if that lies in an earlier document.
    int64_t document(int64_t b, int64_t query) const {
        return first_keys ? std::min(first_keys[b * queries + query], own_key(query) + 1) : 0;
    }
    // The earliest key of the contiguous span that ends at the query's own, the ring aside.
    int64_t first_key(int64_t b, int64_t query) const {
        const int64_t own = own_key(query), begin = document(b, query);
        return window < 0 || start + own - begin < dense_prefix ? begin : std::max(begin, own - window);
    }
    int64_t first_ring_key(int64_t b, int64_t query) const {
        return std::max(document(b, query), own_key(query) - ring);
    }
    int64_t pinned_keys() const { return std::clamp<int64_t>(pinned - start, 0, keys); }
};

// For every lane the keys lo <= j < hi it attends to. Both rise with the lane, which is what lets whole tiles
// be skipped by looking at a tile's first and last lane. Lanes beyond the last query see nothing.
struct Segment {
    int32_t lo[BLOCK], hi[BLOCK];
    int32_t begin, end;  // the keys of the whole block
    bool ring;
};

enum Part { NEAR, RING, PINNED, PARTS };

// False if the block has no keys of this part.
inline bool find_segment(const SpanCall& call, Part part, int64_t b, int64_t first, int count,
                         Segment& segment) {
    if (part == RING && !call.ring_log_weight) return false;
    if (part == PINNED && (call.window < 0 || call.pinned_keys() == 0)) return false;
    for (int i = 0; i < count; ++i) {
        const int64_t near = call.first_key(b, first + i), begin = call.document(b, first + i);
        switch (part) {
            case NEAR: segment.lo[i] = near, segment.hi[i] = call.own_key(first + i) + 1; break;
            case RING: segment.lo[i] = call.first_ring_key(b, first + i), segment.hi[i] = near; break;
            default: segment.lo[i] = begin, segment.hi[i] = std::min(near, begin + call.pinned_keys());
        }
    }
    segment.begin = segment.lo[0], segment.end = segment.hi[count - 1];
    for (int i = count; i < BLOCK; ++i) segment.lo[i] = segment.hi[i] = segment.end;
    segment.ring = part == RING;
    return segment.begin < segment.end;
}

inline int up_to_rows(int count) { return (count + ROWS - 1) / ROWS * ROWS; }

// The keys [first, first + count) of one head as rows of WIDTH floats; where they do not lie so already, or
// where the last tile would reach past the tensor, in `room`, which then ends in rows of zeros.
template <int D>
const float* key_rows(const View& view, int64_t b, int64_t g, int64_t first, int count, int64_t keys,
                      float* room) {
    const float* in = view.row(b, g, first);
    if (view.token == D && first + up_to_rows(count) <= keys) return in;
    for (int i = 0; i < count; ++i) std::memcpy(room + i * D, in + i * view.token, D * sizeof(float));
    std::fill(room + count * D, room + up_to_rows(count) * D, 0.0f);
    return room;
}

// Rows of a head's queries (or of what belongs to them), times `factor`, with zeros up to BLOCK rows.
template <int D>
void query_rows(const View& view, int64_t b, int64_t h, int64_t first, int count, float factor, float* out) {
    for (int i = 0; i < count; ++i) {
        const float* in = view.row(b, h, first + i);
        for (int d = 0; d < D; d += LANES) store(out + i * D + d, load(in + d) * factor);
    }
    std::fill(out + count * D, out + BLOCK * D, 0.0f);
}

// The rows [begin, end) of a chunk, in whole tiles, in which any of the lanes [lane, lane + width) sees a
// key.
struct Rows {
    int begin = 0, end = 0;
    Rows() = default;
    Rows(const Segment& s, int lane, int width, int chunk, int count) {
        begin = std::max(0, s.lo[lane] - chunk) / ROWS * ROWS;
        end = up_to_rows(std::clamp(s.hi[lane + width - 1] - chunk, 0, count));
        begin = std::min(begin, end);
    }
};

// Scores of a key, from a lane on, as they are or with one of the biases.
struct NoBias {
    HEADGATE_INLINE vec operator()(int, int, vec score) const { return score; }
};
struct KeyBias {
    const float *of_key, *own;  // own: of each lane's own key
    HEADGATE_INLINE vec operator()(int key, int lane, vec score) const {
        return (of_key[key] - load(own + lane)) * LOG2E + score;
    }
};
struct DistanceBias {
    const float* of_first;  // where the table of distances to the first lane's own key has its 0
    HEADGATE_INLINE vec operator()(int key, int lane, vec score) const {
        return load(of_first + lane - key) + score;
    }
};

// Rows of numbers per key with a margin of zeros at both ends, where tiles reach past them.
class Padded {
public:
    Padded(const float* in, int64_t rows, int64_t step, int64_t count, float factor)
        : row_(count + 2 * MARGIN) {
        if (!in) return;
        values_.assign(size_t(rows * row_), 0.0f);
        for (int64_t n = 0; n < rows; ++n)
            for (int64_t i = 0; i < count; ++i) values_[n * row_ + MARGIN + i] = in[n * step + i] * factor;
    }
    const float* row(int64_t n) const { return values_.empty() ? nullptr : values_.data() + n * row_ + MARGIN; }

private:
    int64_t row_;
    std::vector<float> values_;
};

struct Tables {
    Padded of_keys, of_distances;  // the latter in units of log 2
    explicit Tables(const SpanCall& call)
        : of_keys(call.key_bias, call.batch * call.heads(), call.keys, call.keys, 1.0f),
          of_distances(call.distance_bias, call.heads(), call.distances, call.keys, LOG2E) {}
};

// The biases of a block of queries.
class Biases {
public:
    Biases(const SpanCall& call, const Tables& tables, int64_t b, int64_t h, int64_t first, int count) {
        key_ = {tables.of_keys.row(b * call.heads() + h), own_};
        if (key_.of_key)
            for (int i = 0; i < BLOCK; ++i)
                own_[i] = key_.of_key[call.own_key(first + std::min(i, count - 1))];
        distance_.of_first = tables.of_distances.row(h);
        if (distance_.of_first) distance_.of_first += call.own_key(first);
    }
    Biases(const Biases&) = delete;
    // work(bias), where bias is one of the structures above.
    template <class Work>
    HEADGATE_INLINE void choose(const Work& work) const {
        if (key_.of_key)
            work(key_);
        else if (distance_.of_first)
            work(distance_);
        else
            work(NoBias());
    }

private:
    float own_[BLOCK];
    KeyBias key_{};
    DistanceBias distance_{};
};

// Scores of a panel of lanes against the rows of a chunk, -inf where a lane does not see the key.
template <int D, int N, class Bias>
HEADGATE_INLINE void scores(const Bias& bias, const float* k, const float* q_lanes, float* s,
                            const Rows& rows, const Segment& segment, int lane, int chunk) {
    for (int r = rows.begin; r < rows.end; r += ROWS) {
        const int32_t key = chunk + r;
        biased_product<N, D, 1, BLOCK, false>(
            [&](int i, int j, vec sum) { return bias(key + i, lane + j * LANES, sum); }, k + r * D,
            q_lanes + lane, s + r * BLOCK + lane, BLOCK, D);
        if (key >= segment.lo[lane + N * LANES - 1] && key + ROWS <= segment.hi[lane]) continue;
        for (int j = 0; j < N; ++j) {
            const ivec first = load(segment.lo + lane + j * LANES), end = load(segment.hi + lane + j * LANES);
            for (int i = 0; i < ROWS; ++i) {
                float* p = s + (r + i) * BLOCK + lane + j * LANES;
                const ivec seen = (broadcast(key + i) >= first) & (broadcast(key + i) < end);
                store(p, select(seen, load(p), broadcast(-__builtin_inff())));
            }
        }
    }
}

// Zeros for a panel's rows outside of [rows.begin, rows.end): the products that follow read them.
template <int N>
HEADGATE_INLINE void clear_rest(float* s, const Rows& rows, int lane, int count) {
    auto clear = [&](int from, int to) {
        for (int r = from; r < to; ++r)
            for (int j = 0; j < N; ++j) store(s + r * BLOCK + lane + j * LANES, vec{});
    };
    clear(0, rows.begin);
    clear(rows.end, up_to_rows(count));
}

// out[query][d] = sum over the chunk's keys of weights[key][query] * in[key][d], added to what is there if ADD,
// each group of queries over the keys that it sees.
template <int D, bool ADD = true>
HEADGATE_INLINE void add_over_keys(const float* weights, const float* in, float* out, const Segment& segment,
                                   int queries, int chunk, int count) {
    for_panels<D>(D, [&](int d, auto n) {
        for (int i = 0; i < queries; i += ROWS) {
            const int from = std::max(0, segment.lo[i] - chunk);
            const int to = std::min(count, segment.hi[std::min(i + ROWS, BLOCK) - 1] - chunk);
            if (from < to)
                product<n(), 1, BLOCK, D, ADD>(weights + from * BLOCK + i, in + from * D + d,
                                               out + i * D + d, D, to - from);
            else if (!ADD)
                for (int r = i; r < i + ROWS; ++r) std::fill(out + r * D + d, out + r * D + d + n() * LANES, 0.0f);
        }
    });
}

// out[key][d] += sum over queries of weights[key][query] * in[query][d], each tile of keys over those that
// see it.
template <int D>
HEADGATE_INLINE void add_over_queries(const float* weights, const float* in, float* out,
                                      const Segment& segment, int queries, int chunk, int keys) {
    for_panels<D>(D, [&](int d, auto n) {
        int from = 0, to = 0;
        for (int r = 0; r < keys; r += ROWS) {
            while (from < queries && segment.hi[from] <= chunk + r) ++from;
            while (to < queries && segment.lo[to] < chunk + r + ROWS) ++to;
            if (from < to)
                product<n(), BLOCK, 1, D, true>(weights + r * BLOCK + from, in + from * D + d,
                                                out + r * D + d, D, to - from);
        }
    });
}

void attend_few(const SpanCall& call);

template <class Work>
void for_width(int64_t width, const Work& work) {
    switch (width) {
        case 16: return work(std::integral_constant<int, 16>());
        case 32: return work(std::integral_constant<int, 32>());
        case 64: return work(std::integral_constant<int, 64>());
        case 96: return work(std::integral_constant<int, 96>());
        case 128: return work(std::integral_constant<int, 128>());
    }
}

}  // namespace headgate
