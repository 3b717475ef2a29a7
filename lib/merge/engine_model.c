/* SPDX-License-Identifier: Apache-2.0 */
/* engine_model.c -- writes the result of a plan: order, metadata, small files, tensor after
 * tensor. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "format/folder_json.h"
#include "merge/chat.h"
#include "merge/engine_impl.h"
#include "merge/engine_write.h"
#include "merge/finite.h"
#include "merge/plan_impl.h"
#include "numeric/format.h"
#include "train/window.h"

enum {
    MAX_SMALL = 1 << 28,
    SLICE = 8 << 20, /* bytes copied at a time */
    PART = 1 << 20   /* elements merged at a time */
};

/* A merge that is being written. */
typedef struct {
    lm_merge_engine *g;
    const lm_merge_write_opts *o;
    lm_st_plan *names;
    lm_folder *folder;
    lm_merge_writer writer;
    lm_merge_buf out[2]; /* one is written while the other is filled */
    int turn;
    const lm_merge_tensor **by_name; /* [plan->n], sorted */
    double done;
} job;

/* ---- Contents of the output ---- */

/* The order of a stream, so that it need not be spooled; otherwise that of the plan. */
static const lm_model_source *forward(const lm_merge_plan *p)
{
    for (int i = 0; i < p->recipe->n_inputs; i++)
        if (lm_plan_used(p, i) && !lm_model_source_random(p->model[i].source))
            return p->model[i].source;
    return NULL;
}

static lm_code add_name(job *j, const lm_merge_tensor *t, lm_err *e)
{
    lm_st_tensor x = { .name = t->name,
                       .dtype = t->dtype,
                       .dtype_name = t->dtype_name,
                       .ndim = t->ndim,
                       .count = t->count,
                       .bytes = t->bytes };

    memcpy(x.dim, t->dim, sizeof x.dim);
    return lm_st_plan_add_like(j->names, &x, e);
}

static const lm_merge_tensor *find_tensor(const job *j, const char *name)
{
    size_t lo = 0, hi = (size_t)j->g->plan->n;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(j->by_name[mid]->name, name);

        if (!c)
            return j->by_name[mid];
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const lm_merge_tensor *const *)a)->name,
                  (*(const lm_merge_tensor *const *)b)->name);
}

static lm_code list_names(job *j, const lm_model_source *stream, lm_err *e)
{
    const lm_merge_plan *p = j->g->plan;
    lm_code rc = lm_alloc_n(&j->by_name, (size_t)p->n, sizeof *j->by_name, "names of tensors", e);

    for (int64_t i = 0; !rc && i < p->n; i++)
        j->by_name[i] = &p->tensor[i];
    if (!rc)
        qsort(j->by_name, (size_t)p->n, sizeof *j->by_name, by_name);
    for (int64_t i = 1; !rc && i < p->n; i++)
        if (!strcmp(j->by_name[i - 1]->name, j->by_name[i]->name))
            rc = lm_fail(e, LM_EUSAGE, j->by_name[i]->name, NULL, "the plan makes it twice");
    for (size_t i = 0; !rc && stream && !p->recipe->sliced && i < lm_model_source_count(stream);
         i++) {
        const lm_merge_tensor *t = find_tensor(j, lm_model_source_at(stream, i)->name);

        if (t)
            rc = add_name(j, t, e);
    }
    for (int64_t i = 0; !rc && i < p->n; i++)
        if (!stream || p->recipe->sliced || !lm_model_source_find(stream, p->tensor[i].name))
            rc = add_name(j, &p->tensor[i], e);
    return rc;
}

