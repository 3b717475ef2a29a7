/* SPDX-License-Identifier: Apache-2.0 */
/* fit.h -- which meshes a model can have. */
#ifndef LM_PARALLEL_FIT_H
#define LM_PARALLEL_FIT_H

#include "graph/layout.h"
#include "model/config.h"

/* Whether the ranks of a mesh can share a model, and micro-batches of `batch` windows of `seq` tokens.  Fails: LM_EUSAGE naming
 * the axis and what it does not divide, with the sizes nearest to it that serve: along tp heads and widths of MLPs divide, and
 * heads of keys and values divide or are divided; along ep windows divide, and no rank is without experts; along cp
 * positions divide, and in layers that share heads there (lm_context) those of queries and keys. */
lm_code lm_fit_mesh(const lm_config *c, const lm_mesh *mesh, int64_t batch, int64_t seq, lm_err *e);

#endif
