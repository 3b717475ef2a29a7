/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_verify.c -- checks every byte of an .lmz.
 *
 * Header, index and footer were checked when it was opened.  The records of files and parts must
 * equal, byte for byte, those derived from the index.  Each chunk has its own checks.  The bytes of
 * a file must have its digest, and the checks of all records that in the footer. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "format/lmz_impl.h"

enum { CHUNKS_A_THREAD = 3 };

typedef struct {
    const lmz_chunk *chunk;
    uint8_t *raw;
    size_t check; /* destination of the record's check */
    lm_code rc;
    char what[520];
} job;

typedef struct {
    lm_lmz *z;
    lm_lmz_fault_fn each;
    void *ctx;
    lm_sink *sink;
    lm_err *err;
    lm_code rc; /* of the first fault */
    uint64_t faults, done;
    lm_buf checks; /* of all records in their order */
    lm_hash128 digest;
    uint64_t faults_before; /* of the current file */
    job *jobs[2];
    size_t n[2], most; /* jobs in each of the two batches */
    int turn;
} verifier;

/* Report a fault; false to stop the check. */
static bool fault(verifier *v, const lm_lmz_fault *f)
{
    char show[LMZ_SHOWN];

    v->faults++;
    if (!v->rc) {
        v->rc = LM_EFORMAT;
        lm_fail(v->err, LM_EFORMAT, lmz_show(show, v->z->where, f->file, f->part, f->chunk),
                LMZ_DAMAGED, "%s", f->what);
    }
    if (v->each)
        v->each(v->ctx, f);
    return v->each;
}

static bool file_fault(verifier *v, const char *file, const lm_lmz_part *p, const char *what)
{
    return fault(v, &(lm_lmz_fault){ file, p, UINT64_MAX, 0, what });
}

/* Check that the bytes at `at` are this record. */
static bool compare_record(verifier *v, uint64_t at, const lm_buf *record, const char *file,
                           const lm_lmz_part *p, const char *what)
{
    uint8_t there[LMZ_AROUND + LMZ_FIELDS];
    lm_err e = { 0 };

    if (lm_buf_add(&v->checks, record->data + record->len - 8, 8, &e))
        return file_fault(v, file, p, e.what);
    if (at && record->len <= sizeof there && !lmz_pread_all(v->z, at, there, record->len, &e) &&
        !memcmp(there, record->data, record->len))
        return true;
    return file_fault(v, file, p, what);
}

/* ---- Chunks ---- */

static void check_job(verifier *v, job *j)
{
    lm_err why = { 0 };
    lmz_desk *d;

    j->rc = lmz_desk_take(v->z, UINT64_MAX - 1, &d, &why);
    if (!j->rc) {
        j->rc = lmz_try_chunk(v->z, d, j->chunk, j->raw, true, &why);
        memcpy(v->checks.data + j->check, d->record + LMZ_CHUNK_RECORD - 8, 8);
        lmz_desk_give(v->z, d);
    }
    if (j->rc && why.where[0]) /* the base is reported separately */
        snprintf(j->what, sizeof j->what, "%s: %s", why.where, why.what);
    else if (j->rc)
        snprintf(j->what, sizeof j->what, "%s", why.what);
}

/* Task 0 digests the previous batch, the others decode. */
static void work(void *ctx, int64_t begin, int64_t end, int who)
{
    verifier *v = ctx;
    int before = !v->turn;

    (void)who;
    for (int64_t i = begin; i < end; i++)
        if (i > 0)
            check_job(v, &v->jobs[v->turn][i - 1]);
        else
            for (size_t k = 0; k < v->n[before]; k++)
                lm_hash128_add(&v->digest, v->jobs[before][k].raw,
                               lmz_chunk_raw(&v->z->table.part[v->jobs[before][k].chunk->part],
                                             v->jobs[before][k].chunk->offset));
}

