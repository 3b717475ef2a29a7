/* SPDX-License-Identifier: Apache-2.0 */
/* kv_calibrate.h -- a calibration (kv/data.h) of a model on tokens: windows run through it, one after another, and the
 * keys before their rotation, the values and the squares of the gradients by both are kept.
 *
 * ranges, tables   KVQuant (kv/kvquant.h), of all windows
 * scales           of FP8: the largest magnitude of keys as they are stored, and of values, over 448; those of the
 *                  checkpoint instead where it has them ("model.layers.N.self_attn.k_scale", "v_scale", or of k_proj and
 *                  v_proj)
 * errors           of the candidates for `auto`, over the first windows
 * weights          the digest of the model's weights, if the model has a source
 *
 * Memory: four numbers for each number of the keys and values of all tokens. */
#ifndef LM_COMPRESS_KV_CALIBRATE_H
#define LM_COMPRESS_KV_CALIBRATE_H

#include "base/progress.h"
#include "kv/data.h"
#include "kv/kvquant.h"
#include "model/loaded.h"

/* The largest number of FP8 with 4 bits of exponent, and the candidates that are usual. */
#define LM_KV_FP8_MOST   448.0
#define LM_KV_CANDIDATES "bf16;int8;int4;int2;q8_0;q4_0;fp8"

typedef struct {
    lm_kvquant_opts levels;
    bool heads;             /* a scale for each head, not for each layer */
    const char *candidates; /* NULL: no errors */
    int64_t
        error_tokens; /* errors are those of the first tokens of this many, in whole windows, of at least one */
    const uint32_t *ids; /* [windows, seq], borrowed */
    int64_t windows, seq;
    lm_par *par;   /* threads; NULL: this one */
    lm_sink *sink; /* progress; may be NULL */
} lm_kv_calibrate_opts;

/* Make the calibration; b has the memory of the host, path is that of lm_kv_data.  *nll (may be NULL): the mean loss on the
 * windows.  The caller frees *out with lm_kv_data_free; NULL without failure when lm_stopping().
 * Fails: LM_EUSAGE for candidates that are not one method each, LM_ENUMERIC for numbers that are not finite. */
lm_code lm_kv_calibrate(lm_loaded *w, const lm_kv_calibrate_opts *o, const char *path,
                        lm_backend *b, double *nll, lm_kv_data **out, lm_err *e);

#endif
