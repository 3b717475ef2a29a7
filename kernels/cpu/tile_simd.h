/* SPDX-License-Identifier: Apache-2.0 */
/* tile_simd.h -- the small matrix product of kernels that work on tiles (attention, the delta rule), and the
 * packing of rows into padded F32.
 *
 * A is read one number at a time, so any two strides will do for it (a matrix or its transpose); rows of B
 * and C are whole vectors: widths are padded to PAD floats. */
#ifndef LM_KERNELS_CPU_TILE_SIMD_H
#define LM_KERNELS_CPU_TILE_SIMD_H

#include "kernels/cpu/simd.h"

enum {
    PAD = 2 * VF_LANES,
    ROWS = VF_LANES == 16 ? 12 : 6, /* rows of C held in registers */
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

#endif
