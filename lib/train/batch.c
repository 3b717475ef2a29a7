/* SPDX-License-Identifier: Apache-2.0 */
/* batch.c -- micro-batches. */
#include "train/batch.h"

#include <string.h>

enum { LINE = 64 };

/* Each array begins on a cache line: kernels may require it. */
static size_t array_bytes(int64_t batch, int64_t seq)
{
    return ((size_t)(batch * seq) * sizeof(int32_t) + LINE - 1) / LINE * LINE;
}

/* Arrays of a batch: those of each, and with modules two of each module and one of all. */
enum { ARRAYS = 10 };

static size_t arrays(int64_t ahead)
{
    return ARRAYS + (ahead ? 2 * (size_t)ahead + 1 : 0);
}

static size_t now_bytes(int n_now)
{
    size_t now = ((size_t)n_now * sizeof(double) + LINE - 1) / LINE * LINE;
    return now ? now : LINE;
}

/* Behind the numbers of the update: the source, what its rows see, and what the rows of both see. */
static size_t source_bytes(int64_t batch, int64_t seq, int64_t source_rows)
{
    if (!source_rows)
        return 0;
    return 2 * array_bytes(batch, source_rows) + array_bytes(batch, source_rows + seq);
}

size_t lm_batch_bytes(int64_t batch, int64_t seq, int n_now, int64_t ahead, int64_t source_rows)
{
    return arrays(ahead) * array_bytes(batch, seq) + LINE + now_bytes(n_now) +
           source_bytes(batch, seq, source_rows);
}

static void *part(void *base, const lm_batch *b, size_t i)
{
    return (char *)base + i * array_bytes(b->batch, b->seq);
}

static double *now_of(void *base, const lm_batch *b)
{
    return (double *)part(base, b, arrays(b->ahead)) + LINE / sizeof(double);
}

/* Where module k's array number i is, of what it reads (0) and predicts (1). */
static size_t ahead_part(int64_t k, int i)
{
    return ARRAYS + 2 * (size_t)k + (size_t)i;
}

/* Array i of the source: its ids, what its rows see, what the rows of both see. */
static int32_t *source_part(void *base, const lm_batch *b, int i)
{
    return (int32_t *)((char *)now_of(base, b) + now_bytes(b->n_now) +
                       (size_t)i * array_bytes(b->batch, b->source_rows));
}

lm_code lm_batch_new(lm_batch *b, lm_backend *on, int64_t batch, int64_t seq, int n_now, lm_err *e)
{
    return lm_batch_new_ahead(b, on, batch, seq, n_now, 0, e);
}

lm_code lm_batch_new_ahead(lm_batch *b, lm_backend *on, int64_t batch, int64_t seq, int n_now,
                           int64_t ahead, lm_err *e)
{
    return lm_batch_new_pairs(b, on, batch, seq, n_now, ahead, 0, e);
}

lm_code lm_batch_new_pairs(lm_batch *b, lm_backend *on, int64_t batch, int64_t seq, int n_now,
                           int64_t ahead, int64_t source_rows, lm_err *e)
{
    *b = (lm_batch){
        .batch = batch, .seq = seq, .n_now = n_now, .ahead = ahead, .source_rows = source_rows
    };
    if (lm_mirror_new(on, lm_batch_bytes(batch, seq, n_now, ahead, source_rows), "a batch",
                      &b->rooms, e))
        return e->code;
    b->tokens = part(b->rooms.host, b, 0);
    b->targets = part(b->rooms.host, b, 1);
    b->pos = part(b->rooms.host, b, 2);
    b->lo = part(b->rooms.host, b, 3);
    b->scale = part(b->rooms.host, b, 4);
    b->dvalue = part(b->rooms.host, b, 5);
    b->dentropy = part(b->rooms.host, b, 6);
    for (int64_t k = 0; k < ahead; k++) {
        b->ahead_tokens[k] = part(b->rooms.host, b, ahead_part(k, 0));
        b->ahead_targets[k] = part(b->rooms.host, b, ahead_part(k, 1));
    }
    b->dahead = ahead ? part(b->rooms.host, b, ahead_part(ahead, 0)) : NULL;
    b->hi = part(b->rooms.host, b, 7);
    b->types = part(b->rooms.host, b, 8);
    b->follows = part(b->rooms.host, b, 9);
    b->daux = part(b->rooms.host, b, arrays(ahead));
    b->now = now_of(b->rooms.host, b);
    memset(b->types, 0, (size_t)(batch * seq) * sizeof *b->types);
    memset(b->follows, 0, (size_t)(batch * seq) * sizeof *b->follows);
    if (!source_rows)
        return LM_OK;
    b->source = source_part(b->rooms.host, b, 0);
    b->source_hi = source_part(b->rooms.host, b, 1);
    b->cross_hi = source_part(b->rooms.host, b, 2);
    for (int64_t i = 0; i < batch; i++)
        lm_batch_set_length(b, i, source_rows);
    return LM_OK;
}

