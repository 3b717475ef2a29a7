/* SPDX-License-Identifier: Apache-2.0 */
/* shard_run.c -- see shard_run.h. */
#include "text/shard_run.h"

#include <stdio.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "text/doc_batch.h"

typedef struct {
    lm_doc_batch docs; /* first, for the pool */
    /* Ids of a document: [.., mid) belong to the training split, [mid, end) is held out.  A part
     * that is not `there` is not counted as a document. */
    size_t mid[LM_BATCH_DOCS], end[LM_BATCH_DOCS];
    bool there[LM_BATCH_DOCS][LM_SPLITS];
    lm_ids ids;
    lm_text_example example; /* of a record */
    size_t trained[LM_BATCH_DOCS];
    bool dropped[LM_BATCH_DOCS];
} batch;

typedef struct {
    const lm_shard_job *job;
    lm_input *in;
    const lm_input_opts *in_opts;
    const lm_tokenizer *tok;
    lm_tok_scratch **scratch;         /* by worker */
    lm_text_example_scratch **making; /* the same; NULL without records */
    lm_shard_stats *st;
    lm_doc_pool pool;
} run;

/* True if a document with these bytes belongs to the validation split. */
static bool is_val(const void *data, size_t len, double fraction)
{
    /* "val-spli": a seed different from other hashes */
    static const uint64_t purpose = 0x76616c2d73706c69u;
    return (double)(lm_hash64(data, len, purpose) >> 11) * 0x1p-53 < fraction;
}

/* Bytes of text[0..len), valid UTF-8, that a contiguous split leaves to the training split. */
static size_t training_bytes(const char *text, size_t len, double fraction)
{
    size_t characters = 0, at = 0;
    for (size_t i = 0; i < len; i++)
        characters += ((unsigned char)text[i] & 0xC0) != 0x80;
    size_t keep = (size_t)((double)characters * (1 - fraction));
    for (; at < len; at++) {
        if (((unsigned char)text[at] & 0xC0) == 0x80)
            continue;
        if (!keep--)
            break;
    }
    return at;
}

