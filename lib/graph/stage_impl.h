/* SPDX-License-Identifier: Apache-2.0 */
/* stage_impl.h -- shared by the passes of stages.  Private to lib/graph. */
#ifndef LM_GRAPH_STAGE_IMPL_H
#define LM_GRAPH_STAGE_IMPL_H

#include "graph/stage.h"

/* Gradients to which several stages add become a value for each of them; of other ranks' stages nothing changes. */
lm_code lm_split_gradients(lm_graph *g, const lm_stages *s, int rank, lm_addends *out, lm_err *e);

#endif
