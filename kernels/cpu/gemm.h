/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.h -- internals of the matrix product: the functions of a level, and the blocking shared by
 * all.
 *
 * op(B) is packed into panels of nr columns over the whole depth (by all threads before the product,
 * or, where op(A) is one block, by each thread a few at a time for its own columns), op(A) block by block into panels
 * of mr rows that stay in L2.  For each panel of B and each step of kc (the part of the panel that
 * fits L1) the micro-kernel runs down the panels of A.  Partial sums live in one mr x nr float tile
 * per panel of A; a depth beyond pc (what of A fits L2) goes through a larger array of such tiles. */
#ifndef LM_KERNELS_CPU_GEMM_H
#define LM_KERNELS_CPU_GEMM_H

#include "kernels/cpu/code_rows.h"
#include "kernels/linear.h"

/* The destination of a finished tile. */
typedef struct {
    const float *tile;
    int nr, rows, cols; /* valid part; row pitch nr */
    void *c;            /* first element */
    int64_t ldc;
    lm_dtype cd;
    bool accumulate, stream; /* stream: non-temporal stores */
    const float *bias;       /* [cols] or NULL */
} lm_gemm_tail;

/* Cache lines that are read soon: `lines` of them from `at` on.  Behind the last line of a row of
 * storage (at row_end), `skip` bytes lead to the next row. */
typedef struct {
    const char *at, *row_end;
    int64_t lines, row_bytes, skip;
} lm_gemm_ahead;

/* One mr x nr tile of C: tile (+)= A panel x B panel over kn (a multiple of kr). */
typedef struct {
    const void *a, *b; /* packed */
    int64_t kn;
    int64_t depth;            /* of kn, what is not padding: products of the rest may be left out */
    int rows, cols;           /* that count in the panels: sums of the others may be left out */
    float *tile;              /* mr x nr, row-major, 64-byte aligned */
    bool load;                /* add to the tile's content instead of zeros */
    lm_gemm_ahead ahead;      /* prefetched to L2 meanwhile */
    const lm_gemm_tail *tail; /* NULL, or an earlier tile to store meanwhile (hide_tail only) */
} lm_gemm_step;

typedef struct {
    int mr, nr, kr;      /* register tile; depth is padded to a multiple of kr */
    int64_t esize;       /* bytes of a packed element */
    int64_t kc;          /* greatest depth of a B panel in L1 */
    int64_t l2_bytes;    /* for the packed block of A */
    int64_t pc;          /* longest depth of a packed block of A; a multiple of kr */
    int64_t own_panels;  /* of B [k,n], packed at a time by a worker for itself; 0: B is shared */
    bool hide_tail;      /* micro stores the previous tile while it multiplies */
    void (*begin)(void); /* per thread and range of work, around the others; may be NULL */
    void (*end)(void);   /* also orders streamed stores before what other threads read */
    /* One panel: rows i.. (columns j..) of op(A) (op(B)), depth k0..k0+kn; zeros fill it up. */
    void (*pack_a)(const lm_gemm *g, int64_t i, int64_t k0, int64_t kn, void *dst);
    void (*pack_b)(const lm_gemm *g, int64_t j, int64_t k0, int64_t kn, void *dst);
    /* sum[r] += sum of row r of a packed panel of A, r < rows. */
    void (*sum_a)(const void *panel, int64_t kn, int rows, float *sum);
    void (*micro)(const lm_gemm_step *s);
    void (*finish)(const lm_gemm_tail *t);
    /* m <= LM_GEMM_SMALL_M: columns j0..j1 of C, reading b in place. */
    void (*small_m)(const lm_gemm *g, int64_t j0, int64_t j1);
    /* dst [nr,k] = the rows of B [n,k] in one packed panel, k a multiple of kr, for small_m.  NULL: B is
     * always given in rows, too. */
    void (*rows_b)(const void *panel, int64_t k, void *dst);
    const lm_code_rows_coder *coder; /* of B in codes */
    const lm_code_rows_sums *sums;   /* the same products with B in codes; *sums NULL: none */
} lm_gemm_impl;

const lm_gemm_impl *lm_gemm_impl_avx2(lm_dtype ab);
const lm_gemm_impl *lm_gemm_impl_avx512(lm_dtype ab);
const lm_gemm_impl *lm_gemm_impl_bf16(lm_dtype ab);
const lm_gemm_impl *lm_gemm_impl_amx(lm_dtype ab);

/* Shared by the levels from AVX-512 on: the store of tiles, and rows of B read in place. */
void lm_gemm_finish_avx512(const lm_gemm_tail *t);
void lm_gemm_small_bf16_avx512(const lm_gemm *g, int64_t j0, int64_t j1);

/* Element [i, col] of C from the sum of its products, for few rows. */
static inline __attribute__((always_inline)) void lm_gemm_put(const lm_gemm *g, int64_t i,
                                                              int64_t col, float sum)
{
    int64_t to = i * g->ldc + col;
    float v = sum + (g->bias ? g->bias[col] : 0.0f);
    if (g->cd == LM_DTYPE_F32) {
        float *c = g->c;
        c[to] = g->accumulate ? v + c[to] : v;
    } else {
        uint16_t *c = g->c;
        c[to] = lm_f32_to_bf16(g->accumulate ? v + lm_bf16_to_f32(c[to]) : v);
    }
}

void lm_gemm_ref(const lm_gemm *g, lm_par *par);

/* Prefetch the next n lines of *a, or as many as there are. */
static inline __attribute__((always_inline)) void lm_gemm_prefetch(lm_gemm_ahead *a, int64_t n)
{
    for (; n > 0 && a->lines > 0; n--, a->lines--) {
        __builtin_prefetch(a->at, 0, 2);
        a->at += 64;
        if (a->at == a->row_end) {
            a->at += a->skip;
            a->row_end = a->at + a->row_bytes;
        }
    }
}

static inline int64_t lm_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
static inline int64_t lm_round_up(int64_t a, int64_t b)
{
    return lm_ceil_div(a, b) * b;
}

#endif
