/* SPDX-License-Identifier: Apache-2.0 */
/* folder_write.c -- writes a model: plans the shards, writes the small files, streams the tensors,
 * publishes all at once. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/folder.h"
#include "format/folder_impl.h"
#include "format/folder_json.h"
#include "format/safetensors_table.h"

const char *const lm_tokenizer_files[] = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    NULL,
};

#define MAX_SMALL ((size_t)1 << 30) /* bytes of a file that is copied */

/* A small file that arrived between tensors. */
typedef struct {
    char *name;
    lm_buf data;
} late_file;

struct lm_folder {
    lm_bundle_out *b;
    lm_st_plan **plan; /* one a shard */
    size_t n_shards, cur;
    lm_st_writer *writer; /* writer of shard `cur`; NULL: not begun, or all are complete */
    bool failed;          /* after a failure: only drop is allowed */
    bool shared;          /* by several ranks */
    bool whole;           /* weights stay one file unless shards are requested */
    const char *weights;  /* its name; NULL: model.safetensors */
    lm_model_source *tokenizer_from;
    late_file *late;
    size_t n_late, cap_late;
    int64_t params;
    uint64_t bytes;
};

/* "model.safetensors" or "model-00002-of-00003.safetensors". */
static void shard_name(char buf[64], size_t i, size_t n)
{
    if (n == 1)
        snprintf(buf, 64, "model.safetensors");
    else
        snprintf(buf, 64, "model-%05zu-of-%05zu.safetensors", i + 1, n);
}

/* ---- Planning ---- */

static lm_code add_shard(lm_folder *f, const lm_st_plan *whole, lm_err *e)
{
    const char *key, *value;
    bool format = false;
    lm_code rc = lm_realloc_n(&f->plan, f->n_shards + 1, sizeof *f->plan, "plan of shards", e);

    if (!rc)
        rc = lm_st_plan_new(&f->plan[f->n_shards], e);
    if (rc)
        return rc;
    lm_st_plan *p = f->plan[f->n_shards++];
    for (size_t i = 0; lm_st_plan_meta_at(whole, i, &key, &value); i++)
        format = format || !strcmp(key, "format");
    if (!format) /* transformers refuses a file without it */
        rc = lm_st_plan_meta(p, "format", "pt", e);
    for (size_t i = 0; !rc && lm_st_plan_meta_at(whole, i, &key, &value); i++)
        rc = lm_st_plan_meta(p, key, value, e);
    return rc;
}

/* Fill shards greedily in the order of the plan, as huggingface_hub does, then sort each. */
static lm_code plan_shards(lm_folder *f, const lm_folder_spec *spec, lm_err *e)
{
    uint64_t limit = spec->max_shard_bytes && !f->weights ? spec->max_shard_bytes
                     : f->whole || f->weights             ? UINT64_MAX
                                                          : LM_MAX_SHARD_BYTES;
    lm_code rc = add_shard(f, spec->plan, e);

    for (size_t i = 0; !rc && i < lm_st_plan_count(spec->plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(spec->plan, i);
        uint64_t have = lm_st_plan_data_bytes(f->plan[f->n_shards - 1]);
        if (have && (t->bytes > limit || have > limit - t->bytes))
            rc = add_shard(f, spec->plan, e);
        if (!rc)
            rc = lm_st_plan_add_like(f->plan[f->n_shards - 1], t, e);
        f->params += t->count;
        f->bytes += t->bytes;
    }
    for (size_t i = 0; !rc && !spec->keep_order && i < f->n_shards; i++)
        lm_st_plan_sort(f->plan[i]);
    return rc;
}

/* ---- Small files ---- */

static lm_code keep_late(lm_folder *f, const char *name, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = lm_grow(&f->late, &f->cap_late, f->n_late + 1, sizeof *f->late, "small files", e);

    if (rc)
        return rc;
    late_file *x = &f->late[f->n_late];
    *x = (late_file){ 0 };
    rc = lm_strdup(&x->name, name, e);
    if (!rc && (rc = lm_buf_add(&x->data, data, bytes, e)))
        lm_free(x->name);
    f->n_late += !rc;
    return rc;
}

static lm_code put_late(lm_folder *f, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < f->n_late; i++) {
        late_file *x = &f->late[i];
        if (!rc)
            rc = lm_bundle_put(f->b, x->name, x->data.data, x->data.len, e);
        lm_buf_fini(&x->data);
        lm_free(x->name);
    }
    f->n_late = 0;
    return rc;
}

