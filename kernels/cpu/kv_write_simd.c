/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write_simd.c -- writes into coded caches: the linear levels with stored scales on vectors, other formats by the
 * definition.  Quotients are estimated in F32, and found in double as in the definition where one is near the middle of two
 * codes, so the bits are the same.
 *
 * A unit is a page of keys or values of one head.  The codes of a token are put into its tile one line after another: four
 * channels of keys are a word, sixteen of values a byte of each word of a line. */
#include <math.h>

#include "kernels/cpu/kv_codes.h"
#include "kernels/cpu/kv_write.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* Room of a worker: rows as floats, [D up to 16] each; a page of them for the definition. */
typedef struct {
    float *x;
    int64_t ld;
} rows;

/* Scale and minimum of each channel of a row, as they are stored; of groups that have no codes such that all are 0, or
 * those of the number 0. */
typedef struct {
    double s[LM_KV_MAX_DIM], m[LM_KV_MAX_DIM];
    float inverse[LM_KV_MAX_DIM],
        min[LM_KV_MAX_DIM]; /* 1 / s, NaN if an estimate could overflow; m */
} scales;

/* Channels [d, d + n). */
static void set_channels(scales *by, int64_t d, int64_t n, double s, double m)
{
    float inverse = s > 1e-30 && s < 1e30 && isfinite(m) ? 1.0f / (float)s : NAN;
    for (int64_t i = d; i < d + n; i++) {
        by->s[i] = s;
        by->m[i] = m;
        by->inverse[i] = inverse;
        by->min[i] = (float)m;
    }
}

static bool is_fast(const lm_kv_format *f)
{
    return (f->levels == LM_KV_SYM || f->levels == LM_KV_ASYM) && !f->ggml && !f->second &&
           !f->outliers && f->scale != LM_DTYPE_NONE;
}

