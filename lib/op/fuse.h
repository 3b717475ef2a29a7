/* SPDX-License-Identifier: Apache-2.0 */
/* fuse.h -- joining operators that follow each other: a tensor between them is then never written
 * to memory and read back, and a device has fewer kernels to start.
 *
 * The last pass before the memory plan (build -> precision -> backward -> fuse), over forward and
 * backward alike.  A joined operator replaces its parts only where the backend has a kernel of its
 * own for it (lm_backend.joins) and no other node reads the values between them.  Graphs of
 * different backends may therefore differ, their results only by roundings:
 *
 *   linear, gelu                               linear_act
 *   linear_dx, gelu_dx                         linear_act_dx
 *   norm_dx, norm_dw                           norm_dx_dw
 *   norm, linear (, gelu, swiglu or geglu)     norm_linear      where it makes no gradient
 *   (head_norm,) rope, attention_cached        attention_step   one row a sequence
 *   linear, cast to F32                        linear into F32  on every backend
 *   head_stats, head_grad                      head_loss        on every backend */
#ifndef LM_OP_FUSE_H
#define LM_OP_FUSE_H

#include "graph/backend.h"
#include "graph/graph.h"

/* keep: activations that are read after the run.  Fails: LM_ELIMIT. */
lm_code lm_fuse(lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep, lm_err *e);

#endif
