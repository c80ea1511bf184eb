// Pair-gated attention: the gate of a tile of pairs, s = sigmoid(w2 . gelu(query_half_i + key_half_j) + b2),
// on its way from the scores to what the softmax sees and back.
//
// M activations a pair are most of the work. Queries lie in lanes, as everywhere; a key's half is broadcast.
#pragma once

#include "span.h"

namespace headgate {

// Keys at a time: their activations hide one another's latency, and in the backward fit the nearest cache.
constexpr int GROUP = ROWS;

// gelu(z) = (z + |z| (1 - N)) / 2, N = 1 - tanh(u), u = sqrt(2/pi) (|z| + 0.044715 |z|^3): even in z but for
// z/2. N decays like a Gaussian, so its eighth root is nearly straight: a polynomial of degree 6 and three
// squarings give gelu to 2e-6 and, by tanh' = 1 - tanh^2, its slope to 8e-6. Beyond LIMIT, N is 2e-7 and goes
// on as a constant. Both halves are multiplied by UNIT beforehand: the polynomial's leading coefficient is
// then 1, and by Knuth's adaptation of coefficients (The Art of Computer Programming, 4.6.4) it costs three
// products. The constants come from benchmarks/fit_gelu.py.
constexpr float UNIT = 0.1851967947f, LIMIT = 5.2f * UNIT;
constexpr float A0 = -2.641454458f, A1 = 4.455580711f, A2 = 0.9701886773f;
constexpr float A3 = -4.275158882f, A4 = -4.769023895f, A5 = 1.012654066f;
constexpr float CUBE = 16.85055283f, LINE = 0.2556774592f;  // |z| du/d|z| = CUBE (x^3 + LINE x), x = UNIT |z|

// For x = UNIT z: value = 2 UNIT gelu(z), slope = (2 gelu'(z) - 1) / CUBE; the 1 is added to sums of slopes.
template <bool SLOPE>
HEADGATE_INLINE void activation(vec x, vec& value, vec& slope) {
    const ivec sign = broadcast(INT32_MIN);
    const vec size = (vec)((ivec)x & ~sign), a = min(size, broadcast(LIMIT));
    const vec square = (a + A0) * a + A1, cube = (a + A2) * square + A3;
    vec n = (cube + square + A4) * cube + A5;
    n *= n, n *= n, n *= n;
    const vec tanh = 1.0f - n;
    value = x + size * tanh;
    if (SLOPE) {
        const vec odd = (1 / CUBE - n * (1 / CUBE)) + (a * a + LINE) * a * (1.0f - tanh * tanh);
        slope = (vec)((ivec)odd ^ ((ivec)x & sign));
    }
}

struct Gate {
    vec open, closed, log2_open;  // s and 1 - s, each to its own last digit, and log2(s)
};

template <bool LOG>
HEADGATE_INLINE Gate gate_of(vec logit) {
    const vec t = logit * -LOG2E;
    const vec odds = exp2(min(broadcast(80.0f), t));  // up to here both s and 1 - s are normal numbers
    Gate gate{};
    gate.open = 1.0f / (1.0f + odds);
    gate.closed = odds * gate.open;
    if (LOG) gate.log2_open = -select(t > 24.0f, t, log2(1.0f + odds));
    return gate;
}

// A block of queries against a chunk of keys, [key][query]. Scores are in units of log2, -inf where a query
// does not see a key; rows outside of a vector's `seen` are not touched.
struct GateTile {
    const float *query_half, *key_half;  // [M][BLOCK] and [CHUNK][M], times UNIT
    const float* w2;                     // times 1 / (2 UNIT)
    float b2;
    int rows, vectors;
    Rows seen[BLOCK / LANES];
    float* scores;  // a; becomes the gated score in the forward, the probability in the backward

