/* batch.h -- one micro-batch of rows on its way into a graph. */
#ifndef LM_TRAIN_BATCH_H
#define LM_TRAIN_BATCH_H

#include "graph/exec.h"
#include "model/model.h"
#include "train/feed.h"

/* Host arrays of B*T numbers, rows of one sequence together. */
typedef struct {
    int64_t batch, seq;
    int32_t *tokens, *targets, *pos, *lo;
    int64_t valid; /* targets >= 0 */
} lm_batch;

lm_code lm_batch_new(lm_batch *b, int64_t batch, int64_t seq, lm_err *e);
void lm_batch_fini(lm_batch *b);

/* Fill from windows [index, index + batch) of the feed; those at `end` and later are left empty
 * (every target -1). */
lm_code lm_batch_fill(lm_batch *b, lm_feed *f, int64_t index, int64_t end, lm_err *e);

/* Bind the arrays as the inputs of a TRAIN or EVAL model. */
void lm_batch_bind(const lm_batch *b, const lm_model *m, lm_exec *x, float *scale);

#endif
