/* SPDX-License-Identifier: Apache-2.0 */
/* noise_simd.c -- noise (kernels/noise.h) on vectors. */
#include "kernels/noise.h"

#include "kernels/cpu/drawn.h"
#include "kernels/cpu/tables.h"

enum { GRAIN = 16384 }; /* elements that a thread takes at a time */

/* floor(draw / 2^8). */
LM_INLINE vf drawn_whole(vrng_u32 draws)
{
#ifdef __AVX512F__
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(draws, 8));
#else
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(draws, 8));
#endif
}

LM_INLINE vf polynomial(const float *p, vf x)
{
    vf y = vf_set(p[0]);
    for (int i = 1; i < LM_NOISE_TERMS; i++)
        y = vf_fma(y, x, vf_set(p[i]));
    return y;
}

LM_INLINE vf normal_quantile(vrng_u32 draws)
{
    static const float centre[] = LM_NOISE_CENTRE, tail[] = LM_NOISE_TAIL;
    /* u and 1 - u as multiples of 2^-24 plus a half: neither is rounded in its own tail. */
    const vf whole = drawn_whole(draws), unit = vf_set(0x1p-24f), half = vf_set(0x1p-25f);
    const vf u = vf_fma(whole, unit, half);
    const vf v = vf_fma(vf_set(0x1p24f) - vf_set(1) - whole, unit, half);
    const vf w = vf_zero() - vf_log(vf_set(4) * u * v);
    const vf near = polynomial(centre, w - vf_set(2.5f));
    const vf far = polynomial(tail, vf_sqrt(w) - vf_set(3));
    return vf_set(1.41421356f) * (u - v) * vf_if_lt(w, vf_set(5), near, far);
}

LM_INLINE vf add_noise(vf x, vrng_u32 draws, const void *amount)
{
    return vf_fma(vf_set(*(const float *)amount), normal_quantile(draws), x);
}

LM_INLINE vf weigh_noise(vf x, vrng_u32 draws, const void *amount)
{
    return x * vf_set(*(const float *)amount) * normal_quantile(draws);
}

LM_INLINE vf scale_by_noise(vf x, vrng_u32 draws, const void *amount)
{
    const vf a = vf_set(*(const float *)amount);
    const vf s = vf_fma(drawn_whole(draws), vf_set(0x1p-23f), vf_set(0x1p-24f - 1)); /* 2 u - 1 */
    return x * vf_fma(a, s, vf_set(1));
}

LM_INLINE void noise_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_noise_attr *a = c->attr;
    const float amount = (float)a->amount;
    const lm_rng rng = lm_rng_make(c->step->seed, "noise", (uint64_t)a->site);
    if (a->kind == LM_NOISE_SCALED)
        drawn_map(t, c, rng, &a->origin, begin, end, scale_by_noise, &amount);
    else if (a->kind == LM_NOISE_WEIGHED)
        drawn_map(t, c, rng, &a->origin, begin, end, weigh_noise, &amount);
    else
        drawn_map(t, c, rng, &a->origin, begin, end, add_noise, &amount);
}
VF_TYPED(noise_span)

static void noise(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, VF_PICK(noise_span, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(noise, LM_SIMD)[] = {
    VF_KERNEL("noise", noise, NULL),
    VF_KERNEL_END,
};
