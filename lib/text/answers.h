/* SPDX-License-Identifier: Apache-2.0 */
/* answers.h -- all answers of a training on preferences: prompts with answers as ids, in the order
 * of the data.
 *
 * Of pairs, answers 2k and 2k + 1 are the chosen and the rejected one of record k.  Judged answers
 * come from records with a label; a pair gives two of them, good and bad.  Read once, on all
 * threads; the result does not depend on their number. */
#ifndef LM_TEXT_ANSWERS_H
#define LM_TEXT_ANSWERS_H

#include "base/par.h"
#include "base/progress.h"
#include "text/example.h"

typedef struct {
    const uint32_t *ids; /* [n]: prompt, answer; borrowed */
    int64_t n, prompt;   /* 0 < prompt < n */
    bool good;           /* chosen, or judged so */
    double margin;       /* of a pair's column "margin"; 0: none */
} lm_text_answer;

typedef struct lm_text_answers lm_text_answers;

typedef struct {
    const char *const *path; /* files, folders, patterns; "-" */
    int n;
    const lm_text_record_map *map; /* may be NULL */
    lm_text_example_maker maker;   /* loss_on is not read: answers train */
    bool pairs;                    /* false: judged answers */
    /* Not `pairs`: every answer is a good one, with or without label; of messages the assistant's
     * last turn, of pairs the chosen one */
    bool given;
    int64_t limit; /* most records; 0: all */
    lm_sink *sink;
} lm_text_answers_opts;

typedef struct {
    int64_t records, pairs, good, bad; /* records read; what was kept: pairs, or judged answers */
    int64_t ids;                       /* of all answers, prompts included */
    int64_t longest;                   /* ids of the longest */
    int64_t cut;                       /* answers shortened */
    /* records left out: too long, nothing of an answer was left, or the answers became equal */
    int64_t dropped;
    const char *form; /* of the first record */
} lm_text_answers_stats;

/* Read everything.  Fails: LM_EFORMAT as lm_text_record_read, and for a record of another kind or a
 * margin that is not a number, with source and line; LM_EUSAGE when nothing is left; as
 * lm_text_example_make. */
lm_code lm_text_answers_read(const lm_text_answers_opts *o, lm_par *par, lm_text_answers **out,
                             lm_err *e);
void lm_text_answers_free(lm_text_answers *a);

int64_t lm_text_answers_count(const lm_text_answers *a);
const lm_text_answer *lm_text_answers_at(const lm_text_answers *a, int64_t i);
const lm_text_answers_stats *lm_text_answers_stat(const lm_text_answers *a);
/* XXH3-64 of all ids, lengths, labels and margins: what a resumed run compares. */
uint64_t lm_text_answers_digest(const lm_text_answers *a);

#endif
