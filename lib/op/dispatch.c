/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch.c -- rows at the ranks of their experts: operators of kernels/dispatch.h, and the rules by which the sharding pass
 * puts them in place of those of routing (op/route.c).  It runs behind the backward, so that none has a gradient. */
#include "kernels/dispatch.h"

#include <string.h>

#include "kernels/route.h"
#include "numeric/portions.h"
#include "op/dispatch.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field fields[] = { { LM_ATTR_WORD(lm_dispatch_attr, axis, lm_axis_names) },
                                   { LM_ATTR_INT(lm_dispatch_attr, tokens, 'T') },
                                   { LM_ATTR_INT(lm_dispatch_attr, k, 'K') },
                                   { LM_ATTR_INT(lm_dispatch_attr, experts, 'E') },
                                   { LM_ATTR_INT(lm_dispatch_attr, rows, 'R') },
                                   { LM_ATTR_INT(lm_dispatch_attr, most, 0) },
                                   { 0 } };
static const lm_field offsets_fields[] = { { LM_ATTR_INT(lm_expert_offsets_attr, first, 0) },
                                           { LM_ATTR_INT(lm_expert_offsets_attr, count, 'G') },
                                           { 0 } };

static const lm_portions whole;

static lm_range held(int64_t len, int64_t ranks, int64_t rank)
{
    lm_range r = { 0 };
    lm_portions_at(&whole, len, (int)ranks, (int)rank, 0, &r);
    return r;
}

/* ---- checks and costs ---- */

static lm_code expect_tokens(const lm_call *c, const lm_tensor *t, const char *op, lm_err *e)
{
    const lm_dispatch_attr *a = c->attr;
    return lm_expect(
        a->k > 0 && a->ranks > 0 && a->rank >= 0 && a->rank < a->ranks &&
            (!t || lm_absent(t) || t->dim[0] == held(a->tokens, a->ranks, a->rank).count),
        op, e, "rows are not this rank's of %lld tokens", (long long)a->tokens);
}

static lm_code rows_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return expect_tokens(c, &c->in[0], "expert_rows", e);
}

static lm_code sum_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return expect_tokens(c, &c->out[0], "expert_sum", e);
}

static lm_code any_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return expect_tokens(c, NULL, "experts", e);
}

static lm_code offsets_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_expert_offsets_attr *a = c->attr;
    (void)want;
    return lm_expect(a->first >= 0 && a->count > 0 && a->first + a->count < c->in[0].dim[0],
                     "expert_offsets", e, "%lld experts from %lld on are not among %lld",
                     (long long)a->count, (long long)a->first, (long long)(c->in[0].dim[0] - 1));
}

/* Numbers of the rows of this rank, which are shared out evenly, one hopes. */
static double mean_numbers(const lm_call *c, int from, const lm_tensor *rows)
{
    const lm_dispatch_attr *a = c->attr;
    return (double)c->in[from].dim[0] / (double)a->ranks * (double)rows->dim[1];
}

static void scale_cost(const lm_call *c, lm_cost *out)
{
    const double n = mean_numbers(c, 1, &c->in[0]);
    out->flops = n;
    out->bytes = 2 * n * (double)lm_dtype_size(c->in[0].dtype);
}

static void dot_cost(const lm_call *c, lm_cost *out)
{
    const double n = mean_numbers(c, 2, &c->in[0]);
    out->flops = 2 * n;
    out->bytes = 2 * n * (double)lm_dtype_size(c->in[0].dtype);
}

static void move_cost(const lm_call *c, lm_cost *out)
{
    const lm_dispatch_attr *a = c->attr;
    const double n = (double)a->ranks;
    out->flops = 0;
    out->bytes = 2 * lm_dispatch_bytes(c);
    out->sent[a->axis] += (n - 1) / n * lm_dispatch_bytes(c);
}

static void sum_cost(const lm_call *c, lm_cost *out)
{
    move_cost(c, out);
    out->flops = 2 * mean_numbers(c, 1, &c->in[0]);
}

static void offsets_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

double lm_dispatch_bytes(const lm_call *c)
{
    const lm_dispatch_attr *a = c->attr;
    const double all = (double)(a->tokens * a->k), plan = (double)c->in[1].dim[0];
    return (all < plan ? all : plan) / (double)a->ranks * (double)c->in[0].dim[1] *
           (double)lm_dtype_size(c->in[0].dtype);
}

