/* SPDX-License-Identifier: Apache-2.0 */
/* ring_shard.c -- attention whose positions are split over ranks, as a list of blocks (kernels/ring.h).
 *
 * In step s a rank has the keys and values of the rank s before it.  It begins to pass them on, and to receive the next ones,
 * before it attends to them.  Steps in which no rank sees anything, for windows that do not reach so far, are left out, and so
 * are the blocks of which this rank sees nothing.
 *
 * In the backward the gradients of keys and values travel in the same direction one step behind them: each rank adds what its
 * queries give, and passes the sums on while it works at the next block; from the last rank that adds something they return to
 * their own one in one message. */
#include "op/ring.h"

#include "op/ops.h"

/* ---- pairs ---- */

/* Of numbers t from 1 - n to n - 1, of which t occurs n - |t| times, those up to t: pairs of two runs of n positions, by the
 * distance of the query from the key less that of the runs. */
static double pairs_up_to(int64_t t, int64_t n)
{
    const double k = (double)(t < 0 ? t + n : t), all = (double)n;
    if (t <= -n)
        return 0;
    if (t >= n)
        return all * all;
    return t < 0 ? k * (k + 1) / 2 : all * (all + 1) / 2 + k * all - k * (k + 1) / 2;
}

double lm_ring_pairs(const lm_ring_block *b, int64_t seq)
{
    const int64_t runs = lm_ring_runs(b), n = seq / runs, far = b->ranks * seq,
                  most = b->window > 0 && b->window < far ? b->window - 1 : far,
                  least = b->causal ? 0 : -most;
    double pairs = 0;
    for (int64_t i = 0; i < runs * runs; i++) {
        const int64_t apart =
            lm_ring_first(b, seq, b->rank, i / runs) - lm_ring_first(b, seq, b->from, i % runs);
        pairs += pairs_up_to(most - apart, n) - pairs_up_to(least - apart - 1, n);
    }
    return pairs > 0 ? pairs : 0;
}

/* ---- draws of dropout ---- */

/* Where this rank's call is in the whole, whose sizes follow from its own; all ranks have as many heads or positions. */
static void set_origin(const lm_shard_call *s, lm_attention_attr *a)
{
    lm_attention_origin *o = &a->origin;
    if (a->dropout <= 0 || !s->letters)
        return;
    const int64_t heads = s->letters == (LM_LETTER('H') | LM_LETTER('K')) ? s->ranks : 1,
                  positions = s->letters == LM_LETTER('T') ? s->ranks : 1;
    if (!o->seq) {
        o->seq = a->seq * positions;
        o->heads = a->heads * heads;
    }
    if (heads > 1)
        o->head += s->rank * a->heads;
    else if (positions == 1)
        o->batch += s->range.from;
}

/* ---- a walk around the ring ---- */

typedef struct ring ring;
struct ring {
    lm_shard_call *s;
    lm_attention_attr whole; /* of this rank's rows, as if they were all */
    lm_vid qkv, lo, hi, bias;
    int64_t n, rank, steps;
    int64_t kv; /* columns of keys and values */
    lm_dtype act;
    /* Keys and values of rank `from` are in rows `qkv` (LM_NONE: this rank's own) in step number `step`. */
    lm_code (*visit)(ring *r, int64_t step, int64_t from, lm_vid kv, lm_err *e);
    int64_t seen, blocks; /* blocks of which this rank sees something: so far, and all */
    lm_vid o, lse, dq, dkv;
};

static lm_ring_block block_of(const ring *r, int64_t rank, int64_t from)
{
    return (lm_ring_block){ .ranks = r->n,
                            .rank = rank,
                            .from = from,
                            .ends = r->s->ends,
                            .causal = r->whole.causal,
                            .window = r->whole.window };
}

static double pairs_of(const ring *r, int64_t rank, int64_t from)
{
    const lm_ring_block b = block_of(r, rank, from);
    return lm_ring_pairs(&b, r->whole.seq);
}

static int64_t before(const ring *r, int64_t rank, int64_t step)
{
    return (rank - step + r->n) % r->n;
}

static ring ring_of(lm_shard_call *s, const lm_attention_attr *a, lm_vid qkv, lm_vid lo, lm_vid hi,
                    lm_vid bias)
{
    ring r = { .s = s,
               .whole = *a,
               .qkv = qkv,
               .lo = lo,
               .hi = hi,
               .bias = bias,
               .n = s->ranks,
               .rank = s->rank,
               .steps = 1,
               .kv = a->kv_heads * (a->head_dim + lm_attention_value_dim(a)),
               .act = s->graph->value[qkv].t.dtype,
               .o = LM_NONE,
               .lse = LM_NONE,
               .dq = LM_NONE,
               .dkv = LM_NONE };
    for (int64_t k = 0; k < r.n; k++) {
        r.blocks += pairs_of(&r, r.rank, before(&r, r.rank, k)) > 0;
        for (int64_t rank = 0; rank < r.n; rank++)
            if (pairs_of(&r, rank, before(&r, rank, k)) > 0)
                r.steps = k + 1;
    }
    return r;
}

