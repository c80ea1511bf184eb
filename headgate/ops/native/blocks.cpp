// Attention over chosen blocks of keys, and over one summary of every block.
//
// The queries of a head are grouped by the block they chose, so that a tile of them shares its keys and all work
// is matrix products. What a query has seen so far, a maximum, a sum and an output, waits beside the tiles and
// is merged with each; the blocks come in their order, so no result depends on which queries share a tile.
// Summaries need no grouping: a tile is then a run of queries, each with the blocks before its own.
//
// With a window beside the choice there are two branches, each a softmax of its own, and their sum weighed by
// gates. Most keys of the window may be chosen too: a block that both branches see whole is then computed once.
//
// Backward: a part, some queries with all heads that share keys, adds up gradients of all keys in its own
// memory, and the parts are added in their order. Their number follows the shapes alone.
#include "parallel.h"
#include "span.h"

#include <cmath>

namespace headgate {

// Mirrored by a ctypes.Structure in blocks_native.py.
struct BlocksCall {
    SpanCall span;
    const int64_t* chosen;  // (B,H,Tq,slots), -1 for none
    int64_t slots, block, offset, summaries;  // offset: the first query's position; summaries: the keys are such
    // The second branch. With it lse, gates and d_gates are (2,B,H,Tq), and the branches' outputs stand apart.
    int64_t window;  // < 0: none
    View branch_out[2];
    const float* gates;
    float* d_gates;

    int branches() const { return window < 0 ? 1 : 2; }
    int64_t per_query(int branch, int64_t b, int64_t h, int64_t t) const {
        return branch * span.batch * span.heads() * span.queries + span.per_query(b, h, t);
    }
};

namespace {

constexpr int64_t ITEMS = 8;  // pieces of work there should be at least
constexpr int64_t STRIP = 1024;  // queries at a time: what waits beside their tiles stays in a core's cache

// Which branches a tile's keys belong to.
enum Kind { CHOSEN, WINDOW, BOTH, KINDS };

// Queries that share keys, side by side in the lanes.
struct Tile {
    Kind kind;
    int count;
    int32_t query[BLOCK];  // counted from the first of the strip
    Segment segment;
};

// The queries [begin, end) of one head.
struct Strip {
    const BlocksCall& of;
    const int64_t b, h, begin, end;
    int64_t size() const { return end - begin; }
    int64_t position(int64_t i) const { return of.offset + begin + i; }
    int64_t own(int64_t i) const { return position(i) / of.block; }

    // work(tile), the tiles of earlier keys first.
    template <class Work>
    void each(const Work& work) const {
        if (of.summaries)
            by_position(work);
        else
            by_block(work);
    }

    template <class Work>
    void by_position(const Work& work) const {
        for (int64_t first = 0; first < size(); first += BLOCK) {
            const int count = int(std::min<int64_t>(BLOCK, size() - first));
            int32_t queries[BLOCK];
            for (int i = 0; i < count; ++i) queries[i] = int32_t(first + i);
            emit(work, CHOSEN, 0, queries, count, [&](int32_t i) { return Keys{0, int32_t(own(i))}; });
        }
    }

