/* SPDX-License-Identifier: Apache-2.0 */
/* factor.c -- orthonormal bases of matrices. */
#include "kernels/factor.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field svd_fields[] = { { LM_ATTR_INT(lm_svd_attr, rank, 0) },
                                       { LM_ATTR_FLAG(lm_svd_attr, right) },
                                       { 0 } };

/* A product of the matrix with itself or its like. */
static void factor_cost(const lm_call *c, lm_cost *out)
{
    const lm_tensor *x = &c->in[0];
    int64_t least = x->dim[0] < x->dim[1] ? x->dim[0] : x->dim[1];
    out->flops = 4.0 * (double)lm_tensor_count(x) * (double)least;
    out->bytes = lm_call_bytes(c);
}

static lm_code qr_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return lm_expect(c->in[0].dim[0] >= c->in[0].dim[1], "qr", e, "x has more columns than rows");
}

static void qr_example(lm_rng r, int i, lm_example *x)
{
    int64_t cols = lm_example_size(r, i, 0, 40), more = lm_example_size(r, i, 1, 80);
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, cols + (i % 3 ? more : 0), cols);
}

static void eigh_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 40);
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, n);
}

static void next_example(lm_rng r, int i, lm_example *x)
{
    eigh_example(r, i, x);
    x->n_in = 2;
    x->in[1] = x->in[0];
    x->want = 3;
}

static lm_code svd_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_svd_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    if (a->rank < 1 || a->rank > x->dim[a->right])
        return lm_expect(false, "svd", e, "x has no %lld vectors", (long long)a->rank);
    c->out[0] = a->right ? lm_shape2(x->dtype, a->rank, x->dim[1])
                         : lm_shape2(x->dtype, x->dim[0], a->rank);
    if (want & 2)
        c->out[1] = lm_shape1(x->dtype, x->dim[a->right]);
    return LM_OK;
}

static void svd_example(lm_rng r, int i, lm_example *x)
{
    int64_t rows = lm_example_size(r, i, 0, 40), cols = lm_example_size(r, i, 1, 40);
    lm_svd_attr a = { .right = i % 2 };
    a.rank = 1 + (int64_t)lm_example_draw(r, i, 2, (uint64_t)(rows < cols ? rows : cols));
    *x = (lm_example){ .n_in = 2, .want = i % 3 ? 3 : 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, rows, cols);
    if (lm_example_draw(r, i, 3, 2))
        x->in[1] = lm_shape1(LM_DTYPE_F32, 1);
    lm_example_attr(x, &a);
}

const lm_op lm_op_qr = {
    .name = "qr",
    .in = { { "x", "N,C", LM_FIXED } },
    .out = { { "q", "N,C", 0 } },
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = qr_shape,
    .cost = factor_cost,
    .example = qr_example,
};

const lm_op lm_op_eigh = {
    .name = "eigh",
    .in = { { "x", "N,N", LM_FIXED } },
    .out = { { "q", "N,N", 0 } },
    .split = "",
    .prec = LM_PREC_DENY,
    .cost = factor_cost,
    .example = eigh_example,
};

const lm_op lm_op_eigh_next = {
    .name = "eigh_next",
    .in = { { "x", "N,N", LM_FIXED }, { "q", "N,N", LM_FIXED } },
    .out = { { "next", "N,N", 0 }, { "order", "N,N", 0 } },
    .split = "",
    .prec = LM_PREC_DENY,
    .cost = factor_cost,
    .example = next_example,
};

const lm_op lm_op_svd = {
    .name = "svd",
    .attr_size = sizeof(lm_svd_attr),
    .in = { { "x", "N,C", LM_FIXED }, { "due", "1", LM_FIXED | LM_OPTIONAL } },
    .out = { { "u", "N,C", 0 }, { "first", "N,C", LM_OPTIONAL } },
    .fields = svd_fields,
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = svd_shape,
    .cost = factor_cost,
    .example = svd_example,
};
