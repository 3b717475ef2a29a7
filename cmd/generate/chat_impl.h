/* SPDX-License-Identifier: Apache-2.0 */
/* chat_impl.h -- what chat.c and talk.c share. */
#ifndef LM_CMD_GENERATE_CHAT_IMPL_H
#define LM_CMD_GENERATE_CHAT_IMPL_H

#include "generate/work.h"
#include "text/chat.h"

struct generate_chat {
    lm_chat *form; /* NULL: the model has no template that can be read, for this reason: */
    lm_err why;
    json_t *vars;     /* of --template-vars; NULL: none */
    int64_t end;      /* the token that closes an answer, -1: none */
    int64_t *ends;    /* with those of the model */
    json_t *messages; /* --chat: what was said so far */
    lm_ids held;      /* the tokens of the cache's slot */
    lm_buf line;      /* as typed */
    bool asked;       /* the last message waits for its answer */
};

/* --chat: the first messages. */
lm_code generate_begin_talk(generate_work *w, lm_err *e);
/* Render a request and append its ids, behind the virtual tokens of the adapter. */
lm_code generate_chat_encode(generate_work *w, const lm_chat_request *q, lm_ids *ids, lm_err *e);

#endif
