/* SPDX-License-Identifier: Apache-2.0 */
/* sums.h -- the loss and the metrics of a round, summed over its micro-batches.
 *
 * Each micro-batch has its own, which are added in the order of the micro-batches, whichever rank has run them: the sums have
 * the same bits for any number of ranks.
 *
 *     lm_align_sums_begin(s)                         what all ranks know is noted in s->metrics
 *     lm_align_sums_add(s, loss, &metrics, e)        for each micro-batch that is this rank's, in their order
 *     lm_align_sums_join(s, comm, e)                 s->loss and s->metrics are those of the round
 *
 * Private to lib/tune. */
#ifndef LM_TUNE_ALIGN_SUMS_H
#define LM_TUNE_ALIGN_SUMS_H

#include "comm/comm.h"
#include "tune/align/loss.h"

enum { LM_ALIGN_SUMS_NAME = 64 };

typedef struct {
    double loss;
    lm_align_metrics metrics;
} lm_align_micro_sums;

/* Zero-initialise. */
typedef struct {
    double loss;
    lm_align_metrics metrics;   /* names are borrowed, or in `name` */
    lm_align_micro_sums *micro; /* [n] of this rank */
    int64_t n;
    size_t cap;
    char name[LM_ALIGN_METRICS][LM_ALIGN_SUMS_NAME]; /* those that came from another rank */
} lm_align_sums;

void lm_align_sums_begin(lm_align_sums *s);
lm_code lm_align_sums_add(lm_align_sums *s, double loss, const lm_align_metrics *m, lm_err *e);
/* Collective; comm NULL: one rank.  Fails as a broadcast. */
lm_code lm_align_sums_join(lm_align_sums *s, lm_comm *comm, lm_err *e);
void lm_align_sums_fini(lm_align_sums *s);

#endif