/* *out: a new value like the rows of qkv, of so many columns. */
static lm_code new_rows(const ring *r, int64_t columns, lm_dtype type, lm_vid *out, lm_err *e)
{
    lm_graph *g = r->s->graph;
    *out = LM_NONE;
    return lm_graph_value(g, LM_ROLE_ACT, lm_shape2(type, g->value[r->qkv].t.dim[0], columns), NULL,
                          out, e);
}

static lm_ring_attr attr_of(const ring *r)
{
    return (lm_ring_attr){ .axis = (int)r->s->axis, .ranks = r->n, .rank = r->rank, .hops = 1 };
}

/* *out: the last columns of x of the rank so many before this one, in place of what it has on entry: of that type, or
 * LM_NONE: this rank does not take them. */
static lm_code pass(const ring *r, lm_vid x, int64_t hops, lm_vid *out, lm_err *e)
{
    lm_ring_attr a = attr_of(r);
    a.hops = hops;
    a.columns = r->kv;
    const lm_vid like = *out;
    *out = LM_SKIP;
    if (like >= 0 && new_rows(r, r->kv, r->s->graph->value[like].t.dtype, out, e))
        return e->code;
    return lm_graph_append(r->s->graph, &lm_op_ring_pass, &a, &x, out, e);
}

/* True if in step number `step` or later a rank sees something of the keys of rank `from`. */
static bool is_needed(const ring *r, int64_t from, int64_t step)
{
    bool any = false;
    for (int64_t k = step; k < r->steps; k++)
        any |= pairs_of(r, (from + k) % r->n, from) > 0;
    return any;
}

static lm_code walk(ring *r, lm_err *e)
{
    lm_vid kv = LM_NONE;
    for (int64_t step = 0; step < r->steps; step++) {
        const int64_t from = before(r, r->rank, step);
        const bool gives = is_needed(r, from, step + 1),
                   takes = is_needed(r, before(r, r->rank, step + 1), step + 1);
        lm_vid own = kv >= 0 ? kv : r->qkv, next = takes ? r->qkv : LM_NONE;
        if ((gives || takes) && pass(r, gives ? own : LM_NONE, 1, &next, e))
            return e->code;
        if (r->visit(r, step, from, kv, e))
            return e->code;
        kv = next;
    }
    return LM_OK;
}

/* ---- a block ---- */

typedef struct {
    lm_attention_attr attr;
    lm_vid rows, lo, hi;
} block;

/* The call of attention to keys and values of rank `from`; kv LM_NONE: this rank's own. */
static lm_code make_block(const ring *r, int64_t from, lm_vid kv, block *out, lm_err *e)
{
    lm_graph *g = r->s->graph;
    const lm_attention_attr *a = &r->whole;
    const double pairs = pairs_of(r, r->rank, from), all = (double)a->seq * (double)a->seq;
    const bool documents = r->lo >= 0 || r->hi >= 0;
    const lm_ring_attr attr = attr_of(r);
    *out = (block){ *a, r->qkv, LM_NONE, LM_NONE };
    out->attr.origin.query += a->dropout > 0 ? r->rank * a->seq : 0;
    out->attr.origin.key += a->dropout > 0 ? from * a->seq : 0;
    if (kv >= 0 &&
        (new_rows(r, g->value[r->qkv].t.dim[1], r->act, &out->rows, e) ||
         lm_graph_append(g, &lm_op_ring_rows, &attr, (lm_vid[]){ r->qkv, kv }, &out->rows, e)))
        return e->code;
    if (from == r->rank && !documents &&
        (!r->s->ends || !a->window)) /* in the order of positions */
        return LM_OK;
    out->attr.pairs = pairs;
    out->attr.causal = false;
    out->attr.window = 0;
    out->attr.bias_zero += r->bias >= 0 ? (from - r->rank) * a->seq : 0;
    if (pairs == all && !documents)
        return LM_OK;
    const lm_ring_mask_attr mask = { .batch = a->batch,
                                     .seq = a->seq,
                                     .block = block_of(r, r->rank, from) };
    lm_vid made[2] = { LM_NONE, LM_NONE };
    if (lm_graph_append(g, &lm_op_ring_mask, &mask, (lm_vid[]){ r->lo, r->hi }, made, e))
        return e->code;
    out->lo = made[0];
    out->hi = made[1];
    return LM_OK;
}

/* ---- attention ---- */

static lm_code merge(ring *r, const lm_vid made[2], lm_err *e)
{
    const lm_attention_attr *a = &r->whole;
    const lm_ring_merge_attr attr = {
        .batch = a->batch, .seq = a->seq, .heads = a->heads, .undivided = a->undivided
    };
    lm_vid out[2] = { r->s->out[0], r->s->out[1] };
    if (r->seen < r->blocks) {
        out[1] = LM_NONE;
        if (new_rows(r, a->heads * lm_attention_value_dim(a), lm_wide(r->act), &out[0], e))
            return e->code;
    }
    if (lm_graph_append(r->s->graph, &lm_op_ring_merge, &attr,
                        (lm_vid[]){ r->o, r->lse, made[0], made[1] }, out, e))
        return e->code;
    r->o = out[0];
    r->lse = out[1];
    return LM_OK;
}

