/* SPDX-License-Identifier: Apache-2.0 */
/* feed.c -- windows of a token stream in a counted order. */
#include "train/feed.h"

#include <inttypes.h>

#include "base/mem.h"
#include "base/text.h"

enum { MADE_UP = 1 << 16 }; /* windows of random ids */

struct lm_feed {
    const lm_tokens *t;
    lm_feed_opts o;
    int64_t windows;
    uint32_t *ids; /* T+1 */
};

lm_code lm_feed_enough(const lm_tokens *t, int64_t seq, lm_err *e)
{
    int64_t have = lm_tokens_count(t);
    if (have > seq)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, lm_tokens_path(t), "use shorter sequences or more text",
                   "%" PRId64 " token%s, but a sequence needs %" PRId64, have, lm_plural(have),
                   seq + 1);
}

lm_code lm_feed_new(const lm_tokens *t, const lm_feed_opts *o, lm_feed **out, lm_err *e)
{
    lm_feed *f = NULL;
    int64_t have = t ? lm_tokens_count(t) : o->seq * MADE_UP + 1;
    *out = NULL;
    if (t && lm_feed_enough(t, o->seq, e))
        return e->code;
    if (lm_alloc_n(&f, 1, sizeof *f, "a data feed", e))
        return e->code;
    *f = (lm_feed){ .t = t, .o = *o, .windows = (have - 1) / o->seq };
    if (lm_alloc_n(&f->ids, (size_t)o->seq + 1, sizeof *f->ids, "a data feed", e)) {
        lm_free(f);
        return e->code;
    }
    *out = f;
    return LM_OK;
}

void lm_feed_free(lm_feed *f)
{
    if (!f)
        return;
    lm_free(f->ids);
    lm_free(f);
}

int64_t lm_feed_windows(const lm_feed *f)
{
    return f->windows;
}

/* The ids of window w and the one behind it. */
static lm_code read_ids(lm_feed *f, int64_t w, lm_err *e)
{
    int64_t n = f->o.seq + 1;
    if (f->t)
        return lm_tokens_read(f->t, w * f->o.seq, n, f->o.vocab, f->ids, e);
    lm_rng r = lm_rng_make(f->o.seed, "measure", (uint64_t)w);
    for (int64_t i = 0; i < n; i++)
        f->ids[i] = (uint32_t)lm_rng_below(r, (uint64_t)i, (uint64_t)f->o.vocab);
    return LM_OK;
}

/* Positions, first keys, and targets removed at the ends of documents. */
static void mark_documents(const lm_feed *f, int64_t at, int32_t *targets, int32_t *pos,
                           int32_t *lo)
{
    int64_t d = lm_tokens_doc_of(f->t, at), docs = lm_tokens_docs(f->t), start = 0;
    for (int64_t i = 0; i < f->o.seq; i++) {
        while (d + 1 < docs && lm_tokens_doc_start(f->t, d + 1) <= at + i) {
            d++;
            start = i;
        }
        if (d + 1 < docs && lm_tokens_doc_start(f->t, d + 1) == at + i + 1)
            targets[i] = -1;
        pos[i] = (int32_t)(i - start);
        if (lo)
            lo[i] = (int32_t)start;
    }
}

/* The window of the dataset with number `index` in the series. */
static int64_t window_of(const lm_feed *f, int64_t index)
{
    int64_t epoch = index / f->windows, w = index % f->windows;
    if (!f->o.shuffle)
        return w;
    return (int64_t)lm_rng_permute(lm_rng_make(f->o.seed, "shuffle", (uint64_t)epoch), (uint64_t)w,
                                   (uint64_t)f->windows);
}

static void mark(const lm_feed *f, int64_t w, int32_t *targets, int32_t *pos, int32_t *lo,
                 int64_t *valid)
{
    for (int64_t i = 0; i < f->o.seq; i++) {
        pos[i] = (int32_t)i;
        if (lo)
            lo[i] = 0;
    }
    if (f->t && f->o.documents)
        mark_documents(f, w * f->o.seq, targets, pos, lo);
    *valid = 0;
    for (int64_t i = 0; i < f->o.seq; i++)
        *valid += targets[i] >= 0;
}

lm_code lm_feed_window(lm_feed *f, int64_t index, int32_t *tokens, int32_t *targets, int32_t *pos,
                       int32_t *lo, int64_t *valid, lm_err *e)
{
    int64_t w = window_of(f, index);
    if (read_ids(f, w, e))
        return e->code;
    for (int64_t i = 0; i < f->o.seq; i++) {
        tokens[i] = (int32_t)f->ids[i];
        targets[i] = (int32_t)f->ids[i + 1];
    }
    mark(f, w, targets, pos, lo, valid);
    return LM_OK;
}

void lm_feed_marks(const lm_feed *f, int64_t index, int32_t *targets, int32_t *pos, int32_t *lo,
                   int64_t *valid)
{
    for (int64_t i = 0; i < f->o.seq; i++)
        targets[i] = 0;
    mark(f, window_of(f, index), targets, pos, lo, valid);
}
