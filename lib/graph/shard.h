/* SPDX-License-Identifier: Apache-2.0 */
/* shard.h -- the sharding pass: a graph over whole values becomes the list of one rank.  Private to lib/graph.
 *
 * The pass runs behind the backward and the update, so that no exchange needs a gradient, and works along one axis of the
 * mesh at a time.  For several axes it runs several times, each time on the list that it has made before, whose exchanges are
 * operators like others.  Two axes should split different dimensions of a weight: where they split the same one, the second
 * gathers it around each exchange of the first.
 *
 * The pass walks the list in order.  Where a value lies is known when a node reads it: layouts of parameters, inputs and
 * states are given (lm_graph_lay), those of activations and gradients follow.  An activation may be given one, too: it is
 * brought there when it is made.
 *
 * A node has forms, which follow from the letters of its operator's table (lm_op.split), for y[N,M] = x[N,K] w[M,K] + b[M]:
 *     N   x and y are split in rows, w and b are replicated
 *     M   w and b are split in rows, y in columns, x is replicated
 *     K   x and w are split in columns, and y is an addend on each rank: b is added on rank 0 alone
 * and one in which everything is replicated.  Heads of keys and values, of which there are fewer than ranks, are held by
 * several ranks; their gradients (LM_GRADIENT in the table) are addends then, of which the backward's sums need no other
 * form.  An operator whose letters do not tell everything has a rule (lm_op.shard): the vocabulary's words in embedding and
 * head.  It may have forms besides (lm_op.form): rows of tokens that go to the ranks of their experts, where they are sorted,
 * and back (kernels/dispatch.h); or the tokens of each rank sorted by themselves.  The pass takes the form for which the
 * fewest bytes have to be exchanged before and after it; along cp of those in which ranks have as many rows each, and if the mesh
 * has a ring there, attention's blocks go around it (lm_op.around).  Column and
 * row parallel layers, with an all-reduce behind the second in the forward and one behind the first in the backward, follow
 * from the layouts of their weights; so do their forms with rows that are split between the layers (reduce-scatter and
 * all-gather), when the tokens are, or the embedding's result is given that layout, and gradients that are addends of each
 * rank's rows.
 *
 * A reader that needs another layout than the value has reads a copy in that one, which an exchange makes:
 *     addends -> replicated   all_reduce          addends -> split       reduce_scatter
 *     split   -> replicated   all_gather          split   -> split       all_to_all
 *     replicated -> split     part                replicated -> addends  once, for a value that is added and not optional
 *     addends of what several ranks hold -> the same, equal copies    sum_shared
 * Copies are remembered for later readers: sums for the whole list, since they are what the value is, and other parts, of
 * which ranks have no more than of those that they had; gathered ones for the same phase of it (forward, backward, update),
 * so that none lives from the forward to the backward; none when the value is written.  Those that are made under a condition
 * serve only readers with the same one, and those of the weights' half of
 * the backward none of its inputs' half, which a schedule may run first.
 *
 * A gradient whose parameter is replicated stays as its first node makes it, replicated or an addend; what sums it up is the
 * first node of the update that reads it.  One that its node makes in another placement than its own (an addend, where the
 * parameter is split along dp) is made as a value by itself, exchanged, and added.  Weights are gathered along dp, and
 * activations along the other axes. */
#ifndef LM_GRAPH_SHARD_H
#define LM_GRAPH_SHARD_H

#include "graph/passes.h"

/* ---- the forms of a node ---- */

typedef struct {
    const char *word; /* of lm_op.split; NULL: nothing is split, or `code` */
    const char *code; /* of lm_op.form; NULL: none */
    lm_share
        as; /* LM_SORTED, LM_OWN: dimensions of the letter, or the one of "*", are that, not split */
    unsigned letters;   /* of the word, bit 0: A; 0: "*", or nothing is split */
    lm_portions pieces; /* of the letter, where that alone is a dimension; of "*" */
    bool ends;          /* of the letter, in each dimension that holds it (lm_portions.ends) */
    lm_placement in[LM_MAX_IN], out[LM_MAX_OUT];
} lm_split_form;

enum { LM_SPLIT_FORMS = 64 };

/* The forms of node n of g for so many ranks, the replicated one first; returns their number.  Where a split dimension can be
 * packed in any way, the ways are those of have[]: placements of the operands, inputs first (NULL: none). */
int lm_split_forms(const lm_graph *g, const lm_node *n, int ranks, const lm_placement *have,
                   lm_split_form form[LM_SPLIT_FORMS]);

/* Append the form of node n of g to the list of this rank: `in` and `out` are the operands there, in the placements of the
 * form; out[i] LM_NONE: it is made.  An optional LM_ADDEND that is an addend may be LM_NONE on ranks that add nothing.
 * Fails: as lm_graph_append. */
lm_code lm_split_form_append(const lm_graph *g, const lm_node *n, const lm_split_form *f,
                             lm_axis axis, const lm_mesh *mesh, lm_graph *local, const lm_vid *in,
                             lm_vid *out, lm_err *e);

/* ---- exchanges ---- */

/* The operator that makes `to` of `from`; NULL: none does (of sorted values never), or they are the same. */
const lm_op *lm_exchange_of(const lm_placement *from, const lm_placement *to,
                            const lm_tensor *whole, int ranks);
/* True if each rank holds the same elements of *whole by both. */
bool lm_placement_same(const lm_placement *a, const lm_placement *b, const lm_tensor *whole,
                       int ranks);
/* The shape that a rank holds. */
lm_tensor lm_placement_part(const lm_placement *p, lm_axis axis, const lm_mesh *mesh,
                            const lm_tensor *whole);
/* Append the exchange that makes *out in the placement `to` of the value v, which has `from`, of shape *whole. */
lm_code lm_exchange_append(lm_graph *local, lm_axis axis, const lm_mesh *mesh, lm_vid v,
                           const lm_tensor *whole, const lm_placement *from, const lm_placement *to,
                           lm_vid *out, lm_err *e);

#endif
