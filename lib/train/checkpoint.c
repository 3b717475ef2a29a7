/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.c -- writes checkpoints in the background.
 *
 * Of several ranks each has such a writer, with a thread of its own.  Rank 0 makes the folder and its files before its thread
 * begins, so that the others can join it.  A thread sets a flag when the bytes of its rank's part are on disk; that of rank 0
 * then waits for the end of all parts, completes the folder and publishes it.  Threads do not communicate: the trainers
 * exchange the flags between steps. */
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/folder_run.h"
#include "format/provenance.h"
#include "train/checkpoint_files.h"
#include "train/state.h"
#include "train/window.h"

/* What becomes of a folder that several ranks write. */
typedef enum { OPEN, WHOLE, DROPPED } verdict;

struct lm_ckpt {
    lm_ckpt_opts o;
    pthread_t thread;
    bool running; /* a thread must be joined */
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool copied, done;   /* under lock */
    bool part_done;      /* under lock; this rank's part is on disk, or has failed */
    verdict verdict;     /* under lock; rank 0 of several */
    double began, ended; /* the same; of the newest checkpoint */
    lm_err err;          /* result of the thread; read after it has ended */
    lm_train_state s;    /* the numbers at the time of lm_ckpt_begin */
    lm_store store;      /* the live blocks, or their copies: s.store while one is written */
    char *last;          /* used by the thread while it runs, like the following */
    char name[40];       /* of the checkpoint in the run */
    char *path;          /* of it */
    lm_folder *f;
    lm_bundle_opts how;
    lm_st_plan *plan;
    uint64_t bytes;      /* of its tensors */
    lm_st_share share;   /* ranks 0: alone */
    char made[PATH_MAX]; /* the folder that several ranks write, before it has its name */
    lm_par *par;         /* codes .lmz; used by the thread only */

    /* Of a device. */
    lm_backend *backend;
    void *copy; /* pinned; NULL: the blocks are the host's own memory */
    size_t copy_bytes;
    lm_stream *stream; /* of the copying */
};

/* Threads that code an .lmz: few, because training continues meanwhile. */
static int pool_size(void)
{
    int n = lm_cpu_count() / 4;
    return n < 1 ? 1 : n > 4 ? 4 : n;
}

/* For each thread: six chunks in progress (lmz_write.c), raw and coded, and zstd's own memory.
 * Measured: 13 MiB. */
static const double coder_bytes_a_thread = 14.0 * (1 << 20);

double lm_ckpt_coder_bytes(bool lmz)
{
    return lmz ? pool_size() * coder_bytes_a_thread : 0;
}

/* True if the whole model trains: what has no gradient then are biases of routers, which change, too. */
static bool is_whole(const lm_store *s)
{
    return !s->model->build.trainable && !s->model->build.adapt;
}

/* True for a block that is part of checkpoints. */
static bool is_saved(const lm_store *s, const lm_store_block *k)
{
    return k->role == LM_KEPT_PARAM || k->role == LM_KEPT_OPT ||
           (s->shown && k->role == LM_KEPT_GRAD) || (k->role == LM_KEPT_FROZEN && is_whole(s));
}

size_t lm_ckpt_snapshot_bytes(const lm_backend *b, const size_t kept[LM_KEPT_ROLES], bool shown)
{
    return b->host_memory
               ? 0
               : kept[LM_KEPT_PARAM] + kept[LM_KEPT_OPT] + (shown ? kept[LM_KEPT_GRAD] : 0);
}

static lm_code make_copies(lm_ckpt *c, const lm_train_state *s, lm_err *e)
{
    size_t kept[LM_KEPT_ROLES];
    lm_store_bytes(s->store, kept);
    c->copy_bytes = lm_ckpt_snapshot_bytes(c->backend, kept, s->store->shown);
    if (c->copy_bytes && is_whole(s->store))
        c->copy_bytes += kept[LM_KEPT_FROZEN];
    if (!c->copy_bytes)
        return LM_OK;
    lm_code rc = c->backend->stream_new(c->backend, &c->stream, e);
    return rc ? rc
              : c->backend->host_alloc(c->backend, c->copy_bytes, "a checkpoint's snapshot",
                                       &c->copy, e);
}

