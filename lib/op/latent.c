/* SPDX-License-Identifier: Apache-2.0 */
/* latent.c -- rows of multi-head latent attention, expanded with their backward, and absorbed. */
#include "kernels/latent.h"

#include "graph/passes.h"
#include "numeric/format.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field fields[] = { { LM_ATTR_INT(lm_latent_attr, heads, 'H') },
                                   { LM_ATTR_INT(lm_latent_attr, content_dim, 'A') },
                                   { LM_ATTR_INT(lm_latent_attr, rotary_dim, 'R') },
                                   { LM_ATTR_INT(lm_latent_attr, value_dim, 'E') },
                                   { LM_ATTR_FLAG(lm_latent_attr, pairs) },
                                   { 0 } };
static const lm_field absorbed_fields[] = { { LM_ATTR_INT(lm_latent_attr, heads, 'H') },
                                            { LM_ATTR_INT(lm_latent_attr, content_dim, 'A') },
                                            { LM_ATTR_INT(lm_latent_attr, rotary_dim, 'R') },
                                            { LM_ATTR_INT(lm_latent_attr, value_dim, 'E') },
                                            { LM_ATTR_INT(lm_latent_attr, latent_dim, 'L') },
                                            { LM_ATTR_FLAG(lm_latent_attr, pairs) },
                                            { 0 } };

static lm_code latent_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_latent_attr *a = c->attr;
    (void)want;
    return lm_expect(a->rotary_dim % 2 == 0 && a->rotary_dim <= LM_LATENT_MOST_ROTARY, "latent", e,
                     "R is not even, or above %d", LM_LATENT_MOST_ROTARY);
}

static lm_code rows_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    const lm_vid in[3] = { lm_grad_of(s, n->out[0]), n->in[3], n->in[4] };
    lm_vid d[LM_MAX_OUT];
    bool any = false;
    for (int i = 0; i < 3; i++) {
        d[i] = lm_grad_wants(s, n->in[i]) ? LM_NONE : LM_SKIP;
        any |= d[i] == LM_NONE;
    }
    if (any && lm_graph_append(lm_grad_graph(s), &lm_op_latent_rows_dx, n->attr, in, d, e))
        return e->code;
    for (int i = 0; i < 3; i++)
        if (d[i] >= 0 && lm_grad_give(s, n->in[i], d[i], e))
            return e->code;
    return LM_OK;
}

static void move_cost(const lm_call *c, lm_cost *out)
{
    const lm_latent_attr *a = c->attr;
    int table = c->n_in > 3 ? 4 : 2;
    out->flops = 6.0 * (double)(c->in[0].dim[0] * a->heads * a->rotary_dim);
    out->bytes = lm_call_bytes(c) - lm_rope_unread_bytes(&c->in[table], &c->in[table - 1]);
}

static void absorbed_cost(const lm_call *c, lm_cost *out)
{
    const lm_latent_attr *a = c->attr;
    bool queries = c->n_in > 2;
    int64_t rows = a->heads * (queries ? a->content_dim : a->value_dim);
    /* each reads its rows of w alone */
    double unread = (double)lm_plain_bytes(c->in[queries ? 3 : 1].dtype, 1) *
                    (double)((a->heads * (a->content_dim + a->value_dim) - rows) * a->latent_dim);
    out->flops = 2.0 * (double)(c->in[0].dim[0] * rows * a->latent_dim);
    out->bytes = lm_call_bytes(c) - unread;
    if (queries)
        out->bytes -= lm_rope_unread_bytes(&c->in[5], &c->in[4]);
}

static lm_latent_attr sizes(lm_rng r, int i)
{
    static const int64_t dims[] = { 1, 5, 8, 16, 33, 64 }, turned[] = { 2, 6, 16, 32, 64 };
    return (lm_latent_attr){ .heads = 1 + (int64_t)lm_example_draw(r, i, 0, 5),
                             .content_dim = dims[lm_example_draw(r, i, 1, 6)],
                             .rotary_dim = turned[lm_example_draw(r, i, 2, 5)],
                             .value_dim = dims[lm_example_draw(r, i, 3, 6)],
                             .latent_dim = lm_example_size(r, i, 4, 90),
                             .pairs = i % 2 };
}

static void rows_example(lm_rng r, int i, lm_example *x)
{
    lm_latent_attr a = sizes(r, i);
    int64_t n = lm_example_size(r, i, 5, 33);
    a.latent_dim = 0;
    *x = (lm_example){ .n_in = 5, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, a.heads * (a.content_dim + a.rotary_dim));
    x->in[1] = lm_shape2(LM_DTYPE_F32, n, a.heads * (a.content_dim + a.value_dim));
    x->in[2] = lm_shape2(LM_DTYPE_F32, n, a.rotary_dim);
    x->in[3] = lm_shape1(LM_DTYPE_I32, n);
    x->in[4] = lm_shape2(LM_DTYPE_F32, 40, a.rotary_dim);
    lm_example_attr(x, &a);
}