/* Other formats with scales of tokens. */
static bool is_by_token(const lm_kv_format *f)
{
    return f->axis == LM_KV_TOKEN && !f->second && !f->outliers;
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

/* The scale of a group of numbers in [least, most], from token t and channel d on, for channels [d, d + n). */
static void set_scale(const kvw_side *w, char *page, int64_t t, int64_t d, int64_t n, float least,
                      float most, bool finite, scales *by)
{
    const lm_kv_format *f = w->f;
    int64_t at = lm_kv_scale_at(f, w->T, w->D, t, d);
    double top = (double)((1 << f->bits) - 1), lo = (double)least, hi = (double)most, m = 0;
    double s = f->levels == LM_KV_ASYM ? (hi - lo) / top : fmax(fabs(lo), fabs(hi)) / (top / 2);
    s = store_scale(f->scale, page + w->at.scale, at, finite ? s : (double)NAN);
    if (f->levels == LM_KV_ASYM)
        m = store_scale(f->scale, page + w->at.min, at, finite && lo != 0 ? lo : 0);
    if (s == 0) {
        s = (double)INFINITY;
        m = 0;
    } else if (!isfinite(s) || !isfinite(m)) {
        s = 1;
        m = (double)INFINITY;
    }
    set_channels(by, d, n, s, m);
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

static void scale_token(const kvw_side *w, char *page, int64_t t, const float *x, scales *by)
{
    int64_t group = w->f->group ? w->f->group : w->D;
    for (int64_t d = 0; d < w->D; d += group) {
        int64_t n = d + group < w->D ? group : w->D - d;
        float least, most;
        bool finite = find_extent(x + d, n, &least, &most);
        set_scale(w, page, t, d, n, least, most, finite, by);
    }
}

/* The scales of all channels over n tokens from t on. */
static void scale_channels(const kvw_side *w, char *page, int64_t t, int64_t n, const rows *r,
                           scales *by)
{
    for (int64_t d = 0; d < w->D; d += VF_LANES) {
        float least[VF_LANES], most[VF_LANES], odd[VF_LANES];
        vf lo = vf_load(r->x + d), hi = lo, any = lo - lo;
        for (int64_t i = 1; i < n; i++) {
            vf v = vf_load(r->x + i * r->ld + d);
            any = any + (v - v);
            lo = vf_min(lo, v);
            hi = vf_max(hi, v);
        }
        vf_store(least, lo);
        vf_store(most, hi);
        vf_store(odd, any);
        for (int64_t i = 0; i < VF_LANES && d + i < w->D; i++)
            set_scale(w, page, t, d + i, 1, least[i], most[i], odd[i] == 0, by);
    }
}

/* ---- other levels, by token ---- */

/* Put scale and minimum of the group of token t and channel d into the page. */
static void put_scale(const kvw_side *w, char *page, int64_t t, int64_t d, lm_kv_scale by)
{
    int64_t at = lm_kv_scale_at(w->f, w->T, w->D, t, d);
    put_stored(w->f->scale, page + w->at.scale, at, by.s);
    if (lm_kv_has_min(w->f))
        put_stored(w->f->scale, page + w->at.min, at, by.m);
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

/* Codes of half a vector of numbers; quotients that are NaN have the code 0. */
LM_INLINE void put_codes(uint32_t *code, vd x, const double *s, const double *m, double least,
                         double most)
{
#ifdef __AVX512F__
    vd y = (x - _mm512_loadu_pd(m)) / _mm512_loadu_pd(s);
    y = _mm512_roundscale_pd(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    y = _mm512_min_pd(_mm512_max_pd(y, _mm512_set1_pd(least)), _mm512_set1_pd(most));
    _mm256_storeu_si256((__m256i *)code, _mm512_cvttpd_epi32(y - _mm512_set1_pd(least)));
#else
    vd y = (x - _mm256_loadu_pd(m)) / _mm256_loadu_pd(s);
    y = _mm256_round_pd(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    y = _mm256_min_pd(_mm256_max_pd(y, _mm256_set1_pd(least)), _mm256_set1_pd(most));
    _mm_storeu_si128((__m128i *)code, _mm256_cvttpd_epi32(y - _mm256_set1_pd(least)));
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

LM_INLINE void put_whole(uint32_t *code, vf v)
{
#ifdef __AVX512F__
    _mm512_storeu_si512(code, _mm512_cvttps_epi32(v));
#else
    _mm256_storeu_si256((__m256i *)code, _mm256_cvttps_epi32(v));
#endif
}

/* The codes of a row; behind its end zeros up to a multiple of 16. */
static void find_codes(const kvw_side *w, const float *x, const scales *by, uint32_t *code)
{
    const lm_kv_format *f = w->f;
    double least = f->levels == LM_KV_SYM ? -(double)(1 << (f->bits - 1)) : 0;
    double most = least + (double)((1 << f->bits) - 1);
    for (int64_t d = 0; d < w->D; d += VF_LANES) {
        vf v = vf_load(x + d);
        vf y = (v - vf_load(by->min + d)) * vf_load(by->inverse + d), near = vf_round(y);
        if (is_sure(y, near)) {
            near = vf_min(vf_max(near, vf_set((float)least)), vf_set((float)most));
            put_whole(code + d, near - vf_set((float)least));
            continue;
        }
        put_codes(code + d, vf_low_f64(v), by->s + d, by->m + d, least, most);
        put_codes(code + d + VF_LANES / 2, vf_high_f64(v), by->s + d + VF_LANES / 2,
                  by->m + d + VF_LANES / 2, least, most);
    }
    for (int64_t d = w->D; d % 16; d++)
        code[d] = 0;
}

/* Codes and scale of the group of n numbers at x by the definition. */
static void code_plainly(const kvw_side *w, char *page, int64_t t, int64_t d, int64_t n,
                         const float *range, const float *x, uint32_t *code)
{
    double v[LM_KV_MAX_DIM];
    for (int64_t i = 0; i < n; i++)
        v[i] = (double)x[d + i];
    put_scale(w, page, t, d, lm_kv_code_group(w->f, v, n, range, code + d));
}

/* Token t in FP8 or levels of a table. */
static void code_levels(const kvw_side *w, char *page, int64_t t, const float *range,
                        const float *x, scales *by, uint32_t *code)
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
            put_scale(w, page, t, d, one);
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
            put_scale(w, page, t, d, one);
        }
        if (plain[d / group])
            code_plainly(w, page, t, d, n, range, x, code);
    }
}

/* Token t in a format of ggml's. */
static void code_blocks(const kvw_side *w, char *page, int64_t t, const float *x, uint32_t *code)
{
    for (int64_t d = 0; d < w->D; d += w->f->group)
        code_plainly(w, page, t, d, d + w->f->group < w->D ? w->f->group : w->D - d, NULL, x, code);
    for (int64_t d = w->D; d % 16; d++)
        code[d] = 0;
}

/* Bits [skip, skip + bits) of the codes into a plane of the tile, t being the token's number in it. */
LM_INLINE void put_bits(const kvw_side *w, uint8_t *plane, int64_t t, const uint32_t *code,
                        int skip, int bits)
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
            memcpy(&c, code + d + i, sizeof c);
            old = (old & ~(mask << shift)) | (c >> skip & mask) << shift;
            memcpy(to + i, &old, sizeof old);
        }
    }
    for (int64_t d = 0; !w->f->values && d < w->D; d += 4) {
        int64_t line = d / 4;
        int shift = (int)(line % each * bits);
        uint32_t *to = (uint32_t *)(void *)(plane + line / each * LM_KV_LINE) + t;
        uint32_t four = code[d] | code[d + 1] << 8 | code[d + 2] << 16 | code[d + 3] << 24;
        uint32_t all = mask * 0x01010101u;
        *to = (*to & ~(all << shift)) | (four >> skip & all) << shift;
    }
}

