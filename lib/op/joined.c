/* SPDX-License-Identifier: Apache-2.0 */
/* joined.c -- operators that replace several (op/fuse.h).  They are inserted after the backward
 * pass, so they have no gradient rules. */
#include "kernels/attention.h"
#include "kernels/linear.h"
#include "kernels/norm.h"

#include "op/attention_blocks.h"
#include "op/example.h"
#include "op/ops.h"

static const char *const activations[] = { "none", "gelu", "gelu_exact", "swiglu", "geglu" };
static const lm_field act_fields[] = { { LM_ATTR_WORD(lm_linear_act_attr, act, activations) },
                                       { 0 } };
static const char *const kinds[] = { "rms", "layer", "rms_once" };
static const lm_field norm_linear_fields[] = { { LM_ATTR_WORD(lm_norm_linear_attr, kind, kinds) },
                                               { LM_ATTR_REAL(lm_norm_linear_attr, eps) },
                                               { LM_ATTR_WORD(lm_norm_linear_attr, act,
                                                              activations) },
                                               { LM_ATTR_RARE_FLAG(lm_norm_linear_attr, plus_one) },
                                               { 0 } };
static const lm_field norm_dx_dw_fields[] = { { LM_ATTR_WORD(lm_norm_attr, kind, kinds) },
                                              { LM_ATTR_WORD(lm_norm_attr, acc, lm_acc_words) },
                                              { LM_ATTR_RARE_FLAG(lm_norm_attr, plus_one) },
                                              { 0 } };
static const lm_field step_fields[] = {
    { LM_ATTR_INT(lm_attention_step_attr, attention.batch, 'B') },
    { LM_ATTR_INT(lm_attention_step_attr, attention.seq, 'T') },
    { LM_ATTR_INT(lm_attention_step_attr, attention.heads, 'H') },
    { LM_ATTR_INT(lm_attention_step_attr, attention.kv_heads, 'K') },
    { LM_ATTR_INT(lm_attention_step_attr, attention.head_dim, 'D') },
    { LM_ATTR_INT(lm_attention_step_attr, attention.window, 0) },
    { LM_ATTR_FLAG(lm_attention_step_attr, attention.causal) },
    { LM_ATTR_REAL(lm_attention_step_attr, attention.scale) },
    { LM_ATTR_RARE_REAL(lm_attention_step_attr, attention.soft_cap) },
    LM_BLOCK_FIELDS(lm_attention_step_attr, attention.blocks),
    { LM_ATTR_INT(lm_attention_step_attr, rotary_dim, 'R') },
    { LM_ATTR_REAL(lm_attention_step_attr, eps) },
    { LM_ATTR_RARE_FLAG(lm_attention_step_attr, plus_one) },
    { 0 }
};

static lm_code known(const char *op, bool ok, lm_err *e)
{
    return lm_expect(ok, op, e, "the number of the activation function is unknown");
}

/* ---- linear_act, linear_act_dx ---- */

static lm_code gelu_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_linear_act_attr *a = c->attr;
    (void)want;
    return known("linear_act", a->act == LM_ACT_GELU || a->act == LM_ACT_GELU_EXACT, e);
}

static void linear_act_cost(const lm_call *c, lm_cost *out)
{
    lm_op_linear.cost(c, out);
}

static void linear_act_example(lm_rng r, int i, lm_example *x)
{
    lm_linear_act_attr attr = { lm_example_draw(r, i, 4, 2) ? LM_ACT_GELU : LM_ACT_GELU_EXACT };
    lm_op_linear.example(r, i, x);
    x->want = lm_example_draw(r, i, 5, 3) ? 3 : 1;
    lm_example_attr(x, &attr);
}

