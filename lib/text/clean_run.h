/* SPDX-License-Identifier: Apache-2.0 */
/* clean_run.h -- cleaning a stream: reads documents and writes the good ones in the same order.
 *
 * Decoding, judging and hashing run on all threads; one thread at a time decides on duplicates and
 * writes lines, in order, so the bytes are the same for any number of threads. */
#ifndef LM_TEXT_CLEAN_RUN_H
#define LM_TEXT_CLEAN_RUN_H

#include <stdio.h>

#include "base/par.h"
#include "base/progress.h"
#include "format/input.h"
#include "text/clean.h"
#include "text/dedup.h"

typedef struct {
    lm_input *in;
    const lm_input_opts *in_opts;
    const lm_clean_opts *clean;
    const lm_dedup_opts *dedup; /* NULL: keep duplicates */
    FILE *out;                  /* JSONL */
    const char *out_name;       /* for messages */
    FILE *dropped;              /* may be NULL: JSONL {"rule", "source", "line", "document"} */
    const char *dropped_name;
    lm_sink *sink;
} lm_clean_job;

typedef struct {
    int64_t documents, kept;
    int64_t bytes_in, bytes_out; /* bytes of text */
    int64_t dropped[LM_RULES];   /* documents, by the rule that dropped them */
    int64_t lines[LM_RULES];     /* lines, by rule, of all documents judged */
    int64_t exact, near;         /* duplicates */
    int64_t invalid;             /* documents skipped for invalid UTF-8 */
    int64_t bad;                 /* documents skipped because they are not records */
    int64_t replaced;            /* sequences replaced by U+FFFD */
} lm_clean_stats;

/* Fails: as lm_input_next, lm_doc_decode, lm_dedup_new; LM_EIO when out cannot be written. */
lm_code lm_clean_stream(const lm_clean_job *job, lm_par *par, lm_clean_stats *st, lm_err *e);

#endif
