/* SPDX-License-Identifier: Apache-2.0 */
/* complete.h -- completes prompts: many at a time, returned in order, or as they end.
 *
 * A free slot of the generator gets the next prompt as soon as there is one; after the last prompt,
 * slots are moved together and a step has fewer rows.  A prompt may be answered several times
 * (samples): it runs once for as many of these as there are free slots.  The tokens of a sample
 * depend only on the seed, the numbers of prompt and sample and the position, not on other
 * sequences or the batch size (except for rounding, as a matrix product of more rows may sum in
 * another order).  Steps with drafts (lm_generator_opts.draft) draw other tokens of the same distribution; without
 * a temperature the same ones. */
#ifndef LM_MODEL_COMPLETE_H
#define LM_MODEL_COMPLETE_H

#include <stdbool.h>

#include "base/buf.h"
#include "model/generate.h"
#include "text/tokenizer.h"

typedef struct lm_completion {
    int64_t index;   /* number of the prompt, from 0 */
    int64_t sample;  /* number of its sample, from 0 */
    lm_ids ids;      /* the prompt, later the new tokens */
    size_t n_prompt; /* set by lm_complete_run */
    int64_t max_new; /* most new tokens */
    int64_t model;   /* that answers it, of those of a paged generator (lm_paged_part) */
    lm_buf prompt;   /* for the caller: its text, or its record */
    bool failed; /* set by `next`, or before `failed`: not completed; `done` is called in order */
    float *logprob; /* of each new token: natural log of its probability; NULL unless requested */
    lm_buf text;    /* of the new tokens, stop string excluded */
    size_t safe;    /* bytes of text that are final (no beginning of a stop string) */
    const char *finish;   /* "stop" (end of text or a stop string), "length", "context" (no room
                           left), "error" (failed); NULL: not yet */
    double first_seconds; /* from the reading of the prompt to the first new token */
    double read_at;       /* lm_now() when the prompt was read */
    int64_t drafted, accepted;    /* tokens, of steps with drafts */
    struct lm_completion *before; /* for the loop: another sample of the prompt */
    size_t cap_logprob;
    lm_tok_stream stream;
    int64_t slot;
} lm_completion;

typedef struct {
    lm_sample_attr sample;
    uint64_t seed;
    int64_t first;   /* the number of the first prompt: 0, or that of an earlier call's next one */
    int64_t samples; /* of each prompt, at least 1 */
    const int64_t *eos; /* n_eos ids, each of which ends a text */
    int n_eos;
    const char *const *stop;
    int n_stop;
    bool logprobs, skip_special;
    bool any_order; /* answers are handed back when they end */
} lm_complete_opts;

/* Each may be called repeatedly; ctx belongs to the caller.  next: fill c->ids, c->prompt,
 * c->max_new and c->model (all are empty then, and c->index is set), or c->prompt and c->failed; *got = false: at the end.
 * text: c->text has grown (only for the completion that done will be called for next; not with any_order;
 * may be NULL).  done: in the order of the prompts, and of their samples.  failed: the logits behind the last token of c
 * are not numbers, as `why` says: c->prompt becomes its answer, c->failed is set, and the others continue; NULL: such a
 * text ends the run with LM_ENUMERIC. */
typedef struct {
    lm_code (*next)(void *ctx, lm_completion *c, bool *got, lm_err *e);
    lm_code (*text)(void *ctx, lm_completion *c, lm_err *e);
    lm_code (*done)(void *ctx, lm_completion *c, lm_err *e);
    lm_code (*failed)(void *ctx, lm_completion *c, lm_err *why, lm_err *e);
    void *ctx;
    /* NULL, or instead of lm_generator_prompt: run the prompt ids[0..n) in a slot (lm_complete_run only). */
    lm_code (*begin)(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                     lm_err *e);
} lm_complete_hooks;

typedef struct {
    int64_t prompts, prompt_tokens, new_tokens; /* prompts: texts begun, each sample counted */
    double prompt_seconds, decode_seconds;
    int64_t steps, drafted, accepted; /* with drafts: of each text, and their tokens */
} lm_complete_stats;

/* Run until there are no more prompts, or lm_stopping().  Stats are added to *stats. */
lm_code lm_complete_run(lm_generator *g, const lm_tokenizer *tok, const lm_complete_opts *o,
                        const lm_complete_hooks *h, lm_complete_stats *st, lm_err *e);

#endif
