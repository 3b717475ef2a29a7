/* SPDX-License-Identifier: Apache-2.0 */
/* generation.h -- the sampling defaults of a model: generation_config.json, and every id that ends
 * a text.
 *
 * Read with the meaning of transformers: temperature, top_k, top_p, min_p, repetition_penalty,
 * max_new_tokens, do_sample (false: the most likely token), eos_token_id (an id or a list).  Other
 * keys belong to unsupported ways of decoding and are ignored; `others` counts those that would
 * change a text. */
#ifndef LM_MODEL_GENERATION_H
#define LM_MODEL_GENERATION_H

#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "model/config.h"

/* Absent: -1. */
typedef struct {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k, max_new;
    int64_t *eos; /* of config and generation config, each once; below the vocabulary */
    int n_eos;
    const char *others[8]; /* first keys without effect here (static strings) */
    int n_others;
} lm_generation;

/* `generation` is the tree of generation_config.json, NULL: none.  Fails: LM_EUSAGE naming `where`
 * and the key. */
lm_code lm_generation_read(const lm_config *config, const json_t *generation, const char *where,
                           lm_generation *out, lm_err *e);
void lm_generation_fini(lm_generation *g);

#endif
