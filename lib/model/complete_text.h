/* SPDX-License-Identifier: Apache-2.0 */
/* complete_text.h -- the text of a completion grows by tokens, up to its end: ids that end a text, stop strings,
 * the most new tokens, the context.  Shared by the loops that choose the tokens.  Private to lib/model. */
#ifndef LM_MODEL_COMPLETE_TEXT_H
#define LM_MODEL_COMPLETE_TEXT_H

#include "model/complete.h"

/* What decides where a text ends. */
typedef struct {
    const lm_tokenizer *tok;
    const lm_complete_opts *o;
    int64_t context;     /* most tokens of prompt and answer in the caches */
    size_t longest_stop; /* bytes of the longest stop string */
} lm_text_rules;

lm_text_rules lm_text_rules_of(const lm_tokenizer *tok, const lm_complete_opts *o, int64_t context);

/* Empty c for another prompt; its memory stays. */
void lm_completion_clear(lm_completion *c);
void lm_completion_fini(lm_completion *c);
/* c->ids are those of the prompt: set n_prompt, and reserve memory for the longest answer. */
lm_code lm_completion_reserve(const lm_text_rules *r, lm_completion *c, lm_err *e);
/* Append the token `id`, and set c->finish if it is the last one.  logprob: of this token; NULL: not requested.
 * Fails: LM_ENUMERIC for id < 0, which stands for logits that are not numbers. */
lm_code lm_completion_take(const lm_text_rules *r, lm_completion *c, int32_t id,
                           const double *logprob, lm_err *e);
/* The draw for its next token. */
double lm_completion_draw(const lm_text_rules *r, const lm_completion *c);
/* The same for the token `ahead` behind that, for another purpose than "sample". */
double lm_completion_draw_for(const lm_text_rules *r, const lm_completion *c, const char *purpose,
                              int64_t ahead);

#endif
