/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_batch.c -- see lmz_batch.h. */
#include "format/lmz_batch.h"

#include <string.h>

enum { JOBS_A_THREAD = 3 };

/* ---- Coding and writing ---- */

static void code_job(lmz_batches *b, lmz_job *j, int who)
{
    const uint8_t *base = NULL;
    size_t coded = 0;

    j->rc = LM_OK;
    /* first, which also reads them into the cache */
    j->rec.raw_check = lm_hash64(j->src, j->rec.raw, 0);
    if (j->base_file && !b->rooms[who])
        j->rc = lm_realloc_n(&b->rooms[who], lm_lmz_chunk_bound(LM_LMZ_CHUNK), 1,
                             "a chunk of the base", &j->err);
    if (!j->rc && j->base_file)
        j->rc = lmz_base_bytes(b->base, j->base_file, j->base_from, j->rec.raw, b->rooms[who],
                               &base, &j->err);
    if (!j->rc)
        j->rc = lm_lmz_encode(b->coders[who], j->rec.kind, j->src, j->rec.raw, base,
                              j->out + LMZ_CHUNK_RECORD, lm_lmz_chunk_bound(LM_LMZ_CHUNK), &coded,
                              &j->err);
    if (j->rc)
        return;
    if (j->base_file)
        lmz_base_forget(b->base, j->base_file, j->base_from, j->rec.raw);
    j->rec.coded = (uint32_t)coded;
    j->rec.coded_check = lm_hash64(j->out + LMZ_CHUNK_RECORD, coded, 0);
    lmz_put_chunk(j->out, &j->rec);
}

lm_code lmz_batches_emit(lmz_batches *b, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = bytes ? b->write(b->ctx, data, bytes, e) : LM_OK;

    b->at += bytes;
    return rc;
}

/* Whole records one after another. */
static lm_code emit_records(lmz_batches *b, const uint8_t *p, size_t bytes, lm_err *e)
{
    for (size_t at = 0, n; at < bytes; at += n) {
        n = lmz_record_size(p + at);
        lm_hash128_add(&b->records, p + at + n - 8, 8);
    }
    return lmz_batches_emit(b, p, bytes, e);
}

/* Add the coded bytes of each chunk to the index, in order. */
static lm_code note_chunk(lmz_batches *b, uint32_t coded, lm_err *e)
{
    lmz_table *t = b->table;
    lm_code rc =
        lm_grow(&t->chunk, &t->chunks_cap, t->chunks + 1, sizeof *t->chunk, "chunks of an .lmz", e);
    if (!rc)
        t->chunk[t->chunks++].coded = coded;
    return rc;
}

static lm_code write_batch(lmz_batches *b, lmz_batch *from, lm_err *e)
{
    const uint8_t *records = (const uint8_t *)from->records.data;
    size_t done = 0;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < from->n && !rc; i++) {
        lmz_job *j = &from->jobs[i];

        rc = emit_records(b, records + done, j->records_end - done, e);
        done = j->records_end;
        rc = rc ? rc : note_chunk(b, j->rec.coded, e);
        lm_hash128_add(&b->records, j->out + LMZ_CHUNK_RECORD - 8, 8);
        rc = rc ? rc : lmz_batches_emit(b, j->out, LMZ_CHUNK_RECORD + j->rec.coded, e);
    }
    rc = rc ? rc : emit_records(b, records + done, from->records.len - done, e);
    from->n = 0;
    from->records.len = 0;
    return rc;
}

typedef struct {
    lmz_batches *b;
    lmz_batch *before, *coded;
    lm_code rc;
    lm_err err;
} round;

static void work(void *ctx, int64_t begin, int64_t end, int who)
{
    round *r = ctx;

    for (int64_t i = begin; i < end; i++) {
        if (i == 0)
            r->rc = write_batch(r->b, r->before, &r->err);
        else if (i == 1)
            for (size_t k = 0; k < r->coded->n; k++)
                lm_hash128_add(&r->b->digest, r->coded->jobs[k].src, r->coded->jobs[k].rec.raw);
        else
            code_job(r->b, &r->coded->jobs[i - 2], who);
    }
}

lm_code lmz_batches_turn(lmz_batches *b, lm_err *e)
{
    round r = { .b = b, .before = &b->batches[!b->current], .coded = &b->batches[b->current] };

    lm_par_for(b->par, (int64_t)r.coded->n + 2, 1, work, &r);
    if (r.rc) {
        *e = r.err;
        return r.rc;
    }
    for (size_t i = 0; i < r.coded->n; i++)
        if (r.coded->jobs[i].rc) {
            *e = r.coded->jobs[i].err;
            return r.coded->jobs[i].rc;
        }
    if (b->jobs == 1)
        return write_batch(b, r.coded, e);
    b->current = !b->current;
    return LM_OK;
}

lm_code lmz_batches_flush(lmz_batches *b, lm_err *e)
{
    lm_code rc = lmz_batches_turn(b, e);
    return rc ? rc : write_batch(b, &b->batches[!b->current], e);
}

