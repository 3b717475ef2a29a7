/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise_simd.c -- activations and other maps on vectors, one pass over memory each. */
#include "kernels/elementwise.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/cpu/drawn.h"
#include "kernels/cpu/tables.h"

enum { GRAIN = 16384 }; /* elements that a thread takes at a time */

/* 0.5 (1 + tanh(u)) is the logistic function of 2u, which does not cancel for negative u. */
static const float twice_root_2_pi = 1.5957691216f; /* 2 sqrt(2/pi) */
static const float cubic = 0.044715f;

LM_INLINE vf gelu_tanh(vf x)
{
    vf u = vf_set(twice_root_2_pi) * x * vf_fma(vf_set(cubic) * x, x, vf_set(1));
    return x * vf_sigmoid(u);
}

LM_INLINE vf gelu_tanh_slope(vf x)
{
    vf x2 = x * x, k = vf_set(twice_root_2_pi);
    vf s = vf_sigmoid(k * x * vf_fma(vf_set(cubic), x2, vf_set(1)));
    vf du = k * vf_fma(vf_set(3 * cubic), x2, vf_set(1));
    /* s (1-s) x du: beyond |x| = 20 the slope is a step; du would overflow there and meet a zero */
    vf bump = s * (vf_set(1) - s) * x * du;
    bump = vf_if_lt(vf_set(20), vf_abs(x), vf_zero(), bump);
    return s + bump;
}

/* The normal distribution function of x, and *pdf its density.  erfc(z) = exp(-z^2) t P(t), t =
 * 1/(1 + z/2), z >= 0: the form of Numerical Recipes (2nd ed., sec. 6.2) without the outer
 * exponential; P is a least-maximum fit over z in [0, 10.5] with relative error 5e-8. */
LM_INLINE vf normal_cdf(vf x, vf *pdf)
{
    static const float poly[] = { -0.0591933322f, 0.285182835f,   -0.488460899f,
                                  0.279512622f,   -0.0276234553f, 0.203109933f,
                                  0.242996611f,   0.282390068f,   0.282085575f };
    vf e = vf_exp(vf_set(-0.5f) * x * x);
    vf z = vf_abs(x) * vf_set(0.70710678f), t = vf_set(1) / vf_fma(z, vf_set(0.5f), vf_set(1));
    vf p = vf_set(poly[0]);
    for (int i = 1; i < 9; i++)
        p = vf_fma(p, t, vf_set(poly[i]));
    *pdf = e * vf_set(0.39894228f);
    vf tail = vf_set(0.5f) * e * t * p;
    return vf_if_lt(x, vf_zero(), tail, vf_set(1) - tail);
}

LM_INLINE void gelu_part(lm_dtype t, bool exact, const lm_call *c, int64_t begin, int64_t end)
{
    VF_FOR(i, n, end - begin, {
        vf x = vf_get_any(t, c->in[0].data, begin + i, n), pdf;
        if (exact)
            x *= normal_cdf(x, &pdf);
        else
            x = gelu_tanh(x);
        vf_put_any(t, c->out[0].data, begin + i, x, n);
    });
}

LM_INLINE void gelu_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    if (((const lm_gelu_attr *)c->attr)->exact)
        gelu_part(t, true, c, begin, end);
    else
        gelu_part(t, false, c, begin, end);
}
VF_TYPED(gelu_span)

LM_INLINE void gelu_dx_part(lm_dtype t, bool exact, const lm_call *c, int64_t begin, int64_t end)
{
    VF_FOR(i, n, end - begin, {
        vf x = vf_get_any(t, c->in[1].data, begin + i, n), pdf, d;
        if (exact) {
            d = normal_cdf(x, &pdf);
            d = vf_fma(x, pdf, d);
        } else {
            d = gelu_tanh_slope(x);
        }
        vf_put_any(t, c->out[0].data, begin + i, d * vf_get_any(t, c->in[0].data, begin + i, n), n);
    });
}

LM_INLINE void gelu_dx_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    if (((const lm_gelu_attr *)c->attr)->exact)
        gelu_dx_part(t, true, c, begin, end);
    else
        gelu_dx_part(t, false, c, begin, end);
}
VF_TYPED(gelu_dx_span)

