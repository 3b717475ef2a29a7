/* SPDX-License-Identifier: Apache-2.0 */
/* folder_source.c -- opens a model: turns the files of a bundle (bundle.h) into one list of
 * tensors, and the small files beside them.
 *
 * With random access each file of weights is an lm_st; a stream of one file of weights is an
 * lm_st_stream. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/folder_impl.h"
#include "format/folder_run.h"
#include "format/foreign.h"
#include "format/mxfp4.h"
#include "format/provenance.h"
#include "format/safetensors_table.h"

#define MAX_CONFIG ((size_t)16 << 20)  /* bytes of config.json */
#define MAX_INDEX  ((size_t)256 << 20) /* bytes of model.safetensors.index.json */

static const char single[] = "model.safetensors", index_name[] = "model.safetensors.index.json";

bool lm_name_ok(const char *name)
{
    size_t n = strlen(name);

    if (!n || n > 255 || !strcmp(name, ".") || !strcmp(name, ".."))
        return false;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f || name[i] == '/' || name[i] == '\\')
            return false;
    return true;
}

/* ---- Opening ---- */

static lm_code add_file(lm_model_source *m, const char *name, lm_err *e)
{
    lm_code rc = lm_realloc_n(&m->file, m->n_files + 1, sizeof *m->file, "list of files", e);
    if (!rc)
        rc = lm_bundle_st(m->b, name, &m->file[m->n_files].st, e);
    if (!rc) {
        m->file[m->n_files].name = lm_bundle_find(m->b, name)->name;
        m->n_files++;
    }
    return rc;
}

static int by_string(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The different file names of the index's weight_map, sorted; the caller frees *names; its strings
 * belong to the tree. */
static lm_code shard_names(const json_t *map, const char *where, const char ***names, size_t *n,
                           lm_err *e)
{
    const char *key, **all = NULL, *prev = NULL;
    json_t *value;
    size_t total = 0;
    lm_code rc = lm_alloc_n(&all, json_object_size(map), sizeof *all, "names of shards", e);

    *names = NULL;
    *n = 0;
    if (rc)
        return rc;
    json_object_foreach((json_t *)(uintptr_t)map, key, value)
    {
        const char *file = json_string_value(value);
        char show[LM_ST_SHOWN];
        if (!file || strlen(file) != json_string_length(value) || !lm_name_ok(file)) {
            lm_free(all);
            return lm_fail(e, LM_EFORMAT, where, NULL, "tensor '%s' has an invalid file name",
                           lm_st_show(key, show));
        }
        if (!prev || strcmp(prev, file)) /* consecutive tensors are usually in one file */
            all[total++] = prev = file;
    }
    if (total)
        qsort(all, total, sizeof *all, by_string);
    for (size_t i = 0; i < total; i++)
        if (!*n || strcmp(all[*n - 1], all[i]))
            all[(*n)++] = all[i];
    *names = all;
    return LM_OK;
}

/* Every tensor of the index must be in the shard that the index names, and every tensor of a shard in the index. */
static lm_code check_index(const lm_model_source *m, const json_t *map, const char *where,
                           lm_err *e)
{
    const char *key;
    json_t *value;
    char show[LM_ST_SHOWN];

    json_object_foreach((json_t *)(uintptr_t)map, key, value)
    {
        const lm_st_tensor *t = lm_model_source_find(m, key);
        const char *file = json_string_value(value);
        if (!t)
            return lm_fail(e, LM_EUSAGE, where, "fetch the model again",
                           "tensor '%s' should be in %s, but is missing there",
                           lm_st_show(key, show), file);
        if (strcmp(lm_model_source_file_of(m, t), file))
            return lm_fail(e, LM_EUSAGE, where, "fetch the model again",
                           "tensor '%s' should be in %s, but is in %s", lm_st_show(key, show), file,
                           lm_model_source_file_of(m, t));
    }
    const size_t n = lm_model_source_count(m);
    for (size_t k = 0; json_object_size(map) != n && k < n; k++) {
        const lm_st_tensor *t = lm_model_source_at(m, k);
        if (!json_object_get(map, t->name))
            return lm_fail(e, LM_EUSAGE, where, "fetch the model again",
                           "tensor '%s' is in %s, but not in the index", lm_st_show(t->name, show),
                           lm_model_source_file_of(m, t));
    }
    return LM_OK;
}

/* metadata.total_size is what downloaders and device maps calculate with; the tensors do not depend
 * on it, so a wrong value is only reported. */
static void check_total(const json_t *root, const lm_model_source *m, const char *where)
{
    const json_t *total = json_object_get(json_object_get(root, "metadata"), "total_size");
    uint64_t bytes = lm_model_source_bytes(m);
    bool right =
        json_is_integer(total)
            ? json_integer_value(total) >= 0 && (uint64_t)json_integer_value(total) == bytes
            : json_is_real(total) && json_real_value(total) == (double)bytes;
    lm_buf text = { 0 };
    lm_err ignored = { 0 };
    lm_jw w;

    if (!total || right)
        return;
    lm_jw_begin(&w, &text, 0, &ignored);
    lm_jw_json(&w, NULL, total);
    if (!lm_jw_end(&w) && !lm_buf_add(&text, "", 1, &ignored))
        lm_log(m->b->o.sink, LM_LOG_WARN,
               "%s: metadata.total_size is %.40s, the tensors have %" PRIu64 " byte%s: ignored",
               where, text.data, bytes, lm_plural(bytes));
    lm_buf_fini(&text);
}

static int by_place(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)lm_st_at((*(lm_source_weights *const *)a)->st, 0),
              y = (uintptr_t)lm_st_at((*(lm_source_weights *const *)b)->st, 0);
    return x < y ? -1 : x > y;
}