lm_code lm_folder_put(lm_folder *f, const char *name, const void *data, size_t bytes, lm_err *e)
{
    return f->writer && lm_name_ok(name) ? keep_late(f, name, data, bytes, e)
                                         : lm_bundle_put(f->b, name, data, bytes, e);
}

static lm_code copy_file(lm_folder *f, const char *name, const char *from, lm_err *e)
{
    lm_buf data = { 0 };
    lm_code rc = lm_file_read(from, MAX_SMALL, &data, e);

    if (!rc)
        rc = lm_folder_put(f, name, data.data ? data.data : "", data.len, e);
    lm_buf_fini(&data);
    return rc;
}

/* Tokenizer files of a source, all or, in a second call, those that arrived since. */
static lm_code put_from(lm_folder *f, lm_model_source *m, bool again, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; !rc && lm_tokenizer_files[i]; i++) {
        const char *name = lm_tokenizer_files[i];
        lm_buf data = { 0 };
        bool found = false;
        if (again && lm_bundle_has(f->b, name))
            continue;
        rc = lm_source_seen(m, name, MAX_SMALL, &data, &found, e);
        if (!rc && found)
            rc = lm_folder_put(f, name, data.data, data.len, e);
        lm_buf_fini(&data);
    }
    return rc;
}

static lm_code put_json(lm_folder *f, const char *name, const json_t *tree, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_json_pretty(tree, &text, e);

    if (!rc)
        rc = lm_folder_put(f, name, text.data, text.len, e);
    lm_buf_fini(&text);
    return rc;
}

static lm_code put_tokenizer(lm_folder *f, const char *from, lm_err *e)
{
    lm_code rc = LM_OK;

    if (!lm_path_is_dir(from))
        return copy_file(f, "tokenizer.json", from, e);
    for (int i = 0; !rc && lm_tokenizer_files[i]; i++) {
        char *path = NULL;
        rc = lm_path_join(&path, from, lm_tokenizer_files[i], e);
        if (!rc && lm_path_exists(path))
            rc = copy_file(f, lm_tokenizer_files[i], path, e);
        lm_free(path);
    }
    return rc;
}

typedef struct {
    const char *name;
    size_t shard;
} placed;

static int by_name(const void *a, const void *b)
{
    return strcmp(((const placed *)a)->name, ((const placed *)b)->name);
}

static lm_code index_text(const lm_folder *f, const placed *all, size_t n, lm_buf *text, lm_err *e)
{
    char file[64];
    lm_jw w;

    lm_jw_begin(&w, text, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_obj(&w, "metadata");
    lm_jw_int(&w, "total_parameters", f->params);
    lm_jw_int(&w, "total_size", (int64_t)f->bytes);
    lm_jw_close_obj(&w);
    lm_jw_obj(&w, "weight_map");
    for (size_t i = 0; i < n; i++) {
        shard_name(file, all[i].shard, f->n_shards);
        lm_jw_str(&w, all[i].name, file);
    }
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(text, "\n", 1, e);
}

/* The index in Hugging Face's form: names sorted, two spaces of indent. */
static lm_code put_index(lm_folder *f, size_t n, lm_err *e)
{
    lm_buf text = { 0 };
    placed *all = NULL;
    size_t at = 0;
    lm_code rc = lm_alloc_n(&all, n, sizeof *all, "index of shards", e);

    for (size_t s = 0; !rc && s < f->n_shards; s++)
        for (size_t i = 0; i < lm_st_plan_count(f->plan[s]); i++)
            all[at++] = (placed){ lm_st_plan_at(f->plan[s], i)->name, s };
    if (!rc) {
        qsort(all, n, sizeof *all, by_name);
        rc = index_text(f, all, n, &text, e);
    }
    if (!rc)
        rc = lm_folder_put(f, "model.safetensors.index.json", text.data, text.len, e);
    lm_buf_fini(&text);
    lm_free(all);
    return rc;
}

/* ---- Tensors ---- */

/* The name of shard i, or of the one file of weights. */
static const char *weights_name(const lm_folder *f, size_t i, char buf[64])
{
    shard_name(buf, i, f->n_shards);
    return f->weights ? f->weights : buf;
}

static lm_code open_shard(lm_folder *f, lm_err *e)
{
    char name[64];

    return lm_bundle_st_create(f->b, weights_name(f, f->cur, name), f->plan[f->cur], &f->writer, e);
}

static lm_code reserve_shards(lm_folder *f, lm_err *e)
{
    char name[64];
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && f->shared && i < f->n_shards; i++)
        rc = lm_bundle_reserve(f->b, weights_name(f, i, name), f->plan[i], e);
    return rc;
}

