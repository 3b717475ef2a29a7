/* SPDX-License-Identifier: Apache-2.0 */
/* convert_hf.c -- Hugging Face's folder (or a tar or .lmz of it) on either side of a conversion. */
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "convert/convert_impl.h"
#include "format/folder_json.h"
#include "format/fp8_source.h"
#include "format/safetensors_table.h"
#include "model/fused.h"

/* ---- Importing ---- */

/* Where a tensor of the plan is: whole, or one of the equal parts of a fused one (model/fused.h). */
typedef struct {
    size_t src;
    int64_t part;
} place;

typedef struct {
    lm_model_source *src;
    place *place; /* of each tensor of the plan, where one is fused; else NULL */
    size_t cap_places;
    const lm_st_tensor *last; /* of src, returned by load */
    void *copy;               /* used where data are not mapped or not aligned */
    size_t cap;
} hf;

static const place *place_of(const lm_import *m, const lm_st_tensor *t)
{
    const hf *h = m->state;
    return h->place ? &h->place[t - lm_st_plan_at(m->plan, 0)] : NULL;
}

static lm_code find_tensor(lm_import *m, const lm_st_tensor *t, const lm_st_tensor **out, lm_err *e)
{
    hf *h = m->state;
    lm_code rc = LM_OK;

    if (h->place) { /* a source in any order: take_fused */
        *out = lm_model_source_at(h->src, place_of(m, t)->src);
        return LM_OK;
    }
    if (lm_model_source_random(h->src)) {
        *out = lm_model_source_find(h->src, t->name);
        return *out ? LM_OK : lm_fail(e, LM_EBUG, t->name, NULL, "not in its source");
    }
    do
        rc = lm_model_source_next(h->src, out, e);
    while (!rc && *out && strcmp((*out)->name, t->name));
    if (!rc && !*out)
        rc = lm_fail(e, LM_EBUG, t->name, NULL, "requested out of order");
    return rc;
}

/* Blocks: experts in MXFP4.  A tensor of experts apart has another name here. */
static const lm_format *format_of(const lm_import *m, const lm_st_tensor *t)
{
    const hf *h = m->state;
    const lm_st_tensor *s = lm_model_source_find(h->src, t->name);
    bool turned;
    return s ? lm_model_source_format(h->src, s, &turned) : lm_format_of_dtype(t->dtype);
}

static lm_code codes(lm_import *m, const lm_st_tensor *t, void *dst, lm_err *e)
{
    const hf *h = m->state;
    return lm_model_source_codes(h->src, lm_model_source_find(h->src, t->name), dst, e);
}

static lm_code load(lm_import *m, const lm_st_tensor *t, const void **data, lm_err *e)
{
    hf *h = m->state;
    const lm_st_tensor *s = NULL;
    lm_code rc;

    const lm_st_tensor *last = h->last;
    h->last = NULL;
    rc = find_tensor(m, t, &s, e);
    if (last && last != s && lm_model_source_random(h->src))
        lm_model_source_forget(h->src, last);
    if (rc)
        return rc;
    h->last = s;
    const uint64_t at = h->place ? (uint64_t)place_of(m, t)->part * t->bytes : 0;
    *data = lm_model_source_data(h->src, s);
    if (*data && lm_model_source_aligned(h->src, s)) {
        *data = (const uint8_t *)*data + at;
        return LM_OK;
    }
    rc = lm_grow(&h->copy, &h->cap, t->bytes, 1, "a tensor", e);
    if (!rc)
        rc = lm_model_source_read(h->src, s, at, h->copy, t->bytes, e);
    *data = h->copy;
    return rc;
}

static lm_code spool(lm_import *m, lm_err *e)
{
    return lm_model_source_spool(((hf *)m->state)->src, e);
}

static lm_code end(lm_import *m, lm_err *e)
{
    return lm_model_source_finish(((hf *)m->state)->src, e);
}

static void close_source(lm_import *m)
{
    hf *h = m->state;

    lm_model_source_close(h->src);
    lm_free(h->copy);
    lm_free(h->place);
    lm_free(h);
}

static lm_code take_side(lm_import *m, const char *name, lm_err *e)
{
    lm_buf data = { 0 };
    bool found = false;
    lm_code rc =
        lm_model_source_file_now(((hf *)m->state)->src, name, LM_SIDE_MAX, &data, &found, e);

    if (!rc && found)
        rc = lm_import_put(m, name, &data, e);
    lm_buf_fini(&data);
    return rc;
}