static lm_code add_history(job *j, lm_err *e)
{
    const lm_merge_plan *p = j->g->plan;
    const lm_merge_recipe *r = p->recipe;
    lm_history_step step = *j->o->step;
    lm_history_input *in = NULL;
    lm_buf how = { 0 };
    const char *seq = lm_model_source_meta(p->model[p->lead].source, LM_SEQ_KEY);
    lm_code rc = lm_alloc_n(&in, (size_t)r->n_inputs, sizeof *in, "provenance", e);

    for (int i = 0; !rc && i < r->n_inputs; i++)
        in[i] = (lm_history_input){ r->input[i].name, p->model[i].digest, lm_plan_digest_kind(p) };
    step.inputs = in;
    step.n_inputs = (size_t)r->n_inputs;
    if (!rc)
        rc = lm_history_plan(lm_model_source_meta(p->model[p->lead].source, LM_HISTORY_KEY), &step,
                             j->names, e);
    if (!rc && seq)
        rc = lm_st_plan_meta(j->names, LM_SEQ_KEY, seq, e);
    if (!rc && !step.none)
        rc = lm_merge_recipe_json(r, step.hide_paths, &how, e);
    if (!rc && !step.none)
        rc = lm_st_plan_meta(j->names, LM_MERGE_KEY, how.data, e);
    lm_buf_fini(&how);
    lm_free(in);
    return rc;
}

/* ---- Tokenizer files ---- */

/* tokenizer_config.json (`text`, may be empty) with the template inserted. */
static lm_code put_config(job *j, const lm_buf *text, const char *template, lm_err *e)
{
    json_t *c = NULL;
    lm_buf out = { 0 };
    lm_code rc =
        text->len ? lm_json_parse(text->data, text->len, "tokenizer_config.json", &c, e) : LM_OK;

    if (!rc && !c)
        c = json_object();
    if (!rc && json_object_set_new(c, "chat_template", json_string(template)))
        rc = lm_fail(e, LM_EUSAGE, "chat_template", NULL, "it is not UTF-8 text");
    if (!rc)
        rc = lm_json_pretty(c, &out, e);
    if (!rc)
        rc = lm_folder_put(j->folder, "tokenizer_config.json", out.data, out.len, e);
    json_decref(c);
    lm_buf_fini(&out);
    return rc;
}

/* From the first model, whose tokens a new tokenizer keeps: it holds for the new one as well. */
static bool is_kept(const char *name)
{
    return !strcmp(name, "chat_template.jinja") || !strcmp(name, "special_tokens_map.json");
}

/* Files are copied one by one, because one of them changes. */
static lm_code put_tokenizer(job *j, lm_model_source *from, const lm_buf *made_json,
                             const lm_buf *made_config, const char *template, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; !rc && lm_tokenizer_files[i]; i++) {
        const char *name = lm_tokenizer_files[i];
        bool json = !strcmp(name, "tokenizer.json"),
             config = !strcmp(name, "tokenizer_config.json");
        lm_buf text = { 0 };
        bool found = false;

        if (template && !strcmp(name, "chat_template.jinja"))
            continue;
        if (made_json && !is_kept(name)) {
            const lm_buf *made = json ? made_json : config ? made_config : NULL;

            found = made && made->len;
            if (found)
                rc = lm_buf_add(&text, made->data, made->len, e);
        } else {
            rc = lm_model_source_file(from, name, MAX_SMALL, &text, &found, e);
        }
        if (!rc && config && template)
            rc = put_config(j, &text, template, e);
        else if (!rc && found)
            rc = lm_folder_put(j->folder, name, text.data ? text.data : "", text.len, e);
        lm_buf_fini(&text);
    }
    return rc;
}

/* The model whose tokenizer is copied unchanged; NULL: it is new or changed. */
static lm_model_source *whole_tokenizer(const lm_merge_plan *p)
{
    int owner = p->tokenizer;

    if (p->vocab && !lm_vocab_same(p->vocab))
        owner = lm_vocab_owner(p->vocab);
    return owner < 0 || p->recipe->chat_template ? NULL : p->model[owner].source;
}

static lm_code other_tokenizer(job *j, lm_err *e)
{
    const lm_merge_plan *p = j->g->plan;
    bool mapped = p->vocab && !lm_vocab_same(p->vocab);
    int owner = mapped ? lm_vocab_owner(p->vocab) : p->tokenizer;
    lm_buf json = { 0 }, config = { 0 };
    lm_buf template = { 0 };
    bool found = false;
    lm_code rc = lm_merge_chat(p, &template, &found, e);

    if (owner < 0) { /* borrowed from the vocabulary */
        json.data = (char *)(uintptr_t)lm_vocab_json(p->vocab, &json.len);
        config.data = (char *)(uintptr_t)lm_vocab_config_json(p->vocab, &config.len);
    }
    if (!rc)
        rc = put_tokenizer(j, p->model[owner < 0 ? p->lead : owner].source,
                           owner < 0 ? &json : NULL, &config, found ? template.data : NULL, e);
    lm_buf_fini(&template);
    return rc;
}

