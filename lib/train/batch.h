/* SPDX-License-Identifier: Apache-2.0 */
/* batch.h -- one micro-batch of rows for a graph.
 *
 * The arrays are the host's side of mirrors: filled here, then pushed to where the graph reads
 * them. On the host's own memory a push does nothing. */
#ifndef LM_TRAIN_BATCH_H
#define LM_TRAIN_BATCH_H

#include "graph/exec.h"
#include "graph/mirror.h"
#include "model/model.h"
#include "train/feed.h"

/* Host arrays of B*T numbers, rows of one sequence together. */
typedef struct {
    int64_t batch, seq;
    int32_t *tokens, *targets, *pos, *lo, *hi;
    int32_t *types;   /* of tokens (lm_config.types): 0, but for windows of pairs (nsp.h) */
    int32_t *follows; /* labels of pairs [B] (lm_model.follows) */
    float *scale;     /* of each row's loss in the gradients; 0 until set */
    float *dvalue;    /* of each row's value (lm_build.value), likewise */
    float *dentropy;  /* of each row's entropy (LM_ENTROPY_TRAINS), likewise */
    float *daux;      /* of the losses of routers (lm_build.routing) [1], likewise */
    /* of modules that predict tokens further on (LM_AHEAD_RUNS): what each reads and predicts; and of each row's losses of
     * all of them, as above */
    int64_t ahead;
    int32_t *ahead_tokens[LM_MOST_AHEAD], *ahead_targets[LM_MOST_AHEAD];
    float *dahead;
    double *now; /* numbers of the step for the update, copied together with it */
    int n_now;
    int64_t valid;                      /* targets >= 0 */
    int64_t ahead_valid[LM_MOST_AHEAD]; /* the same of each module */
    /* With an encoder: rows of a source, and arrays for lm_model.source, source_hi and cross_hi. */
    int64_t source_rows;
    int32_t *source, *source_hi, *cross_hi;
    lm_mirror rooms; /* all of the above in one */
} lm_batch;

/* On the backend `on` (borrowed), with n_now numbers for the update. */
lm_code lm_batch_new(lm_batch *b, lm_backend *on, int64_t batch, int64_t seq, int n_now, lm_err *e);
/* The same for `ahead` modules. */
lm_code lm_batch_new_ahead(lm_batch *b, lm_backend *on, int64_t batch, int64_t seq, int n_now,
                           int64_t ahead, lm_err *e);
/* And with sources of an encoder of so many rows; 0: none. */
lm_code lm_batch_new_pairs(lm_batch *b, lm_backend *on, int64_t batch, int64_t seq, int n_now,
                           int64_t ahead, int64_t source_rows, lm_err *e);
void lm_batch_fini(lm_batch *b);
/* Bytes of one: on the host, and the same number on a device. */
size_t lm_batch_bytes(int64_t batch, int64_t seq, int n_now, int64_t ahead, int64_t source_rows);

/* Fill from windows [index, index + batch) of the feed; those from `end` on are empty (every target
 * -1). */
lm_code lm_batch_fill(lm_batch *b, lm_feed *f, int64_t index, int64_t end, lm_err *e);

/* The same as lm_batch_fill for `batch` windows from `index` on, but without ids: targets are 0 or
 * -1. */
void lm_batch_mark(lm_batch *b, lm_feed *f, int64_t index);

/* Fill what modules read and predict: module k in row i the token of row i + k + 1, and the target of that row; nothing if
 * it is beyond the window or the document, whose positions go on with 1. */
void lm_batch_fill_ahead(lm_batch *b);

/* Sequence i has a source of `length` real rows. */
void lm_batch_set_length(lm_batch *b, int64_t i, int64_t length);

/* One scale for all rows. */
void lm_batch_scale(lm_batch *b, float scale);
/* The same for the losses of each module. */
void lm_batch_scale_ahead(lm_batch *b, float scale);

/* Pairs of a query and a key that attention sees: inside documents, causal or on both sides of the query, and at most
 * `window` keys to a side, the query's own included (0: any number). */
int64_t lm_batch_pairs(const lm_batch *b, int64_t window, bool both);

/* Copy all arrays to the backend on stream `s` (NULL: main).  They must not change until that is
 * done, and earlier work on other streams must no longer read them. */
lm_code lm_batch_push(lm_batch *b, lm_stream *s, lm_err *e);

/* Bind the backend's side as the inputs of a TRAIN or EVAL model. */
void lm_batch_bind(const lm_batch *b, const lm_model *m, lm_exec *x);
/* The same with memory of the backend to which batches of this shape are copied (lm_batch_bytes);
 * and where in it the numbers `now` are. */
void lm_batch_bind_at(const lm_batch *b, void *dev, const lm_model *m, lm_exec *x);
double *lm_batch_now(const lm_batch *b, void *dev);

#endif