    const float *top, *share, *delta;  // per query: probability = share * 2^(score - top)
    float unit;                        // 1 / sqrt(D)
    float* d_scores;                   // gradient of the probability; becomes that of q.k
    float *d_query_half, *d_key_half;  // added up, and one sum per key: to be multiplied by UNIT CUBE w2
    vec *d_w2, *d_b2;                  // added up per lane, d_w2 to be multiplied by 1 / (2 UNIT)
};

// The gate's logits of GROUP keys and one vector of queries; the backward keeps the hidden layer and slopes.
template <int M, bool KEEP>
HEADGATE_INLINE void gate_logits(const GateTile& t, int row, int lane, vec* logits, vec (*values)[GROUP],
                                 vec (*slopes)[GROUP]) {
    const float* key_half = t.key_half + row * M;
    vec sums[GROUP];
    for (vec& sum : sums) sum = broadcast(t.b2);
    for (int m = 0; m < M; ++m) {
        const vec query_half = load(t.query_half + m * BLOCK + lane);
        vec value[GROUP], slope[GROUP];
        for (int c = 0; c < GROUP; ++c)
            activation<KEEP>(query_half + key_half[c * M + m], value[c], slope[c]);
        for (int c = 0; c < GROUP; ++c) {
            sums[c] += value[c] * t.w2[m];
            if (KEEP) values[m][c] = value[c], slopes[m][c] = slope[c];
        }
    }
    std::copy(sums, sums + GROUP, logits);
}

template <bool LOG>
HEADGATE_INLINE vec gated(vec score, const Gate& gate) {
    const vec open = LOG ? score + gate.log2_open : score * gate.open;
    return select(score < LOWEST, score, open);  // an unseen pair stays so, even if its gate is NaN
}

template <int M, bool LOG>
void gate_forward(const GateTile& t) {
    for (int row = 0; row < t.rows; row += GROUP)
        for (int v = 0; v < t.vectors; ++v) {
            if (row < t.seen[v].begin || row >= t.seen[v].end) continue;
            float* scores = t.scores + row * BLOCK + v * LANES;
            vec logits[GROUP];
            gate_logits<M, false>(t, row, v * LANES, logits, nullptr, nullptr);
            for (int c = 0; c < GROUP; ++c)
                store(scores + c * BLOCK, gated<LOG>(load(scores + c * BLOCK), gate_of<LOG>(logits[c])));
        }
}

// The sum over the lanes of each of LANES vectors.
template <int... I>
HEADGATE_INLINE vec sums_of(const vec* in, std::integer_sequence<int, I...>) {
    vec rows[LANES];
    std::copy(in, in + LANES, rows);
    for (int left = LANES / 2; left > 0; left /= 2)
        for (int i = 0; i < left; ++i)  // neighbours are added, those of two vectors together filling one
            rows[i] = __builtin_shufflevector(rows[2 * i], rows[2 * i + 1], 2 * I...) +
                      __builtin_shufflevector(rows[2 * i], rows[2 * i + 1], (2 * I + 1)...);
    return rows[0];
}

template <int M, bool LOG>
void gate_backward(const GateTile& t) {
    constexpr int SUMS = (GROUP * M + LANES - 1) / LANES * LANES;
    vec values[M][GROUP], slopes[M][GROUP], d_keys[SUMS];
    for (int row = 0; row < t.rows; row += GROUP) {
        std::fill(d_keys, d_keys + SUMS, vec{});
        vec d_key_logits[GROUP] = {};
        for (int v = 0; v < t.vectors; ++v) {
            if (row < t.seen[v].begin || row >= t.seen[v].end) continue;
            const int lane = v * LANES;
            float *scores = t.scores + row * BLOCK + lane, *d_scores = t.d_scores + row * BLOCK + lane;
            const vec top = load(t.top + lane), share = load(t.share + lane), delta = load(t.delta + lane);
            vec logits[GROUP], d_logits{};
            gate_logits<M, true>(t, row, lane, logits, values, slopes);
            for (int c = 0; c < GROUP; ++c) {
                const Gate gate = gate_of<LOG>(logits[c]);
                const vec score = load(scores + c * BLOCK);
                const vec probability = share * exp2(gated<LOG>(score, gate) - top);
                const vec d = probability * (load(d_scores + c * BLOCK) - delta);
                const vec d_score = LOG ? d : d * gate.open;
                vec d_logit = d_score * gate.closed;  // 0 where the score is -inf, and to stay so
                if (!LOG) d_logit *= max(broadcast(LOWEST), score) * LN2;
                store(scores + c * BLOCK, probability);
                store(d_scores + c * BLOCK, d_score * t.unit);
                d_logits += logits[c] = d_logit;
                d_key_logits[c] += d_logit;
            }
            *t.d_b2 += d_logits;
            for (int m = 0; m < M; ++m) {
                float* query = t.d_query_half + m * BLOCK + lane;
                vec d_query = load(query) + d_logits * (1 / CUBE), d_w2 = t.d_w2[m];
                for (int c = 0; c < GROUP; ++c) {
                    const vec d = logits[c] * slopes[m][c];
                    d_query += d;
                    d_keys[c * M + m] += d;
                    d_w2 += logits[c] * values[m][c];
                }
                store(query, d_query);
                t.d_w2[m] = d_w2;
            }
        }
        for (int i = 0; i < GROUP * M; ++i) d_keys[i] += d_key_logits[i / M] * (1 / CUBE);
        for (int i = 0; i < SUMS; i += LANES)
            store(t.d_key_half + row * M + i, sums_of(d_keys + i, std::make_integer_sequence<int, LANES>()));
    }
}

constexpr int MOST_HIDDEN = 32;
using GatePass = void (*)(const GateTile&);

template <bool LOG>
GatePass gate_pass(int64_t hidden, bool backward) {
    switch (hidden) {
        case 4: return backward ? gate_backward<4, LOG> : gate_forward<4, LOG>;
        case 8: return backward ? gate_backward<8, LOG> : gate_forward<8, LOG>;
        case 16: return backward ? gate_backward<16, LOG> : gate_forward<16, LOG>;
        default: return backward ? gate_backward<MOST_HIDDEN, LOG> : gate_forward<MOST_HIDDEN, LOG>;
    }
}

}  // namespace headgate
