/* SPDX-License-Identifier: Apache-2.0 */
/* update.c -- the graph of an update: blocks and their views, the rules' nodes, and the parts of the list.
 *
 * While the list is built, a node's condition (lm_node.when) holds its part; then the parts are put
 * in order, joined if possible, and the conditions become those of the run. */
#include "train/update.h"

#include <string.h>

#include "base/mem.h"
#include "graph/passes.h"
#include "kernels/optim.h"
#include "op/ops.h"
#include "train/optim/rule.h"
#include "train/update_impl.h"

/* ---- for rules ---- */

lm_graph *lm_update_graph(const lm_update *u)
{
    return u->g;
}

const lm_optim_use *lm_update_use(const lm_update *u)
{
    return u->at_work;
}

double lm_update_hyper(const lm_update *u, const char *name)
{
    return u->at_work->hyper[lm_optim_hyper(u->at_work->optim, name)];
}

lm_vid lm_update_numbers(const lm_update *u)
{
    return u->numbers[u->at_work - u->use];
}

lm_vid lm_update_average_keeps(const lm_update *u)
{
    return u->keeps[u->at_work - u->use];
}

lm_vid lm_update_beside_numbers(const lm_update *u)
{
    return u->beside;
}

lm_code lm_update_const(lm_update *u, lm_tensor shape, const void *number, lm_vid *out, lm_err *e)
{
    const size_t bytes = (size_t)lm_tensor_count(&shape) * lm_dtype_size(shape.dtype);
    for (size_t i = 0; i < u->n_constants; i++) {
        const lm_tensor *t = &u->g->value[u->constant[i].value].t;
        if (u->constant[i].number && t->dtype == shape.dtype && lm_same_shape(t, &shape) &&
            !memcmp(u->constant[i].number, number, bytes)) {
            *out = u->constant[i].value;
            return LM_OK;
        }
    }
    if (update_room(u, shape, out, e))
        return e->code;
    memcpy(u->constant[u->n_constants - 1].number, number, bytes);
    return LM_OK;
}

lm_code update_scratch(lm_update *u, lm_tensor shape, lm_vid *out, lm_err *e)
{
    if (lm_grow(&u->constant, &u->cap_constants, u->n_constants + 1, sizeof *u->constant,
                "constants", e) ||
        lm_graph_value(u->g, LM_ROLE_CONST, shape, NULL, out, e))
        return e->code;
    u->constant[u->n_constants++] = (lm_update_constant){
        .value = *out, .bytes = (size_t)lm_tensor_count(&shape) * lm_dtype_size(shape.dtype)
    };
    return LM_OK;
}

lm_code update_room(lm_update *u, lm_tensor shape, lm_vid *out, lm_err *e)
{
    lm_update_constant *c;
    if (update_scratch(u, shape, out, e))
        return e->code;
    c = &u->constant[u->n_constants - 1];
    return lm_alloc_n(&c->number, c->bytes, 1, "constants", e);
}

lm_vid lm_update_sumsq(const lm_update *u)
{
    return u->v.sumsq;
}

lm_vid lm_update_watch(const lm_update *u)
{
    return u->v.loss;
}

lm_vid lm_update_scale(const lm_update *u)
{
    return u->scale;
}

double lm_update_clip_norm(const lm_update *u)
{
    return u->o.clip_norm;
}

double lm_update_clip_value(const lm_update *u)
{
    return u->o.clip_value;
}

lm_code lm_update_every(lm_update *u, int64_t period, int64_t offset, bool first, lm_err *e)
{
    update_condition c = { period, period > 0 ? offset % period : 0, first || period <= 0 };
    size_t k = 0;
    while (k < u->n_conds && (u->cond[k].period != c.period || u->cond[k].offset != c.offset ||
                              u->cond[k].first != c.first))
        k++;
    if (k == u->n_conds) {
        if (lm_grow(&u->cond, &u->cap_conds, k + 1, sizeof *u->cond, "conditions", e))
            return e->code;
        u->cond[u->n_conds++] = c;
    }
    u->g->when = LM_UPDATE_PARTS + (int)k;
    return LM_OK;
}

void lm_update_at_start(lm_update *u)
{
    u->g->when = LM_UPDATE_START;
}

void lm_update_to_show(lm_update *u)
{
    u->g->when = LM_UPDATE_SHOW;
}

void lm_update_to_penalise(lm_update *u)
{
    u->g->when = LM_UPDATE_PENALTY;
}

