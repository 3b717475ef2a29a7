/* SPDX-License-Identifier: Apache-2.0 */
/* permute.c -- other shapes and orders of a tensor's numbers, parts of matrices, and matrices side by side. */
#include "kernels/arrange.h"

#include "op/append.h"
#include "op/example.h"
#include "op/ops.h"

static void move_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

/* ---- permute ---- */

/* The product of n dimensions; -1: one is negative, or there are more than there can be. */
static int64_t product(const int64_t *dim, int n, int most)
{
    int64_t count = 1;
    if (n < 0 || n > most)
        return -1;
    for (int i = 0; i < n; i++)
        if (dim[i] < 0 || __builtin_mul_overflow(count, dim[i], &count))
            return -1;
    return count;
}

static bool is_permutation(const int32_t *perm, int n)
{
    unsigned seen = 0;
    for (int i = 0; i < n; i++)
        if (perm[i] >= 0 && perm[i] < n)
            seen |= 1u << perm[i];
    return seen == (1u << n) - 1;
}

static lm_code permute_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_permute_attr *a = c->attr;
    int64_t have = lm_tensor_count(&c->in[0]);
    (void)want;
    if (product(a->dim, a->ndim, LM_PERMUTE_DIMS) != have ||
        product(a->to, a->to_ndim, LM_MAX_DIMS) != have)
        return lm_expect(false, "permute", e, "the shapes are not of the %lld elements of x",
                         (long long)have);
    if (!is_permutation(a->perm, a->ndim))
        return lm_expect(false, "permute", e, "the dimensions' order is no permutation");
    c->out[0].ndim = a->to_ndim;
    memcpy(c->out[0].dim, a->to, sizeof a->to);
    return LM_OK;
}

