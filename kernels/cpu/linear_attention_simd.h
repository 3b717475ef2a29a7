/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_simd.h -- a chunk of linear attention on vectors: what its forward and backward share.  Names are those of
 * kernels/linear_attention.h; rows beyond the sequence are zeros, and products leave out blocks of pairs above the diagonal. */
#ifndef LM_KERNELS_CPU_LINEAR_ATTENTION_SIMD_H
#define LM_KERNELS_CPU_LINEAR_ATTENTION_SIMD_H

#include "kernels/cpu/chunk_simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/linear_attention.h"

enum { C = LM_LINEAR_CHUNK };

/* Products of activations in BF16 round to it where dot products of pairs or tiles take that (linear_attention_bf16.c, _amx.c),
 * which begin and end around pieces of work. */
#ifdef LA_PAIRS
#include "kernels/cpu/chunk_pairs.h"
#endif
#if defined(LA_PAIRS) && defined(__AMX_TILE__)
#define la_begin tiles_begin
#define la_end   tiles_end
#else
static inline void la_begin(void)
{
}
static inline void la_end(void)
{
}
#endif

/* The rows of the table for an operator. */
#ifdef LA_PAIRS
#define LA_KERNEL(op, run, work)                    \
    {                                               \
        op, LM_DTYPE_BF16, LM_SIMD_LEVEL, run, work \
    }
#else
#define LA_KERNEL VF_KERNEL
#endif

typedef struct {
    const lm_linear_attention_attr *a;
    const void *qkv;
    const int32_t *lo; /* NULL: one document */
    int64_t ld, pitch,
        group;    /* padded width of a head, numbers of a row, query heads of a key head */
    int64_t size; /* of a state: [R][ld] */
} la_view;

/* C (+)= A B.  Where products round, those of heads below 16 numbers do not: few numbers do not average what rounding adds. */
static inline void la_mm(const la_view *x, const mm_args *g)
{
#ifdef LA_PAIRS
    if (x->a->head_dim >= 16) {
        mm_pairs(g);
        return;
    }
#endif
    (void)x;
    mm(g);
}

/* One chunk of a key head.  power[C - 1 - n] = a^n, zeros from C on: row i of W begins at power + C - 1 - i. */
typedef struct {
    float power[2 * C], e[C], d[C], e_last;
    int from[C];            /* first row of the chunk that is of row i's document */
    int64_t row, n, blocks; /* the first row, rows, and those of whole blocks of PAD */
} la_chunk;

static inline la_view la_view_of(const lm_call *c, int qkv, int lo)
{
    const lm_linear_attention_attr *a = c->attr;
    int64_t ld = padded(a->head_dim, PAD);
    return (la_view){ a,
                      c->in[qkv].data,
                      opt_data(c->in, c->n_in, lo),
                      ld,
                      (a->heads + 2 * a->kv_heads) * a->head_dim,
                      a->heads / a->kv_heads,
                      a->state_rows * ld };
}

static inline void la_powers(const la_view *x, int64_t j, la_chunk *y)
{
    double ld = lm_linear_log_decay(x->a->decay, j);
    for (int n = 0; n < C; n++) {
        y->power[C - 1 - n] = ld < 0 ? (float)exp(n * ld) : 1;
        y->power[C + n] = 0;
    }
}

/* Chunk m of a sequence of `rows` rows from `row` on; powers are there. */
static inline void la_chunk_at(const la_view *x, int64_t row, int64_t rows, int64_t m, la_chunk *y)
{
    const int64_t t0 = m * C;
    const float a = y->power[C - 2], *power = y->power + C - 1;
    y->n = rows - t0 < C ? rows - t0 : C;
    y->blocks = padded(y->n, PAD);
    y->row = row + t0;
    for (int64_t i = 0; i < C; i++) {
        bool there = i < y->n;
        int64_t start = there && x->lo ? x->lo[y->row + i] : 0;
        y->from[i] = start > t0 ? (int)(start - t0) : 0;
        y->e[i] = there && start <= t0 - (t0 > 0) ? a * power[-i] : 0;
    }
    for (int64_t i = 0; i < C; i++)
        y->d[i] = i < y->n && i >= y->from[y->n - 1] ? power[i + 1 - y->n] : 0;
    y->e_last = y->e[y->n - 1];
}