static lm_code take_sides(lm_import *m, const char *tokenizer, lm_err *e)
{
    const char *dir = lm_model_source_dir(((hf *)m->state)->src);
    lm_code rc = take_side(m, "config.json", e);

    if (!rc)
        rc = take_side(m, "generation_config.json", e);
    if (tokenizer)
        return rc ? rc : lm_import_tokenizer(m, tokenizer, e);
    for (int i = 0; !rc && lm_tokenizer_files[i]; i++)
        rc = take_side(m, lm_tokenizer_files[i], e);
    return rc || !dir ? rc : lm_import_join(m, dir, e);
}

static lm_code put_place(lm_import *m, size_t src, int64_t part, lm_err *e)
{
    hf *h = m->state;
    const size_t n = lm_st_plan_count(m->plan);
    if (lm_grow(&h->place, &h->cap_places, n, sizeof *h->place, "tensors of a model", e))
        return e->code;
    h->place[n - 1] = (place){ src, part };
    return LM_OK;
}

static lm_code take_fused(lm_import *m, const lm_fused *f, size_t i, lm_err *e)
{
    const lm_st_tensor *t = lm_model_source_at(((hf *)m->state)->src, i);
    char name[LM_TENSOR_NAME];
    int64_t dim[2];
    lm_code rc = lm_fused_check(f, t, m->path, e);
    for (int64_t k = 0; !rc && k < lm_fused_count(f); k++) {
        lm_part_shape(&m->config, lm_fused_name(&m->config, f, k, name), f->layer, dim);
        rc = lm_st_plan_add(m->plan, name, t->dtype, 2, dim, e);
        rc = rc ? rc : put_place(m, i, k, e);
    }
    return rc;
}

/* The tensors of the source; fused ones as those that they hold. */
static lm_code take_tensors(lm_import *m, lm_err *e)
{
    const hf *h = m->state;
    bool any = false;
    lm_fused f;
    lm_code rc = LM_OK;
    for (size_t i = 0; !any && i < lm_model_source_count(h->src); i++)
        any = lm_fused_find(&m->config, lm_model_source_at(h->src, i)->name, &f);
    if (any) /* parts of one tensor are asked for one by one */
        rc = spool(m, e);
    for (size_t i = 0; !rc && i < lm_model_source_count(h->src); i++) {
        const lm_st_tensor *t = lm_model_source_at(h->src, i);
        if (lm_fused_find(&m->config, t->name, &f)) {
            rc = take_fused(m, &f, i, e);
            continue;
        }
        rc = lm_st_plan_add_like(m->plan, t, e);
        rc = rc || !any ? rc : put_place(m, i, 0, e);
    }
    return rc;
}

lm_code lm_import_hf(lm_import *m, const char *path, const lm_import_opts *o, lm_err *e)
{
    const char *chain, *seq;
    hf *h = NULL;
    lm_code rc = lm_alloc_n(&h, 1, sizeof *h, "a model folder", e);

    if (rc)
        return rc;
    m->state = h;
    m->close = close_source;
    m->load = load;
    m->spool = spool;
    m->end = end;
    m->format_of = format_of;
    m->codes = codes;
    rc = lm_fp8_source_open(path, o->bundle, &h->src, e);
    if (rc)
        return rc;
    const json_t *tree = lm_model_source_config(h->src);
    if (!tree)
        return lm_fail(e, LM_EUSAGE, m->path, "name the model's folder",
                       "there is no config.json beside these weights");
    m->tree = json_deep_copy(tree);
    if (!m->tree)
        return lm_fail(e, LM_ELIMIT, m->path, NULL, "no memory for config.json");
    rc = lm_config_read(m->tree, m->path, &m->config, e);
    if (!rc)
        lm_config_see(&m->config, h->src);
    if (!rc)
        rc = take_sides(m, o->tokenizer, e);
    if (!rc)
        rc = take_tensors(m, e);
    if (!rc)
        rc = lm_model_source_digest(h->src, &m->digest, e);
    chain = lm_model_source_meta(h->src, LM_HISTORY_KEY);
    seq = lm_model_source_meta(h->src, LM_SEQ_KEY);
    if (!rc && seq)
        rc = lm_strdup(&m->seq_len, seq, e);
    return !rc && chain ? lm_strdup(&m->history, chain, e) : rc;
}

/* ---- Exporting ---- */

static lm_dtype dtype_of(const lm_st_tensor *t, const lm_export_opts *o)
{
    return o->dtype != LM_DTYPE_NONE && lm_dtype_is_float(t->dtype) ? o->dtype : t->dtype;
}

