/* SPDX-License-Identifier: Apache-2.0 */
/* ring.c -- the operators of kernels/ring.h, which the sharding pass appends (ring_shard.c).  It runs behind the backward, so
 * that none has a gradient. */
#include "kernels/ring.h"

#include "numeric/code_rows.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field pass_fields[] = { { LM_ATTR_WORD(lm_ring_attr, axis, lm_axis_names) },
                                        { LM_ATTR_INT(lm_ring_attr, hops, 0) },
                                        { LM_ATTR_INT(lm_ring_attr, columns, 'W') },
                                        { 0 } };
static const lm_field add_fields[] = { { LM_ATTR_INT(lm_ring_attr, first, 0) }, { 0 } };
static const lm_field mask_fields[] = { { LM_ATTR_INT(lm_ring_mask_attr, batch, 'B') },
                                        { LM_ATTR_INT(lm_ring_mask_attr, seq, 'T') },
                                        { LM_ATTR_INT(lm_ring_mask_attr, block.rank, 0) },
                                        { LM_ATTR_INT(lm_ring_mask_attr, block.from, 0) },
                                        { LM_ATTR_RARE_FLAG(lm_ring_mask_attr, block.ends) },
                                        { LM_ATTR_FLAG(lm_ring_mask_attr, block.causal) },
                                        { LM_ATTR_INT(lm_ring_mask_attr, block.window, 0) },
                                        { 0 } };
static const lm_field merge_fields[] = { { LM_ATTR_INT(lm_ring_merge_attr, batch, 'B') },
                                         { LM_ATTR_INT(lm_ring_merge_attr, seq, 'T') },
                                         { LM_ATTR_INT(lm_ring_merge_attr, heads, 'H') },
                                         { LM_ATTR_FLAG(lm_ring_merge_attr, undivided) },
                                         { 0 } };

/* ---- checks and costs ---- */

static lm_code pass_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_ring_attr *a = c->attr;
    const bool gives = !lm_absent(&c->in[0]), takes = !lm_absent(&c->out[0]);
    (void)want;
    return lm_expect(a->ranks > 0 && a->rank >= 0 && a->rank < a->ranks && a->hops > 0 &&
                         (a->hops < a->ranks || a->ranks == 1),
                     "ring_pass", e, "%lld hops around %lld ranks", (long long)a->hops,
                     (long long)a->ranks) ||
                   lm_expect((gives && takes) || (a->hops == 1 && (gives || takes)), "ring_pass", e,
                             "rows are missing") ||
                   lm_expect(!gives || (a->columns <= c->in[0].dim[1] &&
                                        (!takes || c->out[0].dtype == c->in[0].dtype)),
                             "ring_pass", e, "x has not the columns or the type of y")
               ? e->code
               : LM_OK;
}

static lm_code rows_shape(lm_call *c, unsigned want, lm_err *e)
{
    const int64_t own = c->out[0].dim[1] - c->in[1].dim[1];
    (void)want;
    return lm_expect(own >= 0 && own <= c->in[0].dim[1], "ring_rows", e,
                     "rows of %lld numbers are not some of q and all of kv",
                     (long long)c->out[0].dim[1]);
}

static lm_code add_shape(lm_call *c, unsigned want, lm_err *e)
{
    const int64_t first = ((const lm_ring_attr *)c->attr)->first;
    (void)want;
    return lm_expect(first >= 0 && first + c->out[0].dim[1] <= c->in[1].dim[1], "ring_add", e,
                     "columns from %lld on are not in b", (long long)first);
}

static lm_code mask_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_ring_mask_attr *a = c->attr;
    (void)want;
    return lm_expect(a->block.ranks > 0 && a->block.rank < a->block.ranks &&
                         a->block.from < a->block.ranks && a->seq % lm_ring_runs(&a->block) == 0,
                     "ring_mask", e, "ranks %lld and %lld of %lld, or half a position",
                     (long long)a->block.rank, (long long)a->block.from, (long long)a->block.ranks);
}

static lm_code merge_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_ring_merge_attr *a = c->attr;
    (void)want;
    return lm_expect(a->heads > 0 && c->in[0].dim[1] % a->heads == 0, "ring_merge", e,
                     "rows of %lld numbers are not %lld heads", (long long)c->in[0].dim[1],
                     (long long)a->heads);
}

static void move_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

static void pass_cost(const lm_call *c, lm_cost *out)
{
    const lm_ring_attr *a = c->attr;
    move_cost(c, out);
    if (a->ranks > 1 && !lm_absent(&c->in[0]))
        out->sent[a->axis] +=
            (double)(c->in[0].dim[0] * a->columns) * (double)lm_dtype_size(c->in[0].dtype);
}

static void sum_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 3.0 * (double)lm_tensor_count(&c->out[0]);
    out->bytes = lm_call_bytes(c);
}

/* ---- examples: of one rank, or of a block of several ---- */

static void pass_example(lm_rng r, int i, lm_example *x)
{
    const int64_t n = lm_example_size(r, i, 0, 40), w = lm_example_size(r, i, 1, 70);
    const lm_ring_attr a = { .axis = LM_AXIS_CP, .ranks = 1, .hops = 1, .columns = w };
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, w + i % 3 * 5);
    x->out[0] = lm_shape2(LM_DTYPE_F32, n, w);
    lm_example_attr(x, &a);
}

