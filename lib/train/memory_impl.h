/* SPDX-License-Identifier: Apache-2.0 */
/* memory_impl.h -- parts of the memory plan.  Private to lib/train. */
#ifndef LM_TRAIN_MEMORY_IMPL_H
#define LM_TRAIN_MEMORY_IMPL_H

#include "train/memory.h"

static inline double memory_value_bytes(const lm_graph *g, lm_vid v)
{
    return (double)lm_value_bytes(&g->value[v], &lm_mesh_alone);
}

/* Leaves whose sums one rank makes, one after another. */
static inline int64_t memory_leaves(const lm_memory_ask *ask)
{
    const int64_t sharing =
        (ask->sharing > 1 ? ask->sharing : 1) * (ask->pipe ? ask->pipe->ways : 1);
    return ask->leaves > sharing ? ask->leaves / sharing : 1;
}

/* ---- memory_pipe.c: 0 for a rank with all layers ---- */

/* Slots of this rank's stages, for an evaluation one more of each, and copies of two micro-batches' messages. */
double memory_of_slots(const lm_program *p, const lm_train_pipe *pipe);
/* Memory beside the block of gradients for those that are sums of two. */
double memory_of_addends(const lm_program *p);
/* Bytes of a step that a rank gives along pp: what crosses borders, gradients that are sums of two stages or copies. */
double memory_given_to_stages(const lm_program *p, const lm_memory_ask *ask);

#endif
