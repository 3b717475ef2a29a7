/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_meta.h -- meta.json, which shard-data writes beside the datasets 'train' and 'val' and which says
 * what their ids are: the bytes of a nanoGPT shard do not, and a Megatron .bin without its .idx looks like
 * one.  The layout is in lm-tokens(5). */
#ifndef LM_FORMAT_TOKENS_META_H
#define LM_FORMAT_TOKENS_META_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json.h"
#include "format/tokens.h"

typedef struct {
    bool there; /* else all else is of no account */
    lm_tokens_kind kind;
    int64_t vocab, eos, tokens; /* eos -1: none; tokens: of this dataset */
    lm_tokens_tokenizer tokenizer;
} lm_tokens_meta;

/* What the meta.json beside the dataset `base` ('data/train') says about it.  out->there is false when
 * there is none, when it is of another program, or does not speak of this dataset.  Fails: LM_EFORMAT if
 * it is no JSON, or is ours and malformed. */
lm_code lm_tokens_meta_read(const char *base, lm_tokens_meta *out, lm_err *e);

/* The member "tokenizer" of the object that `w` is in: null when `t` has no ids. */
void lm_tokens_meta_write_tokenizer(lm_jw *w, const lm_tokens_tokenizer *t);

#endif
