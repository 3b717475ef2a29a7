/* SPDX-License-Identifier: Apache-2.0 */
/* kv_calibrate.h -- a calibration (kv/data.h) of a model on tokens.
 *
 * Windows run through the model one after another, and only sums and extremes of their numbers are
 * kept:
 *
 * ranges, tables   KVQuant (kv/kvquant.h): of keys before their rotation, and of values.  The windows run twice: for the
 *                  ranges, and with gradients for the levels
 * scales           of FP8: the largest magnitude of keys as they are stored, and of values, over 448; those of the
 *                  checkpoint instead where it has them ("model.layers.N.self_attn.k_scale", "v_scale", or of k_proj and
 *                  v_proj)
 * errors           of the candidates for `auto`, by some queries of each window
 * weights          the digest of the model's weights, if the model has a source */
#ifndef LM_COMPRESS_KV_CALIBRATE_H
#define LM_COMPRESS_KV_CALIBRATE_H

#include "base/progress.h"
#include "kv/data.h"
#include "kv/kvquant.h"
#include "model/loaded.h"

/* The largest number of FP8 with 4 bits of exponent, and the candidates that are usual. */
#define LM_KV_FP8_MOST   448.0
#define LM_KV_CANDIDATES "bf16;int8;int4;int2;q8_0;q4_0;fp8"

/* Queries of a window by which the errors of candidates are measured (kv/store.h). */
enum { LM_KV_ERROR_QUERIES = 64 };

typedef struct {
    lm_kvquant_opts levels; /* bits 0: no ranges and tables */
    bool scales, heads;     /* FP8 scales of each layer, or of each head */
    const char *candidates; /* NULL: no errors */
    const uint32_t *ids;    /* [windows, seq], borrowed */
    int64_t windows, seq;
    lm_par *par;   /* threads; NULL: this one */
    lm_sink *sink; /* progress, and the memory that is needed; may be NULL */
} lm_kv_calibrate_opts;

/* Make the calibration; b has the memory of the host, path is that of lm_kv_data.  *nll (may be
 * NULL): the mean loss on the windows.  The caller frees *out with lm_kv_data_free; NULL without
 * failure when lm_stopping().  Fails: LM_EUSAGE for candidates that are not one method each,
 * LM_ENUMERIC for numbers that are not finite. */
lm_code lm_kv_calibrate(lm_loaded *w, const lm_kv_calibrate_opts *o, const char *path,
                        lm_backend *b, double *nll, lm_kv_data **out, lm_err *e);

#endif
