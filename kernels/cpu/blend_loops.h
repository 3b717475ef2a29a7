/* SPDX-License-Identifier: Apache-2.0 */
/* blend_loops.h -- the table of blend.h for the level that the including file is compiled for: the
 * loops that depend on the type of elements, then blend_body.h once for each type of reals. */
#ifndef LM_KERNELS_CPU_BLEND_LOOPS_H
#define LM_KERNELS_CPU_BLEND_LOOPS_H

#include <math.h>
#include <string.h>

#include "kernels/blend.h"

#ifdef __AVX2__
#include <immintrin.h>

#include "kernels/cpu/vrng.h"
#endif

/* Elements at any address. */
typedef uint16_t half_at __attribute__((aligned(1), may_alias));
typedef double double_at __attribute__((aligned(1), may_alias));
typedef float float_at __attribute__((aligned(1), may_alias));

enum { LANES = 16 };

static double tree(double *lane)
{
    for (int w = LANES / 2; w; w /= 2)
        for (int l = 0; l < w; l++)
            lane[l] += lane[l + w];
    return lane[0];
}

/* Prefetch the next block into the second-level cache: blocks are short runs of several streams, at
 * each of which the processor's own prefetching starts again. */
static inline void ahead(const void *p, int64_t bytes)
{
    for (int64_t k = 0; k < bytes; k += 64)
        __builtin_prefetch((const void *)((uintptr_t)p + (uintptr_t)k), 0, 2);
}

static inline float from_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* lm_f32_to_bf16 without its branch. */
static inline uint16_t to_bf16(float f)
{
    uint32_t u, rounded, quiet;
    memcpy(&u, &f, 4);
    rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
    quiet = u >> 16 | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static void from_f16(const half_at *src, float *dst, int64_t n)
{
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(src + i))));
#elif defined(__AVX2__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
#endif
    for (; i < n; i++)
        dst[i] = lm_f16_to_f32(src[i]);
}

