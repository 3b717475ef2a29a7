/* SPDX-License-Identifier: Apache-2.0 */
/* chart_runs.h -- from the metrics of runs to a chart: selects the numbers for each line. */
#ifndef LM_FORMAT_CHART_RUNS_H
#define LM_FORMAT_CHART_RUNS_H

#include "base/err.h"
#include "base/mem.h"
#include "format/chart.h"
#include "format/metrics.h"

/* The requested chart.  Everything is borrowed. */
typedef struct {
    lm_metrics_file *const *file; /* `runs` of them; NULL: no file read yet */
    const char *const *name;      /* of the runs, for the legend */
    int runs;
    const char *const *key; /* `keys` of them, a panel each */
    int keys;
    const char *x; /* "step", "tokens" or "seconds" */
    double smooth; /* beta of lm_chart_smooth; 0: none */
    bool eval;     /* mark the values of "eval" records */
    bool log_x, log_y;
    const char *title; /* NULL: the name of the run if there is only one */
} lm_run_chart;

/* Make the chart; its arrays live in `a`, its numbers in the files (until their next poll).  Each
 * run has a colour; "step" records are lines (with smooth, the raw values stay faint behind),
 * "eval" records are marks.  Records without a step are counted 1, 2, ... */
lm_code lm_run_chart_make(const lm_run_chart *r, lm_arena *a, lm_chart *out, lm_err *e);

/* The key to draw without a request: "reward" (rollouts), "rewards/margins" (preferences) or
 * "margin" (reward models), the first of which every run has values that can be drawn; otherwise
 * "loss".  r->key is not read. */
const char *lm_run_chart_usual(const lm_run_chart *r);

/* LM_EFORMAT, naming the existing keys, unless every key has a value that can be drawn. */
lm_code lm_run_chart_check(const lm_run_chart *r, lm_err *e);

#endif