static void queries_example(lm_rng r, int i, lm_example *x)
{
    const lm_latent_attr a = sizes(r, i);
    int64_t n = lm_example_size(r, i, 5, 33);
    *x = (lm_example){ .n_in = 6, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, a.heads * (a.content_dim + a.rotary_dim));
    x->in[1] = lm_shape2(LM_DTYPE_F32, n, a.latent_dim);
    x->in[2] = lm_shape2(LM_DTYPE_F32, n, a.rotary_dim);
    x->in[3] = lm_shape2(LM_DTYPE_F32, a.heads * (a.content_dim + a.value_dim), a.latent_dim);
    x->in[4] = lm_shape1(LM_DTYPE_I32, n);
    x->in[5] = lm_shape2(LM_DTYPE_F32, 40, a.rotary_dim);
    lm_example_attr(x, &a);
}

static void values_example(lm_rng r, int i, lm_example *x)
{
    const lm_latent_attr a = sizes(r, i);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 5, 33), a.heads * a.latent_dim);
    x->in[1] = lm_shape2(LM_DTYPE_F32, a.heads * (a.content_dim + a.value_dim), a.latent_dim);
    lm_example_attr(x, &a);
}

/* Positions stand before the table, which is last. */
static void fill(lm_rng r, const lm_call *c)
{
    int32_t *pos = c->in[c->n_in - 2].data;
    for (int64_t i = 0; i < c->in[c->n_in - 2].dim[0]; i++)
        pos[i] = (int32_t)lm_rng_below(r, (uint64_t)i, (uint64_t)c->in[c->n_in - 1].dim[0]);
}

const lm_op lm_op_latent_rows = {
    .name = "latent_rows",
    .attr_size = sizeof(lm_latent_attr),
    .in = { { "q", "N,H(A+R)", LM_ACT_TYPE },
            { "kv", "N,H(A+E)", LM_ACT_TYPE },
            { "k", "N,R", LM_ACT_TYPE },
            { "pos", "N", LM_IDS },
            { "table", "P,R", LM_FIXED } },
    .out = { { "y", "N,2H(A+R)+HE", LM_ACT_TYPE } },
    .fields = fields,
    .split = "N H",
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .shape = latent_shape,
    .grad = rows_grad,
    .cost = move_cost,
    .example = rows_example,
    .fill = fill,
};

const lm_op lm_op_latent_rows_dx = {
    .name = "latent_rows_dx",
    .attr_size = sizeof(lm_latent_attr),
    .in = { { "dy", "N,2H(A+R)+HE", LM_ACT_TYPE },
            { "pos", "N", LM_IDS },
            { "table", "P,R", LM_FIXED } },
    .out = { { "dq", "N,H(A+R)", LM_ACT_TYPE | LM_OPTIONAL },
             { "dkv", "N,H(A+E)", LM_ACT_TYPE | LM_OPTIONAL },
             { "dk", "N,R", LM_ACT_TYPE | LM_OPTIONAL } },
    .fields = fields,
    .split = "N H+",
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .shape = latent_shape,
    .cost = move_cost,
};

/* The key that all heads share (U). */
static int64_t queries_letter(const lm_call *c, char letter)
{
    (void)c;
    return letter == 'U' ? 1 : -1;
}

const lm_op lm_op_latent_queries = {
    .name = "latent_queries",
    .attr_size = sizeof(lm_latent_attr),
    .in = { { "q", "N,H(A+R)", LM_ACT_TYPE },
            { "c", "N,L", LM_ACT_TYPE },
            { "k", "N,R", LM_ACT_TYPE },
            { "w", "H(A+E),L", LM_WEIGHT },
            { "pos", "N", LM_IDS },
            { "table", "P,R", LM_FIXED } },
    .out = { { "y", "N,(H+U)(L+R)", LM_ACT_TYPE } },
    .fields = absorbed_fields,
    .letter = queries_letter,
    .split = "N HU",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 4e-3 },
    .shape = latent_shape,
    .cost = absorbed_cost,
    .example = queries_example,
    .fill = fill,
};

const lm_op lm_op_latent_values = {
    .name = "latent_values",
    .attr_size = sizeof(lm_latent_attr),
    .in = { { "z", "N,HL", LM_ACT_TYPE }, { "w", "H(A+E),L", LM_WEIGHT } },
    .out = { { "o", "N,HE", LM_ACT_TYPE } },
    .fields = absorbed_fields,
    .split = "N H",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 4e-3 },
    .cost = absorbed_cost,
    .example = values_example,
};
