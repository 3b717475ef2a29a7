/* SPDX-License-Identifier: Apache-2.0 */
/* source_files.c -- the small files beside the weights of a model: read in place, or kept in memory
 * when a stream delivers them. */
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "format/folder_impl.h"

#define MAX_SMALL ((size_t)16 << 20)  /* most bytes of a JSON file that is read as a tree */
#define MAX_VOCAB ((size_t)256 << 20) /* most bytes of a tokenizer's file */
#define MAX_KEPT  ((size_t)64 << 20)  /* most bytes of a small file of a stream that is kept */
#define MAX_ALL   ((size_t)256 << 20) /* and of all of them together */

const char *lm_source_where(const lm_model_source *m, const char *name, char buf[256])
{
    const lm_bundle_file absent = { name, 0 };
    return lm_bundle_where(m->b, &absent, buf);
}

void lm_folder_files_fini(lm_folder_files *f)
{
    for (size_t i = 0; i < f->n; i++) {
        lm_free(f->v[i].name);
        lm_buf_fini(&f->v[i].data);
    }
    lm_free(f->v);
    *f = (lm_folder_files){ 0 };
}

/* Append an empty file of this name. */
static lm_code add_small(lm_folder_files *f, const char *name, lm_buf **data, lm_err *e)
{
    lm_code rc = lm_grow(&f->v, &f->cap, f->n + 1, sizeof *f->v, "files", e);

    if (rc)
        return rc;
    f->v[f->n] = (struct lm_folder_file){ 0 };
    *data = &f->v[f->n].data;
    rc = lm_strdup(&f->v[f->n].name, name, e);
    f->n += !rc;
    return rc;
}

const struct lm_folder_file *lm_source_kept(const lm_model_source *m, const char *name)
{
    for (size_t i = 0; i < m->small.n; i++)
        if (!strcmp(m->small.v[i].name, name))
            return &m->small.v[i];
    return NULL;
}

lm_code lm_source_keep(lm_model_source *m, const lm_bundle_file *f, lm_err *e)
{
    lm_buf *data = NULL;

    if (f->bytes > MAX_KEPT || f->bytes > MAX_ALL - m->small_bytes)
        return LM_OK;
    m->small_bytes += (size_t)f->bytes;
    lm_code rc = add_small(&m->small, f->name, &data, e);
    return rc ? rc : lm_bundle_load(m->b, f->name, MAX_KEPT, data, e);
}

lm_code lm_source_put(lm_model_source *m, const char *name, const void *data, size_t bytes,
                      lm_err *e)
{
    lm_buf *to = NULL;
    lm_code rc = add_small(&m->small, name, &to, e);
    return rc ? rc : lm_buf_add(to, data, bytes, e);
}

/* A file that was too large to be kept is an error, not absent. */
static bool has_passed(const lm_model_source *m, const char *name)
{
    for (size_t i = 0; i < lm_bundle_count(m->b); i++)
        if (!strcmp(lm_bundle_at(m->b, i)->name, name))
            return true;
    return false;
}

lm_code lm_source_seen(lm_model_source *m, const char *name, size_t limit, lm_buf *out, bool *found,
                       lm_err *e)
{
    const struct lm_folder_file *x = lm_source_kept(m, name);
    char where[256];

    *found = false;
    if (m->streamed && !strcmp(m->streamed->name, name))
        return lm_fail(e, LM_EBUG, m->path, NULL, "the weights are not a small file");
    if (!x && (!lm_bundle_random(m->b) || !lm_bundle_find(m->b, name)))
        return has_passed(m, name) ? lm_fail(e, LM_ELIMIT, lm_source_where(m, name, where),
                                             "give the model as a file",
                                             "too large to be kept from a stream (limits: %zu MiB "
                                             "per file, %zu in total)",
                                             MAX_KEPT >> 20, MAX_ALL >> 20)
                                   : LM_OK;
    *found = true;
    if (!x)
        return lm_bundle_load(m->b, name, limit, out, e);
    if (x->data.len > limit)
        return lm_fail(e, LM_EFORMAT, lm_source_where(m, name, where), NULL,
                       "is larger than the limit of %zu bytes", limit);
    return lm_buf_add(out, x->data.len ? x->data.data : "", x->data.len, e);
}

