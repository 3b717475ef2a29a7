/* SPDX-License-Identifier: Apache-2.0 */
/* search_weights.h -- the search for the weights of a merge: every candidate is merged into memory,
 * tensor by tensor, and validated there; only a line about it is written.
 *
 * The lines are JSONL, one object each:
 *   {"event":"search", ...}     what is searched: method, base, models, validation sets with their
 *                               tokens, type of computing, and "merge", a digest of all that determines a loss
 *                               except the weights
 *   {"event":"candidate", "candidate":0, "kind":"start", "weights":[...], "loss":[...],
 *    "objective":2.1, "best":true, "seconds":0.8}
 *   {"event":"best", "candidates":17, "weights":[...], "objective":1.9, "seconds":14.2}
 * Numbers have enough digits to read back equal; a loss that is not finite is null.  The lines of an interrupted search,
 * also with an incomplete last one, are enough to continue it exactly. */
#ifndef LM_MERGE_SEARCH_WEIGHTS_H
#define LM_MERGE_SEARCH_WEIGHTS_H

#include <stdbool.h>

#include "format/safetensors.h"
#include "graph/backend.h"
#include "merge/engine.h"
#include "merge/search.h"
#include "merge/validate.h"

typedef struct {
    /* n is set by lm_merge_search; start NULL: the recipe's weights if every model has one,
     * otherwise 1/n */
    lm_search_opts search;
    lm_validator_opts val; /* tok NULL: that of the merged model */
    bool equal;            /* the objective weights all sets equally, not by their tokens */
    const char *resume;    /* lines of an earlier search; NULL: none */
    bool check_only;       /* end before the first candidate: checks options, sets and resume */
    lm_write_fn write;     /* receives each line with its newline, in one call */
    void *ctx;
    lm_sink *sink;
} lm_merge_search_opts;

/* Search the weights of all models of the plan's recipe; the engine runs that plan.  Afterwards the
 * plan, its recipe and best [models] have the best weights.  Stops early, without changing them,
 * when lm_stopping().  Fails: LM_EUSAGE for a method without weights, a recipe with too many
 * models, lines of a search with another merge or other sets; LM_EFORMAT for a model that lib/model
 * cannot run. */
lm_code lm_merge_search(lm_merge_recipe *r, lm_merge_plan *p, lm_merge_engine *g, lm_backend *b,
                        const lm_merge_search_opts *o, double *best, lm_err *e);

#endif