static void live_rows(const lm_call *c, lm_live_rows *out)
{
    const lm_dispatch_attr *a = c->attr;
    *out = (lm_live_rows){ .of = 3,
                           .mean = (c->in[1].dim[0] + a->ranks - 1) / a->ranks,
                           .most = a->most };
}

/* ---- examples: of one rank, which has all tokens and experts ---- */

static lm_dispatch_attr draw(lm_rng r, int i, lm_tensor *x, lm_tensor *y, lm_tensor plan[2])
{
    lm_dispatch_attr a = { .axis = LM_AXIS_EP,
                           .ranks = 1,
                           .tokens = lm_example_size(r, i, 0, 40),
                           .k = 1 + (int64_t)lm_example_draw(r, i, 1, 4),
                           .experts = 4 + lm_example_size(r, i, 2, 13) };
    const int64_t cols = lm_example_size(r, i, 3, 70);
    *x = lm_shape2(LM_DTYPE_F32, a.tokens, cols);
    a.rows = a.most = a.tokens * a.k + i % 3;
    *y = lm_shape2(LM_DTYPE_F32, a.rows, cols);
    plan[0] = lm_shape1(LM_DTYPE_I32, y->dim[0]);
    plan[1] = lm_shape1(LM_DTYPE_I32, a.experts + 1);
    return a;
}

/* Some rows are of no assignment, and each assignment of one row at most; borders at random. */
static void fill_plan(lm_rng r, const lm_dispatch_attr *a, const lm_tensor *from_of,
                      const lm_tensor *offsets_of)
{
    int32_t *from = from_of->data, *offsets = offsets_of->data;
    const int64_t rows = from_of->dim[0], all = a->tokens * a->k;
    for (int64_t i = 0; i < rows; i++)
        from[i] = i < all && lm_rng_below(r, (uint64_t)i, 6)
                      ? (int32_t)lm_rng_permute(r, (uint64_t)i, (uint64_t)all)
                      : -1;
    for (int64_t g = 0; g <= a->experts; g++)
        offsets[g] = (int32_t)(g == 0 ? 0 : g == a->experts ? all : all * g / a->experts);
}

static void fill_second(lm_rng r, const lm_call *c)
{
    fill_plan(r, c->attr, &c->in[1], &c->in[2]);
}

static void fill_third(lm_rng r, const lm_call *c)
{
    fill_plan(r, c->attr, &c->in[2], &c->in[3]);
}

static void rows_example(lm_rng r, int i, lm_example *x)
{
    lm_tensor y;
    *x = (lm_example){ .n_in = 4, .want = 1 };
    const lm_dispatch_attr a = draw(r, i, &x->in[0], &y, &x->in[1]);
    x->in[3] = x->in[2]; /* one rank has all experts */
    lm_example_attr(x, &a);
}

static void scale_example(lm_rng r, int i, lm_example *x)
{
    lm_tensor tokens;
    *x = (lm_example){ .n_in = 4, .want = 1 };
    const lm_dispatch_attr a = draw(r, i, &tokens, &x->in[0], &x->in[1]);
    x->in[3] = lm_shape2(LM_DTYPE_F32, a.tokens, a.k);
    lm_example_attr(x, &a);
}

static void sum_example(lm_rng r, int i, lm_example *x)
{
    lm_tensor tokens;
    *x = (lm_example){ .n_in = i % 3 ? 4 : 3, .want = 1 };
    const lm_dispatch_attr a = draw(r, i, &tokens, &x->in[0], &x->in[1]);
    if (i % 3)
        x->in[3] = lm_shape2(LM_DTYPE_F32, a.tokens, a.k);
    x->out[0] = tokens;
    x->out[0].dtype = LM_DTYPE_NONE;
    lm_example_attr(x, &a);
}

static void dot_example(lm_rng r, int i, lm_example *x)
{
    lm_tensor tokens;
    *x = (lm_example){ .n_in = 4, .want = 1 };
    const lm_dispatch_attr a = draw(r, i, &tokens, &x->in[0], &x->in[2]);
    x->in[1] = x->in[0];
    lm_example_attr(x, &a);
}

static void offsets_example(lm_rng r, int i, lm_example *x)
{
    const int64_t experts = 2 + lm_example_size(r, i, 0, 40);
    const lm_expert_offsets_attr a = { .first = (int64_t)lm_example_draw(r, i, 1, 2),
                                       .count = 1 + (experts - 2) / (1 + i % 3) };
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape1(LM_DTYPE_I32, experts + 1);
    lm_example_attr(x, &a);
}

