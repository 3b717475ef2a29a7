/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_impl.h -- rows of schedules as they are made.  Private to lib/parallel. */
#ifndef LM_PARALLEL_PIPELINE_IMPL_H
#define LM_PARALLEL_PIPELINE_IMPL_H

#include "parallel/pipeline.h"

/* Allocate the rows, empty, with room for `most` steps each. */
lm_code lm_pipeline_begin(lm_pipeline *p, int64_t ranks, int64_t stages, int64_t micros,
                          size_t most, lm_err *e);

/* Add a step to rank r's row, which has room. */
static inline void lm_pipe_add(lm_pipeline *p, int r, lm_pipe_kind kind, int64_t micro, int stage)
{
    lm_pipe_row *row = &p->row[r];
    row->step[row->n++] =
        (lm_pipe_step){ .micro = (int32_t)micro, .stage = (int16_t)stage, .kind = (uint8_t)kind };
}

/* Generators fill the rows of p, which has its sizes and room for 3 steps of each stage and micro-batch of a rank.
 * Fails: LM_ELIMIT. */
typedef lm_code lm_pipe_make(lm_pipeline *p, lm_err *e);
lm_pipe_make lm_pipe_make_zb_v, lm_pipe_make_dualpipe, lm_pipe_make_dualpipev;

#endif
