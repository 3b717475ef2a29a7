/* SPDX-License-Identifier: Apache-2.0 */
/* examples_read.c -- makes examples of records on all threads, in the order of the records. */
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "text/doc_batch.h"
#include "text/examples_impl.h"

typedef struct {
    lm_doc_batch docs; /* first, for the pool */
    lm_ids ids;        /* with marks */
    struct {
        size_t end; /* in ids */
        size_t cut, trained;
        bool dropped;
        lm_text_record_kind kind;
        const char *form;
    } of[LM_BATCH_DOCS];
    lm_text_example x;
} batch;

typedef struct {
    const lm_text_examples_opts *o;
    lm_input *in;
    lm_text_examples *x;
    lm_text_example_scratch **scratch; /* by worker */
    lm_doc_pool pool;
} run;

static void fini_batch(void *item)
{
    lm_ids_fini(&((batch *)item)->ids);
    lm_text_example_fini(&((batch *)item)->x);
}

static lm_code read_batch(void *ctx, void **item, lm_err *e)
{
    run *r = ctx;
    return lm_doc_pool_read(&r->pool, r->in, item, e);
}

static void drop_batch(void *ctx, void *item)
{
    lm_doc_pool_give(&((run *)ctx)->pool, item);
}

static lm_code keep_ids(batch *b, int i, lm_err *e)
{
    const lm_text_example *x = &b->x;
    if (lm_grow(&b->ids.v, &b->ids.cap, b->ids.n + x->ids.n, sizeof *b->ids.v, "token ids", e))
        return e->code;
    /* The first id follows nothing: it is never predicted. */
    for (size_t k = 0; k < x->ids.n; k++)
        b->ids.v[b->ids.n++] = x->ids.v[k] | (k && x->trains[k] ? LM_TOKENS_TRAINS : 0);
    b->of[i].cut = x->cut;
    b->of[i].dropped = x->dropped;
    b->of[i].trained = x->trained - (x->ids.n && x->trains[0]);
    return LM_OK;
}

static lm_code work_doc(run *r, batch *b, int i, int worker, lm_err *e)
{
    const lm_doc *d = &b->docs.doc[i];
    lm_text_record rec = { 0 };
    if (lm_text_record_of_doc(d, r->o->map, &rec, e))
        return e->code;
    b->of[i].kind = rec.kind;
    b->of[i].form = rec.form;
    lm_code rc = lm_text_example_make(&r->o->maker, r->scratch[worker], &rec, &b->x, e);
    if (rc)
        lm_err_in(e, "%s:%lld", d->source, (long long)d->line);
    else
        rc = keep_ids(b, i, e);
    lm_text_record_fini(&rec);
    return rc;
}

static lm_code work_batch(void *ctx, void *item, int worker, lm_err *e)
{
    batch *b = item;
    lm_code rc = LM_OK;
    b->ids.n = 0;
    for (int i = 0; i < b->docs.n && !rc; i++) {
        rc = work_doc(ctx, b, i, worker, e);
        b->of[i].end = b->ids.n;
    }
    return rc;
}

static lm_code take(lm_text_examples *x, const batch *b, int i, lm_err *e)
{
    size_t from = i ? b->of[i - 1].end : 0, n = b->of[i].end - from;
    lm_text_examples_stats *st = &x->st;
    if (!st->records++)
        st->form = b->of[i].form;
    st->kind[b->of[i].kind]++;
    if (b->of[i].dropped) {
        st->dropped++;
        return LM_OK;
    }
    st->cut += b->of[i].cut > 0;
    st->cut_ids += (int64_t)b->of[i].cut;
    if (!b->of[i].trained) {
        st->silent++;
        return LM_OK;
    }
    st->trained += (int64_t)b->of[i].trained;
    return examples_append(x, b->ids.v + from, n, e);
}

static lm_code write_batch(void *ctx, void *item, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    lm_code rc = LM_OK;
    char note[48];
    for (int i = 0; i < b->docs.n && !rc; i++)
        if (!r->o->limit || r->x->st.records < r->o->limit)
            rc = take(r->x, b, i, e);
    lm_doc_pool_give(&r->pool, b);
    lm_input_stats in = lm_input_stat(r->in);
    snprintf(note, sizeof note, "%lld record%s", (long long)r->x->st.records,
             lm_plural((uint64_t)r->x->st.records));
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
    lm_doc_pool_init(&r->pool, sizeof(batch), fini_batch);
    lm_code rc = lm_alloc_n(&r->scratch, (size_t)n, sizeof *r->scratch, "scratch", e);
    for (int i = 0; i < n && !rc; i++)
        rc = lm_text_example_scratch_new(&r->o->maker, &r->scratch[i], e);
    if (!rc)
        rc = lm_par_pipe(par, &ops, e);
    for (int i = 0; i < n && r->scratch; i++)
        lm_text_example_scratch_free(r->scratch[i]);
    lm_doc_pool_fini(&r->pool);
    lm_free(r->scratch);
    return rc;
}

static lm_code check_some(const lm_text_examples_opts *o, const lm_text_examples *x, lm_err *e)
{
    const lm_text_examples_stats *st = &x->st;
    const char *name = o->n ? o->path[0] : "standard input";
    if (st->examples || lm_stopping())
        return LM_OK;
    if (!st->records)
        return lm_fail(e, LM_EUSAGE, name, "give at least one", "holds no record");
    if (st->dropped)
        return lm_fail(e, LM_EUSAGE, name, "use longer windows, or cut examples",
                       "every example is longer than %lld tokens", (long long)o->maker.most);
    return lm_fail(e, LM_EUSAGE, name, "train on all of the text, or check where answers begin",
                   "no example has a token that is trained (%lld record%s)", (long long)st->records,
                   lm_plural((uint64_t)st->records));
}

lm_code lm_text_examples_read(const lm_text_examples_opts *o, lm_par *par, lm_text_examples **out,
                              lm_err *e)
{
    const lm_input_opts in = { .kind = LM_INPUT_AUTO };
    lm_text_examples *x = NULL;
    run r = { .o = o };
    *out = NULL;
    if (examples_new(o->tmp, &x, e))
        return e->code;
    r.x = x;
    lm_code rc = lm_input_open(&in, o->path, o->n, &r.in, e);
    rc = rc ? rc : run_pipe(&r, par, e);
    lm_input_close(r.in);
    rc = rc ? rc : check_some(o, x, e);
    rc = rc ? rc : examples_finish(x, e);
    if (rc)
        lm_text_examples_free(x);
    else
        *out = x;
    return rc;
}
