/* SPDX-License-Identifier: Apache-2.0 */
/* Merging the symbols of a word, behind a cache of words already seen (see bpe.h); the cache serves
 * the models of subword.h too.
 *
 * The cache has two levels.  Words of up to 15 bytes and 3 ids, nearly all of ordinary text, sit in
 * entries of 32 bytes, two to a cache line: length and bytes make a 128-bit key that is compared at
 * once. Words of up to 128 bytes that do not fit there are in a table over a pool, which is cleared
 * when full. */
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "text/bpe.h"
#include "text/pretok_class.h"
#include "text/subword.h"

enum {
    SHORT_SETS = 1 << 14, /* of two entries: 1 MiB */
    SHORT_BYTES = 15,
    SHORT_IDS = 3,
    LONG_SLOTS = 1 << 14,
    LONG_BYTES = 128,
    POOL_BYTES = 4 << 20,
    SCAN_SYMBOLS = 48, /* up to this length a scan over all pairs is faster than the heap */
};

typedef struct {
    uint64_t k0, k1; /* bytes, length in the top byte of k1: never both 0 */
    uint32_t ids[SHORT_IDS], n;
} short_word;

typedef struct {
    uint64_t hash;
    uint32_t off; /* in the pool: the ids, then the bytes */
    uint16_t len, n;
} long_word;

typedef struct {
    uint32_t id;
    int32_t prev, next; /* -1 at the ends; id LM_BPE_NONE: merged away */
} symbol;

struct lm_bpe_scratch {
    short_word (*cache)[2];
    long_word *longs;
    uint8_t *pool;
    size_t pool_used;
    uint32_t *first; /* symbols of the current word */
    size_t first_cap;
    symbol *sym;
    size_t sym_cap;
    uint64_t *heap; /* rank << 32 | position */
    size_t heap_cap, heap_n;
    lm_subword_scratch subword;
};

lm_code lm_bpe_scratch_new(lm_bpe_scratch **out, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "encoding", e);
    lm_bpe_scratch *s = *out;

    if (!rc)
        rc = lm_alloc_n(&s->cache, SHORT_SETS, sizeof *s->cache, "the word cache", e);
    if (!rc)
        rc = lm_alloc_n(&s->longs, LONG_SLOTS, sizeof *s->longs, "the word cache", e);
    if (!rc)
        rc = lm_alloc_n(&s->pool, POOL_BYTES, 1, "the word cache", e);
    if (rc) {
        lm_bpe_scratch_free(s);
        *out = NULL;
    }
    return rc;
}

void lm_bpe_scratch_free(lm_bpe_scratch *s)
{
    if (!s)
        return;
    lm_free(s->cache);
    lm_free(s->longs);
    lm_free(s->pool);
    lm_free(s->first);
    lm_free(s->sym);
    lm_free(s->heap);
    lm_subword_scratch_fini(&s->subword);
    lm_free(s);
}

static inline const lm_bpe_merge *find_merge(const lm_bpe *b, uint32_t l, uint32_t r)
{
    uint64_t pair = (uint64_t)l << 32 | r;
    size_t i = (pair * 0x9E3779B97F4A7C15u) >> 32 & b->merge_mask;

    while (b->merges[i].pair != pair) {
        if (b->merges[i].pair == LM_BPE_EMPTY)
            return NULL;
        i = (i + 1) & b->merge_mask;
    }
    return &b->merges[i];
}

/* Merge v[0..n) in place, n <= SCAN_SYMBOLS; returns the number left. */
static size_t merge_by_scan(const lm_bpe *b, uint32_t *v, size_t n)
{
    uint32_t rank[SCAN_SYMBOLS], id[SCAN_SYMBOLS]; /* of the pair (i, i+1) */
    const lm_bpe_merge *m;

    for (size_t i = 0; i + 1 < n; i++) {
        m = find_merge(b, v[i], v[i + 1]);
        rank[i] = m ? m->rank : LM_BPE_NONE;
        id[i] = m ? m->id : 0;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == LM_BPE_NONE)
            break;
        v[best] = id[best];
        size_t tail = n - best - 2;
        memmove(v + best + 1, v + best + 2, tail * sizeof *v);
        if (tail) {
            memmove(rank + best + 1, rank + best + 2, (tail - 1) * sizeof *rank);
            memmove(id + best + 1, id + best + 2, (tail - 1) * sizeof *id);
        }
        n--;
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            m = find_merge(b, v[i], v[i + 1]);
            rank[i] = m ? m->rank : LM_BPE_NONE;
            id[i] = m ? m->id : 0;
        }
    }
    return n;
}

