/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c -- the low-rank paths beside a linear layer. */
#include "kernels/lora.h"

#include "graph/passes.h"
#include "kernels/linear.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field up_fields[] = { { LM_ATTR_INT(lm_lora_attr, blocks, 0) },
                                      { LM_ATTR_INT(lm_lora_attr, block[0].at, 0) },
                                      { LM_ATTR_REAL(lm_lora_attr, block[0].scale) },
                                      { LM_ATTR_RARE_REAL(lm_lora_attr, block[1].scale) },
                                      { LM_ATTR_RARE_REAL(lm_lora_attr, block[2].scale) },
                                      { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_INT(lm_lora_attr, blocks, 0) },
                                      { LM_ATTR_INT(lm_lora_attr, block[0].at, 0) },
                                      { LM_ATTR_REAL(lm_lora_attr, block[0].scale) },
                                      { LM_ATTR_RARE_REAL(lm_lora_attr, block[1].scale) },
                                      { LM_ATTR_RARE_REAL(lm_lora_attr, block[2].scale) },
                                      { LM_ATTR_WORD(lm_lora_attr, acc, lm_acc_words) },
                                      { 0 } };

/* ---- lora_down ---- */

/* The gradient of x is added to what x has so far, which saves a pass over it. */
static lm_code down_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid x = n->in[0], a = n->in[1], dh = lm_grad_of(s, n->out[0]), dx = LM_NONE;
    if (lm_grad_wants(s, a)) {
        lm_linear_attr attr = { LM_ACC_ADD };
        lm_vid in[2] = { dh, x }, out[2] = { LM_NONE, LM_SKIP };
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, a, &out[0], &attr.acc, e) ||
            lm_graph_append(g, &lm_op_linear_dw, &attr, in, out, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (!lm_grad_wants(s, x))
        return LM_OK;
    lm_vid in[3] = { dh, a, lm_grad_take(s, x) };
    if (lm_graph_append(g, &lm_op_lora_down_dx, NULL, in, &dx, e))
        return e->code;
    return lm_grad_give(s, x, dx, e);
}

static void down_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[0];
    out->bytes = lm_call_bytes(c);
}

static void down_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), h = lm_example_size(r, i, 1, 48);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[1] = lm_shape2(LM_DTYPE_F32, h, lm_example_size(r, i, 2, 130));
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, x->in[1].dim[1]);
}

const lm_op lm_op_lora_down = {
    .name = "lora_down",
    .in = { { "x", "N,K", LM_ACT_TYPE }, { "a", "H,K", LM_WEIGHT } },
    .out = { { "h", "N,H", LM_ACT_TYPE } },
    .split = "N H K+",
    .prec = LM_PREC_ALLOW,
    .grad = down_grad,
    .cost = down_cost,
    .example = down_example,
};

static void down_dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[1];
    out->bytes = lm_call_bytes(c);
}

static void down_dx_example(lm_rng r, int i, lm_example *x)
{
    lm_example forward;
    down_example(r, i, &forward);
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, forward.in[0].dim[0], forward.in[1].dim[0]);
    x->in[1] = forward.in[1];
    if (lm_example_draw(r, i, 3, 2))
        x->in[2] = forward.in[0];
}

const lm_op lm_op_lora_down_dx = {
    .name = "lora_down_dx",
    .in = { { "dh", "N,H", LM_ACT_TYPE },
            { "a", "H,K", LM_WEIGHT },
            { "dres", "N,K", LM_ACT_TYPE | LM_OPTIONAL | LM_OVER | LM_ADDEND } },
    .out = { { "dx", "N,K", LM_ACT_TYPE | LM_OVER } },
    .split = "N H+ K",
    .prec = LM_PREC_ALLOW,
    .cost = down_dx_cost,
    .example = down_dx_example,
};

/* ---- lora_up ---- */

