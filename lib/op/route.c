/* SPDX-License-Identifier: Apache-2.0 */
/* route.c -- routing to experts: choices and losses, the order of rows, and the ways there and
 * back. */
#include "kernels/route.h"

#include "op/dispatch.h"
#include "op/example.h"
#include "op/ops.h"

static const char *const overflow_words[] = { "position", "probability", "reroute" };

static const lm_field choose_fields[] = { { LM_ATTR_INT(lm_route_attr, k, 'K') },
                                          { LM_ATTR_INT(lm_route_attr, capacity, 0) },
                                          { LM_ATTR_WORD(lm_route_attr, policy, overflow_words) },
                                          { LM_ATTR_FLAG(lm_route_attr, sigmoid) },
                                          { LM_ATTR_FLAG(lm_route_attr, normalise) },
                                          { LM_ATTR_RARE_FLAG(lm_route_attr, second_random) },
                                          { LM_ATTR_RARE_FLAG(lm_route_attr, by_expert) },
                                          { LM_ATTR_REAL(lm_route_attr, scale) },
                                          { LM_ATTR_INT(lm_route_attr, groups, 0) },
                                          { LM_ATTR_INT(lm_route_attr, kept_groups, 0) },
                                          { LM_ATTR_RARE_FLAG(lm_route_attr, group_max) },
                                          { LM_ATTR_INT(lm_route_attr, site, 0) },
                                          { 0 } };
static const lm_field plan_fields[] = { { LM_ATTR_INT(lm_route_plan_attr, experts, 'E') },
                                        { LM_ATTR_INT(lm_route_plan_attr, pad, 0) },
                                        { 0 } };
static const lm_field aux_fields[] = { { LM_ATTR_FLAG(lm_route_aux_attr, sigmoid) },
                                       { LM_ATTR_REAL(lm_route_aux_attr, balance) },
                                       { LM_ATTR_REAL(lm_route_aux_attr, sequence) },
                                       { LM_ATTR_REAL(lm_route_aux_attr, z) },
                                       { LM_ATTR_INT(lm_route_aux_attr, seq, 0) },
                                       { LM_ATTR_RARE_FLAG(lm_route_aux_attr, by_expert) },
                                       { LM_ATTR_RARE_REAL(lm_route_aux_attr, affinity) },
                                       { LM_ATTR_INT(lm_route_aux_attr, nodes, 0) },
                                       { 0 } };

/* ---- choices ---- */

/* Fails unless tensors of [tokens,k] and of `rows` rows can be indexed. */
static lm_code check_sizes(const char *op, int64_t tokens, int64_t k, int64_t rows, lm_err *e)
{
    return lm_expect(
        tokens <= INT32_MAX / k && rows <= INT32_MAX, op, e,
        "%lld tokens of %lld choices and %lld rows are too many for indices of 32 bits",
        (long long)tokens, (long long)k, (long long)rows);
}

static lm_code check_choices(const char *op, int64_t k, int64_t experts, lm_err *e)
{
    return lm_expect(k >= 1 && k <= experts && experts <= LM_ROUTE_MOST_EXPERTS, op, e,
                     "%lld choices among %lld experts, of at most %d", (long long)k,
                     (long long)experts, LM_ROUTE_MOST_EXPERTS);
}

static lm_code choose_shape(lm_call *c, unsigned want, lm_err *e)
{
    static const char name[] = "route_choose";
    const lm_route_attr *a = c->attr;
    int64_t experts = c->in[0].dim[1], size = a->groups > 1 ? experts / a->groups : experts;
    (void)want;
    if (check_choices(name, a->k, experts, e) ||
        check_sizes(name, c->in[0].dim[0], a->k, c->in[0].dim[0], e) ||
        lm_expect(a->capacity >= 0 && a->scale > 0, name, e,
                  "capacity %lld and scale %g are not positive", (long long)a->capacity,
                  a->scale) ||
        lm_expect(a->groups <= 1 || (experts % a->groups == 0 && a->kept_groups >= 1 &&
                                     a->kept_groups <= a->groups && a->kept_groups * size >= a->k),
                  name, e, "%lld choices are not in %lld of %lld groups of %lld experts",
                  (long long)a->k, (long long)a->kept_groups, (long long)a->groups,
                  (long long)experts) ||
        lm_expect(!a->second_random || a->k == 2, name, e, "a random second choice goes with 2"))
        return e->code;
    return lm_expect(!a->by_expert || (a->k == experts && a->capacity > 0 && a->groups <= 1 &&
                                       !a->normalise && !a->second_random && lm_absent(&c->in[1])),
                     name, e,
                     "choices by experts are all, with a capacity, without bias and groups");
}

