/* SPDX-License-Identifier: Apache-2.0 */
/* mesh_plan.c -- the lists of all ranks of a mesh, built, checked against each other, and costed. */
#include "train/mesh_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/par.h"
#include "kernels/comm.h"
#include "op/ops.h"
#include "train/trainer_impl.h"

/* What of a list others must agree with. */
typedef struct {
    lm_memory_plan plan;
    uint64_t exchanges
        [LM_AXES]; /* digests: along each axis, in order, of what all its ranks must do alike */
    uint64_t *give[2],
        *take[2];       /* [borders] of what goes down and up; 0: not over this rank's border */
    lm_pipe_cost *cost; /* [stages] FLOPs of this rank's, of a micro-batch */
    lm_err failure;
} list;

typedef struct {
    const lm_trainer_opts *o;
    const lm_config *c;
    lm_backend *b;
    bool validation, lmz;
    int pp, inner, stages;
    list *list; /* [pp][inner] */
} maker;

/* ---- one list ---- */

/* The coordinates of list number i; along dp the first. */
static lm_mesh mesh_of(const maker *m, int i)
{
    lm_mesh mesh = m->o->mesh;
    int part = i % m->inner;
    mesh.rank[LM_AXIS_DP] = 0;
    mesh.rank[LM_AXIS_PP] = i / m->inner;
    for (int k = 0; k < LM_INNER_AXES; k++) {
        const int size = lm_mesh_along(&mesh, lm_inner_axes[k]);
        mesh.rank[lm_inner_axes[k]] = part % size;
        part /= size;
    }
    return mesh;
}

static uint64_t add_number(uint64_t digest, int64_t n)
{
    return lm_hash64(&n, sizeof n, digest);
}

static uint64_t add_shape(uint64_t digest, const lm_tensor *t, int but)
{
    digest = add_number(digest, t->dtype);
    for (int d = 0; d < t->ndim; d++)
        digest = d == but ? digest : add_number(digest, t->dim[d]);
    return digest;
}

static uint64_t add_pieces(uint64_t digest, const lm_portions *p)
{
    for (int i = 0; i < p->n; i++)
        digest = add_number(add_number(add_number(digest, p->run[i].times), p->run[i].size),
                            p->run[i].unit);
    return add_number(digest, 2 * p->n + p->ends);
}

/* What the ranks of an axis must have in common of an exchange: not how long their parts of the split dimension are. */
static uint64_t add_exchange(uint64_t digest, const lm_graph *g, const lm_node *n)
{
    const lm_exchange_attr *a = n->attr;
    digest = lm_hash64(n->op->name, strlen(n->op->name), digest);
    if (n->op == &lm_op_expert_rows || n->op == &lm_op_expert_sum)
        return digest; /* as many rows as the data say */
    digest = add_number(add_number(digest, a->op), a->sum);
    if (n->op == &lm_op_all_reduce)
        return add_shape(digest, &g->value[n->in[0]].t, -1);
    digest = add_pieces(add_number(add_number(digest, a->dim), a->len), &a->pieces);
    if (n->op == &lm_op_collect || n->op == &lm_op_deal) { /* the owner alone has the whole value */
        const lm_vid part = n->op == &lm_op_collect ? n->in[0] : n->out[0];
        return add_shape(add_number(digest, a->owner), &g->value[part].t, (int)a->dim);
    }
    if (n->op != &lm_op_all_to_all)
        return add_shape(digest, &g->value[n->in[0]].t, (int)a->dim);
    return add_pieces(add_number(add_number(digest, a->to_dim), a->to_len), &a->to_pieces);
}

static bool is_exchange(const lm_op *op)
{
    static const lm_op *const all[] = { &lm_op_all_reduce, &lm_op_reduce_scatter,
                                        &lm_op_all_gather, &lm_op_sum_shared,
                                        &lm_op_all_to_all, &lm_op_expert_rows,
                                        &lm_op_expert_sum, &lm_op_collect,
                                        &lm_op_deal };
    bool is = false;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        is |= op == all[i];
    return is;
}

static void see_exchanges(const lm_graph *g, list *l)
{
    for (size_t k = 0; k < g->n_nodes; k++)
        if (is_exchange(g->node[k].op)) {
            const int axis = ((const lm_exchange_attr *)g->node[k].attr)->axis;
            l->exchanges[axis] = add_exchange(l->exchanges[axis], g, &g->node[k]);
        }
}

static uint64_t border_digest(const lm_graph *g, const lm_stage_border *b, bool sends)
{
    uint64_t digest = 0;
    for (size_t i = 0; i < b->n; i++) {
        const lm_vid v = sends ? b->value[i].from : b->value[i].to;
        if (b->value[i].from >= 0 && b->value[i].to >= 0)
            continue; /* both stages are this rank's */
        if (v >= 0)
            digest = add_shape(add_number(digest, (int64_t)i + 1), &g->value[v].t, -1);
    }
    return digest;
}

