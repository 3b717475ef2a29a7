/* SPDX-License-Identifier: Apache-2.0 */
/* chat_impl.h -- the parts of a chat template.  Private to lib/text. */
#ifndef LM_TEXT_CHAT_IMPL_H
#define LM_TEXT_CHAT_IMPL_H

#include "text/chat.h"

struct lm_chat {
    lm_jinja *plain, *with_tools; /* with_tools NULL: the same */
    json_t *tokens;               /* special tokens: names to text */
    char *where;
};

/* Append the text of a request; `marked` (may be NULL) gets the spans of generation blocks. */
lm_code lm_chat_text(const lm_chat *c, const lm_chat_request *q, lm_buf *out, lm_text_spans *marked,
                     lm_err *e);
/* The template that a request is rendered by. */
const lm_jinja *lm_chat_template(const lm_chat *c, const lm_chat_request *q);
/* Spans of the assistant's turns in `text`, the rendering of `q`, by difference of renderings. */
lm_code lm_chat_compare(const lm_chat *c, const lm_chat_request *q, lm_chat_turns turns,
                        const char *text, size_t len, size_t offset, lm_text_spans *marked,
                        lm_err *e);

#endif
