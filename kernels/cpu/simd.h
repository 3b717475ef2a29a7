/* SPDX-License-Identifier: Apache-2.0 */
/* simd.h -- the portable vector layer of the *_simd.c kernels: `vf` is 8 floats (AVX2) or 16
 * (AVX-512), chosen by the compiler flags of the object.
 *
 * Plain arithmetic uses + - * / on vf (a compiler extension that both GCC and Clang have).  The
 * typed accessors take the element type as a constant; they are always inlined, so no branch on it
 * survives. `n` of the _n forms is the number of live lanes, 0 <= n <= VF_LANES; dead lanes load as
 * 0 and are never read or written in memory.  Everything here keeps NaN. */
#ifndef LM_KERNELS_CPU_SIMD_H
#define LM_KERNELS_CPU_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/vmath.h"
#include "kernels/kernel.h"

#define LM_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define VF_LANES 16
#ifndef LM_SIMD_LEVEL /* NAME_amx.c includes NAME_simd.c with its own level */
#define LM_SIMD_LEVEL LM_CPU_AVX512
#endif
typedef __m512 vf;

LM_INLINE __mmask16 vf_lanes(int64_t n)
{
    return (__mmask16)((1u << n) - 1u);
}
LM_INLINE vf vf_set(float v)
{
    return _mm512_set1_ps(v);
}
LM_INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
LM_INLINE vf vf_load_n(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps(vf_lanes(n), p);
}
LM_INLINE void vf_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}
LM_INLINE void vf_store_n(float *p, vf v, int64_t n)
{
    _mm512_mask_storeu_ps(p, vf_lanes(n), v);
}
LM_INLINE vf vf_fma(vf a, vf b, vf c) /* a b + c */
{
    return _mm512_fmadd_ps(a, b, c);
}
LM_INLINE vf vf_fnma(vf a, vf b, vf c) /* c - a b */
{
    return _mm512_fnmadd_ps(a, b, c);
}
LM_INLINE vf vf_sqrt(vf v)
{
    return _mm512_sqrt_ps(v);
}
LM_INLINE vf vf_max(vf a, vf b) /* b when either is NaN */
{
    return _mm512_max_ps(a, b);
}
LM_INLINE vf vf_min(vf a, vf b) /* b when either is NaN */
{
    return _mm512_min_ps(a, b);
}
LM_INLINE vf vf_abs(vf v)
{
    return _mm512_abs_ps(v);
}
LM_INLINE vf vf_round(vf v) /* to whole numbers, ties to even */
{
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* a < b ? x : y, lane by lane */
LM_INLINE vf vf_if_lt(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
/* Lanes at and beyond n replaced by `other`. */
LM_INLINE vf vf_keep_n(vf v, int64_t n, vf other)
{
    return _mm512_mask_mov_ps(other, vf_lanes(n), v);
}
LM_INLINE float vf_sum(vf v)
{
    return _mm512_reduce_add_ps(v);
}
LM_INLINE float vf_top(vf v)
{
    return _mm512_reduce_max_ps(v);
}
LM_INLINE vf vf_exp(vf v)
{
    return lm_exp16(v);
}
LM_INLINE vf vf_sigmoid(vf v)
{
    return lm_sigmoid16(v);
}
LM_INLINE vf vf_tanh(vf v)
{
    return lm_tanh16(v);
}
LM_INLINE vf vf_log(vf v)
{
    return lm_log16(v);
}
/* Lanes whose draw (an unsigned word) is at least `least`, times `scale`; the others 0. */
LM_INLINE vf vf_keep_drawn(vf v, __m512i draws, uint32_t least, vf scale)
{
    __mmask16 kept = _mm512_cmpge_epu32_mask(draws, _mm512_set1_epi32((int)least));
    return _mm512_maskz_mul_ps(kept, v, scale);
}
/* Sums in double, for the long reductions: vd is half as many doubles. */
typedef __m512d vd;
LM_INLINE vd vf_low_f64(vf v)
{
    return _mm512_cvtps_pd(_mm512_castps512_ps256(v));
}
LM_INLINE vd vf_high_f64(vf v)
{
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}
LM_INLINE vd vd_fma(vd a, vd b, vd c)
{
    return _mm512_fmadd_pd(a, b, c);
}
LM_INLINE double vd_sum(vd v)
{
    return _mm512_reduce_add_pd(v);
}
/* The 16 bits of bf16, rounded to nearest even, in the low half of each lane; NaN stays a quiet
 * NaN. */
LM_INLINE __m512i vf_bf16_bits(vf v)
{
    __m512i u = _mm512_castps_si512(v), top = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(_mm512_srli_epi32(r, 16), nan, top, _mm512_set1_epi32(0x40));
}
LM_INLINE vf vf_from_bf16_bits(__m512i u)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
LM_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return vf_from_bf16_bits(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)));
}
LM_INLINE vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    return vf_from_bf16_bits(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(vf_lanes(n), p)));
}
#ifdef __AVX512BF16__
/* One instruction instead of eight; results below the normal range become 0. */
LM_INLINE __m256i vf_pack_bf16(vf v)
{
    return (__m256i)_mm512_cvtneps_pbh(v);
}
#else
LM_INLINE __m256i vf_pack_bf16(vf v)
{
    return _mm512_cvtepi32_epi16(vf_bf16_bits(v));
}
#endif
LM_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    _mm256_storeu_si256((__m256i *)p, vf_pack_bf16(v));
}
LM_INLINE void vf_store_bf16_n(uint16_t *p, vf v, int64_t n)
{
    _mm256_mask_storeu_epi16(p, vf_lanes(n), vf_pack_bf16(v));
}
LM_INLINE vf vf_round_bf16(vf v)
{
#ifdef __AVX512BF16__
    return vf_from_bf16_bits(_mm512_cvtepu16_epi32(vf_pack_bf16(v)));
#else
    return vf_from_bf16_bits(vf_bf16_bits(v));
#endif
}
/* Two vectors to 2 x VF_LANES bf16, past the caches; p aligned to 64 bytes. */
LM_INLINE void vf_stream_bf16(uint16_t *p, vf a, vf b)
{
    __m256i lo = vf_pack_bf16(a), hi = vf_pack_bf16(b);
    _mm512_stream_si512((__m512i *)p, _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1));
}
LM_INLINE void vf_stream(float *p, vf v) /* p aligned to the vector */
{
    _mm512_stream_ps(p, v);
}