/* Sinks go with this rank's own block, which each rank sees. */
static lm_code attend(ring *r, int64_t step, int64_t from, lm_vid kv, lm_err *e)
{
    const lm_vid sinks = step == 0 ? r->s->in[3] : LM_NONE;
    lm_vid made[2] = { LM_NONE, LM_NONE };
    block b;
    if (pairs_of(r, r->rank, from) <= 0)
        return LM_OK;
    r->seen++;
    if (r->blocks == 1) {
        made[0] = r->s->out[0];
        made[1] = r->s->out[1];
    }
    if (make_block(r, from, kv, &b, e) ||
        lm_graph_append(r->s->graph, &lm_op_attention, &b.attr,
                        (lm_vid[]){ b.rows, b.lo, b.hi, sinks, r->bias }, made, e))
        return e->code;
    if (r->seen > 1)
        return merge(r, made, e);
    r->o = made[0];
    r->lse = made[1];
    return LM_OK;
}

lm_code lm_attention_shard(lm_shard_call *s, lm_err *e)
{
    const lm_vid *in = s->in;
    set_origin(s, s->attr);
    if (s->letters != LM_LETTER('T'))
        return lm_shard_append(s, e);
    ring r = ring_of(s, s->attr, in[0], in[1], in[2], in[4]);
    r.visit = attend;
    return walk(&r, e);
}

/* ---- attention_dx ---- */

/* *out: *sum, or 0, and columns of d from `first` on. */
static lm_code add(const ring *r, lm_vid d, int64_t first, int64_t columns, lm_vid *sum, lm_err *e)
{
    lm_ring_attr a = attr_of(r);
    lm_vid in[2] = { *sum, d };
    a.first = first;
    return new_rows(r, columns, lm_wide(r->act), sum, e) ||
                   lm_graph_append(r->s->graph, &lm_op_ring_add, &a, in, sum, e)
               ? e->code
               : LM_OK;
}

static lm_code give_gradients(ring *r, int64_t step, int64_t from, lm_vid kv, lm_err *e)
{
    const lm_vid *in = r->s->in;
    const int64_t own = r->whole.heads * r->whole.head_dim;
    const bool last = step + 1 == r->steps;
    lm_vid d = r->steps == 1 ? r->s->out[0] : LM_NONE;
    block b;
    if (pairs_of(r, r->rank, from) > 0) {
        if (make_block(r, from, kv, &b, e) ||
            lm_graph_append(r->s->graph, &lm_op_attention_dx, &b.attr,
                            (lm_vid[]){ in[0], b.rows, in[2], in[3], b.lo, b.hi, r->bias }, &d, e))
            return e->code;
        if (r->steps == 1)
            return LM_OK;
        if (add(r, d, 0, own, &r->dq, e) || add(r, d, own, r->kv, &r->dkv, e))
            return e->code;
    }
    return pass(r, r->dkv, last ? r->n - step : 1, &r->dkv, e);
}

lm_code lm_attention_dx_shard(lm_shard_call *s, lm_err *e)
{
    const lm_vid *in = s->in;
    set_origin(s, s->attr);
    if (s->letters != LM_LETTER('T'))
        return lm_shard_append(s, e);
    ring r = ring_of(s, s->attr, in[1], in[4], in[5], in[6]);
    r.visit = give_gradients;
    if (walk(&r, e) || r.steps == 1)
        return e->code;
    const lm_ring_attr a = attr_of(&r);
    return lm_graph_append(s->graph, &lm_op_ring_rows, &a, (lm_vid[]){ r.dq, r.dkv }, s->out, e);
}

/* ---- attention_dbias ---- */

static lm_code give_biases(ring *r, int64_t step, int64_t from, lm_vid kv, lm_err *e)
{
    const lm_vid *in = r->s->in;
    lm_attention_dbias_attr attr = *(const lm_attention_dbias_attr *)r->s->attr;
    block b;
    (void)step;
    if (pairs_of(r, r->rank, from) <= 0)
        return LM_OK;
    if (make_block(r, from, kv, &b, e))
        return e->code;
    attr.attention = b.attr;
    if (r->seen++)
        attr.acc = LM_ACC_ADD;
    return lm_graph_append(r->s->graph, &lm_op_attention_dbias, &attr,
                           (lm_vid[]){ in[0], b.rows, in[2], in[3], b.lo, b.hi, r->bias },
                           r->s->out, e);
}

lm_code lm_attention_dbias_shard(lm_shard_call *s, lm_err *e)
{
    const lm_vid *in = s->in;
    lm_attention_dbias_attr *a = s->attr;
    set_origin(s, &a->attention);
    if (s->letters != LM_LETTER('T'))
        return lm_shard_append(s, e);
    ring r = ring_of(s, &a->attention, in[1], in[4], in[5], in[6]);
    r.visit = give_biases;
    return walk(&r, e);
}
