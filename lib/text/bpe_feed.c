/* SPDX-License-Identifier: Apache-2.0 */
/* Counting words of a stream of documents on many threads: batches of documents go through a pipe
 * whose workers count into tables of their own; counts are added at the end, so the order of
 * batches does not matter. */
#include "base/mem.h"
#include "base/stop.h"
#include "text/bpe_train.h"

enum { BATCH_DOCS = 256, BATCH_BYTES = 512 << 10 };

typedef struct {
    lm_doc docs[BATCH_DOCS];
    int n;
} batch;

typedef struct {
    lm_bpe_trainer *trainer;
    const lm_input_opts *opts;
    lm_input *in;
    lm_sink *sink;
} feed;

static void drop_batch(void *ctx, void *item)
{
    batch *b = item;

    (void)ctx;
    for (int i = 0; i < BATCH_DOCS; i++)
        lm_doc_fini(&b->docs[i]);
    lm_free(b);
}

static lm_code read_batch(void *ctx, void **item, lm_err *e)
{
    feed *f = ctx;
    batch *b = NULL;
    size_t bytes = 0;
    bool got = true;
    lm_code rc = lm_alloc_n(&b, 1, sizeof *b, "documents", e);

    while (!rc && got && b->n < BATCH_DOCS && bytes < BATCH_BYTES) {
        rc = lm_input_next(f->in, &b->docs[b->n], &got, e);
        if (!rc && got)
            bytes += b->docs[b->n++].raw.len;
    }
    if (!rc && lm_stopping())
        rc = lm_fail(e, LM_EIO, "training", NULL, "stopped by signal %d", lm_stop_signal());
    if (!rc && b->n) {
        lm_input_stats s = lm_input_stat(f->in);
        lm_progress(f->sink, "counting words", (double)s.bytes, (double)s.total, "bytes", NULL);
        *item = b;
        return LM_OK;
    }
    if (b)
        drop_batch(NULL, b);
    *item = NULL;
    return rc;
}

static lm_code count_batch(void *ctx, void *item, int worker, lm_err *e)
{
    feed *f = ctx;
    batch *b = item;
    lm_code rc = LM_OK;

    for (int i = 0; i < b->n && !rc; i++) {
        rc = lm_doc_decode(f->opts, &b->docs[i], e);
        if (!rc && !b->docs[i].skip)
            rc = lm_bpe_trainer_add(f->trainer, worker, b->docs[i].text, b->docs[i].len, e);
    }
    return rc;
}

static lm_code end_batch(void *ctx, void *item, lm_err *e)
{
    (void)e;
    drop_batch(ctx, item);
    return LM_OK;
}

lm_code lm_bpe_trainer_feed(lm_bpe_trainer *t, lm_par *par, const lm_input_opts *o, lm_input *in,
                            lm_sink *sink, lm_err *e)
{
    feed f = { t, o, in, sink };
    lm_pipe_ops ops = { .read = read_batch,
                        .work = count_batch,
                        .write = end_batch,
                        .drop = drop_batch,
                        .ctx = &f,
                        .depth = 2 * lm_par_threads(par) + 2 };

    return lm_par_pipe(par, &ops, e);
}
