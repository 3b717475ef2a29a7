/* SPDX-License-Identifier: Apache-2.0 */
/* nsp.c -- pairs of texts for next-sentence prediction. */
#include "train/nsp.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"

enum {
    ADDED = 3,         /* ids of a window that are of no text */
    LEAST = 4,         /* ids of a stretch: two of them may be those at the ends of a document */
    MADE_UP = 1 << 16, /* stretches of random ids */
    TRIES = 32         /* of drawing another document, for some have no text */
};

/* The draws of a window. */
enum { DRAW_CUT, DRAW_FOLLOWS, DRAW_OTHER };

struct lm_nsp {
    const lm_tokens *t; /* NULL: random ids */
    lm_nsp_ids ids;
    int64_t seq, vocab, windows;
    uint64_t seed;
    int64_t *before; /* [documents + 1]: stretches of the documents in front */
    uint32_t *a, *b; /* a stretch each */
};

/* Ids of a stretch. */
static int64_t most(const lm_nsp *p)
{
    return p->seq - ADDED;
}

lm_code lm_nsp_ids_of(const lm_tokenizer *t, int64_t vocab, const char *where, lm_nsp_ids *out,
                      lm_err *e)
{
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 }, types = { 0 };
    const int64_t pad = lm_tokenizer_pad(t);
    lm_code rc = lm_tok_scratch_new(t, &s, e);
    rc = rc ? rc : lm_tokenizer_encode_pair(t, s, "", 0, "", 0, true, &ids, &types, e);
    if (!rc && (ids.n != ADDED || ids.v[1] != ids.v[2] || ids.v[0] == ids.v[1] ||
                ids.v[0] >= vocab || ids.v[1] >= vocab))
        rc = lm_fail(e, LM_EUSAGE, where, "use a tokenizer such as BERT's",
                     "its tokenizer does not join two texts as [CLS] A [SEP] B [SEP]");
    if (!rc) {
        *out = (lm_nsp_ids){ .on = true, .first = (int32_t)ids.v[0], .between = (int32_t)ids.v[1] };
        out->pad = pad >= 0 && pad < vocab ? (int32_t)pad : out->between;
    }
    lm_ids_fini(&ids);
    lm_ids_fini(&types);
    lm_tok_scratch_free(s);
    return rc;
}

/* ---- stretches ---- */

static int64_t doc_length(const lm_nsp *p, int64_t d)
{
    return lm_tokens_doc_start(p->t, d + 1) - lm_tokens_doc_start(p->t, d);
}

static lm_code index_documents(lm_nsp *p, lm_err *e)
{
    const int64_t docs = lm_tokens_docs(p->t);
    if (lm_alloc_n(&p->before, (size_t)docs + 1, sizeof *p->before, "an index of documents", e))
        return e->code;
    for (int64_t d = 0; d < docs; d++) {
        const int64_t n = doc_length(p, d);
        p->before[d + 1] = p->before[d] + n / most(p) + (n % most(p) >= LEAST);
    }
    p->windows = p->before[docs];
    return p->windows ? LM_OK
                      : lm_fail(e, LM_EUSAGE, lm_tokens_path(p->t), "use longer documents",
                                "no document has the %d ids of a pair", LEAST);
}

lm_code lm_nsp_new(const lm_tokens *t, const lm_nsp_ids *ids, int64_t seq, int64_t vocab,
                   uint64_t seed, lm_nsp **out, lm_err *e)
{
    lm_nsp *p = NULL;
    *out = NULL;
    if (seq < LM_NSP_LEAST)
        return lm_fail(e, LM_EUSAGE, "sequence length", "make it longer",
                       "%" PRId64 " tokens, but a pair has at least %d", seq, LM_NSP_LEAST);
    if (t && lm_tokens_masked(t))
        return lm_fail(e, LM_EUSAGE, lm_tokens_path(t), "use data without loss marks",
                       "its marks say which tokens train, but pairs are drawn at random");
    if (lm_alloc_n(&p, 1, sizeof *p, "pairs of texts", e))
        return e->code;
    *p = (lm_nsp){
        .t = t, .ids = *ids, .seq = seq, .vocab = vocab, .windows = MADE_UP, .seed = seed
    };
    if (lm_alloc_n(&p->a, (size_t)most(p), sizeof *p->a, "pairs of texts", e) ||
        lm_alloc_n(&p->b, (size_t)most(p), sizeof *p->b, "pairs of texts", e) ||
        (t && index_documents(p, e))) {
        lm_nsp_free(p);
        return e->code;
    }
    *out = p;
    return LM_OK;
}

void lm_nsp_free(lm_nsp *p)
{
    if (!p)
        return;
    lm_free(p->before);
    lm_free(p->a);
    lm_free(p->b);
    lm_free(p);
}

int64_t lm_nsp_windows(const lm_nsp *p)
{
    return p->windows;
}