#else /* AVX2 */
#define VF_LANES      8
#define LM_SIMD_LEVEL LM_CPU_AVX2
typedef __m256 vf;

LM_INLINE __m256i vf_lanes(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LM_INLINE vf vf_set(float v)
{
    return _mm256_set1_ps(v);
}
LM_INLINE vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
LM_INLINE vf vf_load_n(const float *p, int64_t n)
{
    return _mm256_maskload_ps(p, vf_lanes(n));
}
LM_INLINE void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}
LM_INLINE void vf_store_n(float *p, vf v, int64_t n)
{
    _mm256_maskstore_ps(p, vf_lanes(n), v);
}
LM_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
LM_INLINE vf vf_fnma(vf a, vf b, vf c)
{
    return _mm256_fnmadd_ps(a, b, c);
}
LM_INLINE vf vf_sqrt(vf v)
{
    return _mm256_sqrt_ps(v);
}
LM_INLINE vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
LM_INLINE vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
LM_INLINE vf vf_abs(vf v)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
}
LM_INLINE vf vf_round(vf v)
{
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
LM_INLINE vf vf_if_lt(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
LM_INLINE vf vf_keep_n(vf v, int64_t n, vf other)
{
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(vf_lanes(n)));
}
LM_INLINE float vf_sum(vf v)
{
    __m128 s = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
    s += _mm_movehl_ps(s, s);
    return _mm_cvtss_f32(s) + _mm_cvtss_f32(_mm_movehdup_ps(s));
}
LM_INLINE float vf_top(vf v)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
LM_INLINE vf vf_exp(vf v)
{
    return lm_exp8(v);
}
LM_INLINE vf vf_sigmoid(vf v)
{
    return lm_sigmoid8(v);
}
LM_INLINE vf vf_tanh(vf v)
{
    return lm_tanh8(v);
}
LM_INLINE vf vf_log(vf v)
{
    return lm_log8(v);
}
LM_INLINE vf vf_keep_drawn(vf v, __m256i draws, uint32_t least, vf scale)
{
    __m256i most = _mm256_max_epu32(draws, _mm256_set1_epi32((int)least));
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(most, draws)), v * scale);
}
typedef __m256d vd;
LM_INLINE vd vf_low_f64(vf v)
{
    return _mm256_cvtps_pd(_mm256_castps256_ps128(v));
}
LM_INLINE vd vf_high_f64(vf v)
{
    return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}
