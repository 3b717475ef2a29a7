/* SPDX-License-Identifier: Apache-2.0 */
/* program.c -- the graphs of a training step and their plans. */
#include "train/program.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "graph/gather.h"
#include "kernels/arrange.h"
#include "numeric/lapack.h"
#include "op/ops.h"
#include "train/monitor.h"

/* Losses that are evaluated are weighted by collision entropies; the others are for metrics and gradients. */
static lm_entropy entropy_of(const lm_program_opts *o, lm_mode mode)
{
    return mode == LM_MODE_TRAIN || o->entropy == LM_ENTROPY_COLLISION ? o->entropy
                                                                       : LM_ENTROPY_NONE;
}

static lm_code build(const lm_program *p, lm_mode mode, lm_model **out, lm_err *e)
{
    const lm_program_opts *o = &p->o;
    const lm_build how = { .mode = mode,
                           .batch = o->batch,
                           .seq = o->seq,
                           .source = o->source,
                           .precision = o->precision,
                           .documents = o->documents,
                           .dropout = o->dropout,
                           .halves = o->halves,
                           .recompute = o->build.recompute,
                           .routing = o->build.routing,
                           .choice = o->build.choice,
                           .pairs = mode == LM_MODE_TRAIN ? o->build.pairs : LM_PAIRS_NONE,
                           .ahead = mode == LM_MODE_TRAIN ? o->build.ahead : LM_AHEAD_NONE,
                           .entropy = entropy_of(o, mode),
                           .value = o->value,
                           .backend = p->backend,
                           .trainable = o->build.trainable,
                           .ctx = o->build.ctx,
                           .adapt = o->build.adapt,
                           .teacher = o->build.teacher,
                           .mesh = o->build.mesh,
                           .lay = o->build.lay,
                           .lay_rows = o->build.lay_rows,
                           .expert_room = o->build.expert_room,
                           .stages = o->build.stages,
                           .apart = mode == LM_MODE_TRAIN && o->build.apart,
                           .codes = o->build.codes,
                           .codes_space = o->build.codes_space,
                           .frozen_format = o->build.frozen_format,
                           .frozen_embed = o->build.frozen_embed,
                           .like = mode == LM_MODE_TRAIN ? NULL : p->train };
    return lm_model_build(p->config, &how, out, e);
}

/* A loss that another stage of a pipeline has stays 0 here. */
static lm_code append_total(lm_program *p, lm_vid loss, lm_vid sum, lm_err *e)
{
    return loss == LM_NONE ? LM_OK
                           : lm_graph_append(p->train->graph, &lm_op_total, NULL, &loss, &sum, e);
}

static lm_code sum_ahead(lm_program *p, lm_err *e)
{
    lm_graph *g = p->train->graph;
    char name[48];
    for (int64_t k = 0; k < lm_model_losses_ahead(p->train); k++) {
        snprintf(name, sizeof name, "loss of module %" PRId64 " of the step", k + 1);
        if (lm_graph_value(g, LM_ROLE_STATE, lm_shape1(LM_DTYPE_F64, 1), name, &p->ahead_sum[k],
                           e) ||
            append_total(p, p->train->ahead_loss[k], p->ahead_sum[k], e))
            return e->code;
    }
    return LM_OK;
}

static lm_code sum_losses(lm_program *p, lm_err *e)
{
    lm_graph *g = p->train->graph;
    g->phase = LM_PHASE_FORWARD;
    if (p->train->stages) /* these are the last one's */
        g->layer = (int)lm_config_all_layers(p->config);
    if (lm_graph_value(g, LM_ROLE_STATE, lm_shape1(LM_DTYPE_F64, 1), "loss of the step",
                       &p->loss_sum, e) ||
        append_total(p, p->train->loss, p->loss_sum, e) || sum_ahead(p, e) ||
        p->train->daux == LM_NONE)
        return e->code;
    return lm_graph_value(g, LM_ROLE_STATE, lm_shape1(LM_DTYPE_F64, 1), "further losses",
                          &p->aux_sum, e) ||
                   append_total(p, p->train->aux, p->aux_sum, e)
               ? e->code
               : LM_OK;
}