static lm_code make_plan(const lm_import *m, const lm_export_opts *o, lm_st_plan *plan, lm_err *e)
{
    lm_code rc = lm_history_plan(m->history, o->step, plan, e);

    if (!rc && m->seq_len)
        rc = lm_st_plan_meta(plan, LM_SEQ_KEY, m->seq_len, e);
    for (size_t i = 0; !rc && i < lm_st_plan_count(m->plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(m->plan, i);
        lm_dtype d = dtype_of(t, o);
        rc = d == t->dtype ? lm_st_plan_add_like(plan, t, e)
                           : lm_st_plan_add(plan, t->name, d, t->ndim, t->dim, e);
    }
    return rc;
}

/* The most frequent type of weights, in the spelling of config.json; NULL: another type. */
static const char *torch_name(const lm_st_plan *plan)
{
    uint64_t bytes[LM_DTYPE_COUNT] = { 0 };
    lm_dtype most = LM_DTYPE_F32;

    for (size_t i = 0; i < lm_st_plan_count(plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(plan, i);
        if (t->dtype >= 0 && (bytes[t->dtype] += t->bytes) > bytes[most])
            most = t->dtype;
    }
    return most == LM_DTYPE_F32    ? "float32"
           : most == LM_DTYPE_F16  ? "float16"
           : most == LM_DTYPE_BF16 ? "bfloat16"
                                   : NULL;
}

/* Update the type in config.json if it differs from that of the weights; true if it was changed. */
static bool fit_dtype(lm_import *m, const lm_st_plan *plan)
{
    const char *want = torch_name(plan);

    return want && lm_config_set_dtype(m->tree, want);
}

static lm_code put_sides(const lm_import *m, lm_folder *f, bool config, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < m->n_side; i++)
        if (!m->side[i].made && (config || strcmp(m->side[i].name, "config.json")))
            rc = lm_folder_put(f, m->side[i].name, m->side[i].data.data, m->side[i].data.len, e);
    return rc;
}

static lm_code write_tensors(lm_import *m, lm_folder *f, uint64_t total, lm_err *e)
{
    const lm_st_tensor *want, *t = NULL;
    void *cast = NULL;
    size_t cap = 0;
    double done = 0;
    lm_code rc = LM_OK;

    while (!rc && !lm_stopping() && (want = lm_folder_next(f))) {
        const void *data = NULL;
        uint64_t bytes = want->bytes; /* freed when it has been written */
        for (size_t i = 0; !rc && i < lm_st_plan_count(m->plan); i++) {
            t = lm_st_plan_at(m->plan, i);
            if (!strcmp(t->name, want->name))
                break;
        }
        rc = m->load(m, t, &data, e);
        if (!rc && t->dtype != want->dtype) {
            lm_rows cast_all = { .name = t->name,
                                 .src = data,
                                 .from = lm_format_of_dtype(t->dtype),
                                 .to = lm_format_of_dtype(want->dtype),
                                 .rows = t->ndim > 1 ? t->count / t->dim[t->ndim - 1] : 1,
                                 .cols = t->ndim ? t->dim[t->ndim - 1] : 1 };
            rc = lm_grow(&cast, &cap, bytes, 1, "a tensor", e);
            cast_all.dst = cast;
            if (!rc)
                rc = lm_rows_convert(&cast_all, m->par, e);
            data = cast;
        }
        if (!rc)
            rc = lm_folder_write(f, data, bytes, e);
        done += (double)bytes;
        lm_progress(m->sink, "convert", done, (double)total, "bytes", NULL);
    }
    lm_free(cast);
    return rc;
}

lm_code lm_export_hf(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e)
{
    lm_folder_spec spec = { .max_shard_bytes = o->shard_bytes };
    lm_st_plan *plan = NULL;
    lm_folder *f = NULL;
    lm_code rc = lm_st_plan_new(&plan, e);
    bool raw = false;

    if (!rc)
        rc = make_plan(m, o, plan, e);
    if (!rc && m->spool)
        rc = m->spool(m, e); /* the folder has its own order */
    if (!rc) {
        raw = !fit_dtype(m, plan) && lm_import_side(m, "config.json");
        spec.config = raw ? NULL : m->tree;
        spec.plan = plan;
        rc = lm_folder_create(path, o->force, o->bundle, &spec, &f, e);
    }
    if (!rc)
        rc = put_sides(m, f, raw, e);
    if (!rc)
        rc = write_tensors(m, f, lm_st_plan_data_bytes(plan), e);
    if (!rc && m->end && !lm_stopping())
        rc = m->end(m, e);
    if (!rc && !lm_stopping())
        rc = lm_folder_commit(f, e);
    else
        lm_folder_drop(f);
    lm_st_plan_free(plan);
    return rc;
}