const lm_op lm_op_linear_act = {
    .name = "linear_act",
    .attr_size = sizeof(lm_linear_act_attr),
    .in = { { "x", "N,K", LM_ACT_TYPE }, { "w", "M,K", LM_WEIGHT }, { "b", "M", LM_OPTIONAL } },
    .out = { { "y", "N,M", LM_ACT_TYPE }, { "z", "N,M", LM_ACT_TYPE | LM_OPTIONAL } },
    .fields = act_fields,
    .split = "N M",
    .prec = LM_PREC_ALLOW,
    .shape = gelu_shape,
    .cost = linear_act_cost,
    .example = linear_act_example,
};

static void linear_act_dx_cost(const lm_call *c, lm_cost *out)
{
    lm_op_linear_dx.cost(c, out);
}

static void linear_act_dx_example(lm_rng r, int i, lm_example *x)
{
    lm_linear_act_attr attr = { lm_example_draw(r, i, 4, 2) ? LM_ACT_GELU : LM_ACT_GELU_EXACT };
    int64_t n = lm_example_size(r, i, 0, 70), m = lm_example_size(r, i, 1, 130);
    int64_t k = lm_example_size(r, i, 2, 70);
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, m);
    x->in[1] = lm_shape2(LM_DTYPE_F32, m, k);
    x->in[2] = lm_shape2(LM_DTYPE_F32, n, k);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_linear_act_dx = {
    .name = "linear_act_dx",
    .attr_size = sizeof(lm_linear_act_attr),
    .in = { { "dy", "N,M", LM_ACT_TYPE }, { "w", "M,K", LM_WEIGHT }, { "z", "N,K", LM_ACT_TYPE } },
    .out = { { "dz", "N,K", LM_ACT_TYPE } },
    .fields = act_fields,
    .split = "N K",
    .prec = LM_PREC_ALLOW,
    .shape = gelu_shape,
    .cost = linear_act_dx_cost,
    .example = linear_act_dx_example,
};

/* ---- norm_linear ---- */

static lm_code norm_linear_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_norm_linear_attr *a = c->attr;
    lm_tensor *y = &c->out[0];

    (void)want;
    if (known("norm_linear", a->act >= LM_ACT_NONE && a->act <= LM_ACT_GEGLU, e) ||
        lm_expect(a->act < LM_ACT_SWIGLU || y->dim[1] % 2 == 0, "norm_linear", e,
                  "gate|up is not [2I,C]") ||
        lm_expect(a->kind == LM_NORM_RMS || !a->plus_one, "norm_linear", e,
                  "only RMSNorm has 1 + w"))
        return e->code;
    y->dim[1] /= a->act >= LM_ACT_SWIGLU ? 2 : 1;
    c->out[1] = c->in[3]; /* s is there iff r is */
    return LM_OK;
}

static void norm_linear_cost(const lm_call *c, lm_cost *out)
{
    const lm_tensor *x = &c->in[0];
    out->flops = (double)lm_tensor_count(x) * (6.0 + 2.0 * (double)c->in[4].dim[0]);
    out->bytes = lm_call_bytes(c);
}

static void norm_linear_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 8), k = lm_example_size(r, i, 1, 300);
    int64_t m = lm_example_size(r, i, 2, 70);
    bool layer = lm_example_draw(r, i, 3, 2);
    lm_norm_linear_attr attr = { layer ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5,
                                 (lm_activation)lm_example_draw(r, i, 4, 5),
                                 !layer && lm_example_draw(r, i, 7, 2) };
    if (!layer && !attr.plus_one && lm_example_draw(r, i, 8, 2))
        attr.kind = LM_NORM_RMS_ONCE;
    *x = (lm_example){ .n_in = 6, .want = 3 };
    m *= attr.act >= LM_ACT_SWIGLU ? 2 : 1;
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, k);
    x->in[1] = lm_shape1(LM_DTYPE_F32, k);
    if (layer)
        x->in[2] = x->in[1];
    if (lm_example_draw(r, i, 5, 2))
        x->in[3] = x->in[0];
    x->in[4] = lm_shape2(LM_DTYPE_F32, m, k);
    if (lm_example_draw(r, i, 6, 2))
        x->in[5] = lm_shape1(LM_DTYPE_F32, m);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_norm_linear = {
    .name = "norm_linear",
    .attr_size = sizeof(lm_norm_linear_attr),
    .in = { { "x", "N,C", LM_ACT_TYPE },
            { "nw", "C", 0 },
            { "nb", "C", LM_OPTIONAL },
            { "r", "N,C", LM_ACT_TYPE | LM_OPTIONAL },
            { "w", "M,C", LM_WEIGHT },
            { "b", "M", LM_OPTIONAL } },
    .out = { { "y", "N,M", LM_ACT_TYPE }, { "s", "N,C", LM_ACT_TYPE | LM_OPTIONAL } },
    .fields = norm_linear_fields,
    .split = "N",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = norm_linear_shape,
    .cost = norm_linear_cost,
    .example = norm_linear_example,
};