    template <class Work>
    void by_block(const Work& work) const {
        // Sorted by counting, into a list for each block and kind. A block's own queries stand before all others that
        // see it, so the first and the last key that a query sees of it rise along the list.
        const int64_t kinds = of.window < 0 ? 1 : KINDS, blocks = own(size() - 1) + 1;
        const int64_t in_window = of.window < 0 ? 0 : std::min(blocks, of.window / of.block + 2);
        const size_t most = size_t(size() * (of.slots + 1 + in_window)), count = size_t(size());
        std::vector<int32_t> lists(most), ends(count), first(size_t(blocks * kinds + 1), 0);
        std::vector<uint8_t> is_chosen(size_t(blocks), 0);
        int32_t* end = lists.data();
        for (int64_t i = 0; i < size(); ++i) {
            end = lists_of(i, kinds, is_chosen.data(), end);
            ends[i] = int32_t(end - lists.data());
        }
        for (int32_t at = 0; at < ends.back(); ++at) ++first[lists[at] + 1];
        for (size_t n = 1; n < first.size(); ++n) first[n] += first[n - 1];
        std::vector<int32_t> next(first.begin(), first.end() - 1), sorted(lists.size());
        for (int32_t i = 0, at = 0; i < size(); ++i)
            for (; at < ends[i]; ++at) sorted[next[lists[at]]++] = i;
        const int32_t origin = int32_t(position(0));
        for (size_t n = 0; n + 1 < first.size(); ++n) {
            const Kind kind = Kind(n % kinds);
            const int32_t begins = int32_t(int64_t(n) / kinds * of.block), ends = begins + int32_t(of.block);
            // How far back a query sees: to the first key where the block is chosen.
            const int64_t all = position(size());
            const int32_t reach = int32_t(kind == WINDOW ? std::min(of.window, all) : all);
            for (int at = first[n]; at < first[n + 1]; at += BLOCK)
                emit(work, kind, begins, sorted.data() + at, std::min(BLOCK, first[n + 1] - at), [&](int32_t i) {
                    return Keys{std::max(begins, origin + i - reach), std::min(ends, origin + i + 1)};
                });
        }
    }

    // Writes down the lists that a query is in, n * kinds + kind for a block n, and returns their end.
    int32_t* lists_of(int64_t i, int64_t kinds, uint8_t* is_chosen, int32_t* to) const {
        const int64_t* row = of.chosen + of.span.per_query(b, h, begin + i) * of.slots;
        const int64_t last = own(i);
        // Blocks from `whole` on are in the window whole, and those from `part` on in part.
        const int64_t reach = of.window < 0 ? position(i) + 1 : std::max<int64_t>(0, position(i) - of.window);
        const int64_t part = reach / of.block, whole = (reach + of.block - 1) / of.block;
        auto choose = [&](int64_t n) {
            *to++ = int32_t(n * kinds + (n >= whole ? BOTH : CHOSEN));
            is_chosen[n] = n >= whole;
        };
        for (int64_t n = 0; n < of.slots; ++n)
            if (row[n] >= 0 && row[n] < last) choose(row[n]);
        choose(last);
        for (int64_t n = part; n <= last && of.window >= 0; ++n) {
            *to = int32_t(n * kinds + WINDOW);
            to += !is_chosen[n];  // without a branch: whether it is chosen cannot be predicted
            is_chosen[n] = 0;
        }
        return to;
    }

    struct Keys {
        int32_t lo, hi;
    };

    template <class Work, class KeysOf>
    HEADGATE_INLINE static void emit(const Work& work, Kind kind, int32_t begins, const int32_t* queries, int count,
                                     const KeysOf& keys_of) {
        Tile tile;
        tile.kind = kind, tile.count = count;
        Segment& s = tile.segment;
        for (int i = 0; i < count; ++i) {
            const Keys keys = keys_of(queries[i]);
            tile.query[i] = queries[i], s.lo[i] = keys.lo, s.hi[i] = keys.hi;
        }
        s.begin = begins, s.end = s.hi[count - 1], s.ring = false;
        for (int i = count; i < BLOCK; ++i) tile.query[i] = tile.query[count - 1], s.lo[i] = s.hi[i] = s.end;
        if (s.begin < s.end) work(tile);
    }
};

template <int D>
void copy_rows(const View& view, const Strip& strip, float factor, float* to) {
    for (int64_t i = 0; i < strip.size(); ++i) {
        const float* in = view.row(strip.b, strip.h, strip.begin + i);
        for (int d = 0; d < D; d += LANES) store(to + i * D + d, load(in + d) * factor);
    }
}

// A tile's queries in lanes, and, where `rows` is given, as rows.
template <int D>
void gather(const float* from, const Tile& tile, float* lanes, float* rows) {
    for (int i = 0; i < tile.count; i += LANES)
        for (int d = 0; d < D; d += LANES) {
            vec part[LANES];
            for (int r = 0; r < LANES; ++r) part[r] = load(from + tile.query[i + r] * D + d);
            if (rows)
                for (int r = 0; r < LANES; ++r) store(rows + (i + r) * D + d, part[r]);
            exchange_blocks<1>(part);
            for (int r = 0; r < LANES; ++r) store(lanes + (d + r) * BLOCK + i, part[r]);
        }
}

// work(lane, Vectors<N>) for the lanes of a tile: few queries take a narrow panel.
template <class Work>
HEADGATE_INLINE void for_lanes(int count, const Work& work) {
    if constexpr (BLOCK < PANEL) {
        if (count <= LANES) return work(0, Vectors<1>());
        if (count <= 2 * LANES) return work(0, Vectors<2>());
    }
    for_panels<BLOCK>(count, work);
}

// The keys of a chunk as rows. Tiles that follow each other share them.
template <int D>
class KeyRows {
public:
    explicit KeyRows(float* room) : room_(room) {}
    const float* of(const View& view, int64_t b, int64_t g, int64_t first, int count, int64_t keys) {
        if (first == first_ && count <= count_) return rows_;
        first_ = first, count_ = count;
        return rows_ = key_rows<D>(view, b, g, first, count, keys, room_);
    }

private:
    float* room_;
    const float* rows_ = nullptr;
    int64_t first_ = -1;
    int count_ = 0;
};

template <int D>
struct Forward {
    const Strip strip;
    const SpanCall& call;
    const int64_t g;
    float *q, *out, *top, *total;  // of all queries, but for q once for each kind of tile
    float *q_lanes, *fresh, *s, *tops, *totals, *shrink;  // of a tile
    KeyRows<D> k_rows{nullptr}, v_rows{nullptr};

