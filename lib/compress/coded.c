/* SPDX-License-Identifier: Apache-2.0 */
/* coded.c -- plans of reduction and expansion, and the loop that executes either. */
#include "compress/coded.h"

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "format/inspect_text.h"

enum { COPY = 4 << 20 }; /* bytes of a copied tensor in one step */

struct lm_coded {
    lm_st_stream *in; /* borrowed */
    char *file;
    bool expand;
    lm_st_plan *plan;
    uint64_t bytes;
    lm_coded_item *item;
    lm_arena *names;
    size_t n, cap;
};

bool lm_coded_is_state(const char *file)
{
    return !strncmp(file, "optimizer", 9);
}

/* In a file of states: weights, that is parameters in whose place an average is published, the averages and the
 * iterates they are made of; and single numbers, which count steps. */
static bool is_exact(const lm_st_tensor *t)
{
    static const char *const weights[] = { "param.", "ema.", "z." };
    bool found = t->count == 1;
    for (size_t i = 0; !found && i < sizeof weights / sizeof *weights; i++)
        found = !strncmp(t->name, weights[i], strlen(weights[i]));
    return found;
}

const lm_format *lm_coded_choice(const lm_coded_policy *p, const char *file, const lm_st_tensor *t)
{
    bool state = lm_coded_is_state(file);
    const lm_format *f = state ? p->states : p->weights;
    if (!f || !lm_lossy_can(f, t->dtype) || (state && is_exact(t)))
        return NULL;
    if (f->plane[0].bits <= 8 && (state ? t->count < LM_CODED_MIN_STATE : t->ndim < 2))
        return NULL;
    return f;
}

/* ---- common to both plans ---- */

static lm_code coded_new(lm_st_stream *in, const char *file, bool expand, lm_coded **out, lm_err *e)
{
    lm_coded *c = NULL;
    lm_code rc = lm_alloc_n(&c, 1, sizeof *c, "a plan of tensors", e);
    *out = c;
    if (rc)
        return rc;
    c->in = in;
    c->expand = expand;
    if (lm_strdup(&c->file, file, e) || lm_arena_new(&c->names, 1 << 16, e) ||
        lm_st_plan_new(&c->plan, e))
        return e->code;
    return LM_OK;
}

void lm_coded_free(lm_coded *c)
{
    if (!c)
        return;
    lm_st_plan_free(c->plan);
    lm_arena_free(c->names);
    lm_free(c->item);
    lm_free(c->file);
    lm_free(c);
}

static lm_code add_item(lm_coded *c, lm_coded_item item, lm_err *e)
{
    lm_code rc = lm_grow(&c->item, &c->cap, c->n + 1, sizeof *c->item, "a plan of tensors", e);
    if (!rc)
        c->item[c->n++] = item;
    return rc;
}

/* A name from a file, shortened and escaped for a message. */
static void show_name(const char *name, lm_buf *out)
{
    lm_err ignored = { 0 };
    lm_text x = { out, &ignored, LM_OK };
    lm_text_clean(&x, name);
}

static lm_coded_item item_of(const lm_st_tensor *t, const lm_format *format)
{
    return (lm_coded_item){ .name = t->name,
                            .dtype = t->dtype_name,
                            .count = t->count,
                            .format = format,
                            .coded = t->bytes };
}

static const char *const plane_suffix[] = {
    [LM_PLANE_CODES] = ".codes", [LM_PLANE_SCALE] = ".scales"
};

static lm_code name_with(lm_coded *c, const char *name, const char *suffix, char **out, lm_err *e)
{
    size_t n = strlen(name), more = strlen(suffix);
    lm_code rc = lm_arena_alloc(c->names, out, n + more + 1, 1, e);
    if (!rc) {
        memcpy(*out, name, n);
        memcpy(*out + n, suffix, more + 1);
    }
    return rc;
}

