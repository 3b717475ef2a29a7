/* SPDX-License-Identifier: Apache-2.0 */
/* importance.h -- an importance matrix (format/imatrix.h) made here: the model's own forward pass over
 * calibration data, the squares of each linear layer's input added up column by column.
 *
 * The data are cut into chunks of `seq` tokens that see nothing of each other, as llama-imatrix does;
 * the rest that fills no chunk is left out, unless there is nothing else.  The head has no entry, nor
 * has the embedding.  Computed on the CPU in F32, all of the model in memory; the same numbers for any
 * number of threads. */
#ifndef LM_TRAIN_IMPORTANCE_H
#define LM_TRAIN_IMPORTANCE_H

#include "convert/convert.h"
#include "format/imatrix.h"
#include "graph/backend.h"

typedef struct {
    int64_t seq;    /* tokens of a chunk; 0: 512, or as many as the model has positions */
    int64_t chunks; /* at most so many; 0: all */
    bool
        check_tokenizer; /* refuse tokens that were not made for the model: lm_token_reader_check */
} lm_importance_opts;

/* `data` is a text or JSONL, also a folder or a pattern of them, in any form that input.h reads, which m's own tokenizer cuts into tokens, or
 * a dataset of tokens (tokens.h).  `b` is the CPU.  m serves its tensors in any order afterwards, too.
 * *out is yours.  Fails: LM_EUSAGE for a model without tokenizer, data of fewer than 2 tokens; LM_EIO,
 * LM_EFORMAT, LM_ELIMIT; LM_ENUMERIC when activations are not finite.  When lm_stopping(), *out is NULL
 * and the result LM_OK. */
lm_code lm_importance_make(lm_import *m, const char *data, const lm_importance_opts *o,
                           lm_backend *b, lm_imatrix **out, lm_err *e);

#endif