    explicit Forward(const Strip& of) : strip(of), call(of.of.span), g(of.h / of.of.span.repeat) {
        const size_t n = size_t(of.size()), kinds = of.of.window < 0 ? 1 : KINDS, tile = BLOCK * D;
        Pieces pieces(Scratch::of_thread().floats((1 + kinds) * n * D + 2 * Pieces::rounded(kinds * n) + 2 * tile +
                                                  CHUNK * (BLOCK + 2 * D) + 3 * BLOCK));
        q = pieces.take(n * D), out = pieces.take(kinds * n * D);
        top = pieces.take(kinds * n), total = pieces.take(kinds * n);
        q_lanes = pieces.take(tile), fresh = pieces.take(tile);
        s = pieces.take(CHUNK * BLOCK);
        k_rows = KeyRows<D>(pieces.take(CHUNK * D)), v_rows = KeyRows<D>(pieces.take(CHUNK * D));
        tops = pieces.take(BLOCK), totals = pieces.take(BLOCK), shrink = pieces.take(BLOCK);
    }

    void run() {
        copy_rows<D>(call.q, strip, LOG2E / std::sqrt(float(D)), q);
        const int64_t size = strip.size(), sums = strip.of.window < 0 ? size : KINDS * size;
        std::fill(out, out + sums * D, 0.0f);
        std::fill(top, top + sums, LOWEST);
        std::fill(total, total + sums, 0.0f);
        strip.each([&](const Tile& tile) {
            gather<D>(q, tile, q_lanes, nullptr);
            const Segment& segment = tile.segment;
            for (int chunk = segment.begin; chunk < segment.end; chunk += CHUNK)
                attend(tile, chunk, std::min(CHUNK, segment.end - chunk));
        });
        for (int64_t i = 0; i < size; ++i)
            if (strip.of.window < 0)
                finish(i, CHOSEN, call.out);
            else
                finish_branches(i);
    }

    void finish(int64_t i, int branch, const View& view) {
        const int64_t at = branch * strip.size() + i, t = strip.begin + i;
        const bool none = total[at] == 0;  // no block before its own
        const float factor = none ? 0.0f : 1 / total[at];
        call.lse[strip.of.per_query(branch, strip.b, strip.h, t)] =
            none ? -__builtin_inff() : (top[at] + log2(broadcast(total[at]))[0]) * LN2;
        float* to = view.row(strip.b, strip.h, t);
        for (int d = 0; d < D; d += LANES) store(to + d, load(out + at * D + d) * factor);
    }

