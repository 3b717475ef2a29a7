/* SPDX-License-Identifier: Apache-2.0 */
/* delta.c -- the gated delta rule and its backward. */
#include "kernels/delta.h"

#include <math.h>

#include "graph/passes.h"
#include "numeric/kv_format.h"
#include "op/example.h"
#include "op/ops.h"
#include "op/state_rows.h"

static const lm_field fields[] = {
    { LM_ATTR_INT(lm_delta_attr, batch, 'B') },     { LM_ATTR_INT(lm_delta_attr, seq, 'T') },
    { LM_ATTR_INT(lm_delta_attr, chunks, 'M') },    { LM_ATTR_INT(lm_delta_attr, heads, 'H') },
    { LM_ATTR_INT(lm_delta_attr, key_heads, 'K') }, { LM_ATTR_INT(lm_delta_attr, key_dim, 'D') },
    { LM_ATTR_INT(lm_delta_attr, value_dim, 'E') }, { LM_ATTR_REAL(lm_delta_attr, scale) },
    { LM_ATTR_REAL(lm_delta_attr, eps) },           { 0 }
};

static lm_code delta_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_delta_attr *a = c->attr;
    (void)want;
    if (lm_expect(a->eps > 0, "delta", e, "eps is not positive") ||
        lm_expect(a->key_heads > 0 && a->heads % a->key_heads == 0, "delta", e,
                  "%lld value heads are not a multiple of %lld key heads", (long long)a->heads,
                  (long long)a->key_heads))
        return e->code;
    return lm_expect(a->chunks == lm_delta_chunks(a->seq), "delta", e,
                     "%lld chunks are not those of %lld rows", (long long)a->chunks,
                     (long long)a->seq);
}

static lm_code delta_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[6] = { lm_grad_of(s, n->out[0]), n->in[0], n->in[1], n->in[2], n->out[1], n->in[3] };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE };
    if (lm_graph_append(lm_grad_graph(s), &lm_op_delta_dx, n->attr, in, out, e))
        return e->code;
    for (int i = 0; i < 3; i++)
        if (lm_grad_wants(s, n->in[i]) && lm_grad_give(s, n->in[i], out[i], e))
            return e->code;
    return LM_OK;
}

/* Of chunks of C rows: products of rows with each other and with the state, and the solution of a triangle. */
static double products(const lm_delta_attr *a, double rows, double state)
{
    double n = (double)(a->batch * a->seq * a->heads), d = (double)a->key_dim;
    return 2.0 * n *
           (rows * LM_DELTA_CHUNK * (d + (double)a->value_dim) + state * d * (double)a->value_dim);
}

static void delta_cost(const lm_call *c, lm_cost *out)
{
    out->flops = products(c->attr, 1.5, 3);
    out->bytes = lm_call_bytes(c);
}

static void dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = products(c->attr, 5, 8);
    out->bytes = lm_call_bytes(c);
}

static void delta_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 1, 4, 8, 16, 20, 40 };
    int64_t keys = 1 + (int64_t)lm_example_draw(r, i, 0, 2);
    lm_delta_attr a = { .batch = 1 + (int64_t)lm_example_draw(r, i, 1, 2),
                        .seq = i % 3 == 2 ? 130 : lm_example_size(r, i, 2, 70),
                        .heads = keys * (1 + (int64_t)lm_example_draw(r, i, 3, 3)),
                        .key_heads = keys,
                        .key_dim = dims[lm_example_draw(r, i, 4, 6)],
                        .value_dim = dims[lm_example_draw(r, i, 5, 6)],
                        .scale = 0.5,
                        .eps = 1e-6 };
    if (i % 16 == 9) /* the published size */
        a.key_dim = a.value_dim = 128;
    int64_t rows = a.batch * a.seq;
    a.chunks = lm_delta_chunks(a.seq);
    *x = (lm_example){ .n_in = 4, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, rows, 2 * keys * a.key_dim + a.heads * a.value_dim);
    x->in[1] = lm_shape2(LM_DTYPE_F32, rows, a.heads);
    x->in[2] = lm_shape2(LM_DTYPE_F32, rows, a.heads);
    if (lm_example_draw(r, i, 6, 2))
        x->in[3] = lm_shape1(LM_DTYPE_I32, rows);
    lm_example_attr(x, &a);
}

/* Decays at most 1, some of them almost or wholly nothing, corrections between 0 and 1. */
static void fill_gates(lm_rng r, const lm_tensor *g, const lm_tensor *beta)
{
    for (int64_t i = 0; i < lm_tensor_count(g); i++) {
        double u = (double)lm_rng_below(r, (uint64_t)i, 1000) / 1000;
        lm_set(g->dtype, g->data, i, i % 97 == 41 ? -INFINITY : i % 29 == 3 ? -20 : -2 * u * u);
        lm_set(beta->dtype, beta->data, i,
               0.05 +
                   0.9 * (double)lm_rng_below(r, (uint64_t)i + (UINT64_C(1) << 32), 1000) / 1000);
    }
}

static void delta_fill(lm_rng r, const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    fill_gates(r, &c->in[1], &c->in[2]);
    lm_example_documents(r, a->batch, a->seq, 20, c->in[3].data, NULL);
}

