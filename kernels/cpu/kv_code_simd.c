/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_simd.c -- codes of caches on vectors (kernels/kv_code.h): the linear levels with stored scales, FP8 and tables
 * by token; other formats by the definition.  Quotients are estimated in F32, and found in double as in the definition
 * where one is near the middle of two codes, so the bits are the same.
 *
 * 16 tokens become rows of bytes first, and then the planes of their tile; tokens that do not fill 16 are put into their
 * tile one line after another: four channels of keys are a word, sixteen of values a byte of each word of a line. */
#include <math.h>

#include "kernels/cpu/head_turn.h"
#include "kernels/cpu/kv_code_lines.h"
#include "kernels/cpu/kv_code_rows.h"
#include "kernels/cpu/kv_codes.h"
#include "kernels/kv_code.h"

/* A page of one head that is encoded. */
typedef struct {
    const lm_kv_format *f;
    int64_t T, D, ld, kv;
    lm_kv_sections at;
    char *page;
} coder;

/* Scale and minimum of a group, as they are stored; of a group that has no codes such that all are 0, or those of the
 * number 0. */
typedef struct {
    double s, m;
    float inverse, min; /* 1 / s, NaN if an estimate could overflow; m */
} scale;

/* The same of each channel. */
typedef struct {
    double s[LM_KV_MAX_DIM], m[LM_KV_MAX_DIM];
    float inverse[LM_KV_MAX_DIM], min[LM_KV_MAX_DIM];
} scales;

static bool is_fast(const lm_kv_format *f)
{
    return (f->levels == LM_KV_SYM || f->levels == LM_KV_ASYM) && !f->ggml && !f->second &&
           !f->outliers && f->scale != LM_DTYPE_NONE;
}

/* FP8, tables and ggml's formats with scales of tokens. */
static bool is_by_token(const lm_kv_format *f)
{
    bool linear = f->levels == LM_KV_SYM || f->levels == LM_KV_ASYM;
    return f->axis == LM_KV_TOKEN && !f->second && !f->outliers && (f->ggml || !linear);
}

/* ---- scales ---- */

/* lm_kv_stored; F16 by the processor, unless the number is small, or F32 could round it to the middle of two. */
LM_INLINE double stored(lm_dtype t, double v)
{
    float f = (float)(v < -65504 ? -65504 : v > 65504 ? 65504 : v);
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (t != LM_DTYPE_F16 || !(fabsf(f) >= 0x1p-14f) || (bits & 0x1fff) == 0x1000)
        return lm_kv_stored(t, v);
    return (double)_cvtsh_ss(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT));
}

/* Put v, which has the type of the scales. */
LM_INLINE void put_stored(lm_dtype t, char *section, int64_t at, double v)
{
    if (t == LM_DTYPE_F16 && isfinite(v))
        ((uint16_t *)(void *)section)[at] = _cvtss_sh((float)v, _MM_FROUND_TO_NEAREST_INT);
    else
        lm_set(t, section, at, v);
}

static double store_scale(lm_dtype t, char *section, int64_t at, double v)
{
    v = stored(t, v);
    put_stored(t, section, at, v);
    return v;
}

/* The scale of a group of numbers in [least, most], from token t and channel d on. */
static scale set_scale(const coder *w, int64_t t, int64_t d, float least, float most, bool finite)
{
    const lm_kv_format *f = w->f;
    int64_t at = lm_kv_scale_at(f, w->T, w->D, t, d);
    double top = (double)((1 << f->bits) - 1), lo = (double)least, hi = (double)most;
    scale by = { .m = 0 };
    double s = f->levels == LM_KV_ASYM ? (hi - lo) / top : fmax(fabs(lo), fabs(hi)) / (top / 2);
    by.s = store_scale(f->scale, w->page + w->at.scale, at, finite ? s : (double)NAN);
    if (f->levels == LM_KV_ASYM)
        by.m = store_scale(f->scale, w->page + w->at.min, at, finite && lo != 0 ? lo : 0);
    if (by.s == 0) {
        by.s = (double)INFINITY;
        by.m = 0;
    } else if (!isfinite(by.s) || !isfinite(by.m)) {
        by.s = 1;
        by.m = (double)INFINITY;
    }
    by.inverse = by.s > 1e-30 && by.s < 1e30 && isfinite(by.m) ? 1.0f / (float)by.s : NAN;
    by.min = (float)by.m;
    return by;
}

