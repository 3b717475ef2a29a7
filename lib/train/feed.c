/* SPDX-License-Identifier: Apache-2.0 */
/* feed.c -- windows of a token stream, or of packed examples, in a counted order. */
#include "train/feed.h"

#include <inttypes.h>

#include "base/mem.h"
#include "base/text.h"

enum { MADE_UP = 1 << 16 }; /* windows of random ids */

struct lm_feed {
    const lm_tokens *t;
    const lm_text_examples *x; /* packed: the examples of the windows in p */
    const lm_packing *p;
    lm_feed_opts o;
    int64_t windows;
    uint32_t *ids;  /* T+1; without examples */
    uint8_t *mask;  /* T+1, of a dataset with loss marks; NULL: everything trains */
    int32_t *read;  /* T, with mlm: for lm_feed_marks */
    lm_nsp *nsp;    /* with pairs */
    int32_t *types; /* T, with pairs: for lm_feed_marks */
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

/* Windows of pairs. */
static lm_code make_pairs(lm_feed *f, lm_err *e)
{
    const lm_feed_opts *o = &f->o;
    if (lm_nsp_new(f->t, o->nsp, o->seq, o->vocab, o->seed, &f->nsp, e) ||
        lm_alloc_n(&f->types, (size_t)o->seq, sizeof *f->types, "a data feed", e))
        return e->code;
    f->windows = lm_nsp_windows(f->nsp);
    return LM_OK;
}

lm_code lm_feed_new(const lm_tokens *t, const lm_feed_opts *o, lm_feed **out, lm_err *e)
{
    lm_feed *f = NULL;
    /* ids of a window, and how many the next one begins behind */
    int64_t n = o->span ? o->span->window : o->seq + !o->mlm, stride = o->span ? n : o->seq;
    int64_t have = t ? lm_tokens_count(t) : stride * MADE_UP + 1;
    *out = NULL;
    if (t && !o->nsp && lm_feed_enough(t, n - 1, e))
        return e->code;
    if (t && o->span && lm_tokens_masked(t))
        return lm_fail(e, LM_EUSAGE, lm_tokens_path(t), "use data without loss marks",
                       "its marks say which tokens train, but spans are drawn at random");
    if (lm_alloc_n(&f, 1, sizeof *f, "a data feed", e))
        return e->code;
    *f = (lm_feed){ .t = t, .o = *o, .windows = (have - n) / stride + 1 };
    if (lm_alloc_n(&f->ids, (size_t)n, sizeof *f->ids, "a data feed", e) ||
        (o->mlm && lm_alloc_n(&f->read, (size_t)n, sizeof *f->read, "a data feed", e)) ||
        (o->nsp && make_pairs(f, e)) ||
        (t && lm_tokens_masked(t) && lm_alloc_n(&f->mask, (size_t)n, 1, "a data feed", e))) {
        lm_feed_free(f);
        return e->code;
    }
    *out = f;
    return LM_OK;
}

lm_code lm_feed_new_packed(const lm_packed *p, const lm_feed_opts *o, lm_feed **out, lm_err *e)
{
    *out = NULL;
    if (lm_alloc_n(out, 1, sizeof **out, "a data feed", e))
        return e->code;
    **out = (lm_feed){ .x = p->examples, .p = p->pack, .o = *o, .windows = p->pack->windows };
    return LM_OK;
}

void lm_feed_free(lm_feed *f)
{
    if (!f)
        return;
    lm_free(f->ids);
    lm_free(f->mask);
    lm_free(f->read);
    lm_free(f->types);
    lm_nsp_free(f->nsp);
    lm_free(f);
}

int64_t lm_feed_windows(const lm_feed *f)
{
    return f->windows;
}

/* Ids that a window reads: those of a span, or its own and the one behind it that the last row predicts. */
static int64_t ids_of_window(const lm_feed *f)
{
    return f->o.span ? f->o.span->window : f->o.seq + !f->o.mlm;
}

static lm_code read_ids(const lm_feed *f, int64_t w, lm_err *e)
{
    int64_t n = ids_of_window(f), stride = f->o.span ? n : f->o.seq;
    if (f->t)
        return lm_tokens_read(f->t, w * stride, n, f->o.vocab, f->ids, e);
    lm_rng r = lm_rng_make(f->o.seed, "measure", (uint64_t)w);
    for (int64_t i = 0; i < n; i++)
        f->ids[i] = (uint32_t)lm_rng_below(r, (uint64_t)i, (uint64_t)f->o.vocab);
    return LM_OK;
}

/* Rows [from, to) end their document at `to`. */
static void set_end(int32_t *hi, int64_t from, int64_t to)
{
    for (int64_t i = from; hi && i < to; i++)
        hi[i] = (int32_t)to;
}

/* Positions, first keys and ends, and targets removed at the ends of documents. */
static void mark_documents(const lm_feed *f, int64_t at, int32_t *targets, int32_t *pos,
                           int32_t *lo, int32_t *hi)
{
    int64_t d = lm_tokens_doc_of(f->t, at), docs = lm_tokens_docs(f->t), start = 0;
    for (int64_t i = 0; i < f->o.seq; i++) {
        while (d + 1 < docs && lm_tokens_doc_start(f->t, d + 1) <= at + i) {
            d++;
            set_end(hi, start, i);
            start = i;
        }
        if (!f->o.mlm && d + 1 < docs && lm_tokens_doc_start(f->t, d + 1) == at + i + 1)
            targets[i] = -1;
        pos[i] = (int32_t)(i - start);
        if (lo)
            lo[i] = (int32_t)start;
    }
    set_end(hi, start, f->o.seq);
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

/* Remove the targets that the dataset's loss marks exclude.  Marks that are not 0 or 1 fail in
 * lm_feed_window. */
static void apply_mask(const lm_feed *f, int64_t at, int32_t *targets)
{
    lm_err unseen = { 0 };
    lm_tokens_read_mask(f->t, at, ids_of_window(f), f->mask, &unseen);
    for (int64_t i = 0; i < f->o.seq; i++)
        if (!f->mask[i + 1])
            targets[i] = -1;
}

static void mark(const lm_feed *f, int64_t w, int32_t *targets, int32_t *pos, int32_t *lo,
                 int32_t *hi, int64_t *valid)
{
    set_end(hi, 0, f->o.seq);
    for (int64_t i = 0; i < f->o.seq; i++) {
        pos[i] = (int32_t)i;
        if (lo)
            lo[i] = 0;
    }
    if (f->t && f->o.documents)
        mark_documents(f, w * f->o.seq, targets, pos, lo, hi);
    if (f->mask && !f->o.mlm)
        apply_mask(f, w * f->o.seq, targets);
    *valid = 0;
    for (int64_t i = 0; i < f->o.seq; i++)
        *valid += targets[i] >= 0;
}

/* One row of a packed window, which predicts `next` (with its mark) or nothing. */
static void fill_row(const lm_feed *f, int64_t i, int64_t start, int64_t *valid, uint32_t next,
                     int32_t *targets, int32_t *pos, int32_t *lo)
{
    bool trains = next & LM_TOKENS_TRAINS;
    targets[i] = trains ? (int32_t)(next & LM_TOKENS_ID) : -1;
    pos[i] = (int32_t)(i - start);
    *valid += trains;
    if (lo)
        lo[i] = f->o.documents ? (int32_t)start : 0;
}

static lm_code fail_id(const lm_feed *f, uint32_t id, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, "examples", "use the model's own tokenizer",
                   "id %u is not below the model's vocabulary of %" PRId64, id & LM_TOKENS_ID,
                   f->o.vocab);
}

/* Window w of the packed ones.  tokens NULL: only marks. */
static lm_code fill_packed(const lm_feed *f, int64_t w, int32_t *tokens, int32_t *targets,
                           int32_t *pos, int32_t *lo, int32_t *hi, int64_t *valid, lm_err *e)
{
    int64_t at = 0;
    *valid = 0;
    for (int64_t k = f->p->start[w]; k < f->p->start[w + 1]; k++) {
        int64_t n = lm_text_examples_length(f->x, f->p->item[k]), start = at;
        const uint32_t *ids = lm_text_examples_ids(f->x, f->p->item[k]);
        for (int64_t i = 0; i < n; i++, at++) {
            if ((ids[i] & LM_TOKENS_ID) >= f->o.vocab)
                return fail_id(f, ids[i], e);
            if (tokens)
                tokens[at] = (int32_t)(ids[i] & LM_TOKENS_ID);
            fill_row(f, at, start, valid, i + 1 < n ? ids[i + 1] : 0, targets, pos, lo);
        }
        set_end(hi, start, at);
    }
    for (; at < f->o.seq; at++) {
        if (tokens)
            tokens[at] = 0;
        fill_row(f, at, at, valid, 0, targets, pos, lo);
        set_end(hi, at, at + 1);
    }
    return LM_OK;
}

/* The dataset's loss marks of a window are 0 or 1. */
static lm_code check_mask(const lm_feed *f, int64_t w, lm_err *e)
{
    return f->mask ? lm_tokens_read_mask(f->t, w * f->o.seq, ids_of_window(f), f->mask, e) : LM_OK;
}

/* Masks of window number `index`, whose ids are read. */
static void fill_masked(const lm_feed *f, int64_t index, int32_t *tokens, int32_t *targets)
{
    for (int64_t i = 0; i < f->o.seq; i++)
        tokens[i] = (int32_t)f->ids[i];
    lm_mlm_apply(f->o.mlm, f->o.seed, index, f->o.seq, f->mask, tokens, targets);
}

lm_code lm_feed_window(lm_feed *f, int64_t index, int32_t *tokens, int32_t *targets, int32_t *pos,
                       int32_t *lo, int32_t *hi, int64_t *valid, lm_err *e)
{
    int64_t w = window_of(f, index);
    if (f->x)
        return fill_packed(f, w, tokens, targets, pos, lo, hi, valid, e);
    if (read_ids(f, w, e) || check_mask(f, w, e))
        return e->code;
    if (f->o.mlm)
        fill_masked(f, index, tokens, targets);
    for (int64_t i = 0; !f->o.mlm && i < f->o.seq; i++) {
        tokens[i] = (int32_t)f->ids[i];
        targets[i] = (int32_t)f->ids[i + 1];
    }
    mark(f, w, targets, pos, lo, hi, valid);
    return LM_OK;
}

bool lm_feed_has_sentences(const lm_feed *f)
{
    return f->nsp != NULL;
}

lm_code lm_feed_sentences(lm_feed *f, int64_t index, int32_t *tokens, int32_t *targets,
                          int32_t *pos, int32_t *lo, int32_t *hi, int32_t *types, int32_t *follows,
                          int64_t *valid, lm_err *e)
{
    int64_t rows;
    if (lm_nsp_fill(f->nsp, window_of(f, index), index, tokens, types, &rows, follows, e))
        return e->code;
    *valid = lm_mlm_apply(f->o.mlm, f->o.seed, index, rows, NULL, tokens, targets);
    for (int64_t i = 0; i < f->o.seq; i++) {
        const bool padding = i >= rows;
        pos[i] = (int32_t)i;
        lo[i] = padding ? (int32_t)i : 0;
        hi[i] = (int32_t)(padding ? i + 1 : rows);
        if (padding)
            targets[i] = -1;
    }
    return LM_OK;
}

static lm_code check_ids(const lm_feed *f, const uint32_t *ids, int64_t n, lm_err *e)
{
    for (int64_t i = 0; i < n; i++)
        if ((ids[i] & LM_TOKENS_ID) >= f->o.vocab)
            return fail_id(f, ids[i], e);
    return LM_OK;
}

/* The pair of window w.  source, tokens NULL: only marks. */
static lm_code fill_pair(const lm_feed *f, int64_t w, int32_t *source, int64_t *length,
                         int32_t *tokens, int32_t *targets, int64_t *valid, lm_err *e)
{
    const int64_t item = f->p->item[f->p->start[w]], n = lm_text_examples_source(f->x, item),
                  m = lm_text_examples_length(f->x, item) - n;
    const uint32_t *ids = lm_text_examples_ids(f->x, item), *to = ids + n;
    /* in front of the start, which predicts the first id that trains */
    const int64_t virtuals = lm_text_examples_stat(f->x)->ahead;
    for (int64_t i = 0; source && i < f->o.source; i++)
        source[i] = i < n ? (int32_t)ids[i] : 0;
    for (int64_t i = 0; i < f->o.seq; i++)
        targets[i] = i >= virtuals && i < m ? (int32_t)(to[i] & LM_TOKENS_ID) : -1;
    for (int64_t i = 0; tokens && i < f->o.seq; i++)
        tokens[i] = (int32_t)(i < virtuals    ? to[i]
                              : i == virtuals ? f->o.start
                              : i <= m        ? to[i - 1] & LM_TOKENS_ID
                                              : 0);
    *length = n;
    *valid = m - virtuals;
    return check_ids(f, ids, n + m, e);
}

lm_code lm_feed_pair(lm_feed *f, int64_t index, int32_t *source, int64_t *length, int32_t *tokens,
                     int32_t *targets, int32_t *pos, int64_t *valid, lm_err *e)
{
    const int64_t w = window_of(f, index);
    for (int64_t i = 0; i < f->o.seq; i++)
        pos[i] = (int32_t)i;
    if (f->x)
        return fill_pair(f, w, source, length, tokens, targets, valid, e);
    if (read_ids(f, w, e))
        return e->code;
    lm_span_cut(f->o.span, lm_rng_make(f->o.seed, "span", (uint64_t)index), f->ids, source, tokens,
                targets);
    *length = f->o.span->source;
    *valid = f->o.seq;
    return LM_OK;
}

/* Targets 0 or -1, before documents and loss marks. */
static void mark_targets(const lm_feed *f, int64_t index, int32_t *targets)
{
    lm_err unseen = { 0 }; /* lm_feed_window reports it */
    int64_t w = window_of(f, index);
    for (int64_t i = 0; i < f->o.seq; i++)
        targets[i] = 0;
    if (!f->o.mlm || read_ids(f, w, &unseen) || check_mask(f, w, &unseen))
        return;
    fill_masked(f, index, f->read, targets);
    for (int64_t i = 0; i < f->o.seq; i++)
        targets[i] = targets[i] < 0 ? -1 : 0;
}

/* The marks of a pair, whose texts are drawn with it. */
static void mark_sentences(lm_feed *f, int64_t index, int32_t *targets, int32_t *pos, int32_t *lo,
                           int32_t *hi, int64_t *valid)
{
    lm_err unseen = { 0 }; /* lm_feed_sentences reports it */
    int32_t follows;
    *valid = 0;
    if (lm_feed_sentences(f, index, f->read, targets, pos, lo, hi, f->types, &follows, valid,
                          &unseen))
        return;
    for (int64_t i = 0; i < f->o.seq; i++)
        targets[i] = targets[i] < 0 ? -1 : 0;
}

static void mark_pair(const lm_feed *f, int64_t w, int32_t *targets, int32_t *pos, int32_t *lo,
                      int32_t *hi, int64_t *valid)
{
    lm_err unseen = { 0 }; /* lm_feed_pair reports it */
    int64_t length;
    fill_pair(f, w, NULL, &length, NULL, targets, valid, &unseen);
    for (int64_t i = 0; i < f->o.seq; i++) {
        pos[i] = (int32_t)i;
        lo[i] = 0;
        hi[i] = (int32_t)f->o.seq;
    }
}

void lm_feed_marks(lm_feed *f, int64_t index, int32_t *targets, int32_t *pos, int32_t *lo,
                   int32_t *hi, int64_t *valid)
{
    lm_err unseen = { 0 }; /* lm_feed_window reports it */
    if (f->nsp) {
        mark_sentences(f, index, targets, pos, lo, hi, valid);
        return;
    }
    if (f->x) {
        if (f->o.source)
            mark_pair(f, window_of(f, index), targets, pos, lo, hi, valid);
        else
            fill_packed(f, window_of(f, index), NULL, targets, pos, lo, hi, valid, &unseen);
        for (int64_t i = 0; i < f->o.seq; i++)
            targets[i] = targets[i] < 0 ? -1 : 0;
        return;
    }
    mark_targets(f, index, targets);
    mark(f, window_of(f, index), targets, pos, lo, hi, valid);
}