static lm_code count_files(lm_model_source *m, lm_err *e)
{
    lm_code rc = lm_alloc_n(&m->first, m->n_files + 1, sizeof *m->first, "list of files", e);

    if (!rc)
        rc = lm_alloc_n(&m->placed, m->n_files, sizeof(lm_source_weights *), "list of files", e);
    for (size_t i = 0; !rc && i < m->n_files; i++) {
        m->first[i + 1] = m->first[i] + lm_st_count(m->file[i].st);
        if (lm_st_count(m->file[i].st))
            m->placed[m->n_placed++] = &m->file[i];
    }
    if (!rc && m->n_placed)
        qsort(m->placed, m->n_placed, sizeof(lm_source_weights *), by_place);
    return rc;
}

/* ---- Inputs that are not a model ---- */

/* `what` is missing; weights in another format are named with the remedy. */
static lm_code no_model(const lm_model_source *m, const char *what, lm_err *e)
{
    const char *todo, *name = lm_foreign_in(m->b, &todo), *kind = NULL;
    char show[LM_ST_SHOWN];

    if (name)
        kind = lm_foreign_name(name, &todo);
    if (kind)
        return lm_fail(e, LM_EUSAGE, m->path, todo, "%s is %s", lm_st_show(name, show), kind);
    if ((kind = lm_foreign_files(m->b, &todo)))
        return lm_fail(e, LM_EUSAGE, m->path, todo, "%s: it is %s", what, kind);
    return lm_fail(e, LM_EUSAGE, m->path, "give a model folder or a .safetensors file", "%s", what);
}

/* A file whose name is that of another format. */
static lm_code check_name(const char *path, lm_err *e)
{
    const char *todo, *kind = lm_foreign_name(path, &todo);
    struct stat st;

    if (!kind || lm_text_ends(path, ".safetensors") || stat(path, &st) || !S_ISREG(st.st_mode))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, path, todo, "it is %s", kind);
}

/* ---- Shards ---- */

/* The cell that holds `name`, or the free cell for it. */
const lm_st_tensor **lm_source_cell(const lm_model_source *m, const char *name)
{
    size_t mask = m->n_cells - 1, i = lm_hash_str(name) & mask;

    while (m->cell[i] && strcmp(m->cell[i]->name, name))
        i = (i + 1) & mask;
    return &m->cell[i];
}

/* One table of the names in all shards, at most half full: a search through the table of each of
 * hundreds of shards would take seconds.  A name in two shards is found here. */
