/* SPDX-License-Identifier: Apache-2.0 */
/* data.h -- the datasets of a training, opened and checked. */
#ifndef LM_TRAIN_DATA_H
#define LM_TRAIN_DATA_H

#include "base/par.h"
#include "format/folder.h"
#include "format/tokens.h"

/* Where `data` keeps its tokens: a folder holds train (always named) and val (when val.bin is
 * there), anything else is the training data itself.  `val` (may be NULL) goes before that.
 * *val_out is NULL when there is no validation data.  Both are yours. */
lm_code lm_data_find(const char *data, const char *val, char **train_out, char **val_out,
                     lm_err *e);

/* Open and index a dataset for windows of `seq` tokens.  Fails: LM_EUSAGE when it is too short,
 * LM_EFORMAT when an id is not below `vocab`, and as lm_tokens_open. */
lm_code lm_data_open(const char *path, int64_t vocab, int64_t eos, int64_t seq, lm_par *par,
                     lm_tokens **out, lm_err *e);

/* Bytes of text that each id stands for, [vocab], from the tokenizer of the model; *out = NULL when
 * it has none. */
lm_code lm_data_id_bytes(lm_model_source *m, int64_t vocab, uint16_t **out, lm_err *e);

#endif
