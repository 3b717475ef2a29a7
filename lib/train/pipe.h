/* SPDX-License-Identifier: Apache-2.0 */
/* pipe.h -- the stages of a model and the schedule of a training whose ranks share its layers (mesh axis pp). */
#ifndef LM_TRAIN_PIPE_H
#define LM_TRAIN_PIPE_H

#include "model/model.h"
#include "parallel/pipeline.h"

typedef struct {
    lm_pipeline rows; /* of the micro-batches of a leaf each way */
    int ways;         /* lm_pipeline_ways */
    lm_stages stages; /* its arrays are the next ones */
    int64_t *first;
    int *rank[2]; /* by way; of two the second are the twins */
} lm_train_pipe;

typedef struct {
    const char
        *schedule; /* a generator (lm_pipeline_make), or a file (lm_pipeline_read); NULL: 1f1b */
    const char *stages;         /* layers of each stage: "3,4,4,3"; NULL: as even as possible */
    int ranks;                  /* along pp */
    int64_t micros;             /* of a leaf on one rank along dp */
    int64_t batch, seq, source; /* as of lm_build: for the work of each layer */
} lm_train_pipe_ask;

/* Of a model of this config: stages without `stages` so that the FLOPs of the largest are as few as possible, embedding and
 * head included; those with the fewest layers stand last.  The caller owns *out: lm_train_pipe_free.
 * Fails: LM_EUSAGE for a schedule that cannot be made or run, with the nearest sizes; for more stages than layers; for a list
 * of layers that has other sums.  As lm_file_read. */
lm_code lm_train_pipe_new(const lm_train_pipe_ask *ask, const lm_config *c, lm_train_pipe **out,
                          lm_err *e);
void lm_train_pipe_free(lm_train_pipe *p);

/* first[0..stages-1] of the stages whose largest sum of work[0..layers-1] is the least; each has a layer at least. */
lm_code lm_train_pipe_balance(const double *work, int64_t layers, int stages, int64_t *first,
                              lm_err *e);

#endif
