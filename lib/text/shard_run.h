/* SPDX-License-Identifier: Apache-2.0 */
/* shard_run.h -- a stream of documents, or a token dataset, into the pools of the two splits.
 *
 * Tokenising runs on all threads; documents enter the pools in their order, so the output is the
 * same for any number of threads.  The split of a document is a function of its bytes alone: copies
 * of a document get the same split, also in later versions of the data, and a larger fraction
 * includes all documents of a smaller one.  A contiguous split cuts every document in two instead:
 * of n characters (of ids when a token dataset is read) the first floor(n * (1 - val_fraction))
 * train, the others are held out. */
#ifndef LM_TEXT_SHARD_RUN_H
#define LM_TEXT_SHARD_RUN_H

#include "base/par.h"
#include "base/progress.h"
#include "format/input.h"
#include "format/tokens.h"
#include "format/tokens_pool.h"
#include "text/example.h"
#include "text/tokenizer.h"

enum { LM_SPLIT_TRAIN, LM_SPLIT_VAL, LM_SPLITS };

typedef struct {
    double val_fraction;
    bool contiguous;
    int64_t eos; /* -1: no id is added or removed */
    /* llm.c: documents begin with it; otherwise they end with it */
    bool eos_first;
    bool add_special; /* apply the tokenizer's post-processor */
    /* Records as examples instead of plain texts (example.h); NULL: texts.  Pools are then
     * marked. */
    const lm_text_example_maker *maker;
    const lm_text_record_map *map;   /* may be NULL */
    bool masked;                     /* of token datasets: loss marks are copied to marked pools */
    lm_tokens_pool *pool[LM_SPLITS]; /* pool[LM_SPLIT_VAL] NULL when val_fraction is 0 */
    lm_sink *sink;
} lm_shard_job;

typedef struct {
    int64_t documents, bytes;  /* of text */
    int64_t skipped, replaced; /* invalid UTF-8 */
    int64_t trained;           /* records: ids that train */
    int64_t silent, dropped;   /* records left out: without such an id, and too long */
} lm_shard_stats;

/* Text.  Fails: as lm_input_next, lm_doc_decode, lm_tokenizer_encode, lm_tokens_pool_add. */
lm_code lm_shard_text(const lm_shard_job *job, lm_input *in, const lm_input_opts *in_opts,
                      const lm_tokenizer *tok, lm_par *par, lm_shard_stats *st, lm_err *e);
/* An indexed token dataset (lm_tokens_index); it becomes source number `source`. */
lm_code lm_shard_tokens(const lm_shard_job *job, const lm_tokens *t, int source, lm_shard_stats *st,
                        lm_err *e);

#endif