/* Begin the weights if necessary, close complete shards and begin the next. */
static lm_code roll(lm_folder *f, lm_err *e)
{
    lm_code rc = LM_OK;

    while (!rc && f->cur < f->n_shards) {
        if (!f->writer)
            rc = open_shard(f, e);
        if (rc || lm_st_next(f->writer))
            break;
        lm_st_writer *w = f->writer;
        f->writer = NULL;
        rc = lm_st_commit(w, e);
        f->cur++;
        if (!rc)
            rc = put_late(f, e);
    }
    f->failed = f->failed || rc;
    return rc;
}

static lm_code put_small(lm_folder *f, const lm_folder_spec *spec, lm_err *e)
{
    lm_code rc = spec->config ? put_json(f, "config.json", spec->config, e) : LM_OK;

    if (!rc && spec->generation_config)
        rc = put_json(f, "generation_config.json", spec->generation_config, e);
    if (!rc && spec->tokenizer)
        rc = put_tokenizer(f, spec->tokenizer, e);
    if (!rc && spec->tokenizer_from)
        rc = put_from(f, spec->tokenizer_from, false, e);
    for (size_t i = 0; !rc && spec->files && i < spec->files->n; i++)
        rc = lm_folder_put(f, spec->files->v[i].name, spec->files->v[i].data.data,
                           spec->files->v[i].data.len, e);
    if (!rc && f->n_shards > 1)
        rc = put_index(f, lm_st_plan_count(spec->plan), e);
    return rc;
}

lm_code lm_folder_create(const char *path, bool force, const lm_bundle_opts *o,
                         const lm_folder_spec *spec, lm_folder **out, lm_err *e)
{
    lm_folder *f = NULL;
    lm_code rc = lm_alloc_n(&f, 1, sizeof *f, "model folder", e);

    *out = NULL;
    if (rc)
        return rc;
    if ((rc = lm_bundle_create(path, force, o, &f->b, e)))
        f->b = NULL;
    if (!rc) {
        f->whole = lm_bundle_out_kind(f->b) != LM_BUNDLE_FOLDER;
        f->shared = o && o->share;
        f->tokenizer_from = spec->tokenizer_from;
        f->weights = spec->weights;
        rc = plan_shards(f, spec, e);
    }
    if (!rc && f->n_shards > 1 && lm_bundle_out_kind(f->b) == LM_BUNDLE_FILE)
        rc = lm_fail(e, LM_EUSAGE, path, "write a folder or a tar",
                     "%zu shards do not go into one .safetensors", f->n_shards);
    if (!rc)
        rc = lm_bundle_room(f->b, f->bytes, e);
    if (!rc)
        rc = put_small(f, spec, e);
    if (!rc)
        rc = reserve_shards(f, e);
    if (rc) {
        lm_folder_drop(f);
        return rc;
    }
    *out = f;
    return LM_OK;
}

/* Tensors without bytes are not written and are skipped. */
const lm_st_tensor *lm_folder_next(const lm_folder *f)
{
    if (f->failed)
        return NULL;
    if (f->writer)
        return lm_st_next(f->writer);
    for (size_t s = f->cur; s < f->n_shards; s++)
        for (size_t i = 0; i < lm_st_plan_count(f->plan[s]); i++)
            if (lm_st_plan_at(f->plan[s], i)->bytes)
                return lm_st_plan_at(f->plan[s], i);
    return NULL;
}

/* Check before a tensor is written: the weights are begun, nothing failed, tensors are missing. */
static lm_code check_open(lm_folder *f, lm_err *e)
{
    if (f->failed)
        return lm_fail(e, LM_EBUG, "model folder", NULL, "used after a failure");
    lm_code rc = roll(f, e);
    if (!rc && !f->writer)
        rc = lm_fail(e, LM_EBUG, "model folder", NULL, "more tensors than planned");
    return rc;
}

