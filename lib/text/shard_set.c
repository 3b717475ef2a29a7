/* SPDX-License-Identifier: Apache-2.0 */
/* shard_set.c -- see shard_set.h. */
#include "text/shard_set.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/owner.h"
#include "base/stop.h"
#include "base/stream.h"
#include "base/text.h"
#include "format/folder.h"
#include "format/tokens_meta.h"
#include "text/tokenizer_match.h"

typedef struct {
    const lm_shard_opts *o;
    lm_shard_set *set;
    lm_par *par;
    lm_tokenizer *tok;
    lm_chat *chat; /* of records */
    lm_text_example_maker maker;
    lm_input *in;
    lm_tokens **shards; /* inputs that are token datasets */
    lm_outdir *dir;     /* the folder is replaced by one rename; NULL: file by file */
    const char *where;  /* the folder written to: the output, or the temporary that replaces it */
    lm_out *meta;
    lm_shard_job job;
    int64_t *taken; /* documents of 'train' by source */
} work;

static const char *const split_names[LM_SPLITS] = { "train", "val" };

/* ---- inputs ---- */

static lm_code find_eos(work *w, lm_err *e)
{
    w->set->eos = -1;
    if (!w->o->eos)
        return LM_OK;
    if (w->o->eos_token)
        w->set->eos = lm_tokenizer_id(w->tok, w->o->eos_token, strlen(w->o->eos_token));
    else
        w->set->eos = w->o->eos_id >= 0 ? w->o->eos_id : lm_tokenizer_eos(w->tok);
    if (w->set->eos >= 0)
        return LM_OK;
    if (w->o->eos_token)
        return lm_fail(e, LM_EUSAGE, "end-of-text token", "choose one that is in it",
                       "the tokenizer has no token '%s'", w->o->eos_token);
    return lm_fail(e, LM_EUSAGE, w->o->tokenizer, "name an end-of-text token, or use none",
                   "the tokenizer has no end-of-text token");
}

/* The template that is asked for, or that of the folder which holds the tokenizer:
 * chat_template.jinja, or that of a model.  w->chat stays NULL when there is none. */
static lm_code open_template(work *w, lm_err *e)
{
    const char *folder = w->o->tokenizer;
    lm_model_source *m = NULL;
    lm_err none = { 0 };
    char *path = NULL;
    if (w->o->chat_template)
        return lm_chat_open(NULL, w->tok, w->o->chat_template, &w->chat, e);
    if (!lm_path_is_dir(folder))
        return LM_OK;
    lm_code rc = lm_path_join(&path, folder, "chat_template.jinja", e);
    if (!rc && lm_path_exists(path)) {
        rc = lm_chat_open(NULL, w->tok, path, &w->chat, e);
    } else if (!rc && !lm_model_source_open(folder, NULL, &m, &none)) {
        rc = lm_chat_open(m, w->tok, NULL, &w->chat, &none);
        if (rc == LM_EUSAGE) /* the model has none */
            rc = LM_OK;
        else if (rc)
            *e = none;
    }
    lm_model_source_close(m);
    lm_free(path);
    return rc;
}

/* How records become examples. */
static lm_code open_records(work *w, lm_err *e)
{
    if (!w->o->records)
        return LM_OK;
    if (w->o->kind != LM_TOKENS_MEGATRON && w->o->kind != LM_TOKENS_AUTO)
        return lm_fail(e, LM_EUSAGE, "shard format", "choose megatron",
                       "%s shards have no loss marks", lm_tokens_kind_name(w->o->kind));
    if (open_template(w, e))
        return e->code;
    w->maker = (lm_text_example_maker){ .tok = w->tok,
                                        .chat = w->chat,
                                        .wrap = w->o->chat_template != NULL,
                                        .loss_on = w->o->loss_on,
                                        .eos = w->set->eos };
    w->job.maker = &w->maker;
    w->job.map = w->o->map;
    w->set->masked = true;
    return LM_OK;
}

static lm_code open_text(work *w, lm_err *e)
{
    lm_code rc = lm_tokenizer_load(w->o->tokenizer, &w->tok, e);
    if (!rc)
        rc = find_eos(w, e);
    if (!rc)
        rc = open_records(w, e);
    if (!rc)
        rc = lm_input_open(&w->o->in, w->o->path, w->o->n, &w->in, e);
    if (rc)
        return rc;
    w->set->vocab = lm_tokenizer_vocab_size(w->tok);
    w->set->tokenizer = lm_tokenizer_identity(w->tok);
    lm_input_files_warn(lm_input_file_list(w->in), w->o->sink);
    if (w->o->vocab && w->o->vocab < w->set->vocab)
        return lm_fail(e, LM_EUSAGE, "vocabulary size", "give at least as much",
                       "%lld is less than the tokenizer's %lld", (long long)w->o->vocab,
                       (long long)w->set->vocab);
    return LM_OK;
}

