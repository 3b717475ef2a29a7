/* SPDX-License-Identifier: Apache-2.0 */
/* delta_simd.h -- a chunk of the delta rule on vectors: what its forward and backward share.  Names of arrays are
 * those of kernels/delta.h; queries are normalised and scaled, keys normalised, rows beyond the sequence zeros. */
#ifndef LM_KERNELS_CPU_DELTA_SIMD_H
#define LM_KERNELS_CPU_DELTA_SIMD_H

#include <math.h>

#include "kernels/cpu/chunk_simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/delta.h"

enum { C = LM_DELTA_CHUNK, SOLVE = 16 /* rows of a block of the triangle */ };

/* The tensors of a call, and where a chunk of one head is. */
typedef struct {
    const lm_delta_attr *a;
    const void *qkv;
    const float *g, *beta;
    const int32_t *lo; /* NULL: one document */
    int64_t ldd, lde;  /* padded widths of keys and of values */
    int64_t pitch;     /* numbers of a row of qkv */
} delta_view;

/* One chunk: decays of value head h.  Sums of g from the chunk's beginning are gamma + rest: their differences
 * need more digits than a float has.  last: the last row that exists. */
typedef struct {
    float gamma[C], rest[C], e[C], d[C], beta[C], e_last;
    int from[C]; /* first row of the chunk that is of row i's document */
    int64_t row, n;
    int last;
} delta_decay;

static inline delta_view delta_view_of(const lm_call *c, int qkv)
{
    const lm_delta_attr *a = c->attr;
    int lo = qkv ? 5 : 3;
    return (delta_view){ a,
                         c->in[qkv].data,
                         c->in[qkv + 1].data,
                         c->in[qkv + 2].data,
                         lo < c->n_in ? c->in[lo].data : NULL,
                         padded(a->key_dim, PAD),
                         padded(a->value_dim, PAD),
                         2 * a->key_heads * a->key_dim + a->heads * a->value_dim };
}

/* Rows of queries (part 0) or keys (1) of key head `head`, divided by their lengths, times scale; r: the reciprocals
 * of the lengths. */
LM_INLINE void delta_directions(lm_dtype t, const delta_view *x, int64_t row, int64_t n,
                                int64_t head, int part, float scale, float *to, float *r)
{
    int64_t at = row * x->pitch + (part * x->a->key_heads + head) * x->a->key_dim;
    pack_rows(t, to, x->ldd, C, (const char *)x->qkv + at * (int64_t)lm_dtype_size(t), x->pitch, n,
              x->a->key_dim, 1);
    for (int64_t i = 0; i < C; i++) {
        float sum = chunk_dot(to + i * x->ldd, to + i * x->ldd, x->ldd);
        r[i] = 1 / sqrtf(sum + (float)x->a->eps);
        for (int64_t j = 0; j < x->ldd; j += VF_LANES)
            vf_store(to + i * x->ldd + j, vf_load(to + i * x->ldd + j) * vf_set(r[i] * scale));
    }
}

/* The same of one row, to [ldd]. */
LM_INLINE void delta_direction(lm_dtype t, const delta_view *x, int64_t row, int64_t head, int part,
                               float scale, float *to)
{
    int64_t at = row * x->pitch + (part * x->a->key_heads + head) * x->a->key_dim;
    pack_rows(t, to, x->ldd, 1, (const char *)x->qkv + at * (int64_t)lm_dtype_size(t), x->pitch, 1,
              x->a->key_dim, 1);
    float r = 1 / sqrtf(chunk_dot(to, to, x->ldd) + (float)x->a->eps);
    for (int64_t j = 0; j < x->ldd; j += VF_LANES)
        vf_store(to + j, vf_load(to + j) * vf_set(r * scale));
}

LM_INLINE void delta_values(lm_dtype t, const delta_view *x, int64_t row, int64_t n, int64_t head,
                            float *to)
{
    int64_t at = row * x->pitch + 2 * x->a->key_heads * x->a->key_dim + head * x->a->value_dim;
    pack_rows(t, to, x->lde, C, (const char *)x->qkv + at * (int64_t)lm_dtype_size(t), x->pitch, n,
              x->a->value_dim, 1);
}

enum {
    FORGETS = 128 /* exp(-FORGETS) is 0 in F32, so a decay by more, as by -inf, is one by as much */
};

