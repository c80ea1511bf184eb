// Span attention, backward: all five products of a block of queries and a chunk of keys while both are in
// cache.
//
// The queries of a head are cut into strips, the unit of work. A strip adds up the gradients of all keys that
// it sees in its own memory. Its own keys, those from its first query's on, go to the result at once; those
// before them lie in other strips' reach too and go to the strip's halo, and the halos are added in the end,
// in the order of the strips. No two threads ever write one number, and the order of every sum is fixed. So it
// is with the gradient of a key's bias; each strip has a table of distances of its own, and these are added.
#include "parallel.h"
#include "span.h"

#include <cmath>
#include <vector>

namespace headgate {
namespace {

constexpr int64_t STRIP = 1024;  // queries of a strip at least, under a window

// The keys a strip sees: `first` at the sequence's beginning, then [low, high), of which it owns [own, high).
struct Strip {
    int64_t begin, end;  // queries
    int64_t first, low, own, high;
    size_t halo;  // where its halo begins, in rows
    int64_t halo_rows() const { return first + own - low; }
    int64_t rows() const { return first + high - low; }
    // The row of its memory in which a key lies.
    int64_t row(int64_t key) const { return key < low ? key : first + key - low; }
};

std::vector<Strip> cut(const SpanCall& call) {
    // Four items for every thread balance the load; under a window strips are never so short that halos
    // matter, nor so long that a strip's memory leaves the cache. Strips of a full span hold equally many
    // pairs, so the first is the longest.
    const int64_t wanted = std::max<int64_t>(1, 4 * call.threads / (call.batch * call.groups));
    const int64_t reach = call.window < 0 ? 0 : std::max(call.window, call.ring);
    int64_t strips = wanted;
    if (call.window >= 0) {
        const int64_t least = std::max(STRIP, 8 * reach);
        strips = std::max<int64_t>(1, call.queries / least);
    }
    strips = std::min(strips, call.blocks());
    std::vector<Strip> cuts;
    const double offset = double(call.keys - call.queries), all = double(call.queries);
    for (int64_t n = 1, begin = 0; n <= strips; ++n) {
        double at = all * double(n) / double(strips);
        if (call.window < 0 && !call.first_keys)  // pairs up to query x: x * (offset + x / 2)
            at = std::sqrt(offset * offset + 2 * at * (offset + all / 2)) - offset;
        int64_t end = n == strips ? call.queries : int64_t(at) / BLOCK * BLOCK;
        if (end <= begin) continue;
        Strip s{};
        s.begin = begin, s.end = end;
        s.own = begin == 0 ? 0 : call.own_key(begin);
        s.high = call.own_key(end - 1) + 1;
        s.low = begin == 0 ? 0 : s.own;
        for (int64_t b = 0; b < (call.first_keys ? call.batch : 1); ++b) {
            s.low = std::min(s.low, call.first_key(b, begin));
            if (call.ring_log_weight) s.low = std::min(s.low, call.first_ring_key(b, begin));
            // A document's pinned keys lie anywhere in the sequence.
            if (call.first_keys && call.pinned) s.low = std::min(s.low, call.document(b, begin));
        }
        s.first = call.window < 0 || call.first_keys ? 0 : std::min(s.low, call.pinned_keys());
        cuts.push_back(s);
        begin = end;
    }
    size_t halo = 0;
    for (Strip& s : cuts) s.halo = halo, halo += size_t(s.halo_rows());
    return cuts;
}

template <int D>
struct Backward {
    const SpanCall& call;
    const Strip& strip;
    const int64_t b, g;
    const Tables& tables;
    float *q_rows, *q_lanes, *d_rows, *d_lanes, *d_q, *p, *d_s, *k_room, *v_room;
    float *lse, *delta, *bias, *d_bias;
    float *d_k, *d_v;  // the strip's keys
    float *d_of_keys, *d_of_distances = nullptr;  // of the head at hand
    int64_t memory;