/* An .lmz is one stream of whole tensors, which rank 0 writes. */
static lm_code check_cuts(const lm_ckpt_opts *o, const lm_model *m, lm_err *e)
{
    for (int i = 0; o->lmz && i < m->n_slices; i++)
        if (m->slice[i].cut.ranks)
            return lm_fail(e, LM_EUSAGE, "checkpoint format", "give safetensors",
                           "an .lmz holds whole tensors, and each of %d ranks has a part of them",
                           m->slice[i].cut.ranks);
    return LM_OK;
}

lm_code lm_ckpt_new(const lm_ckpt_opts *o, const lm_train_state *s, lm_ckpt **out, lm_err *e)
{
    lm_ckpt *c = NULL;
    *out = NULL;
    if (check_cuts(o, s->model, e) || lm_alloc_n(&c, 1, sizeof *c, "the checkpoint writer", e))
        return e->code;
    c->o = *o;
    if (o->ranks > 1 && !o->lmz)
        c->share = (lm_st_share){ .rank = o->rank, .ranks = o->ranks };
    c->backend = s->backend;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->change, NULL);
    if ((o->lmz && lm_par_new(&c->par, pool_size(), e)) || make_copies(c, s, e)) {
        lm_ckpt_free(c);
        return e->code;
    }
    *out = c;
    return LM_OK;
}

/* ---- writing ---- */

static lm_code state_json(const lm_ckpt *c, lm_buf *out, lm_err *e)
{
    const lm_train_state *s = &c->s;
    json_t *options = NULL, *history = NULL;
    lm_jw w;
    if ((c->o.options &&
         lm_json_parse(c->o.options, strlen(c->o.options), "options", &options, e)) ||
        (c->o.history &&
         lm_json_parse(c->o.history, strlen(c->o.history), "history", &history, e))) {
        json_decref(options);
        return e->code;
    }
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_int(&w, "version", 1);
    lm_jw_str(&w, "optimizer", s->optimizer);
    lm_jw_int(&w, "step", s->step);
    lm_jw_int(&w, "tokens", s->tokens);
    lm_jw_int(&w, "updates", s->updates);
    lm_jw_int(&w, "sample", s->sample);
    lm_jw_f64(&w, "seconds", s->seconds);
    lm_jw_f64(&w, "best_loss", s->best_loss);
    lm_jw_int(&w, "bad_evals", s->bad_evals);
    lm_jw_f64(&w, "best_val_loss", s->best_val);
    lm_jw_int(&w, "best_step", s->best_step);
    lm_jw_int(&w, "evaluated", s->evaluated);
    if (options)
        lm_jw_json(&w, "options", options);
    if (history)
        lm_jw_json(&w, "history", history);
    lm_jw_close_obj(&w);
    json_decref(options);
    json_decref(history);
    return lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}

static void say(lm_ckpt *c, bool *flag)
{
    pthread_mutex_lock(&c->lock);
    *flag = true;
    pthread_cond_broadcast(&c->change);
    pthread_mutex_unlock(&c->lock);
}

static void decide(lm_ckpt *c, verdict v)
{
    pthread_mutex_lock(&c->lock);
    c->verdict = c->verdict == OPEN ? v : c->verdict;
    pthread_cond_broadcast(&c->change);
    pthread_mutex_unlock(&c->lock);
}

static verdict wait_for_verdict(lm_ckpt *c)
{
    pthread_mutex_lock(&c->lock);
    while (c->verdict == OPEN)
        pthread_cond_wait(&c->change, &c->lock);
    const verdict v = c->verdict;
    pthread_mutex_unlock(&c->lock);
    return v;
}

static bool is_shared(const lm_ckpt *c)
{
    return c->share.ranks > 1;
}

/* The older run may have a checkpoint of this name. */
static bool is_replacing(const lm_ckpt *c)
{
    return c->o.replace && !c->last;
}

