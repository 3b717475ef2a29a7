/* SPDX-License-Identifier: Apache-2.0 */
/* serve_metrics.h -- the state of continuous batching as records of metrics (format/metrics.h).  Private to lib/model. */
#ifndef LM_MODEL_SERVE_METRICS_H
#define LM_MODEL_SERVE_METRICS_H

#include "model/serve.h"

/* What the last record said. */
typedef struct {
    double seconds;
    int64_t tokens, rows, steps;
} lm_serve_meter;

/* A record of the steps so far, `now` those of *kv with its sched and tiers set, if a second has passed since the last one,
 * or with `last` if there were steps since. */
lm_code lm_serve_meter_step(lm_serve_meter *x, lm_metrics *m, const lm_complete_stats *st,
                            const lm_serve_stats *kv, const lm_pool *pages, bool last, lm_err *e);

#endif
