/* SPDX-License-Identifier: Apache-2.0 */
/* Greedy merging with exact, incremental counts.
 *
 * Every adjacent pair that exists in some word has a record: its count (weighted by the word's
 * count, overlaps included) and the words in which it occurred.  A heap orders the records by
 * (count, smallest pair); its entries may be outdated and are checked when they are popped.  A
 * merge visits the words of its pair only, and changes the counts of the pairs around each place.
 * A word in a list may no longer contain the pair: the visit then finds nothing. */
#include "text/bpe_learn.h"

#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"

typedef struct {
    uint64_t pair;
    int64_t count;
    uint32_t *words;
    size_t n, cap;
    uint64_t touched; /* the last merge that raised the count */
} pair_rec;

typedef struct {
    int64_t count;
    uint64_t pair;
    uint32_t rec;
} heap_entry;

typedef struct {
    uint32_t *sym; /* the words' symbols; word i is sym[start[i] .. start[i] + len[i]) */
    size_t *start;
    uint32_t *len;
    int64_t *weight;
    size_t n_words;
    pair_rec *recs;
    size_t n_recs, cap_recs;
    uint32_t *index; /* pair -> record + 1, open addressing; 0 = free */
    size_t n_index;
    heap_entry *heap;
    size_t n_heap, cap_heap;
    uint32_t *raised; /* records whose count this merge raised */
    size_t n_raised, cap_raised;
    uint64_t merge;      /* number of this merge, from 1 */
    uint64_t merge_pair; /* the pair of this merge, whose own count is set at the end */
    size_t *bytes;       /* of each token */
    size_t max_bytes;
    const char *prefix; /* of symbols inside a word; NULL: symbols are bytes */
    lm_buf name;        /* of a symbol */
} learner;

static void learner_fini(learner *l)
{
    for (size_t i = 0; i < l->n_recs; i++)
        lm_free(l->recs[i].words);
    lm_free(l->sym);
    lm_free(l->start);
    lm_free(l->len);
    lm_free(l->weight);
    lm_free(l->recs);
    lm_free(l->index);
    lm_free(l->heap);
    lm_free(l->raised);
    lm_free(l->bytes);
    lm_buf_fini(&l->name);
}

void lm_bpe_learned_fini(lm_bpe_learned *l)
{
    lm_bpe_fini(&l->vocab);
    lm_free(l->merges);
    memset(l, 0, sizeof *l);
}

static bool comes_first(const heap_entry *a, const heap_entry *b)
{
    return a->count != b->count ? a->count > b->count : a->pair < b->pair;
}

static lm_code heap_push(learner *l, uint32_t rec, lm_err *e)
{
    heap_entry x = { l->recs[rec].count, l->recs[rec].pair, rec };
    lm_code rc = lm_grow(&l->heap, &l->cap_heap, l->n_heap + 1, sizeof x, "pairs", e);
    size_t i = l->n_heap;

    if (rc)
        return rc;
    l->n_heap++;
    for (; i && comes_first(&x, &l->heap[(i - 1) / 2]); i = (i - 1) / 2)
        l->heap[i] = l->heap[(i - 1) / 2];
    l->heap[i] = x;
    return LM_OK;
}

static heap_entry heap_pop(learner *l)
{
    heap_entry top = l->heap[0], x = l->heap[--l->n_heap];
    size_t i = 0, c;

    while ((c = 2 * i + 1) < l->n_heap) {
        if (c + 1 < l->n_heap && comes_first(&l->heap[c + 1], &l->heap[c]))
            c++;
        if (!comes_first(&l->heap[c], &x))
            break;
        l->heap[i] = l->heap[c];
        i = c;
    }
    l->heap[i] = x;
    return top;
}

static size_t index_of(const learner *l, uint64_t pair)
{
    size_t mask = l->n_index - 1, i = (pair * 0x9E3779B97F4A7C15u) >> 20 & mask;

    while (l->index[i] && l->recs[l->index[i] - 1].pair != pair)
        i = (i + 1) & mask;
    return i;
}

static lm_code grow_index(learner *l, lm_err *e)
{
    uint32_t *old = l->index;
    size_t n = l->n_index ? 2 * l->n_index : 1 << 12;
    lm_code rc = lm_alloc_n(&l->index, n, sizeof *l->index, "pairs", e);

    if (rc) {
        l->index = old;
        return rc;
    }
    l->n_index = n;
    for (size_t i = 0; i < l->n_recs; i++)
        l->index[index_of(l, l->recs[i].pair)] = (uint32_t)i + 1;
    lm_free(old);
    return LM_OK;
}

