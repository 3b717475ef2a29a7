/* SPDX-License-Identifier: Apache-2.0 */
/* coded_source.c -- see coded_source.h. */
#include "compress/coded_source.h"

#include <string.h>

#include "base/mem.h"
#include "compress/coded.h"
#include "format/source_made.h"

enum { CODES, SCALES, PLANES };
static const char *const suffix[PLANES] = { ".codes", ".scales" };

/* A tensor of the plan: one of the file's, or two that hold its planes. */
typedef struct {
    const lm_st_tensor *plane[PLANES];
    const lm_format *format; /* NULL: plane[0] is the tensor */
} part;

typedef struct {
    lm_model_source *in;
    lm_st_plan *plan;
    part *part; /* by number in the plan */
    size_t n, cap;
    uint8_t *planes, *whole; /* of the latest tensor */
    size_t planes_cap, whole_cap, floats_cap;
    float *floats;
} coded_source;

static lm_code bad(const coded_source *s, const char *name, const char *why, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, lm_model_source_path(s->in), "write the file again",
                   "the description of tensor '%.80s' does not hold: %s", name, why);
}

/* ---- reading ---- */

static part *part_of(coded_source *s, const lm_st_tensor *t)
{
    return &s->part[t - lm_st_plan_at(s->plan, 0)];
}

/* All planes of x to dst; scales first, as streams bring them. */
static lm_code read_planes(const coded_source *s, const part *x, uint8_t *dst, lm_err *e)
{
    const lm_st_tensor *codes = x->plane[CODES], *scales = x->plane[SCALES];
    if (lm_model_source_read(s->in, scales, 0, dst + codes->bytes, scales->bytes, e))
        return e->code;
    return lm_model_source_read(s->in, codes, 0, dst, codes->bytes, e);
}

static lm_code load(void *ctx, const lm_st_tensor *t, const void **data, lm_err *e)
{
    coded_source *s = ctx;
    const part *x = part_of(s, t);
    size_t bytes = (size_t)t->bytes, count = (size_t)t->count;

    if (lm_grow(&s->whole, &s->whole_cap, bytes + 1, 1, "a tensor", e))
        return e->code;
    *data = s->whole;
    if (!x->format)
        return lm_model_source_read(s->in, x->plane[0], 0, s->whole, bytes, e);
    if (lm_grow(&s->planes, &s->planes_cap, x->plane[CODES]->bytes + x->plane[SCALES]->bytes, 1,
                "codes of a tensor", e) ||
        lm_grow(&s->floats, &s->floats_cap, count, sizeof(float), "a tensor", e) ||
        read_planes(s, x, s->planes, e))
        return e->code;
    const void *plane[LM_MAX_PLANES] = { s->planes, s->planes + x->plane[CODES]->bytes };
    x->format->decode(x->format, plane, 1, t->count, s->floats, t->count);
    lm_convert(LM_DTYPE_F32, s->floats, t->dtype, s->whole, t->count);
    return LM_OK;
}

/* Blocks run through the tensor; they are those of its rows where these are whole blocks. */
static const lm_format *format(void *ctx, const lm_st_tensor *t, bool *turned)
{
    const part *x = part_of(ctx, t);
    *turned = false;
    if (!x->format)
        return lm_format_of_dtype(t->dtype);
    return t->ndim == 2 && t->dim[1] % lm_format_group(x->format) == 0
               ? x->format
               : lm_format_of_dtype(t->dtype);
}

static lm_code codes(void *ctx, const lm_st_tensor *t, void *dst, lm_err *e)
{
    coded_source *s = ctx;
    const part *x = part_of(s, t);
    bool turned;
    const void *data = NULL;
    if (x->format && format(ctx, t, &turned) == x->format)
        return read_planes(s, x, dst, e);
    if (load(ctx, t, &data, e))
        return e->code;
    memcpy(dst, data, (size_t)t->bytes);
    return LM_OK;
}

static const char *meta(void *ctx, const char *key)
{
    const coded_source *s = ctx;
    return strcmp(key, LM_CODED_KEY) ? lm_model_source_meta(s->in, key) : NULL;
}

static void let_go(void *ctx)
{
    coded_source *s = ctx;
    lm_st_plan_free(s->plan);
    lm_free(s->part);
    lm_free(s->planes);
    lm_free(s->whole);
    lm_free(s->floats);
    lm_free(s);
}

static const lm_source_maker maker = {
    .load = load, .format = format, .codes = codes, .meta = meta, .close = let_go
};

/* ---- the plan ---- */

static lm_code add(coded_source *s, const part *x, const lm_st_tensor *t, lm_err *e)
{
    if (lm_grow(&s->part, &s->cap, s->n + 1, sizeof *s->part, "tensors of a model", e))
        return e->code;
    s->part[s->n++] = *x;
    return x->format ? lm_st_plan_add(s->plan, t->name, t->dtype, t->ndim, t->dim, e)
                     : lm_st_plan_add_like(s->plan, t, e);
}