void lm_update_always(lm_update *u)
{
    u->g->when = LM_UPDATE_STEP;
}

/* ---- values ---- */

/* Those of the rule, then that of its average. */
static int numbers_of(const lm_optim_use *use)
{
    return lm_optim_numbers(use->optim) + (use->ema > 0);
}

static lm_code make_values(lm_update *u, lm_err *e)
{
    const lm_update_opts *o = &u->o;
    lm_update_values *v = &u->v;
    lm_graph *g = u->g;
    lm_tensor one = lm_shape1(LM_DTYPE_F64, 1), sample = lm_shape1(LM_DTYPE_F32, o->samples);
    v->low = v->before = v->grads = v->after = LM_NONE;
    if (lm_graph_value(g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, o->block), "parameters", &v->param,
                       e) ||
        lm_graph_value(g, LM_ROLE_GRAD, lm_shape1(LM_DTYPE_F32, o->trained), "gradients", &v->grad,
                       e) ||
        (o->low && lm_graph_value(g, LM_ROLE_DERIVED, lm_shape1(LM_DTYPE_BF16, o->block),
                                  "parameters in bf16", &v->low, e)) ||
        lm_graph_value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_F64, u->n_numbers), "numbers",
                       &v->numbers, e) ||
        lm_graph_value(g, LM_ROLE_INPUT, one, "loss", &v->loss, e) ||
        lm_graph_value(g, LM_ROLE_STATE, one, "sumsq of gradients", &v->sumsq, e) ||
        lm_graph_value(g, LM_ROLE_STATE, one, "sumsq of parameters", &v->weights, e))
        return e->code;
    if (!o->samples)
        return LM_OK;
    return lm_graph_value(g, LM_ROLE_STATE, sample, "parameters before", &v->before, e) ||
                   lm_graph_value(g, LM_ROLE_STATE, sample, "gradients sampled", &v->grads, e) ||
                   lm_graph_value(g, LM_ROLE_STATE, sample, "parameters after", &v->after, e)
               ? e->code
               : LM_OK;
}

static lm_code make_views(lm_update *u, lm_err *e)
{
    char name[512];
    for (int i = 0, at = 0; i < u->o.n_use; i++) {
        int n = lm_optim_numbers(u->use[i].optim);
        u->keeps[i] = LM_NONE;
        if (lm_graph_view(u->g, u->v.numbers, at, lm_shape1(LM_DTYPE_F64, n), NULL, &u->numbers[i],
                          e) ||
            (u->use[i].ema > 0 && lm_graph_view(u->g, u->v.numbers, at + n,
                                                lm_shape1(LM_DTYPE_F64, 1), NULL, &u->keeps[i], e)))
            return e->code;
        at += numbers_of(&u->use[i]);
    }
    int own = u->o.beside ? u->o.beside->n_numbers : 0;
    u->beside = LM_NONE;
    if (own && lm_graph_view(u->g, u->v.numbers, u->n_numbers - own, lm_shape1(LM_DTYPE_F64, own),
                             NULL, &u->beside, e))
        return e->code;
    for (int i = 0; i < u->n_tensors; i++) {
        lm_update_tensor *t = &u->t[i];
        t->param = t->grad = t->low = t->packed = LM_NONE;
        if (update_is_elsewhere(t))
            continue;
        update_join_name(name, "grad", t->name);
        if (lm_graph_view(u->g, u->v.param, t->offset, t->shape, t->name, &t->param, e) ||
            lm_graph_view(u->g, u->v.grad, t->offset, t->shape, name, &t->grad, e) ||
            (u->v.low >= 0 && lm_graph_view(u->g, u->v.low, t->offset, t->shape, NULL,
                                            t->panels ? &t->packed : &t->low, e)))
            return e->code;
        if (t->packed >= 0)
            u->g->value[t->packed].t.panels = true;
    }
    return LM_OK;
}

/* ---- nodes ---- */

/* Of a block that ranks share, this rank's samples. */
static lm_code append_sample(lm_update *u, lm_update_part part, lm_vid of, lm_vid to, lm_err *e)
{
    const int64_t stride = u->o.sample_stride, *bound = u->bound;
    const int rank = bound ? u->o.mesh->rank[LM_AXIS_DP] : 0;
    const lm_strided_attr a = { stride };
    u->g->when = (int)part;
    if (to == LM_NONE)
        return LM_OK;
    if (bound) {
        const int64_t first = lm_update_first_sample(u, rank),
                      n = lm_update_first_sample(u, rank + 1) - first;
        if (n == 0)
            return LM_OK;
        if (update_view_run(u, of, first * stride, (first + n - 1) * stride + 1, &of, e) ||
            update_view_run(u, to, first, first + n, &to, e))
            return e->code;
    }
    return lm_graph_append(u->g, &lm_op_strided, &a, &of, &to, e);
}

