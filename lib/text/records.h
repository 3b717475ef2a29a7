/* SPDX-License-Identifier: Apache-2.0 */
/* records.h -- one line of tuning data, in any of the published forms, as one of seven kinds.
 *
 * The kind follows from the keys of the object, and how messages are written from their keys.  A
 * value that may be a text or messages ("prompt", "completion", "chosen", "rejected") becomes a
 * JSON string or a JSON array of messages {"role", "content", ...} as chat templates read them.
 *
 *   keys                                           kind
 *   conversations or messages, chosen, rejected    PREFERENCE (the conversation is the prompt)
 *   messages                                       MESSAGES
 *   messages + label or kto_tag (true, false)      UNPAIRED: the last message is the completion
 *   conversations [{from, value}], system, tools   MESSAGES (ShareGPT); + chosen, rejected:
 *                                                  PREFERENCE; + kto_tag: UNPAIRED
 *   instruction, input, output, system, history    COMPLETION (Alpaca), as messages: the user's is
 *                                                  instruction, newline, input; + chosen, rejected:
 *                                                  PREFERENCE; + kto_tag: UNPAIRED
 *   prompt, chosen, rejected                       PREFERENCE; without prompt, and when both are
 *                                                  whole conversations: what both begin with
 *   prompt, completion, label                      UNPAIRED
 *   prompt, completion (response)                  COMPLETION
 *   prompt, completions, labels                    STEPWISE
 *   prompt                                         PROMPT
 *   text                                           TEXT
 *   question, answer;  input, output;  source, target  COMPLETION
 *
 * The first row that fits is taken.  "tools" may be a list, or a string that holds one.  In
 * ShareGPT messages human (user) is "user", gpt (assistant) is "assistant", observation (tool,
 * function) is "tool", and function_call is the assistant's message with "tool_calls".
 *
 * Sources: TRL docs/source/dataset_formats.md; LLaMA-Factory data/README.md; OpenRLHF's data
 * keys. */
#ifndef LM_TEXT_RECORDS_H
#define LM_TEXT_RECORDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "format/input.h"

typedef enum {
    LM_RECORD_TEXT,
    LM_RECORD_MESSAGES,
    LM_RECORD_PROMPT,     /* nothing but a prompt: for rollouts */
    LM_RECORD_COMPLETION, /* prompt and completion */
    LM_RECORD_PREFERENCE, /* prompt, chosen and rejected */
    LM_RECORD_UNPAIRED,   /* prompt, completion, and whether it is good */
    LM_RECORD_STEPWISE,   /* prompt, steps, and whether each is right */
    LM_RECORD_KINDS,
} lm_text_record_kind;
/* "text", "messages", "prompt", "prompt and completion", "preference", "unpaired preference",
 * "stepwise". */
const char *lm_text_record_kind_name(lm_text_record_kind k);

/* One record.  Zero-initialise; all members that the kind lacks are NULL. */
typedef struct {
    lm_text_record_kind kind;
    const char *form; /* which row of the table: "ShareGPT", "Alpaca", "question and answer", ... */
    json_t *text;     /* a string */
    json_t *messages; /* an array, not empty */
    json_t *prompt, *completion, *chosen, *rejected; /* a string or an array each */
    json_t *steps, *right; /* STEPWISE: arrays of the same length, of strings and of booleans */
    bool good;             /* UNPAIRED */
    json_t *tools;         /* an array; NULL: none */
    json_t *variables;     /* "chat_template_kwargs", an object; NULL: none */
    json_t *line;          /* the whole object after renaming: columns that rewards read */
} lm_text_record;
void lm_text_record_fini(lm_text_record *r);

/* True if the record holds messages, so that a chat template is needed. */
bool lm_text_record_is_chat(const lm_text_record *r);

/* Names of columns: TO=FROM, in which FROM may be A.B for the key B of the object under A.
 * Zero-initialise. */
typedef struct {
    struct {
        char *to, *from;
    } * pair;
    size_t n, cap;
} lm_text_record_map;
/* Add "prompt=question", or several with commas.  Fails: LM_EUSAGE for any other text, a name that
 * records do not have (the nearest is named), and the same name again. */
lm_code lm_text_record_map_add(lm_text_record_map *m, const char *text, lm_err *e);
void lm_text_record_map_fini(lm_text_record_map *m);

/* Read line[0..len).  map: NULL for none.  Fails: LM_EFORMAT naming `where` and the key for what is
 * not JSON, not one of the forms (with the keys that are there), a value of the wrong type, empty
 * messages, messages without role, a chosen answer equal to the rejected one, and a column of the
 * map that is absent. */
lm_code lm_text_record_read(const char *line, size_t len, const lm_text_record_map *map,
                            const char *where, lm_text_record *out, lm_err *e);
/* The same from a document of an input: JSONL, or plain text, which is of kind TEXT.  Any thread.
 * `where` of errors is the source and line. */
lm_code lm_text_record_of_doc(const lm_doc *doc, const lm_text_record_map *map, lm_text_record *out,
                              lm_err *e);

#endif