/* dw [n] of `accumulate` as a value that is kept between runs; v LM_NONE: another stage of a pipeline has it. */
static lm_code sum_value(lm_program *p, lm_vid v, int64_t n, const char *name, int64_t layer,
                         lm_vid *out, lm_err *e)
{
    const lm_accumulate_attr attr = { .acc = LM_ACC_FIRST };
    lm_graph *g = p->train->graph;
    char text[64];
    snprintf(text, sizeof text, "%s of layer %" PRId64, name, layer);
    if (p->train->stages)
        g->layer = (int)layer;
    return lm_graph_value(g, LM_ROLE_STATE, lm_shape1(LM_DTYPE_F32, n), text, out, e) ||
                   (v != LM_NONE && lm_graph_append(g, &lm_op_accumulate, &attr, &v, out, e))
               ? e->code
               : LM_OK;
}

/* True if the routers of a layer are watched, on whatever rank. */
static bool is_routed(const lm_program *p, int64_t layer)
{
    const lm_model *m = p->train;
    return m->routed[layer].load != LM_NONE ||
           (m->stages && p->config->layer[layer].moe.experts &&
            (layer < p->config->layers || m->build.ahead == LM_AHEAD_RUNS));
}

static lm_code sum_routed(lm_program *p, lm_err *e)
{
    const lm_model *m = p->train;
    const int64_t n = lm_config_depth(p->config);
    if (!m->routed)
        return LM_OK;
    if (lm_alloc_n(&p->routed, (size_t)n, sizeof *p->routed, "mixtures of experts", e))
        return e->code;
    for (int64_t l = 0; l < n; l++) {
        const int64_t experts = p->config->layer[l].moe.experts;
        lm_routed_sum *r = &p->routed[l];
        *r = (lm_routed_sum){ LM_NONE, LM_NONE, LM_NONE };
        if (is_routed(p, l) &&
            (sum_value(p, m->routed[l].load, experts, "load", l, &r->load, e) ||
             sum_value(p, m->routed[l].mean, experts, "mean", l, &r->mean, e) ||
             sum_value(p, m->routed[l].dropped, 1, "dropped", l, &r->dropped, e)))
            return e->code;
    }
    return LM_OK;
}

/* Ranks along dp share the update. */
static bool is_shared(const lm_program *p)
{
    return p->o.zero && lm_mesh_along(p->o.mesh, LM_AXIS_DP) > 1;
}

static bool has_same_update(const lm_program *p, const lm_program *like)
{
    return like && like->o.precision.low == p->o.precision.low && !is_shared(p) &&
           !lm_update_own(like->update);
}

static lm_code make_update(lm_program *p, const lm_program *like, lm_err *e)
{
    const lm_update_opts u = { .clip_norm = p->o.clip_norm,
                               .beside = p->o.beside,
                               .clip_value = p->o.clip_value,
                               .mesh = is_shared(p) ? p->o.mesh : p->o.build.mesh,
                               .zero = is_shared(p),
                               .space = p->train->graph->space,
                               .sample_stride = lm_monitor_stride(p->train->train_end),
                               .samples = lm_monitor_count(p->train->train_end) };
    p->borrows = has_same_update(p, like);
    if (!p->borrows)
        return lm_groups_update(&p->o.groups, p->train, &u, &p->update, e);
    p->update = like->update;
    return LM_OK;
}

/* On the host bases of matrices are LAPACK's, and kernels cannot fail: its absence is an error here. */
static lm_code check_bases(const lm_program *p, lm_err *e)
{
    static const lm_op *const of_lapack[] = { &lm_op_qr, &lm_op_eigh, &lm_op_eigh_next,
                                              &lm_op_svd };
    const lm_graph *g = lm_update_graph(p->update);
    const lm_lapack *table;
    for (size_t k = 0; p->backend->host_memory && k < g->n_nodes; k++)
        for (size_t i = 0; i < sizeof of_lapack / sizeof *of_lapack; i++)
            if (g->node[k].op == of_lapack[i])
                return lm_lapack_load(&table, e);
    return LM_OK;
}

