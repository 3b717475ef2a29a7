/* SPDX-License-Identifier: Apache-2.0 */
/* fp8_source.c -- see fp8_source.h. */
#include "format/fp8_source.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/safetensors_table.h"
#include "format/source_made.h"
#include "numeric/format_scaled.h"

enum { NAME = 512 };
static const char suffix[] = "_scale_inv";

/* A tensor of the plan. */
typedef struct {
    const lm_st_tensor *own, *scale; /* scale NULL: `own` as it is */
} part;

typedef struct {
    lm_model_source *in;
    lm_st_plan *plan;
    part *part; /* by number in the plan */
    size_t n, cap;
    int64_t block[2];        /* rows and columns under one scale */
    bool powers;             /* bytes of scales are exponents */
    const lm_format *format; /* that holds the codes; NULL: none does */
    uint8_t *codes;          /* of the latest tensor, */
    float *scales;           /* and its scales; */
    uint8_t *whole;          /* what was given */
    size_t codes_cap, scales_cap, whole_cap;
} fp8_source;

static int64_t blocks(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* ---- reading ---- */

static const part *part_of(const fp8_source *s, const lm_st_tensor *t)
{
    return &s->part[t - lm_st_plan_at(s->plan, 0)];
}

static void scale_rows(const fp8_source *s, const lm_st_tensor *t, float *x)
{
    int64_t cols = t->dim[1], wide = blocks(cols, s->block[1]);
    for (int64_t r = 0; r < t->dim[0]; r++) {
        const float *scale = s->scales + r / s->block[0] * wide;
        for (int64_t b = 0; b < wide; b++) {
            int64_t end = (b + 1) * s->block[1] < cols ? (b + 1) * s->block[1] : cols;
            for (int64_t c = b * s->block[1]; c < end; c++)
                x[r * cols + c] *= scale[b];
        }
    }
}

static bool is_exponents(const lm_st_tensor *t)
{
    return !strcmp(t->dtype_name, "F8_E8M0");
}

/* The scales of a matrix into s->scales. */
static lm_code load_scales(fp8_source *s, const lm_st_tensor *t, lm_err *e)
{
    uint8_t *power = (uint8_t *)(s->scales + t->count) - t->count; /* behind those that are made */
    if (lm_dtype_is_float(t->dtype))
        return lm_model_source_load(s->in, t, LM_DTYPE_F32, s->scales, e);
    if (lm_model_source_read(s->in, t, 0, power, (size_t)t->count, e))
        return e->code;
    for (int64_t i = 0; i < t->count; i++) {
        const uint8_t b = power[i];
        s->scales[i] = b == UINT8_MAX ? NAN : ldexpf(1, b - 127);
    }
    return LM_OK;
}

/* Codes and scales of a matrix. */
static lm_code read_matrix(fp8_source *s, const part *x, lm_err *e)
{
    if (lm_grow(&s->codes, &s->codes_cap, (size_t)x->own->bytes + 1, 1, "codes of a tensor", e) ||
        lm_grow(&s->scales, &s->scales_cap, (size_t)x->scale->count + 1, sizeof(float),
                "scales of a tensor", e) ||
        lm_model_source_read(s->in, x->own, 0, s->codes, (size_t)x->own->bytes, e))
        return e->code;
    return load_scales(s, x->scale, e);
}

static lm_code load(void *ctx, const lm_st_tensor *t, const void **data, lm_err *e)
{
    fp8_source *s = ctx;
    const part *x = part_of(s, t);
    if (lm_grow(&s->whole, &s->whole_cap, (size_t)t->bytes + 1, 1, "a tensor", e))
        return e->code;
    *data = s->whole;
    if (!x->scale)
        return lm_model_source_read(s->in, x->own, 0, s->whole, (size_t)t->bytes, e);
    if (read_matrix(s, x, e))
        return e->code;
    lm_convert(x->own->dtype, s->codes, LM_DTYPE_F32, s->whole, t->count);
    scale_rows(s, t, (float *)(void *)s->whole);
    return LM_OK;
}

/* True if a format holds the codes of a matrix. */
static bool keeps_codes(const fp8_source *s, const lm_st_tensor *t)
{
    return part_of(s, t)->scale && s->format && t->dim[1] % LM_SCALED_BLOCK == 0;
}

static const lm_format *format(void *ctx, const lm_st_tensor *t, bool *turned)
{
    const fp8_source *s = ctx;
    *turned = false;
    return keeps_codes(s, t) ? s->format : lm_format_of_dtype(t->dtype);
}

/* Rows of blocks, each behind its scale. */
static lm_code scaled_codes(fp8_source *s, const lm_st_tensor *t, uint8_t *dst, lm_err *e)
{
    const int64_t wide = blocks(t->dim[1], s->block[1]);
    if (read_matrix(s, part_of(s, t), e))
        return e->code;
    for (int64_t r = 0; r < t->dim[0]; r++)
        for (int64_t b = 0; b < wide; b++, dst += LM_SCALED_BYTES) {
            memcpy(dst, &s->scales[r / s->block[0] * wide + b], sizeof *s->scales);
            memcpy(dst + sizeof *s->scales, s->codes + (r * wide + b) * LM_SCALED_BLOCK,
                   LM_SCALED_BLOCK);
        }
    return LM_OK;
}

static lm_code codes(void *ctx, const lm_st_tensor *t, void *dst, lm_err *e)
{
    fp8_source *s = ctx;
    const void *data = NULL;
    if (keeps_codes(s, t))
        return scaled_codes(s, t, dst, e);
    if (load(ctx, t, &data, e))
        return e->code;
    memcpy(dst, data, (size_t)t->bytes);
    return LM_OK;
}

static void let_go(void *ctx)
{
    fp8_source *s = ctx;
    lm_st_plan_free(s->plan);
    lm_free(s->part);
    lm_free(s->codes);
    lm_free(s->scales);
    lm_free(s->whole);
    lm_free(s);
}

static const lm_source_maker maker = {
    .load = load, .format = format, .codes = codes, .close = let_go
};

/* ---- the plan ---- */

/* The matrix whose scales `t` holds; NULL: it holds none. */
static const lm_st_tensor *scaled_by(const lm_model_source *in, const lm_st_tensor *t)
{
    char name[NAME];
    size_t n = strlen(t->name), tail = sizeof suffix - 1;
    if (n <= tail || n - tail >= NAME || !lm_text_ends(t->name, suffix))
        return NULL;
    memcpy(name, t->name, n - tail);
    name[n - tail] = 0;
    return lm_model_source_find(in, name);
}

static lm_code find_scale(const fp8_source *s, const lm_st_tensor *t, const lm_st_tensor **out,
                          lm_err *e)
{
    char name[NAME], show[LM_ST_SHOWN];
    const char *where = lm_model_source_file_of(s->in, t);
    snprintf(name, sizeof name, "%.480s%s", t->name, suffix);
    const lm_st_tensor *f = lm_model_source_find(s->in, name);
    if (t->ndim != 2 || !f)
        return lm_fail(e, LM_EUSAGE, where, "fetch the model again", "tensor '%s' is %s, but %s",
                       lm_st_show(t->name, show), t->dtype_name,
                       t->ndim != 2 ? "no matrix" : "there are no scales of it");
    const bool known = f->dtype == LM_DTYPE_F32 || f->dtype == LM_DTYPE_BF16 || is_exponents(f) ||
                       (f->dtype == LM_DTYPE_U8 && s->powers);
    if (!known || f->ndim != 2 || f->dim[0] != blocks(t->dim[0], s->block[0]) ||
        f->dim[1] != blocks(t->dim[1], s->block[1]))
        return lm_fail(
            e, LM_EUSAGE, lm_model_source_file_of(s->in, f), NULL,
            "tensor '%s' is not F32, BF16 or F8_E8M0 [%lld,%lld], one scale for each block of "
            "weight_block_size",
            lm_st_show(name, show), (long long)blocks(t->dim[0], s->block[0]),
            (long long)blocks(t->dim[1], s->block[1]));
    *out = f;
    return LM_OK;
}

static lm_code add(fp8_source *s, const lm_st_tensor *t, lm_err *e)
{
    part x = { t, NULL };
    if (t->dtype == LM_DTYPE_F8E4M3 && find_scale(s, t, &x.scale, e))
        return e->code;
    if (lm_grow(&s->part, &s->cap, s->n + 1, sizeof *s->part, "tensors of a model", e))
        return e->code;
    s->part[s->n++] = x;
    return x.scale ? lm_st_plan_add(s->plan, t->name, LM_DTYPE_F32, t->ndim, t->dim, e)
                   : lm_st_plan_add_like(s->plan, t, e);
}

static lm_code make_plan(fp8_source *s, lm_err *e)
{
    if (lm_st_plan_new(&s->plan, e))
        return e->code;
    for (size_t i = 0; i < lm_model_source_count(s->in); i++) {
        const lm_st_tensor *t = lm_model_source_at(s->in, i), *of = scaled_by(s->in, t);
        if ((!of || of->dtype != LM_DTYPE_F8E4M3) && add(s, t, e))
            return e->code;
    }
    return LM_OK;
}

/* weight_block_size of FP8; NULL: the config has none. */
static const json_t *block_size(const json_t *config)
{
    const json_t *q = json_object_get(config, "quantization_config");
    const json_t *size = json_object_get(q, "weight_block_size");
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    return method && !strcmp(method, "fp8") && json_is_array(size) ? size : NULL;
}

static bool has_powers(const json_t *config)
{
    const json_t *q = json_object_get(config, "quantization_config");
    const char *form = json_string_value(json_object_get(q, "scale_fmt"));
    return form && !strcmp(form, "ue8m0");
}

bool lm_fp8_in_blocks(const json_t *config)
{
    return block_size(config) != NULL;
}

void lm_fp8_plain_config(json_t *config)
{
    if (lm_fp8_in_blocks(config))
        json_object_del(config, "quantization_config");
}

static lm_code wrap(lm_model_source **src, const int64_t block[2], lm_err *e)
{
    fp8_source *s = NULL;
    json_t *config = json_copy((json_t *)(uintptr_t)lm_model_source_config(*src));
    if (!config)
        return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for a copy");
    const bool powers = has_powers(config);
    lm_fp8_plain_config(config);
    if (!lm_alloc_n(&s, 1, sizeof *s, "a model", e)) {
        s->in = *src;
        memcpy(s->block, block, sizeof s->block);
        s->powers = powers;
        if (block[1] == LM_SCALED_BLOCK)
            lm_format_find("fp8_e4m3_128", NULL, &s->format, e);
        if (make_plan(s, e) || lm_model_source_make_over(src, config, s->plan, &maker, s, e))
            let_go(s);
    }
    json_decref(config);
    return e->code;
}

/* Sizes of blocks; 0: the config has no FP8 in blocks. */
static lm_code read_block(const lm_model_source *in, int64_t block[2], lm_err *e)
{
    const json_t *size = block_size(lm_model_source_config(in));
    block[0] = block[1] = 0;
    if (!size)
        return LM_OK;
    for (size_t i = 0; i < 2; i++)
        block[i] = json_integer_value(json_array_get(size, i));
    if (json_array_size(size) != 2 || block[0] < 1 || block[1] < 1 || block[0] > 1 << 24 ||
        block[1] > 1 << 24)
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(in), NULL,
                       "\"weight_block_size\" is not two sizes");
    return LM_OK;
}

lm_code lm_fp8_source_over(lm_model_source **src, lm_err *e)
{
    int64_t block[2];
    if (!lm_model_source_config(*src) || read_block(*src, block, e) || !block[0])
        return e->code;
    /* scales follow their matrices */
    if (!lm_model_source_random(*src) && lm_model_source_spool(*src, e))
        return e->code;
    return wrap(src, block, e);
}

lm_code lm_fp8_source_open(const char *path, const lm_bundle_opts *how, lm_model_source **out,
                           lm_err *e)
{
    if (lm_model_source_open(path, how, out, e))
        return e->code;
    if (lm_fp8_source_over(out, e)) {
        lm_model_source_close(*out);
        *out = NULL;
    }
    return e->code;
}
