/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_numeric.c -- a loss, gradient or weight that is not finite: finds the tensor that holds
 * it, and the last checkpoint without it.
 *
 * The run ends here, so the blocks are overwritten with older checkpoints. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/folder_run.h"
#include "model/arch.h"
#include "train/trainer_impl.h"

/* ---- the tensor ---- */

/* The first element of tensor i of a block that is not finite, and its number, otherwise 0.  Codes are always finite. */
static lm_code scan_tensor(const lm_store *s, const lm_store_block *k, int i, float **tmp,
                           size_t *room, float *found, size_t *at, lm_err *e)
{
    lm_dtype type = k->format->element;
    *found = 0;
    if (!lm_store_has(s, k, i) || type == LM_DTYPE_NONE || !lm_dtype_is_float(type))
        return LM_OK;
    size_t n = (size_t)lm_store_count(s, k, i), bytes = n * (sizeof(float) + lm_dtype_size(type));
    if (lm_grow(tmp, room, bytes, 1, "a tensor", e))
        return e->code;
    void *raw = type == LM_DTYPE_F32 ? *tmp : *tmp + n;
    if (lm_store_get(s, k, i, raw, e))
        return e->code;
    if (raw != *tmp)
        lm_convert(type, raw, LM_DTYPE_F32, *tmp, (int64_t)n);
    for (size_t j = 0; j < n && *found == 0; j++)
        if (!isfinite((*tmp)[j])) {
            *found = (*tmp)[j];
            *at = j;
        }
    return LM_OK;
}

/* The first tensor of a block with such an element; -1: all are finite. */
static lm_code scan_block(const lm_store *s, const lm_store_block *k, int *tensor, float *value,
                          size_t *at, lm_err *e)
{
    float *tmp = NULL;
    size_t room = 0;
    lm_code rc = LM_OK;
    *tensor = -1;
    for (int i = 0; !rc && *tensor < 0 && i < lm_store_tensors(s, k); i++) {
        rc = scan_tensor(s, k, i, &tmp, &room, value, at, e);
        if (!rc && *value != 0)
            *tensor = i;
    }
    lm_free(tmp);
    return rc;
}

/* NULL: all weights are finite, those that train and the others. */
static lm_code find_tensor(const lm_trainer *t, const lm_slice **slice, float *value, size_t *at,
                           lm_err *e)
{
    const lm_store *s = t->s.store;
    lm_code rc = LM_OK;
    int i = -1;
    for (int k = 0; !rc && i < 0 && k < s->n_blocks; k++)
        if (s->block[k].role == LM_KEPT_PARAM || s->block[k].role == LM_KEPT_FROZEN)
            rc = scan_block(s, &s->block[k], &i, value, at, e);
    *slice = rc || i < 0 ? NULL : &t->program->train->slice[i];
    return rc;
}

/* The same of the parts that all ranks have of the weights.  *at is of this rank's part. */
static lm_code find_anywhere(lm_trainer *t, const lm_slice **slice, float *value, size_t *at,
                             lm_err *e)
{
    const lm_slice *all = t->program->train->slice;
    if (find_tensor(t, slice, value, at, e) || !t->is_shared)
        return e->code;
    /* the first tensor, and whether it is a NaN there: the larger, the earlier */
    int32_t first = *slice ? INT32_MAX - (int32_t)(2 * (*slice - all) + !isnan(*value)) : 0;
    if (trainer_ranks_agree(t, &first, 1, e) || !first)
        return e->code;
    const int32_t code = INT32_MAX - first;
    *slice = &all[code / 2];
    *value = code % 2 ? INFINITY : NAN;
    return LM_OK;
}

/* ---- the checkpoint ---- */

static bool is_finite_block(const lm_store *s, const lm_store_block *k)
{
    lm_err unseen = { 0 };
    float bad;
    size_t at;
    int i;
    return !scan_block(s, k, &i, &bad, &at, &unseen) && i < 0;
}

/* True if weights and states of the checkpoint at `path` can be read and are finite. */
static bool is_clean(lm_trainer *t, const char *path)
{
    lm_model_source *src = NULL;
    lm_err unseen = { 0 };
    bool adapter = t->io.checkpoint.adapter_config; /* which lm_ckpt_load loads */
    bool clean = (adapter || (!lm_model_source_open(path, NULL, &src, &unseen) &&
                              !lm_store_load(t->s.store, src, &unseen))) &&
                 !lm_ckpt_load(path, &t->s, &unseen);
    for (int k = 0; clean && k < t->s.store->n_blocks; k++) {
        const lm_store_block *b = &t->s.store->block[k];
        clean =
            (b->role != LM_KEPT_PARAM && b->role != LM_KEPT_OPT) || is_finite_block(t->s.store, b);
    }
    lm_model_source_close(src);
    return clean;
}

/* The newest clean checkpoint of `run` before `step` (the caller frees it); NULL: none. */
static lm_code find_older(lm_trainer *t, const char *run, int64_t step, char **out, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_dir_list(run, &names, &n, e);
    *out = NULL;
    while (!rc && !*out && step > 0) {
        char *name = NULL, *path = NULL;
        int64_t next = -1;
        for (size_t i = 0; i < n; i++) {
            int64_t s = lm_run_step_of(names[i]);
            next = s < step && s > next ? s : next;
        }
        step = next;
        rc = step < 0 ? LM_OK : lm_run_find_step(run, step, &name, e);
        if (!rc && name)
            rc = lm_path_join(&path, run, name, e);
        if (!rc && path && is_clean(t, path)) {
            *out = path;
            path = NULL;
        }
        lm_free(path);
        lm_free(name);
    }
    lm_names_free(names, n);
    return rc;
}

