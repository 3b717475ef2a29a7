/* SPDX-License-Identifier: Apache-2.0 */
/* chat.h -- generate --chat, and records with "messages": prompts made by the model's chat template. */
#ifndef LM_CMD_GENERATE_CHAT_H
#define LM_CMD_GENERATE_CHAT_H

#include "generate/work.h"

/* Room for a talk unless --context is given. */
enum { GENERATE_CHAT_CONTEXT = 8192 };

/* Rows of the option table. */
#define GENERATE_CHAT_OPTIONS(a)                                                                   \
    LM_GROUP("Chats"),                                                                             \
        LM_FLAG(0, "chat", &(a).talk, "talk: lines of standard input are answered, with history"), \
        LM_ALSO("interactive conversation"),                                                       \
        LM_STR(0, "chat-template", &(a).template, "NAME", "or a file [the model's own]"),          \
        LM_STR(0, "template-vars", &(a).vars, "JSON", "more variables of the template"),           \
        LM_ALSO("chat-template-kwargs"),                                                           \
        LM_STR(0, "system", &(a).system, "TEXT", "with --chat: the system's message"),             \
        LM_ALSO("system-prompt")

/* Refuse options that do not fit together, before anything is read. */
void generate_check_chat(void);
/* Read the template.  Without an option of chats, a model without template does not fail. */
lm_code generate_open_chat(generate_work *w, lm_err *e);
void generate_close_chat(generate_work *w);
/* Add the token with which the template closes an answer to the ids that end a text; *ids is borrowed. */
lm_code generate_chat_ends(generate_work *w, const int64_t **ids, int *n, lm_err *e);
/* The ids of a record with "messages". */
lm_code generate_chat_record(generate_work *w, const char *line, size_t len, const char *where,
                             lm_ids *ids, lm_err *e);

/* Read lines and answer each until the end of standard input.  h: the hooks of lm_complete_run; the next two are
 * its `next` and `begin`. */
lm_code generate_talk(generate_work *w, const lm_complete_opts *o, const lm_complete_hooks *h,
                      lm_err *e);
lm_code generate_chat_next(generate_work *w, lm_completion *c, bool *got, lm_err *e);
lm_code generate_chat_begin(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids,
                            int64_t n, lm_err *e);
/* The hook `done`: keep the answer. */
lm_code generate_chat_keep(generate_work *w, const lm_completion *c, lm_err *e);

#endif