LM_INLINE vd vd_fma(vd a, vd b, vd c)
{
    return _mm256_fmadd_pd(a, b, c);
}
LM_INLINE double vd_sum(vd v)
{
    __m128d t = _mm256_castpd256_pd128(v) + _mm256_extractf128_pd(v, 1);
    return _mm_cvtsd_f64(t) + _mm_cvtsd_f64(_mm_unpackhi_pd(t, t));
}
LM_INLINE __m256i vf_bf16_bits(vf v)
{
    __m256i u = _mm256_castps_si256(v), top = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(_mm256_srli_epi32(r, 16), quiet, nan);
}
LM_INLINE vf vf_from_bf16_bits(__m256i u)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
LM_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return vf_from_bf16_bits(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)));
}
LM_INLINE vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    uint16_t cell[8] = { 0 };
    memcpy(cell, p, (size_t)n * 2);
    return vf_load_bf16(cell);
}
LM_INLINE vf vf_round_bf16(vf v)
{
    return vf_from_bf16_bits(vf_bf16_bits(v));
}
LM_INLINE __m128i vf_pack_bf16(vf v)
{
    __m256i u = vf_bf16_bits(v);
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}
LM_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)p, vf_pack_bf16(v));
}
LM_INLINE void vf_store_bf16_n(uint16_t *p, vf v, int64_t n)
{
    uint16_t cell[8];
    vf_store_bf16(cell, v);
    memcpy(p, cell, (size_t)n * 2);
}
LM_INLINE void vf_stream_bf16(uint16_t *p, vf a, vf b)
{
    _mm256_stream_si256((__m256i *)p, _mm256_set_m128i(vf_pack_bf16(b), vf_pack_bf16(a)));
}
LM_INLINE void vf_stream(float *p, vf v)
{
    _mm256_stream_ps(p, v);
}
#endif

LM_INLINE vf vf_zero(void)
{
    return vf_set(0);
}
/* v as it would be read back from memory of type t. */
LM_INLINE vf vf_round_to(lm_dtype t, vf v)
{
    return t == LM_DTYPE_BF16 ? vf_round_bf16(v) : v;
}

/* Elements i.. of an array of F32 or BF16. */
LM_INLINE vf vf_get(lm_dtype t, const void *p, int64_t i)
{
    return t == LM_DTYPE_BF16 ? vf_load_bf16((const uint16_t *)p + i)
                              : vf_load((const float *)p + i);
}
LM_INLINE vf vf_get_n(lm_dtype t, const void *p, int64_t i, int64_t n)
{
    return t == LM_DTYPE_BF16 ? vf_load_bf16_n((const uint16_t *)p + i, n)
                              : vf_load_n((const float *)p + i, n);
}
LM_INLINE void vf_put(lm_dtype t, void *p, int64_t i, vf v)
{
    if (t == LM_DTYPE_BF16)
        vf_store_bf16((uint16_t *)p + i, v);
    else
        vf_store((float *)p + i, v);
}
LM_INLINE void vf_put_n(lm_dtype t, void *p, int64_t i, vf v, int64_t n)
{
    if (t == LM_DTYPE_BF16)
        vf_store_bf16_n((uint16_t *)p + i, v, n);
    else
        vf_store_n((float *)p + i, v, n);
}

