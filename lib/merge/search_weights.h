/* SPDX-License-Identifier: Apache-2.0 */
/* search_weights.h -- the search for the weights of a merge: every candidate is merged into memory,
 * tensor by tensor, and validated there; nothing is written but a line about it.
 *
 * The lines are JSONL, one object each:
 *   {"event":"search", ...}     what is searched: method, base, models, validation sets with their
 *                               tokens, type of computing, and "merge", a digest of everything but
 *                               the weights that decides a loss
 *   {"event":"candidate", "candidate":0, "kind":"start", "weights":[...], "loss":[...],
 *    "objective":2.1, "best":true, "seconds":0.8}
 *   {"event":"best", "candidates":17, "weights":[...], "objective":1.9, "seconds":14.2}
 * Numbers have as many digits as read back equal; a loss that is not finite is null.  The lines of
 * an interrupted search, whole or cut anywhere, are enough to go on exactly. */
#ifndef LM_MERGE_SEARCH_WEIGHTS_H
#define LM_MERGE_SEARCH_WEIGHTS_H

#include <stdbool.h>

#include "format/safetensors.h"
#include "graph/backend.h"
#include "merge/engine.h"
#include "merge/search.h"
#include "merge/validate.h"

typedef struct {
    lm_search_opts search; /* n is set here; start NULL: the recipe's weights where every model
                                has one, else 1/n */
    lm_validator_opts val; /* tok NULL: the one that the merged model will have */
    bool equal;            /* the objective takes all sets alike, not by their tokens */
    const char *resume;    /* lines of an earlier search; NULL: none */
    bool check_only;       /* end before the first candidate: options, sets and resume are good */
    lm_write_fn write;     /* receives each line with its newline, in one call */
    void *ctx;
    lm_sink *sink;
} lm_merge_search_opts;

/* Search the weights of all models of the plan's recipe; the engine runs that plan.  Afterwards the
 * plan and its recipe have the best weights, best [models] as well.  Stops early, without touching
 * them, when lm_stopping().
 * Fails: LM_EUSAGE for a method without weights, a recipe with too many models, lines of a search
 * that had another merge or other sets; LM_EFORMAT for a model that lib/model cannot run. */
lm_code lm_merge_search(lm_merge_recipe *r, lm_merge_plan *p, lm_merge_engine *g, lm_backend *b,
                        const lm_merge_search_opts *o, double *best, lm_err *e);

#endif