/* The described tensor of `name`: its dtype and shape. */
static lm_code describe(const coded_source *s, const char *name, const json_t *o, lm_st_tensor *t,
                        const lm_format **f, lm_err *e)
{
    const char *codec, *dtype;
    const json_t *shape = json_object_get(o, "shape");
    lm_err unseen = { 0 };
    *t = (lm_st_tensor){ .name = name, .count = 1 };
    if (lm_json_str_or(o, "codec", "", &codec, name, e) ||
        lm_json_str_or(o, "dtype", "", &dtype, name, e))
        return e->code;
    t->dtype = lm_dtype_parse(dtype);
    if (lm_format_find(codec, NULL, f, &unseen) || !(*f)->decode || (*f)->n_planes != PLANES)
        return bad(s, name, "its codec is unknown", e);
    if (t->dtype != LM_DTYPE_F32 && t->dtype != LM_DTYPE_BF16 && t->dtype != LM_DTYPE_F16)
        return bad(s, name, "its codec does not apply to its dtype", e);
    if (!json_is_array(shape) || json_array_size(shape) > LM_ST_MAX_DIMS)
        return bad(s, name, "its shape is invalid", e);
    for (size_t i = 0; i < json_array_size(shape); i++) {
        const json_t *d = json_array_get(shape, i);
        int64_t n = json_is_integer(d) ? (int64_t)json_integer_value(d) : -1;
        if (n < 0 || !lm_mul_i64_ok(t->count, n, &t->count))
            return bad(s, name, "its shape is invalid", e);
        t->dim[t->ndim++] = n;
    }
    return LM_OK;
}

static lm_code add_coded(coded_source *s, const char *name, const json_t *o, lm_err *e)
{
    lm_st_tensor t;
    part x = { { NULL, NULL }, NULL };
    lm_tensor_size size;
    char plane[512];
    if (describe(s, name, o, &t, &x.format, e) || lm_tensor_bytes(x.format, 1, &t.count, &size, e))
        return e->code;
    for (int p = 0; p < PLANES; p++) {
        snprintf(plane, sizeof plane, "%.400s%s", name, suffix[p]);
        x.plane[p] = lm_model_source_find(s->in, plane);
        if (!x.plane[p] || x.plane[p]->bytes != size.plane[p])
            return bad(s, name, "a tensor of its codes is missing or of another size", e);
    }
    return add(s, &x, &t, e);
}

/* The name of the described tensor whose plane number p is `name`; NULL: there is none. */
static const json_t *whole_of(const json_t *all, const char *name, int p, char out[512])
{
    size_t n = strlen(name), tail = strlen(suffix[p]);
    if (n <= tail || n - tail >= 400 || strcmp(name + n - tail, suffix[p]))
        return NULL;
    memcpy(out, name, n - tail);
    out[n - tail] = 0;
    return json_object_get(all, out);
}

static lm_code make_plan(coded_source *s, const json_t *all, lm_err *e)
{
    char name[512];
    if (lm_st_plan_new(&s->plan, e))
        return e->code;
    for (size_t i = 0; i < lm_model_source_count(s->in); i++) {
        const lm_st_tensor *t = lm_model_source_at(s->in, i);
        const json_t *o = whole_of(all, t->name, CODES, name);
        const part same = { { t, NULL }, NULL };
        if (!o && whole_of(all, t->name, SCALES, name))
            continue;
        if (o ? add_coded(s, name, o, e) : add(s, &same, t, e))
            return e->code;
    }
    return LM_OK;
}

/* The descriptions of all files. */
static lm_code descriptions(const lm_model_source *in, json_t **all, lm_err *e)
{
    if (!(*all = json_object()))
        return lm_fail(e, LM_ELIMIT, "descriptions", NULL, "no memory");
    for (size_t i = 0; i < lm_model_source_files(in); i++) {
        const char *text = lm_model_source_meta_of(in, i, LM_CODED_KEY);
        json_t *some = NULL;
        if (!text)
            continue;
        if (lm_json_parse(text, strlen(text), lm_model_source_path(in), &some, e))
            return e->code;
        bool right = json_is_object(some) && !json_object_update(*all, some);
        json_decref(some);
        if (!right)
            return lm_fail(e, LM_EFORMAT, lm_model_source_path(in), NULL,
                           "\"" LM_CODED_KEY "\" is not a JSON object");
    }
    return LM_OK;
}

static lm_code wrap(lm_model_source **src, const json_t *all, lm_err *e)
{
    coded_source *s = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "a model", e))
        return e->code;
    s->in = *src;
    if (make_plan(s, all, e) ||
        lm_model_source_make_over(src, lm_model_source_config(*src), s->plan, &maker, s, e))
        let_go(s);
    return e->code;
}

lm_code lm_coded_source_over(lm_model_source **src, lm_err *e)
{
    json_t *all = NULL;
    lm_code rc = descriptions(*src, &all, e);
    if (!rc && json_object_size(all))
        rc = wrap(src, all, e);
    json_decref(all);
    return rc;
}