static lm_code index_names(lm_model_source *m, lm_err *e)
{
    char show[LM_ST_SHOWN];
    size_t n_cells = 64;
    lm_code rc;

    while (n_cells < 2 * m->first[m->n_files])
        n_cells *= 2;
    if ((rc = lm_alloc_n(&m->cell, n_cells, sizeof *m->cell, "index of tensor names", e)))
        return rc;
    m->n_cells = n_cells;
    for (size_t f = 0; f < m->n_files; f++)
        for (size_t i = 0; i < lm_st_count(m->file[f].st); i++) {
            const lm_st_tensor *t = lm_st_at(m->file[f].st, i);
            const lm_st_tensor **cell = lm_source_cell(m, t->name);
            if (*cell)
                return lm_fail(e, LM_EUSAGE, lm_st_path(m->file[f].st), NULL,
                               "tensor '%s' is also in %s", lm_st_show(t->name, show),
                               lm_model_source_file_of(m, *cell));
            *cell = t;
        }
    return LM_OK;
}

static lm_code open_shards(lm_model_source *m, lm_err *e)
{
    json_t *root = NULL;
    const char **names = NULL;
    char index[256], where[256], show[LM_ST_SHOWN];
    size_t n = 0;
    lm_code rc = lm_source_json(m, index_name, MAX_INDEX, &root, e);
    const json_t *map = rc ? NULL : json_object_get(root, "weight_map");

    lm_source_where(m, index_name, index);
    if (!rc && !root)
        rc = no_model(m, "it has neither model.safetensors nor model.safetensors.index.json", e);
    else if (!rc && !json_is_object(map))
        rc = lm_fail(e, LM_EFORMAT, index, NULL, "it has no object 'weight_map'");
    if (!rc)
        rc = shard_names(map, index, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        if (lm_bundle_find(m->b, names[i]))
            rc = add_file(m, names[i], e);
        else
            rc = lm_fail(e, LM_EUSAGE, lm_source_where(m, lm_st_show(names[i], show), where),
                         "fetch it again", "shard %zu of %zu named by %s is missing", i + 1, n,
                         index_name);
    }
    if (!rc)
        rc = count_files(m, e);
    if (!rc)
        rc = index_names(m, e);
    if (!rc)
        rc = check_index(m, map, index, e);
    if (!rc)
        check_total(root, m, index);
    lm_free(names);
    json_decref(root);
    return rc;
}

static lm_code open_config(lm_model_source *m, lm_err *e)
{
    char where[256];
    lm_code rc;

    rc = lm_source_json(m, "config.json", MAX_CONFIG, &m->config, e);
    if (!rc && !m->config)
        return no_model(m, "it has no config.json", e);
    if (!rc && !json_is_object(m->config))
        rc = lm_fail(e, LM_EFORMAT, lm_source_where(m, "config.json", where), NULL,
                     "it is not a JSON object");
    return rc;
}

/* With random access to all files that are not in memory. */
static lm_code open_random(lm_model_source *m, lm_err *e)
{
    lm_code rc;

    if (lm_bundle_kind_of(m->b) == LM_BUNDLE_FILE) {
        rc = add_file(m, lm_bundle_at(m->b, 0)->name, e);
        return rc ? rc : count_files(m, e);
    }
    rc = open_config(m, e);
    if (rc)
        return rc;
    if (lm_bundle_find(m->b, single)) { /* as transformers: the single file comes first */
        rc = add_file(m, single, e);
        return rc ? rc : count_files(m, e);
    }
    return open_shards(m, e);
}

/* An early end is reported by the reader of the tensors, which knows the tensor that it cuts. */
static lm_code read_weights(void *bundle, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lm_bundle *b = bundle;
    lm_err mine = { 0 };
    lm_code rc = lm_bundle_read(b, dst, cap, got, &mine);

    if (rc && b->cut)
        return LM_OK;
    if (rc && !e->code)
        *e = mine;
    return rc;
}

/* The only file of weights of a stream begins. */
static lm_code open_forward(lm_model_source *m, const lm_bundle_file *f, lm_err *e)
{
    char where[256];
    lm_code rc =
        lm_st_stream_open(read_weights, m->b, lm_bundle_where(m->b, f, where), &m->stream, e);

    m->streamed = f;
    if (!rc && lm_st_stream_bytes(m->stream) != f->bytes)
        rc = lm_fail(e, LM_EFORMAT, where, "fetch or write it again",
                     "header says %" PRIu64 " byte%s, file has %" PRIu64,
                     lm_st_stream_bytes(m->stream), lm_plural(lm_st_stream_bytes(m->stream)),
                     f->bytes);
    return rc;
}

