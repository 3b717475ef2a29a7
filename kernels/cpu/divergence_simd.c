/* SPDX-License-Identifier: Apache-2.0 */
/* divergence_simd.c -- the divergence of two heads: a chunk of rows at a time, logits of both by products, then a row
 * in three passes: largest logits and sums, the loss and g, the gradient in place of the student's logits. */
#include "kernels/divergence.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/linear.h"

typedef struct {
    const lm_call *call;
    const lm_divergence_attr *attr;
    int64_t first, pitch; /* of the chunk; floats from row to row */
    float *s, *t;         /* logits of the student and of the teacher */
    bool grad;
} divergence_job;

static int64_t pitch_of(const lm_call *c)
{
    return ((((const lm_divergence_attr *)c->attr)->vocab + 15) / 16 | 1) * 16;
}

/* exp(d) for d <= 0, 0 below -64, as in the head. */
LM_INLINE vf exp_below(vf d)
{
    vf least = vf_set(-64);
    return vf_if_lt(d, least, vf_zero(), vf_exp(vf_max(least, d)));
}

/* Logits to logs of softmax(cap(z) / T), in place; c: the capped logits' part of the cap (may be NULL). */
static void log_softmax(float *z, int64_t vocab, float cap, float temperature, float *slope)
{
    vf c = vf_set(cap), over = vf_set(1 / (cap > 0 ? cap : 1)), cold = vf_set(1 / temperature);
    vf best = vf_set(-INFINITY), all = vf_zero(), one = vf_set(1), bad = vf_zero();
    VF_FOR(i, n, vocab, {
        vf v = vf_get_any(LM_DTYPE_F32, z, i, n);
        if (cap > 0) {
            vf u = vf_tanh(v * over);
            v = c * u;
            if (slope)
                vf_put_any(LM_DTYPE_F32, slope, i, vf_fnma(u, u, one), n);
        }
        v = v * cold;
        vf_put_any(LM_DTYPE_F32, z, i, v, n);
        bad += v - v;
        best = vf_max(n < VF_LANES ? vf_keep_n(v, n, best) : v, best);
    });
    float top = vf_top(best);
    vf m = vf_set(top);
    VF_FOR(i, n, vocab, {
        vf e = exp_below(vf_get_any(LM_DTYPE_F32, z, i, n) - m);
        all += n < VF_LANES ? vf_keep_n(e, n, vf_zero()) : e;
    });
    float lse = vf_sum(bad) == 0 ? (float)log((double)vf_sum(all)) : NAN;
    m = vf_set(top);
    vf l = vf_set(lse);
    VF_FOR(i, n, vocab,
           { vf_put_any(LM_DTYPE_F32, z, i, vf_get_any(LM_DTYPE_F32, z, i, n) - m - l, n); });
}

/* The loss of logs s and t; g in place of t; *mean: the sum of s g. */
static float divergence_of(float *s, float *t, int64_t vocab, float beta, float *mean)
{
    vf b = vf_set(beta), a = vf_set(1 - beta), zero = vf_zero(), loss = zero, sum = zero;
    vf tiny = vf_set(1e-37f);
    VF_FOR(i, n, vocab, {
        vf ls = vf_get_any(LM_DTYPE_F32, s, i, n), lt = vf_get_any(LM_DTYPE_F32, t, i, n);
        vf p = exp_below(ls), q = exp_below(lt), part, g;
        if (beta <= 0) {
            part = q * vf_if_lt(zero, q, lt - ls, q);
            g = zero - q;
        } else if (beta >= 1) {
            g = vf_if_lt(zero, p, ls - lt, p);
            part = p * g;
        } else {
            vf m = vf_log(vf_max(tiny, vf_fma(a, p, b * q)));
            vf of_t = q * vf_if_lt(zero, q, lt - m, q);
            g = a * vf_if_lt(zero, p, ls - m, p);
            part = vf_fma(b, of_t, p * g);
        }
        if (n < VF_LANES) {
            part = vf_keep_n(part, n, zero);
            g = vf_keep_n(g, n, zero);
            p = vf_keep_n(p, n, zero);
        }
        loss += part;
        sum = vf_fma(p, g, sum);
        vf_put_any(LM_DTYPE_F32, t, i, g, n);
    });
    *mean = vf_sum(sum);
    return vf_sum(loss);
}

