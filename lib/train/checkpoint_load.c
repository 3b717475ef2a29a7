/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_load.c -- reads checkpoints: all of each, or it fails. */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/mem.h"
#include "format/bundle.h"
#include "format/folder_run.h"
#include "train/checkpoint_files.h"
#include "train/groups.h"
#include "train/state.h"

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
        rc = lm_bundle_load(*b, LM_CKPT_STATE, 16 << 20, &text, e);
    if (!rc)
        lm_bundle_where(*b, lm_bundle_find(*b, LM_CKPT_STATE), where);
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
    if (!lm_bundle_find(b, LM_CKPT_OBJECTIVE))
        return LM_OK;
    if (!lm_bundle_load(b, LM_CKPT_OBJECTIVE, (size_t)4 << 30, &text, e))
        lm_json_parse(text.data, text.len, LM_CKPT_OBJECTIVE, &s->resumed, e);
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
    if (!rc && lm_bundle_find(b, LM_CKPT_ADAPTER) && !s->store->twice)
        rc = load_file(b, LM_CKPT_ADAPTER, s, lm_store_load_adapter, e);
    if (!rc && (lm_store_has_states(s->store) || lm_bundle_find(b, LM_CKPT_STATES)))
        rc = load_file(b, LM_CKPT_STATES, s, lm_store_load_states, e);
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