/* The document with stretch w. */
static int64_t doc_of(const lm_nsp *p, int64_t w)
{
    int64_t low = 0, high = lm_tokens_docs(p->t);
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (p->before[middle] <= w)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Read ids [at, at + *n) of document d, without those at its ends that are of no text. */
static lm_code read_text(const lm_nsp *p, int64_t d, int64_t at, int64_t *n, uint32_t *to,
                         lm_err *e)
{
    const int64_t start = lm_tokens_doc_start(p->t, d), end = lm_tokens_doc_start(p->t, d + 1);
    if (lm_tokens_read(p->t, at, *n, p->vocab, to, e))
        return e->code;
    if (*n && at + *n == end && to[*n - 1] == (uint32_t)p->ids.between)
        --*n;
    if (*n && at == start && to[0] == (uint32_t)p->ids.first) {
        --*n;
        memmove(to, to + 1, (size_t)*n * sizeof *to);
    }
    return LM_OK;
}

static void make_up(const lm_nsp *p, const char *what, int64_t w, uint32_t *to)
{
    const lm_rng r = lm_rng_make(p->seed, what, (uint64_t)w);
    for (int64_t i = 0; i < most(p); i++)
        to[i] = (uint32_t)lm_rng_below(r, (uint64_t)i, (uint64_t)p->vocab);
}

/* Stretch w into p->a; its document in *doc. */
static lm_code read_stretch(lm_nsp *p, int64_t w, int64_t *n, int64_t *doc, lm_err *e)
{
    *n = most(p);
    *doc = -1;
    if (!p->t) {
        make_up(p, "measure", w, p->a);
        return LM_OK;
    }
    *doc = doc_of(p, w);
    const int64_t at = lm_tokens_doc_start(p->t, *doc) + (w - p->before[*doc]) * most(p),
                  left = lm_tokens_doc_start(p->t, *doc + 1) - at;
    *n = left < *n ? left : *n;
    return read_text(p, *doc, at, n, p->a, e);
}

/* At most *n ids of another document than `own` into p->b; *n = 0 if the draws met no text. */
static lm_code read_other(lm_nsp *p, lm_rng r, int64_t own, int64_t w, int64_t *n, lm_err *e)
{
    const int64_t docs = p->t ? lm_tokens_docs(p->t) : 0, want = *n;
    if (!p->t) {
        make_up(p, "measure other", w, p->b);
        return LM_OK;
    }
    *n = 0;
    for (int i = 0; !*n && docs > 1 && i < TRIES; i++) {
        const uint64_t draw = DRAW_OTHER + 2 * (uint64_t)i;
        int64_t d = (int64_t)lm_rng_below(r, draw, (uint64_t)docs - 1);
        d += d >= own;
        const int64_t length = doc_length(p, d), places = length > want ? length - want + 1 : 1;
        const int64_t at = (int64_t)lm_rng_below(r, draw + 1, (uint64_t)places);
        *n = length < want ? length : want;
        if (read_text(p, d, lm_tokens_doc_start(p->t, d) + at, n, p->b, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- windows ---- */

static void put(int32_t *tokens, int32_t *types, int64_t *at, int32_t id, int32_t type)
{
    tokens[*at] = id;
    types[(*at)++] = type;
}

static void put_text(int32_t *tokens, int32_t *types, int64_t *at, const uint32_t *ids, int64_t n,
                     int32_t type)
{
    for (int64_t i = 0; i < n; i++)
        put(tokens, types, at, (int32_t)ids[i], type);
}

lm_code lm_nsp_fill(lm_nsp *p, int64_t w, int64_t index, int32_t *tokens, int32_t *types,
                    int64_t *rows, int32_t *follows, lm_err *e)
{
    const lm_rng r = lm_rng_make(p->seed, "pair", (uint64_t)index);
    int64_t n, own, at = 0;
    if (read_stretch(p, w, &n, &own, e))
        return e->code;
    const int64_t cut = n > 1 ? 1 + (int64_t)lm_rng_below(r, DRAW_CUT, (uint64_t)n - 1) : n;
    const uint32_t *second = p->a + cut;
    int64_t m = n - cut;
    *follows = 0;
    if (lm_rng_uniform(r, DRAW_FOLLOWS) < 0.5) {
        int64_t other = m;
        if (read_other(p, r, own, w, &other, e))
            return e->code;
        if (other) {
            second = p->b;
            m = other;
            *follows = 1;
        }
    }
    put(tokens, types, &at, p->ids.first, 0);
    put_text(tokens, types, &at, p->a, cut, 0);
    put(tokens, types, &at, p->ids.between, 0);
    put_text(tokens, types, &at, second, m, 1);
    put(tokens, types, &at, p->ids.between, 1);
    *rows = at;
    while (at < p->seq)
        put(tokens, types, &at, p->ids.pad, 0);
    return LM_OK;
}
