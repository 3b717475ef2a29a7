/* SPDX-License-Identifier: Apache-2.0 */
/* values.c -- whole values: a weight's numbers in F32, a value without a gradient, gradients that are added up. */
#include "kernels/arrange.h"

#include "op/append.h"
#include "op/example.h"
#include "op/ops.h"

static void copy_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

static void copy_example(lm_rng r, int i, lm_example *x)
{
    int64_t rows = lm_example_size(r, i, 0, 40), cols = lm_example_size(r, i, 1, 700);
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { lm_shape2(LM_DTYPE_F32, rows, cols) } };
}

/* ---- widen ---- */

static lm_code widen_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    return lm_grad_give(s, n->in[0], lm_grad_of(s, n->out[0]), e);
}

const lm_op lm_op_widen = {
    .name = "widen",
    .in = { { "w", "M,K", LM_WEIGHT } },
    .out = { { "y", "M,K", 0 } },
    .split = "M K",
    .prec = LM_PREC_ALLOW,
    .grad = widen_grad,
    .cost = copy_cost,
    .example = copy_example,
};

/* ---- stop ---- */

const lm_op lm_op_stop = {
    .name = "stop",
    .in = { { "x", "*", LM_ACT_TYPE | LM_FIXED } },
    .out = { { "y", "*", LM_ACT_TYPE } },
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .cost = copy_cost,
    .example = copy_example,
};

/* ---- accumulate ---- */

static const lm_field accumulate_fields[] = {
    { LM_ATTR_WORD(lm_accumulate_attr, acc, lm_acc_words) }, { 0 }
};

static void accumulate_example(lm_rng r, int i, lm_example *x)
{
    lm_accumulate_attr a = { .acc = i % 2 ? LM_ACC_ADD : LM_ACC_FIRST };
    copy_example(r, i, x);
    x->in[0].dtype = i % 3 ? LM_DTYPE_F32 : LM_DTYPE_BF16;
    lm_example_attr(x, &a);
}

const lm_op lm_op_accumulate = {
    .name = "accumulate",
    .attr_size = sizeof(lm_accumulate_attr),
    .in = { { "d", "*", LM_ANY_TYPE | LM_FIXED | LM_LINEAR } },
    .out = { { "dw", "*", 0 } },
    .fields = accumulate_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_DENY,
    .cost = copy_cost,
    .example = accumulate_example,
};