/* Complete the nodes of one tensor. */
enum { COPY_OPEN = 1, COPY_SHOWN = 2 };

static lm_vid copy_of(const lm_update_tensor *t)
{
    return t->panels ? t->packed : t->low;
}

static unsigned char look_at(const lm_update *u, size_t from, const lm_update_tensor *t)
{
    lm_vid copy = copy_of(t);
    unsigned char left = copy >= 0 ? COPY_OPEN : 0;
    for (size_t k = from; k < u->g->n_nodes; k++) {
        const lm_node *n = &u->g->node[k];
        for (int i = 0; i < n->n_out; i++) {
            if (copy >= 0 && n->out[i] == copy && n->when != LM_UPDATE_SHOW)
                left &= (unsigned char)~COPY_OPEN;
            if (copy >= 0 && n->out[i] == t->param && n->when == LM_UPDATE_SHOW)
                left |= COPY_SHOWN;
        }
    }
    return left;
}

static lm_code append_rule(lm_update *u, const lm_update_tensor *t, unsigned char *left, lm_err *e)
{
    size_t from = u->g->n_nodes;
    lm_update_always(u);
    u->at_work = &u->use[t->use];
    u->g->layer = (int)t->layer;
    if (u->at_work->optim->update(u, t, e)) {
        lm_err_in(e, "%s of %s", u->at_work->optim->name, t->name);
        return e->code;
    }
    lm_update_always(u);
    if (u->o.beside && u->o.beside->tensor(u->o.beside->ctx, u, t, e))
        return e->code;
    *left = look_at(u, from, t);
    return update_note(u, (int)(t - u->t), e);
}

static bool has_shown(const lm_update *u)
{
    for (size_t k = 0; k < u->g->n_nodes; k++)
        if (u->g->node[k].when == LM_UPDATE_SHOW)
            return true;
    return false;
}

/* All at the end of their part, where they are joined to runs. */
static lm_code append_copies(lm_update *u, lm_update_part part, const unsigned char *left,
                             unsigned char which, lm_err *e)
{
    u->g->when = (int)part;
    for (int i = 0; i < u->n_tensors; i++) {
        const lm_op *op = u->t[i].panels ? &lm_op_panels : &lm_op_cast;
        lm_vid copy = copy_of(&u->t[i]);
        if ((left[i] & which) &&
            (lm_graph_append(u->g, op, NULL, &u->t[i].param, &copy, e) || update_note(u, i, e)))
            return e->code;
    }
    return LM_OK;
}

/* Averages of parameters, if a use has them: they are shown instead of the parameters. */
static lm_code append_averages(lm_update *u, unsigned char *left, lm_err *e)
{
    for (int i = 0; i < u->n_tensors; i++) {
        lm_update_always(u);
        u->at_work = &u->use[u->t[i].use];
        u->g->layer = (int)u->t[i].layer;
        if (!(u->at_work->ema > 0))
            continue;
        const bool elsewhere = update_is_elsewhere(&u->t[i]);
        u->owned = u->t[i].cut && u->t[i].cut->on;
        if (elsewhere)
            update_leave(u, i, lm_rule_average, e);
        else
            lm_rule_average(u, &u->t[i], e);
        u->owned = false;
        if (e->code || update_note(u, i, e))
            return e->code;
        if (elsewhere)
            continue;
        left[i] |= copy_of(&u->t[i]) >= 0 ? COPY_SHOWN : 0;
    }
    return LM_OK;
}

/* The step of one tensor: here, on the rank that owns it, or on another one that has it. */
static lm_code append_step(lm_update *u, int i, const update_owner *o, unsigned char *left,
                           lm_err *e)
{
    lm_update_tensor *t = &u->t[i];
    u->owned = o->owned || (t->cut && t->cut->on);
    if (o->owned) {
        *left = copy_of(t) >= 0 ? COPY_OPEN : 0;
        update_owned_rule(u, i, o, e);
    } else if (update_is_elsewhere(t)) {
        update_leave(u, i, u->use[t->use].optim->update, e);
    } else {
        append_rule(u, t, left, e);
    }
    u->owned = false;
    return e->code;
}

