/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- the place and the outcome of a training as JSON and as metrics. */
#ifndef LM_TRAIN_REPORT_H
#define LM_TRAIN_REPORT_H

#include "train/trainer.h"

/* Add the device, the model and the options of the run to a record of metrics. */
void lm_train_report_place(lm_metrics *m, const lm_backend *b, const lm_trainer_opts *o,
                           const lm_config *c);

/* "done", "stopped", "converged"; "nan" and "failed" for a failure. */
const char *lm_train_status(const lm_train_result *r, lm_code rc);
/* A loss as four decimals show it: no "-0.0000" of a loss that is 0 but for rounding. */
double lm_train_shown(double loss);
/* "loss 0.1234", or "reward 0.5000, loss 0.0000" of an objective that is followed by another number. */
const char *lm_train_headline(const char *followed, double value, double loss, char out[64]);
/* One line of JSON, without the newline. */
lm_code lm_train_result_json(const lm_train_result *r, const char *status, lm_buf *out, lm_err *e);
/* The same as a line of text; and the operators' times, one line each. */
lm_code lm_train_result_line(const lm_train_result *r, const char *status, lm_buf *out, lm_err *e);
lm_code lm_train_times_table(const lm_exec_time *line, size_t n, lm_buf *out, lm_err *e);
/* The "end" record; nothing when m is NULL. */
lm_code lm_train_report_end(lm_metrics *m, const lm_train_result *r, const char *status, lm_err *e);

#endif