/* All metadata except our own key; the history only on request. */
static lm_code copy_meta(lm_coded *c, bool history, lm_err *e)
{
    const char *key, *value;
    for (size_t i = 0; lm_st_stream_meta_at(c->in, i, &key, &value); i++)
        if (strcmp(key, LM_CODED_KEY) && (history || strcmp(key, LM_HISTORY_KEY)) &&
            lm_st_plan_meta(c->plan, key, value, e))
            return e->code;
    return LM_OK;
}

static lm_code measure(lm_coded *c, lm_err *e)
{
    lm_buf header = { 0 };
    lm_code rc = lm_st_plan_header(c->plan, &header, e);
    c->bytes = header.len + lm_st_plan_data_bytes(c->plan);
    lm_buf_fini(&header);
    return rc;
}

/* ---- reducing ---- */

/* The dtype under which the file stores a plane. */
static lm_dtype stored_as(const lm_plane *p)
{
    return p->dtype == LM_DTYPE_NONE ? LM_DTYPE_U8 : p->dtype;
}

static lm_code plan_plane(lm_coded *c, const lm_plane *p, size_t bytes, const lm_st_tensor *t,
                          lm_err *e)
{
    int64_t n = (int64_t)(bytes / lm_dtype_size(stored_as(p)));
    bool shaped = p->kind == LM_PLANE_CODES && p->bits == 8;
    char *name = NULL;
    lm_code rc = name_with(c, t->name, plane_suffix[p->kind], &name, e);
    return rc       ? rc
           : shaped ? lm_st_plan_add(c->plan, name, stored_as(p), t->ndim, t->dim, e)
                    : lm_st_plan_add(c->plan, name, stored_as(p), 1, &n, e);
}

static lm_code plan_codes(lm_coded *c, const lm_format *f, const lm_st_tensor *t,
                          lm_coded_item *item, lm_err *e)
{
    lm_tensor_size size;
    if (lm_tensor_bytes(f, 1, &t->count, &size, e))
        return e->code;
    item->coded = size.all;
    if (f->element != LM_DTYPE_NONE)
        return lm_st_plan_add(c->plan, t->name, f->element, t->ndim, t->dim, e);
    for (int p = f->n_planes - 1; p >= 0; p--)
        if (plan_plane(c, &f->plane[p], size.plane[p], t, e))
            return e->code;
    return LM_OK;
}

