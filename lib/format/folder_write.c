/* folder_write.c -- a Hugging Face folder written: shards planned first, tensors streamed through,
 * the small files beside them, published as a whole. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/folder.h"
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

struct lm_folder {
    char *target; /* as given, for messages */
    lm_outdir *dir;
    lm_st_plan **plan; /* one a shard */
    size_t n_shards, cur;
    lm_st_writer *writer; /* of shard `cur` */
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

/* Messages name the file as it will be, not where it is being made. */
static lm_code named(const lm_folder *f, lm_code rc, lm_err *e)
{
    const char *temp = f->dir ? lm_outdir_path(f->dir) : NULL;
    char rest[sizeof e->where];
    size_t n = temp ? strlen(temp) : 0;

    if (!rc || !temp || strncmp(e->where, temp, n))
        return rc;
    snprintf(rest, sizeof rest, "%s", e->where + n);
    n = strlen(f->target);
    while (n > 1 && f->target[n - 1] == '/')
        n--;
    snprintf(e->where, sizeof e->where, "%.*s%.90s", n < 160 ? (int)n : 160, f->target, rest);
    return rc;
}

static lm_code check_room(const lm_folder *f, lm_err *e)
{
    struct statvfs fs;

    if (statvfs(lm_outdir_path(f->dir), &fs))
        return LM_OK;
    return lm_st_check_room(&fs, f->bytes, f->target, e);
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
    uint64_t limit = spec->max_shard_bytes ? spec->max_shard_bytes : LM_MAX_SHARD_BYTES;
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

lm_code lm_folder_put(lm_folder *f, const char *name, const void *data, size_t bytes, lm_err *e)
{
    char *path = NULL, show[LM_ST_SHOWN];
    lm_out *out = NULL;
    lm_code rc;

    if (!lm_name_ok(name))
        return lm_fail(e, LM_EUSAGE, lm_outdir_path(f->dir), NULL,
                       "'%s' cannot be the name of a file in a model folder",
                       lm_st_show(name, show));
    rc = lm_path_join(&path, lm_outdir_path(f->dir), name, e);
    if (!rc)
        rc = lm_out_open(path, false, &out, e);
    if (!rc && (rc = lm_write_all(lm_out_fd(out), data, bytes, path, e)))
        lm_out_drop(out);
    else if (!rc)
        rc = lm_out_commit(out, e);
    lm_free(path);
    return named(f, rc, e);
}

lm_code lm_folder_copy(lm_folder *f, const char *name, const char *from, lm_err *e)
{
    lm_buf data = { 0 };
    lm_code rc = lm_file_read(from, MAX_SMALL, &data, e);

    if (!rc)
        rc = lm_folder_put(f, name, data.data ? data.data : "", data.len, e);
    lm_buf_fini(&data);
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
        return lm_folder_copy(f, "tokenizer.json", from, e);
    for (int i = 0; !rc && lm_tokenizer_files[i]; i++) {
        char *path = NULL;
        rc = lm_path_join(&path, from, lm_tokenizer_files[i], e);
        if (!rc && lm_path_exists(path))
            rc = lm_folder_copy(f, lm_tokenizer_files[i], path, e);
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

static lm_code open_shard(lm_folder *f, lm_err *e)
{
    char name[64], *path = NULL;
    lm_code rc;

    shard_name(name, f->cur, f->n_shards);
    rc = lm_path_join(&path, lm_outdir_path(f->dir), name, e);
    if (!rc)
        rc = lm_st_create(path, false, f->plan[f->cur], &f->writer, e);
    lm_free(path);
    return rc;
}

/* Close shards that are complete and begin the next; the last one stays open until commit. */
static lm_code roll(lm_folder *f, lm_err *e)
{
    lm_code rc = LM_OK;

    while (!rc && !lm_st_next(f->writer) && f->cur + 1 < f->n_shards) {
        lm_st_writer *w = f->writer;
        f->writer = NULL;
        rc = lm_st_commit(w, e);
        f->cur++;
        if (!rc)
            rc = open_shard(f, e);
    }
    return rc;
}

lm_code lm_folder_create(const char *path, bool force, const lm_bundle_opts *o,
                         const lm_folder_spec *spec, lm_folder **out, lm_err *e)
{
    (void)o;
    lm_folder *f = NULL;
    lm_code rc = lm_alloc_n(&f, 1, sizeof *f, "model folder", e);

    *out = NULL;
    if (rc)
        return rc;
    rc = lm_strdup(&f->target, path, e);
    if (!rc)
        rc = plan_shards(f, spec, e);
    if (!rc && (rc = lm_outdir_open(path, force, &f->dir, e)))
        f->dir = NULL;
    if (!rc)
        rc = check_room(f, e);
    if (!rc)
        rc = put_json(f, "config.json", spec->config, e);
    if (!rc && spec->generation_config)
        rc = put_json(f, "generation_config.json", spec->generation_config, e);
    if (!rc && spec->tokenizer)
        rc = put_tokenizer(f, spec->tokenizer, e);
    if (!rc && f->n_shards > 1)
        rc = put_index(f, lm_st_plan_count(spec->plan), e);
    if (!rc)
        rc = open_shard(f, e);
    if (!rc)
        rc = roll(f, e);
    if (rc) {
        named(f, rc, e);
        lm_folder_drop(f);
        return rc;
    }
    *out = f;
    return LM_OK;
}

const char *lm_folder_path(const lm_folder *f)
{
    return lm_outdir_path(f->dir);
}

const lm_st_tensor *lm_folder_next(const lm_folder *f)
{
    return f->writer ? lm_st_next(f->writer) : NULL;
}

/* After a failure there is no writer: only drop is left. */
static lm_code check_open(const lm_folder *f, lm_err *e)
{
    return f->writer ? LM_OK : lm_fail(e, LM_EBUG, "model folder", NULL, "used after a failure");
}

lm_code lm_folder_write(lm_folder *f, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = check_open(f, e);

    if (!rc)
        rc = lm_st_write(f->writer, data, bytes, e);
    if (!rc)
        rc = roll(f, e);
    return named(f, rc, e);
}

lm_code lm_folder_write_as(lm_folder *f, lm_dtype from, const void *data, int64_t count, lm_err *e)
{
    lm_code rc = check_open(f, e);

    if (!rc)
        rc = lm_st_write_as(f->writer, from, data, count, e);
    if (!rc)
        rc = roll(f, e);
    return named(f, rc, e);
}

lm_code lm_folder_commit(lm_folder *f, lm_err *e)
{
    lm_st_writer *w = f->writer;
    lm_code rc = check_open(f, e);

    f->writer = NULL;
    if (!rc && f->cur + 1 < f->n_shards) {
        rc = lm_fail(e, LM_EBUG, "model folder", NULL, "only %zu of %zu shards were written",
                     f->cur, f->n_shards);
        lm_st_drop(w);
    } else if (!rc) {
        rc = named(f, lm_st_commit(w, e), e);
    }
    if (!rc) {
        lm_outdir *dir = f->dir;
        f->dir = NULL;
        rc = lm_outdir_commit(dir, e);
    }
    lm_folder_drop(f);
    return rc;
}

void lm_folder_drop(lm_folder *f)
{
    if (!f)
        return;
    lm_st_drop(f->writer);
    if (f->dir)
        lm_outdir_drop(f->dir);
    for (size_t i = 0; i < f->n_shards; i++)
        lm_st_plan_free(f->plan[i]);
    lm_free(f->plan);
    lm_free(f->target);
    lm_free(f);
}
