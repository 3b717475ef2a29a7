/* SPDX-License-Identifier: Apache-2.0 */
/* serve.h -- completes prompts by continuous batching: each step has the next token of every sequence that generates,
 * and parts of prompts beside them; a sequence that ends makes room at once (kv/sched.h, paged.h).
 *
 * An answer depends on the seed, the numbers of prompt and sample, and the prompt alone, to the bit of its
 * log-probabilities: not on the memory, the number of sequences or what else is completed.  It may differ in the last
 * bits from that of lm_complete_run, whose steps have fewer rows.  Private to lib/model. */
#ifndef LM_MODEL_SERVE_H
#define LM_MODEL_SERVE_H

#include "kv/sched.h"
#include "model/complete.h"
#include "model/paged.h"

/* Run until there are no more prompts, or lm_stopping(); `g` was made with *o, whose pages all are free.  Stats are
 * added to *stats, those of the scheduler to *sched (may be NULL).  Fails: LM_ELIMIT for a prompt that with its answer
 * takes more than all pages. */
lm_code lm_serve_run(lm_paged *g, const lm_paged_opts *o, const lm_tokenizer *tok,
                     const lm_complete_opts *how, const lm_complete_hooks *h, lm_complete_stats *st,
                     lm_sched_stats *sched, lm_err *e);

#endif
