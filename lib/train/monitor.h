/* monitor.h -- what a step did to the parameters, from a fixed sample of elements. */
#ifndef LM_TRAIN_MONITOR_H
#define LM_TRAIN_MONITOR_H

#include <stdint.h>

#include "base/err.h"

typedef struct lm_monitor lm_monitor;

typedef struct {
    double p50, p90, p99, max; /* of |gradient|, before clipping, over the sample       */
    double update_ratio;       /* |p_after - p_before| / |p_before| over the sample (2-norms) */
} lm_monitor_reading;

/* Sample at most 16,384 elements, evenly spaced over n. */
lm_code lm_monitor_new(int64_t n, lm_monitor **out, lm_err *e);
void lm_monitor_free(lm_monitor *m);
/* Around an optimiser step: before() keeps the sampled parameters and reads the gradients; after()
 * compares. */
void lm_monitor_before(lm_monitor *m, const float *param, const float *grad);
void lm_monitor_after(lm_monitor *m, const float *param, lm_monitor_reading *out);

#endif
