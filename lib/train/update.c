/* SPDX-License-Identifier: Apache-2.0 */
/* update.c -- the graph of an update: blocks and their views, the rules' nodes, and the parts of the list.
 *
 * While the list is built, a node's condition (lm_node.when) holds its part; then the parts are put
 * in order, joined if possible, and the conditions become those of the run. */
#include "train/update.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "graph/passes.h"
#include "kernels/comm.h"
#include "kernels/optim.h"
#include "kernels/panels.h"
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
        if (t->dtype == shape.dtype && lm_same_shape(t, &shape) &&
            !memcmp(u->constant[i].number, number, bytes)) {
            *out = u->constant[i].value;
            return LM_OK;
        }
    }
    if (lm_grow(&u->constant, &u->cap_constants, u->n_constants + 1, sizeof *u->constant,
                "constants", e) ||
        lm_graph_value(u->g, LM_ROLE_CONST, shape, NULL, out, e))
        return e->code;
    lm_update_constant *c = &u->constant[u->n_constants];
    *c = (lm_update_constant){ .value = *out, .bytes = bytes };
    if (lm_alloc_n(&c->number, bytes, 1, "constants", e))
        return e->code;
    memcpy(c->number, number, bytes);
    u->n_constants++;
    return LM_OK;
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

/* ---- states ---- */

/* Values have these shapes until all tensors have their offsets in a block. */
static const int64_t boundless = INT64_C(1) << 60;

/* A block for each name and type: rules of two groups may keep states of one name in different types. */
static lm_code find_state(lm_update *u, const char *name, lm_dtype format, size_t *out, lm_err *e)
{
    size_t k = 0;
    while (k < u->n_states && (u->state[k].format != format || strcmp(u->state[k].name, name)))
        k++;
    *out = k;
    if (k < u->n_states)
        return LM_OK;
    if (lm_grow(&u->state, &u->cap_states, k + 1, sizeof *u->state, "states", e) ||
        lm_grow(&u->state_value, &u->cap_values, k + 1, sizeof *u->state_value, "states", e) ||
        lm_grow(&u->cap_parts, &u->cap_caps, k + 1, sizeof *u->cap_parts, "states", e) ||
        lm_graph_value(u->g, LM_ROLE_OPT, lm_shape1(format, boundless), name, &u->state_value[k],
                       e))
        return e->code;
    u->state[k] = (lm_store_state){ .name = u->g->value[u->state_value[k]].name, .format = format };
    u->cap_parts[k] = 0;
    u->n_states++;
    return LM_OK;
}

static int64_t norm_blocks(int64_t count)
{
    return (count + LM_SUM_BLOCK - 1) / LM_SUM_BLOCK;
}

static bool is_elsewhere(const lm_update_tensor *t)
{
    return t->cut && t->cut->none;
}

/* The last part of a block that is on this rank, and elements up to its end; NULL, and 0: there is none. */
static const struct lm_state_part *last_here(const lm_store_state *s, int64_t *end)
{
    int n = s->n_parts;
    while (n > 0 && s->part[n - 1].none)
        n--;
    *end = n ? s->part[n - 1].at + lm_tensor_count(&s->part[n - 1].shape) : 0;
    return n ? &s->part[n - 1] : NULL;
}

static int64_t align_up(int64_t n)
{
    return (n + LM_BLOCK_ALIGN - 1) / LM_BLOCK_ALIGN * LM_BLOCK_ALIGN;
}

/* States are in the order of their parameters, so that runs over parameters are runs over
 * states. */
static int64_t place_for(const lm_store_state *s, const lm_update_tensor *all,
                         const lm_update_tensor *t, int64_t count)
{
    int64_t end;
    const struct lm_state_part *last = last_here(s, &end);
    const lm_update_tensor *before = t;
    while (before > all && is_elsewhere(before - 1))
        before--;
    if (last && before > all && before[-1].index == last->tensor && count == update_count(t) &&
        lm_tensor_count(&last->shape) == update_count(before - 1)) {
        const int64_t gap = t->offset - before[-1].offset - update_count(before - 1);
        if (gap < LM_BLOCK_ALIGN)
            return end + gap;
    }
    return align_up(end);
}