static lm_code permute_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    const lm_permute_attr *a = n->attr;
    const lm_tensor *x = &g->value[n->in[0]].t;
    lm_permute_attr back = { .ndim = a->ndim, .to_ndim = x->ndim };
    lm_vid dy = lm_grad_of(s, n->out[0]), dx;
    for (int i = 0; i < a->ndim; i++) {
        back.dim[i] = a->dim[a->perm[i]];
        back.perm[a->perm[i]] = i;
    }
    memcpy(back.to, x->dim, sizeof back.to);
    if (lm_append_node(g, &lm_op_permute, &back, &dy, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void permute_example(lm_rng r, int i, lm_example *x)
{
    lm_permute_attr a = { .ndim = 1 + i % LM_PERMUTE_DIMS, .to_ndim = 2 };
    int64_t most = a.ndim < 3 ? 90 : a.ndim < 5 ? 9 : 4, count = 1;
    for (int k = 0; k < a.ndim; k++) {
        int j = (int)lm_example_draw(r, i, k, (uint64_t)(k + 1)); /* a shuffle */
        a.dim[k] = lm_example_size(r, i, 6 + k, most);
        count *= a.dim[k];
        a.perm[k] = a.perm[j];
        a.perm[j] = k;
    }
    a.to[0] = a.dim[a.perm[0]];
    a.to[1] = count / a.to[0];
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = i % 2 ? lm_shape1(LM_DTYPE_F32, count)
                     : lm_shape2(LM_DTYPE_F32, a.dim[0], count / a.dim[0]);
    lm_example_attr(x, &a);
}

/* Rows that stay rows. */
static const char *permute_form(const lm_call *c, int i)
{
    const lm_permute_attr *a = c->attr;
    const int64_t rows = c->in[0].dim[0];
    return i || a->perm[0] != 0 || a->dim[0] != rows || a->to[0] != rows ? NULL : "00";
}

static lm_code permute_shard(lm_shard_call *s, lm_err *e)
{
    lm_permute_attr *a = s->attr;
    a->dim[0] = a->to[0] = s->graph->value[s->in[0]].t.dim[0];
    return lm_shard_append(s, e);
}

const lm_op lm_op_permute = {
    .name = "permute",
    .attr_size = sizeof(lm_permute_attr),
    .in = { { "x", "*", LM_ACT_TYPE } },
    .out = { { "y", "*", LM_ACT_TYPE } },
    .split = "",
    .form = permute_form,
    .shard = permute_shard,
    .prec = LM_PREC_INFER,
    .shape = permute_shape,
    .grad = permute_grad,
    .cost = move_cost,
    .example = permute_example,
};

/* ---- window ---- */

static const lm_field window_fields[] = { { LM_ATTR_INT(lm_window_attr, row, 0) },
                                          { LM_ATTR_INT(lm_window_attr, col, 0) },
                                          { LM_ATTR_INT(lm_window_attr, rows, 'N') },
                                          { LM_ATTR_INT(lm_window_attr, cols, 'M') },
                                          { 0 } };

static lm_code window_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_window_attr *a = c->attr;
    const int64_t most = INT64_MAX / 4;
    (void)want;
    return lm_expect(a->rows > 0 && a->cols > 0 && a->row < most && a->row > -most &&
                         a->col < most && a->col > -most,
                     "window", e, "there is no such window");
}

static lm_code window_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    const lm_window_attr *a = n->attr;
    const lm_tensor *x = &g->value[n->in[0]].t;
    lm_window_attr back = { -a->row, -a->col, x->dim[0], x->dim[1] };
    lm_vid dy = lm_grad_of(s, n->out[0]), dx;
    if (lm_append_node(g, &lm_op_window, &back, &dy, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void window_example(lm_rng r, int i, lm_example *x)
{
    int64_t rows = lm_example_size(r, i, 0, 40), cols = lm_example_size(r, i, 1, 70);
    lm_window_attr a = { .rows = lm_example_size(r, i, 2, 40),
                         .cols = lm_example_size(r, i, 3, 70) };
    a.row = (int64_t)lm_example_draw(r, i, 4, (uint64_t)(rows + a.rows)) - a.rows;
    a.col = (int64_t)lm_example_draw(r, i, 5, (uint64_t)(cols + a.cols)) - a.cols;
    if (i % 3 == 0)
        a.row = a.col = 0;
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { lm_shape2(LM_DTYPE_F32, rows, cols) } };
    lm_example_attr(x, &a);
}

/* All rows. */
static const char *window_form(const lm_call *c, int i)
{
    const lm_window_attr *a = c->attr;
    return i || a->row != 0 || a->rows != c->in[0].dim[0] ? NULL : "00";
}

static lm_code window_shard(lm_shard_call *s, lm_err *e)
{
    ((lm_window_attr *)s->attr)->rows = s->graph->value[s->in[0]].t.dim[0];
    return lm_shard_append(s, e);
}

const lm_op lm_op_window = {
    .name = "window",
    .attr_size = sizeof(lm_window_attr),
    .in = { { "x", "R,C", LM_ACT_TYPE } },
    .out = { { "y", "N,M", LM_ACT_TYPE } },
    .fields = window_fields,
    .split = "",
    .form = window_form,
    .shard = window_shard,
    .prec = LM_PREC_INFER,
    .shape = window_shape,
    .grad = window_grad,
    .cost = move_cost,
    .example = window_example,
};

/* ---- join ---- */

static const lm_field join_fields[] = { { LM_ATTR_FLAG(lm_join_attr, rows) }, { 0 } };

static lm_code join_shape(lm_call *c, unsigned want, lm_err *e)
{
    int along = ((const lm_join_attr *)c->attr)->rows ? 0 : 1;
    lm_tensor *y = &c->out[0];
    (void)want;
    *y = lm_shape2(c->in[0].dtype, c->in[0].dim[0], c->in[0].dim[1]);
    for (int i = 1; i < LM_JOIN_PARTS; i++) {
        const lm_tensor *x = &c->in[i];
        if (lm_absent(x))
            continue;
        if (x->ndim != 2 || x->dim[!along] != y->dim[!along])
            return lm_expect(false, "join", e, "x%d does not fit beside x0", i);
        y->dim[along] += x->dim[along];
    }
    return LM_OK;
}

static lm_code join_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    bool rows = ((const lm_join_attr *)n->attr)->rows;
    lm_vid dy = lm_grad_of(s, n->out[0]), dx;
    lm_window_attr a = { 0 };
    for (int i = 0; i < LM_JOIN_PARTS; i++) {
        if (n->in[i] < 0)
            continue;
        const lm_tensor *x = &g->value[n->in[i]].t;
        a.rows = x->dim[0];
        a.cols = x->dim[1];
        if (lm_grad_wants(s, n->in[i]) &&
            (lm_append_node(g, &lm_op_window, &a, &dy, &dx, e) || lm_grad_give(s, n->in[i], dx, e)))
            return e->code;
        *(rows ? &a.row : &a.col) += rows ? a.rows : a.cols;
    }
    return LM_OK;
}

static void join_example(lm_rng r, int i, lm_example *x)
{
    lm_join_attr a = { .rows = i % 2 };
    int64_t same = lm_example_size(r, i, 0, 40);
    *x = (lm_example){ .n_in = LM_JOIN_PARTS, .want = 1 };
    for (int k = 0; k < 1 + i % LM_JOIN_PARTS; k++) {
        int64_t own = lm_example_size(r, i, 1 + k, 40);
        x->in[k] = lm_shape2(LM_DTYPE_F32, a.rows ? own : same, a.rows ? same : own);
    }
    lm_example_attr(x, &a);
}

/* Rows side by side. */
static const char *join_form(const lm_call *c, int i)
{
    return i || ((const lm_join_attr *)c->attr)->rows ? NULL : "000000000";
}

#define PART(name)                           \
    {                                        \
        name, "~", LM_ACT_TYPE | LM_OPTIONAL \
    }
const lm_op lm_op_join = {
    .name = "join",
    .attr_size = sizeof(lm_join_attr),
    .in = { { "x0", "R,C", LM_ACT_TYPE },
            PART("x1"),
            PART("x2"),
            PART("x3"),
            PART("x4"),
            PART("x5"),
            PART("x6"),
            PART("x7") },
    .out = { { "y", "R,C", LM_ACT_TYPE } },
    .fields = join_fields,
    .split = "",
    .form = join_form,
    .prec = LM_PREC_INFER,
    .shape = join_shape,
    .grad = join_grad,
    .cost = move_cost,
    .example = join_example,
};