/* Blocks lie within the columns of y, and h and b have their sizes. */
static lm_code check_blocks(const char *op, const lm_lora_attr *a, int64_t columns, int64_t wide,
                            const lm_tensor *b, lm_err *e)
{
    int64_t rows = 0;
    if (lm_expect(a->blocks >= 1 && a->blocks <= LM_LORA_BLOCKS, op, e, "%lld blocks, not 1 to %d",
                  (long long)a->blocks, LM_LORA_BLOCKS))
        return e->code;
    for (int64_t i = 0; i < a->blocks; i++) {
        const lm_lora_block *block = &a->block[i];
        if (lm_expect(block->at >= 0 && block->rows >= 1 && block->rows <= columns - block->at, op,
                      e, "a block is not within the columns"))
            return e->code;
        rows += block->rows;
    }
    if (lm_expect(b->dim[0] == rows, op, e, "b has %lld rows, the blocks %lld",
                  (long long)b->dim[0], (long long)rows))
        return e->code;
    return lm_expect(wide == a->blocks * b->dim[1], op, e, "h is not [N, blocks R]");
}

static lm_code up_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return check_blocks("lora_up", c->attr, c->in[0].dim[1], c->in[1].dim[1], &c->in[2], e);
}

/* Columns of y, and the rows of b that make them, where the blocks are all columns in their order. */
static bool covers(const lm_call *c)
{
    const lm_lora_attr *a = c->attr;
    int64_t at = 0;
    for (int64_t i = 0; i < a->blocks && a->block[i].at == at; i++)
        at += a->block[i].rows;
    return at == c->in[0].dim[1];
}

static const char *up_form(const lm_call *c, int i)
{
    return i || !covers(c) ? NULL : "1-01";
}

static const char *up_dx_form(const lm_call *c, int i)
{
    return i || !covers(c) ? NULL : "10+";
}

static const char *up_dw_form(const lm_call *c, int i)
{
    return i || !covers(c) ? NULL : "1-0";
}

/* Elements of [from, end) among those of a range. */
static int64_t common(const lm_range *r, int64_t from, int64_t end)
{
    const int64_t first = r->from > from ? r->from : from,
                  last = r->from + r->count < end ? r->from + r->count : end;
    return last > first ? last - first : 0;
}

/* The blocks as a rank has them: its part of the columns of each. */
static void cut_blocks(const lm_lora_attr *whole, const lm_portions *pieces, int ranks, int rank,
                       lm_lora_attr *out)
{
    const lm_lora_block *last = &whole->block[whole->blocks - 1];
    lm_range r;
    *out = *whole;
    for (int64_t i = 0; i < out->blocks; i++)
        out->block[i].at = out->block[i].rows = 0;
    for (int64_t k = 0; lm_portions_at(pieces, last->at + last->rows, ranks, rank, k, &r); k++)
        for (int64_t i = 0; i < out->blocks; i++) {
            const lm_lora_block *block = &whole->block[i];
            out->block[i].at += common(&r, 0, block->at);
            out->block[i].rows += common(&r, block->at, block->at + block->rows);
        }
}

/* Each rank has some columns of each block. */
static bool up_fits(const lm_call *c, const lm_portions *pieces, int ranks)
{
    bool fits = true;
    for (int rank = 0; rank < ranks; rank++) {
        lm_lora_attr own;
        cut_blocks(c->attr, pieces, ranks, rank, &own);
        for (int64_t i = 0; i < own.blocks; i++)
            fits &= own.block[i].rows > 0;
    }
    return fits;
}

static lm_code up_shard(lm_shard_call *s, lm_err *e)
{
    const lm_lora_attr whole = *(const lm_lora_attr *)s->attr;
    cut_blocks(&whole, s->pieces, s->ranks, s->rank, s->attr);
    return lm_shard_append(s, e);
}

static lm_code up_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid h = n->in[1], b = n->in[2], dz = lm_grad_of(s, n->out[0]), dh = LM_NONE;
    lm_lora_attr attr = *(const lm_lora_attr *)n->attr;
    if (lm_grad_wants(s, b)) {
        lm_vid in[2] = { dz, h }, db = LM_NONE;
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, b, &db, &attr.acc, e) ||
            lm_graph_append(g, &lm_op_lora_up_dw, &attr, in, &db, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (lm_grad_wants(s, h)) {
        lm_vid in[2] = { dz, b };
        if (lm_graph_append(g, &lm_op_lora_up_dx, &attr, in, &dh, e) || lm_grad_give(s, h, dh, e))
            return e->code;
    }
    return lm_grad_give(s, n->in[0], dz, e);
}