static lm_code open_dataset(work *w, int i, lm_err *e)
{
    lm_tokens **t = &w->shards[i];
    lm_code rc = lm_tokens_open(w->o->path[i], w->o->from, w->o->eos_id, t, e);
    if (!rc)
        rc = lm_tokens_index(*t, w->par, e);
    if (rc)
        return rc;
    if (w->o->eos_id >= 0 && lm_tokens_eot(*t) != w->o->eos_id)
        return lm_fail(e, LM_EUSAGE, "end-of-text id", "leave it out",
                       "%lld is given, but %s has %lld between its documents, by its meta.json",
                       (long long)w->o->eos_id, w->o->path[i], (long long)lm_tokens_eot(*t));
    int64_t top = (int64_t)lm_tokens_max(*t, w->par) + 1;
    top = lm_tokens_vocab(*t) > top ? lm_tokens_vocab(*t) : top;
    if (w->o->vocab)
        rc = lm_tokens_check(*t, w->o->vocab, w->par, e);
    w->set->vocab = top > w->set->vocab ? top : w->set->vocab;
    w->set->masked |= lm_tokens_masked(*t);
    if (w->o->eos && w->set->eos < 0)
        w->set->eos = lm_tokens_eot(*t);
    return rc;
}

/* The common tokenizer of all datasets, if each names it. */
static lm_code agree_tokenizer(work *w, lm_err *e)
{
    lm_code rc = LM_OK;
    bool known = true;
    for (int i = 0; i < w->o->n && !rc; i++) {
        lm_tokens_tokenizer a = lm_tokens_made_with(w->shards[0]);
        lm_tokens_tokenizer b = lm_tokens_made_with(w->shards[i]);
        if (w->o->check_tokenizer)
            for (int k = 0; k < i && !rc; k++)
                rc = lm_tokens_check_same(w->shards[k], w->shards[i], e);
        known &= b.ids && a.ids == b.ids && a.digest == b.digest;
    }
    if (known)
        w->set->tokenizer = lm_tokens_made_with(w->shards[0]);
    return rc;
}

static lm_code open_shards(work *w, lm_err *e)
{
    lm_code rc = lm_alloc_n(&w->shards, (size_t)w->o->n, sizeof *w->shards, "shards", e);
    w->set->eos = w->o->eos ? w->o->eos_id : -1;
    for (int i = 0; i < w->o->n && !rc; i++)
        rc = open_dataset(w, i, e);
    if (!rc)
        rc = agree_tokenizer(w, e);
    if (rc)
        return rc;
    if (w->set->vocab > UINT32_MAX)
        return lm_fail(e, LM_EFORMAT, w->o->path[0], "shard the text again",
                       "it holds ids that are negative or beyond 32 bits");
    if (w->set->eos < 0 && w->o->eos && w->o->kind != LM_TOKENS_MEGATRON)
        return lm_fail(e, LM_EUSAGE, "end-of-text id", "give the id, or use none",
                       "%s shards need an id between documents, the input does not name it",
                       lm_tokens_kind_name(w->o->kind));
    if (w->set->eos >= w->set->vocab)
        w->set->vocab = w->set->eos + 1;
    w->job.masked = w->set->masked;
    if (w->set->masked && w->o->kind != LM_TOKENS_MEGATRON && w->o->kind != LM_TOKENS_AUTO)
        return lm_fail(e, LM_EUSAGE, "shard format", "choose megatron",
                       "an input has loss marks, which %s shards do not hold",
                       lm_tokens_kind_name(w->o->kind));
    return LM_OK;
}

/* ---- outputs ---- */

static lm_code target(const work *w, const char *name, lm_buf *out, lm_err *e)
{
    size_t n = strlen(w->where);
    out->len = 0;
    return lm_buf_addf(out, e, "%s%s%s", w->where, n && w->where[n - 1] == '/' ? "" : "/", name);
}

