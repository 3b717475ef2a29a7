/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_numbers.h -- codes back to numbers, and rows from and to the type of activations;
 * included by kv_code_simd.c.
 *
 * Where the definition's number in double is exact before its last rounding, it is found in F32:
 * scale times level without a minimum, and with one of F16 (both are multiples of 2^-24 and
 * below 2^25). */
#ifndef LM_KERNELS_CPU_KV_CODE_NUMBERS_H
#define LM_KERNELS_CPU_KV_CODE_NUMBERS_H

/* A page that is decoded. */
typedef struct {
    const lm_kv_format *f;
    int64_t T, D, ld;
    lm_kv_sections at;
    const char *page;
    bool linear, exact; /* levels are codes plus level[0]; numbers are found in F32 */
    float level[256];
    double s[LM_KV_MAX_DIM], m[LM_KV_MAX_DIM], second[LM_KV_MAX_DIM]; /* of channels */
    float s32[LM_KV_MAX_DIM], m32[LM_KV_MAX_DIM];
} decoder;

LM_INLINE vf levels_of(const decoder *w, const uint8_t *code)
{
#ifdef __AVX512F__
    __m512i x = _mm512_cvtepu8_epi32(load_16(code));
    if (!w->linear)
        return _mm512_i32gather_ps(x, w->level, 4);
    return _mm512_cvtepi32_ps(x) + vf_set(w->level[0]);
#else
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)code));
    if (!w->linear)
        return _mm256_i32gather_ps(w->level, x, 4);
    return _mm256_cvtepi32_ps(x) + vf_set(w->level[0]);
#endif
}

LM_INLINE void store_some(float *y, vf v, int64_t n)
{
    if (n < VF_LANES)
        vf_store_n(y, v, n);
    else
        vf_store(y, v);
}

/* n numbers with one scale. */
LM_INLINE void numbers_of_group(const decoder *w, const uint8_t *code, int64_t n, float s, float m,
                                float *y)
{
    vf by = vf_set(s), least = vf_set(m);
    for (int64_t d = 0; d < n; d += VF_LANES)
        store_some(y + d, vf_fma(by, levels_of(w, code + d), least), n - d);
}

LM_INLINE vd half_numbers(vd level, const double *s, const double *m)
{
    return vd_at(s) * level + vd_at(m);
}

/* A row by the scales of channels. */
static void numbers_of_channels(const decoder *w, const uint8_t *code, const double *second,
                                double times, float *y)
{
    enum { HALF = VF_LANES / 2 };
    for (int64_t d = 0; d < w->D; d += VF_LANES) {
        vf level = levels_of(w, code + d);
        if (w->exact) {
            store_some(y + d, vf_fma(vf_load(w->s32 + d), level, vf_load(w->m32 + d)), w->D - d);
            continue;
        }
        vd a = half_numbers(vf_low_f64(level), w->s + d, w->m + d);
        vd b = half_numbers(vf_high_f64(level), w->s + d + HALF, w->m + d + HALF);
        if (w->f->second) {
            a = a * (second ? vd_at(second + d) : vd_all(times));
            b = b * (second ? vd_at(second + d + HALF) : vd_all(times));
        }
        store_some(y + d, join_halves(a, b), w->D - d);
    }
}

static double scale_at(const decoder *w, size_t section, int64_t at)
{
    const char *p = w->page + section;
    if (w->f->scale == LM_DTYPE_F16)
        return (double)_cvtsh_ss(((const uint16_t *)(const void *)p)[at]);
    return lm_get(w->f->scale, p, at);
}

/* Scales and minima of channels [d, d + n). */
static void set_numbers(decoder *w, int64_t d, int64_t n, double s, double m)
{
    for (int64_t i = d; i < d + n; i++) {
        w->s[i] = s;
        w->m[i] = m;
        w->s32[i] = (float)s;
        w->m32[i] = (float)m;
    }
}

/* The scales of token t's channels, for numbers_of_channels. */
static void take_scales(decoder *w, int64_t t)
{
    const lm_kv_format *f = w->f;
    int64_t each = f->axis == LM_KV_CHANNEL ? 1 : f->group ? f->group : w->D;
    bool minima = lm_kv_has_min(f);
    for (int64_t d = 0; d < w->D; d += each) {
        int64_t at = lm_kv_scale_at(f, w->T, w->D, t, d);
        set_numbers(w, d, d + each < w->D ? each : w->D - d, scale_at(w, w->at.scale, at),
                    minima ? scale_at(w, w->at.min, at) : 0);
    }
}

