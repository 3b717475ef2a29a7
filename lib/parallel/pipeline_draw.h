/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_draw.h -- a pipeline schedule and its times as a picture and as JSON. */
#ifndef LM_PARALLEL_PIPELINE_DRAW_H
#define LM_PARALLEL_PIPELINE_DRAW_H

#include "base/json.h"
#include "base/mem.h"
#include "format/chart.h"
#include "parallel/pipeline.h"

/* A lane for each rank, a box for each step with its micro-batch; beside the lane, how long the rank waits between its steps, and
 * how many stages of micro-batches it holds at most.  name: of the schedule, for the title; title replaces that if not NULL.
 * Arrays live in `a`; title is borrowed.  Fails: LM_ELIMIT. */
lm_code lm_pipeline_chart(const lm_pipeline *p, const lm_pipe_times *t, const lm_pipe_cost *cost,
                          const char *name, const char *title, lm_arena *a, lm_chart_lanes *out,
                          lm_err *e);

/* Append one object: sizes, makespan_ms, ideal_ms, span_ms, bubbles, "rank" with busy_ms, idle_ms and in_flight, and "stage"
 * with in_flight. */
lm_code lm_pipeline_json(const lm_pipeline *p, const lm_pipe_times *t, const char *name,
                         lm_buf *out, lm_err *e);

#endif