/* Run the block for i = 0, VF_LANES, ... below `count`, with n live lanes: first whole vectors, for
 * which n is the constant VF_LANES (the _any accessors below fold to the plain ones), then the
 * ragged end. */
#define VF_FOR(i, n, count, ...)                         \
    do {                                                 \
        int64_t i = 0;                                   \
        for (; i + VF_LANES <= (count); i += VF_LANES) { \
            enum { n = VF_LANES };                       \
            __VA_ARGS__                                  \
        }                                                \
        if (i < (count)) {                               \
            const int64_t n = (count)-i;                 \
            __VA_ARGS__                                  \
        }                                                \
    } while (0)

/* Two lm_par_fn of one always-inlined body(type, ctx, begin, end), and the choice between them. */
#define VF_TYPED(body)                                                         \
    static void body##_f32(void *ctx, int64_t begin, int64_t end, int worker)  \
    {                                                                          \
        (void)worker;                                                          \
        body(LM_DTYPE_F32, ctx, begin, end);                                   \
    }                                                                          \
    static void body##_bf16(void *ctx, int64_t begin, int64_t end, int worker) \
    {                                                                          \
        (void)worker;                                                          \
        body(LM_DTYPE_BF16, ctx, begin, end);                                  \
    }
#define VF_PICK(body, type) ((type) == LM_DTYPE_BF16 ? body##_bf16 : body##_f32)

LM_INLINE vf vf_get_any(lm_dtype t, const void *p, int64_t i, int64_t n)
{
    return __builtin_constant_p(n) && n == VF_LANES ? vf_get(t, p, i) : vf_get_n(t, p, i, n);
}
LM_INLINE void vf_put_any(lm_dtype t, void *p, int64_t i, vf v, int64_t n)
{
    if (__builtin_constant_p(n) && n == VF_LANES)
        vf_put(t, p, i, v);
    else
        vf_put_n(t, p, i, v, n);
}

/* Operands of a call. */
LM_INLINE void *opt_data(const lm_tensor *t, int count, int i) /* NULL when absent */
{
    return i < count ? t[i].data : NULL;
}
LM_INLINE int64_t last_dim(const lm_tensor *t)
{
    return t->ndim ? t->dim[t->ndim - 1] : 1;
}
LM_INLINE int64_t row_count(const lm_tensor *t)
{
    int64_t w = last_dim(t);
    return w ? lm_tensor_count(t) / w : 0;
}
LM_INLINE bool overwrites(const lm_call *c, lm_acc acc)
{
    return !lm_acc_adds(acc, c->step);
}
/* Rows of `width` elements in a chunk that is large enough for a thread. */
LM_INLINE int64_t grain_rows(int64_t width)
{
    int64_t rows = 16384 / (width > 0 ? width : 1);
    return rows > 0 ? rows : 1;
}

/* Table entries.  F32 alone: operands have types of their own, whatever activations are. */
#define VF_KERNEL_F32(op, run, work)               \
    {                                              \
        op, LM_DTYPE_F32, LM_SIMD_LEVEL, run, work \
    }
/* One kernel for both types of activations. */
#define VF_KERNEL(op, run, work)                    \
    { op, LM_DTYPE_F32, LM_SIMD_LEVEL, run, work }, \
    {                                               \
        op, LM_DTYPE_BF16, LM_SIMD_LEVEL, run, work \
    }
#define VF_KERNEL_END                                  \
    {                                                  \
        NULL, LM_DTYPE_NONE, LM_SIMD_LEVEL, NULL, NULL \
    }

#endif
