/* SPDX-License-Identifier: Apache-2.0 */
/* update_impl.h -- shared by the files of updates: update.c builds the list, update_states.c keeps its states,
 * update_owned.c steps what is one rank's,
 * update_norms.c sums over ranks and blocks, update_model.c finds a model's tensors, update_share.c takes the part of one rank.
 * Private to lib/train. */
#ifndef LM_TRAIN_UPDATE_IMPL_H
#define LM_TRAIN_UPDATE_IMPL_H

#include "kernels/optim.h"
#include "train/update.h"

typedef struct {
    int64_t period, offset;
    bool first;
} update_condition;

struct lm_update {
    lm_update_opts o;
    lm_graph *g;
    lm_optim_use *use;
    lm_vid *numbers, *keeps; /* of each use: its views */
    lm_vid beside;           /* the view of lm_update_beside's */
    lm_update_constant *constant;
    size_t n_constants, cap_constants;
    int n_numbers;
    lm_update_tensor *t;
    int n_tensors;
    const lm_optim_use *at_work; /* the tensor whose rule is called */
    bool elsewhere;              /* and another rank has it: for its states' places in files */
    bool owned;                  /* and one rank has all of its states */
    lm_update_values v;
    lm_vid scale, blocks; /* blocks: of the norms */

    lm_store_state *state;
    lm_vid *state_value;
    size_t n_states, cap_states, cap_values;
    size_t *cap_parts;
    size_t cap_caps;

    update_condition *cond; /* condition i is number i + 1 of the finished list */
    size_t n_conds, cap_conds;
    bool *due;
    size_t first[LM_UPDATE_PARTS + 1];
    bool shows; /* lm_update_shows, of all ranks' lists together */

    /* With lm_update_opts.zero (update_share.c): */
    int *of_node; /* the tensor, by its number here, whose step a node is a part of; -1: none */
    size_t n_of, cap_of;
    int64_t *bound;    /* lm_update_bounds */
    lm_store_own *own; /* lm_update_own, by tensor of the model */
};

static inline int64_t update_count(const lm_update_tensor *t)
{
    return lm_tensor_count(&t->shape);
}

/* True if another rank has the tensor. */
static inline bool update_is_elsewhere(const lm_update_tensor *t)
{
    return t->cut && (t->cut->none || (t->cut->on && t->cut->rank != t->cut->owner));
}
static inline int64_t update_norm_blocks(int64_t count)
{
    return (count + LM_SUM_BLOCK - 1) / LM_SUM_BLOCK;
}

/* update.c: zeros that are filled when the update is complete (lm_update_constants). */
lm_code update_room(lm_update *u, lm_tensor shape, lm_vid *out, lm_err *e);
/* Memory that nodes write before they read it, and of which there may be views. */
lm_code update_scratch(lm_update *u, lm_tensor shape, lm_vid *out, lm_err *e);

/* ---- update_owned.c: tensors of which ranks have parts, and whose rules read them whole ---- */

typedef struct {
    bool owned;
    int owner;          /* along the axis of the cut */
    lm_vid param, grad; /* on the owner: the whole tensor, and its gradient */
} update_owner;

/* Decide which tensors are owned by one rank, and append what brings them there.  own: for each tensor, zeroed. */
lm_code update_collect(lm_update *u, update_owner *own, lm_err *e);
/* The rule of such a tensor: on its owner the nodes, elsewhere the places of states alone. */
lm_code update_owned_rule(lm_update *u, int i, const update_owner *o, lm_err *e);
/* What brings the parts of all back. */
lm_code update_deal(lm_update *u, const update_owner *own, lm_err *e);
/* Call the rule of tensor i as if it was whole, without its nodes: for its states' places in files. */
lm_code update_leave(lm_update *u, int i,
                     lm_code (*rule)(lm_update *, const lm_update_tensor *, lm_err *), lm_err *e);

/* ---- update_states.c: lm_update_state, and ---- */

/* Forget the states of the last tensor that declared some. */
void update_drop_states(lm_update *u, const lm_update_tensor *t);

/* prefix.name, truncated if it is too long. */
void update_join_name(char out[512], const char *prefix, const char *name);
/* Set the sizes of blocks, and the order of tensors in files to that of the model. */
void update_close_states(lm_update *u);

/* ---- update_norms.c ---- */

/* *out: elements [from, end) of a block. */
lm_code update_view_run(lm_update *u, lm_vid of, int64_t from, int64_t end, lm_vid *out, lm_err *e);
/* Sums of gradients that are addends, the norm of all, and the factor that clips them. */
lm_code update_append_norm(lm_update *u, lm_err *e);
/* s = the sum of squares of a block, of all ranks together. */
lm_code update_append_sumsq(lm_update *u, lm_vid of, lm_vid s, lm_err *e);
/* The blocks of this rank's tensors, with their places among those of the whole model. */
void update_fill_blocks(lm_update *u);

/* ---- update_share.c: nothing without lm_update_opts.zero ---- */

/* All nodes appended since the last call belong to the step of tensor i, -1: to none. */
lm_code update_note(lm_update *u, int i, lm_err *e);
/* When the rules' nodes are there: deal the tensors to the ranks along dp, and keep the nodes of this one's. */
lm_code update_share(lm_update *u, lm_err *e);
/* The elements [*from, *end) of tensor i that are this rank's. */
void update_own_range(const lm_update *u, int i, int64_t *from, int64_t *end);
void update_share_fini(lm_update *u);

#endif