static lm_code plan_tensors(const lm_ckpt *c, lm_st_plan *plan, lm_err *e)
{
    const lm_ckpt_form *form = c->o.form;
    if (form)
        return form->plan(form->ctx, c->s.store, plan, e);
    return lm_model_plan(c->s.model, c->o.adapter_config ? LM_TENSORS_ADAPTER : LM_TENSORS_ALL,
                         LM_DTYPE_F32, plan, e);
}

static lm_code put_config(const lm_ckpt *c, lm_folder *f, lm_err *e)
{
    const lm_ckpt_form *form = c->o.form;
    lm_buf text = { 0 };
    const char *own = c->o.adapter_config;
    if (!own)
        return LM_OK;
    lm_code rc = form ? form->config(form->ctx, c->s.store, &text, e) : LM_OK;
    own = form ? text.data : own;
    rc = rc ? rc : lm_folder_put(f, "adapter_config.json", own, strlen(own), e);
    lm_buf_fini(&text);
    return rc;
}

static lm_code name_it(lm_ckpt *c, lm_err *e)
{
    lm_run_step_name(c->s.step, c->name);
    if (c->o.lmz)
        strcat(c->name, ".lmz");
    return lm_path_join(&c->path, c->o.run_dir, c->name, e);
}

/* The states are in a file that is planned when they are written, but several ranks need it before. */
static lm_code reserve_states(lm_ckpt *c, lm_err *e)
{
    lm_st_plan *plan = NULL;
    if (!is_shared(c) || !lm_store_has_states(c->s.store))
        return LM_OK;
    lm_code rc = lm_st_plan_new(&plan, e);
    if (!rc)
        rc = lm_store_plan_states(c->s.store, plan, e);
    if (!rc)
        rc = lm_folder_reserve(c->f, LM_CKPT_STATES, plan, e);
    if (!rc)
        c->bytes += lm_st_plan_data_bytes(plan);
    lm_st_plan_free(plan);
    return rc;
}

/* `path` ends in .lmz or names a folder: its files are the same. */
static lm_code start_files(lm_ckpt *c, lm_err *e)
{
    c->how = (lm_bundle_opts){ .par = c->par,
                               .own = lm_bundle_own_checkpoint,
                               .share = is_shared(c) ? &c->share : NULL };
    lm_code rc = lm_st_plan_new(&c->plan, e);
    if (!rc)
        rc = plan_tensors(c, c->plan, e);
    if (!rc && c->o.history)
        rc = lm_st_plan_meta(c->plan, LM_HISTORY_KEY, c->o.history, e);
    if (!rc)
        rc = lm_window_note(c->plan, c->o.seq, e);
    lm_folder_spec spec = { .config = c->o.config,
                            .generation_config = c->o.generation_config,
                            .files = c->o.files,
                            .plan = c->plan };
    if (c->o.adapter_config)
        spec = (lm_folder_spec){ .files = c->o.files, .plan = c->plan, .weights = LM_CKPT_ADAPTER };
    if (!rc)
        rc = lm_folder_create(c->path, is_replacing(c), &c->how, &spec, &c->f, e);
    if (!rc)
        rc = put_config(c, c->f, e);
    c->bytes = rc ? 0 : lm_st_plan_data_bytes(c->plan);
    return rc ? rc : reserve_states(c, e);
}

/* Of several ranks this one's part. */
static lm_code write_tensors(lm_ckpt *c, lm_err *e)
{
    if (c->o.fold && !c->s.store->owners && c->o.fold(c->o.fold_ctx, c->s.store, e))
        return e->code;
    lm_code rc = c->o.form ? c->o.form->write(c->o.form->ctx, c->s.store, c->f, e)
                           : lm_store_write(c->s.store, c->f, e);
    if (!rc && lm_store_has_states(c->s.store))
        rc = lm_store_write_states(c->s.store, c->f, e);
    return rc;
}