static lm_code append_rules(lm_update *u, lm_err *e)
{
    unsigned char *left = NULL;
    update_owner *own = NULL;
    if (!lm_alloc_n(&left, (size_t)u->n_tensors + 1, 1, "a list of tensors", e) &&
        !lm_alloc_n(&own, (size_t)u->n_tensors + 1, sizeof *own, "a list of tensors", e))
        update_collect(u, own, e);
    for (int i = 0; !e->code && i < u->n_tensors; i++)
        append_step(u, i, &own[i], &left[i], e);
    if (!e->code && !update_deal(u, own, e) && !append_averages(u, left, e)) {
        u->g->layer = -1;
        append_copies(u, LM_UPDATE_STEP, left, COPY_OPEN, e);
        if (!e->code)
            append_copies(u, LM_UPDATE_SHOW, left, COPY_SHOWN, e);
    }
    u->shows = has_shown(u);
    lm_free(left);
    lm_free(own);
    return e->code;
}

static lm_code append_all(lm_update *u, lm_err *e)
{
    u->g->phase = LM_PHASE_UPDATE;
    u->g->layer = -1;
    if (update_append_norm(u, e) || update_note(u, -1, e) || append_rules(u, e) ||
        update_share(u, e))
        return e->code;
    update_fill_blocks(u);
    if (append_sample(u, LM_UPDATE_BEFORE, u->v.param, u->v.before, e) ||
        append_sample(u, LM_UPDATE_BEFORE, u->v.grad, u->v.grads, e) ||
        append_sample(u, LM_UPDATE_AFTER, u->v.param, u->v.after, e))
        return e->code;
    u->g->when = LM_UPDATE_CHECK;
    return update_append_sumsq(u, u->v.param, u->v.weights, e);
}

/* ---- the finished list ---- */

static lm_update_part part_of(const lm_node *n)
{
    return n->when < LM_UPDATE_PARTS ? (lm_update_part)n->when : LM_UPDATE_STEP;
}

static bool is_read(const lm_graph *g, lm_vid v)
{
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_in; i++)
            if (g->node[k].in[i] == v)
                return true;
    return false;
}

/* True if a node makes no number: of a tensor of which this rank has nothing.  What goes to another rank is made there. */
static bool is_empty(const lm_graph *g, const lm_node *n)
{
    bool empty = n->op != &lm_op_collect;
    for (int i = 0; i < n->n_out; i++)
        empty &= n->out[i] < 0 || lm_tensor_count(&g->value[n->out[i]].t) == 0;
    return empty;
}

/* Parts in their order, nodes of a part as they were appended; the factor for gradients only if it
 * is read. */
static lm_code order_parts(lm_update *u, lm_err *e)
{
    lm_graph *g = u->g;
    lm_node *list = NULL;
    size_t n = 0;
    bool scaled = is_read(g, u->scale);
    if (lm_alloc_n(&list, g->n_nodes, sizeof *list, "nodes", e))
        return e->code;
    for (int p = 0; p < LM_UPDATE_PARTS; p++)
        for (size_t k = 0; k < g->n_nodes; k++)
            if (part_of(&g->node[k]) == (lm_update_part)p && !is_empty(g, &g->node[k]) &&
                (scaled || g->node[k].op != &lm_op_clip))
                list[n++] = g->node[k];
    memcpy(g->node, list, n * sizeof *list);
    g->n_nodes = n;
    lm_free(list);
    return LM_OK;
}

static void mark_parts(lm_update *u)
{
    lm_graph *g = u->g;
    size_t k = 0;
    for (int p = 0; p < LM_UPDATE_PARTS; p++)
        for (u->first[p] = k; k < g->n_nodes && part_of(&g->node[k]) == (lm_update_part)p; k++)
            ;
    u->first[LM_UPDATE_PARTS] = k;
    for (k = 0; k < g->n_nodes; k++) {
        int w = g->node[k].when;
        g->node[k].when = w >= LM_UPDATE_PARTS ? w - LM_UPDATE_PARTS + 1 : 0;
    }
}

/* ---- life ---- */

