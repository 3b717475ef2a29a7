/* SPDX-License-Identifier: Apache-2.0 */
/* optim_simd.c -- optimiser steps in one pass over memory.  Master weights and states were just
 * read, so their lines are in the cache and are written in place; the BF16 copy is only written, so
 * whole lines of it go past the caches. */
#include "kernels/optim.h"

#include <math.h>
#include <string.h>

#ifdef __AVX512F__
#include "kernels/cpu/panels_simd.h"
#endif
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

enum { GRAIN = 32768 };

typedef struct {
    const float *g;
    float *p, *m, *v;
    uint16_t *copy;
    float beta1, beta2, one_beta1, one_beta2; /* one_beta = 1 - beta, computed in double */
    float lr, step, decay, inv_bc2, eps;      /* step = lr / bc1, decay = lr * weight decay */
    float scale, bound;
    float momentum, fresh; /* sgd: buf = momentum buf + fresh d */
    bool nesterov, first;
} job;

LM_INLINE vf clip(const job *j, vf g)
{
    vf bound = vf_set(j->bound);
    return vf_max(vf_zero() - bound, vf_min(bound, g * vf_set(j->scale))); /* NaN propagates */
}

LM_INLINE vf adamw_at(const job *j, int64_t i, int64_t n)
{
    vf g = clip(j, vf_get_any(LM_DTYPE_F32, j->g, i, n));
    vf m = vf_get_any(LM_DTYPE_F32, j->m, i, n), v = vf_get_any(LM_DTYPE_F32, j->v, i, n);
    vf p = vf_get_any(LM_DTYPE_F32, j->p, i, n);
    m = vf_fma(vf_set(j->one_beta1), g, vf_set(j->beta1) * m);
    v = vf_fma(vf_set(j->one_beta2) * g, g, vf_set(j->beta2) * v);
    vf move = vf_set(j->step) * m / (vf_sqrt(v * vf_set(j->inv_bc2)) + vf_set(j->eps));
    p -= vf_fma(vf_set(j->decay), p, move);
    vf_put_any(LM_DTYPE_F32, j->m, i, m, n);
    vf_put_any(LM_DTYPE_F32, j->v, i, v, n);
    vf_put_any(LM_DTYPE_F32, j->p, i, p, n);
    return p;
}

LM_INLINE vf sgd_at(const job *j, int64_t i, int64_t n)
{
    vf p = vf_get_any(LM_DTYPE_F32, j->p, i, n);
    vf d = vf_fma(vf_set(j->decay), p, clip(j, vf_get_any(LM_DTYPE_F32, j->g, i, n)));
    if (j->m) {
        vf b = d;
        if (!j->first)
            b = vf_fma(vf_set(j->fresh), d,
                       vf_set(j->momentum) * vf_get_any(LM_DTYPE_F32, j->m, i, n));
        vf_put_any(LM_DTYPE_F32, j->m, i, b, n);
        d = j->nesterov ? vf_fma(vf_set(j->momentum), b, d) : b;
    }
    p = vf_fnma(vf_set(j->lr), d, p);
    vf_put_any(LM_DTYPE_F32, j->p, i, p, n);
    return p;
}

/* Elements [begin, end) of either rule.  GRAIN is a multiple of a line of the copy, so when the
 * copy starts on a line so does every chunk. */
LM_INLINE void step_span(bool adam, const job *j, int64_t begin, int64_t end)
{
    int64_t i = begin;
    if (j->copy && ((uintptr_t)(j->copy + begin) & 63) == 0) {
        for (; i + 2 * VF_LANES <= end; i += 2 * VF_LANES) {
            vf a = adam ? adamw_at(j, i, VF_LANES) : sgd_at(j, i, VF_LANES);
            vf b = adam ? adamw_at(j, i + VF_LANES, VF_LANES) : sgd_at(j, i + VF_LANES, VF_LANES);
            vf_stream_bf16(j->copy + i, a, b);
        }
        _mm_sfence();
    }
    int64_t from = i;
    VF_FOR(k, n, end - from, {
        vf p = adam ? adamw_at(j, from + k, n) : sgd_at(j, from + k, n);
        if (j->copy)
            vf_put_any(LM_DTYPE_BF16, j->copy, from + k, p, n);
    });
}

/* ---- a copy in panels: the rows of a panel pass through scratch that stays in the caches ---- */

#ifdef __AVX512F__
typedef struct {
    job j;
    int64_t width;
    uint16_t *copy, *rows; /* the panels; scratch of the workers */
} panel_job;