/* n rows of a head to [rows][ld]: column `at` of row `row` is its first number, rows are `pitch` apart. */
LM_INLINE void la_rows(lm_dtype t, const la_view *x, int64_t row, int64_t at, int64_t pitch,
                       int64_t n, int64_t rows, float *to)
{
    const char *from = (const char *)x->qkv + (row * x->pitch + at) * (int64_t)lm_dtype_size(t);
    pack_rows(t, to, x->ld, rows, from, pitch, n, x->a->head_dim, 1);
}

/* n rows [ld] become their features. */
static inline void la_features(const la_view *x, int64_t n, float *q)
{
    const int64_t D = x->a->head_dim;
    if (x->a->feature == LM_FEATURE_IDENTITY)
        return;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d += VF_LANES) {
            float *at = q + i * x->ld + d;
            vf v = vf_load(at);
            v = vf_if_lt(vf_zero(), v, v + vf_set(1), vf_exp(v));
            vf_store(at, D - d < VF_LANES ? vf_keep_n(v, D - d, vf_zero()) : v);
        }
}

/* Queries of head h, keys and values of head j of the chunk. */
LM_INLINE void la_queries(lm_dtype t, const la_view *x, const la_chunk *y, int64_t h, float *q)
{
    la_rows(t, x, y->row, h * x->a->head_dim, x->pitch, y->n, y->blocks, q);
    la_features(x, y->n, q);
}

LM_INLINE void la_keys(lm_dtype t, const la_view *x, const la_chunk *y, int64_t j, float *k,
                       float *v)
{
    const int64_t D = x->a->head_dim, at = (x->a->heads + j) * D;
    la_rows(t, x, y->row, at, x->pitch, y->n, y->blocks, k);
    la_rows(t, x, y->row, at + x->a->kv_heads * D, x->pitch, y->n, y->blocks, v);
    la_features(x, y->n, k);
}

/* M [C][C] = (q y + more) W by element: y [D][C], more [C].  Blocks right of the diagonal are not set.  Pairs that no row
 * sees are zeros whatever their numbers are: NaN stays with the rows that read it. */
static inline void la_pairs(const la_view *x, const la_chunk *w, const float *q, const float *y,
                            const float *more, float *M)
{
    for (int64_t i = 0; i < w->blocks; i += PAD)
        la_mm(x, &(mm_args){ PAD, i + PAD, x->a->head_dim, q + i * x->ld, x->ld, 1, y, C, M + i * C,
                             C, false });
    for (int64_t i = 0; i < w->blocks; i++)
        for (int64_t j = 0; j < (i / PAD + 1) * PAD; j += VF_LANES) {
            vf v = vf_load(M + i * C + j) + vf_set(more[i]);
            v = keep_range(v * vf_load(w->power + C - 1 - i + j), j, w->from[i], i + 1, vf_zero());
            vf_store(M + i * C + j, v);
        }
}

/* to [C][ld] += M y, y [C][ld]. */
static inline void la_mix(const la_view *x, const la_chunk *w, const float *M, const float *y,
                          float *to)
{
    for (int64_t i = 0; i < w->blocks; i += PAD)
        la_mm(x, &(mm_args){ PAD, x->ld, i + PAD, M + i * C, C, 1, y, x->ld, to + i * x->ld, x->ld,
                             true });
}

/* to += M^T y. */
static inline void la_mix_back(const la_view *x, const la_chunk *w, const float *M, const float *y,
                               float *to)
{
    for (int64_t j = 0; j < w->blocks; j += PAD)
        la_mm(x, &(mm_args){ PAD, x->ld, w->blocks - j, M + j * C + j, 1, C, y + j * x->ld, x->ld,
                             to + j * x->ld, x->ld, true });
}

/* What weighs the results of rows: scale, or scale / denominator; z [ld]. */
static inline void la_weights(const la_view *x, const la_chunk *w, const float *q, const float *M,
                              const float *z, float *by)
{
    const float scale = (float)x->a->scale, eps = (float)x->a->eps;
    for (int64_t i = 0; i < w->blocks; i++) {
        by[i] = scale;
        if (x->a->feature == LM_FEATURE_ELU && i < w->n)
            by[i] = scale / ((w->e[i] > 0 ? w->e[i] * chunk_dot(q + i * x->ld, z, x->ld) : 0) +
                             chunk_sum(M + i * C, (i / PAD + 1) * PAD) + eps);
    }
}

