/* SPDX-License-Identifier: Apache-2.0 */
/* examples.h -- all examples of a training on records: ids and loss marks, in the order of the
 * data.
 *
 * Read once, on all threads, in order: the result does not depend on their number.  Ids take 32
 * bits each, the highest of which is the loss mark, in a mapped temporary file (without name, in
 * `tmp`): data beyond the memory of the machine are paged by the system. */
#ifndef LM_TEXT_EXAMPLES_H
#define LM_TEXT_EXAMPLES_H

#include "base/par.h"
#include "base/progress.h"
#include "format/tokens.h"
#include "text/example.h"

typedef struct lm_text_examples lm_text_examples;

typedef struct {
    const char *const *path; /* files, folders, patterns; "-" */
    int n;
    const lm_text_record_map *map; /* may be NULL */
    lm_text_example_maker maker;
    int64_t limit;   /* most records; 0: all */
    const char *tmp; /* folder of the temporary file; NULL: memory */
    lm_sink *sink;
} lm_text_examples_opts;

typedef struct {
    int64_t records, kind[LM_RECORD_KINDS];
    int64_t examples, ids, trained; /* ids: of all examples */
    int64_t cut, cut_ids;           /* examples shortened, ids removed */
    int64_t dropped;                /* longer than maker.most */
    int64_t silent;                 /* examples without an id that trains: left out */
    int64_t source, target;         /* of pairs: ids of the longest, */
    int64_t ahead;    /* and virtual tokens in front of each target, which count as its ids */
    const char *form; /* of the first record */
} lm_text_examples_stats;

/* Read everything.  Fails: LM_EFORMAT as lm_text_record_read, with source and line; LM_EUSAGE
 * without a single example; as lm_text_example_make. */
lm_code lm_text_examples_read(const lm_text_examples_opts *o, lm_par *par, lm_text_examples **out,
                              lm_err *e);
void lm_text_examples_free(lm_text_examples *x);

int64_t lm_text_examples_count(const lm_text_examples *x);
const lm_text_examples_stats *lm_text_examples_stat(const lm_text_examples *x);
/* XXH3-64 of all ids and marks: what a resumed run compares. */
uint64_t lm_text_examples_digest(const lm_text_examples *x);
/* Example i: the number of its ids, and the ids, borrowed.  An id is v & LM_TOKENS_ID, and
 * v & LM_TOKENS_TRAINS is set when it is trained to be predicted (tokens.h). */
int64_t lm_text_examples_length(const lm_text_examples *x, int64_t i);
/* Of a pair the ids of its source; behind them are its target's virtual tokens, and the ids that train. */
int64_t lm_text_examples_source(const lm_text_examples *x, int64_t i);
const uint32_t *lm_text_examples_ids(const lm_text_examples *x, int64_t i);

#endif
