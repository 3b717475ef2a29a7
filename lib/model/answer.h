/* SPDX-License-Identifier: Apache-2.0 */
/* answer.h -- prompts and answers as lines of JSON.
 *
 * A record asks under "prompt", or under "text" when it has no "prompt".  Its answer is an object
 * with the prompt, every other field of the record as it was written there, and then our own:
 *
 *   text, tokens, finish_reason, prompt_tokens; sample (asked for); token_ids, logprobs (asked for)
 *
 * A record that cannot be answered comes back with its fields and "error"; a line that is not an
 * object, with "source", "line" and "error".  A field of the record with one of our names is
 * replaced; of a record without a prompt, only "error". */
#ifndef LM_MODEL_ANSWER_H
#define LM_MODEL_ANSWER_H

#include "model/complete.h"

/* Append the prompt of the record line[0..len) to `text`.  *object: the line is a JSON object, also
 * where it has no prompt.  Fails: LM_EFORMAT. */
lm_code lm_answer_prompt(const char *line, size_t len, const char *where, lm_buf *text,
                         bool *object, lm_err *e);

typedef struct {
    bool record;  /* c->prompt is the record that asked, else the prompt itself */
    bool sample;  /* say which sample of its prompt this is */
    bool details; /* token_ids and logprobs */
} lm_answer_opts;

/* Append the answer, a line with its newline. */
lm_code lm_answer_write(const lm_completion *c, const lm_answer_opts *o, lm_buf *out, lm_err *e);
/* Append the answer to record line[0..len) that could not be obeyed because of `why`; len 0: it was no
 * object, and `source` and `number` say where it stands. */
lm_code lm_answer_write_error(const char *line, size_t len, const char *source, int64_t number,
                              const char *why, lm_buf *out, lm_err *e);

#endif