/* ---- norm_dx_dw ---- */

static void norm_dx_dw_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 14.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void norm_dx_dw_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), c = lm_example_size(r, i, 1, 300);
    bool layer = lm_example_draw(r, i, 2, 2);
    lm_norm_attr attr = { layer ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5,
                          lm_example_draw(r, i, 4, 2) ? LM_ACC_FIRST : LM_ACC_ADD,
                          !layer && lm_example_draw(r, i, 5, 2) };
    if (!layer && !attr.plus_one && lm_example_draw(r, i, 8, 2))
        attr.kind = LM_NORM_RMS_ONCE;
    *x = (lm_example){ .n_in = 5, .want = layer ? 7 : 3 };
    x->in[0] = x->in[1] = lm_shape2(LM_DTYPE_F32, n, c);
    x->in[2] = lm_shape1(LM_DTYPE_F32, c);
    x->in[3] = lm_shape2(LM_DTYPE_F32, n, 2);
    if (lm_example_draw(r, i, 3, 2))
        x->in[4] = x->in[0];
    lm_example_attr(x, &attr);
}

const lm_op lm_op_norm_dx_dw = {
    .name = "norm_dx_dw",
    .attr_size = sizeof(lm_norm_attr),
    .in = { { "dy", "N,C", LM_ACT_TYPE | LM_OVER },
            { "s", "N,C", LM_ACT_TYPE },
            { "w", "C", 0 },
            { "stat", "N,2", 0 },
            { "dres", "N,C", LM_ACT_TYPE | LM_OPTIONAL | LM_OVER } },
    .out = { { "ds", "N,C", LM_ACT_TYPE | LM_OVER }, { "dw", "C", 0 }, { "db", "C", LM_OPTIONAL } },
    .fields = norm_dx_dw_fields,
    .split = "N+",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = norm_dx_dw_cost,
    .example = norm_dx_dw_example,
};

/* ---- attention_step ---- */

/* The call of attention_cached whose attributes and operands begin those of c. */
static lm_call cached_part(const lm_call *c, lm_tensor in[LM_MAX_IN])
{
    lm_call cached = *c;
    memset(in, 0, LM_MAX_IN * sizeof *in);
    memcpy(in, c->in, 3 * sizeof *in);
    in[6] = c->in[7];
    cached.n_in = 7;
    cached.in = in;
    return cached;
}

static lm_code attention_step_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_attention_step_attr *a = c->attr;
    const lm_attention_attr *s = &a->attention;
    lm_tensor in[LM_MAX_IN];
    lm_call cached = cached_part(c, in);

    if (lm_op_attention_cached.shape(&cached, want, e) ||
        lm_expect(!s->reads, "attention_step", e, "a cache that is only read") ||
        lm_expect(s->seq == 1, "attention_step", e, "%lld rows a sequence, not one",
                  (long long)s->seq) ||
        lm_expect(lm_attention_value_dim(s) == s->head_dim, "attention_step", e,
                  "values of %lld numbers with keys of %lld", (long long)s->value_dim,
                  (long long)s->head_dim) ||
        lm_expect(lm_absent(&c->in[4]) || (a->rotary_dim % 2 == 0 && a->rotary_dim <= s->head_dim),
                  "attention_step", e, "R of the table is not even, or above D") ||
        lm_expect(lm_absent(&c->in[5]) == lm_absent(&c->in[6]), "attention_step", e,
                  "wq and wk go together"))
        return e->code;
    return LM_OK;
}

