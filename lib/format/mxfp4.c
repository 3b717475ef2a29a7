/* SPDX-License-Identifier: Apache-2.0 */
/* mxfp4.c -- see mxfp4.h. */
#include "format/mxfp4.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "format/safetensors_table.h"
#include "format/source_made.h"

enum { GROUP = 32, HALF = 16, CODED = 17 };
static const char blocks_end[] = "_blocks", scales_end[] = "_scales";

/* A tensor of the plan: one of the file's, or made of two. */
typedef struct {
    const lm_st_tensor *blocks, *scales; /* scales NULL: `blocks` is the tensor */
} part;

typedef struct {
    lm_model_source *in;
    lm_st_plan *plan;
    const lm_format *format;
    part *part; /* by number in the plan */
    size_t n, cap;
    uint8_t *bytes, *whole; /* blocks and scales, and numbers, of the latest tensor */
    size_t bytes_cap, whole_cap;
} mxfp4_source;

static const part *part_of(const mxfp4_source *s, const lm_st_tensor *t)
{
    return &s->part[t - lm_st_plan_at(s->plan, 0)];
}

/* Blocks, then scales, into s->bytes. */
static lm_code read_codes(mxfp4_source *s, const part *x, lm_err *e)
{
    const size_t blocks = (size_t)x->blocks->bytes, scales = (size_t)x->scales->bytes;
    if (lm_grow(&s->bytes, &s->bytes_cap, blocks + scales + 1, 1, "codes of a tensor", e) ||
        lm_model_source_read(s->in, x->blocks, 0, s->bytes, blocks, e))
        return e->code;
    return lm_model_source_read(s->in, x->scales, 0, s->bytes + blocks, scales, e);
}

/* ---- numbers ---- */

/* The BF16 bits of all 16 codes with a scale. */
static void numbers_of(uint8_t scale, uint16_t out[16])
{
    static const float size[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
    const float by = ldexpf(1, scale - 127);
    for (int k = 0; k < 16; k++)
        out[k] = lm_f32_to_bf16((k & 8 ? -size[k & 7] : size[k & 7]) * by);
}

/* Of one expert: codes of rows [out][in/32] as a matrix [in,out], some rows at a time so that what is written stays in
 * the cache. */
static void decode_turned(const uint8_t *blocks, const uint8_t *scales, int64_t out, int64_t groups,
                          uint16_t *to)
{
    enum { ROWS = 32 };
    for (int64_t r0 = 0; r0 < out; r0 += ROWS)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = r0; r < out && r < r0 + ROWS; r++) {
                const uint8_t *code = blocks + (r * groups + g) * HALF;
                uint16_t *at = to + g * GROUP * out + r, number[16];
                numbers_of(scales[r * groups + g], number);
                for (int k = 0; k < HALF; k++) {
                    at[(2 * k) * out] = number[code[k] & 15];
                    at[(2 * k + 1) * out] = number[code[k] >> 4];
                }
            }
}

static lm_code load(void *ctx, const lm_st_tensor *t, const void **data, lm_err *e)
{
    mxfp4_source *s = ctx;
    const part *x = part_of(s, t);
    if (lm_grow(&s->whole, &s->whole_cap, (size_t)t->bytes + 1, 1, "a tensor", e))
        return e->code;
    *data = s->whole;
    if (!x->scales)
        return lm_model_source_read(s->in, x->blocks, 0, s->whole, (size_t)t->bytes, e);
    if (read_codes(s, x, e))
        return e->code;
    const int64_t out = t->dim[2], groups = t->dim[1] / GROUP, matrix = t->dim[1] * out;
    for (int64_t k = 0; k < t->dim[0]; k++)
        decode_turned(s->bytes + k * out * groups * HALF,
                      s->bytes + x->blocks->bytes + k * out * groups, out, groups,
                      (uint16_t *)(void *)s->whole + k * matrix);
    return LM_OK;
}

/* ---- codes ---- */

static const lm_format *format(void *ctx, const lm_st_tensor *t, bool *turned)
{
    const mxfp4_source *s = ctx;
    const part *x = part_of(s, t);
    if (!x->scales)
        return lm_model_source_format(s->in, x->blocks, turned);
    *turned = true;
    return s->format;
}

/* A block in the order of ggml: the scale; the first 16 codes in the low halves. */
static void reorder(const uint8_t *code, uint8_t scale, uint8_t *to)
{
    uint8_t q[GROUP];
    for (int k = 0; k < HALF; k++) {
        q[2 * k] = code[k] & 15;
        q[2 * k + 1] = code[k] >> 4;
    }
    *to++ = scale;
    for (int k = 0; k < HALF; k++)
        to[k] = (uint8_t)(q[k] | q[k + HALF] << 4);
}

static lm_code codes(void *ctx, const lm_st_tensor *t, void *dst, lm_err *e)
{
    mxfp4_source *s = ctx;
    const part *x = part_of(s, t);
    if (!x->scales)
        return lm_model_source_codes(s->in, x->blocks, dst, e);
    if (read_codes(s, x, e))
        return e->code;
    for (int64_t k = 0; k < x->scales->count; k++)
        reorder(s->bytes + k * HALF, s->bytes[x->blocks->bytes + (uint64_t)k],
                (uint8_t *)dst + k * CODED);
    return LM_OK;
}