void lm_batch_fini(lm_batch *b)
{
    lm_mirror_fini(&b->rooms);
    memset(b, 0, sizeof *b);
}

void lm_batch_set_length(lm_batch *b, int64_t i, int64_t length)
{
    const int64_t rows = b->source_rows, all = rows + b->seq;
    for (int64_t k = 0; k < rows; k++)
        b->source_hi[i * rows + k] = (int32_t)length;
    for (int64_t k = 0; k < all; k++)
        b->cross_hi[i * all + k] = k < rows ? 0 : (int32_t)length;
}

/* One window, at the rows of sequence i. */
static lm_code fill_one(lm_batch *b, lm_feed *f, int64_t index, int64_t i, int64_t *valid,
                        lm_err *e)
{
    const int64_t at = i * b->seq;
    for (int64_t t = 0; t < b->seq; t++) {
        b->lo[at + t] = 0;
        b->hi[at + t] = (int32_t)b->seq;
    }
    if (b->source) {
        int64_t length = b->source_rows;
        if (lm_feed_pair(f, index, b->source + i * b->source_rows, &length, b->tokens + at,
                         b->targets + at, b->pos + at, valid, e))
            return e->code;
        lm_batch_set_length(b, i, length);
        return LM_OK;
    }
    if (lm_feed_has_sentences(f))
        return lm_feed_sentences(f, index, b->tokens + at, b->targets + at, b->pos + at, b->lo + at,
                                 b->hi + at, b->types + at, b->follows + i, valid, e);
    return lm_feed_window(f, index, b->tokens + at, b->targets + at, b->pos + at, b->lo + at,
                          b->hi + at, valid, e);
}

lm_code lm_batch_fill(lm_batch *b, lm_feed *f, int64_t index, int64_t end, lm_err *e)
{
    b->valid = 0;
    for (int64_t i = 0; i < b->batch; i++) {
        int64_t at = i * b->seq, valid = 0;
        if (index + i < end) {
            if (fill_one(b, f, index + i, i, &valid, e))
                return e->code;
            b->valid += valid;
            continue;
        }
        for (int64_t t = 0; t < b->source_rows; t++)
            b->source[i * b->source_rows + t] = 0;
        for (int64_t t = 0; t < b->seq; t++) {
            b->tokens[at + t] = 0;
            b->targets[at + t] = -1;
            b->pos[at + t] = (int32_t)t;
            b->lo[at + t] = 0;
            b->hi[at + t] = (int32_t)b->seq;
        }
    }
    return LM_OK;
}

void lm_batch_fill_ahead(lm_batch *b)
{
    for (int64_t k = 0; k < b->ahead; k++) {
        b->ahead_valid[k] = 0;
        for (int64_t i = 0; i < b->batch * b->seq; i++) {
            const int64_t by = k + 1, at = i + by;
            const bool inside = i % b->seq + by < b->seq && b->pos[at] == b->pos[i] + by;
            b->ahead_tokens[k][i] = inside ? b->tokens[at] : 0;
            b->ahead_targets[k][i] = inside ? b->targets[at] : -1;
            b->ahead_valid[k] += b->ahead_targets[k][i] >= 0;
        }
    }
}

