/* SPDX-License-Identifier: Apache-2.0 */
/* norm_simd.c -- RMSNorm and LayerNorm on vectors.  A row is read from memory once: the later
 * passes over it find it in the first-level cache.  Gradients of the weights are summed over fixed
 * blocks of rows, then over the blocks in order, so the bits do not depend on threads. */
#include "kernels/norm.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* Address of element i of an array of F32 or BF16. */
LM_INLINE void *at(lm_dtype t, const void *p, int64_t i)
{
    return p ? (char *)(uintptr_t)p + i * (t == LM_DTYPE_BF16 ? 2 : 4) : NULL;
}

/* The kinds of rows; RMS_ONCE: the normed row is not rounded; RMS_PLUS: nor is it, and weights are 1 + w. */
typedef enum { RMS = LM_NORM_RMS, LAYER = LM_NORM_LAYER, RMS_PLUS, RMS_ONCE } form;

static form form_of(const lm_call *c)
{
    const lm_norm_attr *a = c->attr;
    return a->kind == LM_NORM_LAYER      ? LAYER
           : a->plus_one                 ? RMS_PLUS
           : a->kind == LM_NORM_RMS_ONCE ? RMS_ONCE
                                         : RMS;
}

/* Weights from i on, in the form used. */
LM_INLINE vf weights(form kind, const float *w, int64_t i, int64_t n)
{
    vf v = vf_get_any(LM_DTYPE_F32, w, i, n);
    if (kind == RMS_PLUS)
        v += vf_set(1);
    return v;
}

/* Mean (0 for RMSNorm) and reciprocal deviation of a row of n_cols. */
LM_INLINE float deviation(lm_dtype t, form kind, const void *s, int64_t n_cols, double eps,
                          float *mean)
{
    *mean = 0;
    if (kind == LAYER) {
        vf sum = vf_zero();
        VF_FOR(i, n, n_cols, { sum += vf_get_any(t, s, i, n); });
        *mean = vf_sum(sum) / (float)n_cols;
    }
    vf sq = vf_zero(), mu = vf_set(*mean);
    VF_FOR(i, n, n_cols, {
        vf d = vf_get_any(t, s, i, n) - mu;
        if (n < VF_LANES)
            d = vf_keep_n(d, n, vf_zero());
        sq = vf_fma(d, d, sq);
    });
    return (float)(1 / sqrt((double)vf_sum(sq) / (double)n_cols + eps));
}

LM_INLINE void scale_row(lm_dtype t, form kind, const void *s, const float *w, const float *b,
                         void *y, int64_t n_cols, float mean, float rstd)
{
    vf mu = vf_set(mean), r = vf_set(rstd);
    VF_FOR(i, n, n_cols, {
        vf v = vf_get_any(t, s, i, n), wv = weights(kind, w, i, n);
        if (kind == RMS)
            v = vf_round_to(t, v * r);
        else
            v = (v - mu) * r;
        v *= wv;
        if (b)
            v += vf_get_any(LM_DTYPE_F32, b, i, n);
        vf_put_any(t, y, i, v, n);
    });
}

LM_INLINE void norm_part(lm_dtype t, form kind, const lm_call *c, int64_t begin, int64_t end)
{
    const lm_norm_attr *a = c->attr;
    const void *x = c->in[0].data, *r = opt_data(c->in, c->n_in, 3);
    const float *w = c->in[1].data, *b = opt_data(c->in, c->n_in, 2);
    void *y = c->out[0].data, *s = opt_data(c->out, c->n_out, 2);
    float *stat = c->out[1].data;
    int64_t n_cols = last_dim(&c->in[0]);
    for (int64_t row = begin; row < end; row++) {
        const void *src = at(t, x, row * n_cols);
        if (r) {
            void *dst = at(t, s, row * n_cols);
            const void *more = at(t, r, row * n_cols);
            VF_FOR(i, n, n_cols, {
                vf_put_any(t, dst, i, vf_get_any(t, src, i, n) + vf_get_any(t, more, i, n), n);
            });
            src = dst;
        }
        float mean, rstd = deviation(t, kind, src, n_cols, a->eps, &mean);
        stat[2 * row] = mean;
        stat[2 * row + 1] = rstd;
        scale_row(t, kind, src, w, b, at(t, y, row * n_cols), n_cols, mean, rstd);
    }
}