static void rows_example(lm_rng r, int i, lm_example *x)
{
    const lm_ring_attr a = { .axis = LM_AXIS_CP, .ranks = 1 };
    const int64_t n = lm_example_size(r, i, 0, 40), q = lm_example_size(r, i, 1, 70),
                  w = lm_example_size(r, i, 2, 70);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, q + i % 3);
    x->in[1] = lm_shape2(LM_DTYPE_F32, n, w);
    x->out[0] = lm_shape2(i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, n, q + w);
    lm_example_attr(x, &a);
}

static void add_example(lm_rng r, int i, lm_example *x)
{
    const int64_t n = lm_example_size(r, i, 0, 40), w = lm_example_size(r, i, 1, 70);
    const lm_ring_attr a = { .axis = LM_AXIS_CP, .ranks = 1, .first = i % 4 };
    *x = (lm_example){ .n_in = 2, .want = 1 };
    if (i % 3)
        x->in[0] = lm_shape2(LM_DTYPE_F32, n, w);
    x->in[1] = lm_shape2(LM_DTYPE_F32, n, w + i % 4 + i % 3);
    x->out[0] = lm_shape2(LM_DTYPE_F32, n, w);
    lm_example_attr(x, &a);
}

static void mask_example(lm_rng r, int i, lm_example *x)
{
    const bool ends = lm_example_draw(r, i, 6, 2);
    lm_ring_mask_attr a = { .batch = 1 + i % 2,
                            .seq = lm_example_size(r, i, 0, 40) * (ends ? 2 : 1) };
    a.block = (lm_ring_block){ .ranks = 3,
                               .rank = i % 3,
                               .from = (int64_t)lm_example_draw(r, i, 1, 3),
                               .ends = ends,
                               .causal = lm_example_draw(r, i, 2, 2) };
    a.block.window = lm_example_draw(r, i, 3, 2) ? 1 + a.seq / 2 : 0;
    *x = (lm_example){ .n_in = 2, .want = 3 };
    for (int k = 0; k < 2; k++)
        if (lm_example_draw(r, i, 4 + k, 2))
            x->in[k] = lm_shape1(LM_DTYPE_I32, a.batch * a.seq);
    lm_example_attr(x, &a);
}

static void mask_fill(lm_rng r, const lm_call *c)
{
    const lm_ring_mask_attr *a = c->attr;
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; c->in[k].data && i < a->batch * a->seq; i++)
            ((int32_t *)c->in[k].data)[i] = (int32_t)lm_rng_below(
                r, (uint64_t)(2 * i + k), (uint64_t)(a->block.ranks * a->seq + 1));
}

static void merge_example(lm_rng r, int i, lm_example *x)
{
    const lm_ring_merge_attr a = { .batch = 1 + i % 2,
                                   .seq = lm_example_size(r, i, 0, 33),
                                   .heads = 1 + (int64_t)lm_example_draw(r, i, 1, 4),
                                   .undivided = lm_example_draw(r, i, 2, 4) == 0 };
    const int64_t rows = a.batch * a.seq, cols = a.heads * lm_example_size(r, i, 3, 70);
    *x = (lm_example){ .n_in = 4, .want = 3 };
    x->in[0] = x->in[2] = x->out[0] = lm_shape2(LM_DTYPE_F32, rows, cols);
    x->in[1] = x->in[3] = lm_shape3(LM_DTYPE_F32, a.batch, a.heads, a.seq);
    lm_example_attr(x, &a);
}

#define RING(title, attributes, list, rule, price, sample)                       \
    .name = title, .attr_size = sizeof(attributes), .fields = list, .split = "", \
    .prec = LM_PREC_INFER, .shape = rule, .cost = price, .example = sample

const lm_op lm_op_ring_pass = {
    RING("ring_pass", lm_ring_attr, pass_fields, pass_shape, pass_cost, pass_example),
    .in = { { "x", "N,C", LM_ANY_TYPE | LM_OPTIONAL } },
    .out = { { "y", "N,W", LM_ANY_TYPE | LM_GIVEN | LM_OPTIONAL } },
};

const lm_op lm_op_ring_rows = {
    RING("ring_rows", lm_ring_attr, NULL, rows_shape, move_cost, rows_example),
    .in = { { "q", "N,C", LM_ANY_TYPE }, { "kv", "N,W", LM_ANY_TYPE } },
    .out = { { "y", "N,R", LM_ANY_TYPE | LM_GIVEN } },
};

const lm_op lm_op_ring_add = {
    RING("ring_add", lm_ring_attr, add_fields, add_shape, sum_cost, add_example),
    .in = { { "a", "N,W", LM_ANY_TYPE | LM_OPTIONAL | LM_OVER }, { "b", "N,C", LM_ACT_TYPE } },
    .out = { { "y", "N,W", LM_ANY_TYPE | LM_GIVEN | LM_OVER } },
};

const lm_op lm_op_ring_mask = {
    RING("ring_mask", lm_ring_mask_attr, mask_fields, mask_shape, move_cost, mask_example),
    .in = { { "lo", "BT", LM_IDS | LM_OPTIONAL }, { "hi", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "from", "BT", LM_IDS }, { "to", "BT", LM_IDS } },
    .fill = mask_fill,
};

const lm_op lm_op_ring_merge = {
    RING("ring_merge", lm_ring_merge_attr, merge_fields, merge_shape, sum_cost, merge_example),
    .in = { { "a", "BT,W", LM_ANY_TYPE },
            { "la", "B,H,T", 0 },
            { "b", "BT,W", LM_ACT_TYPE },
            { "lb", "B,H,T", 0 } },
    .out = { { "o", "BT,W", LM_ANY_TYPE | LM_GIVEN }, { "lse", "B,H,T", 0 } },
};
