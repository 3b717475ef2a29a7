/* SPDX-License-Identifier: Apache-2.0 */
/* layouts.h -- policies: which tensors are split how, by their names.
 *
 * A policy is a table of patterns of names, in which * stands for any run of characters; the first that fits a parameter
 * gives its layout.  All else of a parallel training follows from these layouts in the sharding pass (graph/shard.h). */
#ifndef LM_PARALLEL_LAYOUTS_H
#define LM_PARALLEL_LAYOUTS_H

#include "graph/graph.h"

typedef struct {
    const char *pattern; /* NULL: past the last */
    const char *layout;  /* as lm_layout_read has it */
} lm_layout_rule;

/* Tensor parallelism in one dimension (Megatron-LM, arXiv:1909.08053, section 3): the first matrices of attention and MLP
 * are split in rows, the second ones in columns; packed ones head by head, and gate by gate. */
extern const lm_layout_rule lm_layouts_tensor[];
/* Embedding and output head by words. */
extern const lm_layout_rule lm_layouts_vocabulary[];

/* Set the layouts of the parameters of g that a rule fits, and of gradients that it has of them.  Fails: as lm_layout_read
 * and lm_graph_lay. */
lm_code lm_layouts_apply(lm_graph *g, const lm_layout_rule *rules, lm_err *e);

/* How a model is split along tp (lm_build.lay, with one of these as its ctx). */
typedef struct {
    bool vocabulary; /* embedding and head, too */
    bool
        rows; /* between the layers each rank has a part of the rows (arXiv:2205.05198, section 4.2.2) */
} lm_layouts_tp;
lm_code lm_layouts_lay(void *ctx, lm_graph *g, lm_err *e);

#endif
