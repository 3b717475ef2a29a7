/* SPDX-License-Identifier: Apache-2.0 */
/* attention_simd.h -- the small matrix product that the vector attention kernels are made of, and
 * the packing of rows into padded F32.
 *
 * A is read one number at a time, so any two strides will do for it (rows or columns of P, dS, Q);
 * rows of B and C are whole vectors: widths are padded to PAD floats. */
#ifndef LM_KERNELS_CPU_ATTENTION_SIMD_H
#define LM_KERNELS_CPU_ATTENTION_SIMD_H

#include <math.h>

#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/simd.h"

enum {
    PAD = 2 * VF_LANES,
    ROWS = VF_LANES == 16 ? 12 : 6, /* rows of C held in registers */
    BR = 48,                        /* queries of a block */
    BC = 64,                        /* keys of a block */
};

typedef struct {
    int64_t m, n, k; /* n a multiple of PAD */
    const float *a;
    int64_t a_row, a_k; /* strides of A: element (i, p) is a[i*a_row + p*a_k] */
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    bool add; /* c += instead of c = */
} mm_args;

/* `rows` (constant) rows of C from row i, PAD columns from column j. */
LM_INLINE void mm_rows(const mm_args *g, int rows, int64_t i, int64_t j)
{
    vf x[ROWS], y[ROWS];
    float *c = g->c + i * g->ldc + j;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        x[r] = g->add ? vf_load(c + r * g->ldc) : vf_zero();
        y[r] = g->add ? vf_load(c + r * g->ldc + VF_LANES) : vf_zero();
    }
    const float *a = g->a + i * g->a_row, *b = g->b + j;
    for (int64_t p = 0; p < g->k; p++, a += g->a_k, b += g->ldb) {
        vf b0 = vf_load(b), b1 = vf_load(b + VF_LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vf s = vf_set(a[r * g->a_row]);
            x[r] = vf_fma(s, b0, x[r]);
            y[r] = vf_fma(s, b1, y[r]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        vf_store(c + r * g->ldc, x[r]);
        vf_store(c + r * g->ldc + VF_LANES, y[r]);
    }
}

/* C (+)= A B; each element is summed over k in order, whatever m and n are. */
static inline void mm(const mm_args *g)
{
    for (int64_t j = 0; j < g->n; j += PAD) {
        int64_t i = 0;
        for (; i + ROWS <= g->m; i += ROWS)
            mm_rows(g, ROWS, i, j);
        for (; i + 4 <= g->m; i += 4)
            mm_rows(g, 4, i, j);
        for (; i < g->m; i++)
            mm_rows(g, 1, i, j);
    }
}

static inline int64_t padded(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* n rows of D numbers at x (pitch elements apart) times `scale` into to[rows][ld], zeros after the
 * D and after the n. */
LM_INLINE void pack_rows(lm_dtype t, float *to, int64_t ld, int64_t rows, const void *x,
                         int64_t pitch, int64_t n, int64_t D, float scale)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t d = 0; d < ld; d += VF_LANES) {
            int64_t live = r < n ? D - d : 0;
            vf v = live >= VF_LANES ? vf_get(t, x, r * pitch + d)
                   : live > 0       ? vf_get_n(t, x, r * pitch + d, live)
                                    : vf_zero();
            vf_store(to + r * ld + d, v * vf_set(scale));
        }
    }
}

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

/* Lanes [from, to) of v, which holds numbers at.. of a row; `other` elsewhere. */
LM_INLINE vf keep_range(vf v, int64_t at, int64_t from, int64_t to, vf other)
{
    int64_t lo = from - at, hi = to - at;
    if (lo <= 0 && hi >= VF_LANES)
        return v;
    if (lo >= VF_LANES || hi <= 0 || lo >= hi)
        return other;
    v = vf_keep_n(v, hi > VF_LANES ? VF_LANES : hi, other);
    return lo <= 0 ? v : vf_keep_n(other, lo, v);
}

/* n scores at s become cap tanh(s / cap); n is a multiple of the vector. */
LM_INLINE void cap_scores(float *s, int64_t n, float cap)
{
    vf c = vf_set(cap), over = vf_set(1 / cap);
    for (int64_t j = 0; j < n; j += VF_LANES)
        vf_store(s + j, c * vf_tanh(vf_load(s + j) * over));
}

#define LM_ATTN_PASTE(name, level) lm_##name##_##level
#define LM_ATTN_NAME(name, level)  LM_ATTN_PASTE(name, level)
#define attention_dx_run           LM_ATTN_NAME(attention_dx, LM_SIMD)
#define attention_dx_bytes         LM_ATTN_NAME(attention_dx_work, LM_SIMD)
#define attention_decode_run       LM_ATTN_NAME(attention_decode, LM_SIMD)
#define attention_decode_bytes     LM_ATTN_NAME(attention_decode_work, LM_SIMD)
void attention_dx_run(const lm_call *c);
size_t attention_dx_bytes(const lm_call *c, int threads);

#endif
