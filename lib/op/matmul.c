/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.c -- products and inverses of matrices and of batches of them. */
#include "kernels/matmul.h"

#include "op/append.h"
#include "op/example.h"
#include "op/formula.h"
#include "op/ops.h"

static const lm_field matmul_fields[] = { { LM_ATTR_FLAG(lm_matmul_attr, turn_a) },
                                          { LM_ATTR_FLAG(lm_matmul_attr, turn_b) },
                                          { 0 } };

static bool is_batch_of_matrices(const lm_tensor *t)
{
    return t->ndim == 2 || t->ndim == 3;
}

static int64_t batch_of(const lm_tensor *t)
{
    return t->ndim == 3 ? t->dim[0] : 1;
}

/* ---- matmul ---- */

static lm_code matmul_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_matmul_attr *attr = c->attr;
    const lm_tensor *a = &c->in[0], *b = &c->in[1];
    (void)want;
    if (!is_batch_of_matrices(a) || !is_batch_of_matrices(b))
        return lm_expect(false, "matmul", e, "a or b is no matrix and no batch of them");
    lm_matmul_sizes s = lm_matmul_sizes_of(attr, a, b);
    int64_t k = b->dim[b->ndim - (attr->turn_b ? 1 : 2)];
    if (k != s.k)
        return lm_expect(false, "matmul", e, "a has %lld columns, but b %lld rows", (long long)s.k,
                         (long long)k);
    if (batch_of(a) != batch_of(b) && batch_of(a) != 1 && batch_of(b) != 1)
        return lm_expect(false, "matmul", e, "batches of %lld and of %lld matrices",
                         (long long)batch_of(a), (long long)batch_of(b));
    c->out[0] = a->ndim == 2 && b->ndim == 2 ? lm_shape2(a->dtype, s.m, s.n)
                                             : lm_shape3(a->dtype, s.batch, s.m, s.n);
    return LM_OK;
}

/* Give an operand the product op(a) op(b), summed over the batch if the operand is one matrix for all of it. */
static lm_code give_product(lm_grad *s, lm_vid to, lm_vid a, bool turn_a, lm_vid b, bool turn_b,
                            lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_matmul_attr attr = { turn_a, turn_b };
    lm_vid in[2] = { a, b }, d;
    if (!lm_grad_wants(s, to))
        return LM_OK;
    if (lm_append_node(g, &lm_op_matmul, &attr, in, &d, e))
        return e->code;
    lm_tensor shape = g->value[to].t;
    bool sums = batch_of(&shape) < batch_of(&g->value[d].t);
    if (sums ? lm_append_batch_sum(g, d, &shape, &d, e) : lm_append_as(g, d, &shape, &d, e))
        return e->code;
    return lm_grad_give(s, to, d, e);
}

static lm_code matmul_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    const lm_matmul_attr *t = n->attr;
    lm_vid a = n->in[0], b = n->in[1], dc = lm_grad_of(s, n->out[0]);
    if (t->turn_a ? give_product(s, a, b, t->turn_b, dc, true, e)
                  : give_product(s, a, dc, false, b, !t->turn_b, e))
        return e->code;
    return t->turn_b ? give_product(s, b, dc, true, a, t->turn_a, e)
                     : give_product(s, b, a, !t->turn_a, dc, false, e);
}

static void matmul_cost(const lm_call *c, lm_cost *out)
{
    lm_matmul_sizes s = lm_matmul_sizes_of(c->attr, &c->in[0], &c->in[1]);
    out->flops = 2.0 * (double)s.batch * (double)s.m * (double)s.n * (double)s.k;
    out->bytes = lm_call_bytes(c);
}

static lm_tensor stored_as(int64_t batch, int64_t rows, int64_t cols, bool turned, bool one)
{
    int64_t r = turned ? cols : rows, k = turned ? rows : cols;
    return one ? lm_shape2(LM_DTYPE_F32, r, k) : lm_shape3(LM_DTYPE_F32, batch, r, k);
}

static void matmul_example(lm_rng r, int i, lm_example *x)
{
    lm_matmul_attr a = { .turn_a = i % 2, .turn_b = i / 2 % 2 };
    int64_t m = lm_example_size(r, i, 0, 40), n = lm_example_size(r, i, 1, 40);
    int64_t k = lm_example_size(r, i, 2, 70), batch = 1 + (int64_t)lm_example_draw(r, i, 3, 5);
    uint64_t kind = lm_example_draw(r, i, 4, 4);
    if (i % 5 == 4)
        n += 128; /* wider than what kernels multiply without packing */
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = stored_as(kind == 3 ? 1 : batch, m, k, a.turn_a, kind == 0 || kind == 1);
    x->in[1] = stored_as(batch, k, n, a.turn_b, kind == 0 || kind == 2);
    lm_example_attr(x, &a);
}

