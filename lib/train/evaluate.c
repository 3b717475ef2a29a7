/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.c -- forward passes over windows. */
#include "train/evaluate.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "model/loaded.h"
#include "train/memory.h"

static size_t part_bytes(const lm_evaluator *v)
{
    return (size_t)(v->batch.batch * v->batch.seq) * sizeof(float);
}

static size_t rows_bytes(const lm_evaluator *v)
{
    return part_bytes(v) *
           (1 + (size_t)v->model->build.value + (v->model->build.entropy != LM_ENTROPY_NONE));
}

/* ---- memory ---- */

static lm_code arena_of(const lm_model *m, lm_backend *b, double *bytes, lm_err *e)
{
    lm_plan p;
    if (lm_plan_make(m->graph, b, &m->loss, 1, &p, e))
        return e->code;
    *bytes = (double)p.bytes;
    lm_plan_fini(&p);
    return LM_OK;
}

/* The batch halved until its arena is no larger than `room`; 0: none. */
static int64_t smaller_batch(const lm_config *c, lm_build build, lm_backend *b, double room)
{
    lm_err unseen = { 0 };
    while (!unseen.code && (build.batch /= 2) > 0) {
        lm_model *m = NULL;
        double bytes = 0;
        bool fits = !lm_model_build(c, &build, &m, &unseen) && !arena_of(m, b, &bytes, &unseen) &&
                    bytes <= room;
        lm_model_free(m);
        if (fits)
            return build.batch;
    }
    return 0;
}

/* Detect a device too small for weights and activations by their sizes. */
static lm_code check_room(const lm_evaluator *v, const lm_config *c, const lm_build *build,
                          lm_err *e)
{
    size_t left, all;
    double weights = (double)lm_loaded_bytes(v->model), bytes = 0;
    char w[32], a[32], l[32], t[32], todo[80] = "use shorter windows or a smaller model";
    if (v->b->memory(v->b, &left, &all, e) || arena_of(v->model, v->b, &bytes, e))
        return e->code;
    double room = lm_memory_usable((double)left) - weights;
    if (bytes <= room)
        return LM_OK;
    int64_t fits = smaller_batch(c, *build, v->b, room);
    if (fits)
        snprintf(todo, sizeof todo, "a batch of %" PRId64 " windows fits", fits);
    return lm_fail(e, LM_ELIMIT, v->b->name, todo,
                   "weights take %s, activations of %" PRId64 " windows of %" PRId64
                   " tokens %s; %s of %s are free",
                   lm_show_bytes(weights, w), build->batch, build->seq, lm_show_bytes(bytes, a),
                   lm_show_bytes((double)left, l), lm_show_bytes((double)all, t));
}

/* ---- life ---- */

/* v->model and v->exec are set. */
static lm_code finish(lm_evaluator *v, lm_err *e)
{
    const lm_build *how = &v->model->build;
    lm_backend *b = v->b;
    if (lm_batch_new_pairs(&v->batch, b, how->batch, how->seq, 0, 0,
                           v->model->config.encoder ? how->source : 0, e) ||
        lm_rotary_new(v->model, b, &v->rope, e) ||
        (!b->host_memory &&
         b->host_alloc(b, rows_bytes(v), "the losses of a batch", (void **)&v->rows, e))) {
        lm_evaluator_fini(v);
        return e->code;
    }
    lm_batch_bind(&v->batch, v->model, v->exec);
    lm_rotary_bind(&v->rope, v->model, v->exec);
    return LM_OK;
}

lm_code lm_evaluator_new(const lm_config *c, const lm_build *build, lm_backend *b, lm_evaluator *v,
                         lm_err *e)
{
    lm_build own = *build;
    *v = (lm_evaluator){ .b = b, .own = true };
    own.mode = LM_MODE_EVAL;
    if (c->scores)
        return lm_fail(e, LM_EUSAGE, "model", "use a language model",
                       "it gives scores to texts, no probabilities to tokens");
    own.backend = b;
    if (lm_model_build(c, &own, &v->model, e) || (!b->host_memory && check_room(v, c, &own, e)) ||
        lm_exec_new(v->model->graph, b, &v->model->loss, 1, &v->exec, e)) {
        lm_evaluator_fini(v);
        return e->code;
    }
    return finish(v, e);
}

lm_code lm_evaluator_of(lm_model *m, const lm_plan *plan, lm_backend *b, lm_exec *share,
                        lm_evaluator *v, lm_err *e)
{
    *v = (lm_evaluator){ .b = b, .model = m };
    return lm_exec_new_planned(m->graph, b, plan, share, &v->exec, e) ? e->code : finish(v, e);
}

void lm_evaluator_fini(lm_evaluator *v)
{
    lm_exec_free(v->exec);
    if (v->rows)
        v->b->host_free(v->b, v->rows, rows_bytes(v));
    if (v->own)
        lm_model_free(v->model);
    lm_batch_fini(&v->batch);
    lm_rotary_fini(&v->rope);
    memset(v, 0, sizeof *v);
}

/* ---- running ---- */

void lm_evaluator_add(const lm_evaluator *v, const float *rows, lm_eval_sum *sum)
{
    for (int64_t i = 0; i < v->batch.batch * v->batch.seq; i++)
        if (v->batch.targets[i] >= 0) {
            sum->nll += rows[i];
            sum->tokens++;
        }
}

lm_code lm_evaluator_run(lm_evaluator *v, lm_eval_sum *sum, const float **rows, lm_err *e)
{
    lm_step step = { 0 };
    lm_backend *b = v->b;
    const float *loss;
    if (lm_batch_push(&v->batch, NULL, e) || lm_exec_run(v->exec, &step, e))
        return e->code;
    loss = lm_exec_data(v->exec, v->model->loss);
    if (v->rows) {
        if (b->copy(b, v->rows, loss, part_bytes(v), b->main, e) || b->sync(b, b->main, e))
            return e->code;
        loss = v->rows;
    }
    lm_evaluator_add(v, loss, sum);
    if (rows)
        *rows = loss;
    return LM_OK;
}

/* Numbers of the rows on the host, in part i of v->rows where they are not there already. */
static lm_code take_part(lm_evaluator *v, lm_vid value, int i, const float **out, lm_err *e)
{
    const float *from = lm_exec_data(v->exec, value);
    float *to = v->rows ? v->rows + i * v->batch.batch * v->batch.seq : NULL;
    lm_backend *b = v->b;
    *out = v->rows ? to : from;
    return v->rows && (b->copy(b, to, from, part_bytes(v), b->main, e) || b->sync(b, b->main, e))
               ? e->code
               : LM_OK;
}

lm_code lm_evaluator_losses(lm_evaluator *v, const float **rows, lm_err *e)
{
    return take_part(v, v->model->loss, 0, rows, e);
}

lm_code lm_evaluator_values(lm_evaluator *v, const float **values, lm_err *e)
{
    return take_part(v, v->model->value, 1, values, e);
}

lm_code lm_evaluator_entropies(lm_evaluator *v, const float **entropies, lm_err *e)
{
    return take_part(v, v->model->entropy, 1 + v->model->build.value, entropies, e);
}
