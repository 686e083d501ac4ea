// The one matrix product that all of forward and backward are made of, in registers.
#pragma once

#include "simd.h"

namespace ringattn::RA_LEVEL {

// Accumulators: PANEL rows of VECS vectors. They, a row of the right operand and one broadcast stay in registers.
// Forward, S = 2048, one thread, D = 64 / 128: 8 x 2 does 232 / 242 GFLOP/s on Zen 5 with 16 lanes (8 x 3: 223 / 237,
// 6 x 4: 224 / 233), and 6 x 2 is 1% / 4% faster than 4 x 3 on Zen 3 with 8 lanes.
// Steps of the loop are joined where that pays: two gain 2% forward and 6% backward on Sapphire Rapids with 16 lanes,
// and lose 2% forward with 8, which have half the registers.
#if RA_WIDTH == 16
constexpr int PANEL = 8, VECS = 2, STEPS = 2;
#elif RA_WIDTH == 8
constexpr int PANEL = 6, VECS = 2, STEPS = 1;
#else
constexpr int PANEL = 4, VECS = 2, STEPS = 1;
#endif
constexpr int LANES = VECS * W; // query rows of a tile

// A unit is what one lane multiplies at once: `per` numbers that follow each other along the contracted dim.
//   dot    c + a . b in each lane
//   join   the units of `per` vectors
//   put    numbers [lane, lane + W) of a row of units that lie along it
struct Single {
    typedef float Unit;
    typedef Vec Units;
    static constexpr int per = 1;
    RA_INLINE Vec dot(Vec c, Unit a, Units b) {
        return c + broadcast(a) * b;
    }
    RA_INLINE Units join(const Vec *x) {
        return x[0];
    }
    RA_INLINE void put(Unit *row, int lane, Vec x) {
        store(row + lane, x);
    }
};

// Two numbers rounded to bf16, the first in the low half.
struct Pair {
    typedef uint32_t Unit;
    typedef VecU Units;
    static constexpr int per = 2;
    RA_INLINE Vec dot(Vec c, Unit a, Units b) {
        const VecU left = VecU{} + a;
#if defined(__AVX512BF16__) && RA_WIDTH == 16
        return _mm512_dpbf16_ps(c, (__m512bh)left, (__m512bh)b);
#else
        c = c + (Vec)(left & 0xffff0000u) * (Vec)(b & 0xffff0000u);
        return c + (Vec)(left << 16) * (Vec)(b << 16);
#endif
    }
    RA_INLINE Units join(const Vec *x) {
        const VecU low = __builtin_convertvector(BFloat16::narrow(x[0]), VecU);
        return low | __builtin_convertvector(BFloat16::narrow(x[1]), VecU) << 16;
    }
    RA_INLINE void put(Unit *row, int lane, Vec x) {
        store((uint16_t *)row + lane, BFloat16::narrow(x));
    }
};

struct Accumulators {
    Vec v[PANEL][VECS];
};

// c[i][lane] += sum over u < count of a[i * a_row + u * a_step] . b[u * b_step + lane]; strides in units.
template <class U>
RA_INLINE void multiply(Accumulators &c, const typename U::Unit *a, int64_t a_row, int64_t a_step,
                        const typename U::Unit *b, int64_t b_step, int64_t count) {
#pragma GCC unroll STEPS
    for (int64_t u = 0; u < count; u++, a += a_step, b += b_step) {
        typename U::Units right[VECS];
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) right[j] = load<typename U::Units>(b + j * W);
#pragma GCC unroll 8
        for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 4
            for (int j = 0; j < VECS; j++) c.v[i][j] = U::dot(c.v[i][j], a[i * a_row], right[j]);
    }
}

// Sums are cut into parts of this many units, so that rounding errors hardly grow with the length of the sum.
constexpr int64_t PART = 128;

RA_INLINE void add(Accumulators &c, const Accumulators &more) {
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) c.v[i][j] += more.v[i][j];
}

// The product that `multiply` adds, by itself.
template <class U>
RA_INLINE Accumulators product(const typename U::Unit *a, int64_t a_row, int64_t a_step, const typename U::Unit *b,
                               int64_t b_step, int64_t count) {
    Accumulators c = {};
    multiply<U>(c, a, a_row, a_step, b, b_step, count < PART ? count : PART);
    for (int64_t u = PART; u < count; u += PART) {
        Accumulators more = {};
        multiply<U>(more, a + u * a_step, a_row, a_step, b + u * b_step, b_step, count - u < PART ? count - u : PART);
        add(c, more);
    }
    return c;
}

// Calls f(i, j, c.v[i][j]) for every vector, in registers.
template <class F>
RA_INLINE void for_each(const Accumulators &c, const F &f) {
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) f(i, j, c.v[i][j]);
}

} // namespace ringattn::RA_LEVEL
