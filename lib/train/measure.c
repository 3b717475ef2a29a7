/* SPDX-License-Identifier: Apache-2.0 */
/* measure.c -- a short run that measures the time of a step. */
#include "train/measure.h"

static const double most_seconds = 5;

lm_code lm_train_measured(const lm_trainer_opts *o, lm_program *p, lm_tokens *data, lm_sink *sink,
                          lm_train_measure *out, lm_err *e)
{
    lm_trainer_opts short_run = *o;
    lm_trainer_io io = { .config = p->config, .program = p, .train = data, .sink = sink };
    lm_trainer *t = NULL;
    lm_train_result r;
    *out = (lm_train_measure){ 0 };
    short_run.eval_every = 0;
    short_run.log_every = 0;
    short_run.patience = 0;
    short_run.most_seconds = most_seconds;
    short_run.peak_flops = 0;
    if (short_run.steps <= LM_TRAIN_WARM)
        short_run.steps = LM_TRAIN_WARM + 1;
    lm_code rc = lm_trainer_train(&short_run, &io, p->backend, NULL, NULL, &t, &r, e);
    if (!rc && r.steps_run > LM_TRAIN_WARM) {
        out->steps = r.steps_run - LM_TRAIN_WARM;
        out->seconds_per_step = (r.seconds_steps - r.seconds_begin) / (double)out->steps;
        out->tokens_per_second =
            (double)(o->batch * o->accumulate * o->seq) / out->seconds_per_step;
    }
    lm_trainer_free(t);
    return rc;
}
