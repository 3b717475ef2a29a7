/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.h -- plot-run --schedule: a pipeline schedule as picture, JSON or rows. */
#ifndef LM_CMD_PLOT_RUN_SCHEDULE_H
#define LM_CMD_PLOT_RUN_SCHEDULE_H

#include "base/mem.h"
#include "format/chart.h"
#include "parallel/pipeline.h"

/* Options; NULL and 0: not given. */
typedef struct {
    const char *spec, *mesh, *costs, *costs_file;
    int64_t micros;
} schedule_opts;

typedef struct {
    lm_pipeline rows;
    lm_pipe_cost *cost; /* [stages] */
    lm_pipe_times times;
    const char *name;
} schedule;

/* Make or read the schedule and simulate it.  The caller owns it: schedule_fini.
 * Fails: LM_EUSAGE for options that do not fit each other or the schedule, and what lm_pipeline_make, lm_pipeline_read and
 * lm_pipeline_time fail with. */
lm_code schedule_open(const schedule_opts *o, schedule *out, lm_err *e);
void schedule_fini(schedule *s);

#endif
