/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention.c -- linear attention and its backward. */
#include "kernels/linear_attention.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"
#include "op/state_rows.h"

static const char *const features[] = { "elu+1", "identity" };

#define FIELDS(letter_of_seq)                                          \
    { LM_ATTR_INT(lm_linear_attention_attr, batch, 'B') },             \
        { LM_ATTR_INT(lm_linear_attention_attr, seq, letter_of_seq) }, \
        { LM_ATTR_INT(lm_linear_attention_attr, heads, 'H') },         \
        { LM_ATTR_INT(lm_linear_attention_attr, kv_heads, 'K') },      \
        { LM_ATTR_INT(lm_linear_attention_attr, head_dim, 'D') },      \
        { LM_ATTR_INT(lm_linear_attention_attr, state_rows, 'R') },    \
        { LM_ATTR_WORD(lm_linear_attention_attr, feature, features) }, \
        { LM_ATTR_FLAG(lm_linear_attention_attr, decay) },             \
        { LM_ATTR_REAL(lm_linear_attention_attr, scale) },             \
    {                                                                  \
        LM_ATTR_REAL(lm_linear_attention_attr, eps)                    \
    }

static const lm_field fields[] = { FIELDS('T'), { 0 } };
static const lm_field cached_fields[] = { FIELDS(0), { 0 } };

static lm_code check_sizes(const lm_linear_attention_attr *a, const char *op, lm_err *e)
{
    if (lm_expect(a->eps > 0, op, e, "eps is not positive") ||
        lm_expect(a->scale > 0, op, e, "scale is not positive") ||
        lm_expect(a->kv_heads > 0 && a->heads % a->kv_heads == 0, op, e,
                  "%lld query heads are not a multiple of %lld key heads", (long long)a->heads,
                  (long long)a->kv_heads))
        return e->code;
    return lm_expect(a->state_rows == lm_linear_state_rows(a->feature, a->head_dim), op, e,
                     "%lld rows of a state are not those of heads of %lld",
                     (long long)a->state_rows, (long long)a->head_dim);
}

static lm_code forward_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return check_sizes(c->attr, "linear_attention", e);
}

static lm_code dx_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_linear_attention_attr *a = c->attr;
    (void)want;
    if (check_sizes(a, "linear_attention_dx", e))
        return e->code;
    return lm_expect(lm_absent(&c->in[2]) == (a->feature == LM_FEATURE_IDENTITY),
                     "linear_attention_dx", e, "o is there with elu+1, and only then");
}

static lm_code grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    const lm_linear_attention_attr *a = n->attr;
    lm_vid dqkv = LM_NONE;
    lm_vid in[4] = { lm_grad_of(s, n->out[0]), n->in[0],
                     a->feature == LM_FEATURE_ELU ? n->out[0] : LM_NONE, n->in[1] };
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_linear_attention_dx, n->attr, in, &dqkv, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dqkv, e);
}

/* `pairs` products of a chunk's rows with each other, of which half are there, and products of rows of query heads and of key
 * heads with a state. */
static double products(const lm_linear_attention_attr *a, double pairs, double of_queries,
                       double of_keys)
{
    double rows = (double)(a->batch * a->seq), d = (double)a->head_dim;
    double h = (double)a->heads, k = (double)a->kv_heads;
    return 2.0 * rows * d * (pairs * h * LM_LINEAR_CHUNK / 2 + (of_queries * h + of_keys * k) * d);
}

static void forward_cost(const lm_call *c, lm_cost *out)
{
    out->flops = products(c->attr, 2, 1, 1);
    out->bytes = lm_call_bytes(c);
}

static void dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = products(c->attr, 5, 2, 3);
    out->bytes = lm_call_bytes(c);
}

/* Sizes of example i. */
static lm_linear_attention_attr sizes(lm_rng r, int i)
{
    static const int64_t dims[] = { 1, 4, 8, 16, 20, 40 };
    int64_t keys = 1 + (int64_t)lm_example_draw(r, i, 0, 2);
    lm_linear_attention_attr a = { .batch = 1 + (int64_t)lm_example_draw(r, i, 1, 2),
                                   .heads = keys * (1 + (int64_t)lm_example_draw(r, i, 2, 3)),
                                   .kv_heads = keys,
                                   .head_dim = dims[lm_example_draw(r, i, 3, 6)],
                                   .feature = (lm_feature)lm_example_draw(r, i, 7, 2),
                                   .decay = lm_example_draw(r, i, 4, 2),
                                   .scale = 0.5,
                                   .eps = 1e-6 };
    if (i % 16 == 9)
        a.head_dim = 128;
    a.state_rows = lm_linear_state_rows(a.feature, a.head_dim);
    return a;
}