/* The files of an operand: itself, or PREFIX.bin. */
static bool same_file(const char *target, const char *input)
{
    lm_buf bin = { 0 };
    bool same = lm_path_same(target, input);
    if (!same && !lm_buf_addf(&bin, NULL, "%s.bin", input))
        same = lm_path_same(target, bin.data);
    lm_buf_fini(&bin);
    return same;
}

/* An lm_own_fn: the files of a dataset of either split, and meta.json. */
static bool is_own(const void *none, const char *name)
{
    (void)none;
    return !strcmp(name, "meta.json") || lm_tokens_own(split_names[LM_SPLIT_TRAIN], name) ||
           lm_tokens_own(split_names[LM_SPLIT_VAL], name);
}

/* True if an input lies in the output folder under a name that the output will use. */
static bool is_replaced(const work *w, const char *input)
{
    char folder[PATH_MAX], out[PATH_MAX];
    lm_buf shard = { 0 };
    const char *base = lm_path_base(input);
    bool in = realpath(w->o->output, out) && !lm_path_folder(input, folder, NULL) &&
              !strcmp(folder, out) &&
              (is_own(NULL, base) ||
               (!lm_buf_addf(&shard, NULL, "%s.bin", base) && is_own(NULL, shard.data)));
    lm_buf_fini(&shard);
    return in;
}

/* Refused with force too: datasets are mapped while the new ones are written, but afterwards the
 * input would be lost. */
static lm_code refuse_inputs(const work *w, lm_err *e)
{
    lm_buf path = { 0 };
    lm_code rc = LM_OK;
    for (int s = 0; s < LM_SPLITS && !rc; s++) {
        rc = target(w, split_names[s], &path, e);
        rc = rc ? rc : lm_buf_addf(&path, e, ".bin");
        for (int i = 0; i < w->o->n && !rc; i++)
            if (same_file(path.data, w->o->path[i]) || is_replaced(w, w->o->path[i]))
                rc = lm_fail(e, LM_EUSAGE, w->o->output, "write to another folder",
                             "%s is both an input and the output", w->o->path[i]);
    }
    lm_buf_fini(&path);
    return rc;
}

/* True if the output has a file of this name, which replaces an existing one. */
static bool is_written(const work *w, const char *name)
{
    for (int s = 0; s < LM_SPLITS; s++) {
        size_t n = strlen(split_names[s]);
        if (strncmp(name, split_names[s], n) != 0 || (s == LM_SPLIT_VAL && w->o->val_fraction <= 0))
            continue;
        if (w->o->shard_tokens
                ? name[n] == '_'
                : !strcmp(name + n, ".bin") || (w->o->kind == LM_TOKENS_MEGATRON &&
                                                (!strcmp(name + n, ".idx") ||
                                                 (w->set->masked && !strcmp(name + n, ".mask")))))
            return true;
    }
    return false;
}

/* With force: refuse files that would be lost.  Old shards are removed because readers would mix
 * them with new ones, but only if a meta.json of an earlier dataset describes them; the meta.json
 * of another program is kept. */
static lm_code refuse_foreign(work *w, lm_err *e)
{
    lm_tokens_meta meta;
    lm_err unread = { 0 }; /* not valid JSON: of another program */
    lm_buf path = { 0 };
    char **names = NULL;
    size_t n = 0;
    lm_code rc = target(w, split_names[LM_SPLIT_TRAIN], &path, e);
    lm_code read = rc ? rc : lm_tokens_meta_read(path.data, &meta, &unread);
    bool ours = !read && meta.there;
    if (!rc && read && read != LM_EFORMAT) {
        *e = unread;
        rc = read;
    }
    if (!rc && !ours && lm_path_is_dir(w->o->output))
        rc = lm_dir_list(w->o->output, &names, &n, e);
    for (size_t i = 0; i < n && !rc; i++)
        if (is_own(NULL, names[i]) && !is_written(w, names[i]))
            rc = lm_fail(
                e, LM_EUSAGE, w->o->output, "choose another folder, or move that file elsewhere",
                "holds '%s', which shard-data did not write and which would be lost", names[i]);
    lm_names_free(names, n);
    lm_buf_fini(&path);
    return rc;
}

/* The folders above the output. */
static lm_code make_parents(const char *output, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_strdup(&path, output, e);
    size_t n = rc ? 0 : strlen(path);
    while (n > 1 && path[n - 1] == '/')
        path[--n] = 0;
    char *slash = rc ? NULL : strrchr(path, '/');
    if (slash && slash > path) {
        *slash = 0;
        rc = lm_mkdir_p(path, e);
    }
    lm_free(path);
    return rc;
}

