/* SPDX-License-Identifier: Apache-2.0 */
/* data.h -- files of calibrations: what a method measured on text of its domain, by layer and side.
 *
 * A safetensors file.  __metadata__: format "kv-calibration", version "1", weights and config
 * (digests of the model's weights and settings, as in kv/file.h; "": unknown), outliers (their
 * share), candidates.  Tensors, F32, N counts layers from 0, all optional:
 *   layers.N.k.lower, .upper [K,D]    ranges of channels of keys (KVQuant)
 *   layers.N.k.table, layers.N.v.table [2^bits]    levels, rising
 *   layers.N.k.scale, layers.N.v.scale [1] or [K]    of FP8, of the layer or of each head
 *   layers.N.v.outliers [K]    share of a head's values outside of the ranges of their tokens (KVQuant)
 *   layers.N.k.errors, layers.N.v.errors [candidates]    error of the attention's output with each candidate, to be
 *                                                        added over layers and sides (method auto)
 * and in __metadata__ candidates: their specifications, "int8;int4", each one method; data: XXH3-128 of the bytes of all
 * tensors in their order; header: XXH3-128 of all else that the header says, as in kv-cache(5). */
#ifndef LM_KV_DATA_H
#define LM_KV_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"

/* Of the keys or values of a layer; NULL, 0: not there. */
typedef struct {
    const float *lower, *upper; /* [kv_heads, head_dim] */
    int64_t kv_heads, head_dim;
    const float *table; /* [2^bits] */
    int bits;
    const float *scale; /* [scales] */
    int64_t scales;
    const float *outside; /* [heads] */
    int64_t heads;
    const float *errors; /* [candidates] */
    int64_t candidates;
} lm_kv_numbers;

typedef struct {
    int64_t layers;      /* the last layer of a tensor, and 1 */
    lm_kv_numbers *side; /* [layers][2]: keys, values */
    double outliers;
    const char *weights, *config;
    const char *candidates;
    const char *path;
    lm_arena *arena; /* holds all of it */
} lm_kv_data;

enum { LM_KV_MAX_LAYERS = 100000 };

/* An object to fill, for a number of layers.  The caller frees *out with lm_kv_data_free. */
lm_code lm_kv_data_new(int64_t layers, const char *path, lm_kv_data **out, lm_err *e);
void lm_kv_data_free(lm_kv_data *d);
/* Fails: LM_EIO, LM_EFORMAT naming the tensor that is unknown, has a wrong shape or numbers that do
 * not fit, and for a wrong checksum. */
lm_code lm_kv_data_read(const char *path, lm_kv_data **out, lm_err *e);
/* LM_EUSAGE if it was measured on another model than that of these digests. */
lm_code lm_kv_data_check(const lm_kv_data *d, const char *weights, const char *config, lm_err *e);
lm_code lm_kv_data_write(const lm_kv_data *d, const char *path, bool force, lm_err *e);

#endif
