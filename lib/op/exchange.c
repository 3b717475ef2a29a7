/* SPDX-License-Identifier: Apache-2.0 */
/* exchange.c -- values that ranks exchange: what the sharding pass inserts where a reader needs another layout.  It runs behind
 * the backward and the update, so that no exchange has a gradient. */
#include "kernels/comm.h"

#include "numeric/code_rows.h"
#include "op/example.h"
#include "op/ops.h"

#define FIELDS                                               \
    { LM_ATTR_WORD(lm_exchange_attr, axis, lm_axis_names) }, \
    {                                                        \
        LM_ATTR_INT(lm_exchange_attr, dim, 0)                \
    }
static const lm_field reduce_fields[] = { { LM_ATTR_WORD(lm_exchange_attr, axis, lm_axis_names) },
                                          { 0 } };
static const lm_field fields[] = { FIELDS, { 0 } };
static const lm_field to_fields[] = { FIELDS, { LM_ATTR_INT(lm_exchange_attr, to_dim, 0) }, { 0 } };

/* ---- shapes ---- */

static int64_t held(const lm_exchange_attr *a, bool to)
{
    return lm_portions_count(to ? &a->to_pieces : &a->pieces, to ? a->to_len : a->len,
                             (int)a->ranks, (int)a->rank);
}

/* x and y differ along `dim` alone, where they have these elements. */
static lm_code expect_dim(const lm_call *c, const char *op, int64_t dim, int64_t x, int64_t y,
                          lm_err *e)
{
    lm_tensor like = c->in[0];
    bool fits = dim >= 0 && dim < like.ndim && like.dim[dim] == x;
    if (fits)
        like.dim[dim] = y;
    return lm_expect(fits && lm_same_shape(&like, &c->out[0]), op, e,
                     "x and y are not a value and its part along dimension %lld", (long long)dim);
}

static lm_code shared_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_exchange_attr *a = c->attr;
    (void)want;
    return expect_dim(c, "sum_shared", a->dim, held(a, false), held(a, false), e);
}

static lm_code all_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return lm_expect(lm_same_shape(&c->in[0], &c->out[0]), "all_reduce", e, "y is not like x");
}

static lm_code scatter_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_exchange_attr *a = c->attr;
    (void)want;
    return expect_dim(c, "reduce_scatter", a->dim, a->len, held(a, false), e);
}

static lm_code gather_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_exchange_attr *a = c->attr;
    (void)want;
    return expect_dim(c, "all_gather", a->dim, held(a, false), a->len, e);
}

/* The whole value is on the owner alone. */
static lm_code collect_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_exchange_attr *a = c->attr;
    const bool here = a->rank == a->owner;
    if ((want & 1) != here)
        return lm_expect(false, "collect", e, "y is of the owner, and of it alone");
    return here ? expect_dim(c, "collect", a->dim, held(a, false), a->len, e) : LM_OK;
}

static lm_code deal_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_exchange_attr *a = c->attr;
    const bool here = a->rank == a->owner;
    (void)want;
    if (!lm_absent(&c->in[0]) != here)
        return lm_expect(false, "deal", e, "x is of the owner, and of it alone");
    return here ? expect_dim(c, "deal", a->dim, a->len, held(a, false), e) : LM_OK;
}

static lm_code to_all_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_exchange_attr *a = c->attr;
    lm_tensor x = c->in[0], y = c->out[0];
    (void)want;
    bool fits = x.ndim == y.ndim && a->dim < x.ndim && a->to_dim < x.ndim &&
                x.dim[a->dim] == held(a, false) && y.dim[a->to_dim] == held(a, true);
    if (fits && a->dim != a->to_dim)
        fits = y.dim[a->dim] == a->len && x.dim[a->to_dim] == a->to_len;
    if (fits)
        x.dim[a->dim] = y.dim[a->dim], x.dim[a->to_dim] = y.dim[a->to_dim];
    return lm_expect(fits && lm_same_shape(&x, &y), "all_to_all", e,
                     "x and y are not parts of one value");
}

/* Along another axis of the mesh, which splits another dimension than this exchange. */
static bool splits_dim(const lm_call *c, char dim)
{
    const lm_exchange_attr *a = c->attr;
    return dim - '0' != a->dim;
}

static bool splits_any(const lm_call *c, char dim)
{
    (void)dim;
    return lm_same_shape(&c->in[0], &c->out[0]);
}

static bool splits_neither(const lm_call *c, char dim)
{
    const lm_exchange_attr *a = c->attr;
    return dim - '0' != a->dim && dim - '0' != a->to_dim;
}