/* ---- Measuring ---- */

typedef struct {
    const lmz_batches *b;
    lmz_sample *s;
} measuring;

static void measure(void *ctx, int64_t begin, int64_t end, int who)
{
    const measuring *m = ctx;

    for (int64_t i = begin; i < end; i++) {
        lmz_sample *s = &m->s[i];
        size_t coded = 0;
        lm_err e = { 0 };
        if (s->raw && lm_lmz_encode(m->b->coders[who], s->kind, s->data, s->raw, NULL,
                                    m->b->rooms[who], lm_lmz_chunk_bound(LM_LMZ_CHUNK), &coded, &e))
            coded = (size_t)s->raw + 1; /* as if stored */
        s->coded = (uint32_t)coded;
    }
}

lm_code lmz_batches_measure(lmz_batches *b, lmz_sample *s, size_t n, lm_err *e)
{
    measuring m = { b, s };
    lm_code rc = LM_OK;

    for (int i = 0; i < lm_par_threads(b->par) && !rc; i++)
        if (!b->rooms[i])
            rc =
                lm_realloc_n(&b->rooms[i], lm_lmz_chunk_bound(LM_LMZ_CHUNK), 1, "a coded chunk", e);
    if (!rc)
        lm_par_for(b->par, (int64_t)n, 1, measure, &m);
    return rc;
}

/* ---- Gathering ---- */

/* Copy bytes to the job's own memory. */
static lm_code gather(lmz_job *j, size_t at, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = j->own ? LM_OK : lm_realloc_n(&j->own, LM_LMZ_CHUNK, 1, "a chunk", e);

    if (rc)
        return rc;
    memcpy(j->own + at, data, bytes);
    j->src = j->own;
    return LM_OK;
}

lm_code lmz_job_begin(lmz_batches *b, const lmz_chunk_rec *r, const char *base_file,
                      uint64_t base_from, lm_err *e)
{
    lmz_job *j = lmz_batches_job(b);
    uint8_t *out = j->out, *own = j->own;
    lm_code rc = LM_OK;

    if (!out)
        rc = lm_realloc_n(&out, LMZ_CHUNK_RECORD + lm_lmz_chunk_bound(LM_LMZ_CHUNK), 1,
                          "a coded chunk", e);
    if (!rc)
        *j = (lmz_job){ .own = own,
                        .out = out,
                        .rec = *r,
                        .base_file = base_file,
                        .base_from = base_from,
                        .records_end = lmz_batches_records(b)->len };
    return rc;
}

lm_code lmz_job_add(lmz_job *j, size_t at, const uint8_t *data, size_t n, lm_err *e)
{
    if (n != j->rec.raw)
        return gather(j, at, data, n, e);
    j->src = data;
    return LM_OK;
}

lm_code lmz_job_end(lmz_batches *b, lm_err *e)
{
    return ++b->batches[b->current].n == b->jobs ? lmz_batches_turn(b, e) : LM_OK;
}

lm_code lmz_batches_keep(lmz_batches *b, lm_err *e)
{
    lmz_batch *now = &b->batches[b->current];
    lm_code rc = LM_OK;

    for (size_t i = 0; i < now->n && !rc; i++)
        if (now->jobs[i].src != now->jobs[i].own)
            rc = gather(&now->jobs[i], 0, now->jobs[i].src, now->jobs[i].rec.raw, e);
    return rc;
}

/* ---- The batch ---- */

lm_code lmz_batches_init(lmz_batches *b, int level, lm_err *e)
{
    size_t n = (size_t)lm_par_threads(b->par);
    lm_code rc;

    lm_hash128_init(&b->records);
    b->jobs = n == 1 ? 1 : JOBS_A_THREAD * n;
    rc = lm_alloc_n(&b->coders, n, sizeof *b->coders, "coders", e);
    rc = rc ? rc : lm_alloc_n(&b->rooms, n, sizeof *b->rooms, "coders", e);
    for (int i = 0; i < 2 && !rc; i++)
        rc = lm_alloc_n(&b->batches[i].jobs, b->jobs, sizeof *b->batches[i].jobs, "chunks", e);
    for (size_t i = 0; i < n && !rc; i++)
        rc = lm_lmz_coder_new(level, lm_cpu_detect(), &b->coders[i], e);
    return rc;
}

void lmz_batches_fini(lmz_batches *b)
{
    for (int i = 0; i < 2; i++) {
        for (size_t k = 0; b->batches[i].jobs && k < b->jobs; k++) {
            lm_free(b->batches[i].jobs[k].own);
            lm_free(b->batches[i].jobs[k].out);
        }
        lm_free(b->batches[i].jobs);
        lm_buf_fini(&b->batches[i].records);
    }
    for (int i = 0; i < lm_par_threads(b->par); i++) {
        if (b->coders)
            lm_lmz_coder_free(b->coders[i]);
        if (b->rooms)
            lm_free(b->rooms[i]);
    }
    lm_free(b->coders);
    lm_free(b->rooms);
}
