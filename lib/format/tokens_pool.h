/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_pool.h -- tokenised documents stored on disk, to be written again in random order and a
 * chosen mixture.
 *
 * A shuffle over all documents needs their number.  So ids are first appended to an unlinked
 * temporary file, then read back document by document in the order of a permutation that is
 * computed, not stored.  Memory does not grow with the data, and the disk temporarily holds the ids
 * twice. */
#ifndef LM_FORMAT_TOKENS_POOL_H
#define LM_FORMAT_TOKENS_POOL_H

#include "base/err.h"
#include "base/progress.h"
#include "format/tokens.h"

typedef struct lm_tokens_pool lm_tokens_pool;

/* Temporaries go to folder `dir`.  Documents come from `sources` sources, one after the other.  marked: ids have
 * LM_TOKENS_TRAINS set or not, for a writer with loss marks. */
lm_code lm_tokens_pool_new(const char *dir, int sources, int64_t vocab, bool marked,
                           lm_tokens_pool **out, lm_err *e);
void lm_tokens_pool_free(lm_tokens_pool *p);
/* Sources in rising order only.  LM_EFORMAT for an id that is not below vocab. */
lm_code lm_tokens_pool_add(lm_tokens_pool *p, int source, const uint32_t *ids, int64_t n,
                           lm_err *e);
int64_t lm_tokens_pool_docs(const lm_tokens_pool *p, int source);   /* -1: all */
int64_t lm_tokens_pool_tokens(const lm_tokens_pool *p, int source); /* -1: all */

typedef struct {
    bool shuffle; /* else in their original order */
    uint64_t seed;
    /* share of the ids by source, not negative; NULL: in proportion to their sizes */
    const double *weight;
    int64_t tokens;    /* total number; 0: with weights, the most without repetition */
    double max_epochs; /* most passes over a source; 0 = 1 */
} lm_tokens_mix;

/* Write a selection: from each source, documents in its own random order until its share of the ids
 * is reached (the last one complete), again from its start when `tokens` requires more; then all of
 * them shuffled together.  *taken (may be NULL) gets the documents by source. Fails: LM_EUSAGE if
 * weights cannot be met; as lm_tokens_put. */
lm_code lm_tokens_pool_write(lm_tokens_pool *p, const lm_tokens_mix *mix, lm_tokens_writer *w,
                             int64_t *taken, lm_sink *sink, lm_err *e);

#endif
