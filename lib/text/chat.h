/* SPDX-License-Identifier: Apache-2.0 */
/* chat.h -- from messages to the text of a model, by its chat template.
 *
 * Messages are JSON objects with "role" and "content" (text, or a list of parts), and what a
 * template reads besides: "tool_calls", "name", "reasoning_content", ...  Rendering follows
 * apply_chat_template of `transformers` 5.x: keys with null are dropped; "reasoning_content",
 * "thinking" and "reasoning" are one field under three names; the tokenizer's special tokens
 * (bos_token, eos_token, ...) are variables, as are `tools`, `documents` (null without any),
 * add_generation_prompt, and those of `vars`, which take precedence over tokens.
 *
 * The text holds its special tokens: encode it without adding more (lm_chat_encode does). */
#ifndef LM_TEXT_CHAT_H
#define LM_TEXT_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "format/folder.h"
#include "text/jinja.h"
#include "text/tokenizer.h"

/* ---- Built-in templates ---- */

/* The names of built-in templates, NULL-terminated, and the Jinja text of a name; NULL: unknown.
 *   alpaca   "### Instruction:", "### Input:" (role user_context) and "### Response:", each followed
 *            by its text and an empty line; the system's text first.  tatsu-lab/stanford_alpaca
 *   chatml   <|im_start|>ROLE, newline, text, <|im_end|>, newline.  OpenAI's ChatML
 *   exaone   [|ROLE|]text; a user's turn ends with a newline, others with [|endofturn|] before it;
 *            an empty system's turn if the messages have no system's.  LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct
 *   llama3   <|start_header_id|>ROLE<|end_header_id|>, empty line, text, <|eot_id|>; the first turn
 *            behind the token that begins a text.  meta-llama/Meta-Llama-3-8B-Instruct
 *   mistral  the same token, [INST] text [/INST] answer, the token that ends a text; the system's
 *            text, and an empty line, before that of the first user; roles must take turns.
 *            mistralai/Mistral-7B-Instruct-v0.2 */
extern const char *const lm_chat_names[];
const char *lm_chat_named(const char *name);

/* ---- The template of a model ---- */

typedef struct lm_chat lm_chat;

/* The chat template of a model, with the special tokens of its tokenizer_config.json (or special_tokens_map.json).
 * `want`: NULL, the model's own: chat_template.jinja, else chat_template of tokenizer_config.json (text, or a list of
 * named ones: "tool_use" for requests with tools, "default" otherwise); the name of one of its templates (also,
 * of a folder, additional_chat_templates/NAME.jinja) or of a built-in one; the path of a file.
 * `m` may be NULL when `want` is given.  `t` (may be NULL): the tokenizer in use, whose tokenizer_config.json has the
 * special tokens; without one, those of the model's files.
 * Fails: LM_EUSAGE when the model has none (names the built-in ones) or the name is unknown; LM_EFORMAT
 * for a template that does not compile. */
lm_code lm_chat_open(lm_model_source *m, const lm_tokenizer *t, const char *want, lm_chat **out,
                     lm_err *e);
/* From text; `tokens` (may be NULL): an object with the special tokens, names to text. */
lm_code lm_chat_new(const char *text, size_t len, const char *where, const json_t *tokens,
                    lm_chat **out, lm_err *e);
void lm_chat_free(lm_chat *c); /* NULL is fine */

/* ---- Rendering ---- */

/* All borrowed; zero-initialise. */
typedef struct {
    const json_t *messages;     /* a list of one message at least */
    const json_t *tools;        /* a list of JSON schemas; NULL: none */
    const json_t *documents;    /* a list of objects; NULL: none */
    const json_t *vars;         /* an object of further variables ("enable_thinking"); NULL: none */
    bool add_generation_prompt; /* end with the header of an answer */
    bool continue_final;        /* end inside the last message, for the model to continue */
} lm_chat_request;

/* Append the text of the request to *out.
 * Fails: LM_EUSAGE for malformed messages (no list, no role) and for both ends at once; LM_EFORMAT when the
 * template refuses them or fails (jinja.h).  Threads: safe. */
lm_code lm_chat_render(const lm_chat *c, const lm_chat_request *q, lm_buf *out, lm_err *e);

/* Which of the assistant's turns are marked. */
typedef enum {
    LM_CHAT_ASSISTANT, /* all */
    LM_CHAT_LAST,      /* the last one */
} lm_chat_turns;

/* The same, and the bytes of *out that the assistant has to write, ascending: those of generation
 * blocks, or, when the template has none, found by rendering prefixes: a turn begins where the text
 * of the messages before it with add_generation_prompt ends, and ends where that of the messages up
 * to it ends (so the tokens that end a turn are inside).  When later messages change how a turn is
 * rendered (reasoning that is dropped), its end is found by rendering it with one character more.
 * Fails also: LM_EFORMAT when a turn cannot be found that way (the cure: a template with generation
 * blocks).  No assistant's turn: no span. */
lm_code lm_chat_render_marked(const lm_chat *c, const lm_chat_request *q, lm_chat_turns turns,
                              lm_buf *out, lm_text_spans *marked, lm_err *e);

/* ---- Tokens ---- */

/* Append the ids of a rendered text, no special tokens added, and for each id whether it trains (1
 * or 0; appended to *trains, one byte an id): a token trains if it has a byte of a span, as in
 * `transformers`.  `marked` NULL: all train.  Where the tokenizer's pieces cannot be aligned with
 * the text (a normaliser changed it) the text is encoded in parts, cut at the ends of the spans. */
lm_code lm_chat_encode(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                       const lm_text_spans *marked, lm_ids *ids, lm_buf *trains, lm_err *e);

#endif