static void offsets_fill(lm_rng r, const lm_call *c)
{
    int32_t *at = c->in[0].data;
    for (int64_t i = 0; i < c->in[0].dim[0]; i++)
        at[i] = (i ? at[i - 1] : 0) + (int32_t)lm_rng_below(r, (uint64_t)i, 20);
}

#define DISPATCH(title, rule, price, sample, filling)                                    \
    .name = title, .attr_size = sizeof(lm_dispatch_attr), .fields = fields, .split = "", \
    .prec = LM_PREC_INFER, .tolerance = { 2e-6, 4e-3 }, .shape = rule, .cost = price,    \
    .example = sample, .fill = filling

const lm_op lm_op_expert_rows = {
    DISPATCH("expert_rows", rows_shape, move_cost, rows_example, fill_second),
    .in = { { "x", "L,C", LM_ACT_TYPE },
            { "from", "P", LM_IDS },
            { "offsets", "E+1", LM_IDS },
            { "own", "G+1", LM_IDS } },
    .out = { { "y", "R,C", LM_ACT_TYPE } },
    .rows = live_rows,
};

const lm_op lm_op_expert_scale = {
    DISPATCH("expert_scale", any_shape, scale_cost, scale_example, fill_second),
    .in = { { "y", "R,C", LM_ACT_TYPE },
            { "from", "P", LM_IDS },
            { "offsets", "E+1", LM_IDS },
            { "weight", "T,K", 0 } },
    .out = { { "z", "R,C", LM_ACT_TYPE } },
};

const lm_op lm_op_expert_sum = {
    DISPATCH("expert_sum", sum_shape, sum_cost, sum_example, fill_second),
    .in = { { "y", "R,C", LM_ACT_TYPE },
            { "from", "P", LM_IDS },
            { "offsets", "E+1", LM_IDS },
            { "weight", "L,K", LM_OPTIONAL } },
    .out = { { "x", "L,C", LM_ACT_TYPE | LM_GIVEN } },
};

const lm_op lm_op_expert_dot = {
    DISPATCH("expert_dot", any_shape, dot_cost, dot_example, fill_third),
    .in = { { "x", "R,C", LM_ACT_TYPE },
            { "y", "R,C", LM_ACT_TYPE },
            { "from", "P", LM_IDS },
            { "offsets", "E+1", LM_IDS } },
    .out = { { "d", "T,K", 0 } },
};

const lm_op lm_op_expert_offsets = {
    .name = "expert_offsets",
    .attr_size = sizeof(lm_expert_offsets_attr),
    .in = { { "offsets", "E+1", LM_IDS } },
    .out = { { "own", "G+1", LM_IDS } },
    .fields = offsets_fields,
    .split = "",
    .prec = LM_PREC_INFER,
    .shape = offsets_shape,
    .cost = offsets_cost,
    .example = offsets_example,
    .fill = offsets_fill,
};

/* ---- rules of the sharding pass ---- */

/* Whether what an earlier node has made serves the backward, too: the few offsets of a rank. */
static bool outlives(const lm_node *n)
{
    return n->op == &lm_op_expert_offsets && n->phase == LM_PHASE_FORWARD;
}

/* The result of an earlier node of the same phase with the same operator, attributes and operands.  LM_NONE if the list has no
 * such node. */
static lm_vid made_before(const lm_graph *g, const lm_op *op, const void *attr, const lm_vid *in)
{
    for (size_t k = g->n_nodes; k-- > 0;) {
        const lm_node *n = &g->node[k];
        if (n->op == op && (n->phase == g->phase || outlives(n)) && n->when == g->when &&
            !memcmp(n->in, in, (size_t)n->n_in * sizeof *in) &&
            !memcmp(n->attr, attr, op->attr_size))
            return n->out[0];
    }
    return LM_NONE;
}

/* *out: what the operator makes of these, once for all readers of a phase. */
static lm_code make_once(lm_graph *g, const lm_op *op, const void *attr, const lm_vid *in,
                         lm_vid *out, lm_err *e)
{
    *out = made_before(g, op, attr, in);
    return *out >= 0 ? LM_OK : lm_graph_append(g, op, attr, in, out, e);
}

/* *out: the offsets of this rank's experts. */
static lm_code own_offsets(lm_shard_call *s, lm_vid offsets, lm_vid *out, lm_err *e)
{
    const lm_range mine = held(s->graph->value[offsets].t.dim[0] - 1, s->ranks, s->rank);
    lm_expert_offsets_attr a;
    memset(&a, 0, sizeof a); /* compared as bytes */
    a.first = mine.from;
    a.count = mine.count;
    return make_once(s->graph, &lm_op_expert_offsets, &a, &offsets, out, e);
}

