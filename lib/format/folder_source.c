/* folder_source.c -- a model read: folder, run folder or lone file -> one list of tensors.
 *
 * A source is a small table of functions, so that forward-only sources (an archive, a pipe) can
 * join; this file holds the common part and the one kind that has files on disk. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/folder.h"
#include "format/folder_run.h"
#include "format/safetensors_table.h"

#define MAX_CONFIG ((size_t)16 << 20)  /* bytes of config.json */
#define MAX_INDEX  ((size_t)256 << 20) /* bytes of model.safetensors.index.json */

struct lm_model_source {
    char *path;
    char *dir; /* NULL: a lone file */
    json_t *config;
    lm_st **file; /* sorted by name */
    size_t n_files;
    size_t *first; /* [n_files + 1]: number of tensors in the files before */
    size_t next;
};

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

static lm_code add_file(lm_model_source *m, const char *path, lm_err *e)
{
    lm_code rc = lm_realloc_n(&m->file, m->n_files + 1, sizeof *m->file, "list of files", e);
    if (!rc)
        rc = lm_st_open(path, &m->file[m->n_files], e);
    if (!rc)
        m->n_files++;
    return rc;
}

static lm_code add_named(lm_model_source *m, const char *name, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_path_join(&path, m->dir, name, e);
    if (!rc)
        rc = add_file(m, path, e);
    lm_free(path);
    return rc;
}

static int by_string(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The different file names of the index's weight_map, sorted; *names is yours, its strings are the
 * tree's. */
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
            return lm_fail(e, LM_EFORMAT, where, NULL, "tensor '%s' has no proper file name",
                           lm_st_show(key, show));
        }
        if (!prev || strcmp(prev, file)) /* runs of one file are the rule */
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

/* Every promise of the index must be kept by the shard it names. */
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
            return lm_fail(e, LM_EFORMAT, where, "fetch the model again",
                           "tensor '%s' should be in %s, which lacks it", lm_st_show(key, show),
                           file);
        if (strcmp(lm_model_source_file_of(m, t), file))
            return lm_fail(e, LM_EFORMAT, where, "fetch the model again",
                           "tensor '%s' should be in %s, it is in %s", lm_st_show(key, show), file,
                           lm_model_source_file_of(m, t));
    }
    if (json_object_size(map) != lm_model_source_count(m))
        return lm_fail(e, LM_EFORMAT, where, "fetch the model again",
                       "it names %zu tensors, the shards hold %zu", json_object_size(map),
                       lm_model_source_count(m));
    return LM_OK;
}

static lm_code check_names(const lm_model_source *m, lm_err *e)
{
    char show[LM_ST_SHOWN];

    for (size_t f = 1; f < m->n_files; f++)
        for (size_t i = 0; i < lm_st_count(m->file[f]); i++) {
            const char *name = lm_st_at(m->file[f], i)->name;
            for (size_t g = 0; g < f; g++)
                if (lm_st_find(m->file[g], name))
                    return lm_fail(e, LM_EFORMAT, lm_st_path(m->file[f]), NULL,
                                   "tensor '%s' is also in %s", lm_st_show(name, show),
                                   lm_path_base(lm_st_path(m->file[g])));
        }
    return LM_OK;
}

static lm_code count_files(lm_model_source *m, lm_err *e)
{
    lm_code rc = lm_alloc_n(&m->first, m->n_files + 1, sizeof *m->first, "list of files", e);

    for (size_t i = 0; !rc && i < m->n_files; i++)
        m->first[i + 1] = m->first[i] + lm_st_count(m->file[i]);
    return rc;
}