static void put_plane(const kvw_side *w, uint8_t *plane, int64_t t, const uint32_t *code, int skip,
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

static void put_token(const kvw_side *w, char *page, int64_t t, const uint32_t *code)
{
    const lm_kv_format *f = w->f;
    int64_t tile = lm_kv_tile_tokens(f->values, w->T);
    int low = lm_kv_low_bits(f->bits);
    uint8_t *at = (uint8_t *)page + (size_t)(t / tile) * lm_kv_tile_bytes(f, w->T, w->D);
    put_plane(w, at, t % tile, code, 0, low);
    if (f->bits > low)
        put_plane(w, at + lm_kv_plane_bytes(low, lm_kv_tile_lines(f->values, w->T, w->D)), t % tile,
                  code, low, f->bits - low);
}

/* ---- pages ---- */

static void load_row(const kvw_side *w, int64_t j, float *x)
{
    const void *from = kvw_plain_row(w, j);
    VF_FOR(d, n, w->D, {
        vf v = w->act == LM_DTYPE_BF16 ? vf_get_any(LM_DTYPE_BF16, from, d, n)
                                       : vf_get_any(LM_DTYPE_F32, from, d, n);
        vf_store(x + d, v);
    });
}

/* Tokens [from, to) of one page. */
static void encode_fast(const kvw_side *w, int64_t from, int64_t to, const rows *r)
{
    char *page = kvw_page(w, from);
    int64_t step = lm_kv_step(w->f, w->T);
    scales by;
    uint32_t code[LM_KV_MAX_DIM + 16];
    set_channels(&by, w->D, -w->D & 15, 1, 0); /* numbers that no code has */
    for (int64_t j = from; j < to; j += step) {
        for (int64_t i = 0; i < step; i++)
            load_row(w, j + i, r->x + i * r->ld);
        if (w->f->axis == LM_KV_CHANNEL)
            scale_channels(w, page, j % w->T, step, r, &by);
        else
            scale_token(w, page, j % w->T, r->x, &by);
        for (int64_t i = 0; i < step; i++) {
            find_codes(w, r->x + i * r->ld, &by, code);
            put_token(w, page, (j + i) % w->T, code);
        }
    }
}

/* The same of formats with scales of tokens that are not linear, or not stored. */
static void encode_by_token(const kvw_side *w, int64_t from, int64_t to, const rows *r)
{
    const lm_kv_format *f = w->f;
    char *page = kvw_page(w, from);
    scales by;
    uint32_t code[LM_KV_MAX_DIM + 16];
    set_channels(&by, w->D, -w->D & 15, 1, 0);
    for (int64_t j = from; j < to; j++) {
        load_row(w, j, r->x);
        if (f->ggml)
            code_blocks(w, page, j % w->T, r->x, code);
        else
            code_levels(w, page, j % w->T, w->range ? w->range + 2 * (j - w->ranges) : NULL, r->x,
                        &by, code);
        put_token(w, page, j % w->T, code);
    }
}

static void encode_rows(const kvw_side *w, int64_t from, int64_t to, const rows *r)
{
    if (!w->f)
        kvw_copy(w, from, to);
    else if (is_fast(w->f))
        encode_fast(w, from, to, r);
    else if (is_by_token(w->f))
        encode_by_token(w, from, to, r);
    else
        kvw_encode(w, from, to, r->x);
}

static int64_t padded_dim(const lm_call *c)
{
    return (c->out[KVW_KEYS].dim[3] + 15) / 16 * 16;
}

/* Floats of a worker: a page of one head, or a token of all. */
static int64_t room_of(const lm_call *c)
{
    int64_t page = c->out[KVW_KEYS].dim[2] * padded_dim(c);
    int64_t token = 2 * c->out[KVW_KEYS].dim[1] * c->out[KVW_KEYS].dim[3];
    return page > token ? page : (token + 15) / 16 * 16;
}

static rows worker_rows(const lm_call *c, int worker)
{
    return (rows){ (float *)c->work + worker * room_of(c), padded_dim(c) };
}

/* The ranges of values lie behind all workers' room. */
static float *ranges_of(const lm_call *c)
{
    return (float *)c->work + lm_par_threads(c->par) * room_of(c);
}

typedef struct {
    const lm_call *c;
    int64_t pages; /* most that the new codes of a head lie in */
} writing;

static int64_t most_pages(const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    int64_t T = c->out[KVW_KEYS].dim[2], most = 0;
    int64_t late = a->residual[0] > a->residual[1] ? a->residual[0] : a->residual[1];
    for (int64_t b = 0; b < a->attention.batch; b++) {
        int64_t n = kvw_int(c, KVW_FRESH, b);
        most = n > most ? n : most;
    }
    return most ? (most + late) / T + 2 : 0;
}

/* Unit u is a page of keys or values of a head. */
static void encode_pages(void *ctx, int64_t begin, int64_t end, int worker)
{
    const writing *x = ctx;
    const lm_call *c = x->c;
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    rows r = worker_rows(c, worker);
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / (2 * x->pages);
        kvw_side w = kvw_side_of(c, bk / K, bk % K, u / x->pages % 2);
        if (w.f && w.f->values && kvw_has_ranges(c))
            kvw_use_ranges(&w, ranges_of(c));
        int64_t from = kvw_coded_end(&w, w.used), to = kvw_coded_end(&w, w.end);
        int64_t page = (from / w.T + u % x->pages) * w.T;
        from = from > page ? from : page;
        to = to < page + w.T ? to : page + w.T;
        if (from < to)
            encode_rows(&w, from, to, &r);
    }
}