/* Least and most of n numbers; false if one is not finite. */
static bool find_extent(const float *x, int64_t n, float *least, float *most)
{
    vf lo = vf_set(INFINITY), hi = vf_set(-INFINITY), odd = vf_zero();
    VF_FOR(i, live, n, {
        vf v = vf_get_any(LM_DTYPE_F32, x, i, live);
        odd = odd + (v - v); /* 0, or NaN */
        lo = vf_min(lo, vf_keep_n(v, live, vf_set(INFINITY)));
        hi = vf_max(hi, vf_keep_n(v, live, vf_set(-INFINITY)));
    });
    *least = -vf_top(vf_zero() - lo);
    *most = vf_top(hi);
    return vf_sum(odd) == 0;
}

/* n numbers, zeros behind them. */
LM_INLINE vf load_some(const float *x, int64_t n)
{
    return n < VF_LANES ? vf_load_n(x, n) : vf_load(x);
}

/* The scales of all channels over n tokens from t on. */
static void scale_channels(const coder *w, int64_t t, int64_t n, const float *x, int64_t pitch,
                           scales *by)
{
    for (int64_t d = 0; d < w->D; d += VF_LANES) {
        float least[VF_LANES], most[VF_LANES], odd[VF_LANES];
        vf lo = load_some(x + d, w->D - d), hi = lo, any = lo - lo;
        for (int64_t i = 1; i < n; i++) {
            vf v = load_some(x + i * pitch + d, w->D - d);
            any = any + (v - v);
            lo = vf_min(lo, v);
            hi = vf_max(hi, v);
        }
        vf_store(least, lo);
        vf_store(most, hi);
        vf_store(odd, any);
        for (int64_t i = 0; i < VF_LANES && d + i < w->D; i++) {
            scale one = set_scale(w, t, d + i, least[i], most[i], odd[i] == 0);
            by->s[d + i] = one.s;
            by->m[d + i] = one.m;
            by->inverse[d + i] = one.inverse;
            by->min[d + i] = one.min;
        }
    }
}

/* ---- other levels, by token ---- */

/* Put scale and minimum of the group of token t and channel d into the page. */
static void put_scale(const coder *w, int64_t t, int64_t d, lm_kv_scale by)
{
    int64_t at = lm_kv_scale_at(w->f, w->T, w->D, t, d);
    put_stored(w->f->scale, w->page + w->at.scale, at, by.s);
    if (lm_kv_has_min(w->f))
        put_stored(w->f->scale, w->page + w->at.min, at, by.m);
}

/* The number at `v`, whose last digits are wrong, as the definition stores it; false if they could matter. */
static bool store_near(lm_dtype t, double v, double *out)
{
    *out = stored(t, v);
    return isfinite(v) && *out == stored(t, v * (1 - 1e-12)) && *out == stored(t, v * (1 + 1e-12));
}

/* The sum of squares of n numbers, in another order than that of the definition. */
static double sum_squares(const float *x, int64_t n)
{
    vd sum = vf_low_f64(vf_zero());
    VF_FOR(i, live, n, {
        vf v = vf_get_any(LM_DTYPE_F32, x, i, live);
        vd a = vf_low_f64(v), b = vf_high_f64(v);
        sum = vd_fma(a, a, vd_fma(b, b, sum));
    });
    return vd_sum(sum);
}

/* The stored scale and minimum of a group over numbers in [least, most] (lm_kv_code_group). */
static lm_kv_scale scale_over(const lm_kv_format *f, double least, double most)
{
    double largest = fmax(fabs(least), fabs(most));
    lm_kv_scale by = { largest, 0 };
    if (f->levels == LM_KV_FLOAT8)
        by.s = largest / (f->float8 == LM_DTYPE_F8E5M2 ? 57344.0 : 448.0);
    else if (f->zero)
        by = (lm_kv_scale){ (most - least) / 2, (most + least) / 2 };
    by.s = stored(f->scale, by.s);
    by.m = by.m != 0 ? stored(f->scale, by.m) : 0;
    return by;
}

/* Scale of the n numbers of a group; false if the definition has to find it. */
static bool find_scale(const lm_kv_format *f, const float *x, int64_t n, const float *range,
                       lm_kv_scale *by)
{
    float least, most;
    if (!find_extent(x, n, &least, &most))
        return false;
    *by = (lm_kv_scale){ 0, 0 };
    if (f->levels == LM_KV_TABLE && f->norm)
        return store_near(f->scale, sqrt(sum_squares(x, n) / (double)n), &by->s);
    *by = scale_over(f, (double)(range ? range[0] : least), (double)(range ? range[1] : most));
    return true;
}

