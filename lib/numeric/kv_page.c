/* SPDX-License-Identifier: Apache-2.0 */
/* kv_page.c -- pages of coded caches: checks of a format, sections and sizes.  The CUDA module has this file, too. */
#include <inttypes.h>
#include <math.h>

#include "numeric/kv_format.h"

static bool is_scale_type(lm_dtype d)
{
    return d == LM_DTYPE_F16 || d == LM_DTYPE_BF16 || d == LM_DTYPE_F32;
}

static bool rising(const lm_kv_format *f)
{
    for (int i = 0; i < f->n_table; i++)
        if (!isfinite(f->table[i]) || (i > 0 && !(f->table[i] > f->table[i - 1])))
            return false;
    return true;
}

static const char *wrong_levels(const lm_kv_format *f)
{
    bool five = f->bits == 4 || f->bits == 5;
    if (f->bits < 1 || f->bits == 7 || f->bits > 8)
        return "the bits of a code are 1 to 6 or 8";
    if (f->levels == LM_KV_TABLE && (f->bits > 5 || f->n_table != 1 << f->bits || !rising(f)))
        return "a table has 2^bits levels, at most 32, that rise";
    if (f->levels == LM_KV_FLOAT8 &&
        (f->bits != 8 || (f->float8 != LM_DTYPE_F8E4M3 && f->float8 != LM_DTYPE_F8E5M2)))
        return "FP8 has 8 bits, as E4M3 or E5M2";
    if (f->levels != LM_KV_TABLE && (f->norm || f->renorm || f->zero))
        return "norms and zeros are of tables";
    if ((f->renorm && !f->norm) || (f->norm && f->zero))
        return "a table's scale is a norm, or a range";
    if (!f->ggml)
        return NULL;
    if (f->axis != LM_KV_TOKEN || f->group != 32 || f->scale != LM_DTYPE_F16 || f->norm ||
        f->zero || f->second || f->outliers ||
        !(f->levels == LM_KV_SYM    ? five || f->bits == 8
          : f->levels == LM_KV_ASYM ? five
                                    : f->levels == LM_KV_TABLE && f->bits == 4))
        return "ggml's formats are q4_0, q5_0, q8_0, q4_1, q5_1, iq4_nl";
    return NULL;
}

static const char *wrong_scales(const lm_kv_format *f, int64_t T)
{
    bool fixed = f->lower && f->upper;
    if (f->scale != LM_DTYPE_NONE && !is_scale_type(f->scale))
        return "scales are F16, BF16 or F32";
    if (f->scale == LM_DTYPE_NONE && f->axis == LM_KV_CHANNEL && (!fixed || f->norm))
        return "channels without stored scales have fixed ranges";
    if (f->scale == LM_DTYPE_NONE && f->axis == LM_KV_TOKEN && (lm_kv_has_min(f) || f->norm))
        return "minima and norms are stored";
    if (f->scale == LM_DTYPE_NONE && f->axis == LM_KV_TOKEN && !f->head && !(f->constant > 0))
        return "a constant scale is above 0";
    if ((f->lower || f->upper) && (!fixed || f->scale != LM_DTYPE_NONE || f->axis != LM_KV_CHANNEL))
        return "fixed ranges are of channels without stored scales, least and most";
    if (f->group < 0 || f->group % LM_KV_TILE ||
        (f->axis == LM_KV_CHANNEL && f->group && T % f->group))
        return "groups are multiples of 16, and groups of tokens divide a page";
    if (f->second && (f->levels != LM_KV_ASYM || f->scale == LM_DTYPE_NONE || f->outliers))
        return "second scales go with minima and stored scales, without outliers";
    if (f->second && (f->span < 0 || f->span % LM_KV_TILE || (f->span && T % f->span)))
        return "spans are multiples of 16 and divide a page";
    return NULL;
}

static const char *wrong_place(const lm_kv_format *f, int64_t T, int64_t D)
{
    if (T < LM_KV_TILE || T > LM_KV_MAX_TOKENS || (T != 16 && T != 32 && T % 64))
        return "a page has 16, 32 or a multiple of 64 tokens, at most 4096";
    if (D < 1 || D > LM_KV_MAX_DIM)
        return "a head has 1 to 1024 numbers";
    if (f->outliers < 0 || (f->outliers && (T * D > 65536 || f->outliers > T * D)))
        return "outliers are of pages with at most 65536 numbers a head";
    if (f->outliers && (f->levels != LM_KV_TABLE || !(f->zero || f->lower)))
        return "outliers go with tables over a range";
    return NULL;
}

static size_t up64(size_t n)
{
    return (n + 63) / 64 * 64;
}

/* Scales of a page. */
static int64_t scale_count(const lm_kv_format *f, int64_t T, int64_t D)
{
    if (f->axis == LM_KV_CHANNEL)
        return T / (f->group ? f->group : T) * ((D + 15) / 16 * 16);
    return T * lm_kv_groups(f, D);
}

static int64_t second_count(const lm_kv_format *f, int64_t T, int64_t D)
{
    return f->axis == LM_KV_CHANNEL ? T : T / (f->span ? f->span : T) * ((D + 15) / 16 * 16);
}

lm_code lm_kv_page(const lm_kv_format *f, int64_t T, int64_t D, lm_kv_sections *out, lm_err *e)
{
    const char *wrong = wrong_place(f, T, D);
    wrong = wrong ? wrong : wrong_levels(f);
    wrong = wrong ? wrong : wrong_scales(f, T);
    *out = (lm_kv_sections){ 0 };
    if (wrong)
        return lm_fail(e, LM_EUSAGE, f->name, "choose values that this allows",
                       "pages of %" PRId64 " tokens and heads of %" PRId64 " numbers: %s", T, D,
                       wrong);
    size_t each = f->scale == LM_DTYPE_NONE ? 0 : lm_dtype_size(f->scale), at = 0;
    at += (size_t)(T / lm_kv_tile_tokens(f->values, T)) * lm_kv_tile_bytes(f, T, D);
    out->scale = at;
    at += up64((size_t)scale_count(f, T, D) * each);
    out->min = at;
    at += lm_kv_has_min(f) ? up64((size_t)scale_count(f, T, D) * each) : 0;
    out->second = at;
    at += f->second ? up64((size_t)second_count(f, T, D) * each) : 0;
    out->outliers = at;
    at += f->outliers ? up64(2 + 4 * (size_t)f->outliers) : 0;
    out->all = at;
    return LM_OK;
}

size_t lm_kv_page_bytes(const lm_kv_format *f, int64_t T, int64_t D)
{
    lm_kv_sections s;
    return lm_kv_page(f, T, D, &s, NULL) ? SIZE_MAX : s.all;
}

int64_t lm_kv_step(const lm_kv_format *f, int64_t T)
{
    if (f->lower)
        return 1;
    if (f->axis == LM_KV_CHANNEL)
        return f->group ? f->group : T;
    return !f->second ? 1 : f->span ? f->span : T;
}
