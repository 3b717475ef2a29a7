/* SPDX-License-Identifier: Apache-2.0 */
/* data.h -- the datasets of a training, opened and checked. */
#ifndef LM_TRAIN_DATA_H
#define LM_TRAIN_DATA_H

#include "base/par.h"
#include "format/folder.h"
#include "format/tokens.h"

/* The datasets of `data`: for a folder those of lm_tokens_in_folder (train, and val if it exists,
 * in any format); anything else is the training data itself.  `val` (may be NULL) overrides the
 * folder's.  *val_out is NULL without validation data.  The caller frees both.  Fails: LM_EUSAGE,
 * LM_EIO. */
lm_code lm_data_find(const char *data, const char *val, char **train_out, char **val_out,
                     lm_err *e);

typedef struct {
    lm_tokens_kind kind; /* AUTO: detected by lm_tokens_open */
    int64_t vocab, eos;  /* of the model */
    int64_t seq;         /* tokens in a window */
    lm_model_source *m;  /* the model that the data must belong to; NULL: not checked */
} lm_data_opts;

/* Check that there is text, or a token dataset, at `path`; fails like opening it otherwise.  Checks
 * inputs before long work begins. */
lm_code lm_data_there(const char *path, lm_err *e);

/* Open, check and index a dataset.  Fails: LM_EUSAGE when it is too short; as lm_token_reader_check when
 * it does not belong to the model (as lm_tokenizer_of, when the data say which tokenizer it should have);
 * LM_EFORMAT when an id of its first or last window is not below `vocab` (a feed checks the others as
 * it reads them); and as lm_tokens_open. */
lm_code lm_data_open(const char *path, const lm_data_opts *o, lm_par *par, lm_tokens **out,
                     lm_err *e);

/* A number that tells datasets apart without reading them whole: of the size, and of ids at 64 places from the first to the
 * last.  Fails: as lm_tokens_read. */
lm_code lm_data_digest(const lm_tokens *data, uint64_t *out, lm_err *e);

/* Bytes of text that each id stands for, [vocab], from the tokenizer of the model; *out = NULL when
 * it has none. */
lm_code lm_data_id_bytes(lm_model_source *m, int64_t vocab, uint16_t **out, lm_err *e);

#endif
