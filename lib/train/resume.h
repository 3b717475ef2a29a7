/* SPDX-License-Identifier: Apache-2.0 */
/* resume.h -- the learning-rate schedule of a resumed run, possibly with another number of steps.
 *
 * A state.json keeps where the schedule of its run lies, in options.schedule = { "from", "steps", "warmup",
 * "start" }: a run that is resumed with the same number of steps goes on along it, bit for bit. */
#ifndef LM_TRAIN_RESUME_H
#define LM_TRAIN_RESUME_H

#include "base/json.h"
#include "train/schedule.h"

/* The continuation of a schedule when the number of steps has changed:
 *   keep    as it was laid out; steps after its end have its last rate
 *   extend  stretched from its beginning to the new last step: the rate may jump
 *   rewarm  a new one from here to the new last step, which warms up from the rate that was reached
 *           (A. Ibrahim et al., arXiv:2403.08763) */
extern const char *const lm_resume_names[]; /* NULL-terminated */

typedef struct {
    const char *how;     /* one of the names; NULL: extend, if the number of steps has changed */
    int64_t step, steps; /* steps done; steps in total */
    bool warmup_given;   /* the schedule's warm-up was requested now */
    int64_t decay;       /* requested steps of wsd's decay; -1: a tenth of the schedule */
    double lr;           /* the rate of options without one; 0: that of the present ones */
} lm_resume_ask;

/* *s is the schedule of the present options, `options` are those of the checkpoint (`where`): sets
 * the position of *s.  rewarm without a warm-up uses a hundredth of the remaining steps.  `note`
 * describes a change of the learning rate; "": no change.  Fails: LM_EFORMAT. */
lm_code lm_resume_schedule(const json_t *options, const char *where, const lm_resume_ask *ask,
                           lm_schedule *s, char note[256], lm_err *e);

/* Store the position of *s in the options of a checkpoint. */
lm_code lm_resume_keep_schedule(json_t *options, const lm_schedule *s, lm_err *e);

#endif