static void to_f16(const float *src, half_at *dst, int64_t n)
{
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(dst + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        dst[i] = lm_f32_to_f16(src[i]);
}

static void load_f32(lm_dtype t, const void *src, int64_t at, void *x, int64_t n)
{
    float *restrict f = x;
    ahead((const char *)src + (size_t)(at + n) * lm_dtype_size(t), n * (int64_t)lm_dtype_size(t));
    if (t == LM_DTYPE_BF16) {
        const half_at *s = (const half_at *)src + at;
        for (int64_t i = 0; i < n; i++)
            f[i] = from_bf16(s[i]);
    } else if (t == LM_DTYPE_F16) {
        from_f16((const half_at *)src + at, f, n);
    } else if (t == LM_DTYPE_F32) {
        memcpy(f, (const char *)src + 4 * at, 4 * (size_t)n);
    } else if (t == LM_DTYPE_F64) {
        const double_at *s = (const double_at *)src + at;
        for (int64_t i = 0; i < n; i++)
            f[i] = (float)s[i];
    } else { /* bytes */
        lm_convert(t, (const char *)src + at, LM_DTYPE_F32, f, n);
    }
}

static void store_f32(lm_dtype t, void *dst, int64_t at, const void *x, int64_t n)
{
    const float *restrict f = x;
    if (t == LM_DTYPE_BF16) {
        half_at *s = (half_at *)dst + at;
        for (int64_t i = 0; i < n; i++)
            s[i] = to_bf16(f[i]);
    } else if (t == LM_DTYPE_F16) {
        to_f16(f, (half_at *)dst + at, n);
    } else if (t == LM_DTYPE_F32) {
        memcpy((char *)dst + 4 * at, f, 4 * (size_t)n);
    } else if (t == LM_DTYPE_F64) {
        double_at *s = (double_at *)dst + at;
        for (int64_t i = 0; i < n; i++)
            s[i] = (double)f[i];
    } else {
        lm_convert(LM_DTYPE_F32, f, t, (char *)dst + at, n);
    }
}

static void load_f64(lm_dtype t, const void *src, int64_t at, void *x, int64_t n)
{
    double *restrict d = x;
    float cell[256];
    if (t == LM_DTYPE_F64) {
        memcpy(d, (const char *)src + 8 * at, 8 * (size_t)n);
        return;
    }
    for (int64_t k = 0; k < n; k += 256) {
        int64_t m = n - k < 256 ? n - k : 256;
        load_f32(t, src, at + k, cell, m);
        for (int64_t i = 0; i < m; i++)
            d[k + i] = (double)cell[i];
    }
}

/* To float by rounding to odd: towards zero, and the last place set where anything was lost.  A
 * later rounding to a type with at least two bits less then gives the same result as from the
 * double. */
static inline float to_odd(double d)
{
    float f = (float)d;
    uint32_t u;
    double back = (double)f;
    memcpy(&u, &f, 4);
    u -= fabs(back) > fabs(d);
    u |= back != d;
    memcpy(&f, &u, 4);
    return f;
}

/* One rounding from double, also to the narrow types. */
static void store_f64(lm_dtype t, void *dst, int64_t at, const void *x, int64_t n)
{
    const double *d = x;
    float cell[256];
    if (t == LM_DTYPE_F64) {
        memcpy((char *)dst + 8 * at, d, 8 * (size_t)n);
    } else if (t == LM_DTYPE_F32) {
        float_at *f = (float_at *)dst + at;
        for (int64_t i = 0; i < n; i++)
            f[i] = (float)d[i];
    } else {
        for (int64_t k = 0; k < n; k += 256) {
            int64_t m = n - k < 256 ? n - k : 256;
            for (int64_t i = 0; i < m; i++)
                cell[i] = to_odd(d[k + i]);
            store_f32(t, dst, at + k, cell, m);
        }
    }
}

static void draws(lm_rng r, int64_t at, uint32_t *out, int64_t n)
{
    int64_t i = 0;
    for (; i < n && (at + i) % 4; i++)
        out[i] = lm_rng_u32(r, (uint64_t)(at + i));
#ifdef __AVX2__
    for (; i + VRNG_DRAWS <= n; i += VRNG_DRAWS)
        lm_philox_draws(r, (uint64_t)(at + i) / 4, out + i);
#endif
    for (; i < n; i += 4) {
        lm_u32x4 four = lm_philox((uint64_t)(at + i) / 4, r.hi, r.key);
        memcpy(out + i, four.v, 4 * (size_t)(n - i < 4 ? n - i : 4));
    }
}

#define REAL     float
#define BITS     uint32_t
#define FN(name) name##_f32
#include "kernels/cpu/blend_body.h"
#undef REAL
#undef BITS
#undef FN

#define REAL     double
#define BITS     uint64_t
#define FN(name) name##_f64
#include "kernels/cpu/blend_body.h"
#undef REAL
#undef BITS
#undef FN

/* Bits of float magnitudes are below 2^31, so bounds above that say "none" and compare as signed. */
static int64_t pick_f32(const void *x, uint64_t lo, uint64_t hi, int64_t at, int64_t n,
                        int64_t *above, lm_blend_entry *list)
{
    const float *a = x;
    int64_t i = 0, found = 0, over = 0;
#ifdef __AVX2__
    int32_t low = lo > INT32_MAX ? INT32_MAX : (int32_t)lo - 1;
    int32_t high = hi > INT32_MAX ? INT32_MAX : (int32_t)hi - 1;
#ifdef __AVX512F__
    /* No branch on the few percent of hits: they are gathered first, entries are made
     * afterwards. */
    const __m512i sign = _mm512_set1_epi32(INT32_MAX), one = _mm512_set1_epi32(1);
    const __m512i from = _mm512_set1_epi32(low), to = _mm512_set1_epi32(high);
    uint32_t bits[LM_BLEND_BLOCK + 16], place[LM_BLEND_BLOCK + 16];
    __m512i sum = _mm512_setzero_si512();
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16) {
        __m512i b = _mm512_and_si512(_mm512_loadu_si512(a + i), sign);
        __mmask16 top = _mm512_cmpgt_epi32_mask(b, to);
        __mmask16 in = _mm512_mask_cmpgt_epi32_mask(_knot_mask16(top), b, from);
        sum = _mm512_mask_add_epi32(sum, top, sum, one);
        _mm512_storeu_si512(bits + found, _mm512_maskz_compress_epi32(in, b));
        _mm512_storeu_si512(place + found, _mm512_maskz_compress_epi32(in, lane));
        lane = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
        found += __builtin_popcount(in);
    }
    over = _mm512_reduce_add_epi32(sum);
    for (int64_t k = 0; k < found; k++)
        list[k] = (lm_blend_entry){ bits[k], at + place[k] };
#else
    const __m256i sign = _mm256_set1_epi32(INT32_MAX);
    for (; i + 8 <= n; i += 8) {
        __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(a + i)), sign);
        __m256i t = _mm256_cmpgt_epi32(b, _mm256_set1_epi32(high));
        __m256i l = _mm256_cmpgt_epi32(b, _mm256_set1_epi32(low));
        uint32_t top = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(t));
        uint32_t in = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(l)) & ~top;
        over += __builtin_popcount(top);
        for (; in; in &= in - 1) {
            int j = __builtin_ctz(in);
            list[found++] = (lm_blend_entry){ bits_of_f32(a[i + j]), at + i + j };
        }
    }
#endif
#endif
    for (; i < n; i++) {
        uint64_t b = bits_of_f32(a[i]);
        list[found] = (lm_blend_entry){ b, at + i };
        found += b >= lo && b < hi;
        over += b >= hi;
    }
    *above += over;
    return found;
}

static int64_t pick_f64(const void *x, uint64_t lo, uint64_t hi, int64_t at, int64_t n,
                        int64_t *above, lm_blend_entry *list)
{
    const double *a = x;
    int64_t found = 0, over = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t b = bits_of_f64(a[i]);
        list[found] = (lm_blend_entry){ b, at + i };
        found += b >= lo && b < hi;
        over += b >= hi;
    }
    *above += over;
    return found;
}

#define ENTRIES(of)                                                                           \
    .load = load_##of, .store = store_##of, .start = start_##of, .add = add_##of,             \
    .delta = delta_##of, .add_delta = add_delta_##of, .fill = fill_##of, .scale = scale_##of, \
    .axpy = axpy_##of, .mul = mul_##of, .div = div_##of, .at_least = at_least_##of,           \
    .dot = dot_##of, .sum_abs = sum_abs_##of, .keep_bits = keep_bits_##of,                    \
    .keep_drawn = keep_drawn_##of, .keep_each = keep_each_##of, .choose = choose_##of,        \
    .draws = draws, .bits = bits_##of, .pick = pick_##of, .histogram = histogram_##of,        \
    .agree = agree_##of, .variance = variance_##of, .near = near_##of

#define BLEND_TABLE(of_level)                                            \
    {                                                                    \
        { .level = of_level, .real = sizeof(float), ENTRIES(f32) },      \
            { .level = of_level, .real = sizeof(double), ENTRIES(f64) }, \
    }

#endif
