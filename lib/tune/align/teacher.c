/* SPDX-License-Identifier: Apache-2.0 */
/* teacher.c -- an evaluation graph without head beside the one that trains. */
#include "tune/align/teacher.h"

#include <inttypes.h>
#include <string.h>

#include "text/tokenizer_source.h"

/* ---- making ---- */

static lm_code check_tokens(const lm_teacher *t, const char *path, const lm_tokenizer *tok,
                            lm_err *e)
{
    bool same = false;
    if (lm_tokenizer_is_of(t->weights.src, tok, &same, e) || same)
        return e->code;
    return lm_fail(e, LM_EUSAGE, path, "use a teacher with the same tokenizer",
                   "its tokens are not those of the model");
}

static lm_code check_config(const lm_teacher *t, const char *path, const lm_config *student,
                            lm_err *e)
{
    const lm_config *c = &t->weights.config;
    if (c->scores)
        return lm_fail(e, LM_EUSAGE, path, "use a language model",
                       "gives scores to texts: it is no teacher");
    if (c->vocab != student->vocab)
        return lm_fail(e, LM_EUSAGE, path, "use a teacher with the same tokenizer",
                       "its vocabulary has %" PRId64 " tokens, that of the model %" PRId64,
                       c->vocab, student->vocab);
    return LM_OK;
}

lm_code lm_teacher_check(const lm_teacher *t, const char *path, const lm_config *student,
                         const lm_tokenizer *tok, lm_err *e)
{
    return check_config(t, path, student, e) || (tok && check_tokens(t, path, tok, e)) ? e->code
                                                                                       : LM_OK;
}

lm_code lm_teacher_build(lm_teacher *t, const lm_build *how, double beta, double temperature,
                         lm_err *e)
{
    const lm_build own = { .mode = LM_MODE_EVAL,
                           .batch = how->batch,
                           .seq = how->seq,
                           .precision = how->precision,
                           .documents = true,
                           .states = true,
                           .backend = how->backend,
                           .codes = t->weights.src };
    if (lm_model_build(&t->weights.config, &own, &t->model, e) ||
        lm_plan_make(t->model->graph, how->backend, &t->model->states, 1, &t->plan, e)) {
        lm_err_in(e, "teacher");
        return e->code;
    }
    t->bytes = lm_value_bytes(&t->model->graph->value[t->model->states], &lm_mesh_alone);
    t->as = (lm_model_teacher){ t->model, beta, temperature };
    return LM_OK;
}

size_t lm_teacher_bytes(const lm_teacher *t, size_t arena)
{
    return lm_loaded_bytes(t->model) + t->bytes + (t->plan.bytes > arena ? t->plan.bytes : 0);
}

/* ---- running ---- */

static void bind(const lm_teacher *t, const lm_model *student, lm_exec *x)
{
    lm_exec_bind(x, student->taught_states, t->states);
    lm_exec_bind(x, student->taught_head, lm_exec_data(t->eval.exec, t->model->head));
}

lm_code lm_teacher_load(lm_teacher *t, const lm_objective_site *site, lm_err *e)
{
    lm_backend *b = site->backend;
    t->weights.par = site->par;
    if (lm_evaluator_of(t->model, &t->plan, b, site->exec, &t->eval, e))
        return e->code;
    t->made = true;
    if (b->alloc(b, t->bytes, "the teacher's states", &t->states, e) ||
        lm_loaded_weights(&t->weights, t->model, b, e))
        return e->code;
    lm_store_bind(t->weights.store, t->model, t->eval.exec);
    bind(t, site->model, site->exec);
    if (site->eval)
        bind(t, site->eval, site->eval_exec);
    return LM_OK;
}

lm_code lm_teacher_run(lm_teacher *t, const lm_batch *b, lm_err *e)
{
    lm_backend *on = t->eval.b;
    lm_batch *own = &t->eval.batch;
    const size_t bytes = (size_t)(b->batch * b->seq) * sizeof *b->tokens;
    const lm_step step = { 0 };
    memcpy(own->tokens, b->tokens, bytes);
    memcpy(own->targets, b->targets, bytes);
    memcpy(own->pos, b->pos, bytes);
    memcpy(own->lo, b->lo, bytes);
    if (lm_batch_push(own, NULL, e) || lm_exec_run(t->eval.exec, &step, e))
        return e->code;
    return on->copy(on, t->states, lm_exec_data(t->eval.exec, t->model->states), t->bytes, on->main,
                    e);
}

void lm_teacher_close(lm_teacher *t)
{
    lm_backend *b = t->eval.b;
    if (t->states)
        b->free(b, t->states, t->bytes);
    if (t->made)
        lm_evaluator_fini(&t->eval);
    lm_plan_fini(&t->plan);
    lm_model_free(t->model);
    lm_loaded_fini(&t->weights);
    memset(t, 0, sizeof *t);
}