static lm_code set_up(lm_update *u, const lm_update_opts *o, const lm_update_tensor *t, int n,
                      lm_err *e)
{
    u->o = *o;
    u->n_tensors = n;
    if (lm_alloc_n(&u->use, (size_t)o->n_use, sizeof *u->use, "optimisers", e) ||
        lm_alloc_n(&u->numbers, (size_t)o->n_use, sizeof *u->numbers, "optimisers", e) ||
        lm_alloc_n(&u->keeps, (size_t)o->n_use, sizeof *u->keeps, "optimisers", e) ||
        lm_alloc_n(&u->t, (size_t)n + 1, sizeof *u->t, "a list of tensors", e) ||
        lm_graph_new(&u->g, e))
        return e->code;
    u->g->space = o->space;
    memcpy(u->use, o->use, (size_t)o->n_use * sizeof *u->use);
    u->o.use = u->use;
    memcpy(u->t, t, (size_t)n * sizeof *u->t);
    for (int i = 0; i < n && !o->norm_blocks; i++) {
        u->t[i].whole = update_count(&t[i]);
        u->t[i].norm_at = i ? u->t[i - 1].norm_at + update_norm_blocks(u->t[i - 1].whole) : 0;
        u->o.norm_blocks = u->t[i].norm_at + update_norm_blocks(u->t[i].whole);
    }
    for (int i = 0; i < o->n_use; i++) {
        const lm_optim *optim = u->use[i].optim;
        u->n_numbers += numbers_of(&u->use[i]);
        if (optim->check && optim->check(u->use[i].hyper, e))
            return e->code;
    }
    u->n_numbers += o->beside ? o->beside->n_numbers : 0;
    return LM_OK;
}

lm_code lm_update_build(const lm_update_opts *o, const lm_update_tensor *t, int n, lm_update **out,
                        lm_err *e)
{
    lm_update *u = NULL;
    *out = NULL;
    if (lm_alloc_n(&u, 1, sizeof *u, "an update", e))
        return e->code;
    if (set_up(u, o, t, n, e) || make_values(u, e) || make_views(u, e) || append_all(u, e) ||
        order_parts(u, e) || lm_pass_merge(u->g, e) ||
        lm_alloc_n(&u->due, u->n_conds + 1, sizeof *u->due, "conditions", e)) {
        lm_update_free(u);
        return e->code;
    }
    update_close_states(u);
    mark_parts(u);
    *out = u;
    return LM_OK;
}

void lm_update_free(lm_update *u)
{
    if (!u)
        return;
    for (size_t k = 0; k < u->n_states; k++)
        lm_free(u->state[k].part);
    for (size_t i = 0; i < u->n_constants; i++)
        lm_free(u->constant[i].number);
    lm_free(u->constant);
    lm_free(u->state);
    lm_free(u->state_value);
    lm_free(u->cap_parts);
    lm_free(u->cond);
    lm_free(u->due);
    lm_free(u->use);
    lm_free(u->numbers);
    lm_free(u->keeps);
    lm_free(u->t);
    update_share_fini(u);
    lm_graph_free(u->g);
    lm_free(u);
}

/* ---- for the program that runs it ---- */

void lm_update_part_at(const lm_update *u, lm_update_part p, size_t *first, size_t *last)
{
    *first = u->first[p];
    *last = u->first[p + 1];
}

const lm_update_values *lm_update_value(const lm_update *u)
{
    return &u->v;
}

int lm_update_states(const lm_update *u, const lm_store_state **state, const lm_vid **value)
{
    *state = u->state;
    *value = u->state_value;
    return (int)u->n_states;
}

int lm_update_constants(const lm_update *u, const lm_update_constant **out)
{
    *out = u->constant;
    return (int)u->n_constants;
}

int lm_update_n_numbers(const lm_update *u)
{
    return u->n_numbers;
}

void lm_update_numbers_at(const lm_update *u, double lr, int64_t t, double *out)
{
    for (int i = 0; i < u->o.n_use; i++) {
        const lm_optim_use *use = &u->use[i];
        if (use->optim->numbers)
            use->optim->numbers(use->hyper, lr * use->rate, t, out);
        else
            out[0] = lr * use->rate;
        out += lm_optim_numbers(use->optim);
        if (use->ema > 0)
            *out++ = lm_rule_average_keeps(use->ema, t);
    }
    if (u->o.beside && u->o.beside->n_numbers)
        u->o.beside->numbers(u->o.beside->ctx, t, out);
}

const bool *lm_update_due(lm_update *u, int64_t t)
{
    u->due[0] = true;
    for (size_t k = 0; k < u->n_conds; k++) {
        const update_condition *c = &u->cond[k];
        u->due[k + 1] = (t == 0 && c->first) || (c->period > 0 && t % c->period == c->offset);
    }
    return u->due;
}

bool lm_update_is_steady(const lm_update *u)
{
    return u->n_conds == 0;
}

bool lm_update_shows(const lm_update *u)
{
    return u->shows;
}