/* prefix.name, truncated if it is too long. */
static void join_name(char out[512], const char *prefix, const char *name)
{
    size_t n = strlen(prefix), m = strlen(name);
    n = n < 200 ? n : 200;
    m = m < 300 ? m : 300;
    memcpy(out, prefix, n);
    out[n] = '.';
    memcpy(out + n + 1, name, m);
    out[n + 1 + m] = 0;
}

lm_code lm_update_state(lm_update *u, const lm_update_tensor *t, const char *name, lm_tensor shape,
                        lm_vid *out, lm_err *e)
{
    char full[512];
    size_t k;
    if (find_state(u, name, shape.dtype, &k, e))
        return e->code;
    lm_store_state *s = &u->state[k];
    if (t < u->t || t >= u->t + u->n_tensors)
        return lm_fail(e, LM_EBUG, name, NULL,
                       "a state of a value that is not a tensor of the model");
    if (s->n_parts && s->part[s->n_parts - 1].tensor == t->index)
        return lm_fail(e, LM_EBUG, name, NULL, "is declared twice for %s", t->name);
    if (lm_grow(&s->part, &u->cap_parts[k], (size_t)s->n_parts + 1, sizeof *s->part, "states", e))
        return e->code;
    int64_t at = u->elsewhere ? 0 : place_for(s, u->t, t, lm_tensor_count(&shape));
    s->part[s->n_parts++] =
        (struct lm_state_part){ .tensor = t->index,
                                .at = at,
                                .shape = shape,
                                .turned = t->transposed && lm_same_shape(&shape, &t->shape),
                                .none = u->elsewhere };
    if (u->elsewhere)
        return lm_graph_value(u->g, LM_ROLE_CONST, shape, NULL, out, e);
    join_name(full, name, t->name);
    return lm_graph_view(u->g, u->state_value[k], at, shape, full, out, e);
}