/* The scale that gives the decoded group the norm of its numbers. */
static bool renorm(const lm_kv_format *f, const float *x, int64_t n, const uint32_t *code,
                   lm_kv_scale *by)
{
    float level[LM_KV_MAX_DIM];
    for (int64_t i = 0; i < n; i++)
        level[i] = f->table[code[i]];
    double sum = sum_squares(level, n);
    return sum > 0 && store_near(f->scale, sqrt(sum_squares(x, n) / sum), &by->s);
}

/* ---- codes ---- */

/* Whole numbers, as bytes. */
LM_INLINE void put_whole(uint8_t *code, vf v)
{
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)(void *)code, _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(v)));
#else
    __m256i x = _mm256_cvttps_epi32(v);
    __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)(void *)code, _mm_packus_epi16(y, y));
#endif
}

/* Codes of half a vector of numbers; quotients that are NaN have the code 0. */
LM_INLINE vd half_codes(vd x, vd s, vd m, double least, double most)
{
    vd y = (x - m) / s;
#ifdef __AVX512F__
    y = _mm512_roundscale_pd(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    y = _mm512_min_pd(_mm512_max_pd(y, _mm512_set1_pd(least)), _mm512_set1_pd(most));
    return y - _mm512_set1_pd(least);
#else
    y = _mm256_round_pd(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    y = _mm256_min_pd(_mm256_max_pd(y, _mm256_set1_pd(least)), _mm256_set1_pd(most));
    return y - _mm256_set1_pd(least);
#endif
}

/* True if each quotient is sure to be nearest to the whole number of `near`: the estimate is wrong by at most three
 * roundings, 1e-4 up to 512, and larger ones have the last code. */
LM_INLINE bool is_sure(vf quotient, vf near)
{
    vf off = vf_abs(quotient - near);
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask(off, vf_set(0.4999f), _CMP_LT_OQ) == 0xffff;
#else
    return _mm256_movemask_ps(_mm256_cmp_ps(off, vf_set(0.4999f), _CMP_LT_OQ)) == 0xff;
#endif
}

/* The codes of VF_LANES numbers. */
LM_INLINE void code_vector(double least, double most, vf v, vf min, vf inverse, vd s0, vd s1, vd m0,
                           vd m1, uint8_t *code)
{
    vf y = (v - min) * inverse, near = vf_round(y);
    if (is_sure(y, near)) {
        near = vf_min(vf_max(near, vf_set((float)least)), vf_set((float)most));
        put_whole(code, near - vf_set((float)least));
    } else {
        put_whole(code, join_halves(half_codes(vf_low_f64(v), s0, m0, least, most),
                                    half_codes(vf_high_f64(v), s1, m1, least, most)));
    }
}

LM_INLINE vd vd_all(double v)
{
#ifdef __AVX512F__
    return _mm512_set1_pd(v);
#else
    return _mm256_set1_pd(v);
#endif
}

LM_INLINE vd vd_at(const double *p)
{
#ifdef __AVX512F__
    return _mm512_loadu_pd(p);
#else
    return _mm256_loadu_pd(p);
#endif
}

static double least_level(const lm_kv_format *f)
{
    return f->levels == LM_KV_SYM ? -(double)(1 << (f->bits - 1)) : 0;
}

/* The codes of n numbers with one scale. */
LM_INLINE void code_group(const lm_kv_format *f, const float *x, int64_t n, const scale *by,
                          uint8_t *code)
{
    double least = least_level(f), most = least + (double)((1 << f->bits) - 1);
    vf min = vf_set(by->min), inverse = vf_set(by->inverse);
    vd s = vd_all(by->s), m = vd_all(by->m);
    for (int64_t d = 0; d < n; d += VF_LANES)
        code_vector(least, most, load_some(x + d, n - d), min, inverse, s, s, m, m, code + d);
}

/* The codes of a row by the scales of channels. */
static void code_channels(const coder *w, const float *x, const scales *by, uint8_t *code)
{
    enum { HALF = VF_LANES / 2 };
    double least = least_level(w->f), most = least + (double)((1 << w->f->bits) - 1);
    for (int64_t d = 0; d < w->D; d += VF_LANES)
        code_vector(least, most, load_some(x + d, w->D - d), vf_load(by->min + d),
                    vf_load(by->inverse + d), vd_at(by->s + d), vd_at(by->s + d + HALF),
                    vd_at(by->m + d), vd_at(by->m + d + HALF), code + d);
    memset(code + w->D, 0, (size_t)(w->ld - w->D));
}

/* Token t of a linear format by token. */
static void code_token(const coder *w, int64_t t, const float *x, uint8_t *code)
{
    int64_t group = w->f->group ? w->f->group : w->D;
    for (int64_t d = 0; d < w->D; d += group) {
        int64_t n = d + group < w->D ? group : w->D - d;
        float least, most;
        bool finite = find_extent(x + d, n, &least, &most);
        scale by = set_scale(w, t, d, least, most, finite);
        code_group(w->f, x + d, n, &by, code + d);
    }
    memset(code + w->D, 0, (size_t)(w->ld - w->D));
}

/* Codes and scale of the group of n numbers at x by the definition. */
static void code_plainly(const coder *w, int64_t t, int64_t d, int64_t n, const float *range,
                         const float *x, uint32_t *code)
{
    double v[LM_KV_MAX_DIM] = { 0 };
    for (int64_t i = 0; i < n; i++)
        v[i] = (double)x[d + i];
    put_scale(w, t, d, lm_kv_code_group(w->f, v, n, range, code + d));
}

/* Token t in FP8 or levels of a table. */
static void code_levels(const coder *w, int64_t t, const float *range, const float *x, scales *by,
                        uint32_t *code)
{
    const lm_kv_format *f = w->f;
    int64_t group = f->group ? f->group : w->D;
    double fixed = f->scale != LM_DTYPE_NONE ? 0 : f->head ? (double)f->head[w->kv] : f->constant;
    bool plain[LM_KV_MAX_DIM / 16 + 1];
    for (int64_t d = 0; d < w->D; d += group) {
        int64_t n = d + group < w->D ? group : w->D - d;
        lm_kv_scale one = { fixed, 0 };
        plain[d / group] = f->scale != LM_DTYPE_NONE && !find_scale(f, x + d, n, range, &one);
        if (f->scale != LM_DTYPE_NONE && !plain[d / group])
            put_scale(w, t, d, one);
        for (int64_t i = d; i < d + n; i++) {
            by->s[i] = one.s;
            by->m[i] = one.m;
        }
    }
    if (f->levels == LM_KV_FLOAT8)
        codes_of_levels(true, f, w->D, x, by->s, by->m, code);
    else
        codes_of_levels(false, f, w->D, x, by->s, by->m, code);
    for (int64_t d = 0; d < w->D; d += group) {
        int64_t n = d + group < w->D ? group : w->D - d;
        lm_kv_scale one = { by->s[d], by->m[d] };
        if (!plain[d / group] && f->renorm) {
            plain[d / group] = !renorm(f, x + d, n, code + d, &one);
            put_scale(w, t, d, one);
        }
        if (plain[d / group])
            code_plainly(w, t, d, n, range, x, code);
    }
}

#include "kernels/cpu/kv_code_ggml.h"

/* Token t in FP8 or a table, as bytes. */
static void code_other(const coder *w, int64_t t, const float *range, const float *x, scales *by,
                       uint8_t *code)
{
    float row[LM_KV_MAX_DIM];
    uint32_t wide[LM_KV_MAX_DIM + 16];
    if (w->ld > w->D) { /* whole vectors are read */
        memset(row + w->D, 0, (size_t)(w->ld - w->D) * sizeof *row);
        x = memcpy(row, x, (size_t)w->D * sizeof *row);
    }
    code_levels(w, t, range, x, by, wide);
    for (int64_t d = 0; d < w->D; d++)
        code[d] = (uint8_t)wide[d];
    memset(code + w->D, 0, (size_t)(w->ld - w->D));
}

/* ---- one token of a tile ---- */

/* Bits [skip, skip + bits) of the codes into a plane of the tile, t being the token's number in it. */
LM_INLINE void put_bits(const coder *w, uint8_t *plane, int64_t t, const uint8_t *code, int skip,
                        int bits)
{
    int64_t each = 8 / bits, quads = lm_kv_tile_tokens(true, w->T) / 4;
    uint32_t mask = (1u << bits) - 1;
    for (int64_t d = 0; w->f->values && d < w->D; d += 16) {
        int64_t line = d / 16 * quads + t / 4;
        int shift = (int)(t % 4 * 8 + line % each * bits);
        uint32_t *to = (uint32_t *)(void *)(plane + line / each * LM_KV_LINE);
        for (int i = 0; i < 16; i += VF_LANES) {
            vu old, c;
            memcpy(&old, to + i, sizeof old);
#ifdef __AVX512F__
            c = (vu)_mm512_cvtepu8_epi32(load_16(code + d));
#else
            c = (vu)_mm256_cvtepu8_epi32(
                _mm_loadl_epi64((const __m128i *)(const void *)(code + d + i)));
#endif
            old = (old & ~(mask << shift)) | (c >> skip & mask) << shift;
            memcpy(to + i, &old, sizeof old);
        }
    }
    for (int64_t d = 0; !w->f->values && d < w->D; d += 4) {
        int64_t line = d / 4;
        int shift = (int)(line % each * bits);
        uint32_t *to = (uint32_t *)(void *)(plane + line / each * LM_KV_LINE) + t;
        uint32_t four, all = mask * 0x01010101u;
        memcpy(&four, code + d, sizeof four);
        *to = (*to & ~(all << shift)) | (four >> skip & all) << shift;
    }
}

static void put_plane(const coder *w, uint8_t *plane, int64_t t, const uint8_t *code, int skip,
                      int bits)
{
    switch (bits) {
    case 1:
        put_bits(w, plane, t, code, skip, 1);
        break;
    case 2:
        put_bits(w, plane, t, code, skip, 2);
        break;
    case 4:
        put_bits(w, plane, t, code, skip, 4);
        break;
    default:
        put_bits(w, plane, t, code, skip, 8);
    }
}

static void put_token(const coder *w, int64_t t, const uint8_t *code)
{
    const lm_kv_format *f = w->f;
    int64_t tile = lm_kv_tile_tokens(f->values, w->T);
    int low = lm_kv_low_bits(f->bits);
    uint8_t *at = (uint8_t *)w->page + (size_t)(t / tile) * lm_kv_tile_bytes(f, w->T, w->D);
    put_plane(w, at, t % tile, code, 0, low);
    if (f->bits > low)
        put_plane(w, at + lm_kv_plane_bytes(low, lm_kv_tile_lines(f->values, w->T, w->D)), t % tile,
                  code, low, f->bits - low);
}

/* The codes [n][ld] of the tokens from t on, n <= 16, in one 16 of the page. */
static void put_tokens(const coder *w, int64_t t, int64_t n, const uint8_t *code)
{
    uint8_t line[KV_PATCH] __attribute__((aligned(64)));
    if (n < LM_KV_TILE) {
        for (int64_t i = 0; i < n; i++)
            put_token(w, t + i, code + i * w->ld);
        return;
    }
    const kv_patch p = patch_of(w->f, w->T, w->D, w->page, t);
    if (w->f->values)
        lines_of_tokens(true, w->ld, code, line);
    else
        lines_of_tokens(false, w->ld, code, line);
    put_patch(&p, line);
}

#include "kernels/cpu/kv_code_balance.h"

/* ---- pages ---- */

static void encode(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const float *x,
                   int64_t pitch, int64_t at, int64_t n, const float *range, void *page)
{
    uint8_t code[KV_PATCH];
    scales by;
    coder w = { .f = f, .T = T, .D = D, .ld = (D + 15) / 16 * 16, .kv = kv, .page = page };
    bool fast = is_fast(f), channel = f->axis == LM_KV_CHANNEL;
    int64_t step = lm_kv_step(f, T);
    lm_kv_page(f, T, D, &w.at, NULL);
    for (int64_t i = 0; i < n && f->second; i += step)
        if (!encode_balanced(&w, at + i, step, x + i * pitch, pitch))
            lm_kv_encode(f, T, D, kv, x + i * pitch, pitch, at + i, step, NULL, page);
    if (f->second)
        return;
    if (!fast && !is_by_token(f)) {
        lm_kv_encode(f, T, D, kv, x, pitch, at, n, range, page);
        return;
    }
    for (int64_t d = D; d < w.ld; d++) { /* numbers that no code has */
        by.s[d] = by.inverse[d] = 1;
        by.m[d] = by.min[d] = 0;
    }
    for (int64_t i = 0, some; i < n; i += some) {
        int64_t t = at + i;
        some = LM_KV_TILE - t % LM_KV_TILE < n - i ? LM_KV_TILE - t % LM_KV_TILE : n - i;
        if (fast && channel && i % step == 0)
            scale_channels(&w, t, step, x + i * pitch, pitch, &by);
        if (f->ggml)
            code_blocks(&w, t, some, x + i * pitch, pitch, code);
        for (int64_t k = 0; k < some && !f->ggml; k++) {
            const float *row = x + (i + k) * pitch;
            if (fast && channel)
                code_channels(&w, row, &by, code + k * w.ld);
            else if (fast)
                code_token(&w, t + k, row, code + k * w.ld);
            else
                code_other(&w, t + k, range ? range + 2 * (i + k) : NULL, row, &by,
                           code + k * w.ld);
        }
        put_tokens(&w, t, some, code);
    }
}

#include "kernels/cpu/kv_code_numbers.h"

#define PASTE(level) lm_kv_code_##level
#define NAME(level)  PASTE(level)
const lm_kv_code_kernels NAME(LM_SIMD) = { encode, decode, get_rows, put_rows, load, store };
