/* SPDX-License-Identifier: Apache-2.0 */
/* resume.h -- the learning-rate schedule of a run that goes on, perhaps for another number of steps.
 *
 * A state.json keeps where the schedule of its run lies, in options.schedule = { "from", "steps", "warmup",
 * "start" }: a run that is resumed with the same --steps goes on along it, bit for bit. */
#ifndef LM_TRAIN_RESUME_H
#define LM_TRAIN_RESUME_H

#include "base/json.h"
#include "train/schedule.h"

/* How a schedule goes on when --steps is another number than before:
 *   keep    as it was laid out; steps after its end have its last rate
 *   extend  laid out anew from its beginning to the new last step: the rate may jump
 *   rewarm  a new one from here to the new last step, which warms up from the rate that was reached
 *           (A. Ibrahim et al., arXiv:2403.08763) */
extern const char *const lm_resume_names[]; /* NULL-terminated */

typedef struct {
    const char *how; /* one of the names; NULL: extend, if steps is another number than before */
    int64_t step, steps; /* done; in all */
    bool warmup_given;   /* the schedule's warm-up is one that was asked for now */
    int64_t decay;       /* steps of wsd's decay as asked for; -1: a tenth of the schedule */
} lm_resume_ask;

/* *s is the schedule by the options in force, `options` those of the checkpoint (`where`): places *s.  rewarm
 * without a warm-up takes a hundredth of the steps that are left.  `note` says what the learning rate does
 * when it is not what it was going to be; "": nothing to say.  Fails: LM_EFORMAT. */
lm_code lm_resume_schedule(const json_t *options, const char *where, const lm_resume_ask *ask,
                           lm_schedule *s, char note[256], lm_err *e);

/* Keep the place of *s in the options of a checkpoint. */
lm_code lm_resume_keep_schedule(json_t *options, const lm_schedule *s, lm_err *e);

#endif
