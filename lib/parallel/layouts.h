/* SPDX-License-Identifier: Apache-2.0 */
/* layouts.h -- policies: which tensors are split how, by their names.
 *
 * A policy is a table of patterns of names, in which * stands for any run of characters, and + at the end for what makes
 * columns of a result: weight, bias, and lora_B of an adapter.  The first that fits a parameter gives its layout.  All else of
 * a parallel training follows from these layouts in the sharding pass (graph/shard.h). */
#ifndef LM_PARALLEL_LAYOUTS_H
#define LM_PARALLEL_LAYOUTS_H

#include "model/model.h"

typedef struct {
    const char *pattern; /* NULL: past the last */
    const char *layout;  /* as lm_layout_read has it */
} lm_layout_rule;

/* Tensor parallelism in one dimension (Megatron-LM, arXiv:1909.08053, section 3): the first matrices of attention and MLP
 * are split in rows, the second ones in columns; packed ones head by head, and gate by gate. */
extern const lm_layout_rule lm_layouts_tensor[];
/* Embedding and output head by words. */
extern const lm_layout_rule lm_layouts_vocabulary[];
/* Expert parallelism: whole experts. */
extern const lm_layout_rule lm_layouts_experts[];

/* Set the layouts of the parameters of g that a rule fits, along its axes, and of gradients that it has of them.  Fails: as
 * lm_layout_read and lm_graph_lay. */
lm_code lm_layouts_apply(lm_graph *g, const lm_layout_rule *rules, lm_err *e);

/* Graphs of *b become those of one rank of the mesh (borrowed), if there are several along lm_inner_axes.  tp: layers,
 * embedding and head are split; with `rows` between the layers the rows, too (arXiv:2205.05198, section 4.2.2).  ep: experts
 * are split, and all rows by windows, which divide.  cp: all rows by positions; attention has whole windows of some of the
 * heads (arXiv:2309.14509), or blocks around a ring (lm_mesh.context). */
void lm_layouts_share(lm_build *b, const lm_mesh *mesh, bool rows);

#endif
