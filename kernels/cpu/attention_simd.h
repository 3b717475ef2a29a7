/* SPDX-License-Identifier: Apache-2.0 */
/* attention_simd.h -- sizes of blocks, masks and caps that the vector attention kernels share. */
#ifndef LM_KERNELS_CPU_ATTENTION_SIMD_H
#define LM_KERNELS_CPU_ATTENTION_SIMD_H

#include <math.h>

#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/tile_simd.h"

enum {
    BR = 48, /* queries of a block */
    BC = 64, /* keys of a block */
};

/* Blocks of BC rows, each transposed: to[block][d][BC]; rows is a multiple of BC. */
LM_INLINE void pack_turned(float *to, int64_t rows, const float *x, int64_t ld, int64_t D)
{
    for (int64_t r0 = 0; r0 < rows; r0 += BC, to += D * BC)
        for (int64_t r = 0; r < BC; r++)
            for (int64_t d = 0; d < D; d++)
                to[d * BC + r] = x[(r0 + r) * ld + d];
}

/* Visible part [*from, *to) of the block of keys at j0 for query i. */
LM_INLINE void visible(const attn_mask *m, int64_t i, int64_t j0, int64_t *from, int64_t *to)
{
    *from = attn_start(m, i) - j0;
    *to = attn_end(m, i) - j0;
    *from = *from < 0 ? 0 : *from;
    *to = *to > BC ? BC : *to;
}

/* n scores at s become cap tanh(s / cap); n is a multiple of the vector. */
LM_INLINE void cap_scores(float *s, int64_t n, float cap)
{
    vf c = vf_set(cap), over = vf_set(1 / cap);
    for (int64_t j = 0; j < n; j += VF_LANES)
        vf_store(s + j, c * vf_tanh(vf_load(s + j) * over));
}

/* n rows of scores, the first of the query at position `at` with BC keys from j0 on: with the biases of head h. */
static inline void add_biases(float (*s)[BC], const attn_biases *b, int64_t h, int64_t at,
                              int64_t n, int64_t j0)
{
    float room[BC];
    for (int64_t r = 0; r < n; r++) {
        const float *x = attn_bias_line(b, h, j0 - at - r, BC, room);
        for (int64_t j = 0; j < BC; j += VF_LANES)
            vf_store(s[r] + j, vf_load(s[r] + j) + vf_load(x + j));
    }
}

/* n scores of one query, the first with the key at that distance. */
static inline void add_bias_line(float *s, const attn_biases *b, int64_t h, int64_t distance,
                                 int64_t n)
{
    float room[BC];
    for (int64_t j = 0; j < n; j += BC) {
        int64_t some = n - j < BC ? n - j : BC;
        const float *x = attn_bias_line(b, h, distance + j, some, room);
        VF_FOR(i, live, some, {
            vf y = vf_get_any(LM_DTYPE_F32, s + j, i, live);
            vf_put_any(LM_DTYPE_F32, s + j, i, y + vf_get_any(LM_DTYPE_F32, x, i, live), live);
        });
    }
}

#define LM_ATTN_PASTE(name, level) lm_##name##_##level
#define LM_ATTN_NAME(name, level)  LM_ATTN_PASTE(name, level)
#define attention_dx_run           LM_ATTN_NAME(attention_dx, LM_SIMD)
#define attention_dx_bytes         LM_ATTN_NAME(attention_dx_work, LM_SIMD)
#define attention_decode_run       LM_ATTN_NAME(attention_decode, LM_SIMD)
#define attention_decode_bytes     LM_ATTN_NAME(attention_decode_work, LM_SIMD)
#define attention_dbias_run        LM_ATTN_NAME(attention_dbias, LM_SIMD)
#define attention_dbias_bytes      LM_ATTN_NAME(attention_dbias_work, LM_SIMD)
void attention_dx_run(const lm_call *c), attention_dbias_run(const lm_call *c);
size_t attention_dx_bytes(const lm_call *c, int threads),
    attention_dbias_bytes(const lm_call *c, int threads);

#endif