static const lm_node *maker_of(const lm_graph *g, const lm_op *op, int out, lm_vid v)
{
    size_t k = g->n_nodes;
    while (k-- > 0)
        if (g->node[k].op == op && g->node[k].out[out] == v)
            return &g->node[k];
    return NULL;
}

/* Rows that an expert can have, of a plan with so many; which its router and the plan say. */
static int64_t most_of_expert(const lm_graph *g, lm_vid offsets, int64_t rows)
{
    const lm_node *plan = maker_of(g, &lm_op_route_plan, 0, offsets),
                  *choose = plan ? maker_of(g, &lm_op_route_choose, 1, plan->in[0]) : NULL;
    const int64_t pad = plan ? ((const lm_route_plan_attr *)plan->attr)->pad : 0,
                  capacity = choose ? ((const lm_route_attr *)choose->attr)->capacity : 0;
    return pad ? pad : capacity ? capacity : rows;
}

/* Of the plan with `place` [T,K], `from` [P] and `offsets` [E+1]. */
static lm_dispatch_attr attr_of(const lm_shard_call *s, lm_vid place, lm_vid from, lm_vid offsets)
{
    const lm_value *v = s->graph->value;
    lm_dispatch_attr a;
    memset(&a, 0, sizeof a); /* compared as bytes */
    a.axis = (int)s->axis;
    a.ranks = s->ranks;
    a.rank = s->rank;
    a.tokens = v[place].t.dim[0];
    a.k = v[place].t.dim[1];
    a.experts = v[offsets].t.dim[0] - 1;
    a.rows = v[from].t.dim[0];
    const int64_t each = most_of_expert(s->graph, offsets, a.rows),
                  mine = held(a.experts, a.ranks, a.rank).count;
    a.most = each < a.rows / mine ? each * mine : a.rows;
    return a;
}

bool lm_is_own(const lm_shard_call *s)
{
    return strchr(s->form, 'o') != NULL;
}

lm_code lm_route_rows_shard(lm_shard_call *s, lm_err *e)
{
    if (lm_is_own(s))
        return lm_shard_append(s, e);
    const lm_vid x = s->in[0], from = s->in[1], place = s->in[2], weight = s->in[3],
                 offsets = s->in[4];
    const lm_dispatch_attr a = attr_of(s, place, from, offsets);
    lm_vid y, own;
    if (own_offsets(s, offsets, &own, e) ||
        make_once(s->graph, &lm_op_expert_rows, &a, (lm_vid[]){ x, from, offsets, own }, &y, e))
        return e->code;
    if (weight >= 0)
        return lm_graph_append(s->graph, &lm_op_expert_scale, &a,
                               (lm_vid[]){ y, from, offsets, weight }, s->out, e);
    s->out[0] = y;
    return LM_OK;
}

lm_code lm_route_sum_shard(lm_shard_call *s, lm_err *e)
{
    if (lm_is_own(s))
        return lm_shard_append(s, e);
    const lm_dispatch_attr a = attr_of(s, s->in[2], s->in[1], s->in[4]);
    return lm_graph_append(s->graph, &lm_op_expert_sum, &a,
                           (lm_vid[]){ s->in[0], s->in[1], s->in[4], s->in[3] }, s->out, e);
}

lm_code lm_route_dot_shard(lm_shard_call *s, lm_err *e)
{
    if (lm_is_own(s))
        return lm_shard_append(s, e);
    const lm_vid x = s->in[0], y = s->in[1], from = s->in[2], place = s->in[3], offsets = s->in[4];
    const lm_dispatch_attr a = attr_of(s, place, from, offsets);
    lm_vid rows, own;
    return own_offsets(s, offsets, &own, e) ||
                   make_once(s->graph, &lm_op_expert_rows, &a, (lm_vid[]){ x, from, offsets, own },
                             &rows, e) ||
                   lm_graph_append(s->graph, &lm_op_expert_dot, &a,
                                   (lm_vid[]){ rows, y, from, offsets }, s->out, e)
               ? e->code
               : LM_OK;
}

lm_code lm_own_experts(lm_shard_call *s, int i, lm_err *e)
{
    return own_offsets(s, s->in[i], &s->in[i], e);
}