static lm_code open_shards(lm_model_source *m, const char *index_path, lm_err *e)
{
    json_t *root = NULL;
    const char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_json_load(index_path, MAX_INDEX, &root, e);
    const json_t *map = rc ? NULL : json_object_get(root, "weight_map");

    if (!rc && !json_is_object(map))
        rc = lm_fail(e, LM_EFORMAT, index_path, NULL, "it has no object 'weight_map'");
    if (!rc)
        rc = shard_names(map, index_path, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        char *path = NULL;
        rc = lm_path_join(&path, m->dir, names[i], e);
        if (!rc && !lm_path_exists(path))
            rc = lm_fail(e, LM_EFORMAT, path, "fetch it again",
                         "shard %zu of %zu that %s names is missing", i + 1, n,
                         lm_path_base(index_path));
        lm_free(path);
        if (!rc)
            rc = add_named(m, names[i], e);
    }
    if (!rc)
        rc = count_files(m, e);
    if (!rc)
        rc = check_names(m, e);
    if (!rc)
        rc = check_index(m, map, index_path, e);
    lm_free(names);
    json_decref(root);
    return rc;
}

/* 1 if dir/name is there; its path in *path (yours) in any case. */
static lm_code probe(const char *dir, const char *name, char **path, bool *there, lm_err *e)
{
    lm_code rc = lm_path_join(path, dir, name, e);
    *there = !rc && lm_path_exists(*path);
    return rc;
}

static lm_code open_config(lm_model_source *m, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_path_join(&path, m->dir, "config.json", e);

    if (!rc)
        rc = lm_json_load(path, MAX_CONFIG, &m->config, e);
    if (!rc && !json_is_object(m->config))
        rc = lm_fail(e, LM_EFORMAT, path, NULL, "it is not a JSON object");
    lm_free(path);
    return rc;
}

static lm_code open_weights(lm_model_source *m, lm_err *e)
{
    char *single = NULL, *index = NULL;
    bool has_single = false, has_index = false;
    lm_code rc = probe(m->dir, "model.safetensors", &single, &has_single, e);

    if (!rc)
        rc = probe(m->dir, "model.safetensors.index.json", &index, &has_index, e);
    if (!rc && has_single) { /* as transformers: the single file comes first */
        rc = add_file(m, single, e);
        if (!rc)
            rc = count_files(m, e);
    } else if (!rc && has_index) {
        rc = open_shards(m, index, e);
    } else if (!rc) {
        rc = lm_fail(e, LM_EUSAGE, m->path, "give a model folder or a .safetensors file",
                     "it has neither model.safetensors nor model.safetensors.index.json");
    }
    lm_free(single);
    lm_free(index);
    return rc;
}

/* A run folder: go to its newest checkpoint once, so that all files are of the same one even when
 * the next appears meanwhile, and so that it is a model when its links were lost. */
static lm_code resolve_dir(lm_model_source *m, lm_err *e)
{
    char *config = NULL, *link = NULL, *latest = NULL;
    bool has_config = false, has_link = false;
    lm_code rc = probe(m->path, "config.json", &config, &has_config, e);

    if (!rc)
        rc = probe(m->path, "latest", &link, &has_link, e);
    if (!rc && (has_link || !has_config))
        rc = lm_run_latest(m->path, &latest, e);
    if (!rc && !has_config && !latest)
        rc = lm_fail(e, LM_EUSAGE, m->path, "give a model folder or a .safetensors file",
                     "it has no config.json");
    if (!rc)
        rc = latest ? lm_path_join(&m->dir, m->path, latest, e) : lm_strdup(&m->dir, m->path, e);
    lm_free(config);
    lm_free(link);
    lm_free(latest);
    return rc;
}

static lm_code open_path(lm_model_source *m, lm_err *e)
{
    struct stat st;
    lm_code rc;

    if (stat(m->path, &st))
        return lm_fail(e, LM_EIO, m->path, "give a model folder or a .safetensors file",
                       "cannot open");
    if (!S_ISDIR(st.st_mode)) {
        rc = add_file(m, m->path, e);
        return rc ? rc : count_files(m, e);
    }
    rc = resolve_dir(m, e);
    if (!rc)
        rc = open_config(m, e);
    return rc ? rc : open_weights(m, e);
}