/* If possible, one rename replaces the whole dataset.  If the folder holds other files, or may not
 * be moved, its files are replaced one by one. */
static lm_code open_folder(work *w, lm_err *e)
{
    bool there = lm_path_exists(w->o->output);
    lm_code rc = LM_OK;
    if (there && !lm_path_is_dir(w->o->output))
        return lm_fail(e, LM_EUSAGE, w->o->output, "name a folder", "exists and is not a folder");
    if (!there)
        rc = make_parents(w->o->output, e);
    else
        lm_owner_sweep(w->o->output, false);
    if (rc || (there && !lm_outdir_fits(w->o->output, w->o->force, is_own, NULL)))
        return rc;
    if ((rc = lm_outdir_open(w->o->output, w->o->force, is_own, NULL, &w->dir, e)))
        w->dir = NULL;
    else
        w->where = lm_outdir_path(w->dir);
    return rc;
}

static lm_code open_outputs(work *w, lm_err *e)
{
    lm_buf path = { 0 };
    lm_code rc = refuse_inputs(w, e);
    if (!rc && w->o->force)
        rc = refuse_foreign(w, e);
    if (!rc)
        rc = open_folder(w, e);
    for (int s = 0; s < LM_SPLITS && !rc && !w->o->force; s++) {
        rc = target(w, split_names[s], &path, e);
        if (!rc)
            rc = lm_tokens_clear(path.data, false, e);
    }
    if (!rc)
        rc = target(w, "meta.json", &path, e);
    if (!rc)
        rc = lm_out_open(path.data, w->o->force, &w->meta, e);
    for (int s = 0; s < LM_SPLITS && !rc; s++)
        if (s == LM_SPLIT_TRAIN || w->o->val_fraction > 0)
            rc = lm_tokens_pool_new(w->where, w->o->n, w->set->vocab, w->set->masked,
                                    &w->job.pool[s], e);
    lm_buf_fini(&path);
    return rc;
}

/* Write a pool to its dataset; the writer in *out is committed later, with the others. */
static lm_code write_split(work *w, int s, lm_tokens_writer **out, lm_err *e)
{
    const lm_tokens_writer_opts o = { .kind = w->o->kind,
                                      .vocab = w->set->vocab,
                                      .shard_tokens = w->o->shard_tokens,
                                      .mask = w->set->masked,
                                      .force = w->o->force };
    bool train = s == LM_SPLIT_TRAIN;
    const lm_tokens_mix mix = { .shuffle = w->o->shuffle,
                                .seed = w->o->seed,
                                .weight = train ? w->o->weight : NULL,
                                .tokens = train ? w->o->tokens : 0,
                                .max_epochs = w->o->tokens ? w->o->max_epochs : 1 };
    lm_buf path = { 0 };
    lm_code rc = target(w, split_names[s], &path, e);
    if (!rc)
        rc = lm_tokens_create(path.data, &o, out, e);
    if (!rc)
        rc = lm_tokens_pool_write(w->job.pool[s], &mix, *out, train ? w->taken : NULL, w->o->sink,
                                  e);
    if (!rc) {
        w->set->tokens[s] = lm_tokens_written(*out);
        w->set->docs[s] = lm_tokens_written_docs(*out);
    }
    lm_buf_fini(&path);
    return rc;
}

/* ---- meta.json ---- */

static lm_code digest_input(const work *w, int i, uint64_t *out, lm_err *e)
{
    if (w->in) {
        *out = lm_input_digest(w->in, i);
        return LM_OK;
    }
    lm_buf path = { 0 };
    lm_code rc = lm_buf_addf(&path, e, "%s", w->o->path[i]);
    if (!rc && (!lm_path_exists(path.data) || lm_path_is_dir(path.data)))
        rc = lm_buf_addf(&path, e, ".bin");
    *out = 0; /* numbered shards have other names */
    if (!rc && lm_path_exists(path.data))
        rc = lm_digest_path(path.data, out, e);
    lm_buf_fini(&path);
    return rc;
}