static void adamw_panels(void *ctx, int64_t begin, int64_t end, int worker)
{
    const panel_job *p = ctx;
    int64_t count = LM_PANEL * p->width;
    uint16_t *rows = p->rows + worker * count;
    for (int64_t q = begin; q < end; q++) {
        int64_t at = q * count;
        for (int64_t i = 0; i < count; i += VF_LANES)
            vf_store_bf16(rows + i, adamw_at(&p->j, at + i, VF_LANES));
        panel_of(LM_DTYPE_BF16, rows, p->width, p->copy + at);
    }
    _mm_sfence();
}

static bool run_panels(const lm_call *c, const job *j)
{
    const lm_tensor *copy = &c->out[3];
    if (c->n_out < 4 || !copy->data || !copy->panels)
        return false;
    panel_job p = { .j = *j, .width = copy->dim[1], .copy = copy->data, .rows = c->work };
    lm_par_for(c->par, copy->dim[0] / LM_PANEL, 1, adamw_panels, &p);
    return true;
}

static size_t adamw_work(const lm_call *c, int threads)
{
    const lm_tensor *copy = &c->out[3];
    return c->n_out > 3 && copy->panels
               ? (size_t)(threads * LM_PANEL * copy->dim[1]) * sizeof(uint16_t)
               : 0;
}
#else
static bool run_panels(const lm_call *c, const job *j)
{
    (void)c, (void)j;
    return false;
}
#define adamw_work NULL
#endif

static void adamw_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    step_span(true, ctx, begin, end);
}

static void sgd_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    step_span(false, ctx, begin, end);
}

static void adamw(const lm_call *c)
{
    const lm_adamw_attr a = lm_adamw_now(c);
    job j = { .g = c->in[0].data,
              .p = c->out[0].data,
              .m = c->out[1].data,
              .v = c->out[2].data,
              .copy = opt_data(c->out, c->n_out, 3),
              .beta1 = (float)a.beta1,
              .beta2 = (float)a.beta2,
              .one_beta1 = (float)(1 - a.beta1),
              .one_beta2 = (float)(1 - a.beta2),
              .step = (float)(a.lr / a.bc1),
              .decay = (float)(a.lr * a.weight_decay),
              .inv_bc2 = (float)(1 / a.bc2),
              .eps = (float)a.eps,
              .scale = (float)lm_optim_scale(c, 1, a.clip_norm),
              .bound = a.clip_value > 0 ? (float)a.clip_value : INFINITY };
    if (!isnan(j.scale) && !run_panels(c, &j))
        lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, adamw_span, &j);
}

static void sgd(const lm_call *c)
{
    const lm_sgd_attr a = lm_sgd_now(c);
    job j = { .g = c->in[0].data,
              .p = c->out[0].data,
              .m = opt_data(c->out, c->n_out, 1),
              .copy = opt_data(c->out, c->n_out, 2),
              .lr = (float)a.lr,
              .decay = (float)a.weight_decay,
              .momentum = (float)a.momentum,
              .fresh = (float)(1 - a.dampening),
              .nesterov = a.nesterov,
              .first = a.first,
              .scale = (float)lm_optim_scale(c, 1, a.clip_norm),
              .bound = a.clip_value > 0 ? (float)a.clip_value : INFINITY };
    if (!isnan(j.scale))
        lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, sgd_span, &j);
}

static void sumsq_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_sum_block *block = c->in[1].data;
    double *s = c->out[0].data;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        const float *x =
            (const float *)c->in[0].data + (int64_t)block[b].page * LM_SUM_BLOCK + block[b].first;
        const int64_t len = block[b].count;
        vd even = { 0 }, odd = { 0 };
        VF_FOR(i, n, len, {
            vf v = vf_get_any(LM_DTYPE_F32, x, i, n);
            vd lo = vf_low_f64(v), hi = vf_high_f64(v);
            even = vd_fma(lo, lo, even);
            odd = vd_fma(hi, hi, odd);
        });
        if (len)
            s[block[b].place] = vd_sum(even + odd);
    }
}

static void sumsq(const lm_call *c)
{
    memset(c->out[0].data, 0, (size_t)lm_tensor_count(&c->out[0]) * sizeof(double));
    lm_par_for(c->par, c->in[1].dim[0], 1, sumsq_blocks, (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(optim, LM_SIMD)[] = {
    VF_KERNEL_F32("adamw", adamw, adamw_work),
    VF_KERNEL_F32("sgd", sgd, NULL),
    VF_KERNEL_F32("sumsq", sumsq, NULL),
    VF_KERNEL_END,
};