static const void *codes_in_file(void *ctx, const lm_st_tensor *t)
{
    const mxfp4_source *s = ctx;
    const part *x = part_of(s, t);
    return x->scales ? NULL : lm_model_source_codes_in_file(s->in, x->blocks);
}

static void let_go(void *ctx)
{
    mxfp4_source *s = ctx;
    lm_st_plan_free(s->plan);
    lm_free(s->part);
    lm_free(s->bytes);
    lm_free(s->whole);
    lm_free(s);
}

static const lm_source_maker maker = {
    .load = load, .format = format, .codes = codes, .codes_in_file = codes_in_file, .close = let_go
};

/* ---- the plan ---- */

/* "..._blocks" without its end, or NULL. */
static const char *stem_of(const char *name, const char *end, char out[512])
{
    const size_t n = strlen(name), tail = strlen(end);
    if (n <= tail || n >= 500 || strcmp(name + n - tail, end))
        return NULL;
    snprintf(out, 512, "%.*s", (int)(n - tail), name);
    return out;
}

static lm_code bad(const mxfp4_source *s, const char *name, const char *why, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, lm_model_source_path(s->in), NULL, "tensor \"%s\": %s", name, why);
}

/* The shape of the numbers; LM_EUSAGE if blocks and scales do not match. */
static lm_code shape_of(const mxfp4_source *s, const part *x, int64_t dim[3], lm_err *e)
{
    const lm_st_tensor *b = x->blocks, *c = x->scales;
    bool same = b->ndim == 4 && c->ndim == 3 && b->dim[3] == HALF;
    for (int i = 0; same && i < 3; i++)
        same = b->dim[i] == c->dim[i];
    if (!same) {
        char have[LM_ST_SHAPE], with[LM_ST_SHAPE];
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(s->in), NULL,
                       "tensor \"%s\" has shape [%s], which does not match the scales' [%s]",
                       b->name, lm_st_show_shape(b->ndim, b->dim, have),
                       lm_st_show_shape(c->ndim, c->dim, with));
    }
    if (b->dtype != LM_DTYPE_U8 || c->dtype != LM_DTYPE_U8)
        return bad(s, b->dtype != LM_DTYPE_U8 ? b->name : c->name, "is not of dtype U8", e);
    dim[0] = b->dim[0];
    dim[1] = b->dim[2] * GROUP;
    dim[2] = b->dim[1];
    return LM_OK;
}

static lm_code add(mxfp4_source *s, const lm_st_tensor *t, lm_err *e)
{
    char stem[512], other[600];
    part x = { t, NULL };
    int64_t dim[3];
    if (stem_of(t->name, scales_end, stem)) {
        snprintf(other, sizeof other, "%s%s", stem, blocks_end);
        return lm_model_source_find(s->in, other) ? LM_OK
                                                  : bad(s, t->name, "has no blocks beside it", e);
    }
    if (stem_of(t->name, blocks_end, stem)) {
        snprintf(other, sizeof other, "%s%s", stem, scales_end);
        if (!(x.scales = lm_model_source_find(s->in, other)))
            return bad(s, t->name, "has no scales beside it", e);
        if (shape_of(s, &x, dim, e))
            return e->code;
    }
    if (lm_grow(&s->part, &s->cap, s->n + 1, sizeof *s->part, "tensors of a model", e))
        return e->code;
    s->part[s->n++] = x;
    return x.scales ? lm_st_plan_add(s->plan, stem, LM_DTYPE_BF16, 3, dim, e)
                    : lm_st_plan_add_like(s->plan, t, e);
}

static lm_code make_plan(mxfp4_source *s, lm_err *e)
{
    if (lm_st_plan_new(&s->plan, e) || lm_format_find("mxfp4", NULL, &s->format, e))
        return e->code;
    for (size_t i = 0; i < lm_model_source_count(s->in); i++)
        if (add(s, lm_model_source_at(s->in, i), e))
            return e->code;
    return LM_OK;
}

static lm_code wrap(lm_model_source **src, const json_t *config, lm_err *e)
{
    mxfp4_source *s = NULL;
    json_t *plain = json_copy((json_t *)(uintptr_t)config);
    if (!plain)
        return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory");
    json_object_del(plain, "quantization_config");
    if (!lm_alloc_n(&s, 1, sizeof *s, "a model", e)) {
        s->in = *src;
        if (make_plan(s, e) || lm_model_source_make_over(src, plain, s->plan, &maker, s, e))
            let_go(s);
    }
    json_decref(plain);
    return e->code;
}

lm_code lm_mxfp4_over(lm_model_source **src, lm_err *e)
{
    const json_t *config = lm_model_source_config(*src);
    const json_t *q = json_object_get(config, "quantization_config");
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    return method && !strcmp(method, "mxfp4") ? wrap(src, config, e) : LM_OK;
}