static lm_code put_history(const work *w, lm_jw *j, lm_err *e)
{
    lm_history_step step = w->o->step;
    lm_history_input *inputs = NULL;
    size_t n = (size_t)w->o->n;
    lm_code rc = lm_alloc_n(&inputs, n + 1, sizeof *inputs, "inputs", e);
    for (int i = 0; i < w->o->n && !rc; i++) {
        inputs[i].name = w->o->path[i];
        rc = digest_input(w, i, &inputs[i].digest, e);
    }
    if (!rc && w->tok) {
        inputs[n].name = w->o->tokenizer;
        if (!lm_stream_is(w->o->tokenizer)) /* the input has been read by now */
            rc = lm_digest_path(w->o->tokenizer, &inputs[n].digest, e);
        n++;
    }
    step.inputs = inputs;
    step.n_inputs = n;
    if (!rc)
        rc = lm_history_write(j, "history", &step, e);
    lm_free(inputs);
    return rc;
}

static void put_sources(const work *w, lm_jw *j)
{
    lm_jw_arr(j, "sources");
    for (int i = 0; i < w->o->n; i++) {
        lm_jw_obj(j, NULL);
        lm_jw_str(j, "name", w->o->path[i]);
        if (w->o->weight)
            lm_jw_f64(j, "weight", w->o->weight[i]);
        lm_jw_int(j, "documents", lm_tokens_pool_docs(w->job.pool[LM_SPLIT_TRAIN], i));
        lm_jw_int(j, "tokens", lm_tokens_pool_tokens(w->job.pool[LM_SPLIT_TRAIN], i));
        lm_jw_int(j, "documents_taken", w->taken[i]);
        lm_jw_close_obj(j);
    }
    lm_jw_close_arr(j);
}

static lm_code make_meta(const work *w, int indent, lm_buf *out, lm_err *e)
{
    lm_jw j;
    lm_jw_begin(&j, out, indent, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "format", lm_tokens_kind_name(w->o->kind));
    lm_jw_int(&j, "vocab_size", w->set->vocab);
    if (w->set->eos >= 0)
        lm_jw_int(&j, "eos_token_id", w->set->eos);
    else
        lm_jw_str(&j, "eos_token_id", NULL);
    lm_tokens_meta_write_tokenizer(&j, &w->set->tokenizer);
    for (int s = 0; s < LM_SPLITS; s++) {
        lm_jw_obj(&j, split_names[s]);
        lm_jw_int(&j, "documents", w->set->docs[s]);
        lm_jw_int(&j, "tokens", w->set->tokens[s]);
        lm_jw_close_obj(&j);
    }
    lm_jw_f64(&j, "val_fraction", w->o->val_fraction);
    lm_jw_bool(&j, "contiguous", w->o->contiguous);
    lm_jw_bool(&j, "shuffle", w->o->shuffle);
    lm_jw_int(&j, "seed", (int64_t)w->o->seed);
    lm_jw_int(&j, "bytes", w->set->read.bytes);
    lm_jw_int(&j, "skipped", w->set->read.skipped);
    if (w->set->masked)
        lm_jw_bool(&j, "loss_marks", true);
    put_sources(w, &j);
    lm_code rc = put_history(w, &j, e);
    lm_jw_close_obj(&j);
    lm_code end = lm_jw_end(&j);
    if (!rc && !end && (!out->len || out->data[out->len - 1] != '\n'))
        rc = lm_buf_add(out, "\n", 1, e);
    return rc ? rc : end;
}

/* ---- making the dataset ---- */

static lm_code fill_pools(work *w, lm_err *e)
{
    lm_code rc = LM_OK;
    w->job.val_fraction = w->o->val_fraction;
    w->job.contiguous = w->o->contiguous;
    w->job.eos = w->set->eos;
    w->job.eos_first = w->o->kind == LM_TOKENS_LLMC;
    w->job.add_special = w->o->add_special;
    w->job.sink = w->o->sink;
    if (w->in)
        rc = lm_shard_text(&w->job, w->in, &w->o->in, w->tok, w->par, &w->set->read, e);
    for (int i = 0; w->shards && i < w->o->n && !rc; i++)
        rc = lm_shard_tokens(&w->job, w->shards[i], i, &w->set->read, e);
    if (rc || lm_stopping())
        return rc;
    if (!w->set->read.documents)
        return lm_fail(e, LM_EFORMAT, w->o->n == 1 ? w->o->path[0] : "inputs",
                       "give at least one document", "no document in it");
    if (!lm_tokens_pool_tokens(w->job.pool[LM_SPLIT_TRAIN], -1))
        return lm_fail(e, LM_EUSAGE, "validation fraction", "hold out less",
                       "all of %lld document%s fell into the validation split",
                       (long long)w->set->read.documents,
                       lm_plural((uint64_t)w->set->read.documents));
    return LM_OK;
}

/* All files are on disk before they are renamed.  The old meta.json is removed first and the new
 * one renamed last, because neither describes the files in between. */
