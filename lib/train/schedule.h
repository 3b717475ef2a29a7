/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.h -- the learning rate of a step. */
#ifndef LM_TRAIN_SCHEDULE_H
#define LM_TRAIN_SCHEDULE_H

#include <stdint.h>

typedef enum {
    LM_SCHED_CONSTANT,
    LM_SCHED_LINEAR,      /* to min_ratio at the last step                           */
    LM_SCHED_COSINE,      /* likewise, half a cosine; cycles > 1 restarts            */
    LM_SCHED_STEP,        /* times gamma every step_size steps                       */
    LM_SCHED_EXPONENTIAL, /* times gamma every step                                  */
    LM_SCHED_WSD, /* constant, then down over the last decay steps: 1 - sqrt(u) (arXiv:2405.18392)
                   */
    LM_SCHED_COUNT,
} lm_sched_kind;
extern const char *const lm_sched_names[];     /* NULL-terminated, in the order of the enum */
lm_sched_kind lm_sched_find(const char *name); /* LM_SCHED_COUNT: unknown */

/* Numbers of a schedule that not every kind reads. */
enum {
    LM_SCHED_READS_STEP_SIZE = 1,
    LM_SCHED_READS_GAMMA = 2,
    LM_SCHED_READS_CYCLES = 4,
    LM_SCHED_READS_DECAY = 8,
};
unsigned lm_sched_reads(lm_sched_kind k);

typedef struct {
    lm_sched_kind kind;
    double lr, min_ratio; /* peak; floor as a fraction of the peak */
    int64_t warmup;       /* its first steps, in which the rate rises */
    int64_t total;        /* steps from its beginning to its end */
    int64_t decay;        /* wsd: its last steps, in which the rate falls */
    int64_t step_size, cycles;
    double gamma;
    int64_t from; /* step of the run at which it begins; 0 except after a rewarming */
    double start; /* rate above which the warm-up begins; 0, or the rate before a rewarming */
} lm_schedule;

/* The rate of step t of the run (from 0).  Warm-up is linear and ends at the peak: step t < warmup
 * gets lr (t+1)/warmup, so that no step has a rate of zero. */
double lm_schedule_lr(const lm_schedule *s, int64_t t);

#endif