static bool run_batch(verifier *v)
{
    lm_lmz *z = v->z;
    size_t n = v->n[v->turn];
    bool go = true;

    lm_par_for(z->par, (int64_t)n + 1, 1, work, v);
    for (size_t i = 0; i < n && go; i++) {
        job *j = &v->jobs[v->turn][i];
        const lm_lmz_part *p = &z->table.part[j->chunk->part].pub;

        v->done += lmz_chunk_raw(&z->table.part[j->chunk->part], j->chunk->offset);
        if (j->rc)
            go =
                fault(v, &(lm_lmz_fault){ p->file, p, (j->chunk->offset - p->offset) / LM_LMZ_CHUNK,
                                          1, j->what });
    }
    lm_progress(v->sink, "testing", (double)v->done, (double)z->table.raw, "bytes", NULL);
    v->turn = !v->turn;
    v->n[v->turn] = 0;
    return go;
}

static bool add_job(verifier *v, const lmz_chunk *c)
{
    job *j = &v->jobs[v->turn][v->n[v->turn]++];
    lm_err e = { 0 };

    j->chunk = c;
    j->check = v->checks.len;
    if (lm_buf_add(&v->checks, "01234567", 8, &e)) /* room for it */
        return file_fault(v, NULL, NULL, e.what);
    return v->n[v->turn] < v->most || run_batch(v);
}

/* Check the chunks of a part; missing ones are reported as a run. */
static bool check_part(verifier *v, size_t number)
{
    const lmz_table *t = &v->z->table;
    const lmz_part *p = &t->part[number];
    const lmz_file *f = &t->file[p->file];
    uint64_t next = p->pub.offset, end = p->pub.offset + p->pub.raw;
    bool go = true;

    for (size_t i = p->pub.first; go && next < end; i++) {
        const lmz_chunk *c = i < f->chunks ? &t->chunk[f->first_chunk + i] : NULL;
        uint64_t at = c && c->part == number ? c->offset : end;

        if (at > next) {
            uint64_t first = (next - p->pub.offset) / LM_LMZ_CHUNK;
            uint64_t last = lmz_chunks_of(at - p->pub.offset);
            go = fault(v, &(lm_lmz_fault){ f->pub->name, &p->pub, first, last - first,
                                           last - first == 1 ? "it is lost"
                                                             : "it and those after it are lost" });
        }
        if (go && at < end)
            go = add_job(v, c);
        next = at < end ? at + lmz_chunk_raw(p, at) : end;
    }
    return go;
}

/* ---- Files ---- */

static bool check_digest(verifier *v, const lmz_file *f)
{
    uint8_t digest[16];

    /* two batches: one is decoded while the other is digested */
    if (!run_batch(v) || !run_batch(v))
        return false;
    if (v->faults != v->faults_before || !f->whole)
        return true;
    lm_hash128_end(&v->digest, digest);
    return !memcmp(digest, f->digest, 16) ||
           file_fault(v, f->pub->name, NULL, "its bytes do not have the recorded digest");
}

static bool check_parts(verifier *v, const lmz_file *f, lm_buf *record, lm_code *rc)
{
    const lmz_table *t = &v->z->table;
    uint64_t covered = 0;
    bool go = true;

    for (size_t i = 0; i < f->parts && go; i++) {
        const lmz_part *p = &t->part[f->first_part + i];
        lmz_part_rec r = lmz_part_record(p);

        if (p->pub.offset > covered)
            go = file_fault(v, f->pub->name, NULL, "tensors between others are lost");
        covered = p->pub.offset + p->pub.raw;
        record->len = 0;
        if ((*rc = lmz_put_part(record, &r, v->err)))
            return false;
        go = go && compare_record(v, p->at, record, f->pub->name, &p->pub, "its record is damaged");
        go = go && check_part(v, f->first_part + i);
    }
    if (go && covered < f->pub->bytes)
        go = file_fault(v, f->pub->name, NULL, "its end is lost");
    return go;
}

