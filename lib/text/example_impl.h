/* SPDX-License-Identifier: Apache-2.0 */
/* example_impl.h -- shared by example.c, whose examples are one text, and example_pair.c, whose examples are two.
 * Private to lib/text. */
#ifndef LM_TEXT_EXAMPLE_IMPL_H
#define LM_TEXT_EXAMPLE_IMPL_H

#include "text/example.h"

struct lm_text_example_scratch {
    lm_tok_scratch *tok;
    lm_ids lead; /* what the tokenizer puts in front of a text */
    lm_buf text, before;
    lm_text_spans spans;
};

/* Append n ids with one mark. */
lm_code example_add_ids(lm_text_example *x, const uint32_t *ids, size_t n, uint8_t trains,
                        lm_err *e);
/* The maker's virtual tokens, which do not train. */
lm_code example_add_virtual(const lm_text_example_maker *m, lm_text_example *x, lm_err *e);
/* x->trains and x->trained follow from the marks. */
void example_count_trained(lm_text_example *x);
/* Prompt and answer as messages: *all is both; s->before the rendered prompt, ended by the header of an answer, s->text both
 * rendered.  True through *follows when the answer follows the prompt in the text.  Fails: LM_EUSAGE without template; as
 * lm_chat_render. */
lm_code example_render_reply(const lm_text_example_maker *m, lm_text_example_scratch *s,
                             const lm_text_record *r, const json_t *prompt, const json_t *answer,
                             json_t **all, bool *follows, lm_err *e);
/* A text as a list of one message, when plain records are wrapped; anything else is the same.  *out is the caller's. */
lm_code example_wrap(const lm_text_example_maker *m, const char *role, const json_t *v,
                     json_t **out, lm_err *e);
/* The steps of a STEPWISE record as one text, the caller's. */
lm_code example_join_steps(const lm_text_record *r, json_t **out, lm_err *e);
/* Where the assistant's last message is in the list; -1: it has none. */
int64_t example_last_answer(const json_t *messages);

/* ---- example_pair.c ---- */

/* lm_text_example_make of makers with `pair`. */
lm_code example_make_pair(const lm_text_example_maker *m, lm_text_example_scratch *s,
                          const lm_text_record *r, lm_text_example *out, lm_err *e);

#endif