static void describe(lm_jw *w, const lm_format *f, const lm_st_tensor *t)
{
    lm_jw_obj(w, t->name);
    lm_jw_str(w, "codec", f->name);
    lm_jw_str(w, "dtype", t->dtype_name);
    lm_jw_arr(w, "shape");
    for (int i = 0; i < t->ndim; i++)
        lm_jw_int(w, NULL, t->dim[i]);
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

static lm_code plan_reduction(lm_coded *c, const lm_coded_policy *p, lm_buf *text, lm_err *e)
{
    bool any = false;
    lm_jw w;
    lm_jw_begin(&w, text, 0, e);
    lm_jw_obj(&w, NULL);
    for (size_t i = 0; i < lm_st_stream_count(c->in); i++) {
        const lm_st_tensor *t = lm_st_stream_at(c->in, i);
        const lm_format *f = lm_coded_choice(p, c->file, t);
        lm_coded_item item = item_of(t, f);
        if (f ? plan_codes(c, f, t, &item, e) : lm_st_plan_add_like(c->plan, t, e))
            return e->code;
        if (add_item(c, item, e))
            return e->code;
        if (f && (f->element == LM_DTYPE_NONE || lm_coded_is_state(c->file))) {
            describe(&w, f, t);
            any = true;
        }
    }
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc || !any ? rc : lm_st_plan_meta(c->plan, LM_CODED_KEY, text->data, e);
}

lm_code lm_coded_reduce(lm_st_stream *in, const char *file, const lm_coded_policy *p,
                        const lm_history_step *step, lm_coded **out, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = coded_new(in, file, false, out, e);
    if (!rc && lm_st_stream_meta(in, LM_CODED_KEY))
        rc = lm_fail(e, LM_EUSAGE, file, "expand it first", "its tensors are already coded");
    if (!rc)
        rc = copy_meta(*out, !step || !step->none, e);
    if (!rc)
        rc = plan_reduction(*out, p, &text, e);
    if (!rc && step)
        rc = lm_history_plan(lm_st_stream_meta(in, LM_HISTORY_KEY), step, (*out)->plan, e);
    if (!rc)
        rc = measure(*out, e);
    lm_buf_fini(&text);
    if (rc) {
        lm_coded_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- expanding ---- */

static lm_code bad_coding(const lm_coded *c, const char *name, const char *why, lm_err *e)
{
    lm_buf clean = { 0 };
    show_name(name, &clean);
    lm_fail(e, LM_EFORMAT, c->file, "it is damaged, or was written by a newer version",
            "tensor \"%.80s\": %s", clean.data ? clean.data : "", why);
    lm_buf_fini(&clean);
    return e->code;
}

/* The decoded tensor that a description stands for. */
static lm_code read_description(const lm_coded *c, const char *name, const json_t *o,
                                lm_st_tensor *t, const lm_format **f, lm_err *e)
{
    const char *codec_name, *dtype;
    const json_t *shape = json_object_get(o, "shape");
    lm_err ignored = { 0 };
    if (lm_json_str_or(o, "codec", "", &codec_name, c->file, e) ||
        lm_json_str_or(o, "dtype", "", &dtype, c->file, e))
        return e->code;
    *t = (lm_st_tensor){ .name = name, .dtype_name = dtype, .count = 1 };
    t->dtype = lm_dtype_parse(dtype);
    if (lm_format_find(codec_name, lm_lossy_takes, f, &ignored))
        return bad_coding(c, name, "its codec is unknown", e);
    if (t->dtype == LM_DTYPE_NONE || !lm_lossy_can(*f, t->dtype))
        return bad_coding(c, name, "its codec does not apply to its dtype", e);
    if (!json_is_array(shape) || json_array_size(shape) > LM_ST_MAX_DIMS)
        return bad_coding(c, name, "its shape is invalid", e);
    for (size_t i = 0; i < json_array_size(shape); i++) {
        const json_t *d = json_array_get(shape, i);
        int64_t n = json_is_integer(d) ? (int64_t)json_integer_value(d) : -1;
        if (n < 0 || !lm_mul_i64_ok(t->count, n, &t->count))
            return bad_coding(c, name, "its shape is invalid", e);
        t->dim[t->ndim++] = n;
    }
    return LM_OK;
}

/* Check that the tensors of the stream from i on hold the planes of tensor `name`. */
static lm_code check_planes(lm_coded *c, size_t i, const char *name, const lm_format *f,
                            const lm_tensor_size *size, lm_err *e)
{
    bool plain = f->element != LM_DTYPE_NONE;
    for (int p = f->n_planes - 1; p >= 0; p--, i++) {
        const lm_st_tensor *t = i < lm_st_stream_count(c->in) ? lm_st_stream_at(c->in, i) : NULL;
        char *full = NULL;
        if (name_with(c, name, plain ? "" : plane_suffix[f->plane[p].kind], &full, e))
            return e->code;
        if (!t || strcmp(t->name, full) || t->dtype != stored_as(&f->plane[p]) ||
            t->bytes != size->plane[p])
            return bad_coding(c, name,
                              plain ? "it does not have the size it describes"
                                    : "its codes and scales do not have the sizes it describes",
                              e);
    }
    return LM_OK;
}

/* Tensor i of the stream begins the described tensor `name`: check its planes and plan the decoded
 * tensor; *used: how many tensors of the stream it consists of. */
static lm_code plan_whole(lm_coded *c, size_t i, const char *name, const json_t *o, size_t *used,
                          lm_err *e)
{
    const lm_format *f = NULL;
    lm_tensor_size size;
    lm_st_tensor t;
    if (read_description(c, name, o, &t, &f, e) || lm_tensor_bytes(f, 1, &t.count, &size, e) ||
        check_planes(c, i, name, f, &size, e))
        return e->code;
    *used = (size_t)f->n_planes;
    char *kept = NULL;
    if (name_with(c, name, "", &kept, e) ||
        lm_st_plan_add(c->plan, name, t.dtype, t.ndim, t.dim, e))
        return e->code;
    lm_coded_item item = item_of(&t, f);
    item.name = kept;
    item.dtype = lm_dtype_st_name(t.dtype);
    item.coded = size.all;
    return add_item(c, item, e);
}

/* The described tensor that begins with tensor t of the file: t itself, or the one whose scales t
 * holds. */
static const json_t *described(lm_coded *c, const json_t *all, const char *t, char **name,
                               lm_err *e)
{
    size_t n = strlen(t), tail = strlen(".scales");
    if (name_with(c, t, "", name, e))
        return NULL;
    if (n > tail && !strcmp(t + n - tail, ".scales")) {
        (*name)[n - tail] = 0;
        if (json_object_get(all, *name))
            return json_object_get(all, *name);
        (*name)[n - tail] = '.';
    }
    return json_object_get(all, *name);
}

static lm_code plan_expansion(lm_coded *c, const json_t *all, lm_err *e)
{
    size_t found = 0, used;
    for (size_t i = 0; i < lm_st_stream_count(c->in); i += used) {
        const lm_st_tensor *t = lm_st_stream_at(c->in, i);
        char *name = NULL;
        const json_t *o = described(c, all, t->name, &name, e);
        if (e->code)
            return e->code;
        used = 1;
        if (o) {
            if (plan_whole(c, i, name, o, &used, e))
                return e->code;
            found++;
            continue;
        }
        lm_coded_item item = item_of(t, NULL);
        if (lm_st_plan_add_like(c->plan, t, e) || add_item(c, item, e))
            return e->code;
    }
    if (found != json_object_size(all))
        return lm_fail(e, LM_EFORMAT, c->file, "it is damaged",
                       "\"" LM_CODED_KEY "\" describes %zu tensor%s, %zu are present",
                       json_object_size(all), lm_plural(json_object_size(all)), found);
    return LM_OK;
}

lm_code lm_coded_expand(lm_st_stream *in, const char *file, lm_coded **out, lm_err *e)
{
    const char *text = lm_st_stream_meta(in, LM_CODED_KEY);
    json_t *all = NULL;
    *out = NULL;
    if (!text)
        return LM_OK;
    lm_code rc = coded_new(in, file, true, out, e);
    if (!rc)
        rc = lm_json_parse(text, strlen(text), file, &all, e);
    if (!rc && !json_is_object(all))
        rc = lm_fail(e, LM_EFORMAT, file, NULL, "\"" LM_CODED_KEY "\" is not a JSON object");
    if (!rc)
        rc = copy_meta(*out, true, e);
    if (!rc)
        rc = plan_expansion(*out, all, e);
    if (!rc)
        rc = measure(*out, e);
    json_decref(all);
    if (rc) {
        lm_coded_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- running ---- */

uint64_t lm_coded_bytes(const lm_coded *c)
{
    return c->bytes;
}

size_t lm_coded_count(const lm_coded *c)
{
    return c->n;
}

const lm_coded_item *lm_coded_at(const lm_coded *c, size_t i)
{
    return &c->item[i];
}

/* Buffers that grow to the largest tensor. */
typedef struct {
    void *whole, *plane[LM_MAX_PLANES];
    size_t whole_cap, plane_cap[LM_MAX_PLANES];
} buffers;

static lm_code copy_tensor(lm_coded *c, lm_st_writer *w, const lm_st_tensor *t, buffers *b,
                           lm_err *e)
{
    lm_code rc = lm_grow(&b->whole, &b->whole_cap, COPY, 1, "a tensor", e);
    for (uint64_t at = 0; !rc && at < t->bytes && !lm_stopping();) {
        size_t n = t->bytes - at < COPY ? (size_t)(t->bytes - at) : COPY;
        rc = lm_st_stream_read(c->in, b->whole, n, e);
        if (!rc)
            rc = lm_st_write(w, b->whole, n, e);
        at += n;
    }
    return rc;
}

static lm_code room(const lm_coded_item *it, buffers *b, size_t *whole, lm_tensor_size *coded,
                    lm_err *e)
{
    lm_code rc = lm_tensor_bytes(it->format, 1, &it->count, coded, e);
    *whole = lm_plain_bytes(lm_dtype_parse(it->dtype), it->count);
    if (!rc)
        rc = lm_grow(&b->whole, &b->whole_cap, *whole ? *whole : 1, 1, "a tensor", e);
    for (int p = 0; !rc && p < it->format->n_planes; p++)
        rc =
            lm_grow(&b->plane[p], &b->plane_cap[p], coded->plane[p] + 1, 1, "codes of a tensor", e);
    return rc;
}

static lm_code reduce_tensor(lm_coded *c, lm_coded_item *it, lm_st_writer *w, buffers *b,
                             lm_par *par, lm_err *e)
{
    size_t whole;
    lm_tensor_size coded;
    lm_buf name = { 0 };
    if (room(it, b, &whole, &coded, e) || lm_st_stream_read(c->in, b->whole, whole, e))
        return e->code;
    show_name(it->name, &name);
    lm_code rc = lm_lossy_encode(it->format, name.data ? name.data : "", lm_dtype_parse(it->dtype),
                                 b->whole, it->count, b->plane, par, &it->err, e);
    lm_buf_fini(&name);
    if (rc) {
        lm_err_in(e, "%s", c->file);
        return rc;
    }
    for (int p = it->format->n_planes - 1; !rc && p >= 0; p--)
        rc = coded.plane[p] ? lm_st_write(w, b->plane[p], coded.plane[p], e) : LM_OK;
    return rc;
}

static lm_code expand_tensor(lm_coded *c, lm_coded_item *it, lm_st_writer *w, buffers *b,
                             lm_par *par, lm_err *e)
{
    size_t whole;
    lm_tensor_size coded;
    const lm_st_tensor *t;
    if (room(it, b, &whole, &coded, e))
        return e->code;
    for (int p = it->format->n_planes - 1; p >= 0; p--)
        if (lm_st_stream_read(c->in, b->plane[p], coded.plane[p], e) ||
            (p && lm_st_stream_next(c->in, &t, e)))
            return e->code;
    if (lm_lossy_decode(it->format, (const void *const *)b->plane, it->count,
                        lm_dtype_parse(it->dtype), b->whole, par, e))
        return e->code;
    return whole ? lm_st_write(w, b->whole, whole, e) : LM_OK;
}

lm_code lm_coded_run(lm_coded *c, lm_write_fn write, void *ctx, lm_par *par, lm_err *e)
{
    const lm_st_tensor *t;
    lm_st_writer *w = NULL;
    buffers b = { 0 };
    lm_code rc = lm_st_create_on(write, ctx, c->file, c->plan, &w, e);
    for (size_t i = 0; !rc && i < c->n && !lm_stopping(); i++) {
        lm_coded_item *it = &c->item[i];
        rc = lm_st_stream_next(c->in, &t, e);
        if (rc)
            break;
        rc = !it->format ? copy_tensor(c, w, t, &b, e)
             : c->expand ? expand_tensor(c, it, w, &b, par, e)
                         : reduce_tensor(c, it, w, &b, par, e);
    }
    if (!rc && !lm_stopping())
        rc = lm_st_stream_next(c->in, &t, e); /* no tensor may follow */
    if (!rc && !lm_stopping())
        rc = lm_st_commit(w, e);
    else
        lm_st_drop(w);
    lm_free(b.whole);
    for (int p = 0; p < LM_MAX_PLANES; p++)
        lm_free(b.plane[p]);
    return rc;
}