static void up_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[2]) * (double)c->in[0].dim[0];
    out->bytes = lm_call_bytes(c);
}

/* One to three blocks of columns, with others before, between and behind them. */
static int64_t example_blocks(lm_rng r, int i, lm_lora_attr *a, int64_t *columns)
{
    int64_t rows = 0, at = 0;
    *a = (lm_lora_attr){ .acc = lm_example_draw(r, i, 12, 2) ? LM_ACC_FIRST : LM_ACC_ADD,
                         .blocks = 1 + (int64_t)lm_example_draw(r, i, 3, LM_LORA_BLOCKS) };
    for (int64_t k = 0; k < a->blocks; k++) {
        lm_lora_block *block = &a->block[k];
        at += lm_example_draw(r, i, 4 + (int)k, 3) ? 0 : 5;
        block->at = at;
        block->rows = lm_example_size(r, i, 7 + (int)k, 60);
        block->scale = lm_example_draw(r, i, 10, 3) ? 0.5 + 0.8 * (double)k : 1;
        at += block->rows;
        rows += block->rows;
    }
    *columns = at + (lm_example_draw(r, i, 11, 2) ? 0 : 3);
    return rows;
}

static void up_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), rank = lm_example_size(r, i, 1, 33), columns;
    lm_lora_attr attr;
    int64_t rows = example_blocks(r, i, &attr, &columns);
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, columns);
    x->in[1] = lm_shape2(LM_DTYPE_F32, n, attr.blocks * rank);
    x->in[2] = lm_shape2(LM_DTYPE_F32, rows, rank);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_lora_up = {
    .name = "lora_up",
    .attr_size = sizeof(lm_lora_attr),
    .in = { { "y", "N,M", LM_ACT_TYPE | LM_OVER | LM_LINEAR },
            { "h", "N,H", LM_ACT_TYPE | LM_LINEAR },
            { "b", "S,R", LM_WEIGHT } },
    .out = { { "z", "N,M", LM_ACT_TYPE | LM_OVER } },
    .fields = up_fields,
    .split = "N",
    .form = up_form,
    .form_fits = up_fits,
    .shard = up_shard,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-6, 6e-3 },
    .shape = up_shape,
    .grad = up_grad,
    .cost = up_cost,
    .example = up_example,
};

/* ---- its gradients ---- */

/* The columns of h follow from the number of blocks. */
static lm_code up_dx_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_lora_attr *a = c->attr;
    (void)want;
    c->out[0].dim[1] *= a->blocks;
    return check_blocks("lora_up_dx", a, c->in[0].dim[1], c->out[0].dim[1], &c->in[1], e);
}

static void up_dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[1]) * (double)c->in[0].dim[0];
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_lora_up_dx = {
    .name = "lora_up_dx",
    .attr_size = sizeof(lm_lora_attr),
    .in = { { "dz", "N,M", LM_ACT_TYPE | LM_GRADIENT }, { "b", "S,R", LM_WEIGHT } },
    .out = { { "dh", "N,R", LM_ACT_TYPE } },
    .fields = up_fields,
    .split = "N",
    .form = up_dx_form,
    .form_fits = up_fits,
    .shard = up_shard,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-6, 6e-3 },
    .shape = up_dx_shape,
    .cost = up_dx_cost,
};

static lm_code up_dw_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return check_blocks("lora_up_dw", c->attr, c->in[0].dim[1], c->in[1].dim[1], &c->out[0], e);
}

static void up_dw_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->out[0]) * (double)c->in[0].dim[0];
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_lora_up_dw = {
    .name = "lora_up_dw",
    .attr_size = sizeof(lm_lora_attr),
    .in = { { "dz", "N,M", LM_ACT_TYPE | LM_GRADIENT }, { "h", "N,H", LM_ACT_TYPE } },
    .out = { { "db", "S,R", LM_GIVEN | LM_GRADIENT } },
    .fields = dw_fields,
    .split = "N+",
    .form = up_dw_form,
    .form_fits = up_fits,
    .shard = up_shard,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-6, 6e-3 },
    .shape = up_dw_shape,
    .cost = up_dw_cost,
};