LM_INLINE void norm_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    form kind = form_of(c);
    if (kind == LAYER)
        norm_part(t, LAYER, c, begin, end);
    else if (kind == RMS)
        norm_part(t, RMS, c, begin, end);
    else if (kind == RMS_PLUS)
        norm_part(t, RMS_PLUS, c, begin, end);
    else
        norm_part(t, RMS_ONCE, c, begin, end);
}
VF_TYPED(norm_rows)

static void norm(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(norm_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

/* ds = rstd (g - mean(g) - xh mean(g xh)) + dres, g = dy w; without mean(g) for RMSNorm. */
LM_INLINE void dx_row(lm_dtype t, form kind, const void *dy, const void *s, const float *w,
                      const void *dres, void *ds, int64_t n_cols, float mean, float rstd)
{
    vf mu = vf_set(mean), r = vf_set(rstd), s1 = vf_zero(), s2 = vf_zero();
    VF_FOR(i, n, n_cols, {
        vf g = vf_get_any(t, dy, i, n) * weights(kind, w, i, n);
        vf xh = (vf_get_any(t, s, i, n) - mu) * r;
        if (kind == LAYER)
            s1 += g;
        s2 = vf_fma(g, n < VF_LANES ? vf_keep_n(xh, n, vf_zero()) : xh, s2);
    });
    vf g1 = vf_set(vf_sum(s1) / (float)n_cols), g2 = vf_set(vf_sum(s2) / (float)n_cols);
    VF_FOR(i, n, n_cols, {
        vf g = vf_get_any(t, dy, i, n) * weights(kind, w, i, n);
        vf xh = (vf_get_any(t, s, i, n) - mu) * r;
        if (kind == LAYER)
            g -= g1;
        vf d = vf_fnma(xh, g2, g) * r;
        if (dres)
            d += vf_get_any(t, dres, i, n);
        vf_put_any(t, ds, i, d, n);
    });
}

LM_INLINE void norm_dx_part(lm_dtype t, form kind, const lm_call *c, int64_t begin, int64_t end)
{
    const void *dy = c->in[0].data, *s = c->in[1].data, *dres = opt_data(c->in, c->n_in, 4);
    const float *w = c->in[2].data, *stat = c->in[3].data;
    int64_t n_cols = last_dim(&c->in[1]);
    for (int64_t row = begin; row < end; row++) {
        int64_t o = row * n_cols;
        dx_row(t, kind, at(t, dy, o), at(t, s, o), w, at(t, dres, o), at(t, c->out[0].data, o),
               n_cols, stat[2 * row], stat[2 * row + 1]);
    }
}

LM_INLINE void norm_dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    form kind = form_of(c);
    if (kind == LAYER)
        norm_dx_part(t, LAYER, c, begin, end);
    else if (kind == RMS_PLUS)
        norm_dx_part(t, RMS_PLUS, c, begin, end);
    else /* which reads what was not rounded in either case */
        norm_dx_part(t, RMS, c, begin, end);
}
VF_TYPED(norm_dx_rows)

static void norm_dx(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(norm_dx_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

/* Rows in a block of the weight gradients: a function of the number of rows alone. */
static int64_t block_rows(int64_t n_rows)
{
    int64_t rows = (n_rows + 63) / 64;
    return rows > 64 ? (rows + 3) / 4 * 4 : 64;
}

static int64_t block_count(int64_t n_rows)
{
    int64_t b = block_rows(n_rows);
    return (n_rows + b - 1) / b;
}

/* accw += sum over R rows of dy xh, accb (may be NULL) += sum of dy; rows are `pitch` elements
 * apart and their statistics at stat[r * stat_pitch] (mean first when LayerNorm). */
LM_INLINE void dw_rows(lm_dtype t, form kind, int R, const void *dy, const void *s, int64_t pitch,
                       const float *stat, int64_t stat_pitch, float *accw, float *accb,
                       int64_t n_cols)
{
    VF_FOR(i, n, n_cols, {
        vf aw = vf_get_any(LM_DTYPE_F32, accw, i, n), ab = vf_zero();
        if (accb)
            ab = vf_get_any(LM_DTYPE_F32, accb, i, n);
        for (int r = 0; r < R; r++) {
            const float *st = stat + r * stat_pitch;
            vf g = vf_get_any(t, dy, r * pitch + i, n), v = vf_get_any(t, s, r * pitch + i, n);
            if (kind == RMS)
                v = vf_round_to(t, v * vf_set(st[0]));
            else if (kind != LAYER)
                v *= vf_set(st[0]);
            else
                v = (v - vf_set(st[0])) * vf_set(st[1]);
            aw = vf_fma(g, v, aw);
            ab += g;
        }
        vf_put_any(LM_DTYPE_F32, accw, i, aw, n);
        if (accb)
            vf_put_any(LM_DTYPE_F32, accb, i, ab, n);
    });
}

LM_INLINE void norm_dw_part(lm_dtype t, form kind, const lm_call *c, int64_t begin, int64_t end)
{
    const void *dy = c->in[0].data, *s = c->in[1].data;
    const float *stat = (const float *)c->in[2].data + (kind != LAYER);
    int64_t n_cols = last_dim(&c->in[1]), n_rows = row_count(&c->in[1]);
    int64_t block = block_rows(n_rows);
    bool bias = opt_data(c->out, c->n_out, 1);
    for (int64_t k = begin; k < end; k++) {
        float *accw = (float *)c->work + k * 2 * n_cols, *accb = bias ? accw + n_cols : NULL;
        int64_t row = k * block, past = row + block < n_rows ? row + block : n_rows;
        memset(accw, 0, (size_t)n_cols * 2 * sizeof(float));
        for (; row + 4 <= past; row += 4)
            dw_rows(t, kind, 4, at(t, dy, row * n_cols), at(t, s, row * n_cols), n_cols,
                    stat + 2 * row, 2, accw, accb, n_cols);
        for (; row < past; row++)
            dw_rows(t, kind, 1, at(t, dy, row * n_cols), at(t, s, row * n_cols), n_cols,
                    stat + 2 * row, 2, accw, accb, n_cols);
    }
}

LM_INLINE void norm_dw_blocks(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    form kind = form_of(c);
    if (kind == LAYER)
        norm_dw_part(t, LAYER, c, begin, end);
    else if (kind == RMS)
        norm_dw_part(t, RMS, c, begin, end);
    else if (kind == RMS_PLUS)
        norm_dw_part(t, RMS_PLUS, c, begin, end);
    else
        norm_dw_part(t, RMS_ONCE, c, begin, end);
}
VF_TYPED(norm_dw_blocks)

/* out[0] and out[1] (+)= the blocks in order; each block holds n_cols[0] numbers of the first, then
 * n_cols[1] of the second. */
static void fold_unlike(const lm_call *c, lm_acc acc, int64_t n_blocks, const int64_t n_cols[2])
{
    const float *part = c->work;
    for (int k = 0; k < 2; k++) {
        float *out = opt_data(c->out, c->n_out, k);
        if (out)
            VF_FOR(i, n, n_cols[k], {
                vf sum = vf_zero();
                for (int64_t b = 0; b < n_blocks; b++)
                    sum += vf_get_any(LM_DTYPE_F32, part, b * (n_cols[0] + n_cols[1]) + i, n);
                if (!overwrites(c, acc))
                    sum += vf_get_any(LM_DTYPE_F32, out, i, n);
                vf_put_any(LM_DTYPE_F32, out, i, sum, n);
            });
        part += n_cols[0];
    }
}

static void fold_blocks(const lm_call *c, lm_acc acc, int64_t n_blocks, int64_t n_cols)
{
    fold_unlike(c, acc, n_blocks, (int64_t[]){ n_cols, n_cols });
}

static void norm_dw(const lm_call *c)
{
    const lm_norm_attr *a = c->attr;
    int64_t n_blocks = block_count(row_count(&c->in[1]));
    lm_par_for(c->par, n_blocks, 1, VF_PICK(norm_dw_blocks, c->in[0].dtype), (void *)(uintptr_t)c);
    fold_blocks(c, a->acc, n_blocks, last_dim(&c->in[1]));
}

static size_t norm_dw_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)(block_count(row_count(&c->in[1])) * 2 * last_dim(&c->in[1])) * sizeof(float);
}

LM_INLINE void head_norm_part(lm_dtype t, form kind, const lm_call *c, int64_t begin, int64_t end)
{
    const lm_head_norm_attr *a = c->attr;
    int64_t normed = a->heads + a->kv_heads, all = normed + a->kv_heads, n_cols = a->head_dim;
    const void *x = c->in[0].data;
    void *y = c->out[0].data;
    float *stat = c->out[1].data;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t h = 0; h < normed; h++) {
            int64_t o = (row * all + h) * n_cols;
            const float *w = c->in[h < a->heads ? 1 : 2].data;
            float mean, rstd = deviation(t, RMS, at(t, x, o), n_cols, a->eps, &mean);
            stat[row * normed + h] = rstd;
            scale_row(t, kind, at(t, x, o), w, NULL, at(t, y, o), n_cols, 0, rstd);
        }
        int64_t o = (row * all + normed) * n_cols;
        if (x != y)
            memcpy(at(t, y, o), at(t, x, o), (size_t)(a->kv_heads * n_cols) * lm_dtype_size(t));
    }
}

