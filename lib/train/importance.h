/* SPDX-License-Identifier: Apache-2.0 */
/* importance.h -- computes an importance matrix (format/imatrix.h): the model's forward pass over
 * calibration data, with the squares of each linear layer's input summed by column.
 *
 * The data are divided into independent chunks of `seq` tokens, as in llama-imatrix; an incomplete
 * last chunk is left out, unless it is the only one.  Head and embedding have no entry.  Computed
 * on the CPU in F32, all of the model in memory; the same numbers for any number of threads. */
#ifndef LM_TRAIN_IMPORTANCE_H
#define LM_TRAIN_IMPORTANCE_H

#include "convert/convert.h"
#include "format/imatrix.h"
#include "graph/backend.h"

typedef struct {
    int64_t seq;    /* tokens of a chunk; 0: 512, or the model's positions if fewer */
    int64_t chunks; /* most chunks; 0: all */
    /* refuse tokens that were not made for the model: lm_token_reader_check */
    bool check_tokenizer;
} lm_importance_opts;

/* `data` is a text or JSONL, also a folder or a pattern of them, in any form that input.h reads, which m's own tokenizer
 * cuts into tokens, or a dataset of tokens (tokens.h).  `b` is the CPU.  m serves its tensors in any order afterwards, too.
 * *out is yours.  Fails: LM_EUSAGE for a model without tokenizer, data of fewer than 2 tokens; LM_EIO,
 * LM_EFORMAT, LM_ELIMIT; LM_ENUMERIC when activations are not finite.  When lm_stopping(), *out is NULL
 * and the result LM_OK. */
lm_code lm_importance_make(lm_import *m, const char *data, const lm_importance_opts *o,
                           lm_backend *b, lm_imatrix **out, lm_err *e);

#endif