/* ---- parameters that ranks share ---- */

/* The parameter of the training that parameter i of m, a model of the same config, is; NULL: it does not train. */
static const lm_param *find_trained(const lm_program *p, const lm_model *m, int i)
{
    const lm_model *train = p->train;
    int k = 0;
    while (k < m->n_slices && m->slice[k].param != i)
        k++;
    const int same = m == train || k == m->n_slices ? k : lm_model_slice(train, m->slice[k].name);
    const lm_param *found =
        k == m->n_slices || same < 0 ? NULL : &train->param[train->slice[same].param];
    return found && found->trains ? found : NULL;
}

/* sizes: [n_params][ranks]; by value: which of them, NULL for values that are no shared parameters. */
static void find_parts(const lm_program *p, const lm_model *m, int ranks, int64_t *sizes,
                       const int64_t **part)
{
    const int64_t *bound = lm_update_bounds(p->update);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *own = find_trained(p, m, i);
        int64_t *size = &sizes[(size_t)i * (size_t)ranks];
        for (int r = 0; own && r < ranks; r++) {
            const int64_t from = bound[r] > own->offset ? bound[r] : own->offset,
                          most = own->offset + own->count,
                          end = bound[r + 1] < most ? bound[r + 1] : most;
            size[r] = from < end ? end - from : 0;
        }
        if (own && own->count > 0)
            part[m->param[i].value] = size;
    }
}

/* The borders of the sections of a rank's stages. */
static lm_code find_borders(const lm_model *m, size_t ***out, size_t *n, lm_err *e)
{
    *n = 0;
    if (!m->stages)
        return LM_OK;
    if (lm_alloc_n(out, (size_t)m->stages->n * 2 * LM_STAGE_KINDS, sizeof **out, "stages", e))
        return e->code;
    for (int i = 0; i < m->stages->n; i++)
        for (int kind = 0; kind < LM_STAGE_KINDS; kind++) {
            (*out)[(*n)++] = &m->stages->stage[i].first[kind];
            (*out)[(*n)++] = &m->stages->stage[i].last[kind];
        }
    return LM_OK;
}

/* The copies are in no slots: they do not outlive their section. */
static lm_code widen_slots(lm_model *m, lm_err *e)
{
    lm_stage_list *l = m->stages;
    const size_t before = l ? l->n_values : 0, all = m->graph->n_values;
    if (!l || lm_realloc_n(&l->slot, all, sizeof *l->slot, "stages", e))
        return e->code;
    memset(l->slot + before, 0, (all - before) * sizeof *l->slot);
    l->n_values = all;
    return LM_OK;
}

/* Graphs read gathered copies of what trains. */
static lm_code gather(const lm_program *p, lm_model *m, lm_err *e)
{
    const int ranks = lm_mesh_along(p->o.mesh, LM_AXIS_DP);
    lm_gather_opts o = { .axis = LM_AXIS_DP,
                         .ranks = ranks,
                         .rank = p->o.mesh->rank[LM_AXIS_DP],
                         .distance = p->o.gather_ahead };
    int64_t *sizes = NULL;
    const int64_t **part = NULL;
    if (!lm_alloc_n(&sizes, ((size_t)m->n_params + 1) * (size_t)ranks, sizeof *sizes, "parameters",
                    e) &&
        !lm_alloc_n(&part, m->graph->n_values, sizeof *part, "parameters", e) &&
        !find_borders(m, &o.border, &o.n_borders, e)) {
        find_parts(p, m, ranks, sizes, part);
        o.part = part;
        if (!lm_pass_gather(m->graph, &o, e))
            widen_slots(m, e);
    }
    lm_free(o.border);
    lm_free(part);
    lm_free(sizes);
    return e->code;
}

static lm_code gather_if_shared(const lm_program *p, lm_model *m, lm_err *e)
{
    return p->o.zero >= 3 && is_shared(p) ? gather(p, m, e) : LM_OK;
}

