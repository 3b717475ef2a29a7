/* SPDX-License-Identifier: Apache-2.0 */
/* monitor.h -- the effect of a step on the parameters, from a fixed sample of elements.
 * Private to lib/train. */
#ifndef LM_TRAIN_MONITOR_H
#define LM_TRAIN_MONITOR_H

#include <stdint.h>

#include "comm/comm.h"
#include "train/update.h"

typedef struct lm_monitor lm_monitor;

typedef struct {
    double p50, p90, p99, max; /* of |gradient|, before clipping, over the sample       */
    double update_ratio;       /* |p_after - p_before| / |p_before| over the sample (2-norms) */
} lm_monitor_reading;

/* The sample: `count` elements, at most 16,384, evenly spaced over n by `stride`. */
int64_t lm_monitor_stride(int64_t n);
int64_t lm_monitor_count(int64_t n);

/* All arrays are in `b`'s memory. */
lm_code lm_monitor_new(lm_backend *b, int64_t n, lm_monitor **out, lm_err *e);
void lm_monitor_free(lm_monitor *m);
/* Bytes of its samples: on the host, and the same number on a device. */
size_t lm_monitor_bytes(int64_t n);

/* The memory to which the update's nodes write the samples (update.h). */
void lm_monitor_bind(const lm_monitor *m, const lm_update_values *v, lm_exec *x);
/* This memory, of number k of before, gradients and after. */
float *lm_monitor_samples(const lm_monitor *m, int k);
/* Called after the nodes before a step, and after those behind it, on the main stream: copies the
 * samples to the host.  After a sync the reading is computed from both. */
lm_code lm_monitor_before(lm_monitor *m, lm_err *e);
lm_code lm_monitor_after(lm_monitor *m, lm_err *e);
void lm_monitor_read(lm_monitor *m, lm_monitor_reading *out);
/* Instead of it, of the ranks of `c`, which have stages of a model (`model` is this rank's): a reading of the samples of all of
 * them, the same on each.  A sample weighs its rank's stride; of a parameter that several stages have, one stage's count.
 * Where the whole model has at most 16,384 elements, percentiles and maximum are those of one rank; beyond that ranks have samples of
 * elements that one rank does not look at.  Collective; it fails as lm_comm_all_gather. */
lm_code lm_monitor_read_stages(lm_monitor *m, const lm_model *model, lm_comm *c,
                               lm_monitor_reading *out, lm_err *e);

#endif
