/* SPDX-License-Identifier: Apache-2.0 */
/* record_pipe.c -- see record_pipe.h. */
#include "text/record_pipe.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "text/doc_batch.h"

typedef struct {
    lm_doc_batch docs; /* first, for the pool */
    record_maker maker;
    size_t end[LM_BATCH_DOCS]; /* of each in maker.ids */
    const char *form[LM_BATCH_DOCS];
    max_align_t result[]; /* LM_BATCH_DOCS of them, at distances of o->result */
} batch;

typedef struct {
    const record_pipe *o;
    lm_input *in;
    int64_t begun, done;               /* records read, records taken */
    lm_text_example_scratch **scratch; /* by worker */
    lm_doc_pool pool;
} run;

static void fini_batch(void *item)
{
    batch *b = item;
    lm_ids_fini(&b->maker.ids);
    lm_text_example_fini(&b->maker.x);
}

static lm_code read_batch(void *ctx, void **item, lm_err *e)
{
    run *r = ctx;
    int64_t left = r->o->limit - r->begun;
    *item = NULL;
    if (r->o->limit && left <= 0)
        return LM_OK;
    if (lm_doc_pool_read(&r->pool, r->in, item, e) || !*item)
        return e->code;
    batch *b = *item;
    if (r->o->limit && b->docs.n > left)
        b->docs.n = (int)left;
    r->begun += b->docs.n;
    return LM_OK;
}

static void drop_batch(void *ctx, void *item)
{
    lm_doc_pool_give(&((run *)ctx)->pool, item);
}

static void *result_of(const run *r, batch *b, int i)
{
    return (char *)b->result + (size_t)i * r->o->result;
}

static lm_code make_one(run *r, batch *b, int i, lm_err *e)
{
    const lm_doc *d = &b->docs.doc[i];
    lm_text_record rec = { 0 };
    if (lm_text_record_of_doc(d, r->o->map, &rec, e))
        return e->code;
    b->form[i] = rec.form;
    if (r->o->make(r->o->ctx, &b->maker, &rec, result_of(r, b, i), e))
        lm_err_in(e, "%s:%lld", d->source, (long long)d->line);
    lm_text_record_fini(&rec);
    b->end[i] = b->maker.ids.n;
    return e->code;
}

static lm_code work_batch(void *ctx, void *item, int worker, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    b->maker.ids.n = 0;
    b->maker.scratch = r->scratch[worker];
    memset(b->result, 0, LM_BATCH_DOCS * r->o->result);
    for (int i = 0; i < b->docs.n; i++)
        if (make_one(r, b, i, e))
            return e->code;
    return LM_OK;
}

static lm_code take_one(run *r, batch *b, int i, lm_err *e)
{
    size_t from = i ? b->end[i - 1] : 0;
    const uint32_t *ids = b->maker.ids.v ? b->maker.ids.v + from : NULL;
    return r->o->take(r->o->ctx, ids, b->end[i] - from, result_of(r, b, i), b->form[i], e);
}

static lm_code write_batch(void *ctx, void *item, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    lm_code rc = LM_OK;
    char note[48];
    for (int i = 0; i < b->docs.n && !rc; i++)
        rc = take_one(r, b, i, e);
    r->done += b->docs.n;
    lm_doc_pool_give(&r->pool, b);
    lm_input_stats in = lm_input_stat(r->in);
    snprintf(note, sizeof note, "%lld record%s", (long long)r->done, lm_plural((uint64_t)r->done));
    lm_progress(r->o->sink, "reading", (double)in.bytes, (double)in.total, "bytes", note);
    return rc;
}

static lm_code run_pipe(run *r, lm_par *par, lm_err *e)
{
    int n = lm_par_threads(par);
    lm_pipe_ops ops = { .read = read_batch,
                        .work = work_batch,
                        .write = write_batch,
                        .drop = drop_batch,
                        .ctx = r,
                        .depth = 2 * n + 2 };
    lm_doc_pool_init(&r->pool, sizeof(batch) + LM_BATCH_DOCS * r->o->result, fini_batch);
    lm_code rc = lm_alloc_n(&r->scratch, (size_t)n, sizeof *r->scratch, "scratch", e);
    for (int i = 0; i < n && !rc; i++)
        rc = lm_text_example_scratch_new(r->o->maker, &r->scratch[i], e);
    if (!rc)
        rc = lm_par_pipe(par, &ops, e);
    for (int i = 0; i < n && r->scratch; i++)
        lm_text_example_scratch_free(r->scratch[i]);
    lm_doc_pool_fini(&r->pool);
    lm_free(r->scratch);
    return rc;
}

lm_code record_pipe_run(const record_pipe *o, lm_par *par, lm_err *e)
{
    const lm_input_opts in = { .kind = LM_INPUT_AUTO };
    run r = { .o = o };
    lm_code rc = lm_input_open(&in, o->path, o->n, &r.in, e);
    rc = rc ? rc : run_pipe(&r, par, e);
    lm_input_close(r.in);
    if (rc || r.done || lm_stopping())
        return rc;
    return lm_fail(e, LM_EUSAGE, o->n ? o->path[0] : "standard input", "give at least one",
                   "holds no record");
}
