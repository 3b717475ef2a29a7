/* SPDX-License-Identifier: Apache-2.0 */
/* sharing.h -- processes that share the weights of a model that they use (--mesh tp=N). */
#ifndef LM_CMD_SHARING_H
#define LM_CMD_SHARING_H

#include "common/tool.h"
#include "graph/backend.h"
#include "kernels/comm.h"
#include "model/loaded.h"

typedef struct {
    lm_mesh mesh;
    lm_links links, *link[LM_AXES];
} lm_sharing;

/* What `mesh` (NULL: not given) asks for, and the processes that are there; adapter: NULL without.  All ranks must have been
 * started alike.  Fails: LM_EUSAGE. */
lm_code lm_sharing_ask(lm_tool *t, const char *mesh, const char *adapter, lm_sharing *out,
                       lm_err *e);
/* Graphs of *model become those of this rank, `b`, which runs them, knows the others, and all stop together (base/stop.h);
 * nothing for one process.  *s must live as long as both.  Fails: LM_EUSAGE for a model that cannot be shared so. */
lm_code lm_sharing_use(lm_tool *t, lm_sharing *s, lm_backend *b, lm_loaded *model, lm_err *e);

#endif
