/* SPDX-License-Identifier: Apache-2.0 */
/* exchange.c -- the table of transitions between placements of a value along one axis. */
#include "graph/shard.h"
#include "kernels/comm.h"

static const struct {
    lm_share from, to;
    const lm_op *op;
} table[] = {
    { LM_PARTIAL, LM_REPLICATED, &lm_op_all_reduce },
    { LM_PARTIAL, LM_SPLIT, &lm_op_reduce_scatter },
    { LM_SPLIT, LM_REPLICATED, &lm_op_all_gather },
    { LM_SPLIT, LM_SPLIT, &lm_op_all_to_all },
    { LM_REPLICATED, LM_SPLIT, &lm_op_part },
    { LM_REPLICATED, LM_PARTIAL, &lm_op_once },
};

bool lm_placement_same(const lm_placement *a, const lm_placement *b, const lm_tensor *whole,
                       int ranks)
{
    return a->share == b->share && a->at == b->at && a->sum == b->sum &&
           ((a->share != LM_SPLIT && a->share != LM_OWN) ||
            lm_portions_same(&a->pieces, &b->pieces, whole->dim[a->at], ranks));
}

static bool is_shared(const lm_placement *p, int ranks)
{
    return p->share == LM_SPLIT && lm_portions_shared(&p->pieces, ranks);
}

/* Addends of the same parts become their sums. */
static bool sums_shared(const lm_placement *from, const lm_placement *to, const lm_tensor *whole,
                        int ranks)
{
    lm_placement sums = *from;
    sums.sum = false;
    return from->sum && lm_placement_same(&sums, to, whole, ranks);
}

/* Rows become columns of which several ranks hold some, or addends or copies of those become rows. */
static bool turns_shared(const lm_placement *from, const lm_placement *to, int ranks)
{
    return from->at != to->at && !to->sum && !(is_shared(from, ranks) && is_shared(to, ranks));
}

const lm_op *lm_exchange_of(const lm_placement *from, const lm_placement *to,
                            const lm_tensor *whole, int ranks)
{
    if (lm_placement_same(from, to, whole, ranks))
        return NULL;
    if (from->share == LM_SPLIT && to->share == LM_SPLIT &&
        (is_shared(from, ranks) || is_shared(to, ranks)))
        return sums_shared(from, to, whole, ranks) ? &lm_op_sum_shared
               : turns_shared(from, to, ranks)     ? &lm_op_all_to_all
                                                   : NULL;
    if (to->sum)
        return NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].from == from->share && table[i].to == to->share)
            return table[i].op;
    return NULL;
}

lm_code lm_exchange_append(lm_graph *local, lm_axis axis, const lm_mesh *mesh, lm_vid v,
                           const lm_tensor *whole, const lm_placement *from, const lm_placement *to,
                           lm_vid *out, lm_err *e)
{
    const lm_op *op = lm_exchange_of(from, to, whole, mesh->size[axis]);
    const lm_placement *split = from->share == LM_SPLIT ? from : to;
    lm_exchange_attr a = {
        .axis = axis, .ranks = mesh->size[axis], .rank = mesh->rank[axis], .op = LM_EXCHANGE_SUM
    };
    lm_tensor part = lm_placement_part(to, axis, mesh, whole);
    if (!op)
        return lm_fail(e, LM_EBUG, "exchange", NULL, "no operator makes this layout");
    a.sum = from->sum;
    if (split->share == LM_SPLIT) {
        a.dim = split->at;
        a.len = whole->dim[split->at];
        a.pieces = split->pieces;
    }
    if (from->share == LM_SPLIT && to->share == LM_SPLIT) {
        a.to_dim = to->at;
        a.to_len = whole->dim[to->at];
        a.to_pieces = to->pieces;
    }
    *out = LM_NONE;
    if (lm_graph_value(local, LM_ROLE_ACT, part, NULL, out, e))
        return e->code;
    return lm_graph_append(local, op, &a, &v, out, e);
}
