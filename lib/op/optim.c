/* SPDX-License-Identifier: Apache-2.0 */
/* optim.c -- steps of optimisers that are one kernel, and the sums around them.
 *
 * Parameters, states and low-precision copies are outputs that the caller gives: a step reads them, too. */
#include "kernels/optim.h"

#include <math.h>

#include "op/example.h"
#include "op/ops.h"

static const lm_field adamw_fields[] = {
    { LM_ATTR_REAL(lm_adamw_attr, lr) },           { LM_ATTR_REAL(lm_adamw_attr, beta1) },
    { LM_ATTR_REAL(lm_adamw_attr, beta2) },        { LM_ATTR_REAL(lm_adamw_attr, eps) },
    { LM_ATTR_REAL(lm_adamw_attr, weight_decay) }, { LM_ATTR_REAL(lm_adamw_attr, bc1) },
    { LM_ATTR_REAL(lm_adamw_attr, bc2) },          { LM_ATTR_REAL(lm_adamw_attr, clip_norm) },
    { LM_ATTR_REAL(lm_adamw_attr, clip_value) },   { 0 }
};
static const lm_field sgd_fields[] = { { LM_ATTR_REAL(lm_sgd_attr, lr) },
                                       { LM_ATTR_REAL(lm_sgd_attr, momentum) },
                                       { LM_ATTR_REAL(lm_sgd_attr, dampening) },
                                       { LM_ATTR_REAL(lm_sgd_attr, weight_decay) },
                                       { LM_ATTR_REAL(lm_sgd_attr, clip_norm) },
                                       { LM_ATTR_REAL(lm_sgd_attr, clip_value) },
                                       { LM_ATTR_FLAG(lm_sgd_attr, nesterov) },
                                       { LM_ATTR_FLAG(lm_sgd_attr, first) },
                                       { 0 } };
static const lm_field clip_fields[] = { { LM_ATTR_REAL(lm_clip_attr, clip_norm) }, { 0 } };
static const lm_field strided_fields[] = { { LM_ATTR_INT(lm_strided_attr, stride, 0) }, { 0 } };

static void cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

/* What a step writes, it reads as well; but not the copy. */
static void step_cost(const lm_call *c, lm_cost *out)
{
    double n = (double)lm_tensor_count(&c->in[0]);
    out->flops = 12 * n;
    out->bytes = lm_call_bytes(c);
    for (int i = 0; i < c->n_out; i++)
        if (c->out[i].dtype == LM_DTYPE_F32)
            out->bytes += n * sizeof(float);
}

/* ---- examples ---- */

static lm_tensor example_run(lm_rng r, int i)
{
    return lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 127), lm_example_size(r, i, 1, 200));
}

/* g, then sumsq, watch and `numbers` others, each in some examples; outputs that lie beside g, the last of them
 * a copy in BF16. */
static void step_example(lm_rng r, int i, int64_t numbers, int outs, lm_example *x)
{
    *x = (lm_example){ .n_in = 4, .in = { example_run(r, i) } };
    for (int k = 1; k < 3; k++)
        if (lm_example_draw(r, i, 1 + k, 2))
            x->in[k] = lm_shape1(LM_DTYPE_F64, 1);
    if (lm_example_draw(r, i, 4, 2))
        x->in[3] = lm_shape1(LM_DTYPE_F64, numbers);
    for (int k = 0; k < outs; k++) {
        x->out[k] = x->in[0];
        x->want |= 1u << k;
    }
    x->out[outs - 1].dtype = LM_DTYPE_BF16;
    if (lm_example_draw(r, i, 5, 2)) {
        x->out[outs - 1] = (lm_tensor){ .dtype = LM_DTYPE_NONE };
        x->want &= ~(1u << (outs - 1));
    }
}

static void set_positive(const lm_tensor *t)
{
    for (int64_t k = 0; t->data && k < lm_tensor_count(t); k++)
        lm_set(t->dtype, t->data, k,
               0.1 + lm_get(t->dtype, t->data, k) * lm_get(t->dtype, t->data, k));
}

