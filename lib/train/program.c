/* SPDX-License-Identifier: Apache-2.0 */
/* program.c -- the graphs of a training step. */
#include "train/program.h"

#include "base/mem.h"
#include "op/ops.h"
#include "train/monitor.h"

static lm_code build(const lm_program_opts *o, lm_mode mode, const lm_config *c, lm_backend *b,
                     lm_model **out, lm_err *e)
{
    const lm_build how = { .mode = mode,
                           .batch = o->batch,
                           .seq = o->seq,
                           .precision = o->precision,
                           .documents = o->documents,
                           .dropout = o->dropout,
                           .backend = b };
    return lm_model_build(c, &how, out, e);
}

static lm_code sum_losses(lm_program *p, lm_err *e)
{
    lm_graph *g = p->train->graph;
    g->phase = LM_PHASE_FORWARD;
    return lm_graph_value(g, LM_ROLE_STATE, lm_shape1(LM_DTYPE_F64, 1), "loss of the step",
                          &p->loss_sum, e) ||
                   lm_graph_append(g, &lm_op_total, NULL, &p->train->loss, &p->loss_sum, e)
               ? e->code
               : LM_OK;
}

lm_code lm_program_new(const lm_program_opts *o, const lm_config *c, bool validation, lm_backend *b,
                       lm_program **out, lm_err *e)
{
    lm_program *p = NULL;
    lm_update_opts u = { .clip_norm = o->clip_norm, .clip_value = o->clip_value };
    *out = NULL;
    if (lm_alloc_n(&p, 1, sizeof *p, "a program", e))
        return e->code;
    p->backend = b;
    p->groups = o->groups;
    lm_code rc = build(o, LM_MODE_TRAIN, c, b, &p->train, e);
    if (!rc && validation)
        rc = build(o, LM_MODE_EVAL, c, b, &p->eval, e);
    if (!rc)
        rc = sum_losses(p, e);
    if (!rc) {
        u.sample_stride = lm_monitor_stride(p->train->train_end);
        u.samples = lm_monitor_count(p->train->train_end);
        rc = lm_groups_update(&p->groups, p->train, &u, &p->update, e);
    }
    if (rc) {
        lm_program_free(p);
        return rc;
    }
    *out = p;
    return LM_OK;
}

void lm_program_free(lm_program *p)
{
    if (!p)
        return;
    lm_update_free(p->update);
    lm_model_free(p->train);
    lm_model_free(p->eval);
    lm_free(p);
}