/* What no tensor is, and the end of all of it. */
static lm_code complete(lm_ckpt *c, lm_err *e)
{
    lm_buf json = { 0 };
    lm_folder *f = c->f;
    lm_code rc = state_json(c, &json, e);
    if (!rc && c->s.objective.len)
        rc = lm_folder_put(f, LM_CKPT_OBJECTIVE, c->s.objective.data, c->s.objective.len, e);
    if (!rc)
        rc = lm_folder_put(f, LM_CKPT_STATE, json.data, json.len, e);
    lm_buf_fini(&json);
    if (rc)
        return rc;
    c->f = NULL;
    return lm_folder_commit(f, e);
}

static lm_code publish(lm_ckpt *c, lm_err *e)
{
    const char *run = c->o.run_dir;
    if ((is_replacing(c) ? lm_run_publish_first : lm_run_publish)(run, c->name, e) ||
        (!c->o.aside && c->s.best_step == c->s.step && lm_run_publish_best(run, c->name, e)) ||
        (c->o.keep > 0 && lm_run_prune(run, c->o.keep, e)))
        return e->code;
    lm_free(c->last);
    c->last = c->path;
    c->path = NULL;
    return LM_OK;
}

/* What is left of a checkpoint, published or not. */
static void drop_files(lm_ckpt *c)
{
    lm_folder_drop(c->f);
    lm_st_plan_free(c->plan);
    lm_free(c->path);
    c->f = NULL;
    c->plan = NULL;
    c->path = NULL;
}

static lm_code write_checkpoint(lm_ckpt *c, lm_err *e)
{
    if ((!c->f && start_files(c, e)) || write_tensors(c, e))
        return e->code;
    say(c, &c->copied);
    if (is_shared(c)) {
        if (lm_folder_sync(c->f, e))
            return e->code;
        say(c, &c->part_done);
        if (c->share.rank == 0 && wait_for_verdict(c) == DROPPED)
            return LM_OK;
    }
    return complete(c, e) || (c->share.rank == 0 && publish(c, e)) ? e->code : LM_OK;
}

