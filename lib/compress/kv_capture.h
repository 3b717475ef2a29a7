/* SPDX-License-Identifier: Apache-2.0 */
/* kv_capture.h -- the queries, keys and values of a model's layers on windows of tokens, before and
 * after their rotation by positions, and the gradients of the loss: what calibrations and reports
 * of caches are computed from.
 *
 * Runs in F32 in memory of the host, one window at a time.  Private to lib/compress. */
#ifndef LM_COMPRESS_KV_CAPTURE_H
#define LM_COMPRESS_KV_CAPTURE_H

#include "kv/store.h"
#include "model/loaded.h"

typedef struct lm_kv_capture lm_kv_capture;

/* Build for `w` with windows of `seq` tokens, and load its weights if it has none yet.  gradients:
 * those of the loss are computed, too.  w and b are borrowed.  Fails: LM_EUSAGE when seq exceeds
 * the positions of the model, or the memory of b is not the host's; as lm_loaded_weights. */
lm_code lm_kv_capture_new(lm_loaded *w, int64_t seq, bool gradients, lm_backend *b,
                          lm_kv_capture **out, lm_err *e);
void lm_kv_capture_free(lm_kv_capture *c);
/* The memory that this needs: of the weights, and of the numbers of a window. */
lm_code lm_kv_capture_bytes(lm_loaded *w, int64_t seq, bool gradients, lm_backend *b,
                            double *weights, double *window, lm_err *e);

/* Run a window ids [seq], and add the loss of its tokens behind the first one to *nll (may be
 * NULL).  Fails: LM_ENUMERIC when the loss is not a number. */
lm_code lm_kv_capture_run(lm_kv_capture *c, const uint32_t *ids, double *nll, lm_err *e);

/* One layer of the last window, as wide as queries, keys and values: [seq,(H+2K)D]. */
typedef struct {
    const float *before, *rotated; /* the same where a model does not rotate */
    const float *gradient;         /* of the window's loss, by `before`; NULL: not computed */
} lm_kv_captured;
lm_kv_captured lm_kv_capture_layer(const lm_kv_capture *c, int64_t layer);

/* Copy n of seq tokens' `width` columns from column `from` of rows. */
void lm_kv_columns(const float *rows, int64_t row_width, int64_t from, int64_t width, int64_t n,
                   float *out);
/* Rotate keys k [n, K*D] of a layer, whose positions are 0 to n - 1, as the model does. */
void lm_kv_capture_rotate(const lm_kv_capture *c, int64_t layer, int64_t n, float *k);

/* How far channels of the layer's keys, as attention reads them, exceed the others in the last
 * window: the largest of the root mean squares of a head's channels over their median, of the head
 * where this is largest.  *out is infinite when a median is 0. */
lm_code lm_kv_capture_outliers(const lm_kv_capture *c, int64_t layer, double *out, lm_err *e);

/* The attention of a layer, as its definition sees it. */
lm_kv_attention lm_kv_attention_of(const lm_config *config, int64_t layer);

#endif
