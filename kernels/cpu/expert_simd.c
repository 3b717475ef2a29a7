/* SPDX-License-Identifier: Apache-2.0 */
/* expert_simd.c -- biases of experts and their activation on vectors (kernels/expert.h). */
#include "kernels/expert.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* ---- biases ---- */

/* Rows [begin, end); the group of a row is found once and then followed. */
LM_INLINE void bias_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const int32_t *offsets = c->in[2].data;
    int64_t M = c->in[0].dim[1], groups = c->in[2].dim[0] - 1, g = 0;
    for (int64_t r = begin; r < end; r++) {
        while (g < groups && r >= offsets[g + 1])
            g++;
        const float *b = g < groups ? (const float *)c->in[1].data + g * M : NULL;
        VF_FOR(m, n, M, {
            vf x = vf_get_any(t, c->in[0].data, r * M + m, n);
            if (b)
                x += vf_get_any(LM_DTYPE_F32, b, m, n);
            vf_put_any(t, c->out[0].data, r * M + m, x, n);
        });
    }
}
VF_TYPED(bias_rows)

static void grouped_bias(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(c->in[0].dim[1]),
               VF_PICK(bias_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

enum { COLUMNS = 4 * VF_LANES }; /* of a job, summed together */

static int64_t blocks_of(const lm_call *c)
{
    return (c->in[0].dim[1] + COLUMNS - 1) / COLUMNS;
}

/* Jobs: a block of columns of a group. */
LM_INLINE void sum_columns(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_grouped_bias_attr *a = c->attr;
    const int32_t *offsets = c->in[1].data;
    bool over = overwrites(c, a->acc);
    float *db = c->out[0].data;
    int64_t M = c->in[0].dim[1], blocks = blocks_of(c);
    for (int64_t u = begin; u < end; u++) {
        int64_t g = u / blocks, first = u % blocks * COLUMNS;
        int64_t width = M - first < COLUMNS ? M - first : COLUMNS;
        VF_FOR(m, n, width, {
            vf sum = over ? vf_zero() : vf_get_any(LM_DTYPE_F32, db, g * M + first + m, n);
            for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
                sum += vf_get_any(t, c->in[0].data, r * M + first + m, n);
            vf_put_any(LM_DTYPE_F32, db, g * M + first + m, sum, n);
        });
    }
}
VF_TYPED(sum_columns)

static void grouped_bias_db(const lm_call *c)
{
    const lm_grouped_bias_attr *a = c->attr;
    lm_par_for(c->par, a->groups * blocks_of(c), 1, VF_PICK(sum_columns, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

/* ---- activation ---- */

/* Of the numbers a, b that follow each other, those at even places and those at odd ones; and back. */
#ifdef __AVX512F__
LM_INLINE void part_pairs(vf a, vf b, vf *even, vf *odd)
{
    const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *even = _mm512_permutex2var_ps(a, at, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(at, _mm512_set1_epi32(1)), b);
}
LM_INLINE void join_pairs(vf even, vf odd, vf *a, vf *b)
{
    const __m512i at = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *a = _mm512_permutex2var_ps(even, at, odd);
    *b = _mm512_permutex2var_ps(even, _mm512_add_epi32(at, _mm512_set1_epi32(8)), odd);
}
#else
LM_INLINE vf in_order(vf x) /* of pairs of lanes 0 2 1 3 */
{
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}
LM_INLINE void part_pairs(vf a, vf b, vf *even, vf *odd)
{
    *even = in_order(_mm256_shuffle_ps(a, b, 0x88));
    *odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
LM_INLINE void join_pairs(vf even, vf odd, vf *a, vf *b)
{
    vf low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    *a = _mm256_permute2f128_ps(low, high, 0x20);
    *b = _mm256_permute2f128_ps(low, high, 0x31);
}
#endif

/* Pairs [i, i + n) of x, n at most VF_LANES. */
LM_INLINE void get_pairs(lm_dtype t, const void *x, int64_t i, int64_t n, vf *even, vf *odd)
{
    int64_t left = 2 * n - VF_LANES;
    vf a = n == VF_LANES ? vf_get(t, x, 2 * i) : vf_get_n(t, x, 2 * i, left < 0 ? 2 * n : VF_LANES);
    vf b = n == VF_LANES ? vf_get(t, x, 2 * i + VF_LANES)
           : left > 0    ? vf_get_n(t, x, 2 * i + VF_LANES, left)
                         : vf_zero();
    part_pairs(a, b, even, odd);
}

LM_INLINE void put_pairs(lm_dtype t, void *x, int64_t i, int64_t n, vf even, vf odd)
{
    int64_t left = 2 * n - VF_LANES;
    vf a, b;
    join_pairs(even, odd, &a, &b);
    vf_put_n(t, x, 2 * i, a, left < 0 ? 2 * n : VF_LANES);
    if (left > 0)
        vf_put_n(t, x, 2 * i + VF_LANES, b, left);
}

/* x where it is at most `most`, NaN too; else `most`. */
LM_INLINE vf bounded(vf x, vf most)
{
    return vf_if_lt(most, x, most, x);
}

LM_INLINE void swiglu_pairs(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_clamped_swiglu_attr *a = c->attr;
    vf limit = vf_set((float)a->limit), alpha = vf_set((float)a->alpha);
    VF_FOR(i, n, end - begin, {
        vf g, u;
        get_pairs(t, c->in[0].data, begin + i, n, &g, &u);
        g = bounded(g, limit);
        u = vf_if_lt(u, -limit, -limit, bounded(u, limit));
        vf_put_any(t, c->out[0].data, begin + i, (u + vf_set(1)) * g * vf_sigmoid(alpha * g), n);
    });
}
VF_TYPED(swiglu_pairs)

LM_INLINE void swiglu_dx_pairs(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_clamped_swiglu_attr *a = c->attr;
    vf limit = vf_set((float)a->limit), alpha = vf_set((float)a->alpha), one = vf_set(1);
    VF_FOR(i, n, end - begin, {
        vf g0, u0;
        get_pairs(t, c->in[1].data, begin + i, n, &g0, &u0);
        vf dh = vf_get_any(t, c->in[0].data, begin + i, n), g = bounded(g0, limit);
        vf u = vf_if_lt(u0, -limit, -limit, bounded(u0, limit)), s = vf_sigmoid(alpha * g);
        vf dg = dh * (u + one) * (s * vf_fma(alpha * g, one - s, one)), du = dh * g * s;
        dg = vf_if_lt(limit, g0, vf_zero(), dg);
        du = vf_if_lt(limit, vf_abs(u0), vf_zero(), du);
        put_pairs(t, c->out[0].data, begin + i, n, dg, du);
    });
}
VF_TYPED(swiglu_dx_pairs)

enum { GRAIN = 8192 };

static void clamped_swiglu(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->out[0]), GRAIN, VF_PICK(swiglu_pairs, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

static void clamped_swiglu_dx(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, VF_PICK(swiglu_dx_pairs, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(expert, LM_SIMD)[] = {
    VF_KERNEL("grouped_bias", grouped_bias, NULL),
    VF_KERNEL("grouped_bias_db", grouped_bias_db, NULL),
    VF_KERNEL("clamped_swiglu", clamped_swiglu, NULL),
    VF_KERNEL("clamped_swiglu_dx", clamped_swiglu_dx, NULL),
    VF_KERNEL_END,
};
