// Block kernels of exact attention for CPUs, as a C interface.
//
// One call folds one rectangle (query rows x key rows) into tensors that the caller owns, or adds its gradients. It
// knows nothing of ranks, layouts or masks: what a row may see is an interval of the key rows at hand.
//
// Letters: B batch, S query rows, T key rows, H query heads, Hkv key heads (H is a multiple of Hkv), D and Dv the head
// dims of q, k and of v. Any size may be 0 but D and Dv. Addresses need no more than the alignment of one element.
#ifndef RINGATTN_CPU_H
#define RINGATTN_CPU_H

#include <stdint.h>

#define RA_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// A view; its last dim, where it has four, is contiguous.
typedef struct {
    void *data;
    int64_t stride[3]; // in elements: batch, row, head
} ra_tensor;

enum { RA_FLOAT32 = 0, RA_BFLOAT16 = 1, RA_FLOAT16 = 2 };

typedef struct {
    int32_t dtype; // of q, k, v, out and dout; everything else is fp32
    int64_t batch, rows, keys, heads, kv_heads, head_dim, v_head_dim;
    ra_tensor q, k, v;    // [B, S, H, D], [B, T, Hkv, D], [B, T, Hkv, Dv]
    ra_tensor dout, out;  // [B, S, H, Dv]
    ra_tensor acc;        // [B, S, H, Dv], unnormalised output
    ra_tensor m, l;       // [B, H, S], largest score so far (-inf: none) and sum of exp(score - m)
    ra_tensor lse, delta; // [B, H, S], natural log; rowsum(dout * out) - dlse
    ra_tensor dq, dk, dv; // [B, S, H, D], [B, T, Hkv, D], [B, T, Hkv, Dv]
    // Row q sees key k iff lo[q] <= k < hi[q]. [S] with bounds_batch_stride 0, else [B, S] with that stride, in
    // elements.
    // Over the rows that see something lo and hi never decrease; a row that sees nothing has lo = T, hi = 0.
    const int32_t *lo, *hi;
    int64_t bounds_batch_stride;
    const int32_t *q_pos, *k_pos; // [S], [T], global positions; read for dropout only
    const float *sinks;           // [H], logits that join at the finish, or null
    int32_t is_full;              // every row sees every key; lo and hi are not read
    int32_t start, finish;        // forward: begin the state / write out and lse instead of the state
    int32_t threads;              // at most this many; results have the same bits for any number
    float softmax_scale;
    float softcap; // scores become softcap * tanh(score / softcap); 0: no cap
    double dropout_p;
    uint64_t seed;
    int64_t head_offset; // global index of query head 0, for dropout
} ra_args;

// Instruction sets, as bits. A library has those it was built with.
enum {
    RA_PORTABLE = 1,
    RA_AVX2 = 2,
    RA_AVX512 = 4,
    RA_AVX512BF16 = 8,
    RA_EMULATED_W16 = 16,     // for tests: the code of RA_AVX512 on any processor
    RA_EMULATED_BF16DOT = 32, // for tests: the code of RA_AVX512BF16 on any processor
};

enum { RA_OK = 0, RA_OUT_OF_MEMORY = 1, RA_NO_SUCH_LEVEL = 2, RA_BAD_ARGUMENT = 3 };

// Folds the keys into acc, m, l; reads q, k, v, bounds and, at the finish, sinks. Returns RA_OK or another of the codes
// above, and then has written nothing. level: one bit, or -1 for ra_best_level().
RA_EXPORT int ra_forward(const ra_args *args, int level);

// Adds to dq, dk, dv; dq, or both others, may be null and are not computed then. Reads q, k, v, dout, lse, delta and
// bounds. Returns as ra_forward does.
RA_EXPORT int ra_backward(const ra_args *args, int level);

// The levels that this library has and this processor runs, as a bit mask.
RA_EXPORT int ra_levels(void);

// The fastest of them, which is never an emulated one; 0 where there is none.
RA_EXPORT int ra_best_level(void);

// The name of one level, or null.
RA_EXPORT const char *ra_level_name(int level);

#ifdef __cplusplus
}
#endif

#endif
