/* SPDX-License-Identifier: Apache-2.0 */
/* validate.h -- the loss of weights in memory on held-out sets, one for each distribution.
 *
 * A validation set is a token dataset as shard-data writes it, or text (plain, JSONL, compressed)
 * that the model's tokenizer encodes once.  The loss is that of eval-model with the same window,
 * stride and type of computing: each token once, no context from another document. */
#ifndef LM_MERGE_VALIDATE_H
#define LM_MERGE_VALIDATE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/progress.h"
#include "graph/backend.h"
#include "model/config.h"
#include "numeric/dtype.h"
#include "text/tokenizer.h"

typedef struct {
    const char *const *path; /* the sets */
    int sets;
    const lm_tokenizer *tok; /* for text, and for the end of a document; NULL: none */
    bool check_tokenizer;    /* refuse shards made with another tokenizer than `tok` */
    int64_t seq;             /* window; 0: 1024, or the model's context if it is smaller */
    int64_t stride;          /* 0: half a window */
    int64_t batch;           /* windows at a time; 0: 8 */
    int64_t max_tokens;      /* tokens of each set that are scored; 0: all */
    lm_dtype dtype;          /* computing: F32, BF16 */
    lm_par *par;             /* host threads (borrowed); NULL: the backend's */
} lm_validator_opts;

typedef struct lm_validator lm_validator;

/* Open the sets and allocate the weights of `c` in memory of b.  o, c and b are borrowed.  Fails:
 * LM_EUSAGE for text without a tokenizer and, with check_tokenizer, as lm_token_reader_check;
 * LM_EFORMAT for ids beyond the vocabulary or a set without two tokens, LM_EIO, LM_ELIMIT. */
lm_code lm_validator_new(const lm_validator_opts *o, const lm_config *c, lm_backend *b,
                         lm_validator **out, lm_err *e);
void lm_validator_free(lm_validator *v);
/* Scored tokens of a set. */
int64_t lm_validator_tokens(const lm_validator *v, int set);

/* The window and stride used. */
int64_t lm_validator_seq(const lm_validator *v);
int64_t lm_validator_stride(const lm_validator *v);

/* True if the model has a tensor of that name. */
bool lm_validator_wants(const lm_validator *v, const char *name);
/* Set a tensor of the weights: count elements of `dtype` in the file's shape.  Known tensors that
 * are not weights of the model are ignored.  Fails: LM_EFORMAT for a tensor that does not belong to
 * the model, or has another shape. */
lm_code lm_validator_put(lm_validator *v, const char *name, int ndim, const int64_t *dim,
                         lm_dtype dtype, const void *data, lm_err *e);
/* Loss of each set in nats per token (possibly NaN), with the weights set last.  Fails: LM_EFORMAT
 * naming a tensor that was never set. */
lm_code lm_validator_run(lm_validator *v, double *loss, lm_sink *sink, lm_err *e);
/* The objective: mean of the sets' losses weighted by their tokens, or equally. */
double lm_validator_mean(const lm_validator *v, const double *loss, bool equal);

#endif