/* Tensors go to their owners in memory of the host. */
static lm_code check_owners(const lm_program *p, lm_err *e)
{
    const lm_graph *g = lm_update_graph(p->update);
    for (size_t k = 0; !p->backend->host_memory && k < g->n_nodes; k++)
        if (g->node[k].op == &lm_op_collect)
            return lm_fail(e, LM_EUSAGE, "optimiser",
                           "choose one of single elements (adamw, lion), or one rank along tp",
                           "it steps tensors as a whole, of which ranks on %s have parts",
                           p->backend->name);
    return LM_OK;
}

/* Of the stages that a rank has: what lives between their sections is in slots, and a loss, which is read behind an
 * evaluation. */
static lm_code plan_stages(lm_program *p, lm_model *m, lm_plan *out, lm_err *e)
{
    if (lm_stage_order(m->graph, p->o.build.stages, m->stages, e) || gather_if_shared(p, m, e))
        return e->code;
    if (m->loss != LM_NONE)
        m->stages->slot[m->loss] = m->stages->n;
    return lm_plan_make_slots(m->graph, p->backend, m->stages->slot, m->stages->n, out, e);
}

static lm_code plan_train(lm_program *p, lm_err *e)
{
    lm_vid read[LM_MODEL_ROWS]; /* between the halves */
    const int n = p->o.halves ? lm_model_rows(p->train, read) : 0;
    if (p->train->stages)
        return plan_stages(p, p->train, &p->train_plan, e);
    return gather_if_shared(p, p->train, e) ||
                   lm_plan_make(p->train->graph, p->backend, read, n, &p->train_plan, e)
               ? e->code
               : LM_OK;
}

static lm_code plan_eval(lm_program *p, lm_err *e)
{
    const lm_vid kept[] = { p->eval->loss, p->eval->entropy };
    if (p->eval->stages)
        return plan_stages(p, p->eval, &p->eval_plan, e);
    return gather_if_shared(p, p->eval, e) ||
                   lm_plan_make(p->eval->graph, p->backend, kept, p->eval->entropy < 0 ? 1 : 2,
                                &p->eval_plan, e)
               ? e->code
               : LM_OK;
}

static lm_code make_plans(lm_program *p, lm_err *e)
{
    return check_bases(p, e) || check_owners(p, e) || plan_train(p, e) ||
                   lm_plan_make(lm_update_graph(p->update), p->backend, NULL, 0, &p->update_plan,
                                e) ||
                   (p->eval && plan_eval(p, e))
               ? e->code
               : LM_OK;
}

lm_code lm_program_new(const lm_program_opts *o, const lm_config *c, bool validation, lm_backend *b,
                       const lm_program *like, lm_program **out, lm_err *e)
{
    lm_program *p = NULL;
    *out = NULL;
    if (lm_alloc_n(&p, 1, sizeof *p, "a program", e))
        return e->code;
    *p = (lm_program){ .backend = b, .config = c, .o = *o, .aux_sum = LM_NONE };
    if (build(p, LM_MODE_TRAIN, &p->train, e) ||
        (validation && build(p, LM_MODE_EVAL, &p->eval, e)) || sum_losses(p, e) ||
        sum_routed(p, e) || make_update(p, like, e) || make_plans(p, e)) {
        lm_program_free(p);
        return e->code;
    }
    *out = p;
    return LM_OK;
}

void lm_program_free(lm_program *p)
{
    if (!p)
        return;
    lm_program_rest(p);
    lm_plan_fini(&p->train_plan);
    lm_plan_fini(&p->update_plan);
    lm_plan_fini(&p->eval_plan);
    if (!p->borrows)
        lm_update_free(p->update);
    lm_free(p->routed);
    lm_model_free(p->train);
    lm_model_free(p->eval);
    lm_free(p);
}

lm_code lm_program_dump(const lm_program *p, lm_buf *out, lm_err *e)
{
    return lm_graph_dump(p->train->graph, out, e) ||
                   lm_graph_dump(lm_update_graph(p->update), out, e)
               ? e->code
               : LM_OK;
}