static void fini_batch(void *item)
{
    lm_ids_fini(&((batch *)item)->ids);
    lm_text_example_fini(&((batch *)item)->example);
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

static lm_code add_id(lm_ids *ids, int64_t id, lm_err *e)
{
    if (id < 0)
        return LM_OK;
    lm_code rc = lm_grow(&ids->v, &ids->cap, ids->n + 1, sizeof *ids->v, "token ids", e);
    if (!rc)
        ids->v[ids->n++] = (uint32_t)id;
    return rc;
}

/* Append the ids of text[0..len), a document or a part of one. */
static lm_code add_text(run *r, batch *b, int worker, const char *text, size_t len, lm_err *e)
{
    const lm_shard_job *j = r->job;
    lm_code rc = j->eos_first ? add_id(&b->ids, j->eos, e) : LM_OK;
    if (!rc)
        rc = lm_tokenizer_encode(r->tok, r->scratch[worker], text, len, j->add_special, &b->ids, e);
    if (!rc && !j->eos_first)
        rc = add_id(&b->ids, j->eos, e);
    return rc;
}

/* An empty document counts in its split; an empty part of a document does not. */
static lm_code work_doc(run *r, batch *b, int i, int worker, lm_err *e)
{
    const lm_shard_job *j = r->job;
    const lm_doc *d = &b->docs.doc[i];
    bool val = !j->contiguous && is_val(d->text, d->len, j->val_fraction);
    size_t cut = j->contiguous ? training_bytes(d->text, d->len, j->val_fraction)
                 : val         ? 0
                               : d->len;
    bool *there = b->there[i];
    lm_code rc = LM_OK;
    there[LM_SPLIT_TRAIN] = !val && (cut > 0 || !d->len);
    there[LM_SPLIT_VAL] = val || cut < d->len;
    if (there[LM_SPLIT_TRAIN])
        rc = add_text(r, b, worker, d->text, cut, e);
    b->mid[i] = b->ids.n;
    if (!rc && there[LM_SPLIT_VAL])
        rc = add_text(r, b, worker, d->text + cut, d->len - cut, e);
    if (rc)
        lm_err_in(e, "%s:%lld", d->source, (long long)d->line);
    return rc;
}

/* Append the ids of an example with their marks.  The first id follows nothing: it is never
 * predicted. */
static lm_code add_example(batch *b, int i, lm_err *e)
{
    const lm_text_example *x = &b->example;
    if (lm_grow(&b->ids.v, &b->ids.cap, b->ids.n + x->ids.n, sizeof *b->ids.v, "token ids", e))
        return e->code;
    for (size_t k = 0; k < x->ids.n; k++) {
        bool trains = k && x->trains[k];
        b->ids.v[b->ids.n++] = x->ids.v[k] | (trains ? LM_TOKENS_TRAINS : 0);
        b->trained[i] += trains;
    }
    return LM_OK;
}

/* A record belongs to one split as a whole; one without an id that trains to neither. */
static lm_code work_record(run *r, batch *b, int i, int worker, lm_err *e)
{
    const lm_doc *d = &b->docs.doc[i];
    lm_text_record rec = { 0 };
    size_t from = b->ids.n;
    bool val = is_val(d->raw.data, d->raw.len, r->job->val_fraction);
    if (lm_text_record_of_doc(d, r->job->map, &rec, e))
        return e->code;
    lm_code rc = lm_text_example_make(r->job->maker, r->making[worker], &rec, &b->example, e);
    if (rc)
        lm_err_in(e, "%s:%lld", d->source, (long long)d->line);
    b->trained[i] = 0;
    b->dropped[i] = b->example.dropped;
    rc = rc ? rc : add_example(b, i, e);
    if (!rc && !b->trained[i])
        b->ids.n = from;
    b->there[i][LM_SPLIT_TRAIN] = b->trained[i] && !val;
    b->there[i][LM_SPLIT_VAL] = b->trained[i] && val;
    b->mid[i] = val ? from : b->ids.n;
    lm_text_record_fini(&rec);
    return rc;
}

static lm_code work_batch(void *ctx, void *item, int worker, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    lm_code rc = LM_OK;
    b->ids.n = 0;
    for (int i = 0; i < b->docs.n && !rc; i++) {
        lm_doc *d = &b->docs.doc[i];
        if (r->job->maker)
            rc = work_record(r, b, i, worker, e);
        else
            rc = lm_doc_decode(r->in_opts, d, e);
        if (!r->job->maker && !rc && !d->skip)
            rc = work_doc(r, b, i, worker, e);
        b->end[i] = b->ids.n;
    }
    return rc;
}

/* Add the parts of document i to their pools. */
static lm_code add_parts(run *r, const batch *b, int i, lm_err *e)
{
    const size_t from[LM_SPLITS] = { i ? b->end[i - 1] : 0, b->mid[i] };
    const size_t to[LM_SPLITS] = { b->mid[i], b->end[i] };
    lm_code rc = LM_OK;
    for (int s = 0; s < LM_SPLITS && !rc; s++)
        if (b->there[i][s])
            rc = lm_tokens_pool_add(r->job->pool[s], b->docs.doc[i].operand, b->ids.v + from[s],
                                    (int64_t)(to[s] - from[s]), e);
    return rc;
}

static lm_code write_batch(void *ctx, void *item, lm_err *e)
{
    run *r = ctx;
    batch *b = item;
    lm_code rc = LM_OK;
    char note[48];
    for (int i = 0; i < b->docs.n && !rc; i++) {
        const lm_doc *d = &b->docs.doc[i];
        if (d->skip) {
            r->st->skipped += !d->broken;
            continue;
        }
        r->st->documents++;
        r->st->bytes += (int64_t)(r->job->maker ? d->raw.len : d->len);
        r->st->replaced += d->bad;
        if (r->job->maker) {
            r->st->trained += (int64_t)b->trained[i];
            r->st->dropped += b->dropped[i];
            r->st->silent += !b->trained[i] && !b->dropped[i];
        }
        rc = add_parts(r, b, i, e);
    }
    lm_doc_pool_give(&r->pool, b);
    lm_input_stats in = lm_input_stat(r->in);
    snprintf(note, sizeof note, "%lld document%s", (long long)r->st->documents,
             lm_plural(r->st->documents));
    lm_progress(r->job->sink, "tokenising", (double)in.bytes, (double)in.total, "bytes", note);
    return rc;
}

lm_code lm_shard_text(const lm_shard_job *job, lm_input *in, const lm_input_opts *in_opts,
                      const lm_tokenizer *tok, lm_par *par, lm_shard_stats *st, lm_err *e)
{
    int n = lm_par_threads(par);
    run r = { .job = job, .in = in, .in_opts = in_opts, .tok = tok, .st = st };
    lm_pipe_ops ops = { .read = read_batch,
                        .work = work_batch,
                        .write = write_batch,
                        .drop = drop_batch,
                        .ctx = &r,
                        .depth = 2 * n + 2 };
    lm_doc_pool_init(&r.pool, sizeof(batch), fini_batch);
    lm_code rc = lm_alloc_n(&r.scratch, (size_t)n, sizeof *r.scratch, "scratch", e);
    for (int i = 0; i < n && !rc; i++)
        rc = lm_tok_scratch_new(tok, &r.scratch[i], e);
    if (!rc && job->maker)
        rc = lm_alloc_n(&r.making, (size_t)n, sizeof *r.making, "scratch", e);
    for (int i = 0; i < n && !rc && job->maker; i++)
        rc = lm_text_example_scratch_new(job->maker, &r.making[i], e);
    if (!rc)
        rc = lm_par_pipe(par, &ops, e);
    for (int i = 0; i < n && r.scratch; i++)
        lm_tok_scratch_free(r.scratch[i]);
    for (int i = 0; i < n && r.making; i++)
        lm_text_example_scratch_free(r.making[i]);
    lm_free(r.making);
    lm_doc_pool_fini(&r.pool);
    lm_free(r.scratch);
    return rc;
}

/* ---- shards to shards ---- */

/* ids[0..n) without the end-of-text id at the position that this format uses. */
static void strip_eos(const lm_tokens *t, int64_t eos, const uint32_t **ids, int64_t *n)
{
    if (eos < 0 || *n == 0)
        return;
    if (lm_tokens_format(t) == LM_TOKENS_LLMC && **ids == eos) {
        (*ids)++;
        (*n)--;
    } else if (lm_tokens_format(t) != LM_TOKENS_LLMC && (*ids)[*n - 1] == eos) {
        (*n)--;
    }
}

/* ids[0..n) with the end-of-text id where the output format has it, before or behind them; the
 * caller provides space for it there. */
static lm_code add_ids(const lm_shard_job *job, int split, int source, uint32_t *ids, int64_t n,
                       lm_err *e)
{
    uint32_t *first = ids, *eos = ids + n;
    if (job->eos < 0)
        return lm_tokens_pool_add(job->pool[split], source, ids, n, e);
    if (job->eos_first)
        first = eos = ids - 1;
    uint32_t lent = *eos;
    *eos = (uint32_t)job->eos | (job->masked && n ? ids[n - 1] & LM_TOKENS_TRAINS : 0);
    lm_code rc = lm_tokens_pool_add(job->pool[split], source, first, n + 1, e);
    *eos = lent;
    return rc;
}

/* marks: of the ids; NULL: there are none. */
static lm_code add_document(const lm_shard_job *job, int source, uint32_t *ids, int64_t n,
                            const uint8_t *marks, lm_err *e)
{
    bool val = !job->contiguous && is_val(ids, (size_t)n * sizeof *ids, job->val_fraction);
    for (int64_t i = 0; marks && i < n; i++)
        ids[i] |= marks[i] ? LM_TOKENS_TRAINS : 0;
    int64_t cut = job->contiguous ? (int64_t)((double)n * (1 - job->val_fraction)) : val ? 0 : n;
    lm_code rc = LM_OK;
    if (!val && (cut > 0 || !n))
        rc = add_ids(job, LM_SPLIT_TRAIN, source, ids, cut, e);
    if (!rc && (val || cut < n))
        rc = add_ids(job, LM_SPLIT_VAL, source, ids + cut, n - cut, e);
    return rc;
}

lm_code lm_shard_tokens(const lm_shard_job *job, const lm_tokens *t, int source, lm_shard_stats *st,
                        lm_err *e)
{
    lm_ids doc = { 0 };
    uint8_t *marks = NULL;
    size_t cap = 0;
    int64_t docs = lm_tokens_docs(t);
    lm_code rc = LM_OK;
    for (int64_t d = 0; d < docs && !rc && !lm_stopping(); d++) {
        int64_t from = lm_tokens_doc_start(t, d), n = lm_tokens_doc_start(t, d + 1) - from;
        rc = lm_grow(&doc.v, &doc.cap, (size_t)n + 2, sizeof *doc.v, "ids of a document", e);
        if (!rc)
            rc = lm_tokens_read(t, from, n, LM_ANY_ID, doc.v + 1, e);
        if (!rc && job->masked)
            rc = lm_grow(&marks, &cap, (size_t)n + 1, 1, "loss marks", e);
        if (!rc && job->masked)
            rc = lm_tokens_read_mask(t, from, n, marks, e);
        if (rc)
            break;
        const uint32_t *ids = doc.v + 1;
        strip_eos(t, job->eos, &ids, &n);
        int64_t skipped = ids - (doc.v + 1);
        rc = add_document(job, source, doc.v + (ids - doc.v), n, marks ? marks + skipped : NULL, e);
        st->documents++;
        if (d % 1024 == 0)
            lm_progress(job->sink, "reading", (double)from, (double)lm_tokens_count(t), "tokens",
                        NULL);
    }
    lm_ids_fini(&doc);
    lm_free(marks);
    return rc;
}
