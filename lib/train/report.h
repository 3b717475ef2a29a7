/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- the outlook and the outcome of a training as JSON and as metrics. */
#ifndef LM_TRAIN_REPORT_H
#define LM_TRAIN_REPORT_H

#include "train/measure.h"
#include "train/space.h"
#include "train/trainer.h"

/* What --dry-run says of a run. */
typedef struct {
    lm_memory_plan plan;
    lm_train_verdict verdict;
    lm_space space;           /* of its checkpoints */
    lm_train_measure measure; /* steps 0: not measured */
    int64_t steps;
} lm_outlook;

/* As one JSON object over several lines, or as a table with the verdict at its end, appended to `out`. */
lm_code lm_outlook_json(const lm_outlook *o, lm_buf *out, lm_err *e);
lm_code lm_outlook_table(const lm_outlook *o, lm_buf *out, lm_err *e);

/* Add to a record of metrics where the run takes place and what it trains. */
void lm_train_report_place(lm_metrics *m, const lm_backend *b, const lm_trainer_opts *o,
                           const lm_config *c);

/* "done", "stopped", "converged"; "nan" and "failed" for a failure. */
const char *lm_train_status(const lm_train_result *r, lm_code rc);
/* One line of JSON, without the newline. */
lm_code lm_train_result_json(const lm_train_result *r, const char *status, lm_buf *out, lm_err *e);
/* The same as a line for people; and the operators' times, a line each. */
lm_code lm_train_result_line(const lm_train_result *r, const char *status, lm_buf *out, lm_err *e);
lm_code lm_train_times_table(const lm_exec_time *line, size_t n, lm_buf *out, lm_err *e);
/* The "end" record; nothing when m is NULL. */
lm_code lm_train_report_end(lm_metrics *m, const lm_train_result *r, const char *status, lm_err *e);

#endif