static void example(lm_rng r, int i, lm_example *x)
{
    lm_linear_attention_attr a = sizes(r, i);
    a.seq = i % 3 == 2 ? 130 : lm_example_size(r, i, 5, 70);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, a.batch * a.seq, (a.heads + 2 * a.kv_heads) * a.head_dim);
    if (lm_example_draw(r, i, 6, 2))
        x->in[1] = lm_shape1(LM_DTYPE_I32, a.batch * a.seq);
    lm_example_attr(x, &a);
}

static void fill(lm_rng r, const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    lm_example_documents(r, a->batch, a->seq, 20, c->in[1].data, NULL);
}

/* Decays count the heads of the whole. */
static bool splits(const lm_call *c, char letter)
{
    const lm_linear_attention_attr *a = c->attr;
    return letter == 'B' || !a->decay;
}

const lm_op lm_op_linear_attention = {
    .name = "linear_attention",
    .attr_size = sizeof(lm_linear_attention_attr),
    .in = { { "qkv", "BT,(H+2K)D", LM_ACT_TYPE }, { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "o", "BT,HD", LM_ACT_TYPE } },
    .fields = fields,
    .split = "B HK",
    .splits = splits,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = forward_shape,
    .grad = grad,
    .cost = forward_cost,
    .example = example,
    .fill = fill,
};

const lm_op lm_op_linear_attention_dx = {
    .name = "linear_attention_dx",
    .attr_size = sizeof(lm_linear_attention_attr),
    .in = { { "do", "BT,HD", LM_ACT_TYPE },
            { "qkv", "BT,(H+2K)D", LM_ACT_TYPE },
            { "o", "BT,HD", LM_ACT_TYPE | LM_OPTIONAL },
            { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "dqkv", "BT,(H+2K)D", LM_ACT_TYPE | LM_GRADIENT } },
    .fields = fields,
    .split = "B HK",
    .splits = splits,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = dx_shape,
    .cost = dx_cost,
};

/* ---- linear_attention_cached ---- */

static lm_code cached_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_linear_attention_attr *a = c->attr;
    (void)want;
    if (check_sizes(a, "linear_attention_cached", e))
        return e->code;
    return lm_state_rows_shape(c, "linear_attention_cached", 1, a->seq, &c->out[1], e);
}

static void cached_cost(const lm_call *c, lm_cost *out)
{
    const lm_linear_attention_attr *a = c->attr;
    double d = (double)a->head_dim;
    out->flops = 2.0 * (double)c->in[0].dim[0] * d * d * (double)(a->heads + a->kv_heads);
    out->bytes = lm_call_bytes(c);
}

static void cached_example(lm_rng r, int i, lm_example *x)
{
    lm_linear_attention_attr a = sizes(r, i);
    a.batch += (int64_t)lm_example_draw(r, i, 7, 2);
    a.seq = i % 3 ? lm_example_size(r, i, 5, 140) : 1;
    *x = (lm_example){ .n_in = 6, .want = 3 };
    int64_t rows = lm_state_rows_example(r, i, a.batch, &a.seq, &x->in[1]);
    x->in[0] = lm_shape2(LM_DTYPE_F32, rows, (a.heads + 2 * a.kv_heads) * a.head_dim);
    x->out[1] = (lm_tensor){ .dtype = LM_DTYPE_F32,
                             .ndim = 4,
                             .dim = { a.batch + !lm_absent(&x->in[5]), a.kv_heads, a.state_rows,
                                      a.head_dim } };
    lm_example_attr(x, &a);
}

/* Sums of features are not negative, so that no denominator is near 0. */
static void cached_fill(lm_rng r, const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    const lm_tensor *s = &c->out[1];
    const int64_t D = a->head_dim, heads = s->dim[0] * s->dim[1];
    lm_state_rows_fill(r, &c->in[1], c->in[0].dim[0], a->batch, a->seq);
    for (int64_t i = 0; a->feature == LM_FEATURE_ELU && i < heads; i++)
        for (int64_t d = 0; d < D; d++) {
            int64_t at = (i * a->state_rows + D) * D + d;
            lm_set(s->dtype, s->data, at, fabs(lm_get(s->dtype, s->data, at)));
        }
}

const lm_op lm_op_linear_attention_cached = {
    .name = "linear_attention_cached",
    .attr_size = sizeof(lm_linear_attention_attr),
    .in = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "kind", "B", LM_IDS | LM_OPTIONAL },
            { "slot", "B", LM_IDS | LM_OPTIONAL } },
    .out = { { "o", "N,HD", LM_ACT_TYPE }, { "state", "S,K,R,D", LM_GIVEN } },
    .fields = cached_fields,
    .split = "",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = cached_shape,
    .cost = cached_cost,
    .example = cached_example,
    .fill = cached_fill,
};