static void *writer(void *arg)
{
    lm_ckpt *c = arg;
    if (!c->copy || !c->backend->sync(c->backend, c->stream, &c->err))
        write_checkpoint(c, &c->err);
    drop_files(c);
    pthread_mutex_lock(&c->lock);
    c->copied = c->part_done = c->done = true;
    c->ended = lm_now();
    pthread_cond_broadcast(&c->change);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Copy the blocks to the host in the background, after the present work on main; the store then
 * refers to the copies. */
static lm_code snapshot(lm_ckpt *c, lm_err *e)
{
    lm_backend *b = c->backend;
    char *to = c->copy;
    if (!c->copy)
        return LM_OK;
    if (b->follow(b, c->stream, b->main, e))
        return e->code;
    for (int i = 0; i < c->store.n_blocks; i++) {
        lm_store_block *k = &c->store.block[i];
        size_t bytes = k->bytes;
        if (!is_saved(&c->store, k))
            continue;
        if (b->copy(b, to, k->data, bytes, c->stream, e))
            return e->code;
        k->data = to;
        k->space = LM_SPACE_HOST;
        to += bytes;
    }
    return LM_OK;
}

/* Rank 0 of several makes the files here, the others join them. */
static lm_code start(lm_ckpt *c, lm_err *e)
{
    if (name_it(c, e) || snapshot(c, e) || (is_shared(c) && start_files(c, e)))
        return e->code;
    if (is_shared(c) && c->share.rank == 0 && !realpath(lm_folder_made(c->f), c->made))
        return lm_fail(e, LM_EIO, c->path, NULL, "cannot be found");
    memset(&c->err, 0, sizeof c->err);
    int bad = pthread_create(&c->thread, NULL, writer, c);
    if (bad)
        return lm_fail(e, LM_ELIMIT, "checkpoint", NULL, "no thread to write it: %s",
                       strerror(bad));
    c->running = true;
    return LM_OK;
}

lm_code lm_ckpt_begin(lm_ckpt *c, const lm_train_state *s, lm_err *e)
{
    if (lm_ckpt_wait(c, e))
        return e->code;
    c->s = *s;
    c->store = *s->store;
    c->s.store = &c->store;
    c->copied = c->part_done = c->done = false;
    c->verdict = OPEN;
    c->share.wrote = 0;
    c->began = lm_now();
    c->ended = 0;
    if (start(c, e))
        drop_files(c);
    return e->code;
}

lm_code lm_ckpt_join(lm_ckpt *c, const lm_train_state *s, const char *folder, lm_err *e)
{
    snprintf(c->made, sizeof c->made, "%s", folder);
    c->share.folder = c->made;
    return lm_ckpt_begin(c, s, e);
}

bool lm_ckpt_shared(const lm_ckpt *c)
{
    return is_shared(c);
}

const char *lm_ckpt_made(const lm_ckpt *c)
{
    return c->made;
}

/* flag NULL: does not wait, but reports an end. */
static lm_code wait_for(lm_ckpt *c, const bool *flag, lm_err *e)
{
    if (!c->running)
        return LM_OK;
    pthread_mutex_lock(&c->lock);
    while (flag && !*flag)
        pthread_cond_wait(&c->change, &c->lock);
    bool done = c->done;
    pthread_mutex_unlock(&c->lock);
    if (!done)
        return LM_OK;
    pthread_join(c->thread, NULL);
    c->running = false;
    if (c->err.code)
        *e = c->err;
    return c->err.code;
}

lm_code lm_ckpt_wait_copied(lm_ckpt *c, lm_err *e)
{
    if (!c->copy)
        return wait_for(c, &c->copied, e);
    if (c->running && c->backend->follow(c->backend, c->backend->main, c->stream, e))
        return e->code;
    return wait_for(c, NULL, e);
}

lm_code lm_ckpt_wait_part(lm_ckpt *c, lm_err *e)
{
    return wait_for(c, &c->part_done, e);
}

lm_code lm_ckpt_part(lm_ckpt *c, bool *done, lm_err *e)
{
    pthread_mutex_lock(&c->lock);
    *done = c->part_done;
    pthread_mutex_unlock(&c->lock);
    return wait_for(c, NULL, e);
}

uint64_t lm_ckpt_wrote(const lm_ckpt *c)
{
    return c->share.wrote;
}

lm_code lm_ckpt_all_done(lm_ckpt *c, uint64_t wrote, lm_err *e)
{
    if (wrote == c->bytes) {
        decide(c, WHOLE);
        return LM_OK;
    }
    decide(c, DROPPED);
    return lm_fail(e, LM_EBUG, c->o.run_dir, NULL,
                   "%d ranks have written %" PRIu64 " bytes of tensors where %" PRIu64
                   " are planned",
                   c->share.ranks, wrote, c->bytes);
}

lm_code lm_ckpt_wait(lm_ckpt *c, lm_err *e)
{
    if (is_shared(c)) /* unless it is known to be whole */
        decide(c, DROPPED);
    return wait_for(c, &c->done, e);
}

void lm_ckpt_span(lm_ckpt *c, double *begin, double *end)
{
    pthread_mutex_lock(&c->lock);
    *begin = c->began;
    *end = c->ended;
    pthread_mutex_unlock(&c->lock);
}

bool lm_ckpt_busy(const lm_ckpt *c)
{
    return c->running;
}

bool lm_ckpt_failed(const lm_ckpt *c)
{
    return !c->running && c->err.code;
}

const char *lm_ckpt_last(const lm_ckpt *c)
{
    return c->running ? NULL : c->last;
}

void lm_ckpt_free(lm_ckpt *c)
{
    lm_err ignored = { 0 };
    if (!c)
        return;
    lm_ckpt_wait(c, &ignored);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->change);
    lm_par_free(c->par);
    if (c->stream) /* waits: copies of a checkpoint that could not begin may be in progress */
        c->backend->stream_free(c->backend, c->stream);
    if (c->copy)
        c->backend->host_free(c->backend, c->copy, c->copy_bytes);
    lm_free(c->last);
    lm_free(c);
}