    // What both branches see is added to what each sees alone.
    void finish_branches(int64_t i) {
        const int64_t both = BOTH * strip.size() + i, t = strip.begin + i;
        const float* results[2];
        float gates[2];
        for (const int branch : {CHOSEN, WINDOW}) {
            const int64_t at = branch * strip.size() + i;
            const float highest = std::max(top[at], top[both]);
            const float alone = exp2(broadcast(top[at] - highest))[0], shared = exp2(broadcast(top[both] - highest))[0];
            top[at] = highest, total[at] = total[at] * alone + total[both] * shared;
            for (int d = 0; d < D; d += LANES)
                store(out + at * D + d, load(out + at * D + d) * alone + load(out + both * D + d) * shared);
            finish(i, branch, strip.of.branch_out[branch]);
            results[branch] = strip.of.branch_out[branch].row(strip.b, strip.h, t);
            gates[branch] = strip.of.gates[strip.of.per_query(branch, strip.b, strip.h, t)];
        }
        float* to = call.out.row(strip.b, strip.h, t);
        for (int d = 0; d < D; d += LANES)
            store(to + d, load(results[0] + d) * gates[0] + load(results[1] + d) * gates[1]);
    }

    void attend(const Tile& tile, int chunk, int keys) {
        const float* k = k_rows.of(call.k, strip.b, g, chunk, keys, call.keys);
        const float* v = v_rows.of(call.v, strip.b, g, chunk, keys, call.keys);
        const int64_t kind = tile.kind * strip.size();
        for (int i = 0; i < BLOCK; ++i) tops[i] = top[kind + tile.query[i]], totals[i] = total[kind + tile.query[i]];
        for_lanes(tile.count, [&](int lane, auto n) {
            const Rows seen(tile.segment, lane, n() * LANES, chunk, keys);
            scores<D, n()>(NoBias(), k, q_lanes, s, seen, tile.segment, lane, chunk);
            weigh<n()>(seen, lane);
            clear_rest<n()>(s, seen, lane, keys);
        });
        add_over_keys<D, false>(s, v, fresh, tile.segment, tile.count, chunk, keys);
        for (int i = 0; i < tile.count; ++i) {
            const int64_t at = kind + tile.query[i];
            top[at] = tops[i], total[at] = totals[i];
            for (int d = 0; d < D; d += LANES)
                store(out + at * D + d, load(out + at * D + d) * shrink[i] + load(fresh + i * D + d));
        }
    }

    // Scores become weights relative to the running maximum.
    template <int N>
    HEADGATE_INLINE void weigh(const Rows& seen, int lane) {
        vec highest[N], sum[N];
        for (int j = 0; j < N; ++j) highest[j] = load(tops + lane + j * LANES), sum[j] = vec{};
        for (int r = seen.begin; r < seen.end; ++r)
            for (int j = 0; j < N; ++j) highest[j] = max(load(s + r * BLOCK + lane + j * LANES), highest[j]);
        for (int r = seen.begin; r < seen.end; ++r)
            for (int j = 0; j < N; ++j) {
                float* p = s + r * BLOCK + lane + j * LANES;
                const vec weight = exp2(load(p) - highest[j]);
                store(p, weight);
                sum[j] += weight;
            }
        for (int j = 0; j < N; ++j) {
            const int at = lane + j * LANES;
            const vec factor = exp2(load(tops + at) - highest[j]);
            store(shrink + at, factor);
            store(totals + at, load(totals + at) * factor + sum[j]);
            store(tops + at, highest[j]);
        }
    }
};

template <int D>
struct Backward {
    const BlocksCall& of;
    const SpanCall& call;
    const int64_t b, g;
    float *d_k, *d_v;  // of all keys, and ROWS more; d_k in units of log 2
    float *q, *d_out, *d_q;  // of all queries of a strip
    // Of all queries for each kind of tile: p = exp2(score - shift), weight = p * times, and the score's gradient is
    // p * (d_weight * times - less).
    float *shift, *times, *less;
    float *q_rows, *q_lanes, *d_rows, *d_lanes, *fresh, *p, *d_s;  // of a tile
    float *shifts, *factors, *losses;  // of a tile
    KeyRows<D> k_rows{nullptr}, v_rows{nullptr};