static int by_tensor(const void *a, const void *b)
{
    const struct lm_state_part *x = a, *y = b;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Set the sizes of blocks, and the order of tensors in files to that of the model. */
static void close_states(lm_update *u)
{
    for (size_t k = 0; k < u->n_states; k++) {
        lm_store_state *s = &u->state[k];
        last_here(s, &s->count);
        s->count = align_up(s->count > 0 ? s->count : 1);
        u->g->value[u->state_value[k]].t.dim[0] = s->count;
        qsort(s->part, (size_t)s->n_parts, sizeof *s->part, by_tensor);
    }
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
        if (is_elsewhere(t))
            continue;
        join_name(name, "grad", t->name);
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

/* The exchange of the ranks along an axis. */
static lm_exchange_attr along(const lm_update *u, lm_axis axis)
{
    const lm_mesh *mesh = u->o.mesh;
    return (lm_exchange_attr){ .axis = (int)axis,
                               .ranks = mesh->size[axis],
                               .rank = mesh->rank[axis],
                               .op = LM_EXCHANGE_SUM };
}

static bool is_split(const lm_update *u)
{
    return u->o.mesh && lm_mesh_inner(u->o.mesh) > 1;
}

/* The end of the run of tensors from number i on that lie one behind another, up to the zeros between them, and for which
 * `has` holds; *end: of its elements. */
static int run_from(const lm_update *u, int i, bool (*has)(const lm_update *, int, lm_axis),
                    lm_axis axis, int64_t *end)
{
    *end = u->t[i].offset;
    for (; i < u->n_tensors && has(u, i, axis) && u->t[i].offset - *end < LM_BLOCK_ALIGN; i++)
        *end = u->t[i].offset + update_count(&u->t[i]);
    return i;
}

static lm_code view_run(lm_update *u, lm_vid of, int64_t from, int64_t end, lm_vid *out, lm_err *e)
{
    return lm_graph_view(u->g, of, from, lm_shape1(LM_DTYPE_F32, end - from), NULL, out, e);
}

static bool is_addend(const lm_update *u, int i, lm_axis axis)
{
    return u->t[i].sums[axis] == LM_SUMS_ALL;
}

/* Gradients that are addends along an axis become their sums, in place. */
static lm_code append_sums(lm_update *u, lm_axis axis, lm_err *e)
{
    lm_exchange_attr a = along(u, axis);
    for (int i = 0; i < u->n_tensors; i++) {
        const lm_update_tensor *t = &u->t[i];
        const lm_sums sums = t->sums[axis];
        const lm_op *op = sums == LM_SUMS_ALL ? &lm_op_all_reduce : &lm_op_sum_shared;
        lm_vid x = t->grad;
        int64_t end;
        if (sums == LM_SUMS_NONE || !update_count(t) ||
            (t->cut && sums == LM_SUMS_SHARED &&
             !lm_portions_shared(&t->cut->pieces, (int)a.ranks)))
            continue;
        if (sums == LM_SUMS_ALL) {
            const int next = run_from(u, i, is_addend, axis, &end);
            if (view_run(u, u->v.grad, t->offset, end, &x, e))
                return e->code;
            i = next - 1;
        } else {
            a.dim = t->cut->dim;
            a.len = t->cut->whole;
            a.pieces = t->cut->pieces;
            a.sum = true;
        }
        lm_vid out = x;
        if (lm_graph_append(u->g, op, &a, &x, &out, e))
            return e->code;
    }
    return LM_OK;
}

/* Whether this rank counts tensor i: of those that hold the same numbers one does. */
static bool counts(const lm_update *u, int i)
{
    const lm_cut *cut = u->t[i].cut;
    bool first = true;
    for (int k = 0; u->o.mesh && k < LM_INNER_AXES; k++)
        first &= u->o.mesh->rank[lm_inner_axes[k]] == 0;
    return cut ? cut->counts : first;
}

/* The table of blocks, filled when it is known which tensors are this rank's. */
static lm_code make_blocks(lm_update *u, lm_err *e)
{
    const int64_t n = u->o.norm_blocks;
    lm_sum_block *none = NULL;
    if (lm_alloc_n(&none, (size_t)n, sizeof *none, "blocks of sums", e))
        return e->code;
    lm_code rc = lm_update_const(u, lm_shape2(LM_DTYPE_I32, n, 3), none, &u->blocks, e);
    lm_free(none);
    return rc;
}

/* The blocks of this rank's tensors at their places among those of the whole model; the others stay empty. */
static void fill_blocks(lm_update *u)
{
    size_t c = 0;
    while (u->constant[c].value != u->blocks)
        c++;
    lm_sum_block *block = u->constant[c].number;
    for (int i = 0; i < u->n_tensors; i++) {
        const lm_update_tensor *t = &u->t[i];
        int64_t from, end;
        update_own_range(u, i, &from, &end);
        for (int64_t k = from / LM_SUM_BLOCK; counts(u, i) && k * LM_SUM_BLOCK < end; k++) {
            const int64_t at = t->offset + k * LM_SUM_BLOCK, left = end - k * LM_SUM_BLOCK;
            block[t->norm_at + k] =
                (lm_sum_block){ .page = (int32_t)(at / LM_SUM_BLOCK),
                                .first = (int32_t)(at % LM_SUM_BLOCK),
                                .count = (int32_t)(left < LM_SUM_BLOCK ? left : LM_SUM_BLOCK) };
        }
    }
}

/* Whether the ranks along an axis have different tensors, or parts of them: those along dp have the same, unless they share
 * them. */
static bool is_across(const lm_update *u, lm_axis axis)
{
    return (axis != LM_AXIS_DP || u->o.zero) && u->o.mesh && lm_mesh_along(u->o.mesh, axis) > 1;
}

/* s = the sum of squares of a block, of all ranks together: where one rank has a block, the sums over the ranks are its own,
 * to the bit. */
static lm_code append_sumsq(lm_update *u, lm_vid of, lm_vid s, lm_err *e)
{
    const lm_vid in[2] = { of, u->blocks };
    lm_vid sums = LM_NONE;
    if (lm_graph_append(u->g, &lm_op_sumsq, NULL, in, &sums, e))
        return e->code;
    for (int axis = LM_AXES - 1; axis >= 0; axis--) {
        lm_vid all = sums; /* in place */
        if (!is_across(u, (lm_axis)axis))
            continue;
        const lm_exchange_attr a = along(u, (lm_axis)axis);
        if (lm_graph_append(u->g, &lm_op_all_reduce, &a, &sums, &all, e))
            return e->code;
    }
    return lm_graph_append(u->g, &lm_op_total, NULL, &sums, &s, e);
}

static lm_code append_all_sums(lm_update *u, lm_err *e)
{
    for (int k = LM_INNER_AXES - 1; is_split(u) && k >= 0; k--)
        if (lm_mesh_along(u->o.mesh, lm_inner_axes[k]) > 1 && append_sums(u, lm_inner_axes[k], e))
            return e->code;
    return LM_OK;
}

static lm_code append_norm(lm_update *u, lm_err *e)
{
    lm_clip_attr clip = { u->o.clip_norm };
    lm_vid both[2] = { u->v.sumsq, u->v.loss };
    u->g->when = LM_UPDATE_NORM;
    u->scale = LM_NONE;
    return make_blocks(u, e) || append_all_sums(u, e) ||
                   append_sumsq(u, u->v.grad, u->v.sumsq, e) ||
                   lm_graph_append(u->g, &lm_op_clip, &clip, both, &u->scale, e)
               ? e->code
               : LM_OK;
}

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
        if (view_run(u, of, first * stride, (first + n - 1) * stride + 1, &of, e) ||
            view_run(u, to, first, first + n, &to, e))
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

/* True if the node only has numbers that belong to no element of the tensor. */
static bool is_beside(const lm_update *u, const lm_node *n, const lm_tensor *shape)
{
    bool beside = true;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        beside &= v < 0 || lm_tensor_count(&u->g->value[v].t) < lm_tensor_count(shape);
    }
    return beside;
}

/* A rule whose nodes read whole matrices cannot step a part of one. */
static lm_code check_part(const lm_update *u, size_t from, const lm_update_tensor *t, lm_err *e)
{
    bool flat = true;
    for (size_t k = from; k < u->g->n_nodes; k++)
        flat &= u->g->node[k].op->flat || is_beside(u, &u->g->node[k], &t->shape);
    for (size_t k = 0; k < u->n_states; k++) {
        const lm_store_state *s = &u->state[k];
        const struct lm_state_part *last = s->n_parts ? &s->part[s->n_parts - 1] : NULL;
        flat &= !last || last->tensor != t->index || lm_tensor_count(&last->shape) == 1 ||
                lm_same_shape(&last->shape, &t->shape);
    }
    return flat ? LM_OK
                : lm_fail(e, LM_EUSAGE, u->at_work->optim->name,
                          "choose an optimiser of single elements (adamw, lion), or tp=1",
                          "steps %s as a whole, and each rank has a part of it", t->name);
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
    if (t->cut && t->cut->ranks > 1 && check_part(u, from, t, e))
        return e->code;
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

/* What a rule makes of a tensor that another rank has, except its states' places in files, is left out. */
static lm_code leave_rule(lm_update *u, int i,
                          lm_code (*rule)(lm_update *, const lm_update_tensor *, lm_err *),
                          lm_err *e)
{
    const lm_update_tensor here = u->t[i];
    lm_update_tensor *t = &u->t[i];
    const size_t nodes = u->g->n_nodes;
    lm_tensor low;
    t->shape.dim[0] = here.cut->whole;
    t->cut = NULL;
    low = t->shape;
    low.dtype = LM_DTYPE_BF16;
    u->at_work = &u->use[t->use];
    u->elsewhere = true;
    lm_update_always(u);
    if (!lm_graph_value(u->g, LM_ROLE_CONST, t->shape, t->name, &t->param, e) &&
        !lm_graph_value(u->g, LM_ROLE_CONST, t->shape, NULL, &t->grad, e) &&
        (u->v.low < 0 ||
         !lm_graph_value(u->g, LM_ROLE_CONST, low, NULL, t->panels ? &t->packed : &t->low, e)) &&
        rule(u, t, e))
        lm_err_in(e, "%s of %s", u->at_work->optim->name, t->name);
    u->elsewhere = false;
    u->g->n_nodes = nodes;
    u->t[i] = here;
    return e->code;
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
        if (is_elsewhere(&u->t[i])) {
            if (leave_rule(u, i, lm_rule_average, e))
                return e->code;
            continue;
        }
        if (lm_rule_average(u, &u->t[i], e) || update_note(u, i, e))
            return e->code;
        left[i] |= copy_of(&u->t[i]) >= 0 ? COPY_SHOWN : 0;
    }
    return LM_OK;
}

static lm_code append_rules(lm_update *u, lm_err *e)
{
    unsigned char *left = NULL;
    lm_code rc = lm_alloc_n(&left, (size_t)u->n_tensors + 1, 1, "a list of tensors", e);
    for (int i = 0; !rc && i < u->n_tensors; i++)
        rc = is_elsewhere(&u->t[i]) ? leave_rule(u, i, u->use[u->t[i].use].optim->update, e)
                                    : append_rule(u, &u->t[i], &left[i], e);
    if (!rc)
        rc = append_averages(u, left, e);
    u->g->layer = -1;
    if (!rc)
        rc = append_copies(u, LM_UPDATE_STEP, left, COPY_OPEN, e);
    if (!rc)
        rc = append_copies(u, LM_UPDATE_SHOW, left, COPY_SHOWN, e);
    u->shows = has_shown(u);
    lm_free(left);
    return rc;
}

static lm_code append_all(lm_update *u, lm_err *e)
{
    u->g->phase = LM_PHASE_UPDATE;
    u->g->layer = -1;
    if (append_norm(u, e) || update_note(u, -1, e) || append_rules(u, e) || update_share(u, e))
        return e->code;
    fill_blocks(u);
    if (append_sample(u, LM_UPDATE_BEFORE, u->v.param, u->v.before, e) ||
        append_sample(u, LM_UPDATE_BEFORE, u->v.grad, u->v.grads, e) ||
        append_sample(u, LM_UPDATE_AFTER, u->v.param, u->v.after, e))
        return e->code;
    u->g->when = LM_UPDATE_CHECK;
    return append_sumsq(u, u->v.param, u->v.weights, e);
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

/* True if a node makes no number: of a tensor of which this rank has nothing. */
static bool is_empty(const lm_graph *g, const lm_node *n)
{
    bool empty = true;
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
        u->t[i].norm_at = i ? u->t[i - 1].norm_at + norm_blocks(u->t[i - 1].whole) : 0;
        u->o.norm_blocks = u->t[i].norm_at + norm_blocks(u->t[i].whole);
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
    close_states(u);
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

/* ---- of a model ---- */

/* Of tensors at one place the ones of which this rank has nothing come first, so that all ranks have the same neighbours. */
static int by_offset(const void *a, const void *b)
{
    const lm_update_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    const bool first = update_count(x) == 0, second = update_count(y) == 0;
    return first != second ? second - first : x->index - y->index;
}

static int64_t count_whole(const lm_slice *s)
{
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->dim[i];
    return n;
}

/* Borders of rows are borders of blocks of the norms and of panels; files must not turn matrices of a stack one by one. */
static int64_t unit_of(const lm_slice *s, int64_t width)
{
    int64_t unit = LM_PANEL;
    if (s->transposed && s->stack > 1)
        return 0;
    while (unit * width % LM_SUM_BLOCK)
        unit *= 2;
    return unit;
}

static void describe(const lm_model *m, int i, lm_update_tensor *t)
{
    const lm_slice *s = &m->slice[i];
    const lm_param *p = &m->param[s->param];
    const lm_tensor *whole = &m->graph->value[p->value].t;
    *t = (lm_update_tensor){ .name = s->name,
                             .shape = *whole,
                             .transposed = s->transposed,
                             .decay = p->decay,
                             .layer = -1,
                             .cut = s->cut.ranks ? &s->cut : NULL,
                             .sums = p->sums,
                             .offset = p->offset + s->row * (p->count / whole->dim[0]),
                             .whole = count_whole(s),
                             .unit = unit_of(s, p->count / whole->dim[0]),
                             .index = i };
    t->shape.dtype = LM_DTYPE_F32;
    t->shape.data = NULL;
    t->shape.panels = false;
    t->panels = whole->panels;
    t->shape.dim[0] = s->rows;
}

/* The layer of a tensor: the encoder's have numbers of their own. */
static const lm_layer *layer_of(const lm_config *c, const lm_model_tensor *t)
{
    const char *encoders = c->encoder ? c->encoder->arch->layers : NULL;
    return encoders && !strncmp(t->hf, encoders, strlen(encoders)) ? &c->encoder->layer[t->layer]
                                                                   : &c->layer[t->layer];
}

/* The tensor of conversion's list with this name; *at: the start of the search, as both lists are
 * ordered by layers. */
static void name_part(const lm_config *c, const lm_model_tensor *known, size_t n, size_t *at,
                      lm_update_tensor *t)
{
    size_t k = *at, left = n;
    for (; left && strcmp(known[k].hf, t->name); left--)
        k = (k + 1) % n;
    if (!left)
        return;
    *at = (k + 1) % n;
    t->part = known[k].part;
    t->bias = known[k].bias;
    t->layer = known[k].layer;
    bool q = t->part == LM_PART_Q, kv = t->part == LM_PART_K || t->part == LM_PART_V;
    if (q || kv || t->part == LM_PART_QKV) {
        const lm_layer *y = layer_of(c, &known[k]);
        t->heads = q ? y->heads : kv ? y->kv_heads : y->heads + 2 * y->kv_heads;
        t->head_dim = y->head_dim;
        if (t->cut && t->cut->dim == 0 && !t->cut->none)
            t->heads = t->shape.dim[0] / y->head_dim;
    }
}

lm_code lm_update_tensors(const lm_model *m, lm_update_tensor **out, int *n, int64_t *blocks,
                          lm_err *e)
{
    lm_model_tensor *known = NULL;
    lm_update_tensor *t = NULL;
    size_t n_known = 0, at = 0;
    *out = NULL;
    *n = 0;
    *blocks = 0;
    if (lm_model_tensors_make_all(&m->config, &known, &n_known, e))
        return e->code;
    lm_code rc = lm_alloc_n(&t, (size_t)m->n_slices + 1, sizeof *t, "a list of tensors", e);
    for (int i = 0; !rc && i < m->n_slices; i++) {
        if (!m->slice[i].trains)
            continue;
        describe(m, i, &t[*n]);
        t[*n].norm_at = *blocks;
        *blocks += norm_blocks(t[*n].whole);
        name_part(&m->config, known, n_known, &at, &t[(*n)++]);
    }
    lm_free(known);
    if (rc)
        return rc;
    qsort(t, (size_t)*n, sizeof *t, by_offset);
    *out = t;
    return LM_OK;
}