/* Unit u is keys or values of a head, whose tokens are replaced. */
static void replace_tokens(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    rows r = worker_rows(c, worker);
    for (int64_t u = begin; u < end; u++) {
        kvw_side w = kvw_side_of(c, u / 2 / K, u / 2 % K, u % 2);
        if (u % 2 && kvw_has_ranges(c))
            kvw_use_ranges(&w, ranges_of(c));
        for (int64_t i = 0; i < w.end - w.used; i++) {
            kvw_side one = kvw_one_row(c, &w, i);
            encode_rows(&one, one.used, one.end, &r);
        }
    }
}

static void find_ranges(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    rows r = worker_rows(c, worker);
    for (int64_t n = begin; n < end; n++)
        kvw_range_at(c, n, r.x, ranges_of(c));
}

static void keep_tails(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    (void)worker;
    for (int64_t u = begin; u < end; u++) {
        kvw_side w = kvw_side_of(c, u / 2 / K, u / 2 % K, u % 2);
        if (w.tail)
            kvw_keep_tail(&w);
    }
}

static bool has_tail(const lm_kv_attr *a, int side)
{
    return a->residual[side] + a->sinks[side] > 0;
}

static void kv_write(const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    int64_t heads = a->attention.batch * a->attention.kv_heads;
    writing x = { c, most_pages(c) };
    if (x.pages == 0)
        return;
    if (kvw_has_ranges(c))
        lm_par_for(c->par, c->in[KVW_QKV].dim[0], 8, find_ranges, (void *)(uintptr_t)c);
    if (kvw_has_rows(c)) {
        lm_par_for(c->par, heads * 2, 1, replace_tokens, (void *)(uintptr_t)c);
        return;
    }
    lm_par_for(c->par, heads * 2 * x.pages, 1, encode_pages, &x);
    if (has_tail(a, 0) || has_tail(a, 1))
        lm_par_for(c->par, heads * 2, 8, keep_tails, (void *)(uintptr_t)c);
}

static size_t kv_write_work(const lm_call *c, int threads)
{
    int64_t ranges = kvw_has_ranges(c) ? 2 * c->in[KVW_QKV].dim[0] : 0;
    return (size_t)(threads * room_of(c) + ranges) * sizeof(float);
}

const lm_kernel LM_TABLE_NAME(kv_write, LM_SIMD)[] = {
    VF_KERNEL("kv_write", kv_write, kv_write_work),
    VF_KERNEL_END,
};