    Backward(const BlocksCall& o, int64_t batch, int64_t group, int64_t queries, float* gradients)
        : of(o), call(o.span), b(batch), g(group) {
        const size_t n = size_t(queries), all = n * D, tile = BLOCK * D, sums = (of.window < 0 ? 1 : KINDS) * n;
        d_k = gradients, d_v = gradients + (call.keys + ROWS) * D;
        Pieces pieces(Scratch::of_thread().floats(3 * all + 3 * Pieces::rounded(sums) + 5 * tile +
                                                  2 * CHUNK * (BLOCK + D) + 3 * BLOCK));
        q = pieces.take(all), d_out = pieces.take(all), d_q = pieces.take(all);
        shift = pieces.take(sums), times = pieces.take(sums), less = pieces.take(sums);
        q_rows = pieces.take(tile), q_lanes = pieces.take(tile), d_rows = pieces.take(tile);
        d_lanes = pieces.take(tile), fresh = pieces.take(tile);
        p = pieces.take(CHUNK * BLOCK), d_s = pieces.take(CHUNK * BLOCK);
        k_rows = KeyRows<D>(pieces.take(CHUNK * D)), v_rows = KeyRows<D>(pieces.take(CHUNK * D));
        shifts = pieces.take(BLOCK), factors = pieces.take(BLOCK), losses = pieces.take(BLOCK);
    }

    void strip(const Strip& strip) {
        const float scale = 1 / std::sqrt(float(D));
        copy_rows<D>(call.q, strip, LOG2E * scale, q);
        copy_rows<D>(call.d_out, strip, 1.0f, d_out);
        std::fill(d_q, d_q + strip.size() * D, 0.0f);
        for (int64_t i = 0; i < strip.size(); ++i) per_query(strip, i);
        strip.each([&](const Tile& tile) {
            gather<D>(q, tile, q_lanes, q_rows);
            gather<D>(d_out, tile, d_lanes, d_rows);
            for (int i = 0; i < BLOCK; ++i) {
                const int64_t at = tile.kind * strip.size() + tile.query[i];
                shifts[i] = shift[at], factors[i] = times[at], losses[i] = less[at];
            }
            const Segment& segment = tile.segment;
            for (int chunk = segment.begin; chunk < segment.end; chunk += CHUNK)
                attend(tile, chunk, std::min(CHUNK, segment.end - chunk));
        });
        for (int64_t i = 0; i < strip.size(); ++i) {
            float* to = call.d_q.row(b, strip.h, strip.begin + i);
            for (int d = 0; d < D; d += LANES) store(to + d, load(d_q + i * D + d) * scale);
        }
    }

    void per_query(const Strip& strip, int64_t i) {
        for (int branch = 0; branch < of.branches(); ++branch) {
            const View& view = of.window < 0 ? call.out : of.branch_out[branch];
            const float* out = view.row(b, strip.h, strip.begin + i);
            vec dot{};
            for (int d = 0; d < D; d += LANES) dot += load(out + d) * load(d_out + i * D + d);
            const int64_t from = of.per_query(branch, b, strip.h, strip.begin + i);
            const int64_t at = branch * strip.size() + i;
            const float lse = call.lse[from], delta = sum(dot);
            shift[at] = lse == -__builtin_inff() ? 0.0f : lse * LOG2E;
            times[at] = of.window < 0 ? 1.0f : of.gates[from];
            less[at] = times[at] * delta;
            if (of.window >= 0) of.d_gates[from] = delta;
        }
        if (of.window < 0) return;
        // What both see has two weights, whose ratio is the same for all keys. The larger one is taken times this,
        // so that none grows beyond 1.
        const int64_t chosen = i, window = strip.size() + i, both = 2 * strip.size() + i;
        shift[both] = std::min(shift[chosen], shift[window]);
        times[both] = less[both] = 0;
        for (const int64_t at : {chosen, window}) {
            const float ratio = exp2(broadcast(shift[both] - shift[at]))[0];
            times[both] += ratio * times[at], less[both] += ratio * less[at];
        }
    }