/* A gated layer: act(gate) * up, gate and up side by side in a row; act is SiLU, or GELU by tanh. */
LM_INLINE void pair_rows(lm_dtype t, bool gelu, const lm_call *c, int64_t begin, int64_t end)
{
    int64_t n_cols = last_dim(&c->out[0]);
    for (int64_t row = begin; row < end; row++) {
        int64_t gate = 2 * row * n_cols, up = gate + n_cols, out = row * n_cols;
        VF_FOR(i, n, n_cols, {
            vf g = vf_get_any(t, c->in[0].data, gate + i, n);
            vf u = vf_get_any(t, c->in[0].data, up + i, n);
            if (gelu)
                g = gelu_tanh(g);
            else
                g *= vf_sigmoid(g);
            vf_put_any(t, c->out[0].data, out + i, g * u, n);
        });
    }
}

LM_INLINE void pair_dx_rows(lm_dtype t, bool gelu, const lm_call *c, int64_t begin, int64_t end)
{
    int64_t n_cols = last_dim(&c->in[0]);
    for (int64_t row = begin; row < end; row++) {
        int64_t gate = 2 * row * n_cols, up = gate + n_cols, in = row * n_cols;
        VF_FOR(i, n, n_cols, {
            vf dh = vf_get_any(t, c->in[0].data, in + i, n), dg, du;
            vf g = vf_get_any(t, c->in[1].data, gate + i, n);
            vf u = vf_get_any(t, c->in[1].data, up + i, n);
            if (gelu) {
                dg = dh * u * gelu_tanh_slope(g);
                du = dh * gelu_tanh(g);
            } else {
                vf s = vf_sigmoid(g);
                dg = dh * u * (s * vf_fma(g, vf_set(1) - s, vf_set(1)));
                du = dh * g * s;
            }
            vf_put_any(t, c->out[0].data, gate + i, dg, n);
            vf_put_any(t, c->out[0].data, up + i, du, n);
        });
    }
}

LM_INLINE void swiglu_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    pair_rows(t, false, ctx, begin, end);
}
VF_TYPED(swiglu_rows)

LM_INLINE void geglu_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    pair_rows(t, true, ctx, begin, end);
}
VF_TYPED(geglu_rows)

LM_INLINE void swiglu_dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    pair_dx_rows(t, false, ctx, begin, end);
}
VF_TYPED(swiglu_dx_rows)

LM_INLINE void geglu_dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    pair_dx_rows(t, true, ctx, begin, end);
}
VF_TYPED(geglu_dx_rows)

LM_INLINE void soft_cap_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    float cap = (float)((const lm_soft_cap_attr *)c->attr)->cap;
    vf top = vf_set(cap), over = vf_set(1 / cap);
    VF_FOR(i, n, end - begin, {
        vf y = top * vf_tanh(vf_get_any(t, c->in[0].data, begin + i, n) * over);
        vf_put_any(t, c->out[0].data, begin + i, y, n);
    });
}
VF_TYPED(soft_cap_span)

LM_INLINE void soft_cap_dx_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    vf over = vf_set(1 / (float)((const lm_soft_cap_attr *)c->attr)->cap);
    VF_FOR(i, n, end - begin, {
        vf y = vf_tanh(vf_get_any(t, c->in[1].data, begin + i, n) * over);
        vf d = vf_get_any(t, c->in[0].data, begin + i, n) * vf_fnma(y, y, vf_set(1));
        vf_put_any(t, c->out[0].data, begin + i, d, n);
    });
}
VF_TYPED(soft_cap_dx_span)

LM_INLINE void add_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    VF_FOR(i, n, end - begin, {
        vf a = vf_get_any(t, c->in[0].data, begin + i, n);
        vf_put_any(t, c->out[0].data, begin + i, a + vf_get_any(t, c->in[1].data, begin + i, n), n);
    });
}
VF_TYPED(add_span)

typedef struct {
    uint32_t least;
    float scale;
} kept;

LM_INLINE vf keep_drawn(vf x, vrng_u32 draws, const void *how)
{
    const kept *k = how;
    return vf_keep_drawn(x, draws, k->least, vf_set(k->scale));
}

LM_INLINE void dropout_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_dropout_attr *a = c->attr;
    const kept how = { (uint32_t)floor(a->p * 4294967296.0), (float)(1 / (1 - a->p)) };
    drawn_map(t, c, lm_rng_make(c->step->seed, "dropout", (uint64_t)a->site), &a->origin, begin,
              end, keep_drawn, &how);
}
VF_TYPED(dropout_span)

#ifndef __AVX512BF16__
static void to_f16(const float *x, uint16_t *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    lm_convert(LM_DTYPE_F32, x + i, LM_DTYPE_F16, y + i, n - i);
}

