/* SPDX-License-Identifier: Apache-2.0 */
/* answer.h -- prompts and answers as lines of JSON.
 *
 * The prompt of a record is under "prompt", or under "text" when it has no "prompt".  A record without "prompt" may have
 * "messages" instead, which a chat template turns into the prompt (text/chat.h).  The answer is
 * an object with the prompt, every other field of the record unchanged, and then our own fields:
 *
 *   text, tokens, finish_reason, prompt_tokens; on request: sample; prompt_index; first_token_seconds; drafted_tokens,
 *   accepted_tokens; token_ids, logprobs
 *
 * A record that cannot be answered is returned with its fields and "error"; a line that is not an
 * object, with "source", "line" and "error".  A field of the record with one of our names is
 * replaced; in a record without a prompt, only "error". */
#ifndef LM_MODEL_ANSWER_H
#define LM_MODEL_ANSWER_H

#include "model/complete.h"

/* Append the prompt of the record line[0..len) to `text`.  *object: the line is a JSON object, with
 * or without a prompt.  Fails: LM_EFORMAT. */
lm_code lm_answer_prompt(const char *line, size_t len, const char *where, lm_buf *text,
                         bool *object, lm_err *e);

/* True if the line is a JSON object without "prompt" whose "messages" are not text. */
bool lm_answer_has_messages(const char *line, size_t len);

typedef struct {
    bool record;  /* c->prompt is the record; otherwise the prompt itself */
    bool sample;  /* add the number of the sample of its prompt */
    bool index;   /* add the number of the prompt */
    bool seconds; /* add the time to the first token */
    bool drafts;  /* drafted and accepted tokens */
    bool details; /* token_ids and logprobs */
} lm_answer_opts;

/* Append the answer: a line with its newline. */
lm_code lm_answer_write(const lm_completion *c, const lm_answer_opts *o, lm_buf *out, lm_err *e);
/* Append the answer of a completion that failed because of `why`: its record, or its prompt, and "error". */
lm_code lm_answer_write_failed(const lm_completion *c, const lm_answer_opts *o, const char *why,
                               lm_buf *out, lm_err *e);
/* Append the answer to record line[0..len) that failed because of `why`; len 0: it was not an
 * object, and `source` and `number` name its place.  index: number of the prompt; -1: left out. */
lm_code lm_answer_write_error(const char *line, size_t len, const char *source, int64_t number,
                              int64_t index, const char *why, lm_buf *out, lm_err *e);

#endif
