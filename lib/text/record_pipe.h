/* SPDX-License-Identifier: Apache-2.0 */
/* record_pipe.h -- reads records on all threads and hands on what was made of each, in the order of
 * the records; examples.h and answers.h are made by it.  Private to lib/text. */
#ifndef LM_TEXT_RECORD_PIPE_H
#define LM_TEXT_RECORD_PIPE_H

#include "base/par.h"
#include "base/progress.h"
#include "text/example.h"

/* What one thread makes of records; `x` and `ids` are for the use of `make`. */
typedef struct {
    lm_text_example_scratch *scratch; /* of this thread */
    lm_text_example x;
    lm_ids ids; /* what make appends belongs to the record */
} record_maker;

typedef struct {
    const char *const *path; /* as lm_input_open */
    int n;
    const lm_text_record_map *map; /* may be NULL */
    const lm_text_example_maker *maker;
    int64_t limit; /* records after the first `limit` are not looked at; 0: all are read */
    lm_sink *sink;
    size_t result; /* bytes of the result of a record, which begins as zeros */
    /* On any thread: fill the result, append ids to m->ids. */
    lm_code (*make)(void *ctx, record_maker *m, lm_text_record *rec, void *result, lm_err *e);
    /* In the order of the records: `ids` [n] and the result of one; form: of lm_text_record. */
    lm_code (*take)(void *ctx, const uint32_t *ids, size_t n, const void *result, const char *form,
                    lm_err *e);
    void *ctx;
} record_pipe;

/* Fails as lm_input_open, lm_text_record_read, make (source and line are
 * added) and take; LM_EUSAGE if there is not one record. */
lm_code record_pipe_run(const record_pipe *o, lm_par *par, lm_err *e);

#endif
