/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_batch.h -- the pipeline of an .lmz: chunks are gathered, coded on the pool, written in order;
 * private to lib/format.
 *
 * A batch has several chunks for each thread.  While the chunks of one batch are coded, one task
 * writes the output of the previous batch and another adds the raw bytes to the file's digest, so
 * that coding waits for neither.  A single thread has one chunk in a batch, and writes it while it
 * is in the cache. */
#ifndef LM_FORMAT_LMZ_BATCH_H
#define LM_FORMAT_LMZ_BATCH_H

#include "base/hash.h"
#include "format/lmz_base.h"

/* One chunk. */
typedef struct {
    uint8_t *own;       /* raw bytes, gathered here ... */
    const uint8_t *src; /* ... or borrowed from the caller */
    uint8_t *out;       /* the record and the coded bytes */
    lmz_chunk_rec rec;
    const char *base_file; /* NULL: no delta */
    uint64_t base_from;
    size_t records_end; /* records written before it */
    lm_code rc;
    lm_err err;
} lmz_job;

typedef struct {
    lmz_job *jobs;
    size_t n;
    lm_buf records;
} lmz_batch;

typedef struct {
    lm_write_fn write;
    void *ctx;
    lm_par *par;
    lm_bundle *base;            /* NULL: no delta */
    lmz_table *table;           /* called with the coded bytes of each chunk, in order */
    lm_hash128 records, digest; /* of the record checks, of the current file */
    uint64_t at;                /* bytes written */
    lmz_batch batches[2];
    int current;
    size_t jobs; /* in each */
    lm_lmz_coder **coders;
    uint8_t **rooms; /* buffers for bytes of the base, or of a measurement; one for each thread */
} lmz_batches;

/* Bytes to code only to measure their size. */
typedef struct {
    lm_lmz_kind kind;
    const uint8_t *data;
    uint32_t raw, coded; /* coded: 0 for no bytes */
} lmz_sample;

/* Called with write, ctx, par, base and table set, the rest zero. */
lm_code lmz_batches_init(lmz_batches *b, int level, lm_err *e);
void lmz_batches_fini(lmz_batches *b);

/* The buffer for records that follow the chunks so far. */
static inline lm_buf *lmz_batches_records(lmz_batches *b)
{
    return &b->batches[b->current].records;
}
/* The job of the next chunk: begun with its description (bytes and checks are added later), filled
 * with n bytes from `data` at `at` (borrowed when these are all of them), and marked complete. */
static inline lmz_job *lmz_batches_job(lmz_batches *b)
{
    return &b->batches[b->current].jobs[b->batches[b->current].n];
}
lm_code lmz_job_begin(lmz_batches *b, const lmz_chunk_rec *r, const char *base_file,
                      uint64_t base_from, lm_err *e);
lm_code lmz_job_add(lmz_job *j, size_t at, const uint8_t *data, size_t n, lm_err *e);
lm_code lmz_job_end(lmz_batches *b, lm_err *e);
/* Copy borrowed bytes, because the caller returns. */
lm_code lmz_batches_keep(lmz_batches *b, lm_err *e);
/* Code the gathered chunks and write the previously coded ones; the digest includes all chunks so
 * far. */
lm_code lmz_batches_turn(lmz_batches *b, lm_err *e);
/* Code and write all. */
lm_code lmz_batches_flush(lmz_batches *b, lm_err *e);
/* Set `coded` of n samples, each a chunk at most. */
lm_code lmz_batches_measure(lmz_batches *b, lmz_sample *s, size_t n, lm_err *e);
/* Write these bytes at the end. */
lm_code lmz_batches_emit(lmz_batches *b, const void *data, size_t bytes, lm_err *e);

#endif