/* stage[k].down and .up are of the border between stages k and k + 1. */
static void see_borders(const maker *m, const lm_model *x, list *l)
{
    for (int k = 0; k + 1 < m->stages; k++) {
        const lm_stage *s = &x->stages->stage[k];
        l->give[0][k] = border_digest(x->graph, &s->down, true);
        l->take[0][k] = border_digest(x->graph, &s->down, false);
        l->give[1][k] = border_digest(x->graph, &s->up, true);
        l->take[1][k] = border_digest(x->graph, &s->up, false);
    }
}

/* FLOPs of the sections of a stage. */
static void see_costs(const lm_model *x, list *l)
{
    const lm_graph *g = x->graph;
    for (int k = 0; k < x->stages->n; k++)
        for (int kind = 0; kind < LM_STAGE_KINDS && x->stages->stage[k].own; kind++)
            for (size_t i = x->stages->stage[k].first[kind]; i < x->stages->stage[k].last[kind];
                 i++) {
                lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
                lm_cost one = { 0 };
                const lm_node *n = &g->node[i];
                const lm_call c = lm_node_call(g, n, in, out);
                n->op->cost(&c, &one);
                *(kind == LM_STAGE_F                     ? &l->cost[k].f
                  : n->phase == LM_PHASE_BACKWARD_WEIGHT ? &l->cost[k].w
                                                         : &l->cost[k].b) += one.flops;
            }
}

static lm_code room_for_stages(const maker *m, list *l, lm_err *e)
{
    const size_t n = (size_t)m->stages;
    for (int i = 0; i < 2; i++)
        if (lm_alloc_n(&l->give[i], n, sizeof *l->give[i], "a plan", e) ||
            lm_alloc_n(&l->take[i], n, sizeof *l->take[i], "a plan", e))
            return e->code;
    return lm_alloc_n(&l->cost, n, sizeof *l->cost, "a plan", e);
}

static lm_code make_list(const maker *m, int i, list *l, lm_err *e)
{
    lm_trainer_opts own = *m->o;
    lm_program *p = NULL;
    own.mesh = mesh_of(m, i);
    if (room_for_stages(m, l, e) || lm_trainer_program(&own, m->c, m->validation, m->b, &p, e))
        return e->code;
    trainer_plan_rank(&own, p, m->lmz, &l->plan);
    lm_memory_costs(p, own.accumulate, &l->plan);
    see_exchanges(p->train->graph, l);
    see_exchanges(lm_update_graph(p->update), l);
    if (p->train->stages) {
        see_borders(m, p->train, l);
        see_costs(p->train, l);
    }
    lm_program_free(p);
    return LM_OK;
}

static void make_lists(void *ctx, int64_t begin, int64_t end, int worker)
{
    const maker *m = ctx;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        make_list(m, (int)i, &m->list[i], &m->list[i].failure);
}

/* ---- all lists ---- */

/* The list of the rank that is the first along an axis, and otherwise at the same place. */
static int first_along(const maker *m, int i, lm_axis axis)
{
    const lm_mesh mesh = mesh_of(m, i);
    int step = 1;
    for (int k = 0; lm_inner_axes[k] != axis; k++)
        step *= lm_mesh_along(&mesh, lm_inner_axes[k]);
    return i - mesh.rank[axis] * step;
}

static lm_code check_exchanges(const maker *m, int i, lm_err *e)
{
    for (int k = 0; k < LM_INNER_AXES; k++) {
        const lm_axis axis = lm_inner_axes[k];
        const int first = first_along(m, i, axis);
        if (m->list[i].exchanges[axis] != m->list[first].exchanges[axis])
            return lm_fail(e, LM_EBUG, lm_axis_names[axis], NULL,
                           "rank %d of the axis exchanges other values than rank 0, at stage %d",
                           mesh_of(m, i).rank[axis], i / m->inner);
    }
    return LM_OK;
}

/* Of the ranks along pp that have the stages, at one place of the other axes. */
static lm_code check_borders(const maker *m, int part, const int *rank, lm_err *e)
{
    for (int k = 0; k + 1 < m->stages; k++) {
        const list *lower = &m->list[rank[k] * m->inner + part],
                   *upper = &m->list[rank[k + 1] * m->inner + part];
        if (lower->give[0][k] != upper->take[0][k] || upper->give[1][k] != lower->take[1][k])
            return lm_fail(e, LM_EBUG, "stages", NULL,
                           "stage %d and stage %d do not exchange the same values", k, k + 1);
    }
    return LM_OK;
}

static lm_code check_lists(const maker *m, lm_err *e)
{
    const int n = m->pp * m->inner;
    for (int i = 0; i < n; i++)
        if (m->list[i].failure.code) {
            *e = m->list[i].failure;
            return e->code;
        }
    for (int i = 0; i < n; i++)
        if (check_exchanges(m, i, e))
            return e->code;
    for (int part = 0; part < m->inner && m->o->pipe; part++)
        for (int way = 0; way < m->o->pipe->ways; way++)
            if (check_borders(m, part, m->o->pipe->rank[way], e))
                return e->code;
    return LM_OK;
}