static lm_code finish(work *w, lm_tokens_writer *writer[LM_SPLITS], lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = make_meta(w, 2, &text, e);
    if (!rc)
        rc = lm_write_all(lm_out_fd(w->meta), text.data, text.len, lm_out_path(w->meta), e);
    if (!rc)
        rc = lm_out_finish(w->meta, e);
    for (int s = 0; s < LM_SPLITS && !rc; s++)
        if (writer[s])
            rc = lm_tokens_finish(writer[s], e);
    if (!rc && w->o->force && unlink(lm_out_path(w->meta)) && errno != ENOENT)
        rc = lm_fail(e, LM_EIO, lm_out_path(w->meta), NULL, "cannot remove");
    lm_buf_fini(&text);
    return rc;
}

static lm_code publish(work *w, lm_tokens_writer *writer[LM_SPLITS], lm_err *e)
{
    lm_buf path = { 0 };
    lm_code rc = finish(w, writer, e);
    for (int s = LM_SPLITS - 1; s >= 0 && !rc; s--) {
        lm_tokens_writer *one = writer[s];
        writer[s] = NULL;
        if (one)
            rc = lm_tokens_commit(one, e);
        else if (!(rc = target(w, split_names[s], &path, e)))
            rc = lm_tokens_clear(path.data, w->o->force, e);
    }
    if (!rc) {
        lm_out *meta = w->meta;
        w->meta = NULL;
        rc = lm_out_commit(meta, e);
    }
    if (!rc && w->dir) {
        lm_outdir *dir = w->dir;
        w->dir = NULL;
        rc = lm_outdir_commit(dir, e);
    }
    lm_buf_fini(&path);
    return rc;
}

static lm_code make_set(work *w, lm_buf *meta, lm_err *e)
{
    lm_tokens_writer *writer[LM_SPLITS] = { 0 };
    lm_code rc = w->o->tokenizer ? open_text(w, e) : open_shards(w, e);
    if (!rc && w->o->vocab)
        w->set->vocab = w->o->vocab;
    if (!rc && w->set->eos >= w->set->vocab)
        rc = lm_fail(e, LM_EUSAGE, "end-of-text id",
                     "give one that is below, or a larger vocabulary size",
                     "%lld is not below the vocabulary of %lld", (long long)w->set->eos,
                     (long long)w->set->vocab);
    if (!rc && w->o->kind == LM_TOKENS_NANOGPT && w->set->vocab > 65536)
        rc = lm_fail(e, LM_EUSAGE, "shard format", "choose megatron or llmc",
                     "nanoGPT shards hold 16-bit ids, the vocabulary has %lld",
                     (long long)w->set->vocab);
    if (!rc)
        rc = open_outputs(w, e);
    if (!rc)
        rc = fill_pools(w, e);
    for (int s = 0; s < LM_SPLITS && !rc && !lm_stopping(); s++)
        if (w->job.pool[s] && lm_tokens_pool_docs(w->job.pool[s], -1))
            rc = write_split(w, s, &writer[s], e);
    if (!rc && !lm_stopping()) {
        rc = publish(w, writer, e);
        rc = rc ? rc : make_meta(w, 0, meta, e);
    }
    for (int s = 0; s < LM_SPLITS; s++)
        lm_tokens_drop(writer[s]);
    return rc;
}

static void close_work(work *w)
{
    lm_out_drop(w->meta);
    for (int s = 0; s < LM_SPLITS; s++)
        lm_tokens_pool_free(w->job.pool[s]);
    for (int i = 0; w->shards && i < w->o->n; i++)
        lm_tokens_close(w->shards[i]);
    lm_outdir_drop(w->dir);
    lm_free(w->shards);
    lm_input_close(w->in);
    lm_tokenizer_free(w->tok);
    lm_chat_free(w->chat);
    lm_free(w->taken);
}

lm_code lm_shard_set_make(const lm_shard_opts *o, lm_par *par, lm_shard_set *set, lm_buf *meta,
                          lm_err *e)
{
    work w = { .o = o, .par = par, .set = set, .where = o->output };
    *set = (lm_shard_set){ 0 };
    lm_code rc = lm_alloc_n(&w.taken, (size_t)o->n, sizeof *w.taken, "counts", e);
    if (!rc)
        rc = make_set(&w, meta, e);
    if (rc && w.dir)
        lm_outdir_blame(w.dir, e);
    close_work(&w);
    return rc;
}