static lm_code choose_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[3] = { n->in[0], n->out[1], lm_grad_of(s, n->out[0]) }, dz;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_choose_dz, n->attr, in, &dz, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dz, e);
}

/* An exponential is as dear as ten operations; choices pass over the experts once each. */
static void scores_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 12.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void choose_cost(const lm_call *c, lm_cost *out)
{
    scores_cost(c, out);
    out->flops += (double)((const lm_route_attr *)c->attr)->k * (double)lm_tensor_count(&c->in[0]);
}

/* Among fifteen examples: both scores, each policy, groups, experts that choose. */
static void choose_example(lm_rng r, int i, lm_example *x)
{
    int64_t tokens = lm_example_size(r, i, 0, 40), size = lm_example_size(r, i, 1, 33);
    int64_t groups = i % 4 == 1 ? 2 + (int64_t)lm_example_draw(r, i, 2, 3) : 1;
    int64_t experts = size * groups;
    lm_route_attr a = { .scale = i % 2 ? 2.5 : 1, .sigmoid = i % 3 == 1, .site = i };
    a.k = 1 + (int64_t)lm_example_draw(r, i, 3, (uint64_t)(experts < 8 ? experts : 8));
    a.normalise = a.k > 1 && lm_example_draw(r, i, 4, 2);
    a.groups = groups;
    a.group_max = i % 8 == 1;
    a.kept_groups = (a.k + size - 1) / size;
    a.by_expert = i % 7 == 3;
    a.second_random = i % 7 == 5 && experts >= 2 && groups == 1;
    if (a.second_random)
        a.k = 2;
    if (a.by_expert)
        a = (lm_route_attr){ .scale = 2, .sigmoid = a.sigmoid, .by_expert = true, .k = experts };
    if (a.by_expert || i % 5 > 1) {
        a.capacity = 1 + tokens * a.k / experts * 2 / 3;
        a.policy = (lm_overflow)(i % 5 % 3);
    }
    *x = (lm_example){ .n_in = 2, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, tokens, experts);
    if (i % 2 == 0 && !a.by_expert)
        x->in[1] = lm_shape1(LM_DTYPE_F32, experts);
    lm_example_attr(x, &a);
}

/* What an expert has room for, and draws, depend on the tokens before. */
static bool choose_splits(const lm_call *c, char letter)
{
    const lm_route_attr *a = c->attr;
    (void)letter;
    return !a->capacity && !a->second_random && !a->by_expert;
}

const lm_op lm_op_route_choose = {
    .name = "route_choose",
    .attr_size = sizeof(lm_route_attr),
    .in = { { "z", "T,E", 0 }, { "bias", "E", LM_OPTIONAL | LM_FIXED } },
    .out = { { "weight", "T,K", 0 }, { "expert", "T,K", LM_IDS | LM_SAVED } },
    .fields = choose_fields,
    .split = "T",
    .splits = choose_splits,
    .prec = LM_PREC_DENY,
    .tolerance = { 2e-6, 2e-6 },
    .shape = choose_shape,
    .grad = choose_grad,
    .cost = choose_cost,
    .example = choose_example,
};

const lm_op lm_op_route_choose_dz = {
    .name = "route_choose_dz",
    .attr_size = sizeof(lm_route_attr),
    .in = { { "z", "T,E", 0 }, { "expert", "T,K", LM_IDS }, { "dweight", "T,K", 0 } },
    .out = { { "dz", "T,E", 0 } },
    .fields = choose_fields,
    .split = "T",
    .prec = LM_PREC_DENY,
    .tolerance = { 1e-5, 1e-5 },
    .cost = scores_cost,
};

/* ---- the order of rows ---- */

static lm_code plan_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_route_plan_attr *a = c->attr;
    int64_t tokens = c->in[0].dim[0], k = c->in[0].dim[1], rows = tokens * k;
    (void)want;
    if (check_choices("route_plan", k, a->experts, e) ||
        lm_expect(a->pad >= 0 && a->pad <= INT32_MAX, "route_plan", e, "pad is %lld",
                  (long long)a->pad))
        return e->code;
    rows = a->pad ? a->experts * a->pad : rows;
    c->out[1].dim[0] = rows;
    return check_sizes("route_plan", tokens, k, rows, e);
}

static void move_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