static void attention_step_cost(const lm_call *c, lm_cost *out)
{
    lm_tensor in[LM_MAX_IN];
    lm_call cached = cached_part(c, in);
    lm_op_attention_cached.cost(&cached, out);
    out->bytes = lm_call_bytes(c) - lm_rope_unread_bytes(&c->in[4], &c->in[3]);
}

static void attention_step_example(lm_rng r, int i, lm_example *x)
{
    lm_attention_step_attr attr = { .eps = 1e-6 };
    int64_t d, positions;

    lm_op_attention_cached.example(r, i, x);
    memcpy(&attr.attention, x->attr, sizeof attr.attention);
    d = attr.attention.head_dim;
    positions = x->out[1].dim[2];
    attr.attention.seq = 1;
    attr.attention.value_dim = attr.attention.bias_zero = 0;
    attr.attention.causal = true;
    attr.attention.reads = false;
    x->n_in = 8;
    x->want = 7;
    x->in[7] = x->in[6];
    x->in[6] = (lm_tensor){ 0 };
    x->out[1].dim[0] = attr.attention.batch;
    x->out[2] = x->out[1];
    x->in[4] = x->in[5] = (lm_tensor){ 0 };
    x->in[0] =
        lm_shape2(LM_DTYPE_F32, attr.attention.batch, lm_attention_row(&attr.attention, true));
    x->in[3] = lm_shape1(LM_DTYPE_I32, attr.attention.batch);
    if (lm_example_draw(r, i, 9, 4)) {
        attr.rotary_dim = lm_example_draw(r, i, 10, 2) ? d : d / 2;
        x->in[4] = lm_shape2(LM_DTYPE_F32, positions, attr.rotary_dim);
    }
    if (lm_example_draw(r, i, 11, 2))
        x->in[5] = x->in[6] = lm_shape1(LM_DTYPE_F32, d);
    attr.plus_one = lm_example_draw(r, i, 13, 2);
    lm_example_attr(x, &attr);
}

static void attention_step_fill(lm_rng r, const lm_call *c)
{
    const lm_attention_step_attr *a = c->attr;
    int32_t *pos = c->in[3].data;
    lm_tensor in[LM_MAX_IN];
    lm_call cached = cached_part(c, in);

    lm_op_attention_cached.fill(r, &cached);
    for (int64_t b = 0; b < a->attention.batch; b++)
        pos[b] = (int32_t)lm_rng_below(r, 64 + (uint64_t)b, (uint64_t)c->out[1].dim[2]);
}

const lm_op lm_op_attention_step = {
    .name = "attention_step",
    .attr_size = sizeof(lm_attention_step_attr),
    .in = { { "qkv", "BT,(H+2K)D", LM_ACT_TYPE },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "pos", "B", LM_IDS },
            { "table", "P,R", LM_FIXED | LM_OPTIONAL },
            { "wq", "D", LM_OPTIONAL },
            { "wk", "D", LM_OPTIONAL },
            { "sinks", "H", LM_OPTIONAL } },
    .out = { { "o", "BT,HD", LM_ACT_TYPE },
             { "kcache", "B,K,S,D", LM_ACT_TYPE | LM_GIVEN },
             { "vcache", "B,K,S,D", LM_ACT_TYPE | LM_GIVEN } },
    .fields = step_fields,
    .split = "",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = attention_step_shape,
    .cost = attention_step_cost,
    .example = attention_step_example,
    .fill = attention_step_fill,
};
