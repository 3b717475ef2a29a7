/* SPDX-License-Identifier: Apache-2.0 */
/* prompts.h -- the prompts of rollouts: records whose answers are sampled, and judged by their
 * other columns.
 *
 * Of prompt and completion (GSM8K's question and answer too), of pairs and of judged answers it is
 * the prompt; of messages, those before the last turn of the assistant.  Messages are rendered with
 * the template's beginning of an answer (text/example.h). */
#ifndef LM_TUNE_ALIGN_PROMPTS_H
#define LM_TUNE_ALIGN_PROMPTS_H

#include "text/example.h"
#include "tune/align/on_policy.h"

typedef struct {
    const char *const *path; /* files, folders, patterns; "-" */
    int n;
    const lm_text_record_map *map; /* may be NULL */
    lm_text_example_maker maker;   /* loss_on, most and cut are not read */
    int64_t most;                  /* ids; longer prompts are left out */
    int64_t limit;                 /* most prompts; 0: all */
} lm_prompts_opts;

/* Zero-initialise. */
typedef struct {
    lm_on_policy_prompt *v; /* [n] */
    int64_t n;
    int64_t records, dropped; /* read; left out, because they are too long */
    int64_t longest;          /* ids */
    const char *form;         /* of the first record */
    lm_arena *arena;          /* holds them; the records are freed by fini */
    size_t cap;
} lm_prompts;

/* Read everything.  Stops early when lm_stopping().  Fails: as lm_text_record_read and
 * lm_text_example_prompt, with source and line; LM_EUSAGE if nothing is left. */
lm_code lm_prompts_read(const lm_prompts_opts *o, lm_prompts *out, lm_err *e);
void lm_prompts_fini(lm_prompts *p);

#endif