/* K different experts of each token, of which about a seventh is dropped. */
static void fill_experts(lm_rng r, const lm_tensor *expert, int64_t experts)
{
    int32_t *id = expert->data;
    int64_t k = expert->dim[1];
    for (int64_t i = 0; i < lm_tensor_count(expert); i++) {
        lm_rng token = { r.key, r.hi + (uint64_t)(i / k) };
        id[i] = (int32_t)lm_rng_permute(token, (uint64_t)(i % k), (uint64_t)experts);
        id[i] = lm_rng_below(r, (uint64_t)i, 7) ? id[i] : -1 - id[i];
    }
}

static void plan_fill(lm_rng r, const lm_call *c)
{
    fill_experts(r, &c->in[0], ((const lm_route_plan_attr *)c->attr)->experts);
}

static void plan_example(lm_rng r, int i, lm_example *x)
{
    lm_route_plan_attr a = { .experts = lm_example_size(r, i, 0, 70) };
    int64_t k = 1 + (int64_t)lm_example_draw(r, i, 1, (uint64_t)a.experts);
    int64_t tokens = lm_example_size(r, i, 2, 127);
    a.pad = i % 3 == 1 ? 1 + tokens * k / a.experts : 0;
    *x = (lm_example){ .n_in = 1, .want = 7 };
    x->in[0] = lm_shape2(LM_DTYPE_I32, tokens, k);
    lm_example_attr(x, &a);
}

/* A plan of each rank's tokens. */
static const char *plan_form(const lm_call *c, int i)
{
    return i || ((const lm_route_plan_attr *)c->attr)->pad ? NULL : "0so0";
}

const lm_op lm_op_route_plan = {
    .name = "route_plan",
    .attr_size = sizeof(lm_route_plan_attr),
    .in = { { "expert", "T,K", LM_IDS } },
    .out = { { "offsets", "E+1", LM_IDS }, { "from", "TK", LM_IDS }, { "place", "T,K", LM_IDS } },
    .fields = plan_fields,
    .split = "",
    .form = plan_form,
    .prec = LM_PREC_INFER,
    .shape = plan_shape,
    .cost = move_cost,
    .example = plan_example,
    .fill = plan_fill,
};

/* ---- rows, sums, products ---- */

/* The gradients of numbers of rows times numbers of tokens times weights: y, x and weight may be
 * absent. */
typedef struct {
    lm_vid x, y, from, place, weight, offsets;
} triple;

static lm_code give_rows(lm_grad *s, const triple *p, lm_err *e)
{
    lm_vid in[5] = { p->x, p->from, p->place, p->weight, p->offsets }, dy;
    if (!lm_grad_wants(s, p->y))
        return LM_OK;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_rows, NULL, in, &dy, e))
        return e->code;
    return lm_grad_give(s, p->y, dy, e);
}

static lm_code give_sum(lm_grad *s, const triple *p, lm_err *e)
{
    lm_vid in[5] = { p->y, p->from, p->place, p->weight, p->offsets }, dx;
    if (!lm_grad_wants(s, p->x))
        return LM_OK;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_sum, NULL, in, &dx, e))
        return e->code;
    return lm_grad_give(s, p->x, dx, e);
}

static lm_code give_dot(lm_grad *s, const triple *p, lm_err *e)
{
    lm_vid in[5] = { p->x, p->y, p->from, p->place, p->offsets }, dweight;
    if (!lm_grad_wants(s, p->weight))
        return LM_OK;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_dot, NULL, in, &dweight, e))
        return e->code;
    return lm_grad_give(s, p->weight, dweight, e);
}

static lm_code rows_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid dy = lm_grad_of(s, n->out[0]);
    triple to_x = { n->in[0], dy, n->in[1], n->in[2], n->in[3], n->in[4] };
    return give_sum(s, &to_x, e) ? e->code : give_dot(s, &to_x, e);
}

static lm_code sum_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid dx = lm_grad_of(s, n->out[0]);
    triple to_y = { dx, n->in[0], n->in[1], n->in[2], n->in[3], n->in[4] };
    return give_rows(s, &to_y, e) ? e->code : give_dot(s, &to_y, e);
}

static lm_code dot_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid d = lm_grad_of(s, n->out[0]);
    triple all = { n->in[0], n->in[1], n->in[2], n->in[3], d, n->in[4] };
    return give_rows(s, &all, e) ? e->code : give_sum(s, &all, e);
}

/* An operation for each number that is copied, two where it is multiplied and added. */
static void sum_cost(const lm_call *c, lm_cost *out)
{
    const lm_tensor *last = &c->in[3], *place = &c->in[2];
    bool two = !lm_absent(last); /* weights, or the places of route_dot */
    place = place->ndim == 2 ? place : last;
    out->flops = (two ? 2.0 : 1.0) * (double)lm_tensor_count(place) * (double)c->in[0].dim[1];
    out->bytes = lm_call_bytes(c);
}

