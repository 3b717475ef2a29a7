/* SPDX-License-Identifier: Apache-2.0 */
/* disk.h -- the disk space of the checkpoints of a training, before the first step. */
#ifndef LM_TRAIN_DISK_H
#define LM_TRAIN_DISK_H

#include "train/trainer.h"

typedef struct {
    double checkpoint; /* bytes of one: weights and optimiser states in F32; an .lmz takes less */
    int64_t at_once;   /* the most on disk at once, including the one being written */
    double need;       /* bytes that this run adds until then to the existing checkpoints */
    double free;       /* bytes of the file system available to this user; INFINITY: unknown */
} lm_disk;

/* For a run from `step` on with `keep` checkpoints kept (0: all), into the folder `run`, which may
 * hold checkpoints already; NULL: none yet, and `free` is unknown.  If checkpoints are written by
 * time and all are kept, their number is unknown: only the last one and those of validation are
 * counted. */
lm_code lm_train_disk(const lm_trainer_opts *o, const lm_memory_plan *plan, int64_t step,
                      int64_t keep, const char *run, lm_disk *out, lm_err *e);
/* The same of a place besides the run's folder. */
lm_code lm_train_disk_tier(const lm_trainer_opts *o, const lm_memory_plan *plan, int64_t step,
                           const lm_run_tier *t, lm_disk *out, lm_err *e);

#endif