/* Read small files in their order, up to the weights. */
static lm_code open_stream(lm_model_source *m, lm_err *e)
{
    bool lone = lm_bundle_kind_of(m->b) == LM_BUNDLE_FILE;
    const lm_bundle_file *f = NULL;
    lm_code rc;

    while (!(rc = lm_bundle_next(m->b, &f, e)) && f) {
        if (!lm_text_ends(f->name, ".safetensors")) {
            if ((rc = lm_source_keep(m, f, e)))
                return rc;
            continue;
        }
        if (!lone && (strcmp(f->name, single) || !lm_source_kept(m, "config.json"))) {
            rc = lm_bundle_spool(m->b, e);
            return rc ? rc : open_random(m, e);
        }
        rc = lone ? LM_OK : open_config(m, e);
        return rc ? rc : open_forward(m, f, e);
    }
    if (!rc)
        rc = no_model(
            m, lm_source_kept(m, "config.json") ? "it has no weights" : "it has no config.json", e);
    return rc;
}

/* For a run folder the newest checkpoint is resolved once.  All files then come from the same one
 * even if a newer one appears meanwhile, and the folder can be read even if its links were lost. */
static lm_code open_path(lm_model_source *m, const char *path, const lm_bundle_opts *o, lm_err *e)
{
    char *resolved = NULL;
    lm_code rc =
        strcmp(path, "-") && lm_path_is_dir(path) ? lm_run_resolve(path, &resolved, e) : LM_OK;

    if (!rc)
        rc = check_name(path, e);
    if (!rc)
        rc = lm_bundle_open(resolved ? resolved : path, o, &m->b, e);
    lm_free(resolved);
    if (rc)
        return rc;
    rc = lm_strdup(&m->path, strcmp(path, "-") ? path : lm_bundle_path(m->b), e);
    if (!rc)
        rc = lm_bundle_random(m->b) ? open_random(m, e) : open_stream(m, e);
    return rc;
}

lm_code lm_model_source_open(const char *path, const lm_bundle_opts *o, lm_model_source **out,
                             lm_err *e)
{
    lm_model_source *m = NULL;
    lm_code rc = lm_alloc_n(&m, 1, sizeof *m, "model", e);

    *out = NULL;
    if (rc)
        return rc;
    pthread_rwlock_init(&m->lock, NULL);
    rc = open_path(m, path, o, e);
    rc = rc ? rc : lm_mxfp4_over(&m, e);
    if (rc) {
        lm_model_source_close(m);
        return rc;
    }
    *out = m;
    return LM_OK;
}

void lm_model_source_close(lm_model_source *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->n_files; i++)
        lm_st_close(m->file[i].st);
    lm_st_stream_close(m->stream);
    if (m->by)
        m->by->close(m->ctx);
    lm_model_source_close(m->below);
    lm_folder_files_fini(&m->small);
    lm_names_free(m->missed, m->n_missed);
    lm_free(m->file);
    lm_free(m->first);
    lm_free(m->placed);
    lm_free(m->cell);
    json_decref(m->config);
    lm_bundle_close(m->b);
    lm_free(m->window);
    lm_free(m->path);
    pthread_rwlock_destroy(&m->lock);
    lm_free(m);
}

/* ---- Queries ---- */

const char *lm_model_source_path(const lm_model_source *m)
{
    return m->path;
}

lm_bundle *lm_model_source_bundle(const lm_model_source *m)
{
    return m->b;
}

const char *lm_model_source_dir(const lm_model_source *m)
{
    return lm_bundle_dir(m->b);
}

const json_t *lm_model_source_config(const lm_model_source *m)
{
    return m->config;
}

bool lm_model_source_random(const lm_model_source *m)
{
    return lm_bundle_random(m->b);
}

size_t lm_model_source_count(const lm_model_source *m)
{
    if (m->plan)
        return lm_st_plan_count(m->plan);
    return m->stream ? lm_st_stream_count(m->stream) : m->first[m->n_files];
}

