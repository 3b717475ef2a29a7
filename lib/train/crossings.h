/* SPDX-License-Identifier: Apache-2.0 */
/* crossings.h -- what crosses the borders of stages: where a rank has it, and on a device the way to the host's memory and back,
 * in which messages travel.  Private to lib/train. */
#ifndef LM_TRAIN_CROSSINGS_H
#define LM_TRAIN_CROSSINGS_H

#include "graph/exec.h"
#include "model/model.h"
#include "parallel/pipeline_run.h"

/* Memory of a stage's slots, one behind another. */
typedef struct {
    char *data;
    size_t each; /* bytes of a slot */
    int n;
} slots;

/* What crosses a border on a device's rank: pinned memory beside the slots of a stage, as messages travel between hosts. */
typedef struct {
    char *data;
    size_t each; /* bytes of a slot */
    int n;
} crossing;

/* By border, direction (down, up) and side (receiver, sender). */
typedef crossing crossings[2][2];

/* A model whose stages exchange, its slots by stage, and the memory of crossings by border; NULL: the slots are the host's. */
typedef struct {
    lm_backend *b;
    int stages;
    const lm_model *m;
    const lm_plan *plan;
    const slots *of;
    crossings *by;
} exchanged;

/* Memory for all borders: *by stays NULL on a host.  Fails: LM_ELIMIT; what there is of *by is freed by crossings_free. */
lm_code crossings_make(const exchanged *x, crossings **by, lm_err *e);
void crossings_free(const exchanged *x);

/* lm_pipe_work.part, in memory of the host. */
bool crossings_part(const exchanged *x, int border, bool up, bool sender, int slot, size_t k,
                    lm_pipe_part *out);
/* Before a step: what has come for it, to the device.  Behind it: what it sends, to the host, and wait until the step is complete.
 * Nothing on a host. */
lm_code crossings_receive(const exchanged *x, const lm_pipe_step *s, int slot, lm_err *e);
lm_code crossings_hand_on(const exchanged *x, const lm_pipe_step *s, int slot, lm_err *e);

#endif
