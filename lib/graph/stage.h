/* SPDX-License-Identifier: Apache-2.0 */
/* stage.h -- the stages of a pipeline: which nodes of a model's list one rank along pp has.
 *
 * A stage is a range of layers.  What is before the first layer belongs to the first stage, what is behind the last one to the
 * last stage.  The pass runs behind the backward and the sharding pass, and before operators are joined, so that every rank has
 * cut the same list.  It leaves the nodes of the rank's own stages.  An activation that another stage has made is then an INPUT
 * of the stage that reads it: each of its stages has one of its own.
 *
 * A gradient to which several stages add becomes a value for each of them, LM_ROLE_GRAD without grad_of: their order would
 * otherwise depend on the schedule.  That of the last of these stages is the parameter's own; the others must be zero before a
 * sum begins.
 *
 * Activations go down, from a stage to the one behind it, with the forward of a micro-batch, and up, to the one before it, with
 * its backward: an activation that the backward of an earlier stage reads goes up, and so do gradients.  What a stage does
 * not read itself, but a further one does, it hands on.
 *
 * Once all nodes are there, lm_stage_order makes sections of them, which a schedule runs (parallel/pipeline.h): of each stage
 * its forward, its backward, and with `apart` that of the weights alone.  Values that live from one section to another, and
 * those that are sent or received, lie in slots, of which a stage has one for each micro-batch in flight; all others in the
 * arena, which the sections share. */
#ifndef LM_GRAPH_STAGE_H
#define LM_GRAPH_STAGE_H

#include "graph/graph.h"

typedef struct {
    int n;
    const int64_t *first; /* [n] rising: the first layer of each stage; first[0] is 0 */
    const int *rank;      /* [n] the rank along pp that has it */
    const int *twin;      /* [n] the rank that has a copy of it; NULL: there are no copies */
    bool apart;           /* gradients of weights are a section of their own */
} lm_stages;

typedef enum { LM_STAGE_F, LM_STAGE_B, LM_STAGE_W, LM_STAGE_KINDS } lm_stage_kind;

/* What crosses the border between a stage and the next one: `from` is the value that the sender has, `to` the one of the
 * receiver; LM_NONE if that stage belongs to another rank. */
typedef struct {
    lm_vid from, to;
} lm_stage_crossing;

typedef struct {
    lm_stage_crossing *value; /* both sides have them in the same order */
    size_t n, cap;
} lm_stage_border;

/* One stage in the list of a rank; without nodes if another one has it. */
typedef struct {
    bool own;
    lm_stage_border down, up;                           /* of the border behind it */
    size_t first[LM_STAGE_KINDS], last[LM_STAGE_KINDS]; /* nodes, by lm_stage_order */
} lm_stage;

/* The part of a stage in the gradient of a parameter that several stages read, as a tied embedding. */
typedef struct {
    lm_vid grad; /* of the parameter */
    int stage;
    lm_vid own; /* what the nodes of the stage add to; LM_NONE if it belongs to another rank */
} lm_addend;

/* Gradient by gradient, in the order of their addition: from the last stage to the first.  All ranks list all. */
typedef struct {
    lm_addend *of;
    size_t n, cap;
} lm_addends;

/* On one rank with all layers: gradients to which nodes both before the first layer and of later ones add become two, as they
 * are in a pipeline whatever its stages are; stages 1 and 0.  The caller owns out->of: lm_free. */
lm_code lm_pass_apart(lm_graph *g, lm_addends *out, lm_err *e);

typedef struct {
    int n;
    bool apart;
    lm_stage *stage; /* [n] */
    int32_t *
        slot; /* by value: 1 + the stage in whose slots it lies; 0: in the arena.  By lm_stage_order */
    size_t n_values; /* of `slot` */
} lm_stage_list;

/* True if a rank has a stage, or the copy of it. */
static inline bool lm_stage_is_on(const lm_stages *s, int stage, int rank)
{
    return s->rank[stage] == rank || (s->twin && s->twin[stage] == rank);
}

/* The stage of a layer. */
int lm_stage_of(const lm_stages *s, int64_t layer);

/* Take the nodes of other ranks' stages out of g, and list what crosses borders.  The caller owns *out, lm_stage_list_free, and
 * addends->of, lm_free.
 * Fails: LM_EUSAGE naming the operator for a list whose stages cannot follow each other. */
lm_code lm_pass_stage(lm_graph *g, const lm_stages *s, int rank, lm_stage_list **out,
                      lm_addends *addends, lm_err *e);
void lm_stage_list_free(lm_stage_list *l);

/* True if another stage reads v: it is made, though no node here may read it. */
bool lm_stage_sends(const lm_stage_list *l, lm_vid v);

/* Bring the nodes of each section together, in their order, and set sections and slots.  A node that makes gradients of weights
 * stays in the backward of its stage where another node of that needs its results, or adds to the same gradient.
 * Fails: LM_EUSAGE where the forward and the backward of a stage add to the same gradient. */
lm_code lm_stage_order(lm_graph *g, const lm_stages *s, lm_stage_list *l, lm_err *e);

#endif