const lm_st_tensor *lm_model_source_at(const lm_model_source *m, size_t i)
{
    size_t lo = 0, hi = m->n_files; /* first[lo] <= i < first[hi] */

    if (m->plan)
        return lm_st_plan_at(m->plan, i);
    if (m->stream)
        return lm_st_stream_at(m->stream, i);
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (i < m->first[mid])
            hi = mid;
        else
            lo = mid;
    }
    return lm_st_at(m->file[lo].st, i - m->first[lo]);
}

const lm_st_tensor *lm_model_source_find(const lm_model_source *m, const char *name)
{
    if (m->stream)
        return lm_st_stream_find(m->stream, name);
    if (m->cell)
        return *lm_source_cell(m, name);
    return m->n_files ? lm_st_find(m->file[0].st, name) : NULL;
}

const lm_source_weights *lm_source_file_of(const lm_model_source *m, const lm_st_tensor *t)
{
    size_t lo = 0, hi = m->n_placed;

    while (lo < hi) { /* the first file whose table ends behind t */
        size_t mid = lo + (hi - lo) / 2;
        const lm_st *st = m->placed[mid]->st;
        if ((uintptr_t)lm_st_at(st, lm_st_count(st) - 1) < (uintptr_t)t)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < m->n_placed && (uintptr_t)lm_st_at(m->placed[lo]->st, 0) <= (uintptr_t)t
               ? m->placed[lo]
               : NULL;
}

bool lm_source_of_stream(const lm_model_source *m, const lm_st_tensor *t)
{
    size_t n = m->stream ? lm_st_stream_count(m->stream) : 0;
    return n && t >= lm_st_stream_at(m->stream, 0) && t <= lm_st_stream_at(m->stream, n - 1);
}

bool lm_source_is_made(const lm_model_source *m, const lm_st_tensor *t)
{
    size_t n = m->plan ? lm_st_plan_count(m->plan) : 0;
    return n && t >= lm_st_plan_at(m->plan, 0) && t <= lm_st_plan_at(m->plan, n - 1);
}

const char *lm_model_source_file_of(const lm_model_source *m, const lm_st_tensor *t)
{
    if (m->plan)
        return m->path;
    const lm_source_weights *w = lm_source_file_of(m, t);
    return w ? w->name : lm_source_of_stream(m, t) ? m->streamed->name : NULL;
}

size_t lm_model_source_files(const lm_model_source *m)
{
    return m->stream || m->plan ? 1 : m->n_files;
}

const char *lm_model_source_file_at(const lm_model_source *m, size_t i)
{
    if (m->plan)
        return m->path;
    return m->stream ? m->streamed->name : m->file[i].name;
}

uint64_t lm_model_source_bytes(const lm_model_source *m)
{
    uint64_t total = 0;
    for (size_t i = 0; i < lm_model_source_count(m); i++)
        total += lm_model_source_at(m, i)->bytes;
    return total;
}

int64_t lm_model_source_params(const lm_model_source *m)
{
    int64_t total = 0;
    for (size_t i = 0; i < lm_model_source_count(m); i++)
        total += lm_model_source_at(m, i)->count;
    return total;
}

const char *lm_model_source_meta_of(const lm_model_source *m, size_t i, const char *key)
{
    if (m->by || m->stream)
        return lm_model_source_meta(m, key);
    return i < m->n_files ? lm_st_meta(m->file[i].st, key) : NULL;
}

const char *lm_model_source_meta(const lm_model_source *m, const char *key)
{
    if (m->by && m->by->meta)
        return m->by->meta(m->ctx, key);
    if (m->below)
        return lm_model_source_meta(m->below, key);
    if (m->stream)
        return lm_st_stream_meta(m->stream, key);
    return m->n_files ? lm_st_meta(m->file[0].st, key) : NULL;
}

lm_code lm_model_source_digest(const lm_model_source *m, uint64_t *out, lm_err *e)
{
    struct stat st;

    *out = 0;
    if (m->b->std || stat(m->path, &st) || !(S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)))
        return LM_OK;
    return lm_digest_path(m->path, out, e);
}
