/* SPDX-License-Identifier: Apache-2.0 */
/* leaves.c -- the tree over the leaves of a rank.
 *
 * Sums of whole subtrees lie on a stack, the largest below: behind leaf k there is one for each bit of k + 1, as in a
 * binary counter.  Leaf k first takes those of the trailing ones of k from the stack, the last leaf all of them. */
#include "train/leaves.h"

#include "base/mem.h"
#include "graph/exec.h"
#include "kernels/arrange.h"
#include "op/ops.h"

enum { MOST_COPIES = 32 };

struct lm_leaves {
    lm_backend *b;
    int64_t leaves;
    int copies, n; /* n: blocks */
    lm_graph *g;
    lm_exec *exec;
    void *held[MOST_COPIES][LM_LEAF_BLOCKS];
    size_t bytes[LM_LEAF_BLOCKS];
};

int lm_leaves_copies(int64_t leaves)
{
    int copies = 0;
    while (leaves >> (copies + 1) > 0)
        copies++;
    return copies;
}

/* ---- the graph: for each place of the stack the nodes that write to it, then those that add it to the blocks ---- */

static lm_code append(lm_leaves *l, lm_acc acc, const lm_vid *from, const lm_vid *to, lm_err *e)
{
    const lm_accumulate_attr attr = { .acc = acc };
    for (int i = 0; i < l->n; i++) {
        lm_vid out = to[i];
        if (lm_graph_append(l->g, &lm_op_accumulate, &attr, &from[i], &out, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code make_values(lm_leaves *l, const lm_leaf_block *block, lm_vid *out, lm_err *e)
{
    for (int i = 0; i < l->n; i++)
        if (lm_graph_value(l->g, LM_ROLE_STATE, lm_shape1(block[i].type, block[i].count),
                           block[i].name, &out[i], e))
            return e->code;
    return LM_OK;
}

static lm_code make_graph(lm_leaves *l, const lm_leaf_block *block, lm_vid *sum,
                          lm_vid held[][LM_LEAF_BLOCKS], lm_err *e)
{
    if (lm_graph_new(&l->g, e))
        return e->code;
    l->g->phase = LM_PHASE_UPDATE;
    l->g->layer = -1;
    if (make_values(l, block, sum, e))
        return e->code;
    for (int k = 0; k < l->copies; k++)
        if (make_values(l, block, held[k], e) || append(l, LM_ACC_FRESH, sum, held[k], e) ||
            append(l, LM_ACC_ADD, held[k], sum, e))
            return e->code;
    return LM_OK;
}

static lm_code make_memory(lm_leaves *l, const lm_leaf_block *block, const lm_vid *sum,
                           lm_vid held[][LM_LEAF_BLOCKS], lm_err *e)
{
    for (int i = 0; i < l->n; i++) {
        l->bytes[i] = (size_t)block[i].count * lm_dtype_size(block[i].type);
        lm_exec_bind(l->exec, sum[i], block[i].data);
        for (int k = 0; k < l->copies; k++) {
            if (l->b->alloc(l->b, l->bytes[i], block[i].name, &l->held[k][i], e))
                return e->code;
            lm_exec_bind(l->exec, held[k][i], l->held[k][i]);
        }
    }
    return LM_OK;
}

lm_code lm_leaves_new(lm_backend *b, const lm_leaf_block block[LM_LEAF_BLOCKS], int64_t leaves,
                      lm_leaves **out, lm_err *e)
{
    lm_leaf_block some[LM_LEAF_BLOCKS];
    lm_vid sum[LM_LEAF_BLOCKS], held[MOST_COPIES][LM_LEAF_BLOCKS];
    lm_leaves *l = NULL;
    *out = NULL;
    if (lm_leaves_copies(leaves) > MOST_COPIES)
        return lm_fail(e, LM_ELIMIT, "leaves", NULL, "there are too many of them");
    if (lm_alloc_n(&l, 1, sizeof *l, "sums of leaves", e))
        return e->code;
    l->b = b;
    l->leaves = leaves;
    l->copies = lm_leaves_copies(leaves);
    for (int i = 0; i < LM_LEAF_BLOCKS; i++)
        if (block[i].count)
            some[l->n++] = block[i];
    if (make_graph(l, some, sum, held, e) || lm_exec_new(l->g, b, NULL, 0, &l->exec, e) ||
        make_memory(l, some, sum, held, e)) {
        lm_leaves_free(l);
        return e->code;
    }
    *out = l;
    return LM_OK;
}

void lm_leaves_free(lm_leaves *l)
{
    if (!l)
        return;
    for (int k = 0; k < l->copies; k++)
        for (int i = 0; i < l->n; i++)
            if (l->held[k][i])
                l->b->free(l->b, l->held[k][i], l->bytes[i]);
    lm_exec_free(l->exec);
    lm_graph_free(l->g);
    lm_free(l);
}

/* ---- running ---- */

/* Add the blocks' copy at `place` to them, or write them to it. */
static lm_code run(lm_leaves *l, int place, bool add, const lm_step *step, lm_err *e)
{
    const lm_step now = { .seed = step->seed, .step = step->step };
    const size_t n = (size_t)l->n, first = (2 * (size_t)place + add) * n;
    return lm_exec_run_part(l->exec, first, first + n, NULL, &now, e);
}

lm_code lm_leaves_add(lm_leaves *l, int64_t leaf, const lm_step *step, lm_err *e)
{
    const bool last = leaf + 1 == l->leaves;
    int height = 0;
    for (int64_t bits = leaf; bits; bits >>= 1)
        height += (int)(bits & 1);
    for (int64_t bits = leaf; height && (last || (bits & 1)); bits >>= 1)
        if (run(l, --height, true, step, e))
            return e->code;
    return last ? LM_OK : run(l, height, false, step, e);
}