    void attend(const Tile& tile, int chunk, int keys) {
        const float* k = k_rows.of(call.k, b, g, chunk, keys, call.keys);
        const float* v = v_rows.of(call.v, b, g, chunk, keys, call.keys);
        const Segment& segment = tile.segment;
        for_lanes(tile.count, [&](int lane, auto n) {
            const Rows seen(segment, lane, n() * LANES, chunk, keys);
            scores<D, n()>(NoBias(), k, q_lanes, p, seen, segment, lane, chunk);
            for (int r = seen.begin; r < seen.end; r += ROWS)
                product<n(), D, 1, BLOCK, false>(v + r * D, d_lanes + lane, d_s + r * BLOCK + lane, BLOCK, D);
            differentiate<n()>(seen, lane);
            clear_rest<n()>(p, seen, lane, keys);
            clear_rest<n()>(d_s, seen, lane, keys);
        });
        add_over_queries<D>(p, d_rows, d_v + chunk * D, segment, tile.count, chunk, keys);
        add_over_queries<D>(d_s, q_rows, d_k + chunk * D, segment, tile.count, chunk, keys);
        add_over_keys<D, false>(d_s, k, fresh, segment, tile.count, chunk, keys);
        for (int i = 0; i < tile.count; ++i) {
            float* to = d_q + tile.query[i] * D;
            for (int d = 0; d < D; d += LANES) store(to + d, load(to + d) + load(fresh + i * D + d));
        }
    }

    // Scores become weights, and products with d_out the scores' gradients.
    template <int N>
    HEADGATE_INLINE void differentiate(const Rows& seen, int lane) {
        vec minus[N], factor[N], loss[N];
        for (int j = 0; j < N; ++j) {
            const int at = lane + j * LANES;
            minus[j] = load(shifts + at), factor[j] = load(factors + at), loss[j] = load(losses + at);
        }
        for (int r = seen.begin; r < seen.end; ++r)
            for (int j = 0; j < N; ++j) {
                const int at = r * BLOCK + lane + j * LANES;
                const vec weight = exp2(load(p + at) - minus[j]);
                store(p + at, weight * factor[j]);
                store(d_s + at, weight * (load(d_s + at) * factor[j] - loss[j]));
            }
    }
};

// One query alone: head width lies in the vector lanes, and time is what reading its keys takes.
template <int D>
void attend_one(const BlocksCall& of, int64_t b, int64_t h, int64_t t) {
    const SpanCall& call = of.span;
    const int64_t g = h / call.repeat, position = of.offset + t, own = position / of.block;
    const float* q = call.q.row(b, h, t);
    std::vector<int32_t> keys;
    auto see = [&](int64_t block, int64_t end) {
        for (int64_t key = block * of.block; key < end; ++key) keys.push_back(int32_t(key));
    };
    const int64_t* chosen = of.chosen + call.per_query(b, h, t) * of.slots;
    for (int64_t n = 0; n < of.slots; ++n)
        if (chosen[n] >= 0 && chosen[n] < own) see(chosen[n], (chosen[n] + 1) * of.block);
    see(own, position + 1);
    const int count = int(keys.size());
    keys.resize(size_t(count + LANES), keys.back());
    float* s = Scratch::of_thread().floats(size_t(count + LANES));
    vec highest = broadcast(LOWEST);
    for (int j = 0; j < count; j += LANES) {
        vec parts[LANES];
        for (int r = 0; r < LANES; ++r) {
            const float* key = call.k.row(b, g, keys[j + r]);
            parts[r] = load(q) * load(key);
            for (int d = LANES; d < D; d += LANES) parts[r] += load(q + d) * load(key + d);
        }
        vec score = lane_sums(parts) * (LOG2E / std::sqrt(float(D)));
        for (int r = count - j; r < LANES; ++r) score[r] = -__builtin_inff();
        store(s + j, score);
        highest = max(score, highest);
    }
    float top = LOWEST;
    for (int r = 0; r < LANES; ++r) top = std::max(top, highest[r]);
    vec total{}, out[D / LANES] = {};
    for (int j = 0; j < count; j += LANES) {
        const vec weight = exp2(load(s + j) - top);
        store(s + j, weight);
        total += weight;
    }
    for (int j = 0; j < count; ++j) {
        const float* v = call.v.row(b, g, keys[j]);
        for (int d = 0; d < D / LANES; ++d) out[d] += s[j] * load(v + d * LANES);
    }
    const float all = sum(total);
    float* to = call.out.row(b, h, t);
    for (int d = 0; d < D / LANES; ++d) store(to + d * LANES, out[d] / all);
    call.lse[call.per_query(b, h, t)] = (top + log2(broadcast(all))[0]) * LN2;
}

// Where the n-th of `parts` strips of queries begins.
int64_t cut(const SpanCall& call, int64_t n, int64_t parts) {
    return n == parts ? call.queries : call.queries * n / parts / BLOCK * BLOCK;
}

int64_t parts_for(const SpanCall& call, int64_t units) {
    return std::clamp<int64_t>((ITEMS + units - 1) / units, 1, std::max<int64_t>(1, call.queries / 256));
}

}  // namespace
}  // namespace headgate