/* Increase the count of an adjacent pair of word w. */
static lm_code raise(learner *l, uint32_t a, uint32_t b, uint32_t w, lm_err *e)
{
    uint64_t pair = (uint64_t)a << 32 | b;
    lm_code rc;

    if (l->max_bytes && l->bytes[a] + l->bytes[b] > l->max_bytes)
        return LM_OK;
    if (2 * l->n_recs >= l->n_index && (rc = grow_index(l, e)))
        return rc;
    size_t i = index_of(l, pair);
    if (!l->index[i]) {
        rc = lm_grow(&l->recs, &l->cap_recs, l->n_recs + 1, sizeof *l->recs, "pairs", e);
        if (rc)
            return rc;
        l->recs[l->n_recs] = (pair_rec){ .pair = pair, .touched = UINT64_MAX };
        l->index[i] = (uint32_t)++l->n_recs;
    }
    pair_rec *r = &l->recs[l->index[i] - 1];
    r->count += l->weight[w];
    if (r->touched != l->merge) {
        r->touched = l->merge;
        rc = lm_grow(&l->raised, &l->cap_raised, l->n_raised + 1, sizeof(uint32_t), "pairs", e);
        if (rc)
            return rc;
        l->raised[l->n_raised++] = l->index[i] - 1;
    }
    if (r->n && r->words[r->n - 1] == w)
        return LM_OK;
    if (r->n == r->cap &&
        (rc = lm_grow(&r->words, &r->cap, r->n + 1, sizeof(uint32_t), "pairs", e)))
        return rc;
    r->words[r->n++] = w;
    return LM_OK;
}

static void lower(learner *l, uint32_t a, uint32_t b, uint32_t w)
{
    uint64_t pair = (uint64_t)a << 32 | b;
    uint32_t i;

    if (pair == l->merge_pair || (l->max_bytes && l->bytes[a] + l->bytes[b] > l->max_bytes))
        return;
    i = l->index[index_of(l, pair)];
    if (i)
        l->recs[i - 1].count -= l->weight[w];
}

/* Replace the pair (a, b) by c in word w, from the left, without overlap. */
static lm_code merge_word(learner *l, uint32_t w, uint32_t a, uint32_t b, uint32_t c, lm_err *e)
{
    uint32_t *v = l->sym + l->start[w], n = l->len[w], k = 0, i = 0;
    lm_code rc = LM_OK;

    /* v[0..k) is the output so far, v[i..n) the rest of the input. */
    while (i < n && !rc) {
        if (i + 1 == n || v[i] != a || v[i + 1] != b) {
            v[k++] = v[i++];
            continue;
        }
        if (k) {
            lower(l, v[k - 1], a, w);
            rc = raise(l, v[k - 1], c, w, e);
        }
        if (!rc && i + 2 < n) {
            lower(l, b, v[i + 2], w);
            rc = raise(l, c, v[i + 2], w, e);
        }
        v[k++] = c;
        i += 2;
    }
    l->len[w] = k;
    return rc;
}

/* The symbols of a word of characters at to[0..*n). */
static lm_code load_chars(learner *l, const lm_bpe *vocab, const char *word, size_t len,
                          uint32_t *to, uint32_t *n, lm_err *e)
{
    size_t prefix = strlen(l->prefix), k;
    lm_code rc = LM_OK;

    *n = 0;
    for (size_t i = 0; i < len && !rc; i += k) {
        lm_utf8_get(word + i, len - i, &k);
        uint32_t id = lm_bpe_find(vocab, word + i, k);
        if (id == LM_BPE_NONE)
            continue;
        l->name.len = 0;
        if (i)
            rc = lm_buf_add(&l->name, l->prefix, prefix, e);
        if (i && !rc)
            rc = lm_buf_add(&l->name, word + i, k, e);
        to[(*n)++] = i && !rc ? lm_bpe_find(vocab, l->name.data, l->name.len) : id;
    }
    return rc;
}

static lm_code load_words(learner *l, const lm_bpe *vocab, const lm_words *words, lm_err *e)
{
    size_t k = 0, at = 0;
    lm_code rc = lm_alloc_n(&l->sym, words->text_len, sizeof *l->sym, "words", e);

    if (!rc)
        rc = lm_alloc_n(&l->start, words->n, sizeof *l->start, "words", e);
    if (!rc)
        rc = lm_alloc_n(&l->len, words->n, sizeof *l->len, "words", e);
    if (!rc)
        rc = lm_alloc_n(&l->weight, words->n, sizeof *l->weight, "words", e);
    if (!rc && words->n >= UINT32_MAX)
        rc = lm_fail(e, LM_ELIMIT, "training text", "train on a sample", "%zu different word%s",
                     words->n, lm_plural(words->n));
    for (size_t i = 0; i < words->n_cells && !rc; i++) {
        const lm_word_cell *s = &words->cells[i];
        if (!s->count)
            continue;
        l->start[k] = at;
        l->len[k] = s->len;
        l->weight[k++] = s->count;
        if (l->prefix) {
            rc = load_chars(l, vocab, words->text + s->off, s->len, l->sym + at, &l->len[k - 1], e);
            at += l->len[k - 1];
            continue;
        }
        for (uint32_t j = 0; j < s->len; j++)
            l->sym[at++] = vocab->byte_id[(uint8_t)words->text[s->off + j]];
    }
    l->n_words = k;
    return rc;
}

