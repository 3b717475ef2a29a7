/* SPDX-License-Identifier: Apache-2.0 */
/* clean_run.c -- see clean_run.h: batches of documents through lm_par_pipe. */
#include "text/clean_run.h"

#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "text/doc_batch.h"

typedef struct {
    lm_doc_batch docs; /* first, for the pool */
    lm_clean_result result[LM_BATCH_DOCS];
    lm_dedup_sig sig[LM_BATCH_DOCS];
    size_t end[LM_BATCH_DOCS]; /* of its line in `lines` */
    lm_buf lines;
} batch;

typedef struct {
    const lm_clean_job *job;
    lm_clean_stats *st;
    lm_clean_scratch **scratch; /* by worker */
    lm_dedup *dedup;
    lm_buf note;
    lm_doc_pool pool;
} run;

static void fini_batch(void *item)
{
    batch *b = item;
    for (int i = 0; i < LM_BATCH_DOCS; i++)
        lm_dedup_sig_fini(&b->sig[i]);
    lm_buf_fini(&b->lines);
}

static lm_code read_batch(void *ctx, void **item, lm_err *e)
{
    run *r = ctx;
    return lm_doc_pool_read(&r->pool, r->job->in, item, e);
}

static void drop_batch(void *ctx, void *item)
{
    lm_doc_pool_give(&((run *)ctx)->pool, item);
}

static lm_code work_batch(void *ctx, void *item, int worker, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    const lm_clean_job *j = r->job;
    lm_code rc = LM_OK;
    b->lines.len = 0;
    for (int i = 0; i < b->docs.n && !rc; i++) {
        lm_doc *d = &b->docs.doc[i];
        lm_clean_result *res = &b->result[i];
        rc = lm_doc_decode(j->in_opts, d, e);
        if (!rc && !d->skip)
            rc = lm_clean_text(j->clean, r->scratch[worker], d->text, d->len, res, e);
        if (!rc && !d->skip && res->rule < 0 && r->dedup)
            rc = lm_dedup_sign(r->dedup, res->text, res->len, &b->sig[i], e);
        if (!rc && !d->skip && res->rule < 0)
            rc = lm_doc_write(j->in_opts, d, res->text, res->len, &b->lines, e);
        b->end[i] = b->lines.len;
    }
    return rc;
}

static lm_code write_bytes(FILE *f, const char *name, const void *p, size_t n, lm_err *e)
{
    if (fwrite(p, 1, n, f) == n)
        return LM_OK;
    return lm_fail_write(name, e);
}

/* Write a dropped document, with the rule, to the file of dropped documents. */
static lm_code note_drop(run *r, const lm_doc *d, const char *rule, lm_err *e)
{
    lm_buf *b = &r->note;
    lm_jw w;
    if (!r->job->dropped)
        return LM_OK;
    b->len = 0;
    lm_jw_begin(&w, b, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "rule", rule);
    lm_jw_str(&w, "source", d->source);
    lm_jw_int(&w, "line", d->line);
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    if (rc)
        return rc;
    while (b->len && b->data[b->len - 1] != '}')
        b->len--;
    b->len--; /* the text is inserted before the brace */
    rc = lm_buf_add(b, ",\"document\":", 12, e);
    if (!rc && !d->skip)
        rc = lm_doc_write(r->job->in_opts, d, d->text, d->len, b, e);
    else if (!rc)
        rc = lm_buf_add(b, "null\n", 5, e); /* JSON cannot hold invalid UTF-8 */
    if (!rc && b->data[b->len - 1] == '\n')
        b->len--;
    rc = rc ? rc : lm_buf_add(b, "}\n", 2, e);
    return rc ? rc : write_bytes(r->job->dropped, r->job->dropped_name, b->data, b->len, e);
}

static lm_code write_doc(run *r, batch *b, int i, lm_err *e)
{
    const lm_doc *d = &b->docs.doc[i];
    const lm_clean_result *res = &b->result[i];
    lm_clean_stats *st = r->st;
    lm_dedup_verdict v = LM_DEDUP_NEW;
    lm_code rc = LM_OK;
    size_t from = i ? b->end[i - 1] : 0;
    st->documents++;
    if (d->skip) {
        st->invalid += !d->broken;
        st->bad += d->broken;
        return note_drop(r, d, d->broken ? "bad-record" : "invalid-utf8", e);
    }
    st->replaced += d->bad;
    st->bytes_in += (int64_t)d->len;
    for (int k = 0; k < LM_RULES; k++)
        st->lines[k] += res->lines[k];
    if (res->rule >= 0) {
        st->dropped[res->rule]++;
        return note_drop(r, d, lm_clean_rule_name((lm_clean_rule)res->rule), e);
    }
    if (r->dedup)
        rc = lm_dedup_add(r->dedup, &b->sig[i], &v, e);
    if (rc)
        return rc;
    if (v != LM_DEDUP_NEW) {
        st->exact += v == LM_DEDUP_EXACT;
        st->near += v == LM_DEDUP_NEAR;
        return note_drop(r, d, v == LM_DEDUP_EXACT ? "duplicate" : "near-duplicate", e);
    }
    st->kept++;
    st->bytes_out += (int64_t)res->len;
    return write_bytes(r->job->out, r->job->out_name, b->lines.data + from, b->end[i] - from, e);
}

static lm_code write_batch(void *ctx, void *item, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    lm_code rc = LM_OK;
    for (int i = 0; i < b->docs.n && !rc; i++)
        rc = write_doc(r, b, i, e);
    lm_doc_pool_give(&r->pool, b);
    lm_input_stats in = lm_input_stat(r->job->in);
    lm_progress(r->job->sink, "cleaning", (double)in.bytes, (double)in.total, "bytes", NULL);
    return rc;
}

lm_code lm_clean_stream(const lm_clean_job *job, lm_par *par, lm_clean_stats *st, lm_err *e)
{
    int n = lm_par_threads(par);
    run r = { .job = job, .st = st };
    lm_pipe_ops ops = { .read = read_batch,
                        .work = work_batch,
                        .write = write_batch,
                        .drop = drop_batch,
                        .ctx = &r,
                        .depth = 2 * n + 2 };
    lm_doc_pool_init(&r.pool, sizeof(batch), fini_batch);
    *st = (lm_clean_stats){ 0 };
    lm_code rc = lm_alloc_n(&r.scratch, (size_t)n, sizeof *r.scratch, "scratch", e);
    for (int i = 0; i < n && !rc; i++)
        rc = lm_clean_scratch_new(&r.scratch[i], e);
    if (!rc && job->dedup)
        rc = lm_dedup_new(job->dedup, &r.dedup, e);
    if (!rc)
        rc = lm_par_pipe(par, &ops, e);
    for (int i = 0; i < n && r.scratch; i++)
        lm_clean_scratch_free(r.scratch[i]);
    lm_doc_pool_fini(&r.pool);
    lm_free(r.scratch);
    lm_buf_fini(&r.note);
    lm_dedup_free(r.dedup);
    return rc;
}