LM_INLINE void head_norm_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    if (((const lm_head_norm_attr *)c->attr)->plus_one)
        head_norm_part(t, RMS_PLUS, c, begin, end);
    else
        head_norm_part(t, RMS, c, begin, end);
}
VF_TYPED(head_norm_rows)

static void head_norm(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(head_norm_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

LM_INLINE void head_norm_dx_part(lm_dtype t, form kind, const lm_call *c, int64_t begin,
                                 int64_t end)
{
    const lm_head_norm_attr *a = c->attr;
    int64_t normed = a->heads + a->kv_heads, all = normed + a->kv_heads, n_cols = a->head_dim;
    const void *dy = c->in[0].data, *x = c->in[1].data;
    const float *stat = c->in[4].data;
    void *dx = c->out[0].data;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t h = 0; h < normed; h++) {
            int64_t o = (row * all + h) * n_cols;
            dx_row(t, kind, at(t, dy, o), at(t, x, o), c->in[h < a->heads ? 2 : 3].data, NULL,
                   at(t, dx, o), n_cols, 0, stat[row * normed + h]);
        }
        int64_t o = (row * all + normed) * n_cols;
        if (dy != dx)
            memcpy(at(t, dx, o), at(t, dy, o), (size_t)(a->kv_heads * n_cols) * lm_dtype_size(t));
    }
}