/* Add the text of a merged token to the vocabulary; an existing text keeps its id. */
static lm_code name_token(lm_bpe *vocab, const char *prefix, uint32_t a, uint32_t b, uint32_t *id,
                          lm_err *e)
{
    size_t la = vocab->tokens[a].len, lb = vocab->tokens[b].len, cut = prefix ? strlen(prefix) : 0;
    char *s;
    lm_code rc = lm_alloc_n(&s, la + lb, 1, "a token", e);

    if (rc)
        return rc;
    memcpy(s, vocab->text + vocab->tokens[a].off, la);
    const char *right = vocab->text + vocab->tokens[b].off;
    if (!cut || lb < cut || memcmp(right, prefix, cut))
        cut = 0;
    lb -= cut;
    memcpy(s + la, right + cut, lb);
    *id = lm_bpe_find(vocab, s, la + lb);
    if (*id == LM_BPE_NONE) {
        *id = (uint32_t)vocab->n_tokens;
        rc = lm_bpe_add_token(vocab, s, la + lb, *id, "vocabulary", e);
    }
    lm_free(s);
    return rc;
}

/* Merge the pair of record r everywhere. */
static lm_code merge_pair(learner *l, lm_bpe_learned *out, uint32_t r, lm_err *e)
{
    uint64_t pair = l->recs[r].pair;
    uint32_t a = (uint32_t)(pair >> 32), b = (uint32_t)pair, c = 0;
    uint32_t *list = l->recs[r].words;
    size_t n = l->recs[r].n;
    lm_code rc = name_token(&out->vocab, l->prefix, a, b, &c, e);

    if (!rc)
        rc = lm_grow(&out->merges, &out->cap, out->n_merges + 1, sizeof *out->merges, "merges", e);
    if (rc)
        return rc;
    out->merges[out->n_merges++] = (lm_bpe_pair){ a, b };
    l->bytes[c] = l->bytes[a] + l->bytes[b];
    l->merge++;
    l->merge_pair = pair;
    l->n_raised = 0;
    /* Take the list from the record: later occurrences of this pair start a new list. */
    l->recs[r].words = NULL;
    l->recs[r].n = l->recs[r].cap = 0;
    l->recs[r].count = 0;
    for (size_t i = 0; i < n && !rc; i++)
        rc = merge_word(l, list[i], a, b, c, e);
    lm_free(list);
    for (size_t i = 0; i < l->n_raised && !rc; i++)
        if (l->recs[l->raised[i]].count > 0)
            rc = heap_push(l, l->raised[i], e);
    return rc;
}

lm_code lm_bpe_learn(lm_bpe_learned *out, const lm_words *words, const char *prefix,
                     int64_t vocab_size, int64_t min_count, int64_t max_bytes, lm_sink *sink,
                     lm_err *e)
{
    learner l = { .max_bytes = (size_t)max_bytes, .merge_pair = UINT64_MAX, .prefix = prefix };
    size_t first = out->vocab.n_tokens;
    lm_code rc = load_words(&l, &out->vocab, words, e);

    if (!rc)
        rc = lm_alloc_n(&l.bytes, (size_t)vocab_size, sizeof *l.bytes, "tokens", e);
    for (int i = 0; i < 256 && !rc && !prefix; i++)
        l.bytes[out->vocab.byte_id[i]] = 1;
    for (size_t i = 0; i < first && !rc && prefix; i++)
        l.bytes[i] = out->vocab.tokens[i].len; /* with the prefix: a bound */
    for (size_t w = 0; w < l.n_words && !rc; w++)
        for (uint32_t i = 0; i + 1 < l.len[w] && !rc; i++)
            rc = raise(&l, l.sym[l.start[w] + i], l.sym[l.start[w] + i + 1], (uint32_t)w, e);
    for (size_t i = 0; i < l.n_recs && !rc; i++)
        rc = heap_push(&l, (uint32_t)i, e);
    while (!rc && l.n_heap && (int64_t)out->vocab.n_tokens < vocab_size) {
        heap_entry top = heap_pop(&l);
        int64_t now = l.recs[top.rec].count;
        if (now > 0 && now < top.count)
            rc = heap_push(&l, top.rec, e); /* outdated: insert it again with its present count */
        if (rc || now != top.count)
            continue;
        if (now < 1 || now < min_count)
            break;
        rc = merge_pair(&l, out, top.rec, e);
        if (l.merge % 64 == 0)
            lm_progress(sink, "merging", (double)(out->vocab.n_tokens - first),
                        (double)vocab_size - (double)first, "tokens", NULL);
        if (!rc && lm_stopping())
            rc = lm_fail(e, LM_EIO, "training", NULL, "stopped by signal %d", lm_stop_signal());
    }
    learner_fini(&l);
    return rc;
}
