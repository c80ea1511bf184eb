// The vector type of the kernels, as wide as the instruction set the file is compiled for, and its functions.
//
// GCC's vector extensions (clang has them too) rather than intrinsics: one source serves AVX-512, AVX2 and
// plain builds (SSE2, NEON). Loads and stores are unaligned: on these machines they cost nothing when the
// address is not.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace headgate {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

#define HEADGATE_INLINE inline __attribute__((always_inline))

constexpr float LOG2E = 1.44269504088896340736f;
constexpr float LN2 = 0.693147180559945309417f;
constexpr float LOWEST = -3.402823466e+38f;  // finite, so that LOWEST - LOWEST is 0 and not NaN

HEADGATE_INLINE vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
HEADGATE_INLINE ivec load(const int32_t* p) {
    ivec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
HEADGATE_INLINE void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
HEADGATE_INLINE vec broadcast(float x) { return x - vec{}; }
HEADGATE_INLINE ivec broadcast(int32_t x) { return x - ivec{}; }

// Where an operand is NaN the result is b: callers put what must not get lost second. The instructions do
// exactly that, but GCC makes two of the plain expression.
#if defined(__AVX512F__)
HEADGATE_INLINE vec max(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
HEADGATE_INLINE vec min(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
HEADGATE_INLINE vec max(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
HEADGATE_INLINE vec min(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
HEADGATE_INLINE vec max(vec a, vec b) { return a > b ? a : b; }
HEADGATE_INLINE vec min(vec a, vec b) { return a < b ? a : b; }
#endif
HEADGATE_INLINE vec select(ivec mask, vec yes, vec no) { return mask ? yes : no; }

// A bit for every lane of a comparison.
HEADGATE_INLINE unsigned bits(ivec mask) {
#if defined(__AVX512F__)
    return unsigned(_mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512()));
#elif defined(__AVX__)
    return unsigned(_mm256_movemask_ps((__m256)mask));
#else
    unsigned found = 0;
    for (int i = 0; i < LANES; ++i) found |= unsigned(mask[i] < 0) << i;
    return found;
#endif
}

HEADGATE_INLINE float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

// 2^x by a degree-5 minimax polynomial that is exact at 0, relative error 2e-7. Below -126 (and at -inf) it
// is 0, above 128 it saturates, NaN stays NaN.
HEADGATE_INLINE vec exp2(vec x) {
    x = max(broadcast(-127.0f), x);
    x = min(broadcast(127.99999f), x);
    const vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vec shifted = x + magic;
    vec f = x - (shifted - magic);  // in [-1/2, 1/2]
    vec p = broadcast(1.326472714e-03f);
    p = p * f + broadcast(9.671512640e-03f);
    p = p * f + broadcast(5.550733743e-02f);
    p = p * f + broadcast(2.402224209e-01f);
    p = p * f + broadcast(6.931469776e-01f);
    p = p * f + broadcast(1.0f);
    ivec n = (ivec)shifted - (ivec)magic;  // round(x); at -127 the power below has the bits of 0
    return p * (vec)((n + 127) << 23);
}

// log2 of a positive normal number, error 1e-7 of the larger of 1 and the result.
HEADGATE_INLINE vec log2(vec x) {
    const ivec bits = (ivec)x;
    const ivec half = broadcast(int32_t(0x3f3504f3));  // sqrt(1/2): the mantissa lies from there to sqrt(2)
    const ivec e = (bits - half) >> 23;
    const vec m = (vec)(bits - (e << 23));
    const vec s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
    vec p = broadcast(2 * LOG2E / 9);
    p = p * s2 + broadcast(2 * LOG2E / 7);
    p = p * s2 + broadcast(2 * LOG2E / 5);
    p = p * s2 + broadcast(2 * LOG2E / 3);
    p = p * s2 + broadcast(2 * LOG2E);
    return __builtin_convertvector(e, vec) + p * s;
}

}  // namespace headgate