/* Decays within chunk m of a sequence of `rows` rows from `row` on, of value head h. */
static inline void delta_decays(const delta_view *x, int64_t row, int64_t rows, int64_t m,
                                int64_t h, delta_decay *y)
{
    int64_t t0 = m * C, n = rows - t0;
    double sum = 0;
    y->n = n < C ? n : C;
    y->last = (int)y->n - 1;
    y->row = row + t0;
    for (int64_t i = 0; i < C; i++) {
        bool there = i < y->n;
        int64_t cell = (y->row + i) * x->a->heads + h;
        int64_t start = there && x->lo ? x->lo[y->row + i] : 0;
        float g = there ? x->g[cell] : 0;
        sum += g < -FORGETS ? -FORGETS : g;
        y->gamma[i] = (float)sum;
        y->rest[i] = (float)(sum - y->gamma[i]);
        y->beta[i] = there ? x->beta[cell] : 0;
        y->from[i] = start > t0 ? (int)(start - t0) : 0;
        y->e[i] = there && start <= t0 - (t0 > 0) ? expf((float)sum) : 0;
    }
    for (int64_t j = 0; j < C; j++) {
        float since = y->gamma[y->last] - y->gamma[j] + (y->rest[y->last] - y->rest[j]);
        y->d[j] = j <= y->last && j >= y->from[y->last] ? expf(since) : 0;
    }
    y->e_last = y->e[y->last];
}

/* G [C][C]: zeros above the diagonal and between documents. */
static inline void delta_between(const delta_decay *y, float *G)
{
    for (int64_t i = 0; i < C; i++) {
        vf top = vf_set(y->gamma[i]), rest = vf_set(y->rest[i]);
        for (int64_t j = 0; j < C; j += VF_LANES) {
            vf w = keep_range(top - vf_load(y->gamma + j) + (rest - vf_load(y->rest + j)), j,
                              y->from[i], i + 1, vf_set(-INFINITY));
            vf_store(G + i * C + j, i < y->n ? vf_exp(w) : vf_zero());
        }
    }
}

/* to [C][C] = by[i] x_ij y_ij, the diagonal 0 if strict; by NULL: 1. */
static inline void delta_times(float *to, const float *x, const float *y, const float *by,
                               bool strict)
{
    for (int64_t i = 0; i < C; i++) {
        vf scale = vf_set(by ? by[i] : 1);
        for (int64_t j = 0; j < C; j += VF_LANES)
            vf_store(to + i * C + j, vf_load(x + i * C + j) * vf_load(y + i * C + j) * scale);
        if (strict)
            to[i * C + i] = 0;
    }
}

/* Rows of R [C][ld] become those of (I + L)^-1 R, or of its transpose; less = -L. */
static inline void delta_solve(const float *less, bool turned, float *R, int64_t ld)
{
    int64_t a_row = turned ? 1 : C, a_k = turned ? C : 1;
    for (int64_t s = 0; s < C; s += SOLVE) {
        int64_t i0 = turned ? C - SOLVE - s : s, k0 = turned ? i0 + SOLVE : 0;
        mm(&(mm_args){ SOLVE, ld, s, less + i0 * a_row + k0 * a_k, a_row, a_k, R + k0 * ld, ld,
                       R + i0 * ld, ld, true });
        for (int64_t q = 1; q < SOLVE; q++) {
            int64_t i = turned ? i0 + SOLVE - 1 - q : i0 + q, j0 = turned ? i + 1 : i0;
            mm(&(mm_args){ 1, ld, q, less + i * a_row + j0 * a_k, a_row, a_k, R + j0 * ld, ld,
                           R + i * ld, ld, true });
        }
    }
}

/* R = beta (V - e X), X = K S: what the corrections are solved from. */
static inline void delta_misses(const delta_decay *y, const float *v, const float *X, float *R,
                                int64_t ld)
{
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = 0; j < ld; j += VF_LANES)
            vf_store(R + i * ld + j,
                     vf_set(y->beta[i]) * vf_fnma(vf_set(y->e[i]), vf_load(X + i * ld + j),
                                                  vf_load(v + i * ld + j)));
}

#define LM_DELTA_PASTE(name, level) lm_##name##_##level
#define LM_DELTA_NAME(name, level)  LM_DELTA_PASTE(name, level)
#define delta_dx_run                LM_DELTA_NAME(delta_dx, LM_SIMD)
#define delta_dx_bytes              LM_DELTA_NAME(delta_dx_work, LM_SIMD)
void delta_dx_run(const lm_call *c);
size_t delta_dx_bytes(const lm_call *c, int threads);

#endif
