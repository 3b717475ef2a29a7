/* SPDX-License-Identifier: Apache-2.0 */
/* run_tiers.h -- places to which a run writes checkpoints besides its own folder: faster ones often, safer ones rarely.
 *
 * Each is a folder with checkpoints as in a run (folder_run.h), with its own interval and number of them.  `memory` is a folder
 * in the machine's shared memory, which outlives the processes of a run, not the machine:
 *
 *   RUN/tiers.json      {"version": 1, "id": ID, "tiers": [{"folder": PATH}, ...]}: where else this run has checkpoints
 *   FOLDER/tier.json    {"version": 1, "id": ID, "run": PATH}: the run whose they are
 *   /dev/shm/lmutils-UID/HASH/   the folder of `memory`, by the path that the run had at first
 *
 * A folder counts as one of the run while both files have the same id, also when the run has been moved; of a copied run
 * only the first has it.  A resume takes the newest whole checkpoint of all. */
#ifndef LM_TRAIN_RUN_TIERS_H
#define LM_TRAIN_RUN_TIERS_H

#include "base/buf.h"
#include "base/lock.h"
#include "base/progress.h"

enum { LM_RUN_TIERS = 7 };

typedef struct {
    char *folder;   /* absolute; NULL: in memory, before lm_run_tiers_place */
    bool memory;    /* it is in the machine's memory */
    int64_t every;  /* steps between checkpoints; 0: by time */
    double seconds; /* between them; 0: by steps */
    int keep;       /* newest ones kept; 0: all */
    bool made;      /* by lm_run_tiers_open */
    lm_lock *lock;
} lm_run_tier;

typedef struct {
    lm_run_tier at[LM_RUN_TIERS];
    int n;
} lm_run_tiers;

/* How often checkpoints are written: steps ("100") or a time ("90s", "10m", "2h"), the other of both 0; false for other
 * text. */
bool lm_run_interval(const char *text, int64_t *steps, double *seconds);
/* PLACE[:every=N|TIME,keep=K], n of them; PLACE: a folder, or "memory".  Defaults: every 30 minutes, 3 kept, of memory 1.
 * Fails: LM_EUSAGE for other text, two with one place, and more than LM_RUN_TIERS. */
lm_code lm_run_tiers_parse(const char *const *text, int n, lm_run_tiers *out, lm_err *e);
/* The same text of one, with an absolute path, appended to `out`. */
lm_code lm_run_tier_text(const lm_run_tier *t, lm_buf *out, lm_err *e);
/* Checkpoints in memory at once, that which is being written included. */
int64_t lm_run_tiers_in_memory(const lm_run_tiers *t);
/* Set the folders of those in memory, of a run whose folder is there, for a training from checkpoint `from` (-1: a new one). */
lm_code lm_run_tiers_place(lm_run_tiers *t, const char *run, int64_t from, lm_err *e);
/* Make and lock the folders for a training from checkpoint `from` of `run` (-1: a new one), with `force` to replace older ones;
 * folders in memory whose runs are gone are removed.  `run` is open (lm_run_open).  Fails as lm_run_open; LM_EUSAGE for a
 * folder of shared memory that belongs to another user. */
lm_code lm_run_tiers_open(lm_run_tiers *t, const char *run, int64_t from, bool force, lm_sink *sink,
                          lm_err *e);
/* Let go of the folders; failed: those that lm_run_tiers_open made are removed if they are empty. */
void lm_run_tiers_close(lm_run_tiers *t, bool failed);
/* Before the first step: remove checkpoints behind `from`, of a new run all, and write the files that connect run and folders.
 * Former places of a resumed run stay connected while they have none behind `from`: `from` itself may lie there. */
lm_code lm_run_tiers_claim(const lm_run_tiers *t, const char *run, int64_t from, lm_err *e);
/* When the run's own folder holds its newest checkpoint: give memory back, that of former places too.  Failures are ignored. */
void lm_run_tiers_end(const lm_run_tiers *t, const char *run);
void lm_run_tiers_fini(lm_run_tiers *t);

/* The newest whole checkpoint of a run in its own folder and the others, a path (the caller frees it); NULL: it has none.
 * Folders that are missing, or have another run by now, are left out. */
lm_code lm_run_tiers_newest(const char *run, char **out, lm_err *e);
/* The run whose tier the folder is, if that run still is there; NULL: no run has it as a tier.  The caller frees *out. */
lm_code lm_run_tiers_run_of(const char *folder, char **out, lm_err *e);

#endif
