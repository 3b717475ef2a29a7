/* SPDX-License-Identifier: Apache-2.0 */
/* fit.h -- which meshes a model can have. */
#ifndef LM_PARALLEL_FIT_H
#define LM_PARALLEL_FIT_H

#include "graph/layout.h"
#include "model/config.h"

/* True if so many ranks along tp can share the layers: heads and widths of MLPs divide, and heads of keys and values divide or
 * are divided. */
bool lm_fits_tensor(const lm_config *c, int64_t ranks);
/* Fails: LM_EUSAGE naming the axis and what it does not divide, with the sizes nearest to it that serve. */
lm_code lm_fit_mesh(const lm_config *c, const lm_mesh *mesh, lm_err *e);

#endif
