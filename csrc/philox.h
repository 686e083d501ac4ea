// Philox4x32-10 for W queries at once: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011, section 3.3.
#pragma once

#include "simd.h"

namespace ringattn::RA_LEVEL {

typedef uint64_t VecW __attribute__((vector_size(4 * W)));

// The 64-bit products of a constant and the low halves of x.
RA_INLINE VecW multiply_low(VecW x, uint32_t constant) {
#if defined(__AVX512F__) && RA_WIDTH == 16
    return (VecW)_mm512_maskz_mul_epu32(0xff, (__m512i)x, _mm512_set1_epi64(constant));
#elif defined(__AVX2__) && RA_WIDTH == 8
    return (VecW)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(constant));
#else
    return (x & 0xffffffffu) * constant;
#endif
}

// Word 0 of each lane at the counter (a, b, c, d).
RA_INLINE VecW philox_rounds(VecW a, VecW b, VecW c, VecW d, uint64_t seed) {
    // Words lie in the low halves; what comes to stand in the high halves is never read.
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        const VecW first = multiply_low(a, 0xD2511F53u), second = multiply_low(c, 0xCD9E8D57u);
        a = (second >> 32) ^ b ^ key0;
        c = (first >> 32) ^ d ^ key1;
        b = second;
        d = first;
    }
    return a;
}

RA_INLINE VecU philox_word(uint32_t a, VecU b, uint32_t c, uint32_t d, uint64_t seed) {
    const VecW even = philox_rounds(VecW{} + a, (VecW)b, VecW{} + c, VecW{} + d, seed);
    const VecW odd = philox_rounds(VecW{} + a, (VecW)b >> 32, VecW{} + c, VecW{} + d, seed);
    return (VecU)((even & 0xffffffffu) | odd << 32);
}

} // namespace ringattn::RA_LEVEL