void lm_batch_mark(lm_batch *b, lm_feed *f, int64_t index)
{
    b->valid = 0;
    for (int64_t i = 0; i < b->batch; i++) {
        int64_t at = i * b->seq, valid;
        lm_feed_marks(f, index + i, b->targets + at, b->pos + at, b->lo + at, b->hi + at, &valid);
        b->valid += valid;
    }
}

void lm_batch_scale(lm_batch *b, float scale)
{
    for (int64_t i = 0; i < b->batch * b->seq; i++)
        b->scale[i] = scale;
}

void lm_batch_scale_ahead(lm_batch *b, float scale)
{
    for (int64_t i = 0; b->ahead && i < b->batch * b->seq; i++)
        b->dahead[i] = scale;
}

int64_t lm_batch_pairs(const lm_batch *b, int64_t window, bool both)
{
    int64_t pairs = 0, most = window > 0 ? window : INT64_MAX;
    for (int64_t s = 0; s < b->batch; s++)
        for (int64_t i = 0; i < b->seq; i++) {
            int64_t back = i + 1 - b->lo[s * b->seq + i];
            int64_t on = both ? b->hi[s * b->seq + i] - i : 1;
            pairs += (back < most ? back : most) + (on < most ? on : most) - 1;
        }
    return pairs;
}

lm_code lm_batch_push(lm_batch *b, lm_stream *s, lm_err *e)
{
    return lm_mirror_push(&b->rooms, b->rooms.bytes, s, e);
}

double *lm_batch_now(const lm_batch *b, void *dev)
{
    return now_of(dev, b);
}

static void bind_source(const lm_batch *b, void *dev, const lm_model *m, lm_exec *x)
{
    const lm_vid value[3] = { m->source, m->source_hi, m->cross_hi };
    for (int i = 0; i < 3 && b->source; i++)
        lm_exec_bind(x, value[i], source_part(dev, b, i));
}

void lm_batch_bind_at(const lm_batch *b, void *dev, const lm_model *m, lm_exec *x)
{
    lm_exec_bind(x, m->tokens, part(dev, b, 0));
    lm_exec_bind(x, m->targets, part(dev, b, 1));
    lm_exec_bind(x, m->pos, part(dev, b, 2));
    if (m->scale != LM_NONE)
        lm_exec_bind(x, m->scale, part(dev, b, 4));
    if (m->dvalue != LM_NONE)
        lm_exec_bind(x, m->dvalue, part(dev, b, 5));
    if (m->dentropy != LM_NONE)
        lm_exec_bind(x, m->dentropy, part(dev, b, 6));
    if (m->daux != LM_NONE)
        lm_exec_bind(x, m->daux, part(dev, b, arrays(b->ahead)));
    for (int64_t k = 0; k < b->ahead; k++) {
        lm_exec_bind(x, m->ahead_tokens[k], part(dev, b, ahead_part(k, 0)));
        lm_exec_bind(x, m->ahead_targets[k], part(dev, b, ahead_part(k, 1)));
    }
    if (b->ahead)
        lm_exec_bind(x, m->dahead, part(dev, b, ahead_part(b->ahead, 0)));
    if (m->lo != LM_NONE)
        lm_exec_bind(x, m->lo, part(dev, b, 3));
    if (m->hi != LM_NONE)
        lm_exec_bind(x, m->hi, part(dev, b, 7));
    if (m->follows != LM_NONE)
        lm_exec_bind(x, m->follows, part(dev, b, 9));
    if (m->types != LM_NONE)
        lm_exec_bind(x, m->types, part(dev, b, 8));
    bind_source(b, dev, m, x);
}

void lm_batch_bind(const lm_batch *b, const lm_model *m, lm_exec *x)
{
    lm_batch_bind_at(b, b->rooms.dev, m, x);
}