    Backward(const SpanCall& c, const Strip& s, int64_t batch, int64_t group, const Tables& t)
        : call(c), strip(s), b(batch), g(group), tables(t), memory((s.rows() + ROWS) * D) {
        const size_t block = BLOCK * D, room = CHUNK * D, tile = CHUNK * BLOCK;
        const size_t sums = 2 * Pieces::rounded(memory);
        const size_t biases = c.key_bias ? Pieces::rounded(c.repeat * bias_row()) : 0;
        Pieces pieces(
            Scratch::of_thread().floats(5 * block + 2 * room + 2 * tile + 4 * BLOCK + sums + biases));
        q_rows = pieces.take(block), q_lanes = pieces.take(block), d_rows = pieces.take(block);
        d_lanes = pieces.take(block), d_q = pieces.take(block);
        k_room = pieces.take(room), v_room = pieces.take(room);
        p = pieces.take(tile), d_s = pieces.take(tile);
        lse = pieces.take(BLOCK), delta = pieces.take(BLOCK);
        bias = pieces.take(BLOCK), d_bias = pieces.take(BLOCK);
        d_k = pieces.take(memory), d_v = pieces.take(memory);
        d_of_keys = pieces.take(biases);
    }

    // Sums are added by whole vectors.
    int64_t bias_row() const { return strip.rows() + ROWS + LANES; }

    // `distances`: a padded table for each head, of zeros; null if there is no bias by distance.
    void run(float* halo, float* distances) {
        std::fill(d_k, d_k + memory, 0.0f);
        std::fill(d_v, d_v + memory, 0.0f);
        float* const d_biases = d_of_keys;
        if (call.key_bias) std::fill(d_biases, d_biases + call.repeat * bias_row(), 0.0f);
        for (int64_t first = strip.begin; first < strip.end; first += BLOCK)
            for (int64_t r = 0; r < call.repeat; ++r) {
                d_of_keys = d_biases + r * bias_row();
                if (distances) d_of_distances = distances + r * (call.keys + 2 * MARGIN) + MARGIN;
                block(g * call.repeat + r, first);
            }
        const float scale = 1 / std::sqrt(float(D));
        for (int64_t i = 0; i < memory; ++i) d_k[i] *= scale;
        const int64_t before = strip.halo_rows();
        std::copy(d_k, d_k + before * D, halo);
        std::copy(d_v, d_v + before * D, halo + before * D);
        for (int64_t key = strip.own; key < strip.high; ++key) {
            const int64_t at = strip.row(key) * D;
            std::copy(d_k + at, d_k + at + D, call.d_k.row(b, g, key));
            std::copy(d_v + at, d_v + at + D, call.d_v.row(b, g, key));
        }
        for (int64_t r = 0; call.key_bias && r < call.repeat; ++r) {
            const float* row = d_biases + r * bias_row();
            std::copy(row, row + before, halo + (2 * D + r) * before);
            std::copy(row + before, row + strip.rows(),
                      call.d_key_bias + call.per_key(b, g * call.repeat + r, strip.own));
        }
    }

    void block(int64_t h, int64_t first) {
        const int count = int(std::min<int64_t>(BLOCK, strip.end - first));
        const float scale = 1 / std::sqrt(float(D));
        query_rows<D>(call.q, b, h, first, count, scale * LOG2E, q_rows);
        transpose<D, BLOCK>(q_rows, q_lanes, BLOCK);
        query_rows<D>(call.q, b, h, first, count, 1.0f, q_rows);
        query_rows<D>(call.d_out, b, h, first, count, 1.0f, d_rows);
        transpose<D, BLOCK>(d_rows, d_lanes, BLOCK);
        per_query(h, first, count);
        const Biases biases(call, tables, b, h, first, count);
        std::fill(d_q, d_q + BLOCK * D, 0.0f);
        for (int part = 0; part < PARTS; ++part) {
            Segment segment{};
            if (!find_segment(call, Part(part), b, first, count, segment)) continue;
            for (int chunk = segment.begin; chunk < segment.end; chunk += CHUNK)
                attend(first, chunk, std::min(CHUNK, segment.end - chunk), count, segment, biases);
        }
        for (int i = 0; i < count; ++i) {
            float* to = call.d_q.row(b, h, first + i);
            for (int d = 0; d < D; d += LANES) store(to + d, load(d_q + i * D + d) * scale);
        }
        if (call.ring_log_weight)
            std::copy(d_bias, d_bias + count, call.d_ring_log_weight + call.per_query(b, h, first));
    }