/* The last clean checkpoint: the last one of this run, the one with which it began, or the newest
 * before that. */
static lm_code find_clean(lm_trainer *t, char **out, lm_err *e)
{
    const char *last = t->places && t->place->ckpt ? lm_ckpt_last(t->place->ckpt) : NULL;
    lm_train_state numbers = t->s; /* reading a checkpoint replaces them */
    char *run = NULL;
    lm_code rc = LM_OK;
    *out = NULL;
    if (!last)
        last = t->io.resume;
    if (!last)
        return LM_OK;
    if (is_clean(t, last))
        rc = lm_strdup(out, last, e);
    else if (lm_run_step_of(lm_path_base(last)) >= 0 &&
             !(rc = lm_asprintf(&run, e, "%.*s", (int)(lm_path_base(last) - last - 1), last)))
        rc = find_older(t, run, lm_run_step_of(lm_path_base(last)), out, e);
    lm_free(run);
    t->s = numbers;
    return rc;
}

/* ---- the message ---- */

/* What a router of experts has; NULL where the layer's has none. */
static const char *router_tensor(const lm_config *c, int64_t layer, int of,
                                 char name[LM_TENSOR_NAME])
{
    const lm_moe *m = &c->layer[layer].moe;
    const bool has[] = { true, m->router_bias, m->noisy };
    if (!m->experts || !has[of])
        return NULL;
    return lm_tensor_hf_name(c->arch, of == 2 ? LM_PART_ROUTER_NOISE : LM_PART_ROUTER, layer,
                             of == 1, name);
}

/* " of expert 5 in the router of layer 3", of number `at` of its weights, bias or noise; without `slice` where logits are not
 * finite, ", first for expert 5 in the router of layer 3"; "": of no router. */
static const char *router_of(const lm_trainer *t, const lm_slice *slice, size_t at, char out[96])
{
    const lm_config *c = t->io.config;
    char room[LM_TENSOR_NAME];
    int64_t expert = -1;
    const int64_t layer = slice ? -1 : trainer_experts_bad(t, &expert);
    *out = 0;
    if (layer >= 0 && expert >= 0)
        snprintf(out, 96, ", first for expert %" PRId64 " in the router of layer %" PRId64, expert,
                 layer);
    else if (layer >= 0)
        snprintf(out, 96, ", first for all experts in the router of layer %" PRId64, layer);
    for (int64_t i = 0; slice && i < 3 * lm_config_depth(c); i++) {
        const char *name = router_tensor(c, i / 3, (int)(i % 3), room);
        if (name && !strcmp(slice->name, name))
            snprintf(out, 96, " of expert %" PRId64 " in the router of layer %" PRId64,
                     (int64_t)at / (slice->ndim > 1 ? slice->dim[1] : 1), i / 3);
    }
    return out;
}

/* The weights contained it when they were loaded. */
static lm_code fail_loaded(const lm_trainer *t, const char *tensor, const char *kind,
                           const char *router, const char *clean, lm_err *e)
{
    char todo[256] = "begin with another copy of the model";
    if (clean)
        snprintf(todo, sizeof todo, "resume from %.150s, the last clean checkpoint", clean);
    else if (t->io.resume)
        snprintf(todo, sizeof todo, "start again: no earlier checkpoint is clean");
    return lm_fail(e, LM_ENUMERIC, lm_model_source_path(t->io.weights), todo,
                   "tensor \"%.150s\" holds %s%s", tensor, kind, router);
}

lm_code trainer_numeric_loaded(lm_trainer *t, lm_err *e)
{
    lm_err unseen = { 0 };
    char *clean = NULL;
    if (e->code != LM_ENUMERIC || find_clean(t, &clean, &unseen))
        return e->code;
    if (clean)
        snprintf(e->todo, sizeof e->todo, "resume from %.150s, the last clean checkpoint", clean);
    else
        snprintf(e->todo, sizeof e->todo, "start again: no earlier checkpoint is clean");
    lm_free(clean);
    return e->code;
}

lm_code trainer_numeric_stop(lm_trainer *t, int64_t step, const char *what, double value, lm_err *e)
{
    const lm_slice *slice = NULL;
    const char *kind = isnan(value) ? "not a number" : "infinite";
    char todo[256], where[64], router[96], *clean = NULL;
    size_t at = 0;
    float bad = 0;
    if (trainer_save_end(t, e))
        return e->code;
    if ((t->leads || t->is_shared) &&
        (t->b->sync(t->b, NULL, e) || find_anywhere(t, &slice, &bad, &at, e)))
        return e->code;
    if (!t->leads) { /* all ranks have met it, and rank 0 fails with the reason when it has found it */
        trainer_ranks_pause(t);
        return trainer_ranks_meet(t, e)
                   ? e->code
                   : lm_fail(e, LM_ENUMERIC, what, NULL, "is %s on some ranks only", kind);
    }
    router_of(t, slice, at, router);
    if (find_clean(t, &clean, e))
        return e->code;
    snprintf(todo, sizeof todo,
             "lower the learning rate or the limit of the gradient norm and %s%.160s",
             clean ? "resume from " : "start again", clean ? clean : "");
    snprintf(where, sizeof where, "step %" PRId64, step);
    if (!slice)
        lm_fail(e, LM_ENUMERIC, where, todo, "the %s is %s%s", what, kind, router);
    else if (!t->r.steps_run && t->io.weights)
        fail_loaded(t, slice->name, isnan(bad) ? "a NaN" : "an infinity", router, clean, e);
    else
        lm_fail(e, LM_ENUMERIC, where, todo, "the %s is %s, and tensor \"%.100s\" holds %s%s", what,
                kind, slice->name, isnan(bad) ? "a NaN" : "an infinity", router);
    lm_free(clean);
    return e->code;
}
