/* SPDX-License-Identifier: Apache-2.0 */
/* kv_retrieve.h -- whether a generator finds in its cache what a question asks for.
 *
 * A task is a text of tokens: a context that holds the answer somewhere, a question, the answer.
 * The context runs as a prompt, the question is decoded one token at a time, so that the answer can
 * only come from the cache as it is stored.  The task is solved when each token of the answer is
 * the likeliest one.  Tasks are counted by cell, of a map over length and depth.
 */
#ifndef LM_COMPRESS_KV_RETRIEVE_H
#define LM_COMPRESS_KV_RETRIEVE_H

#include "model/generate.h"

typedef struct {
    const uint32_t *ids;               /* borrowed */
    int64_t context, question, answer; /* tokens of each, at least 1 */
    int64_t cell;
} lm_kv_task;

/* Run n tasks, as many at a time as g has slots, and add the solved ones to solved[cell].  Ends
 * early when lm_stopping(), with *done tasks counted (may be NULL).  Fails: LM_EUSAGE for a task
 * longer than the context of g; LM_ENUMERIC for logits that are not numbers. */
lm_code lm_kv_retrieve(lm_generator *g, const lm_kv_task *task, int64_t n, int64_t *solved,
                       int64_t *done, lm_err *e);

#endif