    void per_query(int64_t h, int64_t first, int count) {
        const int64_t at = call.per_query(b, h, first);
        for (int i = 0; i < BLOCK; ++i) lse[i] = delta[i] = bias[i] = d_bias[i] = 0;
        for (int i = 0; i < count; ++i) {
            const float* out = call.out.row(b, h, first + i);
            vec dot{};
            for (int d = 0; d < D; d += LANES) dot += load(out + d) * load(d_rows + i * D + d);
            lse[i] = call.lse[at + i] * LOG2E;
            if (lse[i] == -__builtin_inff()) lse[i] = __builtin_inff();  // it saw no key, so all weights are 0
            delta[i] = sum(dot) - (call.d_lse ? call.d_lse[at + i] : 0.0f);
            if (call.ring_log_weight) bias[i] = call.ring_log_weight[at + i] * LOG2E;
        }
    }

    void attend(int64_t first, int chunk, int keys, int queries, const Segment& segment,
                const Biases& biases) {
        const float* k = key_rows<D>(call.k, b, g, chunk, keys, call.keys, k_room);
        const float* v = key_rows<D>(call.v, b, g, chunk, keys, call.keys, v_room);
        for_panels<BLOCK>(queries, [&](int lane, auto n) {
            const Rows seen(segment, lane, n() * LANES, chunk, keys);
            biases.choose(
                [&](const auto& of) { scores<D, n()>(of, k, q_lanes, p, seen, segment, lane, chunk); });
            for (int r = seen.begin; r < seen.end; r += ROWS)
                product<n(), D, 1, BLOCK, false>(v + r * D, d_lanes + lane, d_s + r * BLOCK + lane, BLOCK, D);
            differentiate<n()>(seen, segment, lane);
            if (call.key_bias) add_to_keys<n()>(seen, lane, d_of_keys + strip.row(chunk));
            if (d_of_distances)
                add_to_distances<n()>(seen, lane, d_of_distances + call.own_key(first) + lane - chunk);
            clear_rest<n()>(p, seen, lane, keys);
            clear_rest<n()>(d_s, seen, lane, keys);
        });
        const int64_t at = strip.row(chunk) * D;
        add_over_queries<D>(p, d_rows, d_v + at, segment, queries, chunk, keys);
        add_over_queries<D>(d_s, q_rows, d_k + at, segment, queries, chunk, keys);
        add_over_keys<D>(d_s, k, d_q, segment, queries, chunk, keys);
    }

    // Scores become probabilities, and their gradients (in d_s so far: those of the probabilities) follow.
    template <int N>
    HEADGATE_INLINE void differentiate(const Rows& seen, const Segment& segment, int lane) {
        vec shift[N], less[N], sum[N];
        for (int j = 0; j < N; ++j) {
            const int at = lane + j * LANES;
            shift[j] = load(lse + at) - (segment.ring ? load(bias + at) : vec{});
            less[j] = load(delta + at);
            sum[j] = vec{};
        }
        for (int r = seen.begin; r < seen.end; ++r)
            for (int j = 0; j < N; ++j) {
                const int at = r * BLOCK + lane + j * LANES;
                const vec weight = exp2(load(p + at) - shift[j]);
                const vec gradient = weight * (load(d_s + at) - less[j]);
                store(p + at, weight);
                store(d_s + at, gradient);
                sum[j] += gradient;
            }
        if (segment.ring)
            for (int j = 0; j < N; ++j) {
                const int at = lane + j * LANES;
                store(d_bias + at, load(d_bias + at) + sum[j]);
            }
    }

    // Of each key, the sum over the panel's queries.
    template <int N>
    HEADGATE_INLINE void add_to_keys(const Rows& seen, int lane, float* to) {
        for (int r = seen.begin; r < seen.end; r += LANES) {
            vec parts[LANES];
            for (int i = 0; i < LANES; ++i) {
                parts[i] = vec{};
                for (int j = 0; j < N && r + i < seen.end; ++j)
                    parts[i] += load(d_s + (r + i) * BLOCK + lane + j * LANES);
            }
            store(to + r, load(to + r) + lane_sums(parts));
        }
    }

