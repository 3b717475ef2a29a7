/* clean_run.c -- see clean_run.h: batches of documents through lm_par_pipe. */
#include "text/clean_run.h"

#include <pthread.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"

enum { BATCH_DOCS = 64, BATCH_BYTES = 1 << 20 };

typedef struct batch {
    lm_doc doc[BATCH_DOCS];
    lm_clean_result result[BATCH_DOCS];
    lm_dedup_sig sig[BATCH_DOCS];
    size_t end[BATCH_DOCS]; /* of its line in `lines` */
    lm_buf lines;
    int n;
    struct batch *next; /* in the list of free ones */
} batch;

typedef struct {
    const lm_clean_job *job;
    lm_clean_stats *st;
    lm_clean_scratch **scratch; /* by worker */
    lm_dedup *dedup;
    lm_buf note;
    pthread_mutex_t lock; /* of `free` */
    batch *free;
} run;

static void free_batch(batch *b)
{
    if (!b)
        return;
    for (int i = 0; i < BATCH_DOCS; i++) {
        lm_doc_fini(&b->doc[i]);
        lm_dedup_sig_fini(&b->sig[i]);
    }
    lm_buf_fini(&b->lines);
    lm_free(b);
}

static lm_code take_batch(run *r, batch **out, lm_err *e)
{
    pthread_mutex_lock(&r->lock);
    *out = r->free;
    if (*out)
        r->free = (*out)->next;
    pthread_mutex_unlock(&r->lock);
    if (*out) {
        (*out)->n = 0;
        return LM_OK;
    }
    return lm_alloc_n(out, 1, sizeof **out, "a batch of documents", e);
}

static void give_batch(void *ctx, void *item)
{
    run *r = ctx;
    batch *b = item;
    pthread_mutex_lock(&r->lock);
    b->next = r->free;
    r->free = b;
    pthread_mutex_unlock(&r->lock);
}

static lm_code read_batch(void *ctx, void **item, lm_err *e)
{
    run *r = ctx;
    batch *b;
    size_t bytes = 0;
    bool got = true;
    *item = NULL;
    lm_code rc = take_batch(r, &b, e);
    if (rc)
        return rc;
    while (b->n < BATCH_DOCS && bytes < BATCH_BYTES && !lm_stopping()) {
        rc = lm_input_next(r->job->in, &b->doc[b->n], &got, e);
        if (rc || !got)
            break;
        bytes += b->doc[b->n++].raw.len;
    }
    if (rc || b->n == 0)
        give_batch(r, b);
    else
        *item = b;
    return rc;
}

static lm_code work_batch(void *ctx, void *item, int worker, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    const lm_clean_job *j = r->job;
    lm_code rc = LM_OK;
    b->lines.len = 0;
    for (int i = 0; i < b->n && !rc; i++) {
        lm_doc *d = &b->doc[i];
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

static lm_code put(FILE *f, const char *name, const void *p, size_t n, lm_err *e)
{
    if (fwrite(p, 1, n, f) == n)
        return LM_OK;
    return lm_fail_write(name, e);
}

/* Say in the file of dropped documents which rule it was. */
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
    b->len--; /* the document goes in before the brace */
    rc = lm_buf_add(b, ",\"document\":", 12, e);
    if (!rc && !d->skip)
        rc = lm_doc_write(r->job->in_opts, d, d->text, d->len, b, e);
    else if (!rc)
        rc = lm_buf_add(b, "null\n", 5, e); /* no JSON can hold it */
    if (!rc && b->data[b->len - 1] == '\n')
        b->len--;
    rc = rc ? rc : lm_buf_add(b, "}\n", 2, e);
    return rc ? rc : put(r->job->dropped, r->job->dropped_name, b->data, b->len, e);
}

static lm_code write_doc(run *r, batch *b, int i, lm_err *e)
{
    const lm_doc *d = &b->doc[i];
    const lm_clean_result *res = &b->result[i];
    lm_clean_stats *st = r->st;
    lm_dedup_verdict v = LM_DEDUP_NEW;
    lm_code rc = LM_OK;
    size_t from = i ? b->end[i - 1] : 0;
    st->documents++;
    if (d->skip) {
        st->invalid++;
        return note_drop(r, d, "invalid-utf8", e);
    }
    st->replaced += d->bad;
    st->chars_in += (int64_t)d->len;
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
    st->chars_out += (int64_t)res->len;
    return put(r->job->out, r->job->out_name, b->lines.data + from, b->end[i] - from, e);
}

static lm_code write_batch(void *ctx, void *item, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    lm_code rc = LM_OK;
    for (int i = 0; i < b->n && !rc; i++)
        rc = write_doc(r, b, i, e);
    give_batch(r, b);
    lm_input_stats in = lm_input_stat(r->job->in);
    lm_progress(r->job->sink, "cleaning", (double)in.bytes, (double)in.total, "bytes", NULL);
    return rc;
}

lm_code lm_clean_stream(const lm_clean_job *job, lm_par *par, lm_clean_stats *st, lm_err *e)
{
    int n = lm_par_threads(par);
    run r = { .job = job, .st = st, .lock = PTHREAD_MUTEX_INITIALIZER };
    lm_pipe_ops ops = { .read = read_batch,
                        .work = work_batch,
                        .write = write_batch,
                        .drop = give_batch,
                        .ctx = &r,
                        .depth = 2 * n + 2 };
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
    while (r.free) {
        batch *b = r.free;
        r.free = b->next;
        free_batch(b);
    }
    lm_free(r.scratch);
    lm_buf_fini(&r.note);
    lm_dedup_free(r.dedup);
    return rc;
}
