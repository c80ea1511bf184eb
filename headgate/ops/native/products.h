// Matrix products on small tiles: the one inner loop of the attention kernels.
//
// A tile is ROWS x N vectors, held in registers: 12 of AVX2's 16, 24 of AVX-512's 32, the rest carrying one
// row of b and a broadcast of a. Strides are compile-time constants, so one loop serves plain and transposed
// operands alike.
#pragma once

#include "simd.h"

#include <type_traits>
#include <utility>

namespace headgate {

constexpr int ROWS = 6;
constexpr int WIDE = LANES == 16 ? 4 : 2;
constexpr int PANEL = WIDE * LANES;

template <int N>
using Vectors = std::integral_constant<int, N>;

// c[i][j] = bias(i,j,sum), or c[i][j] += sum, of the vectors sum over k < steps, at least one, of a(i,k) *
// b[k][j], where a(i,k) = a[i * A_ROW + k * A_STEP]. A bias comes last: small terms added to it would be lost.
template <int N, int A_ROW, int A_STEP, int B_STEP, bool ADD, class Bias>
HEADGATE_INLINE void biased_product(const Bias& bias, const float* a, const float* b, float* c, int64_t c_row,
                                    int64_t steps) {
    if (steps < 1) __builtin_unreachable();  // else the sums would pass through memory
    vec sum[ROWS][N];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < N; ++j) sum[i][j] = ADD ? load(c + i * c_row + j * LANES) : vec{};
#pragma GCC unroll 4
    for (int64_t k = 0; k < steps; ++k) {
        vec row[N];
        for (int j = 0; j < N; ++j) row[j] = load(b + k * B_STEP + j * LANES);
        for (int i = 0; i < ROWS; ++i) {
            const vec x = broadcast(a[i * A_ROW + k * A_STEP]);
            for (int j = 0; j < N; ++j) sum[i][j] += x * row[j];
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < N; ++j) store(c + i * c_row + j * LANES, bias(i, j, sum[i][j]));
}

// c[i][j] (+)= the sum alone.
template <int N, int A_ROW, int A_STEP, int B_STEP, bool ADD>
HEADGATE_INLINE void product(const float* a, const float* b, float* c, int64_t c_row, int64_t steps) {
    biased_product<N, A_ROW, A_STEP, B_STEP, ADD>([](int, int, vec sum) { return sum; }, a, b, c, c_row, steps);
}

// work(j, Vectors<N>) for columns j in panels of WIDE vectors, and of fewer at the end of WIDTH.
template <int WIDTH, class Work>
HEADGATE_INLINE void for_panels(int columns, const Work& work) {
    int j = 0;
    for (; j < columns && j + PANEL <= WIDTH; j += PANEL) work(j, Vectors<WIDE>());
    constexpr int LEFT = WIDTH % PANEL / LANES;
    if constexpr (LEFT > 0)
        if (j < columns) work(j, Vectors<LEFT>());
}

template <int S, int... I>
HEADGATE_INLINE void exchange(vec& a, vec& b, std::integer_sequence<int, I...>) {
    const vec low = __builtin_shufflevector(a, b, ((I & S) ? LANES + I - S : I)...);
    b = __builtin_shufflevector(a, b, ((I & S) ? LANES + I : I + S)...);
    a = low;
}

template <int S>
HEADGATE_INLINE void exchange_blocks(vec* rows) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, LANES>());
    if constexpr (2 * S < LANES) exchange_blocks<2 * S>(rows);
}

// Lane r is the sum over the lanes of parts[r]; the parts are lost.
HEADGATE_INLINE vec lane_sums(vec* parts) {
    exchange_blocks<1>(parts);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int r = 0; r < step; ++r) parts[r] += parts[r + step];
    return parts[0];
}

// out[d][i] = in[i][d] for `count` rows i, a multiple of LANES, and WIDTH columns d.
template <int WIDTH, int OUT_ROW>
inline void transpose(const float* in, float* out, int count) {
    for (int i = 0; i < count; i += LANES)
        for (int d = 0; d < WIDTH; d += LANES) {
            vec rows[LANES];
            for (int r = 0; r < LANES; ++r) rows[r] = load(in + (i + r) * WIDTH + d);
            exchange_blocks<1>(rows);
            for (int r = 0; r < LANES; ++r) store(out + (d + r) * OUT_ROW + i, rows[r]);
        }
}

}  // namespace headgate