static void heap_push(lm_bpe_scratch *s, uint64_t x)
{
    size_t i = s->heap_n++;

    for (; i && s->heap[(i - 1) / 2] > x; i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = x;
}

static uint64_t heap_pop(lm_bpe_scratch *s)
{
    uint64_t top = s->heap[0], x = s->heap[--s->heap_n];
    size_t i = 0, c;

    while ((c = 2 * i + 1) < s->heap_n) {
        if (c + 1 < s->heap_n && s->heap[c + 1] < s->heap[c])
            c++;
        if (s->heap[c] >= x)
            break;
        s->heap[i] = s->heap[c];
        i = c;
    }
    s->heap[i] = x;
    return top;
}

static void push_pair(const lm_bpe *b, lm_bpe_scratch *s, int32_t i)
{
    if (i < 0 || s->sym[i].next < 0)
        return;
    const lm_bpe_merge *m = find_merge(b, s->sym[i].id, s->sym[s->sym[i].next].id);
    if (m)
        heap_push(s, (uint64_t)m->rank << 32 | (uint32_t)i);
}

/* Merge s->first[0..n) in place by heap and linked list; *n becomes the number left. */
static lm_code merge_by_heap(const lm_bpe *b, lm_bpe_scratch *s, size_t *n, lm_err *e)
{
    size_t count = *n, left = 0;
    lm_code rc;

    if (count > INT32_MAX / 4)
        return lm_fail(e, LM_ELIMIT, "encoding", "split the text into documents",
                       "a word of %zu characters is too long", count);
    rc = lm_grow(&s->sym, &s->sym_cap, count, sizeof *s->sym, "a long word", e);
    /* A merge pushes two pairs at most and there are fewer merges than symbols. */
    if (!rc)
        rc = lm_grow(&s->heap, &s->heap_cap, 3 * count, sizeof *s->heap, "a long word", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < count; i++)
        s->sym[i] = (symbol){ s->first[i], (int32_t)i - 1, i + 1 < count ? (int32_t)i + 1 : -1 };
    s->heap_n = 0;
    for (size_t i = 0; i < count; i++)
        push_pair(b, s, (int32_t)i);
    while (s->heap_n) {
        uint64_t top = heap_pop(s);
        symbol *a = &s->sym[(uint32_t)top];
        const lm_bpe_merge *m;
        if (a->id == LM_BPE_NONE || a->next < 0)
            continue;
        m = find_merge(b, a->id, s->sym[a->next].id);
        if (!m || m->rank != top >> 32)
            continue; /* stale: the pair there has changed since */
        symbol *r = &s->sym[a->next];
        a->id = m->id;
        a->next = r->next;
        r->id = LM_BPE_NONE;
        if (a->next >= 0)
            s->sym[a->next].prev = (int32_t)(a - s->sym);
        push_pair(b, s, a->prev);
        push_pair(b, s, (int32_t)(a - s->sym));
    }
    for (int32_t i = 0; i >= 0; i = s->sym[i].next)
        s->first[left++] = s->sym[i].id;
    *n = left;
    return LM_OK;
}

/* A character without a token becomes the tokens of its bytes if all exist, otherwise the unknown
 * token, otherwise nothing.  An unknown token is delayed in *unk so that the following ones can be
 * fused into it. */
static lm_code add_missing(const lm_bpe *b, lm_bpe_scratch *s, const uint8_t *c, unsigned len,
                           bool *unk, size_t *n, lm_err *e)
{
    bool all = b->byte_fallback;

    for (unsigned i = 0; i < len; i++)
        all &= b->fallback_id[c[i]] != LM_BPE_NONE;
    if (all) {
        for (unsigned i = 0; i < len; i++)
            s->first[(*n)++] = b->fallback_id[c[i]];
        return LM_OK;
    }
    if (b->unk_id == LM_BPE_NONE) {
        if (b->unk_name)
            return lm_fail(e, LM_EFORMAT, "tokenizer", NULL,
                           "unk_token \"%s\" is needed and is not in the vocabulary", b->unk_name);
        return LM_OK;
    }
    if (*unk && !b->fuse_unk)
        s->first[(*n)++] = b->unk_id;
    *unk = true;
    return LM_OK;
}

/* The word's symbols into s->first. */
static lm_code split_word(const lm_bpe *b, lm_bpe_scratch *s, const char *w, size_t len, bool bytes,
                          size_t *n, lm_err *e)
{
    const uint8_t *p = (const uint8_t *)w, *end = p + len;
    bool unk = false;
    /* Every symbol represents at least one byte of the word. */
    lm_code rc = lm_grow(&s->first, &s->first_cap, len + 1, sizeof *s->first, "a word", e);

    *n = 0;
    if (bytes && !rc) {
        for (size_t i = 0; i < len; i++)
            s->first[i] = b->byte_id[p[i]];
        *n = len;
        return LM_OK;
    }
    while (p < end && !rc) {
        unsigned c;
        lm_class_get(p, &c);
        uint32_t id = lm_bpe_find(b, (const char *)p, c);
        if (id != LM_BPE_NONE) {
            if (unk)
                s->first[(*n)++] = b->unk_id;
            unk = false;
            s->first[(*n)++] = id;
        } else {
            rc = add_missing(b, s, p, c, &unk, n, e);
        }
        p += c;
    }
    if (unk && !rc)
        s->first[(*n)++] = b->unk_id;
    return rc;
}

/* The id of the whole word, if the vocabulary has it. */
static lm_code find_whole(const lm_bpe *b, const char *w, size_t len, bool bytes, uint32_t *id,
                          lm_err *e)
{
    char small[512], *text = small;
    size_t n = 0;
    lm_code rc;

    if (!bytes) {
        *id = lm_bpe_find(b, w, len);
        return LM_OK;
    }
    if (2 * len > sizeof small && (rc = lm_alloc_n(&text, len, 2, "a word", e)))
        return rc;
    for (size_t i = 0; i < len; i++) {
        char c[4];
        size_t k = lm_byte_utf8((uint8_t)w[i], c);
        memcpy(text + n, c, k);
        n += k;
    }
    *id = lm_bpe_find(b, text, n);
    if (text != small)
        lm_free(text);
    return LM_OK;
}

/* Ids of a word into s->first, without the cache. */
static lm_code encode_new(const lm_bpe *b, lm_bpe_scratch *s, const char *w, size_t len, bool bytes,
                          size_t *n, lm_err *e)
{
    uint32_t whole = LM_BPE_NONE;
    lm_code rc = LM_OK;

    if (b->subword) {
        rc = lm_grow(&s->first, &s->first_cap, len + 1, sizeof *s->first, "a word", e);
        return rc ? rc : lm_subword_encode(b->subword, b, &s->subword, w, len, s->first, n, e);
    }
    if (b->ignore_merges)
        rc = find_whole(b, w, len, bytes, &whole, e);
    if (!rc)
        rc = split_word(b, s, w, len, bytes, n, e);
    if (rc)
        return rc;
    if (whole != LM_BPE_NONE) {
        s->first[0] = whole;
        *n = 1;
        return LM_OK;
    }
    if (*n <= SCAN_SYMBOLS) {
        *n = merge_by_scan(b, s->first, *n);
        return LM_OK;
    }
    return merge_by_heap(b, s, n, e);
}

static lm_code append(lm_ids *out, const uint32_t *ids, size_t n, lm_err *e)
{
    lm_code rc = LM_OK;

    if (out->cap - out->n < n)
        rc = lm_grow(&out->v, &out->cap, out->n + n, sizeof *out->v, "token ids", e);
    if (!rc && n) {
        memcpy(out->v + out->n, ids, n * sizeof *ids);
        out->n += n;
    }
    return rc;
}

/* The entry of a word in the second level; *hit tells whether it holds this word. */
static long_word *find_long(const lm_bpe_scratch *s, const char *w, size_t len, uint64_t *hash,
                            const uint32_t **ids, bool *hit)
{
    *hash = lm_hash64(w, len, 0);
    long_word *l = &s->longs[*hash & (LONG_SLOTS - 1)];
    *ids = (const uint32_t *)(const void *)(s->pool + l->off);
    *hit = l->len == len && l->hash == *hash && !memcmp(*ids + l->n, w, len);
    return l;
}

/* Store s->first[0..n) in the cache as the ids of w. */
static void keep_long(lm_bpe_scratch *s, long_word *l, uint64_t hash, const char *w, size_t len,
                      size_t n)
{
    size_t need = (n * sizeof(uint32_t) + len + 7) & ~(size_t)7;

    if (s->pool_used + need > POOL_BYTES) {
        memset(s->longs, 0, LONG_SLOTS * sizeof *s->longs);
        s->pool_used = 0;
    }
    *l = (long_word){ hash, (uint32_t)s->pool_used, (uint16_t)len, (uint16_t)n };
    if (n)
        memcpy(s->pool + l->off, s->first, n * sizeof(uint32_t));
    memcpy(s->pool + l->off + n * sizeof(uint32_t), w, len);
    s->pool_used += need;
}

static inline void load_key(const char *w, size_t len, size_t readable, uint64_t *k0, uint64_t *k1)
{
    uint64_t v[2] = { 0, 0 };

    if (readable >= 16)
        memcpy(v, w, 16);
    else
        memcpy(v, w, len);
    if (len < 8) {
        v[0] &= ((uint64_t)1 << (8 * len)) - 1;
        v[1] = 0;
    } else {
        v[1] &= ((uint64_t)1 << (8 * (len - 8))) - 1; /* len <= 15 */
    }
    *k0 = v[0];
    *k1 = v[1] | (uint64_t)len << 56;
}

/* A word that is not in the first level; `set` is its cell there, NULL if it is too long. */
static lm_code encode_miss(const lm_bpe *b, lm_bpe_scratch *s, const char *w, size_t len,
                           bool bytes, short_word *set, uint64_t k0, uint64_t k1, lm_ids *out,
                           lm_err *e)
{
    uint64_t hash = 0;
    const uint32_t *ids = NULL;
    long_word *l = NULL;
    bool hit = false;
    size_t n = 0;
    lm_code rc;

    if (len <= LONG_BYTES)
        l = find_long(s, w, len, &hash, &ids, &hit);
    if (hit)
        return append(out, ids, l->n, e);
    rc = encode_new(b, s, w, len, bytes, &n, e);
    if (rc)
        return rc;
    if (set && n <= SHORT_IDS) {
        set[1] = set[0]; /* the newest entry first */
        set[0] = (short_word){ .k0 = k0, .k1 = k1, .n = (uint32_t)n };
        if (n)
            memcpy(set[0].ids, s->first, n * sizeof(uint32_t));
    } else if (l) {
        keep_long(s, l, hash, w, len, n);
    }
    return append(out, s->first, n, e);
}

lm_code lm_bpe_encode(const lm_bpe *b, lm_bpe_scratch *s, const char *w, size_t len,
                      size_t readable, bool bytes, lm_ids *out, lm_err *e)
{
    if (len > SHORT_BYTES)
        return encode_miss(b, s, w, len, bytes, NULL, 0, 0, out, e);

    uint64_t k0, k1, h;
    load_key(w, len, readable, &k0, &k1);
    h = (k0 ^ (k1 << 29 | k1 >> 35)) * 0x9E3779B97F4A7C15u;
    h = (h ^ k1) * 0xC2B2AE3D27D4EB4Fu;
    short_word *set = s->cache[h >> 50 & (SHORT_SETS - 1)];
    for (int way = 0; way < 2; way++) {
        const short_word *c = &set[way];
        if (c->k0 != k0 || c->k1 != k1)
            continue;
        if (out->cap - out->n < SHORT_IDS)
            return append(out, c->ids, c->n, e);
        /* copy a fixed number, count only the valid ids */
        memcpy(out->v + out->n, c->ids, sizeof c->ids);
        out->n += c->n;
        return LM_OK;
    }
    return encode_miss(b, s, w, len, bytes, set, k0, k1, out, e);
}
