/* run.h -- what a training does with its folder before the first step: it looks, and it makes room.
 *
 * A run folder (folder_run.h) may hold files of the user's own.  Only checkpoints (step-N with a
 * state.json), the link `latest` and links into it are ever removed here. */
#ifndef LM_TRAIN_RUN_H
#define LM_TRAIN_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* May a training write its checkpoints to `run`, coming from checkpoint `from` of the same folder
 * (-1: it comes from elsewhere)?  Writes nothing.  `force`: checkpoints after `from` may be lost.
 * Fails: LM_EUSAGE when the folder holds such checkpoints and !force (names the newest), when it is
 * a file, when other files stand where the links and checkpoints go (names one), when an .lmz that
 * would stay is a difference to a checkpoint that would not (names the latter);
 * LM_EIO when it cannot be written. */
lm_code lm_run_check(const char *run, int64_t from, bool force, lm_err *e);

/* Name of the newest whole checkpoint ("step-000300", yours), NULL when there is none.  Unlike
 * lm_run_latest this does not ask `latest`, which a killed run may have left one behind. */
lm_code lm_run_newest(const char *run, char **out, lm_err *e);

/* Make the folder if need be, remove what a killed run left half-written, and all checkpoints after
 * `from` (-1: all of them, and the links); `latest` then names `from`. */
lm_code lm_run_claim(const char *run, int64_t from, lm_err *e);

#endif