/* ---- Writing ---- */

static bool is_weights_name(const char *path)
{
    static const char end[] = ".safetensors";
    size_t n = strlen(path);

    return n >= sizeof end && !strcmp(path + n - sizeof end + 1, end);
}

static lm_code create(job *j, lm_err *e)
{
    const lm_merge_plan *p = j->g->plan;
    const lm_model_source *stream = forward(p);
    json_t *none = NULL;
    lm_folder_spec spec = { .config = p->config,
                            .generation_config = p->generation_config,
                            .max_shard_bytes = j->o->max_shard_bytes,
                            .keep_order = true };
    lm_code rc = lm_st_plan_new(&j->names, e);

    if (!rc && !p->config) {
        if (!is_weights_name(j->o->output))
            return lm_fail(e, LM_EUSAGE, p->model[p->lead].name,
                           "merge folders, or write to NAME.safetensors",
                           "a lone file has no config.json to go with the result");
        spec.config = none = json_object();
    }
    if (!rc)
        rc = list_names(j, stream, e);
    if (!rc)
        rc = add_history(j, e);
    if (!rc && !stream) /* small files are written in this order too: it is fixed before them */
        lm_st_plan_sort(j->names);
    spec.plan = j->names;
    spec.tokenizer_from = whole_tokenizer(p);
    if (!rc)
        rc = lm_folder_create(j->o->output, j->o->force, j->o->bundle, &spec, &j->folder, e);
    if (!rc && !spec.tokenizer_from)
        rc = other_tokenizer(j, e);
    json_decref(none);
    return rc;
}

static void report_tensor(job *j, const lm_merge_tensor *t)
{
    const lm_merge_plan *p = j->g->plan;

    j->done += (double)t->bytes;
    for (int k = t->base ? -1 : 0; k < t->n_models; k++)
        j->done += (double)(k < 0 ? t->base->tensor : t->model[k].tensor)->bytes;
    lm_progress(j->g->sink, "merge", j->done, (double)(p->read + p->write), "bytes", t->name);
}

/* Copied bytes are written in pieces, directly from the source. */
static lm_code copy_tensor(job *j, const lm_merge_tensor *t, lm_err *e)
{
    const lm_merge_ref *ref = &t->model[0];
    const char *data = NULL;
    lm_code rc = lm_engine_fetch(j->g, ref, &j->g->held[0].read, (const void **)&data, e);

    for (uint64_t at = 0; !rc && at < t->bytes && !lm_stopping(); at += SLICE)
        rc = lm_merge_writer_submit(&j->writer, data + at,
                                    t->bytes - at < SLICE ? (size_t)(t->bytes - at) : SLICE, e);
    if (!rc)
        rc = lm_merge_writer_wait(&j->writer, e);
    lm_model_source_forget(j->g->plan->model[ref->input].source, ref->tensor);
    return rc;
}

/* Report element `at` of the result, which is not finite: either an operand is not, or the method
 * or the type made it so.  The operands hold elements from `from` on. */
static lm_code blame(job *j, const lm_merge_tensor *t, int64_t from, int64_t n, int64_t at,
                     double v, lm_err *e)
{
    const lm_merge_engine *g = j->g;

    for (int k = t->base ? 0 : 1; k <= t->n_models; k++) {
        const lm_merge_operand *o = &g->operand[k];
        const lm_merge_ref *ref = k ? &t->model[k - 1] : t->base;
        int64_t bad = o->param[LM_MERGE_WEIGHT] == 0
                          ? -1
                          : lm_merge_first_bad(o->dtype, o->data, n, false, g->par);

        if (bad >= 0)
            return lm_fail(e, LM_ENUMERIC, t->name, "find the weights that are not finite",
                           "element %lld is %g in %.100s", (long long)(from + bad),
                           lm_get(o->dtype, o->data, bad), g->plan->model[ref->input].name);
    }
    return lm_fail(e, LM_ENUMERIC, t->name,
                   lm_dtype_size(t->dtype) < 4 ? "choose a result type of wider range"
                                               : "change the weights",
                   "element %lld becomes %g in %s", (long long)at, v, lm_dtype_name(t->dtype));
}