/* A step of stages waits for the slowest part of each. */
static lm_code find_bubble(const maker *m, double *bubble, lm_err *e)
{
    const lm_train_pipe *pipe = m->o->pipe;
    lm_pipe_cost *cost = NULL;
    lm_pipe_times times;
    if (!pipe)
        return LM_OK;
    if (lm_alloc_n(&cost, (size_t)m->stages, sizeof *cost, "a plan", e))
        return e->code;
    for (int i = 0; i < m->pp * m->inner; i++)
        for (int k = 0; k < m->stages; k++) {
            const lm_pipe_cost *x = &m->list[i].cost[k];
            if (x->f + x->b + x->w > cost[k].f + cost[k].b + cost[k].w)
                cost[k] = *x;
        }
    lm_code rc = lm_pipeline_time(&pipe->rows, cost, &times, e);
    if (!rc) {
        for (int r = 0; r < pipe->rows.ranks; r++)
            *bubble += (1 - times.busy[r] / times.makespan) / pipe->rows.ranks;
        lm_pipe_times_fini(&times, pipe->rows.ranks);
    }
    lm_free(cost);
    return rc;
}

static bool are_alike(const lm_memory_plan *a, const lm_memory_plan *b)
{
    bool same = a->n_rows == b->n_rows && a->total == b->total && a->device == b->device;
    for (int i = 0; same && i < a->n_rows; i++)
        same = a->row[i].bytes == b->row[i].bytes && !strcmp(a->row[i].name, b->row[i].name);
    for (int i = 0; same && i < LM_AXES; i++)
        same = a->given[i] == b->given[i];
    for (int i = 0; same && i < LM_PHASE_COUNT; i++)
        same = a->graph_flops[i] == b->graph_flops[i];
    return same;
}

static void add_ranks(const maker *m, int i, bool alike, lm_mesh_plan *out)
{
    const lm_mesh mesh = mesh_of(m, i);
    const int64_t dp = lm_mesh_along(&mesh, LM_AXIS_DP);
    lm_rank_plan *r = &out->rank[out->n++];
    *r = (lm_rank_plan){ .ranks = alike ? dp * m->inner : dp, .plan = m->list[i].plan };
    for (int k = 0; k < LM_AXES; k++)
        r->at[k] =
            k == LM_AXIS_DP || lm_mesh_along(&mesh, (lm_axis)k) == 1 || (alike && k != LM_AXIS_PP)
                ? -1
                : mesh.rank[k];
}

/* The ranks of a stage are one entry if all are alike. */
static lm_code join(const maker *m, lm_mesh_plan *out, lm_err *e)
{
    if (lm_alloc_n(&out->rank, (size_t)(m->pp * m->inner), sizeof *out->rank, "a plan", e))
        return e->code;
    for (int s = 0; s < m->pp; s++) {
        bool alike = true;
        const list *l = &m->list[s * m->inner];
        for (int part = 1; part < m->inner; part++)
            alike &= are_alike(&l[part].plan, &l->plan);
        for (int part = 0; part < (alike ? 1 : m->inner); part++)
            add_ranks(m, s * m->inner + part, alike, out);
    }
    return LM_OK;
}

static void drop_lists(const maker *m)
{
    for (int i = 0; m->list && i < m->pp * m->inner; i++) {
        for (int k = 0; k < 2; k++) {
            lm_free(m->list[i].give[k]);
            lm_free(m->list[i].take[k]);
        }
        lm_free(m->list[i].cost);
    }
    lm_free(m->list);
}

lm_code lm_mesh_plan_make(const lm_trainer_opts *o, const lm_program *p, bool lmz, int threads,
                          lm_mesh_plan *out, lm_err *e)
{
    maker m = { .o = o,
                .c = p->config,
                .b = p->backend,
                .validation = p->eval,
                .lmz = lmz,
                .pp = o->pipe ? lm_mesh_along(&o->mesh, LM_AXIS_PP) : 1,
                .inner = (int)lm_mesh_inner(&o->mesh),
                .stages = o->pipe ? o->pipe->stages.n : 1 };
    const int n = m.pp * m.inner;
    lm_par *par = NULL;
    *out = (lm_mesh_plan){ .bubble = m.stages > 1 ? 0 : -1 };
    if (lm_mesh_ranks(&o->mesh) <= 1)
        return LM_OK;
    if (!lm_alloc_n(&m.list, (size_t)n, sizeof *m.list, "a plan", e) &&
        !lm_par_new(&par, threads, e)) {
        lm_par_for(par, n, 1, make_lists, &m);
        if (!check_lists(&m, e) && !join(&m, out, e))
            find_bubble(&m, &out->bubble, e);
        out->lists = n;
    }
    lm_par_free(par);
    drop_lists(&m);
    if (e->code)
        lm_mesh_plan_fini(out);
    return e->code;
}

void lm_mesh_plan_fini(lm_mesh_plan *p)
{
    lm_free(p->rank);
    *p = (lm_mesh_plan){ .bubble = -1 };
}

double lm_mesh_plan_largest(const lm_mesh_plan *p)
{
    double most = 0;
    for (int i = 0; i < p->n; i++)
        most = p->rank[i].plan.total > most ? p->rank[i].plan.total : most;
    return most;
}
