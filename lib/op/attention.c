/* SPDX-License-Identifier: Apache-2.0 */
/* attention.c -- softmax attention over packed qkv rows, its backward, and the cached form. */
#include "kernels/attention.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field cached_fields[] = { { LM_ATTR_INT(lm_attention_attr, batch, 'B') },
                                          { LM_ATTR_INT(lm_attention_attr, seq, 'T') },
                                          { LM_ATTR_INT(lm_attention_attr, heads, 'H') },
                                          { LM_ATTR_INT(lm_attention_attr, kv_heads, 'K') },
                                          { LM_ATTR_INT(lm_attention_attr, head_dim, 'D') },
                                          { LM_ATTR_INT(lm_attention_attr, window, 0) },
                                          { LM_ATTR_FLAG(lm_attention_attr, causal) },
                                          { LM_ATTR_REAL(lm_attention_attr, scale) },
                                          { LM_ATTR_RARE_REAL(lm_attention_attr, soft_cap) },
                                          { 0 } };
static const lm_field attention_fields[] = { { LM_ATTR_INT(lm_attention_attr, batch, 'B') },
                                             { LM_ATTR_INT(lm_attention_attr, seq, 'T') },
                                             { LM_ATTR_INT(lm_attention_attr, heads, 'H') },
                                             { LM_ATTR_INT(lm_attention_attr, kv_heads, 'K') },
                                             { LM_ATTR_INT(lm_attention_attr, head_dim, 'D') },
                                             { LM_ATTR_INT(lm_attention_attr, window, 0) },
                                             { LM_ATTR_FLAG(lm_attention_attr, causal) },
                                             { LM_ATTR_REAL(lm_attention_attr, scale) },
                                             { LM_ATTR_REAL(lm_attention_attr, dropout) },
                                             { LM_ATTR_INT(lm_attention_attr, site, 0) },
                                             { LM_ATTR_RARE_REAL(lm_attention_attr, soft_cap) },
                                             { 0 } };

static lm_code attention_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_attention_attr *a = c->attr;
    (void)want;
    return lm_expect(a->kv_heads > 0 && a->heads % a->kv_heads == 0, "attention", e,
                     "%lld heads are not a multiple of %lld kv heads", (long long)a->heads,
                     (long long)a->kv_heads);
}

static lm_code attention_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[5] = { lm_grad_of(s, n->out[0]), n->in[0], n->out[0], n->out[1], n->in[1] };
    lm_vid dqkv = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_attention_dx, n->attr, in, &dqkv, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dqkv, e);
}

/* Pairs of one head and sequence that are visible. */
static double visible_pairs(const lm_attention_attr *a)
{
    double t = (double)a->seq, w = (double)a->window;
    if (!a->causal)
        return t * t;
    if (a->window <= 0 || w >= t)
        return t * (t + 1) / 2;
    return w * (w + 1) / 2 + (t - w) * w;
}

static void attention_cost(const lm_call *c, lm_cost *out)
{
    const lm_attention_attr *a = c->attr;
    out->flops = 4.0 * (double)(a->batch * a->heads) * visible_pairs(a) * (double)a->head_dim;
    out->bytes = lm_call_bytes(c);
}

static void attention_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 8, 16, 32, 64, 128 };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 0, 2), t = lm_example_size(r, i, 1, 70);
    int64_t d = dims[lm_example_draw(r, i, 2, 6)], kv = 1 + (int64_t)lm_example_draw(r, i, 3, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 3));
    lm_attention_attr attr = { .batch = b, .seq = t, .heads = h, .kv_heads = kv, .head_dim = d };
    attr.causal = lm_example_draw(r, i, 5, 4) != 0;
    attr.window = lm_example_draw(r, i, 6, 3) == 0 ? 1 + t / 3 : 0;
    attr.scale = 0.3;
    attr.dropout = lm_example_draw(r, i, 7, 5) == 0 ? 0.25 : 0;
    attr.site = i;
    attr.soft_cap = lm_example_draw(r, i, 9, 3) == 0 ? 1.5 : 0;
    *x = (lm_example){ .n_in = 2, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, b * t, (h + 2 * kv) * d);
    if (lm_example_draw(r, i, 8, 2))
        x->in[1] = lm_shape1(LM_DTYPE_I32, b * t);
    lm_example_attr(x, &attr);
}

