/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_meta.h -- meta.json, which shard-data writes beside the datasets 'train' and 'val'.  It
 * describes their ids, because the bytes of a nanoGPT shard do not, and a Megatron .bin without its
 * .idx looks like one.  The layout is in lm-tokens(5). */
#ifndef LM_FORMAT_TOKENS_META_H
#define LM_FORMAT_TOKENS_META_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json.h"
#include "format/tokens.h"

typedef struct {
    bool there; /* false: all other fields are void */
    lm_tokens_kind kind;
    int64_t vocab, eos, tokens; /* eos -1: none; tokens: of this dataset */
    lm_tokens_tokenizer tokenizer;
} lm_tokens_meta;

/* Read the description of the dataset `base` ('data/train') in the meta.json beside it.  out->there
 * is false when there is none, when another program wrote it, or when it does not describe this
 * dataset.  Fails: LM_EFORMAT if it is not JSON, or is ours and malformed. */
lm_code lm_tokens_meta_read(const char *base, lm_tokens_meta *out, lm_err *e);

/* Write the member "tokenizer" of the object open in `w`: null when `t` has no ids. */
void lm_tokens_meta_write_tokenizer(lm_jw *w, const lm_tokens_tokenizer *t);

#endif