/* ---- costs: bytes on the wire by rings and pairs ---- */

static void moves(const lm_call *c, const lm_tensor *whole, double share, lm_cost *out)
{
    const lm_exchange_attr *a = c->attr;
    double n = (double)a->ranks;
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
    out->sent[a->axis] += share * (n - 1) / n * (double)lm_stored_bytes(whole);
}

static void all_cost(const lm_call *c, lm_cost *out)
{
    moves(c, &c->in[0], 2, out);
}

static void scatter_cost(const lm_call *c, lm_cost *out)
{
    moves(c, &c->in[0], 1, out);
}

static void gather_cost(const lm_call *c, lm_cost *out)
{
    moves(c, &c->out[0], ((const lm_exchange_attr *)c->attr)->sum ? 2 : 1, out);
}

static void shared_cost(const lm_call *c, lm_cost *out)
{
    const lm_exchange_attr *a = c->attr;
    lm_tensor whole = c->in[0];
    whole.dim[a->dim] = a->len;
    moves(c, &whole, 2, out);
}

/* Parts go to the owner, or come from it: in the mean of the ranks, as each owns some values. */
static void owner_cost(const lm_call *c, const lm_tensor *part, lm_cost *out)
{
    const lm_exchange_attr *a = c->attr;
    const double n = (double)a->ranks;
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
    out->sent[a->axis] += (n - 1) / n * (double)lm_stored_bytes(part);
}

static void collect_cost(const lm_call *c, lm_cost *out)
{
    owner_cost(c, &c->in[0], out);
}

static void deal_cost(const lm_call *c, lm_cost *out)
{
    owner_cost(c, &c->out[0], out);
}

static void copy_cost(const lm_call *c, lm_cost *out)
{
    moves(c, &c->in[0], 0, out);
}

/* ---- examples: of one rank, or without others ---- */

static void draw(lm_rng r, int i, int ranks, lm_example *x)
{
    lm_exchange_attr a = { .axis = LM_AXIS_EP, .ranks = ranks, .rank = i % ranks, .dim = i % 2 };
    lm_tensor t = lm_shape3(LM_DTYPE_F32, 4 * lm_example_size(r, i, 0, 13),
                            4 * lm_example_size(r, i, 1, 20), 4 + i % 3);
    a.to_dim = 1 - a.dim;
    a.len = t.dim[a.dim];
    a.to_len = t.dim[a.to_dim];
    if (i % 3 == 1)
        a.pieces = (lm_portions){ .n = 1, .run = { { 4, a.len / 4, 1 } } };
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { t }, .out = { t } };
    x->out[0].dtype = LM_DTYPE_NONE; /* that of activations */
    lm_example_attr(x, &a);
}

static void alone_example(lm_rng r, int i, lm_example *x)
{
    draw(r, i, 1, x);
}

static void once_example(lm_rng r, int i, lm_example *x)
{
    draw(r, i, 2, x);
}

static void part_example(lm_rng r, int i, lm_example *x)
{
    const lm_exchange_attr *a = (const lm_exchange_attr *)x->attr;
    draw(r, i, i % 3 == 1 ? 1 : 3, x);
    x->out[0].dim[a->dim] = held(a, false);
}

#define EXCHANGE(title, kind, attributes, dims, rule, price, sample)                     \
    .name = title, .attr_size = sizeof(lm_exchange_attr), .in = { { "x", "~", kind } },  \
    .out = { { "y", "*", LM_ACT_TYPE | LM_GIVEN } }, .fields = attributes, .split = "*", \
    .splits = dims, .prec = LM_PREC_INFER, .shape = rule, .cost = price, .example = sample

const lm_op lm_op_all_reduce = { EXCHANGE("all_reduce", LM_ACT_TYPE, reduce_fields, splits_any,
                                          all_shape, all_cost, alone_example) };
const lm_op lm_op_reduce_scatter = { EXCHANGE("reduce_scatter", LM_ACT_TYPE | LM_LINEAR, fields,
                                              splits_dim, scatter_shape, scatter_cost,
                                              alone_example) };
const lm_op lm_op_all_gather = { EXCHANGE("all_gather", LM_ACT_TYPE | LM_LINEAR, fields, splits_dim,
                                          gather_shape, gather_cost, alone_example) };
const lm_op lm_op_all_to_all = { EXCHANGE("all_to_all", LM_ACT_TYPE | LM_LINEAR, to_fields,
                                          splits_neither, to_all_shape, scatter_cost,
                                          alone_example) };