/* Rows of a and c, and rows that are summed over. */
static const char *matmul_form(const lm_call *c, int i)
{
    const lm_matmul_attr *t = c->attr;
    if (i || c->in[0].ndim != 2 || c->in[1].ndim != 2)
        return NULL;
    return !t->turn_a ? "0-0" : t->turn_b ? NULL : "00+";
}

const lm_op lm_op_matmul = {
    .name = "matmul",
    .attr_size = sizeof(lm_matmul_attr),
    .in = { { "a", "*", LM_ACT_TYPE }, { "b", "~", LM_ACT_TYPE } },
    .out = { { "c", "*", LM_ACT_TYPE } },
    .fields = matmul_fields,
    .split = "",
    .form = matmul_form,
    .prec = LM_PREC_DENY,
    .tolerance = { 2e-6, 0 },
    .shape = matmul_shape,
    .grad = matmul_grad,
    .cost = matmul_cost,
    .example = matmul_example,
};

/* ---- inverse ---- */

static lm_code inverse_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_tensor *x = &c->in[0];
    (void)want;
    return lm_expect(is_batch_of_matrices(x) && x->dim[x->ndim - 1] == x->dim[x->ndim - 2],
                     "inverse", e, "x is no square matrix and no batch of them");
}

/* dx = -(y' dy y') */
static lm_code inverse_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    const lm_matmul_attr left = { true, false }, right = { false, true };
    const lm_tensor shape = g->value[n->in[0]].t;
    lm_tensor wide = shape; /* formulas are not made for F16 */
    lm_vid y = n->out[0], in[2] = { y, lm_grad_of(s, y) }, dx = LM_NONE;
    wide.dtype = lm_wide(shape.dtype);
    if (lm_append_node(g, &lm_op_matmul, &left, in, &in[0], e))
        return e->code;
    in[1] = y;
    if (lm_append_node(g, &lm_op_matmul, &right, in, &in[0], e) ||
        lm_append_as(g, in[0], &wide, &in[0], e))
        return e->code;
    const lm_formula_name names[] = { LM_IS("p", in[0]), LM_MAKES_AS("dx", &dx, wide.dtype) };
    const lm_formula_scope scope = {
        .name = names, .n_names = 2, .numbers = LM_NONE, .gate = LM_NONE
    };
    if (lm_formula_append(g, "dx = -p", &scope, e) || lm_append_as(g, dx, &shape, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void inverse_cost(const lm_call *c, lm_cost *out)
{
    const lm_tensor *x = &c->in[0];
    out->flops = 2.0 * (double)lm_tensor_count(x) * (double)x->dim[x->ndim - 1];
    out->bytes = lm_call_bytes(c);
}

static void inverse_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t sizes[] = { 1, 2, 4, 5, 8, 16, 17, 32, 33, 48 };
    int64_t n = sizes[lm_example_draw(r, i, 0, sizeof sizes / sizeof *sizes)];
    int64_t batch = 1 + (int64_t)lm_example_draw(r, i, 1, 5);
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = i % 3 ? lm_shape3(LM_DTYPE_F32, batch, n, n) : lm_shape2(LM_DTYPE_F32, n, n);
}

/* Far from singular, with pivots that are not on the diagonal. */
static void inverse_fill(lm_rng r, const lm_call *c)
{
    const lm_tensor *x = &c->in[0];
    int64_t n = x->dim[x->ndim - 1];
    for (int64_t i = 0; i < lm_tensor_count(x); i++) {
        int64_t row = i / n % n, col = i % n;
        double v = lm_rng_normal(r, (uint64_t)i) / (double)n;
        lm_set(x->dtype, x->data, i, (row + 1) % n == col ? v + 2 : v);
    }
}

const lm_op lm_op_inverse = {
    .name = "inverse",
    .in = { { "x", "*", LM_ACT_TYPE } },
    .out = { { "y", "*", LM_ACT_TYPE } },
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = inverse_shape,
    .grad = inverse_grad,
    .cost = inverse_cost,
    .example = inverse_example,
    .fill = inverse_fill,
};