/* Token t, whose codes are given; `first`: of a call. */
static void decode_token(decoder *w, int64_t kv, int64_t t, bool first, const uint8_t *code,
                         float *y)
{
    const lm_kv_format *f = w->f;
    bool channel = f->axis == LM_KV_CHANNEL, minima = lm_kv_has_min(f);
    int64_t group = f->group ? f->group : channel ? w->T : w->D;
    int64_t span = channel ? 1 : f->span ? f->span : w->T;
    if (!channel && w->exact && f->scale != LM_DTYPE_NONE) {
        for (int64_t d = 0; d < w->D; d += group) {
            int64_t at = lm_kv_scale_at(f, w->T, w->D, t, d);
            numbers_of_group(w, code + d, d + group < w->D ? group : w->D - d,
                             (float)scale_at(w, w->at.scale, at),
                             minima ? (float)scale_at(w, w->at.min, at) : 0, y + d);
        }
        return;
    }
    if (f->scale == LM_DTYPE_NONE && first)
        set_numbers(w, 0, w->D, f->head ? (double)f->head[kv] : f->constant, 0);
    else if (f->scale != LM_DTYPE_NONE && (!channel || first || t % group == 0))
        take_scales(w, t);
    for (int64_t d = 0; f->second && !channel && (first || t % span == 0) && d < w->D; d++)
        w->second[d] = scale_at(w, w->at.second, lm_kv_second_at(f, w->T, w->D, t, d));
    double times = f->second && channel ? scale_at(w, w->at.second, t) : 1;
    numbers_of_channels(w, code, f->second && !channel ? w->second : NULL, times, y);
}

static void decode(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const void *page,
                   int64_t at, int64_t n, float *y, int64_t pitch)
{
    uint8_t line[KV_PATCH] __attribute__((aligned(64))), code[KV_PATCH];
    decoder w = { .f = f, .T = T, .D = D, .ld = (D + 15) / 16 * 16, .page = page };
    if (f->lower || f->outliers) {
        lm_kv_decode(f, T, D, kv, page, at, n, y, pitch);
        return;
    }
    lm_kv_page(f, T, D, &w.at, NULL);
    lm_kv_level_numbers(f, w.level);
    w.linear = f->levels == LM_KV_SYM || f->levels == LM_KV_ASYM;
    w.exact = !f->second && (f->scale == LM_DTYPE_F16 ? w.linear || !lm_kv_has_min(f)
                                                      : !lm_kv_has_min(f) && !(f->constant > 0));
    for (int64_t i = 0, some; i < n; i += some) {
        int64_t t = at + i, from = t % LM_KV_TILE;
        some = LM_KV_TILE - from < n - i ? LM_KV_TILE - from : n - i;
        const kv_patch p = patch_of(f, T, D, page, t - from);
        take_patch(&p, line);
        if (f->values)
            tokens_of_lines(true, w.ld, line, code);
        else
            tokens_of_lines(false, w.ld, line, code);
        for (int64_t k = 0; k < some; k++)
            decode_token(&w, kv, t + k, i + k == 0, code + (from + k) * w.ld, y + (i + k) * pitch);
    }
}

/* ---- rows ---- */

LM_INLINE void turn_rows(lm_dtype t, const void *x, lm_dtype ty, void *y, int64_t n, int64_t D)
{
    int64_t block = D & -D, size = t == LM_DTYPE_BF16 ? 2 : 4, size_y = ty == LM_DTYPE_BF16 ? 2 : 4;
    vf times = vf_set((float)(1 / sqrt((double)block)));
    for (int64_t i = 0; i < n; i++)
        turn_head(t, (const char *)x + i * D * size, ty, (char *)y + i * D * size_y, D, block,
                  times);
}

LM_INLINE void convert_rows(lm_dtype t, const void *x, lm_dtype ty, void *y, int64_t n)
{
    VF_FOR(i, live, n, { vf_put_any(ty, y, i, vf_get_any(t, x, i, live), live); });
}

static void load(lm_dtype act, bool rotate, int64_t D, const void *x, int64_t n, float *y)
{
    uint16_t row[LM_KV_MAX_DIM];
    if (act == LM_DTYPE_BF16 && rotate) {
        for (int64_t i = 0; i < n; i++) {
            turn_rows(LM_DTYPE_BF16, (const uint16_t *)x + i * D, LM_DTYPE_BF16, row, 1, D);
            convert_rows(LM_DTYPE_BF16, row, LM_DTYPE_F32, y + i * D, D);
        }
    } else if (act == LM_DTYPE_BF16) {
        convert_rows(LM_DTYPE_BF16, x, LM_DTYPE_F32, y, n * D);
    } else {
        lm_convert(act, x, LM_DTYPE_F32, y, n * D);
        if (rotate)
            turn_rows(LM_DTYPE_F32, y, LM_DTYPE_F32, y, n, D);
        for (int64_t i = 0; rotate && act == LM_DTYPE_F16 && i < n; i++) {
            lm_convert(LM_DTYPE_F32, y + i * D, act, row, D);
            lm_convert(act, row, LM_DTYPE_F32, y + i * D, D);
        }
    }
}

static void store(lm_dtype act, bool rotate, int64_t D, const float *x, int64_t n, void *y)
{
    float row[LM_KV_MAX_DIM];
    if (act == LM_DTYPE_BF16 && rotate) {
        turn_rows(LM_DTYPE_F32, x, LM_DTYPE_BF16, y, n, D);
    } else if (act == LM_DTYPE_BF16) {
        convert_rows(LM_DTYPE_F32, x, LM_DTYPE_BF16, y, n * D);
    } else if (rotate) {
        for (int64_t i = 0; i < n; i++) {
            turn_rows(LM_DTYPE_F32, x + i * D, LM_DTYPE_F32, row, 1, D);
            lm_convert(LM_DTYPE_F32, row, act, (char *)y + (size_t)(i * D) * lm_dtype_size(act), D);
        }
    } else {
        lm_convert(LM_DTYPE_F32, x, act, y, n * D);
    }
}

#endif