static void from_f16(const uint16_t *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    lm_convert(LM_DTYPE_F16, x + i, LM_DTYPE_F32, y + i, n - i);
}

/* Casts that vectors know; anything else is left to lm_convert. */
static void cast_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    lm_dtype from = c->in[0].dtype, to = c->out[0].dtype;
    const char *x = c->in[0].data;
    char *y = c->out[0].data;
    (void)worker;
    if (from == LM_DTYPE_F32 && to == LM_DTYPE_BF16)
        VF_FOR(i, n, end - begin, {
            vf_put_any(LM_DTYPE_BF16, y, begin + i, vf_get_any(LM_DTYPE_F32, x, begin + i, n), n);
        });
    else if (from == LM_DTYPE_BF16 && to == LM_DTYPE_F32)
        VF_FOR(i, n, end - begin, {
            vf_put_any(LM_DTYPE_F32, y, begin + i, vf_get_any(LM_DTYPE_BF16, x, begin + i, n), n);
        });
    else if (from == LM_DTYPE_F32 && to == LM_DTYPE_F16)
        to_f16((const float *)x + begin, (uint16_t *)y + begin, end - begin);
    else if (from == LM_DTYPE_F16 && to == LM_DTYPE_F32)
        from_f16((const uint16_t *)x + begin, (float *)y + begin, end - begin);
    else
        lm_convert(from, x + begin * (int64_t)lm_dtype_size(from), to,
                   y + begin * (int64_t)lm_dtype_size(to), end - begin);
}
#endif

static void rows_part(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int32_t *idx = c->in[1].data;
    size_t bytes = (size_t)last_dim(&c->out[0]) * lm_dtype_size(c->out[0].dtype);
    (void)worker;
    for (int64_t m = begin; m < end; m++)
        memcpy((char *)c->out[0].data + (size_t)m * bytes,
               (const char *)c->in[0].data + (size_t)idx[m] * bytes, bytes);
}

/* ---- the operators: a span of elements, or of rows, for each thread ---- */

static void run_elements(const lm_call *c, lm_par_fn span)
{
    lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, span, (void *)(uintptr_t)c);
}

/* by: the operand with one row for each row of the work. */
static void run_rows(const lm_call *c, const lm_tensor *by, lm_par_fn span)
{
    lm_par_for(c->par, row_count(by), grain_rows(last_dim(by)), span, (void *)(uintptr_t)c);
}

#define ELEMENTS(op)                                         \
    static void op(const lm_call *c)                         \
    {                                                        \
        run_elements(c, VF_PICK(op##_span, c->in[0].dtype)); \
    }
#define ROWS(op, by)                                         \
    static void op(const lm_call *c)                         \
    {                                                        \
        run_rows(c, by, VF_PICK(op##_rows, c->in[0].dtype)); \
    }
ELEMENTS(gelu)
ELEMENTS(gelu_dx)
ELEMENTS(soft_cap)
ELEMENTS(soft_cap_dx)
ELEMENTS(add)
ELEMENTS(dropout)
ROWS(swiglu, &c->out[0])
ROWS(swiglu_dx, &c->in[0])
ROWS(geglu, &c->out[0])
ROWS(geglu_dx, &c->in[0])

#ifndef __AVX512BF16__
static void cast(const lm_call *c)
{
    run_elements(c, cast_span);
}
#endif

static void rows(const lm_call *c)
{
    run_rows(c, &c->out[0], rows_part);
}

const lm_kernel LM_TABLE_NAME(elementwise, LM_SIMD)[] = {
    VF_KERNEL("gelu", gelu, NULL),         VF_KERNEL("gelu_dx", gelu_dx, NULL),
    VF_KERNEL("swiglu", swiglu, NULL),     VF_KERNEL("swiglu_dx", swiglu_dx, NULL),
    VF_KERNEL("geglu", geglu, NULL),       VF_KERNEL("geglu_dx", geglu_dx, NULL),
    VF_KERNEL("soft_cap", soft_cap, NULL), VF_KERNEL("soft_cap_dx", soft_cap_dx, NULL),
    VF_KERNEL("add", add, NULL),           VF_KERNEL("dropout", dropout, NULL),
#ifndef __AVX512BF16__ /* whose conversion has no denormals: a cast is exact */
    VF_KERNEL("cast", cast, NULL),
#endif
    VF_KERNEL("rows", rows, NULL),         VF_KERNEL_END,
};