const lm_op lm_op_sum_shared = { EXCHANGE("sum_shared", LM_ACT_TYPE | LM_LINEAR, fields, splits_dim,
                                          shared_shape, shared_cost, alone_example) };
const lm_op lm_op_part = { EXCHANGE("part", LM_ACT_TYPE | LM_LINEAR, fields, splits_dim,
                                    scatter_shape, copy_cost, part_example) };
const lm_op lm_op_once = { EXCHANGE("once", LM_ACT_TYPE | LM_LINEAR, reduce_fields, splits_any,
                                    all_shape, copy_cost, once_example) };

/* ---- what a block that ranks share has of a value ---- */

static const lm_field gather_fields[] = { { LM_ATTR_WORD(lm_gather_attr, axis, lm_axis_names) },
                                          { 0 } };

static lm_code like_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return lm_expect(lm_same_shape(&c->in[0], &c->out[0]), "gather", e, "y is not like x");
}

static void begin_cost(const lm_call *c, lm_cost *out)
{
    const lm_gather_attr *a = c->attr;
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
    out->sent[a->axis] += (double)(a->ranks - 1) / (double)a->ranks * lm_call_bytes(c) / 2;
}

static void end_cost(const lm_call *c, lm_cost *out)
{
    (void)c;
    out->flops = out->bytes = 0;
}

static void gather_example(lm_rng r, int i, lm_example *x)
{
    const lm_gather_attr a = { .axis = LM_AXIS_DP, .ranks = 1 };
    const lm_tensor t =
        lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 13), lm_example_size(r, i, 1, 20));
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { t }, .out = { t } };
    x->out[0].dtype = LM_DTYPE_NONE; /* that of activations */
    lm_example_attr(x, &a);
}

#define GATHER(title, over, price)                                                     \
    .name = title, .attr_size = sizeof(lm_gather_attr),                                \
    .in = { { "x", "*", LM_ACT_TYPE | LM_LINEAR | (over) } },                          \
    .out = { { "y", "*", LM_ACT_TYPE | LM_GIVEN | (over) } }, .fields = gather_fields, \
    .split = "*", .prec = LM_PREC_INFER, .shape = like_shape, .cost = price,           \
    .example = gather_example

const lm_op lm_op_gather_begin = { GATHER("gather_begin", 0, begin_cost) };
const lm_op lm_op_gather_end = { GATHER("gather_end", LM_OVER, end_cost) };

/* Of updates alone, which are not split further. */
#define OWNED(title, kind, more, rule, price)                                                \
    .name = title, .attr_size = sizeof(lm_exchange_attr), .in = { { "x", "~", kind } },      \
    .out = { { "y", "*", LM_ACT_TYPE | LM_GIVEN | (more) } }, .fields = fields, .split = "", \
    .prec = LM_PREC_INFER, .shape = rule, .cost = price, .example = alone_example

const lm_op lm_op_collect = { OWNED("collect", LM_ACT_TYPE, LM_OPTIONAL, collect_shape,
                                    collect_cost) };
const lm_op lm_op_deal = { OWNED("deal", LM_ACT_TYPE | LM_OPTIONAL, 0, deal_shape, deal_cost) };

/* ---- rows of a part of a table ---- */

static const lm_field ids_fields[] = { { LM_ATTR_INT(lm_part_ids_attr, first, 0) },
                                       { LM_ATTR_INT(lm_part_ids_attr, count, 0) },
                                       { 0 } };

static void ids_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

static void ids_example(lm_rng r, int i, lm_example *x)
{
    lm_part_ids_attr a = { .first = (int64_t)lm_example_draw(r, i, 1, 20), .count = 10 };
    *x = (lm_example){ .n_in = 1, .want = i % 2 ? 1 : 3 };
    x->in[0] = lm_shape1(LM_DTYPE_I32, lm_example_size(r, i, 0, 127));
    lm_example_attr(x, &a);
}

static void ids_fill(lm_rng r, const lm_call *c)
{
    int32_t *id = c->in[0].data;
    for (int64_t i = 0; i < c->in[0].dim[0]; i++)
        id[i] = (int32_t)lm_rng_below(r, (uint64_t)i, 40) - 4;
}

const lm_op lm_op_part_ids = {
    .name = "part_ids",
    .attr_size = sizeof(lm_part_ids_attr),
    .in = { { "ids", "N", LM_IDS } },
    .out = { { "y", "N", LM_IDS }, { "real", "N", LM_OPTIONAL | LM_SAVED } },
    .fields = ids_fields,
    .split = "N",
    .prec = LM_PREC_DENY,
    .cost = ids_cost,
    .example = ids_example,
    .fill = ids_fill,
};
