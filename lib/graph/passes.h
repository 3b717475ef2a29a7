/* SPDX-License-Identifier: Apache-2.0 */
/* passes.h -- the passes between building and running a graph; one file each.
 *
 * precision.c  choose the types of activations and weights, insert casts
 * backward.c   append the backward of a scalar root by the operators' gradient rules
 * shard.c      the list of one rank of a mesh, with what ranks exchange (graph/shard.h)
 * recompute.c  activations of a layer are computed again before its backward
 * merge.c      calls of one operator on neighbouring pieces of memory become one
 * and in lib/op, because it depends on single operators:
 * fuse.c       join operators that follow each other (op/fuse.h) */
#ifndef LM_GRAPH_PASSES_H
#define LM_GRAPH_PASSES_H

#include "graph/graph.h"

/* ---- precision ---- */

typedef struct {
    lm_dtype low; /* the type of ALLOW operators and what follows them: F32, BF16, or F64 (then
                     everything is F64: the reference) */
    /* Operators that stay in F32 although their class allows less: NULL-terminated names; may be
     * NULL. */
    const char *const *keep;
} lm_precision;

/* Retype a freshly built forward graph (all F32) and insert casts where types differ.  Parameters
 * follow their operators: a weight of an ALLOW operator takes the low type, norm weights and biases
 * stay F32. Fails: LM_EUSAGE when a parameter is used in two types, LM_EBUG when there are
 * views. */
lm_code lm_pass_precision(lm_graph *g, const lm_precision *p, lm_err *e);

/* ---- merging ---- */

/* Nodes that follow each other become one over a flat run when they are of one operator whose elements stand
 * by themselves (lm_op.flat), with equal attributes and conditions, and all their operands of any shape are views that lie end
 * to end, each of its value, up to the zeros of LM_BLOCK_ALIGN; their other operands must be the same.  So an
 * update that is written tensor by tensor runs as one pass over a block.  Fails: for memory. */
lm_code lm_pass_merge(lm_graph *g, lm_err *e);

/* ---- backward ---- */

/* The state of the backward pass; gradient rules call the functions below. */
typedef struct lm_grad lm_grad;

/* Append the backward of `root`.  seed: the value with the gradient of root.  trainable(ctx, v)
 * selects the parameters that need a gradient (NULL: all); INPUT values get one only if they are in
 * `wrt`.  grads (may be NULL) receives the gradient or LM_NONE for each value of the graph on
 * entry: n_values numbers. */
typedef struct {
    lm_vid root, seed;
    bool (*trainable)(void *ctx, lm_vid param);
    void *ctx;
    const lm_vid *wrt;
    int n_wrt;
    lm_vid *grads;
    /* Further roots, each with the value of its gradient. */
    const lm_vid *more, *more_seed;
    int n_more;
} lm_backward;
lm_code lm_pass_backward(lm_graph *g, const lm_backward *b, lm_err *e);

/* For gradient rules. */
lm_graph *lm_grad_graph(lm_grad *g);
bool lm_grad_wants(const lm_grad *g, lm_vid v);
/* The gradient accumulated for v so far, or LM_NONE. */
lm_vid lm_grad_of(const lm_grad *g, lm_vid v);
/* The same, and reset it: the rule includes it in the gradient that it gives next (dres of
 * norm_dx). */
lm_vid lm_grad_take(lm_grad *g, lm_vid v);
/* Add d to the gradient of v; of a parameter, to its GRAD value by a node `accumulate`. */
lm_code lm_grad_give(lm_grad *g, lm_vid v, lm_vid d, lm_err *e);
/* The GRAD value of parameter v, created at its first use, and whether this node overwrites or adds
 * to it.  When v needs no gradient (frozen) or is absent: *out = LM_SKIP and *acc is not changed; a
 * kernel that requires the output then writes to an activation without readers. */
lm_code lm_grad_param(lm_grad *g, lm_vid v, lm_vid *out, lm_acc *acc, lm_err *e);
/* The same of a weight that may be computed: its gradient is then an activation, *out LM_NONE and *acc LM_ACC_FRESH, which the
 * rule gives with lm_grad_weight_give when the node is appended; that does nothing for parameters. */
lm_code lm_grad_weight(lm_grad *g, lm_vid v, lm_vid *out, lm_acc *acc, lm_err *e);
lm_code lm_grad_weight_give(lm_grad *g, lm_vid v, lm_vid out, lm_err *e);

/* ---- sharding (graph/shard.h) ---- */

/* The list of rank mesh->rank along `axis`, as a graph of its own with the values' parts along this axis; layouts along other
 * axes, layers, phases and names stay.  place (n_values of g) receives for each value of g its number there.
 *
 * The layouts of g along the axis are completed: of activations, of gradients, and of weights that are split without pieces,
 * the pieces that their readers need.  All ranks take the same decisions.  Fails: LM_EUSAGE naming the value or operator for
 * what cannot be split so: views, more ranks than units, a value that is written in another layout than it has. */
lm_code lm_pass_shard(lm_graph *g, lm_axis axis, const lm_mesh *mesh, lm_graph **out, lm_vid *place,
                      lm_err *e);

/* Behind it: make place[v] a copy of all of value v at the end of the list, if this rank has less; nothing for LM_NONE. */
lm_code lm_shard_whole(const lm_graph *g, lm_axis axis, const lm_mesh *mesh, lm_graph *local,
                       lm_vid *place, lm_vid v, lm_err *e);

/* The first step of it alone: weights that are split without pieces get those that their readers need. */
lm_code lm_shard_complete(lm_graph *g, lm_axis axis, const lm_mesh *mesh, lm_err *e);

/* For rules of operators: a call that is split along letters of a word of lm_op.split. */
typedef struct lm_shard_call {
    lm_graph *graph; /* of this rank: where nodes are appended */
    const lm_op *op;
    void *attr;       /* with local sizes; may be changed */
    lm_vid *in;       /* this rank's operands, in the placements of the word; may be changed */
    lm_vid *out;      /* values to write; LM_SKIP: not wanted */
    unsigned letters; /* that are split, bit 0: A; 0: "*", or `form` */
    const char *form; /* of lm_op.form; NULL: letters */
    bool ends;        /* parts along the letter are from both ends (lm_portions.ends) */
    lm_range
        range; /* of the letter, if it is one, or of the experts of a form: what this rank has of it */
    const lm_portions
        *pieces;    /* of the letter, of the dimension of "*", or of the dimensions of a form */
    int dim;        /* of "*": that which is split; otherwise -1 */
    int64_t length; /* of it: all ranks' */
    lm_axis axis;
    int ranks, rank;
} lm_shard_call;
/* Append the call itself. */
lm_code lm_shard_append(lm_shard_call *s, lm_err *e);
/* ---- recomputation ---- */

/* Change a graph with its backward so that fewer activations live from the forward to the backward: what nodes of
 * layers 0 to layers - 1 make, and only the backward of the same layer reads, is computed again
 * (LM_PHASE_RECOMPUTE) just before that backward, from what the layer reads of others.  Bits are the
 * same.  After joins, so that both computations use the same operators. */
lm_code lm_pass_recompute(lm_graph *g, int64_t layers, lm_err *e);

#endif