LM_INLINE void head_norm_dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    if (((const lm_head_norm_attr *)c->attr)->plus_one)
        head_norm_dx_part(t, RMS_PLUS, c, begin, end);
    else
        head_norm_dx_part(t, RMS, c, begin, end);
}
VF_TYPED(head_norm_dx_rows)

static void head_norm_dx(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(head_norm_dx_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

LM_INLINE void head_norm_dw_part(lm_dtype t, form kind, const lm_call *c, int64_t begin,
                                 int64_t end)
{
    const lm_head_norm_attr *a = c->attr;
    int64_t normed = a->heads + a->kv_heads, all = normed + a->kv_heads, n_cols = a->head_dim;
    const void *dy = c->in[0].data, *x = c->in[1].data;
    const float *stat = c->in[2].data;
    int64_t n_rows = row_count(&c->in[1]), block = block_rows(n_rows);
    for (int64_t k = begin; k < end; k++) {
        float *acc = (float *)c->work + k * 2 * n_cols;
        int64_t past = (k + 1) * block < n_rows ? (k + 1) * block : n_rows;
        memset(acc, 0, (size_t)n_cols * 2 * sizeof(float));
        for (int64_t row = k * block; row < past; row++) {
            for (int64_t h = 0; h < normed; h++) {
                int64_t o = (row * all + h) * n_cols;
                dw_rows(t, kind, 1, at(t, dy, o), at(t, x, o), n_cols, stat + row * normed + h, 1,
                        acc + (h < a->heads ? 0 : n_cols), NULL, n_cols);
            }
        }
    }
}

LM_INLINE void head_norm_dw_blocks(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    if (((const lm_head_norm_attr *)c->attr)->plus_one)
        head_norm_dw_part(t, RMS_PLUS, c, begin, end);
    else
        head_norm_dw_part(t, RMS, c, begin, end);
}
VF_TYPED(head_norm_dw_blocks)

static void head_norm_dw(const lm_call *c)
{
    const lm_head_norm_attr *a = c->attr;
    int64_t n_blocks = block_count(row_count(&c->in[1]));
    lm_par_for(c->par, n_blocks, 1, VF_PICK(head_norm_dw_blocks, c->in[0].dtype),
               (void *)(uintptr_t)c);
    fold_blocks(c, a->acc, n_blocks, a->head_dim);
}

static size_t head_norm_dw_work(const lm_call *c, int threads)
{
    const lm_head_norm_attr *a = c->attr;
    (void)threads;
    return (size_t)(block_count(row_count(&c->in[1])) * 2 * a->head_dim) * sizeof(float);
}

/* ---- all queries, all keys ---- */

/* Where queries, keys and values of a row begin, and its end. */
typedef struct {
    int64_t at[4];
} borders;

static borders borders_of(const lm_qk_norm_attr *a)
{
    int64_t q = a->heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    return (borders){ { 0, q, q + kv, q + 2 * kv } };
}

LM_INLINE void qk_norm_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_qk_norm_attr *a = c->attr;
    borders b = borders_of(a);
    for (int64_t row = begin; row < end; row++) {
        const char *x = at(t, c->in[0].data, row * b.at[3]);
        char *y = at(t, c->out[0].data, row * b.at[3]);
        float *stat = (float *)c->out[1].data + 2 * row, mean;
        for (int k = 0; k < 2; k++) {
            int64_t n_cols = b.at[k + 1] - b.at[k];
            const void *part = at(t, x, b.at[k]);
            stat[k] = deviation(t, RMS_ONCE, part, n_cols, a->eps, &mean);
            scale_row(t, RMS_ONCE, part, c->in[1 + k].data, NULL, at(t, y, b.at[k]), n_cols, 0,
                      stat[k]);
        }
        if (x != y)
            memcpy(at(t, y, b.at[2]), at(t, x, b.at[2]),
                   (size_t)(b.at[3] - b.at[2]) * lm_dtype_size(t));
    }
}
VF_TYPED(qk_norm_rows)

static void qk_norm(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(qk_norm_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

LM_INLINE void qk_norm_dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    borders b = borders_of(c->attr);
    for (int64_t row = begin; row < end; row++) {
        const char *dy = at(t, c->in[0].data, row * b.at[3]),
                   *x = at(t, c->in[1].data, row * b.at[3]);
        const float *stat = (const float *)c->in[4].data + 2 * row;
        char *dx = at(t, c->out[0].data, row * b.at[3]);
        for (int k = 0; k < 2; k++)
            dx_row(t, RMS_ONCE, at(t, dy, b.at[k]), at(t, x, b.at[k]), c->in[2 + k].data, NULL,
                   at(t, dx, b.at[k]), b.at[k + 1] - b.at[k], 0, stat[k]);
        if (dy != dx)
            memcpy(at(t, dx, b.at[2]), at(t, dy, b.at[2]),
                   (size_t)(b.at[3] - b.at[2]) * lm_dtype_size(t));
    }
}
VF_TYPED(qk_norm_dx_rows)

static void qk_norm_dx(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(qk_norm_dx_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

LM_INLINE void qk_norm_dw_blocks(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    borders b = borders_of(c->attr);
    int64_t n_rows = row_count(&c->in[1]), block = block_rows(n_rows);
    for (int64_t k = begin; k < end; k++) {
        float *acc = (float *)c->work + k * b.at[2];
        int64_t past = (k + 1) * block < n_rows ? (k + 1) * block : n_rows;
        memset(acc, 0, (size_t)b.at[2] * sizeof(float));
        for (int64_t row = k * block; row < past; row++)
            for (int i = 0; i < 2; i++)
                dw_rows(t, RMS_ONCE, 1, at(t, c->in[0].data, row * b.at[3] + b.at[i]),
                        at(t, c->in[1].data, row * b.at[3] + b.at[i]), b.at[3],
                        (const float *)c->in[2].data + 2 * row + i, 1, acc + b.at[i], NULL,
                        b.at[i + 1] - b.at[i]);
    }
}
VF_TYPED(qk_norm_dw_blocks)

static void qk_norm_dw(const lm_call *c)
{
    const lm_qk_norm_attr *a = c->attr;
    borders b = borders_of(a);
    int64_t n_blocks = block_count(row_count(&c->in[1]));
    lm_par_for(c->par, n_blocks, 1, VF_PICK(qk_norm_dw_blocks, c->in[0].dtype),
               (void *)(uintptr_t)c);
    fold_unlike(c, a->acc, n_blocks, (int64_t[]){ b.at[1], b.at[2] - b.at[1] });
}

static size_t qk_norm_dw_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)(block_count(row_count(&c->in[1])) * borders_of(c->attr).at[2]) * sizeof(float);
}

const lm_kernel LM_TABLE_NAME(norm, LM_SIMD)[] = {
    VF_KERNEL("norm", norm, NULL),
    VF_KERNEL("norm_dx", norm_dx, NULL),
    VF_KERNEL("norm_dw", norm_dw, norm_dw_work),
    VF_KERNEL("head_norm", head_norm, NULL),
    VF_KERNEL("head_norm_dx", head_norm_dx, NULL),
    VF_KERNEL("head_norm_dw", head_norm_dw, head_norm_dw_work),
    VF_KERNEL("qk_norm", qk_norm, NULL),
    VF_KERNEL("qk_norm_dx", qk_norm_dx, NULL),
    VF_KERNEL("qk_norm_dw", qk_norm_dw, qk_norm_dw_work),
    VF_KERNEL_END,
};
