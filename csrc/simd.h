// The one vocabulary of vectors: the compiler's generic ones, W lanes wide, and the few instructions it would miss.
//
// Every name here lives in the namespace of its level, so that no function compiled for one processor is ever linked
// into the code for another.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(RA_WIDTH)
#elif defined(__AVX512F__)
#define RA_WIDTH 16
#elif defined(__AVX2__)
#define RA_WIDTH 8
#else
#define RA_WIDTH 4
#endif

// Whether products of bf16 are summed in pairs, as the processors with an instruction for it do.
#if !defined(RA_BF16_DOT)
#if defined(__AVX512BF16__)
#define RA_BF16_DOT 1
#else
#define RA_BF16_DOT 0
#endif
#endif

#define RA_INLINE static inline __attribute__((always_inline))

namespace ringattn::RA_LEVEL {

constexpr int W = RA_WIDTH;

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t VecI __attribute__((vector_size(4 * W)));
typedef uint32_t VecU __attribute__((vector_size(4 * W)));
typedef uint16_t VecH __attribute__((vector_size(2 * W)));

constexpr float INF = __builtin_inff();

template <class V>
RA_INLINE V load(const void *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
RA_INLINE void store(void *to, V v) {
    memcpy(to, &v, sizeof v);
}

RA_INLINE Vec broadcast(float x) {
    return x - Vec{};
}

RA_INLINE VecU bits(Vec x) {
    return (VecU)x;
}

// Whether `transpose` beats numbers moved one by one: 7% of forward for S = 512 and D = 64 on Sapphire Rapids with 16
// lanes, -2% with 8.
#if RA_WIDTH == 16 && !defined(__clang__)
#define RA_TRANSPOSE 1

// Exchanges the rows and the columns of a square: in round s, those that differ in bit s of their number.
RA_INLINE void transpose(VecU (&x)[W]) {
#pragma GCC unroll 4
    for (int s = 1; s < W; s *= 2) {
        VecI low, high; // lanes of (x[i], x[i + s]), counted through
#pragma GCC unroll 16
        for (int lane = 0; lane < W; lane++) {
            low[lane] = lane & s ? lane - s + W : lane;
            high[lane] = low[lane] + s;
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & s) continue;
            const VecU a = x[i], b = x[i + s];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + s] = __builtin_shuffle(a, b, high);
        }
    }
}
#else
#define RA_TRANSPOSE 0
#endif

// The larger of a and b; b where either is NaN.
RA_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__) && RA_WIDTH == 16
    return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX__) && RA_WIDTH == 8
    return _mm256_max_ps(a, b);
#elif defined(__SSE__) && RA_WIDTH == 4
    return _mm_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// e^x = scale * (1 + rest), with `rest` good to one rounding near 0. Below -87.7 scale is 0; x is at most 88.
struct Exponential {
    Vec scale, rest;
};

RA_INLINE Exponential exponential(Vec x) {
    // At this size a float counts ones: adding it rounds to a whole n, and leaves n + 127, the exponent of 2^n, in the
    // low bits.
    constexpr float ROUND = 12582912.0f + 127.0f;
    x = max(broadcast(-88.0f), x);
    const Vec rounded = x * 1.44269504f + ROUND;
    const Vec f = x - (rounded - ROUND) * 0.693147181f;
    // Minimax for (e^f - 1) / f on [-log(2) / 2, log(2) / 2] with 1 at 0, relative error 1.4e-8.
    const Vec f2 = f * f, low = f * 4.9999997e-1f + 1.0f, middle = f * 4.1667201e-2f + 1.6666543e-1f;
    const Vec high = f * 1.3882517e-3f + 8.3665475e-3f;
    return {(Vec)(bits(rounded) << 23), ((high * f2 + middle) * f2 + low) * f};
}

// e^x, exactly 1 at 0 and exactly 0 below -87.7, -inf included; NaN stays. x is at most 88.
RA_INLINE Vec exp(Vec x) {
    const Exponential e = exponential(x);
    return e.scale * e.rest + e.scale;
}

RA_INLINE Vec tanh(Vec x) {
    const VecU sign = bits(x) & 0x80000000u;
    const Exponential e = exponential((Vec)(bits(x) ^ sign) * -2.0f);
    const Vec less = e.scale * e.rest + (e.scale - 1.0f); // exp(-2 |x|) - 1 without cancellation
    return (Vec)(bits(-less / (less + 2.0f)) | sign);
}

// Elements as they lie in memory, and as fp32; narrowing rounds to nearest even.
struct Float32 {
    typedef Vec Lanes;
    RA_INLINE Vec widen(Lanes x) {
        return x;
    }
    RA_INLINE Lanes narrow(Vec x) {
        return x;
    }
};

struct BFloat16 {
    typedef VecH Lanes;
    RA_INLINE Vec widen(Lanes x) {
        return (Vec)(__builtin_convertvector(x, VecU) << 16);
    }
    RA_INLINE Lanes narrow(Vec x) {
#if defined(__AVX512BF16__) && RA_WIDTH == 16
        return (Lanes)_mm512_cvtneps_pbh(x);
#else
        const VecU rounded = bits(x) + 0x7fffu + (bits(x) >> 16 & 1u);
        return __builtin_convertvector((x == x ? rounded : bits(x) | 0x400000u) >> 16, VecH);
#endif
    }
};

struct Float16 {
    typedef VecH Lanes;
    RA_INLINE Vec widen(Lanes x) {
        const VecU all = __builtin_convertvector(x, VecU), magnitude = (all & 0x7fffu) << 13;
        const VecU normal = magnitude + (112u << 23);
        const VecU subnormal = bits((Vec)(magnitude + (113u << 23)) - 0x1p-14f);
        const VecU special = magnitude | 0x7f800000u; // infinity and NaN
        const VecU wide = magnitude < (1u << 23) ? subnormal : (magnitude < (31u << 23) ? normal : special);
        return (Vec)(wide | (all & 0x8000u) << 16);
    }
    RA_INLINE Lanes narrow(Vec x) {
        const VecU sign = bits(x) & 0x80000000u, magnitude = bits(x) ^ sign;
        const VecU normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
        const VecU subnormal = bits((Vec)magnitude + 0.5f) - (126u << 23); // one half counts units of 2^-24
        const VecU special = magnitude > 255u << 23 ? VecU{} + 0x7e00u : VecU{} + 0x7c00u;
        const VecU half = magnitude < (113u << 23) ? subnormal : (magnitude < (143u << 23) ? normal : special);
        return __builtin_convertvector(half | sign >> 16, VecH);
    }
};

} // namespace ringattn::RA_LEVEL