    // Of each distance, the sum over a diagonal: a row of the panel lies one place before the row above it.
    // Rows that follow each other here are LANES apart, so that none waits for what the last one wrote.
    template <int N>
    HEADGATE_INLINE void add_to_distances(const Rows& seen, int lane, float* to) {
        for (int first = seen.begin; first < std::min(seen.end, seen.begin + N * LANES); ++first)
            for (int r = first; r < seen.end; r += N * LANES)
                for (int j = 0; j < N; ++j) {
                    float* at = to - r + j * LANES;
                    store(at, load(at) + load(d_s + r * BLOCK + lane + j * LANES));
                }
    }
};

// Floats of a halo for each of its keys.
int64_t halo_row(const SpanCall& call) { return 2 * call.width + (call.key_bias ? call.repeat : 0); }

// The halos of later strips, added to the keys that this strip owns.
template <int D>
void add_halos(const SpanCall& call, const std::vector<Strip>& strips, size_t n, int64_t b, int64_t g,
               const float* halos) {
    const Strip& owner = strips[n];
    for (size_t m = n + 1; m < strips.size(); ++m) {
        const Strip& s = strips[m];
        const float* halo = halos + s.halo * halo_row(call);
        auto add = [&](int64_t from, int64_t to) {
            for (int64_t key = std::max(from, owner.own); key < std::min(to, owner.high); ++key) {
                const float* row = halo + s.row(key) * D;
                float *to_k = call.d_k.row(b, g, key), *to_v = call.d_v.row(b, g, key);
                for (int d = 0; d < D; d += LANES) {
                    store(to_k + d, load(to_k + d) + load(row + d));
                    store(to_v + d, load(to_v + d) + load(row + s.halo_rows() * D + d));
                }
                for (int64_t r = 0; call.key_bias && r < call.repeat; ++r)
                    call.d_key_bias[call.per_key(b, g * call.repeat + r, key)] +=
                        halo[(2 * D + r) * s.halo_rows() + s.row(key)];
            }
        };
        add(0, s.first);
        add(s.low, s.own);
    }
}

// A head's gradient by distance: the tables of all strips and sequences, (B,G,strips,repeat,...), added.
void add_distances(const SpanCall& call, int64_t cuts, int64_t h, const float* tables) {
    float* to = call.d_distance_bias + h * call.distances;
    std::fill(to, to + call.distances, 0.0f);
    for (int64_t b = 0; b < call.batch; ++b)
        for (int64_t n = 0; n < cuts; ++n) {
            const int64_t strip = (b * call.groups + h / call.repeat) * cuts + n;
            const float* row =
                tables + (strip * call.repeat + h % call.repeat) * (call.keys + 2 * MARGIN) + MARGIN;
            for (int64_t d = 0; d < call.keys; ++d) to[d] += row[d];
        }
}

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_span_backward(
    const headgate::SpanCall* call) {
    using namespace headgate;
    const std::vector<Strip> strips = cut(*call);
    const int64_t pairs = call->batch * call->groups, cuts = int64_t(strips.size());
    // Of one head's strips, in floats.
    const int64_t halo = (strips.back().halo + strips.back().halo_rows()) * halo_row(*call);
    const Tables tables(*call);
    const int64_t table = call->distance_bias ? call->repeat * (call->keys + 2 * MARGIN) : 0;
    std::vector<float> distances(size_t(pairs * cuts * table));
    float* halos = allocate(size_t(pairs * halo));
    for_width(call->width, [&](auto width) {
        constexpr int D = width();
        parallel_for(pairs * cuts, int(call->threads), [&](int64_t item) {
            const int64_t pair = item / cuts, b = pair / call->groups, g = pair % call->groups;
            const Strip& strip = strips[item % cuts];
            Backward<D>(*call, strip, b, g, tables)
                .run(halos + pair * halo + strip.halo * halo_row(*call),
                     table ? distances.data() + item * table : nullptr);
        });
        if (cuts > 1)
            parallel_for(pairs * cuts, int(call->threads), [&](int64_t item) {
                const int64_t pair = item / cuts, b = pair / call->groups, g = pair % call->groups;
                add_halos<D>(*call, strips, size_t(item % cuts), b, g, halos + pair * halo);
            });
    });
    if (table)
        parallel_for(call->heads(), int(call->threads),
                     [&](int64_t h) { add_distances(*call, cuts, h, distances.data()); });
    std::free(halos);
}