static void rows_cost(const lm_call *c, lm_cost *out)
{
    out->flops = lm_absent(&c->in[3]) ? 0 : (double)lm_tensor_count(&c->out[0]);
    out->bytes = lm_call_bytes(c);
}

/* With offsets tokens and rows of experts can be split over ranks (kernels/dispatch.h); or tokens, of whose rows each rank has
 * its own plan. */
static const char *rows_form(const lm_call *c, int i)
{
    return i > 1 || lm_absent(&c->in[4]) ? NULL : i ? "0o00so" : "0----s";
}

static const char *sum_form(const lm_call *c, int i)
{
    return i > 1 || lm_absent(&c->in[4]) ? NULL : i ? "oo00s0" : "s--0-0";
}

static const char *dot_form(const lm_call *c, int i)
{
    return i > 1 || lm_absent(&c->in[4]) ? NULL : i ? "0oo0s0" : "0s---+";
}

/* Some rows have no assignment, some assignments no row; the others are paired at random. */
static void fill_places(lm_rng r, const lm_tensor *from, const lm_tensor *place)
{
    int32_t *at = from->data, *row = place->data;
    int64_t rows = lm_tensor_count(from), count = lm_tensor_count(place);
    for (int64_t i = 0; i < rows; i++)
        at[i] = -1;
    for (int64_t i = 0; i < count; i++) {
        bool used = lm_rng_below(r, (uint64_t)i, 6) && i < rows;
        row[i] = used ? (int32_t)lm_rng_permute(r, (uint64_t)i, (uint64_t)rows) : -1;
        if (used)
            at[row[i]] = (int32_t)i;
    }
}

static void move_fill(lm_rng r, const lm_call *c)
{
    fill_places(r, &c->in[1], &c->in[2]);
}

static void dot_fill(lm_rng r, const lm_call *c)
{
    fill_places(r, &c->in[2], &c->in[3]);
}

static void rows_example(lm_rng r, int i, lm_example *x)
{
    int64_t tokens = lm_example_size(r, i, 0, 65), k = lm_example_size(r, i, 1, 8);
    int64_t rows = lm_example_size(r, i, 2, 127), cols = lm_example_size(r, i, 3, 127);
    *x = (lm_example){ .n_in = 4, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, tokens, cols);
    x->in[1] = lm_shape1(LM_DTYPE_I32, rows);
    x->in[2] = lm_shape2(LM_DTYPE_I32, tokens, k);
    if (i % 3)
        x->in[3] = lm_shape2(LM_DTYPE_F32, tokens, k);
    if (i % 4 > 1) { /* kernels do not read them */
        x->in[4] = lm_shape1(LM_DTYPE_I32, 3 + i % 3);
        x->n_in = 5;
    }
}

static void sum_example(lm_rng r, int i, lm_example *x)
{
    rows_example(r, i + 1, x);
    x->in[0].dim[0] = x->in[1].dim[0];
}

static void dot_example(lm_rng r, int i, lm_example *x)
{
    rows_example(r, i + 3, x);
    x->in[3] = x->in[2];
    x->in[2] = x->in[1];
    x->in[1] = lm_shape2(LM_DTYPE_F32, x->in[2].dim[0], x->in[0].dim[1]);
}

const lm_op lm_op_route_rows = {
    .name = "route_rows",
    .in = { { "x", "T,C", LM_ACT_TYPE },
            { "from", "R", LM_IDS },
            { "place", "T,K", LM_IDS },
            { "weight", "T,K", LM_OPTIONAL },
            { "offsets", "E+1", LM_IDS | LM_OPTIONAL } },
    .out = { { "y", "R,C", LM_ACT_TYPE } },
    .split = "C",
    .form = rows_form,
    .shard = lm_route_rows_shard,
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .grad = rows_grad,
    .cost = rows_cost,
    .example = rows_example,
    .fill = move_fill,
};

const lm_op lm_op_route_sum = {
    .name = "route_sum",
    .in = { { "y", "R,C", LM_ACT_TYPE },
            { "from", "R", LM_IDS },
            { "place", "T,K", LM_IDS },
            { "weight", "T,K", LM_OPTIONAL },
            { "offsets", "E+1", LM_IDS | LM_OPTIONAL } },
    .out = { { "x", "T,C", LM_ACT_TYPE } },
    .split = "C",
    .form = sum_form,
    .shard = lm_route_sum_shard,
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .grad = sum_grad,
    .cost = sum_cost,
    .example = sum_example,
    .fill = move_fill,
};