/* to [ld] += sum of by[i] times row i of y, from row `from` on; `wide` columns of both. */
static inline void la_add_rows(const la_view *x, const la_chunk *w, int64_t from, int64_t wide,
                               const float *y, const float *by, float *to)
{
    mm(&(mm_args){ 1, wide, w->n - from, by + from, 1, 1, y + from * x->ld, x->ld, to, x->ld,
                   true });
}

/* `wide` columns of S and z.  by 0: a document has begun, which the state does not reach whatever it holds. */
static inline void la_scale_state(const la_view *x, float by, int64_t wide, float *S)
{
    for (int64_t d = 0; d < x->a->state_rows; d++)
        for (int64_t i = 0; i < wide; i += VF_LANES) {
            vf v = vf_load(S + d * x->ld + i) * vf_set(by);
            if (!(by > 0))
                v = vf_zero();
            vf_store(S + d * x->ld + i, v);
        }
}

/* S and z before the chunk become those behind it, by the rows of its last document; `scaled` [C][ld]: scratch.  Of both
 * the columns from `at` on, `wide` of them: numbers of one column do not depend on others. */
static inline void la_carry_columns(const la_view *x, const la_chunk *w, int64_t at, int64_t wide,
                                    const float *k, const float *v, float *scaled, float *S)
{
    const int64_t D = x->a->head_dim, ld = x->ld, from = w->from[w->n - 1];
    la_scale_state(x, w->e_last, wide, S + at);
    chunk_scale(scaled, k, w->blocks, ld, w->d);
    la_mm(x, &(mm_args){ D, wide, w->n - from, scaled + from * ld, 1, ld, v + from * ld + at, ld,
                         S + at, ld, true });
    if (x->a->feature == LM_FEATURE_ELU)
        la_add_rows(x, w, from, wide, k + at, w->d, S + D * ld + at);
}

static inline void la_carry(const la_view *x, const la_chunk *w, const float *k, const float *v,
                            float *scaled, float *S)
{
    la_carry_columns(x, w, 0, x->ld, k, v, scaled, S);
}

/* `wide` columns of a state from another one; from NULL: zeros. */
static inline void la_copy_columns(const la_view *x, int64_t wide, const float *from, float *to)
{
    for (int64_t d = 0; d < x->a->state_rows; d++)
        if (from)
            memcpy(to + d * x->ld, from + d * x->ld, (size_t)wide * sizeof *to);
        else
            memset(to + d * x->ld, 0, (size_t)wide * sizeof *to);
}

/* Part number `part` of `parts` of the columns of a state: *at and how many. */
static inline int64_t la_part(const la_view *x, int64_t part, int64_t parts, int64_t *at)
{
    const int64_t blocks = x->ld / PAD;
    *at = part * blocks / parts * PAD;
    return (part + 1) * blocks / parts * PAD - *at;
}

/* The states behind chunks [from, from + n) of key head j, of which S has those before the first one: one behind the other, in
 * columns `at` to at + wide.  The sequence begins at `row`; powers are there; k, v, scaled [C][ld]: scratch. */
LM_INLINE void la_states(lm_dtype t, const la_view *x, la_chunk *y, int64_t row, int64_t from,
                         int64_t n, int64_t j, int64_t at, int64_t wide, float *k, float *v,
                         float *scaled, float *S)
{
    for (int64_t m = from; m < from + n; m++, S += x->size) {
        la_chunk_at(x, row, x->a->seq, m, y);
        la_keys(t, x, y, j, k, v);
        la_copy_columns(x, wide, S + at, S + x->size + at);
        la_carry_columns(x, y, at, wide, k, v, scaled, S + x->size);
    }
}

#define LM_LA_PASTE(name, level) lm_##name##_##level
#define LM_LA_NAME(name, level)  LM_LA_PASTE(name, level)
#define linear_attention_dx_run  LM_LA_NAME(linear_attention_dx, LM_SIMD)
#define linear_attention_dx_work LM_LA_NAME(linear_attention_dx_work, LM_SIMD)
void linear_attention_dx_run(const lm_call *c);
size_t linear_attention_dx_work(const lm_call *c, int threads);

#endif