/* Check that the merged part [at, at + n) has neither NaN nor infinity. */
static lm_code check_part(job *j, const lm_merge_tensor *t, int64_t at, int64_t n, const void *out,
                          lm_err *e)
{
    int64_t bad = lm_merge_first_bad(t->dtype, out, n, false, j->g->par);

    return bad < 0 ? LM_OK : blame(j, t, at, n, at + bad, lm_get(t->dtype, out, bad), e);
}

/* Write one part while the next is merged. */
static lm_code merge_part(job *j, const lm_merge_tensor *t, int64_t at, int64_t n, lm_err *e)
{
    lm_merge_buf *out = &j->out[j->turn];
    size_t bytes = lm_plain_bytes(t->dtype, n);
    lm_code rc = lm_merge_buf_need(out, bytes, e);

    if (!rc)
        rc = lm_engine_part(j->g, t, at, n, NULL, t->dtype, out->data, e);
    if (!rc)
        rc = check_part(j, t, at, n, out->data, e);
    if (!rc)
        rc = lm_merge_writer_submit(&j->writer, out->data, bytes, e);
    j->turn = 1 - j->turn;
    return rc;
}

/* In parts that fit the caches if the method allows it, otherwise as a whole. */
static lm_code merge_tensor(job *j, const lm_merge_tensor *t, lm_err *e)
{
    int64_t step = j->g->plan->recipe->method->pieces ? PART : t->count;
    lm_code rc = LM_OK;

    if (t->table) { /* its operands are in memory twice, so nothing else may be */
        rc = lm_merge_writer_wait(&j->writer, e);
        lm_merge_buf_fini(&j->out[1 - j->turn]);
    }
    if (!rc)
        rc = lm_engine_hold(j->g, t, e);
    for (int64_t at = 0; !rc && at < t->count && !lm_stopping(); at += step)
        rc = merge_part(j, t, at, t->count - at < step ? t->count - at : step, e);
    lm_engine_release(j->g, t);
    return rc;
}

static lm_code stream_all(job *j, lm_err *e)
{
    size_t n = lm_st_plan_count(j->names);
    const lm_merge_tensor *t;
    bool apart = lm_par_threads(j->g->par) > 1;
    lm_code rc = lm_merge_writer_init(&j->writer, j->folder, apart, e);

    for (size_t i = 0; !rc && i < n && !lm_stopping(); i++) {
        t = find_tensor(j, lm_st_plan_at(j->names, i)->name);
        rc = t->copy ? copy_tensor(j, t, e) : merge_tensor(j, t, e);
        if (!rc)
            report_tensor(j, t);
    }
    if (!rc)
        rc = lm_merge_writer_wait(&j->writer, e);
    lm_merge_writer_fini(&j->writer);
    return rc;
}

static lm_code finish_inputs(const lm_merge_plan *p, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < p->recipe->n_inputs; i++)
        rc = lm_model_source_finish(p->model[i].source, e);
    return rc;
}

lm_code lm_merge_write(lm_merge_engine *g, const lm_merge_write_opts *o, lm_err *e)
{
    job j = { .g = g, .o = o };
    lm_code rc = create(&j, e);

    if (!rc)
        rc = stream_all(&j, e);
    if (!rc && !lm_stopping())
        rc = finish_inputs(g->plan, e);
    if (!rc && !lm_stopping()) {
        rc = lm_folder_commit(j.folder, e);
        j.folder = NULL;
    }
    lm_folder_drop(j.folder);
    lm_merge_buf_fini(&j.out[0]);
    lm_merge_buf_fini(&j.out[1]);
    lm_st_plan_free(j.names);
    lm_free(j.by_name);
    return rc;
}
