/* SPDX-License-Identifier: Apache-2.0 */
/* passes.h -- what is done to a graph between building and running it; each pass alone in its file.
 *
 * precision.c  choose the types of activations and weights, insert casts
 * backward.c   append the backward of a scalar root by the operators' gradient rules
 * merge.c      calls of one operator on neighbouring pieces of memory become one
 * and, because it knows single operators, in lib/op:
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

/* Retype a freshly built forward graph (all F32) and insert casts where two types meet.  Parameters
 * follow their operators: a weight of an ALLOW operator takes the low type, norm weights and biases
 * stay F32. Fails: LM_EUSAGE when a parameter is used in two types, LM_EBUG when there are views. */
lm_code lm_pass_precision(lm_graph *g, const lm_precision *p, lm_err *e);

/* ---- merging ---- */

/* Nodes that follow each other become one over a flat run when they are of one operator whose elements stand
 * by themselves (lm_op.flat), with equal attributes and conditions, and all their operands of any shape are views that lie end
 * to end, each of its value, up to the zeros of LM_BLOCK_ALIGN; their other operands must be the same.  So an
 * update that is written tensor by tensor runs as one pass over a block.  Fails: for memory. */
lm_code lm_pass_merge(lm_graph *g, lm_err *e);

/* ---- backward ---- */

/* The state of the backward pass; gradient rules use the functions below. */
typedef struct lm_grad lm_grad;

/* Append the backward of `root`.  seed: the value with the gradient of root.
 * trainable(ctx, v) tells which parameters want a gradient (NULL: all); INPUT values get one only
 * if they are in `wrt`.  grads receives, for each of the values of the graph as it was on entry,
 * its gradient or LM_NONE (n_values numbers; may be NULL). */
typedef struct {
    lm_vid root, seed;
    bool (*trainable)(void *ctx, lm_vid param);
    void *ctx;
    const lm_vid *wrt;
    int n_wrt;
    lm_vid *grads;
} lm_backward;
lm_code lm_pass_backward(lm_graph *g, const lm_backward *b, lm_err *e);

/* For gradient rules. */
lm_graph *lm_grad_graph(lm_grad *g);
bool lm_grad_wants(const lm_grad *g, lm_vid v);
/* The gradient gathered for v so far, or LM_NONE. */
lm_vid lm_grad_of(const lm_grad *g, lm_vid v);
/* The same, and forget it: the rule folds it into what it gives next (dres of norm_dx). */
lm_vid lm_grad_take(lm_grad *g, lm_vid v);
/* d is (a part of) the gradient of v; a second part is added to the first. */
lm_code lm_grad_give(lm_grad *g, lm_vid v, lm_vid d, lm_err *e);
/* The GRAD value of parameter v, made at its first use, and how this writer must write to it.  When
 * v wants no gradient (frozen) or is absent: *out = LM_SKIP and *acc is left alone; a writer that
 * needs that output all the same writes to an activation without readers. */
lm_code lm_grad_param(lm_grad *g, lm_vid v, lm_vid *out, lm_acc *acc, lm_err *e);

#endif