lm_code lm_model_source_file(lm_model_source *m, const char *name, size_t limit, lm_buf *out,
                             bool *found, lm_err *e)
{
    lm_code rc = lm_source_seen(m, name, limit, out, found, e);

    if (rc || *found || lm_bundle_random(m->b) || m->ended)
        return rc;
    rc = lm_model_source_spool(m, e);
    return rc ? rc : lm_source_seen(m, name, limit, out, found, e);
}

lm_code lm_model_source_file_now(lm_model_source *m, const char *name, size_t limit, lm_buf *out,
                                 bool *found, lm_err *e)
{
    lm_code rc = lm_source_seen(m, name, limit, out, found, e);

    if (rc || *found || lm_bundle_random(m->b) || m->ended)
        return rc;
    rc = lm_grow(&m->missed, &m->cap_missed, m->n_missed + 1, sizeof *m->missed, "files", e);
    if (!rc && !(rc = lm_strdup(&m->missed[m->n_missed], name, e)))
        m->n_missed++;
    return rc;
}

static lm_code json_of(lm_model_source *m, const char *name, size_t limit, const lm_buf *text,
                       json_t **out, lm_err *e)
{
    char where[256];

    lm_source_where(m, name, where);
    if (text->len > limit)
        return lm_fail(e, LM_EFORMAT, where, NULL, "is larger than the limit of %zu bytes", limit);
    return lm_json_parse(text->data ? text->data : "", text->len, where, out, e);
}

lm_code lm_model_source_json(lm_model_source *m, const char *name, json_t **out, lm_err *e)
{
    lm_buf text = { 0 };
    bool found = false;
    lm_code rc = lm_model_source_file_now(m, name, MAX_SMALL, &text, &found, e);

    *out = NULL;
    if (!rc && found)
        rc = json_of(m, name, MAX_SMALL, &text, out, e);
    lm_buf_fini(&text);
    return rc;
}

typedef lm_code find_file(lm_model_source *m, const char *name, size_t limit, lm_buf *out,
                          bool *found, lm_err *e);

/* Append the file that `find` finds, if there is one. */
static lm_code take_file(lm_model_source *m, find_file *find, const char *name, size_t limit,
                         lm_folder_files *out, lm_err *e)
{
    lm_buf text = { 0 }, *data = NULL;
    bool found = false;
    lm_code rc = find(m, name, limit, &text, &found, e);

    if (!rc && found)
        rc = add_small(out, name, &data, e);
    if (!rc && found)
        *data = text;
    else
        lm_buf_fini(&text);
    return rc;
}

lm_code lm_model_source_tokenizer(lm_model_source *m, lm_folder_files *out, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; !rc && lm_tokenizer_files[i]; i++)
        rc = take_file(m, i ? lm_model_source_file_now : lm_model_source_file,
                       lm_tokenizer_files[i], MAX_VOCAB, out, e);
    return rc;
}

lm_code lm_source_take_small(lm_model_source *m, lm_folder_files *out, lm_err *e)
{
    lm_code rc = lm_model_source_tokenizer(m, out, e);
    return rc ? rc
              : take_file(m, lm_model_source_file_now, "generation_config.json", MAX_SMALL, out, e);
}

lm_code lm_source_json(lm_model_source *m, const char *name, size_t limit, json_t **out, lm_err *e)
{
    lm_buf text = { 0 };
    bool found = false;
    lm_code rc = lm_source_seen(m, name, limit, &text, &found, e);

    if (!rc && found)
        rc = json_of(m, name, limit, &text, out, e);
    lm_buf_fini(&text);
    return rc;
}