/* Documents of random length: lo is the first row of each. */
static void attention_fill(lm_rng r, const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    int32_t *lo = c->in[1].data;
    if (!lo)
        return;
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t t = 0, start = 0; t < a->seq; t++) {
            if (lm_rng_below(r, (uint64_t)(b * a->seq + t), 9) == 0)
                start = t;
            lo[b * a->seq + t] = (int32_t)start;
        }
}

const lm_op lm_op_attention = {
    .name = "attention",
    .attr_size = sizeof(lm_attention_attr),
    .in = { { "qkv", "BT,(H+2K)D", LM_ACT_TYPE }, { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "o", "BT,HD", LM_ACT_TYPE }, { "lse", "B,H,T", LM_SAVED } },
    .fields = attention_fields,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = attention_shape,
    .grad = attention_grad,
    .cost = attention_cost,
    .example = attention_example,
    .fill = attention_fill,
};

static void dx_cost(const lm_call *c, lm_cost *out)
{
    attention_cost(c, out);
    out->flops *=
        2.5; /* five products against two; the recomputed scores are not extra by convention */
}

const lm_op lm_op_attention_dx = {
    .name = "attention_dx",
    .attr_size = sizeof(lm_attention_attr),
    .in = { { "do", "BT,HD", LM_ACT_TYPE },
            { "qkv", "BT,(H+2K)D", LM_ACT_TYPE },
            { "o", "BT,HD", LM_ACT_TYPE },
            { "lse", "B,H,T", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "dqkv", "BT,(H+2K)D", LM_ACT_TYPE } },
    .fields = attention_fields,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = attention_shape,
    .cost = dx_cost,
};

static void cached_cost(const lm_call *c, lm_cost *out)
{
    const lm_attention_attr *a = c->attr;
    out->flops =
        4.0 * (double)(a->batch * a->seq * a->heads * a->head_dim) * (double)c->out[1].dim[2];
    out->bytes = lm_call_bytes(c);
}

static void cached_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 8, 16, 32, 64, 128 };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 0, 3), t = 1;
    int64_t d = dims[lm_example_draw(r, i, 2, 6)], kv = 1 + (int64_t)lm_example_draw(r, i, 3, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 3));
    if (lm_example_draw(r, i, 5, 2)) /* half of the examples decode */
        t = lm_example_size(r, i, 1, 40);
    int64_t s = t + lm_example_size(r, i, 6, 70);
    lm_attention_attr attr = { .batch = b, .seq = t, .heads = h, .kv_heads = kv, .head_dim = d };
    attr.causal = true;
    attr.window = lm_example_draw(r, i, 7, 3) == 0 ? 1 + s / 3 : 0;
    attr.scale = 0.3;
    attr.soft_cap = lm_example_draw(r, i, 12, 3) == 0 ? 1.5 : 0;
    *x = (lm_example){ .n_in = 3, .want = 7 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, b * t, (h + 2 * kv) * d);
    x->in[1] = x->in[2] = lm_shape1(LM_DTYPE_I32, b);
    x->out[1] = (lm_tensor){ .dtype = LM_DTYPE_NONE, .ndim = 4, .dim = { b, kv, s, d } };
    x->out[2] = x->out[1];
    lm_example_attr(x, &attr);
}

static void cached_fill(lm_rng r, const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    int32_t *used = c->in[1].data, *fresh = c->in[2].data;
    for (int64_t b = 0; b < a->batch; b++) {
        fresh[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 2, (uint64_t)a->seq + 1);
        used[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 2 + 1,
                                        (uint64_t)(c->out[1].dim[2] - fresh[b]) + 1);
    }
}

const lm_op lm_op_attention_cached = {
    .name = "attention_cached",
    .attr_size = sizeof(lm_attention_attr),
    .in = { { "qkv", "BT,(H+2K)D", LM_ACT_TYPE },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS } },
    .out = { { "o", "BT,HD", LM_ACT_TYPE },
             { "kcache", "B,K,S,D", LM_ACT_TYPE | LM_GIVEN },
             { "vcache", "B,K,S,D", LM_ACT_TYPE | LM_GIVEN } },
    .fields = cached_fields,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = attention_shape,
    .cost = cached_cost,
    .example = cached_example,
    .fill = cached_fill,
};