static void positive_inputs(lm_rng r, const lm_call *c)
{
    (void)r;
    for (int i = 1; i < c->n_in; i++)
        set_positive(&c->in[i]);
}

/* ---- adamw ---- */

static void adamw_example(lm_rng r, int i, lm_example *x)
{
    lm_adamw_attr a = { .lr = 1e-2,
                        .beta1 = 0.9,
                        .beta2 = 0.95,
                        .eps = 1e-8,
                        .weight_decay = 0.1 * (double)lm_example_draw(r, i, 6, 2),
                        .bc1 = 0.1,
                        .bc2 = 0.05,
                        .clip_norm = 0.5 * (double)lm_example_draw(r, i, 7, 2),
                        .clip_value = 0.7 * (double)lm_example_draw(r, i, 8, 2) };
    step_example(r, i, 3, 4, x);
    lm_example_attr(x, &a);
}

static void adamw_fill(lm_rng r, const lm_call *c)
{
    positive_inputs(r, c);
    set_positive(&c->out[2]);
}

const lm_op lm_op_adamw = {
    .name = "adamw",
    .attr_size = sizeof(lm_adamw_attr),
    .in = { { "g", "*", 0 },
            { "sumsq", "1", LM_DOUBLE | LM_OPTIONAL },
            { "watch", "1", LM_DOUBLE | LM_OPTIONAL },
            { "now", "3", LM_DOUBLE | LM_OPTIONAL } },
    .out = { { "p", "*", LM_GIVEN },
             { "m", "*", LM_GIVEN },
             { "v", "*", LM_GIVEN },
             { "copy", "*", LM_GIVEN | LM_ANY_TYPE | LM_OPTIONAL } },
    .fields = adamw_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_DENY,
    .cost = step_cost,
    .example = adamw_example,
    .fill = adamw_fill,
};

/* ---- sgd ---- */

static void sgd_example(lm_rng r, int i, lm_example *x)
{
    lm_sgd_attr a = { .lr = 1e-2,
                      .momentum = 0.9,
                      .dampening = 0.3 * (double)lm_example_draw(r, i, 6, 2),
                      .weight_decay = 0.1,
                      .clip_norm = 0.5 * (double)lm_example_draw(r, i, 7, 2),
                      .clip_value = 0.7 * (double)lm_example_draw(r, i, 8, 2),
                      .nesterov = lm_example_draw(r, i, 9, 2),
                      .first = lm_example_draw(r, i, 10, 2) };
    step_example(r, i, 2, 3, x);
    if (lm_example_draw(r, i, 11, 3) == 0) { /* no momentum */
        x->out[1] = (lm_tensor){ .dtype = LM_DTYPE_NONE };
        x->want &= ~2u;
    }
    lm_example_attr(x, &a);
}

const lm_op lm_op_sgd = {
    .name = "sgd",
    .attr_size = sizeof(lm_sgd_attr),
    .in = { { "g", "*", 0 },
            { "sumsq", "1", LM_DOUBLE | LM_OPTIONAL },
            { "watch", "1", LM_DOUBLE | LM_OPTIONAL },
            { "now", "2", LM_DOUBLE | LM_OPTIONAL } },
    .out = { { "p", "*", LM_GIVEN },
             { "buf", "*", LM_GIVEN | LM_OPTIONAL },
             { "copy", "*", LM_GIVEN | LM_ANY_TYPE | LM_OPTIONAL } },
    .fields = sgd_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_DENY,
    .cost = step_cost,
    .example = sgd_example,
    .fill = positive_inputs,
};

/* ---- sums ---- */

static void sum_example(lm_rng r, int i, lm_example *x)
{
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { example_run(r, i) } };
    if (i % 5 == 4) /* several blocks */
        x->in[0] = lm_shape1(LM_DTYPE_F32, 150001);
}

static void sumsq_example(lm_rng r, int i, lm_example *x)
{
    sum_example(r, i, x);
    const int64_t blocks = lm_example_size(r, i, 2, 9);
    x->in[x->n_in++] = lm_shape2(LM_DTYPE_I32, blocks, 4);
    x->out[0] = lm_shape1(LM_DTYPE_F64, blocks + lm_example_draw(r, i, 3, 4));
}

