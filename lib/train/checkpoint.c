/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.c -- writes checkpoints in the background, and reads them. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/bundle.h"
#include "format/folder_run.h"
#include "format/provenance.h"
#include "numeric/format.h"
#include "train/state.h"
#include "train/window.h"

struct lm_ckpt {
    lm_ckpt_opts o;
    pthread_t thread;
    bool running; /* a thread must be joined */
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool copied, done;   /* under lock */
    double began, ended; /* the same; of the newest checkpoint */
    lm_err err;          /* result of the thread; read after it has ended */
    lm_train_state s;    /* the numbers at the time of lm_ckpt_begin */
    lm_store store;      /* the live blocks, or their copies: s.store while one is written */
    char *last;          /* used by the thread while it runs */
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

lm_code lm_ckpt_new(const lm_ckpt_opts *o, const lm_train_state *s, lm_ckpt **out, lm_err *e)
{
    lm_ckpt *c = NULL;
    *out = NULL;
    if (lm_alloc_n(&c, 1, sizeof *c, "the checkpoint writer", e))
        return e->code;
    c->o = *o;
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

static void say_copied(lm_ckpt *c)
{
    pthread_mutex_lock(&c->lock);
    c->copied = true;
    pthread_cond_broadcast(&c->change);
    pthread_mutex_unlock(&c->lock);
}

/* The older run may have a checkpoint of this name. */
static bool is_replacing(const lm_ckpt *c)
{
    return c->o.replace && !c->last;
}

static const char states_file[] = "optimizer.safetensors";
static const char objective_file[] = "objective.json";
static const char adapter_file[] = "adapter_model.safetensors";

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

/* `path` ends in .lmz or names a folder: its files are the same. */
static lm_code write_files(lm_ckpt *c, const char *path, lm_err *e)
{
    lm_bundle_opts opts = { .par = c->par, .own = lm_bundle_own_checkpoint };
    lm_st_plan *plan = NULL;
    lm_folder *f = NULL;
    lm_buf json = { 0 };
    lm_code rc = lm_st_plan_new(&plan, e);
    if (!rc)
        rc = plan_tensors(c, plan, e);
    if (!rc && c->o.history)
        rc = lm_st_plan_meta(plan, LM_HISTORY_KEY, c->o.history, e);
    if (!rc)
        rc = lm_window_note(plan, c->o.seq, e);
    lm_folder_spec spec = { .config = c->o.config,
                            .generation_config = c->o.generation_config,
                            .files = c->o.files,
                            .plan = plan };
    if (c->o.adapter_config)
        spec = (lm_folder_spec){ .files = c->o.files, .plan = plan, .weights = adapter_file };
    if (!rc)
        rc = lm_folder_create(path, is_replacing(c), &opts, &spec, &f, e);
    if (!rc)
        rc = put_config(c, f, e);
    if (!rc && c->o.fold)
        rc = c->o.fold(c->o.fold_ctx, c->s.store, e);
    if (!rc)
        rc = c->o.form ? c->o.form->write(c->o.form->ctx, c->s.store, f, e)
                       : lm_store_write(c->s.store, f, e);
    if (!rc && lm_store_has_states(c->s.store))
        rc = lm_store_write_states(c->s.store, f, e);
    say_copied(c);
    if (!rc)
        rc = state_json(c, &json, e);
    if (!rc && c->s.objective.len)
        rc = lm_folder_put(f, objective_file, c->s.objective.data, c->s.objective.len, e);
    if (!rc)
        rc = lm_folder_put(f, "state.json", json.data, json.len, e);
    if (!rc)
        rc = lm_folder_commit(f, e);
    else
        lm_folder_drop(f);
    lm_st_plan_free(plan);
    lm_buf_fini(&json);
    return rc;
}

static lm_code write_checkpoint(lm_ckpt *c, lm_err *e)
{
    char name[40], *dir = NULL;
    lm_run_step_name(c->s.step, name);
    if (c->o.lmz)
        strcat(name, ".lmz");
    if (lm_path_join(&dir, c->o.run_dir, name, e))
        return e->code;
    lm_code rc = write_files(c, dir, e);
    if (!rc)
        rc = (is_replacing(c) ? lm_run_publish_first : lm_run_publish)(c->o.run_dir, name, e);
    if (!rc && c->s.best_step == c->s.step)
        rc = lm_run_publish_best(c->o.run_dir, name, e);
    if (!rc && c->o.keep > 0)
        rc = lm_run_prune(c->o.run_dir, c->o.keep, e);
    if (rc) {
        lm_free(dir);
        return rc;
    }
    lm_free(c->last);
    c->last = dir;
    return LM_OK;
}

static void *writer(void *arg)
{
    lm_ckpt *c = arg;
    if (!c->copy || !c->backend->sync(c->backend, c->stream, &c->err))
        write_checkpoint(c, &c->err);
    pthread_mutex_lock(&c->lock);
    c->copied = c->done = true;
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

lm_code lm_ckpt_begin(lm_ckpt *c, const lm_train_state *s, lm_err *e)
{
    if (lm_ckpt_wait(c, e))
        return e->code;
    c->s = *s;
    c->store = *s->store;
    c->s.store = &c->store;
    c->copied = c->done = false;
    c->began = lm_now();
    c->ended = 0;
    if (snapshot(c, e))
        return e->code;
    memset(&c->err, 0, sizeof c->err);
    int bad = pthread_create(&c->thread, NULL, writer, c);
    if (bad)
        return lm_fail(e, LM_ELIMIT, "checkpoint", NULL, "no thread to write it: %s",
                       strerror(bad));
    c->running = true;
    return LM_OK;
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

lm_code lm_ckpt_wait(lm_ckpt *c, lm_err *e)
{
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

/* ---- reading ---- */

enum { CHECK_PIECE = 1 << 22 };

/* 32-bit floats, and the lowest index at which a thread has met one that is not finite. */
typedef struct {
    const uint8_t *data;
    _Atomic(int64_t) first;
} finite_scan;

static void scan_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const uint32_t exponent = 0x7f800000;
    finite_scan *s = ctx;
    uint32_t bits, bad = 0;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        memcpy(&bits, s->data + i * 4, 4);
        bad |= (bits & exponent) == exponent;
    }
    for (int64_t i = begin; bad && i < end; i++) {
        memcpy(&bits, s->data + i * 4, 4);
        if ((bits & exponent) != exponent)
            continue;
        int64_t first = atomic_load(&s->first);
        while (i < first && !atomic_compare_exchange_weak(&s->first, &first, i))
            ;
        break;
    }
}

static lm_code fail_not_finite(const lm_st *st, const lm_st_tensor *t, const uint8_t *at, lm_err *e)
{
    float x;
    memcpy(&x, at, 4);
    return lm_fail(e, LM_ENUMERIC, lm_st_path(st), "resume from an earlier checkpoint",
                   "tensor \"%.150s\" holds %s", t->name, isnan(x) ? "a NaN" : "an infinity");
}

/* Pieces of a tensor: mapped ones where they lie, others through `room`. */
static lm_code check_tensor(const lm_st *st, const lm_st_tensor *t, uint8_t *room, lm_par *par,
                            lm_err *e)
{
    const uint8_t *mapped = lm_st_data(st, t);
    for (int64_t at = 0; at < t->count; at += CHECK_PIECE) {
        int64_t n = t->count - at < CHECK_PIECE ? t->count - at : CHECK_PIECE;
        finite_scan s = { .data = mapped ? mapped + at * 4 : room, .first = INT64_MAX };
        if (!mapped && lm_st_read(st, t, (uint64_t)at * 4, room, (size_t)n * 4, e))
            return e->code;
        lm_par_for(par, n, CHECK_PIECE / 64, scan_range, &s);
        if (s.first < n)
            return fail_not_finite(st, t, s.data + s.first * 4, e);
    }
    lm_st_forget(st, t);
    return LM_OK;
}

/* States that are not finite would stop the run at the end of its first step, with less to say. */
static lm_code check_finite(const lm_st *st, lm_par *par, lm_err *e)
{
    uint8_t *room = NULL;
    lm_code rc = lm_alloc_n(&room, CHECK_PIECE, 4, "a piece of a state", e);
    for (size_t k = 0; !rc && k < lm_st_count(st); k++)
        if (lm_st_at(st, k)->dtype == LM_DTYPE_F32)
            rc = check_tensor(st, lm_st_at(st, k), room, par, e);
    lm_free(room);
    return rc;
}

static lm_code load_file(lm_bundle *b, const char *file, lm_train_state *s,
                         lm_code (*load)(lm_store *, const lm_st *, lm_err *), lm_err *e)
{
    lm_st *st = NULL;
    lm_code rc = lm_bundle_st(b, file, &st, e);
    if (!rc)
        rc = check_finite(st, s->store->par, e);
    if (!rc)
        rc = load(s->store, st, e);
    lm_st_close(st);
    return rc;
}

static lm_code load_numbers(const json_t *o, const char *where, lm_train_state *s, lm_err *e)
{
    const char *name;
    int64_t most = INT64_C(1) << 60, last = LM_RUN_MOST_STEP;
    if (lm_json_str_or(o, "optimizer", "", &name, where, e))
        return e->code;
    if (!lm_groups_same(name, s->optimizer))
        return lm_fail(e, LM_EUSAGE, where, "resume with the same optimiser",
                       "the run was trained with %s, not %s",
                       name[0] ? name : "an optimiser that the file does not name", s->optimizer);
    return lm_json_i64(o, "step", 0, last, &s->step, where, e) ||
                   lm_json_i64(o, "tokens", 0, most, &s->tokens, where, e) ||
                   lm_json_i64_or(o, "updates", s->tokens > 0 ? s->step : 0, 0, s->step,
                                  &s->updates, where, e) ||
                   lm_json_i64(o, "sample", 0, most, &s->sample, where, e) ||
                   lm_json_f64_or(o, "seconds", 0, &s->seconds, where, e) ||
                   lm_json_f64_or(o, "best_loss", INFINITY, &s->best_loss, where, e) ||
                   lm_json_i64_or(o, "bad_evals", 0, 0, most, &s->bad_evals, where, e) ||
                   lm_json_f64_or(o, "best_val_loss", INFINITY, &s->best_val, where, e) ||
                   lm_json_i64_or(o, "best_step", -1, -1, last, &s->best_step, where, e) ||
                   lm_json_i64_or(o, "evaluated", -1, -1, last, &s->evaluated, where, e)
               ? e->code
               : LM_OK;
}

/* The files of a checkpoint, and its state.json; where: a name for messages. */
static lm_code open_checkpoint(const char *path, lm_bundle **b, json_t **state, char where[256],
                               lm_err *e)
{
    lm_buf text = { 0 };
    *state = NULL;
    lm_code rc = lm_bundle_open(path, NULL, b, e);
    if (!rc)
        rc = lm_bundle_load(*b, "state.json", 16 << 20, &text, e);
    if (!rc)
        lm_bundle_where(*b, lm_bundle_find(*b, "state.json"), where);
    if (!rc)
        rc = lm_json_parse(text.data, text.len, where, state, e);
    lm_buf_fini(&text);
    return rc;
}

/* What an objective left there. */
static lm_code load_objective(lm_bundle *b, lm_train_state *s, lm_err *e)
{
    lm_buf text = { 0 };
    json_decref(s->resumed);
    s->resumed = NULL;
    if (!lm_bundle_find(b, objective_file))
        return LM_OK;
    if (!lm_bundle_load(b, objective_file, (size_t)4 << 30, &text, e))
        lm_json_parse(text.data, text.len, objective_file, &s->resumed, e);
    lm_buf_fini(&text);
    return e->code;
}

lm_code lm_ckpt_load(const char *step_dir, lm_train_state *s, lm_err *e)
{
    char where[256];
    lm_bundle *b = NULL;
    json_t *o = NULL;
    lm_code rc = open_checkpoint(step_dir, &b, &o, where, e);
    if (!rc)
        rc = load_numbers(o, where, s, e);
    if (!rc && lm_bundle_find(b, adapter_file) && !s->store->twice)
        rc = load_file(b, adapter_file, s, lm_store_load_adapter, e);
    if (!rc && (lm_store_has_states(s->store) || lm_bundle_find(b, states_file)))
        rc = load_file(b, states_file, s, lm_store_load_states, e);
    if (!rc)
        rc = load_objective(b, s, e);
    json_decref(o);
    lm_bundle_close(b);
    return rc;
}

lm_code lm_ckpt_options(const char *step_dir, json_t **out, int64_t *step, lm_err *e)
{
    char where[256];
    lm_bundle *b = NULL;
    json_t *o = NULL;
    *out = NULL;
    lm_code rc = open_checkpoint(step_dir, &b, &o, where, e);
    if (!rc && !json_is_object(json_object_get(o, "options")))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"options\" is missing");
    if (!rc)
        rc = lm_json_i64(o, "step", 0, LM_RUN_MOST_STEP, step, where, e);
    if (!rc)
        *out = json_incref(json_object_get(o, "options"));
    json_decref(o);
    lm_bundle_close(b);
    return rc;
}