static lm_code check_file(verifier *v, size_t number, lm_buf *record, bool *go)
{
    const lmz_table *t = &v->z->table;
    const lmz_file *f = &t->file[number];
    lmz_file_rec r = lmz_file_record(t, number);
    lmz_end_rec end = lmz_end_record(t, number);
    lm_code rc;

    v->faults_before = v->faults;
    lm_hash128_init(&v->digest);
    record->len = 0;
    if ((rc = lmz_put_file(record, &r, v->err)))
        return rc;
    *go =
        compare_record(v, f->at, record, f->pub->name, NULL, "the record of its begin is damaged");
    *go = *go && check_parts(v, f, record, &rc);
    *go = *go && !rc && check_digest(v, f);
    if (rc || !*go || !f->whole)
        return rc;
    record->len = 0;
    if (!(rc = lmz_put_end(record, &end, v->err)))
        *go = compare_record(v, f->end, record, f->pub->name, NULL,
                             "the record of its end is damaged");
    return rc;
}

/* Check the index's record, whose check is the last one in the footer's digest. */
static bool check_footer(verifier *v)
{
    lm_lmz *z = v->z;
    uint8_t record[LMZ_INDEX_RECORD], digest[16];
    lm_hash128 h;
    lm_err e = { 0 };

    if (z->damaged)
        return file_fault(v, NULL, NULL, "its index or footer is missing or damaged");
    if (lmz_pread_all(z, z->footer.index_at, record, sizeof record, &e))
        return file_fault(v, NULL, NULL, "its index is damaged");
    lm_hash128_init(&h);
    lm_hash128_add(&h, v->checks.data, v->checks.len);
    lm_hash128_add(&h, record + sizeof record - 8, 8);
    lm_hash128_end(&h, digest);
    return v->faults || !memcmp(digest, z->footer.records, 16) ||
           file_fault(v, NULL, NULL, "its records do not have the digest of the footer");
}

static lm_code make_jobs(verifier *v)
{
    lm_code rc = LM_OK;

    v->most =
        lm_par_threads(v->z->par) == 1 ? 1 : CHUNKS_A_THREAD * (size_t)lm_par_threads(v->z->par);
    for (int i = 0; i < 2 && !rc; i++) {
        rc = lm_alloc_n(&v->jobs[i], v->most, sizeof *v->jobs[i], "testing", v->err);
        for (size_t k = 0; k < v->most && !rc; k++)
            rc = lm_realloc_n(&v->jobs[i][k].raw, LM_LMZ_CHUNK, 1, "a chunk", v->err);
    }
    return rc;
}

lm_code lm_lmz_verify(lm_lmz *z, lm_lmz_fault_fn each, void *ctx, lm_sink *sink, lm_err *e)
{
    verifier v = { .z = z, .each = each, .ctx = ctx, .sink = sink, .err = e };
    lm_buf record = { 0 };
    bool go = true;
    lm_code rc;

    if (z->stream)
        return lm_fail(e, LM_EBUG, z->where, NULL, "a stream can only be checked by reading it");
    rc = make_jobs(&v);
    if (!rc && z->head.len)
        rc = lm_buf_add(&v.checks, z->head.data + z->head.len - 8, 8, e);
    else if (!rc)
        go = file_fault(&v, NULL, NULL, "its header is damaged");
    for (size_t i = 0; i < z->table.files && !rc && go; i++)
        rc = check_file(&v, i, &record, &go);
    if (!rc && go)
        check_footer(&v);
    for (int i = 0; i < 2; i++) {
        for (size_t k = 0; v.jobs[i] && k < v.most; k++)
            lm_free(v.jobs[i][k].raw);
        lm_free(v.jobs[i]);
    }
    lm_buf_fini(&record);
    lm_buf_fini(&v.checks);
    return rc ? rc : v.rc;
}
