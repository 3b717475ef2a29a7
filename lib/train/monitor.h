/* SPDX-License-Identifier: Apache-2.0 */
/* monitor.h -- what a step did to the parameters, from a fixed sample of elements.
 * Private to lib/train. */
#ifndef LM_TRAIN_MONITOR_H
#define LM_TRAIN_MONITOR_H

#include <stdint.h>

#include "graph/backend.h"

typedef struct lm_monitor lm_monitor;

typedef struct {
    double p50, p90, p99, max; /* of |gradient|, before clipping, over the sample       */
    double update_ratio;       /* |p_after - p_before| / |p_before| over the sample (2-norms) */
} lm_monitor_reading;

/* Sample at most 16,384 elements, evenly spaced over n.  All arrays are in `b`'s memory. */
lm_code lm_monitor_new(lm_backend *b, int64_t n, lm_monitor **out, lm_err *e);
void lm_monitor_free(lm_monitor *m);
/* Bytes of its samples: on the host, and as many again on a device. */
size_t lm_monitor_bytes(int64_t n);

/* Around an optimiser step, on the main stream: before() takes the sampled parameters and
 * gradients, after() the parameters again.  After a sync the reading is what the two found. */
lm_code lm_monitor_before(lm_monitor *m, const float *param, const float *grad, lm_err *e);
lm_code lm_monitor_after(lm_monitor *m, const float *param, lm_err *e);
void lm_monitor_read(lm_monitor *m, lm_monitor_reading *out);

#endif