const lm_op lm_op_delta = {
    .name = "delta",
    .attr_size = sizeof(lm_delta_attr),
    .in = { { "qkv", "BT,2KD+HE", LM_ACT_TYPE },
            { "g", "BT,H", 0 },
            { "beta", "BT,H", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "o", "BT,HE", LM_ACT_TYPE }, { "states", "BM,H,D,E", LM_SAVED | LM_OPTIONAL } },
    .fields = fields,
    .split = "B HK",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = delta_shape,
    .grad = delta_grad,
    .cost = delta_cost,
    .example = delta_example,
    .fill = delta_fill,
};

const lm_op lm_op_delta_dx = {
    .name = "delta_dx",
    .attr_size = sizeof(lm_delta_attr),
    .in = { { "do", "BT,HE", LM_ACT_TYPE },
            { "qkv", "BT,2KD+HE", LM_ACT_TYPE },
            { "g", "BT,H", 0 },
            { "beta", "BT,H", 0 },
            { "states", "BM,H,D,E", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "dqkv", "BT,2KD+HE", LM_ACT_TYPE | LM_GRADIENT },
             { "dg", "BT,H", 0 },
             { "dbeta", "BT,H", 0 } },
    .fields = fields,
    .split = "B HK",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .cost = dx_cost,
};

/* ---- delta_cached ---- */

static const lm_field cached_fields[] = { { LM_ATTR_INT(lm_delta_attr, batch, 'B') },
                                          { LM_ATTR_INT(lm_delta_attr, seq, 0) },
                                          { LM_ATTR_INT(lm_delta_attr, heads, 'H') },
                                          { LM_ATTR_INT(lm_delta_attr, key_heads, 'K') },
                                          { LM_ATTR_INT(lm_delta_attr, key_dim, 'D') },
                                          { LM_ATTR_INT(lm_delta_attr, value_dim, 'E') },
                                          { LM_ATTR_REAL(lm_delta_attr, scale) },
                                          { LM_ATTR_REAL(lm_delta_attr, eps) },
                                          { 0 } };

static lm_code cached_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_delta_attr *a = c->attr;
    (void)want;
    if (lm_expect(a->eps > 0, "delta_cached", e, "eps is not positive") ||
        lm_expect(a->key_heads > 0 && a->heads % a->key_heads == 0, "delta_cached", e,
                  "%lld value heads are not a multiple of %lld key heads", (long long)a->heads,
                  (long long)a->key_heads))
        return e->code;
    const lm_kv_format *f = c->out[1].kv;
    if (f && lm_expect(a->value_dim % 16 == 0 && lm_kv_step(f, a->key_dim) == 1 && !f->outliers &&
                           !f->values && !f->lower && !f->head,
                       "delta_cached", e, "states of %lld numbers cannot be %s",
                       (long long)a->value_dim, f->name))
        return e->code;
    return lm_state_rows_shape(c, "delta_cached", 3, a->seq, &c->out[1], e);
}

static void cached_cost(const lm_call *c, lm_cost *out)
{
    const lm_delta_attr *a = c->attr;
    out->flops = 8.0 * (double)(c->in[0].dim[0] * a->heads * a->key_dim * a->value_dim);
    out->bytes = lm_call_bytes(c);
}

static void cached_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 1, 4, 8, 16, 20, 40 };
    int64_t keys = 1 + (int64_t)lm_example_draw(r, i, 0, 2);
    lm_delta_attr a = { .batch = 1 + (int64_t)lm_example_draw(r, i, 1, 3),
                        .seq = i % 3 ? lm_example_size(r, i, 2, 140) : 1,
                        .heads = keys * (1 + (int64_t)lm_example_draw(r, i, 3, 3)),
                        .key_heads = keys,
                        .key_dim = dims[lm_example_draw(r, i, 4, 6)],
                        .value_dim = dims[lm_example_draw(r, i, 5, 6)],
                        .scale = 0.5,
                        .eps = 1e-6 };
    if (i % 16 == 9)
        a.key_dim = a.value_dim = 128;
    *x = (lm_example){ .n_in = 8, .want = 3 };
    int64_t rows = lm_state_rows_example(r, i, a.batch, &a.seq, &x->in[3]);
    x->in[0] = lm_shape2(LM_DTYPE_F32, rows, 2 * keys * a.key_dim + a.heads * a.value_dim);
    x->in[1] = x->in[2] = lm_shape2(LM_DTYPE_F32, rows, a.heads);
    x->out[1] =
        (lm_tensor){ .dtype = LM_DTYPE_F32,
                     .ndim = 4,
                     .dim = { a.batch + !lm_absent(&x->in[7]), a.heads, a.key_dim, a.value_dim } };
    lm_example_attr(x, &a);
}

static void cached_fill(lm_rng r, const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    lm_state_rows_fill(r, &c->in[3], c->in[0].dim[0], a->batch, a->seq);
    fill_gates(r, &c->in[1], &c->in[2]);
}

const lm_op lm_op_delta_cached = {
    .name = "delta_cached",
    .attr_size = sizeof(lm_delta_attr),
    .in = { { "qkv", "N,2KD+HE", LM_ACT_TYPE },
            { "g", "N,H", 0 },
            { "beta", "N,H", 0 },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "kind", "B", LM_IDS | LM_OPTIONAL },
            { "slot", "B", LM_IDS | LM_OPTIONAL } },
    .out = { { "o", "N,HE", LM_ACT_TYPE }, { "state", "S,H,D,E", LM_GIVEN | LM_KV } },
    .fields = cached_fields,
    .split = "",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = cached_shape,
    .cost = cached_cost,
    .example = cached_example,
    .fill = cached_fill,
};