lm_code lm_folder_write(lm_folder *f, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = bytes ? check_open(f, e) : LM_OK;

    if (!rc && bytes)
        rc = lm_st_write(f->writer, data, bytes, e);
    f->failed = f->failed || rc;
    return rc ? rc : bytes ? roll(f, e) : LM_OK;
}

lm_code lm_folder_write_as(lm_folder *f, lm_dtype from, const void *data, int64_t count, lm_err *e)
{
    lm_code rc = count ? check_open(f, e) : LM_OK;

    if (!rc && count)
        rc = lm_st_write_as(f->writer, from, data, count, e);
    f->failed = f->failed || rc;
    return rc ? rc : count ? roll(f, e) : LM_OK;
}

/* ---- Parts of several ranks ---- */

lm_code lm_folder_reserve(lm_folder *f, const char *name, const lm_st_plan *plan, lm_err *e)
{
    return f->shared ? lm_bundle_reserve(f->b, name, plan, e) : LM_OK;
}

lm_code lm_folder_pass(lm_folder *f, bool *passed, lm_err *e)
{
    *passed = false;
    if (!f->shared)
        return LM_OK;
    if (check_open(f, e))
        return e->code;
    *passed = lm_st_pass(f->writer);
    return *passed ? roll(f, e) : LM_OK;
}

lm_code lm_folder_write_own(lm_folder *f, lm_dtype from, const void *data, int64_t count,
                            int64_t at, lm_err *e)
{
    lm_code rc = check_open(f, e);

    if (!rc)
        rc = lm_st_write_own(f->writer, from, data, count, at, e);
    f->failed = f->failed || rc;
    return rc;
}

lm_code lm_folder_end_own(lm_folder *f, lm_err *e)
{
    if (check_open(f, e))
        return e->code;
    lm_st_end_own(f->writer);
    return roll(f, e);
}

lm_code lm_folder_sync(lm_folder *f, lm_err *e)
{
    return lm_bundle_sync(f->b, e);
}

const char *lm_folder_made(const lm_folder *f)
{
    return lm_bundle_folder(f->b);
}

/* ---- Other large files ---- */

lm_code lm_folder_st_create(lm_folder *f, const char *name, const lm_st_plan *plan,
                            lm_st_writer **out, lm_err *e)
{
    *out = NULL;
    if (f->failed || (f->cur < f->n_shards && (f->writer || f->cur)))
        return lm_fail(e, LM_EBUG, "model folder", NULL, "%s begun before the weights are complete",
                       name);
    return lm_bundle_st_create(f->b, name, plan, out, e);
}

/* ---- The end ---- */

static lm_code commit(lm_folder *f, lm_err *e)
{
    lm_code rc = f->failed ? lm_fail(e, LM_EBUG, "model folder", NULL, "committed after a failure")
                           : roll(f, e); /* skips tensors without bytes at the end */

    if (!rc && f->writer)
        rc = lm_fail(e, LM_EBUG, "model folder", NULL, "the bytes of tensor '%s' were not written",
                     lm_st_next(f->writer)->name);
    if (!rc && f->tokenizer_from)
        rc = lm_model_source_finish(f->tokenizer_from, e);
    if (!rc && f->tokenizer_from)
        rc = put_from(f, f->tokenizer_from, true, e);
    if (!rc) {
        lm_bundle_out *b = f->b;
        f->b = NULL;
        rc = lm_bundle_commit(b, e);
    }
    return rc;
}

lm_code lm_folder_commit(lm_folder *f, lm_err *e)
{
    lm_code rc = commit(f, e);

    lm_folder_drop(f);
    return rc;
}

void lm_folder_drop(lm_folder *f)
{
    if (!f)
        return;
    lm_st_drop(f->writer);
    lm_bundle_drop(f->b);
    for (size_t i = 0; i < f->n_late; i++) {
        lm_buf_fini(&f->late[i].data);
        lm_free(f->late[i].name);
    }
    lm_free(f->late);
    for (size_t i = 0; i < f->n_shards; i++)
        lm_st_plan_free(f->plan[i]);
    lm_free(f->plan);
    lm_free(f);
}
