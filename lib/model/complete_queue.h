/* SPDX-License-Identifier: Apache-2.0 */
/* complete_queue.h -- prompts as they are read, and their completions until each has been handed back, in
 * the order of the prompts or as they end.  Shared by the loops that choose the tokens.  Private to lib/model. */
#ifndef LM_MODEL_COMPLETE_QUEUE_H
#define LM_MODEL_COMPLETE_QUEUE_H

#include "base/stop.h"
#include "model/complete_text.h"

typedef struct {
    const lm_complete_opts *o;
    const lm_complete_hooks *h;
    lm_text_rules rules;
    lm_completion *place; /* [size] */
    /* [size]: the n that are not handed back, in the order of the prompts; then free places */
    lm_completion **live;
    int64_t size, n;
    int64_t prompts;      /* number taken so far */
    lm_completion asked;  /* ids, prompt and max_new of the prompt with samples left */
    int64_t sample, left; /* its next sample; samples not begun yet */
    bool ended;           /* no further prompt */
} lm_complete_queue;

/* For up to `width` texts that grow at the same time.  Call fini also after a failure. */
lm_code lm_complete_queue_init(lm_complete_queue *q, const lm_tokenizer *tok,
                               const lm_complete_opts *o, const lm_complete_hooks *h,
                               int64_t context, int64_t width, lm_err *e);
void lm_complete_queue_fini(lm_complete_queue *q);

/* Read the next prompt to q->asked and set q->left, its samples to begin.  A prompt that failed goes to the
 * queue at once, as its own answer. */
lm_code lm_complete_queue_read(lm_complete_queue *q, lm_err *e);
/* Add the next sample of q->asked to the queue, with memory for its answer.  *out stays where it is until it is handed
 * back. */
lm_code lm_complete_queue_begin(lm_complete_queue *q, lm_completion **out, lm_err *e);
/* Append a token to c as lm_completion_take does; a text whose logits are not numbers ends, if there is a hook for it. */
lm_code lm_complete_queue_take(lm_complete_queue *q, lm_completion *c, int32_t id,
                               const double *logprob, lm_err *e);
/* Hand back the finished texts: all with any_order, otherwise up to the first one that is not finished. */
lm_code lm_complete_queue_hand_back(lm_complete_queue *q, lm_err *e);

/* True if there is room for a text, and no stop was requested. */
static inline bool lm_complete_queue_may_begin(const lm_complete_queue *q)
{
    return q->n < q->size && !lm_stopping();
}
/* True if samples or prompts may be left. */
static inline bool lm_complete_queue_has_more(const lm_complete_queue *q)
{
    return q->left || !q->ended;
}

#endif
