/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_merges.h -- the merges of a byte-fallback BPE, which GGUF keeps as scores of tokens.
 * Private to lib/model. */
#ifndef LM_MODEL_GGUF_MERGES_H
#define LM_MODEL_GGUF_MERGES_H

#include "format/gguf.h"

/* tokenizer.ggml.token_type */
enum {
    LM_GGUF_NORMAL = 1,
    LM_GGUF_UNKNOWN,
    LM_GGUF_CONTROL,
    LM_GGUF_USER,
    LM_GGUF_UNUSED,
    LM_GGUF_BYTE
};

typedef struct {
    lm_gguf_text text;
    int type;
    float score;
} lm_gguf_token;

/* Tokens `left` and `right` become token `id`, which is their text together. */
typedef struct {
    uint32_t id, left, right;
    uint32_t n_left; /* bytes of the left one */
    float score;
} lm_gguf_merge;

/* Every way to cut a token of words into two of them is a merge, of the rank that the token's
 * score says: the highest first, ties in the order of the parts' numbers.  *out is yours
 * (lm_free).  Fails: LM_ELIMIT. */
lm_code lm_gguf_find_merges(const lm_gguf_token *tokens, size_t n, lm_gguf_merge **out,
                            size_t *n_out, lm_err *e);

#endif