/* scale d loss / d logit in place of s, as type `type`; slope: of the soft cap (NULL: 1). */
LM_INLINE void gradient_row(lm_dtype type, float *s, const float *g, const float *slope,
                            int64_t vocab, float beta, float mean, float scale)
{
    vf m = vf_set(mean), factor = vf_set(scale);
    VF_FOR(i, n, vocab, { /* in place: BF16 element i is never ahead of float i */
                          vf p = exp_below(vf_get_any(LM_DTYPE_F32, s, i, n));
                          vf v = vf_get_any(LM_DTYPE_F32, g, i, n);
                          vf d = beta <= 0 ? p + v : p * (v - m);
                          if (slope)
                              d = d * vf_get_any(LM_DTYPE_F32, slope, i, n);
                          vf_put_any(type, s, i, d * factor, n);
    });
}

LM_INLINE void divergence_row(lm_dtype type, const divergence_job *j, int64_t row, float *slope)
{
    const lm_divergence_attr *a = j->attr;
    const lm_call *c = j->call;
    float *s = j->s + row * j->pitch, *t = j->t + row * j->pitch, mean, loss;
    int64_t at = j->first + row;
    float temperature = (float)a->temperature;
    if (((const int32_t *)c->in[4].data)[at] < 0) {
        if (j->grad)
            memset(s, 0, (size_t)a->vocab * lm_dtype_size(type));
        else
            ((float *)c->out[0].data)[at] = 0;
        return;
    }
    log_softmax(s, a->vocab, (float)a->soft_cap, temperature, slope);
    log_softmax(t, a->vocab, (float)a->teacher_cap, temperature, NULL);
    loss = divergence_of(s, t, a->vocab, (float)a->beta, &mean);
    if (!j->grad)
        ((float *)c->out[0].data)[at] = loss;
    else
        gradient_row(type, s, t, slope, a->vocab, (float)a->beta, mean,
                     ((const float *)c->in[5].data)[at] / temperature);
}

/* Slopes of a row's soft cap, a row for each thread, lie behind both chunks of logits. */
static int64_t slopes_at(const lm_call *c)
{
    return 2 * lm_divergence_chunk(c->in[0].dim[0], pitch_of(c)) * pitch_of(c);
}

static void divergence_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const divergence_job *j = ctx;
    float *slope = NULL;
    if (j->grad && j->attr->soft_cap > 0)
        slope = (float *)j->call->work + slopes_at(j->call) + worker * j->pitch;
    for (int64_t row = begin; row < end; row++)
        if (j->call->in[0].dtype == LM_DTYPE_BF16)
            divergence_row(LM_DTYPE_BF16, j, row, slope);
        else
            divergence_row(LM_DTYPE_F32, j, row, slope);
}

/* ---- products ---- */

/* Rows [first, first + m) of x w^T, into z. */
static lm_gemm logits_of(const lm_call *c, int in, int64_t first, int64_t m, float *z)
{
    const lm_tensor *x = &c->in[in], *w = &c->in[in + 1];
    int64_t cols = x->dim[1], size = (int64_t)lm_dtype_size(x->dtype);
    return (lm_gemm){
        .m = m,
        .n = ((const lm_divergence_attr *)c->attr)->vocab,
        .k = cols,
        .ab = x->dtype,
        .cd = LM_DTYPE_F32,
        .tb = true,
        .a = x->data ? (const char *)x->data + first * cols * size : NULL,
        .lda = cols,
        .b = w->codes ? NULL : w->data,
        .b_codes = w->codes,
        .ldb = cols,
        .c = z,
        .ldc = pitch_of(c),
    };
}

static int64_t gradient_pitch(const lm_call *c)
{
    return pitch_of(c) * (c->in[0].dtype == LM_DTYPE_BF16 ? 2 : 1);
}

static lm_gemm dx_of(const lm_call *c, int64_t first, int64_t m, const float *d)
{
    const lm_tensor *x = &c->in[0];
    int64_t cols = x->dim[1], size = (int64_t)lm_dtype_size(x->dtype);
    char *dx = c->out[0].data;
    return (lm_gemm){
        .m = m,
        .n = cols,
        .k = ((const lm_divergence_attr *)c->attr)->vocab,
        .ab = x->dtype,
        .cd = x->dtype,
        .a = d,
        .lda = gradient_pitch(c),
        .b = c->in[1].data,
        .ldb = cols,
        .c = dx ? dx + first * cols * size : NULL,
        .ldc = cols,
    };
}