extern "C" __attribute__((visibility("default"))) void headgate_blocks_forward(
    const headgate::BlocksCall* of) {
    using namespace headgate;
    const SpanCall& call = of->span;
    const int64_t heads = call.heads(), units = call.batch * heads;
    const int64_t parts = std::max(parts_for(call, units), (call.queries + STRIP - 1) / STRIP);
    const bool few = !of->summaries && of->window < 0 && call.queries <= FEW;
    for_width(call.width, [&](auto width) {
        constexpr int D = width();
        if (few)
            return parallel_for(units * call.queries, int(call.threads), [&](int64_t item) {
                const int64_t unit = item / call.queries;
                attend_one<D>(*of, unit / heads, unit % heads, item % call.queries);
            });
        parallel_for(units * parts, int(call.threads), [&](int64_t item) {
            const int64_t unit = item / parts, part = parts - 1 - item % parts;
            const Strip strip{*of, unit / heads, unit % heads, cut(call, part, parts), cut(call, part + 1, parts)};
            if (strip.size() > 0) Forward<D>(strip).run();
        });
    });
}

extern "C" __attribute__((visibility("default"))) void headgate_blocks_backward(
    const headgate::BlocksCall* of) {
    using namespace headgate;
    const SpanCall& call = of->span;
    const int64_t pairs = call.batch * call.groups, parts = parts_for(call, pairs);
    const int64_t rows = call.keys + ROWS, size = 2 * rows * call.width;
    float* sums = allocate(size_t(pairs * parts * size));
    for_width(call.width, [&](auto width) {
        constexpr int D = width();
        parallel_for(pairs * parts, int(call.threads), [&](int64_t item) {
            const int64_t pair = item / parts, b = pair / call.groups, g = pair % call.groups;
            const int64_t begin = cut(call, item % parts, parts), end = cut(call, item % parts + 1, parts);
            float* gradients = sums + item * size;
            std::fill(gradients, gradients + size, 0.0f);
            Backward<D> backward(*of, b, g, std::min(STRIP, end - begin), gradients);
            for (int64_t first = begin; first < end; first += STRIP)
                for (int64_t r = 0; r < call.repeat; ++r)
                    backward.strip({*of, b, g * call.repeat + r, first, std::min(first + STRIP, end)});
        });
        parallel_for(pairs, int(call.threads), [&](int64_t pair) {
            const float* in = sums + pair * parts * size;
            for (int64_t key = 0; key < call.keys; ++key)
                for (int d = 0; d < D; d += LANES) {
                    vec of_k{}, of_v{};
                    for (int64_t n = 0; n < parts; ++n) {
                        of_k += load(in + n * size + key * D + d);
                        of_v += load(in + n * size + (rows + key) * D + d);
                    }
                    store(call.d_k.row(pair / call.groups, pair % call.groups, key) + d, of_k * LN2);
                    store(call.d_v.row(pair / call.groups, pair % call.groups, key) + d, of_v);
                }
        });
    });
    std::free(sums);
}