/* Blocks anywhere in x, some of them empty, whose sums are the last ones. */
static void sumsq_fill(lm_rng r, const lm_call *c)
{
    const int64_t n = lm_tensor_count(&c->in[0]);
    lm_sum_block *block = c->in[1].data;
    for (int64_t b = 0; b < c->in[1].dim[0]; b++) {
        const int64_t at = (int64_t)lm_rng_below(r, (uint64_t)b * 2, (uint64_t)n + 1),
                      most = n - at < LM_SUM_BLOCK ? n - at : LM_SUM_BLOCK;
        block[b] = (lm_sum_block){ .page = (int32_t)(at / LM_SUM_BLOCK),
                                   .first = (int32_t)(at % LM_SUM_BLOCK),
                                   .count = (int32_t)lm_rng_below(r, (uint64_t)b * 2 + 1,
                                                                  (uint64_t)most + 1),
                                   .place = (int32_t)(c->out[0].dim[0] - 1 - b) };
    }
}

const lm_op lm_op_sumsq = {
    .name = "sumsq",
    .in = { { "x", "*", 0 }, { "blocks", "B,4", LM_IDS } },
    .out = { { "s", "S", LM_DOUBLE | LM_GIVEN } },
    .split = "",
    .prec = LM_PREC_DENY,
    .cost = cost,
    .example = sumsq_example,
    .fill = sumsq_fill,
};

/* Of the first micro-batch it replaces what is there. */
const lm_op lm_op_total = {
    .name = "total",
    .in = { { "x", "*", 0 } },
    .out = { { "s", "1", LM_DOUBLE } },
    .split = "*+",
    .prec = LM_PREC_DENY,
    .cost = cost,
    .example = sum_example,
};

/* ---- clip ---- */

static void clip_example(lm_rng r, int i, lm_example *x)
{
    lm_clip_attr a = { 0.5 * (double)lm_example_draw(r, i, 0, 3) };
    *x = (lm_example){ .n_in = 2, .want = 1, .in = { lm_shape1(LM_DTYPE_F64, 1) } };
    if (lm_example_draw(r, i, 1, 2))
        x->in[1] = x->in[0];
    lm_example_attr(x, &a);
}

/* Some sums are not finite. */
static void clip_fill(lm_rng r, const lm_call *c)
{
    set_positive(&c->in[0]);
    if (c->in[1].data && lm_rng_below(r, 0, 3) == 0)
        lm_set(LM_DTYPE_F64, c->in[1].data, 0, (double)INFINITY);
}

const lm_op lm_op_clip = {
    .name = "clip",
    .attr_size = sizeof(lm_clip_attr),
    .in = { { "sumsq", "1", LM_DOUBLE }, { "watch", "1", LM_DOUBLE | LM_OPTIONAL } },
    .out = { { "scale", "1", LM_DOUBLE } },
    .fields = clip_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .cost = cost,
    .example = clip_example,
    .fill = clip_fill,
};

/* ---- strided ---- */

static lm_code strided_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_strided_attr *a = c->attr;
    int64_t n = lm_tensor_count(&c->in[0]), m = lm_tensor_count(&c->out[0]);
    (void)want;
    return lm_expect(a->stride > 0 && (m - 1) <= (n - 1) / a->stride, "strided", e,
                     "y reaches beyond the end of x");
}

static void strided_example(lm_rng r, int i, lm_example *x)
{
    lm_strided_attr a = { lm_example_size(r, i, 0, 33) };
    int64_t m = lm_example_size(r, i, 1, 127);
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape1(LM_DTYPE_F32, (m - 1) * a.stride + lm_example_size(r, i, 2, 40));
    x->out[0] = lm_shape1(LM_DTYPE_F32, m);
    lm_example_attr(x, &a);
}

const lm_op lm_op_strided = {
    .name = "strided",
    .attr_size = sizeof(lm_strided_attr),
    .in = { { "x", "N", 0 } },
    .out = { { "y", "M", LM_GIVEN } },
    .fields = strided_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = strided_shape,
    .cost = cost,
    .example = strided_example,
};