static lm_gemm dw_of(const lm_call *c, int64_t first, int64_t m, const float *d)
{
    const lm_divergence_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    int64_t cols = x->dim[1], size = (int64_t)lm_dtype_size(x->dtype);
    bool add = !c->step || !overwrites(c, a->acc);
    return (lm_gemm){
        .m = a->vocab,
        .n = cols,
        .k = m,
        .ab = x->dtype,
        .cd = LM_DTYPE_F32,
        .ta = true,
        .accumulate = first > 0 || add,
        .a = d,
        .lda = gradient_pitch(c),
        .b = x->data ? (const char *)x->data + first * cols * size : NULL,
        .ldb = cols,
        .c = c->n_out > 1 ? c->out[1].data : NULL,
        .ldc = cols,
    };
}

static size_t products_at(const lm_call *c, int threads)
{
    return ((size_t)(slopes_at(c) + threads * pitch_of(c)) * sizeof(float) + 63) / 64 * 64;
}

static void run_product(const lm_call *c, lm_gemm g)
{
    if (!g.c)
        return;
    g.work = (char *)c->work + products_at(c, lm_par_threads(c->par));
    lm_gemm_run(&g, LM_SIMD_LEVEL, c->par);
}

static void run(const lm_call *c, bool grad)
{
    int64_t rows = c->in[0].dim[0], pitch = pitch_of(c), chunk = lm_divergence_chunk(rows, pitch);
    divergence_job j = { .call = c, .attr = c->attr, .pitch = pitch, .grad = grad };
    j.s = c->work;
    j.t = j.s + chunk * pitch;
    for (j.first = 0; j.first < rows; j.first += chunk) {
        int64_t m = rows - j.first < chunk ? rows - j.first : chunk;
        run_product(c, logits_of(c, 0, j.first, m, j.s));
        run_product(c, logits_of(c, 2, j.first, m, j.t));
        lm_par_for(c->par, m, 4, divergence_rows, &j);
        if (!grad)
            continue;
        run_product(c, dx_of(c, j.first, m, j.s));
        run_product(c, dw_of(c, j.first, m, j.s));
    }
}

static void divergence(const lm_call *c)
{
    run(c, false);
}

static void divergence_grad(const lm_call *c)
{
    const lm_divergence_attr *a = c->attr;
    const lm_tensor *w = &c->in[1];
    float *dw = c->n_out > 1 ? c->out[1].data : NULL;
    run(c, true);
    if (dw && overwrites(c, a->acc)) /* rows of padding */
        memset(dw + a->vocab * w->dim[1], 0,
               (size_t)((w->dim[0] - a->vocab) * w->dim[1]) * sizeof *dw);
}

static size_t larger(size_t most, lm_gemm g, int threads)
{
    size_t n = lm_gemm_work(&g, LM_SIMD_LEVEL, threads);
    return n > most ? n : most;
}

static size_t work_of(const lm_call *c, int threads, bool grad)
{
    int64_t rows = c->in[0].dim[0], chunk = lm_divergence_chunk(rows, pitch_of(c));
    size_t most = 0;
    for (int64_t m = chunk;; m = rows % chunk) { /* whole chunks, and the last one */
        most = larger(most, logits_of(c, 0, 0, m, NULL), threads);
        most = larger(most, logits_of(c, 2, 0, m, NULL), threads);
        if (grad) {
            most = larger(most, dx_of(c, 0, m, NULL), threads);
            most = larger(most, dw_of(c, 0, m, NULL), threads);
        }
        if (m != chunk || rows % chunk == 0)
            break;
    }
    return products_at(c, threads) + most;
}

static size_t divergence_work(const lm_call *c, int threads)
{
    return work_of(c, threads, false);
}

static size_t grad_work(const lm_call *c, int threads)
{
    return work_of(c, threads, true);
}

const lm_kernel LM_TABLE_NAME(divergence, LM_SIMD)[] = {
    VF_KERNEL("divergence", divergence, divergence_work),
    VF_KERNEL("divergence_grad", divergence_grad, grad_work),
    VF_KERNEL_END,
};