lm_code lm_model_source_open(const char *path, const lm_bundle_opts *o, lm_model_source **out,
                             lm_err *e)
{
    (void)o;
    lm_model_source *m = NULL;
    lm_code rc = lm_alloc_n(&m, 1, sizeof *m, "model", e);

    *out = NULL;
    if (!rc)
        rc = lm_strdup(&m->path, path, e);
    if (!rc)
        rc = open_path(m, e);
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
        lm_st_close(m->file[i]);
    lm_free(m->file);
    lm_free(m->first);
    json_decref(m->config);
    lm_free(m->dir);
    lm_free(m->path);
    lm_free(m);
}

/* ---- Asking ---- */

const char *lm_model_source_path(const lm_model_source *m)
{
    return m->path;
}

const char *lm_model_source_dir(const lm_model_source *m)
{
    return m->dir;
}

const json_t *lm_model_source_config(const lm_model_source *m)
{
    return m->config;
}

bool lm_model_source_random(const lm_model_source *m)
{
    return m->n_files > 0;
}

size_t lm_model_source_count(const lm_model_source *m)
{
    return m->first[m->n_files];
}

const lm_st_tensor *lm_model_source_at(const lm_model_source *m, size_t i)
{
    size_t f = 0;
    while (i >= m->first[f + 1])
        f++;
    return lm_st_at(m->file[f], i - m->first[f]);
}

const lm_st_tensor *lm_model_source_find(const lm_model_source *m, const char *name)
{
    const lm_st_tensor *t = NULL;
    for (size_t f = 0; f < m->n_files && !t; f++)
        t = lm_st_find(m->file[f], name);
    return t;
}

/* The file that t belongs to: t points into its table. */
static const lm_st *file_of(const lm_model_source *m, const lm_st_tensor *t)
{
    for (size_t f = 0; f < m->n_files; f++) {
        size_t n = lm_st_count(m->file[f]);
        if (n && t >= lm_st_at(m->file[f], 0) && t <= lm_st_at(m->file[f], n - 1))
            return m->file[f];
    }
    return NULL;
}

const char *lm_model_source_file_of(const lm_model_source *m, const lm_st_tensor *t)
{
    const lm_st *s = file_of(m, t);
    return s ? lm_path_base(lm_st_path(s)) : NULL;
}

size_t lm_model_source_files(const lm_model_source *m)
{
    return m->n_files;
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

const char *lm_model_source_meta(const lm_model_source *m, const char *key)
{
    return m->n_files ? lm_st_meta(m->file[0], key) : NULL;
}

/* ---- Data ---- */

lm_code lm_model_source_next(lm_model_source *m, const lm_st_tensor **t, lm_err *e)
{
    (void)e;
    *t = m->next < lm_model_source_count(m) ? lm_model_source_at(m, m->next++) : NULL;
    return LM_OK;
}

const void *lm_model_source_data(const lm_model_source *m, const lm_st_tensor *t)
{
    const lm_st *s = file_of(m, t);
    return s ? lm_st_data(s, t) : NULL;
}

bool lm_model_source_aligned(const lm_model_source *m, const lm_st_tensor *t)
{
    const lm_st *s = file_of(m, t);
    return s && lm_st_aligned(s, t);
}

lm_code lm_model_source_read(const lm_model_source *m, const lm_st_tensor *t, uint64_t from,
                             void *dst, size_t bytes, lm_err *e)
{
    const lm_st *s = file_of(m, t);
    if (!s)
        return lm_fail(e, LM_EBUG, m->path, NULL, "a tensor of another model was asked for");
    return lm_st_read(s, t, from, dst, bytes, e);
}

lm_code lm_model_source_load(const lm_model_source *m, const lm_st_tensor *t, lm_dtype to,
                             void *dst, lm_err *e)
{
    const lm_st *s = file_of(m, t);
    if (!s)
        return lm_fail(e, LM_EBUG, m->path, NULL, "a tensor of another model was asked for");
    return lm_st_load(s, t, to, dst, e);
}