const lm_op lm_op_route_dot = {
    .name = "route_dot",
    .in = { { "x", "T,C", LM_ACT_TYPE },
            { "y", "R,C", LM_ACT_TYPE },
            { "from", "R", LM_IDS },
            { "place", "T,K", LM_IDS },
            { "offsets", "E+1", LM_IDS | LM_OPTIONAL } },
    .out = { { "d", "T,K", 0 } },
    .split = "C+",
    .form = dot_form,
    .shard = lm_route_dot_shard,
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .grad = dot_grad,
    .cost = sum_cost,
    .example = dot_example,
    .fill = dot_fill,
};

/* ---- losses ---- */

static lm_code aux_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_route_aux_attr *a = c->attr;
    int64_t tokens = c->in[0].dim[0];
    (void)want;
    if (check_choices("route_aux", c->in[1].dim[1], c->in[0].dim[1], e) ||
        check_sizes("route_aux", tokens, c->in[1].dim[1], tokens, e))
        return e->code;
    if (lm_expect(a->seq == 0 || (a->seq > 0 && tokens % a->seq == 0), "route_aux", e,
                  "%lld tokens are not a multiple of %lld in a sequence", (long long)tokens,
                  (long long)a->seq))
        return e->code;
    return lm_expect(a->affinity <= 0 || (a->nodes > 0 && c->in[0].dim[1] % a->nodes == 0),
                     "route_aux", e, "%lld experts are not a multiple of %lld nodes",
                     (long long)c->in[0].dim[1], (long long)a->nodes);
}

static lm_code aux_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[4] = { n->in[0], n->in[1], lm_grad_of(s, n->out[0]), n->in[2] }, dz;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_aux_dz, n->attr, in, &dz, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dz, e);
}

static void aux_fill(lm_rng r, const lm_call *c)
{
    fill_experts(r, &c->in[1], c->in[0].dim[1]);
}

static void aux_example(lm_rng r, int i, lm_example *x)
{
    lm_route_aux_attr a = { .sigmoid = i % 3 == 1, .balance = 0.5, .seq = 0 };
    int64_t seq = lm_example_size(r, i, 0, 70),
            sequences = 1 + (int64_t)lm_example_draw(r, i, 1, 3);
    int64_t experts = lm_example_size(r, i, 2, 70);
    int64_t k = 1 + (int64_t)lm_example_draw(r, i, 3, (uint64_t)experts);
    a.seq = i % 2 ? seq : 0;
    a.sequence = i % 4 == 1 ? 0 : 0.25;
    a.balance = i % 4 == 3 ? 0 : 0.5;
    a.z = i % 5 > 1 ? 0.1 : 0;
    a.by_expert = i % 5 == 2;
    a.nodes = i % 7 < 3 ? 1 + i % 7 : 0;
    a.affinity = a.nodes ? 0.7 : 0;
    experts *= a.nodes ? a.nodes : 1;
    *x = (lm_example){ .n_in = 3, .want = i % 3 == 2 ? 1 : i % 3 == 1 ? 15 : 7 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, seq * sequences, experts);
    x->in[1] = lm_shape2(LM_DTYPE_I32, seq * sequences, k);
    if (i % 4 == 2)
        x->in[2] = lm_shape1(LM_DTYPE_F32, experts);
    lm_example_attr(x, &a);
}

const lm_op lm_op_route_aux = {
    .name = "route_aux",
    .attr_size = sizeof(lm_route_aux_attr),
    .in = { { "z", "T,E", 0 },
            { "expert", "T,K", LM_IDS },
            { "count", "E", LM_OPTIONAL | LM_FIXED } },
    .out = { { "loss", "1", 0 },
             { "mean", "E", LM_OPTIONAL | LM_SAVED },
             { "load", "E", LM_OPTIONAL | LM_SAVED },
             { "dropped", "1", LM_OPTIONAL | LM_SAVED } },
    .fields = aux_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .tolerance = { 2e-6, 2e-6 },
    .shape = aux_shape,
    .grad = aux_grad,
    .cost = scores_cost,
    .example = aux_example,
    .fill = aux_fill,
};

const lm_op lm_op_route_aux_dz = {
    .name = "route_aux_dz",
    .attr_size = sizeof(lm_route_aux_attr),
    .in = { { "z", "T,E", 0 },
            { "expert", "T,K", LM_IDS },
            { "dloss", "1", 0 },
            { "count", "E", LM_OPTIONAL | LM_FIXED } },
    .out = { { "dz", "T,E", 0 } },
    .fields = aux_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .tolerance = { 1e-5, 1e-5 },
    .cost = scores_cost,
};
