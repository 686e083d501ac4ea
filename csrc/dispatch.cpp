// Chooses the instruction set at run time.

#include "level.h"

// The build defines RA_HAS_<LEVEL> for each level that is linked in.
#if defined(RA_HAS_PORTABLE)
RA_DECLARE_LEVEL(portable)
#endif
#if defined(RA_HAS_AVX2)
RA_DECLARE_LEVEL(avx2)
#endif
#if defined(RA_HAS_AVX512)
RA_DECLARE_LEVEL(avx512)
#endif
#if defined(RA_HAS_AVX512BF16)
RA_DECLARE_LEVEL(avx512bf16)
#endif
#if defined(RA_HAS_EMULATED_W16)
RA_DECLARE_LEVEL(emulated_w16)
#endif
#if defined(RA_HAS_EMULATED_BF16DOT)
RA_DECLARE_LEVEL(emulated_bf16dot)
#endif

namespace {

typedef int Call(const ra_args &);

struct Level {
    int bit;
    const char *name;
    Call *forward, *backward;
    bool (*runs_here)(), (*pays_here)();
};

inline bool always() {
    return true;
}

inline bool never() {
    return false;
}

#if defined(__x86_64__)
inline bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

inline bool has_avx512bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

// Intel's cores sum pairs of bf16 at half the rate of products in fp32, 123 against 240 GFLOP/s on one core of Sapphire
// Rapids, where Zen 5 has nearly twice that rate.
inline bool sums_pairs_fast() {
    return !__builtin_cpu_is("intel");
}
#endif

// From the slowest to the fastest where both pay.
const Level LEVELS[] = {
#if defined(RA_HAS_EMULATED_W16)
    {RA_EMULATED_W16, "emulated_w16", ringattn::emulated_w16::forward, ringattn::emulated_w16::backward, always,
     never},
#endif
#if defined(RA_HAS_EMULATED_BF16DOT)
    {RA_EMULATED_BF16DOT, "emulated_bf16dot", ringattn::emulated_bf16dot::forward,
     ringattn::emulated_bf16dot::backward, always, never},
#endif
#if defined(RA_HAS_PORTABLE)
    {RA_PORTABLE, "portable", ringattn::portable::forward, ringattn::portable::backward, always, always},
#endif
#if defined(RA_HAS_AVX2)
    {RA_AVX2, "avx2", ringattn::avx2::forward, ringattn::avx2::backward, has_avx2, always},
#endif
#if defined(RA_HAS_AVX512)
    {RA_AVX512, "avx512", ringattn::avx512::forward, ringattn::avx512::backward, has_avx512, always},
#endif
#if defined(RA_HAS_AVX512BF16)
    {RA_AVX512BF16, "avx512bf16", ringattn::avx512bf16::forward, ringattn::avx512bf16::backward, has_avx512bf16,
     sums_pairs_fast},
#endif
};

// The level with this bit, or for -1 the best; null where there is none.
const Level *find(int bit) {
    const Level *found = nullptr;
    for (const Level &level : LEVELS)
        if (level.runs_here() && (bit == -1 ? level.pays_here() : bit == level.bit)) found = &level;
    return found;
}

int run(const ra_args *args, int bit, Call *Level::*call) {
    const Level *const level = find(bit);
    if (!level) return RA_NO_SUCH_LEVEL;
    const bool is_known = args->dtype >= RA_FLOAT32 && args->dtype <= RA_FLOAT16;
    const bool is_grouped = args->heads == 0 || (args->kv_heads > 0 && args->heads % args->kv_heads == 0);
    if (!is_known || !is_grouped || args->threads < 1) return RA_BAD_ARGUMENT;
    return (level->*call)(*args);
}

} // namespace

int ra_forward(const ra_args *args, int level) {
    return run(args, level, &Level::forward);
}

int ra_backward(const ra_args *args, int level) {
    return run(args, level, &Level::backward);
}

int ra_levels(void) {
    int mask = 0;
    for (const Level &level : LEVELS)
        if (level.runs_here()) mask |= level.bit;
    return mask;
}

int ra_best_level(void) {
    const Level *const level = find(-1);
    return level ? level->bit : 0;
}

const char *ra_level_name(int bit) {
    for (const Level &level : LEVELS)
        if (level.bit == bit) return level.name;
    return nullptr;
}
