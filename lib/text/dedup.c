/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.c -- see dedup.h.  Two open-addressing tables: exact digests, and band hashes that lead to
 * chains of documents. */
#include "text/dedup.h"

#include <string.h>
#include <utf8proc.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/text.h"
#include "text/cjk.h"

#define M61 (((uint64_t)1 << 61) - 1)
enum {
    VALUES_MAX = 1024,
    /* candidates compared under one band hash: common boilerplate must not cost O(n) */
    WALK_MAX = 256,
};

typedef struct {
    uint64_t key; /* 0: free */
    uint32_t doc; /* newest document + 1 under this key */
} cell;

struct lm_dedup {
    lm_dedup_opts o;
    int values;
    uint64_t *a, *b;
    uint64_t (*exact)[2];
    size_t exact_cap, exact_n;
    cell *cells;
    size_t cells_cap, cells_n;
    uint16_t *sigs; /* [docs][values], the low bits of each value */
    size_t sigs_cap;
    uint32_t *next; /* [docs][bands], the previous document + 1 under the same key */
    size_t next_cap;
    uint32_t docs;
};

lm_code lm_dedup_new(const lm_dedup_opts *o, lm_dedup **out, lm_err *e)
{
    lm_dedup *d;
    lm_code rc = lm_alloc_n(&d, 1, sizeof *d, "deduplication", e);
    if (rc)
        return rc;
    d->o = *o;
    d->o.ngram = o->ngram ? o->ngram : 5;
    d->o.bands = o->bands ? o->bands : 14;
    d->o.rows = o->rows ? o->rows : 8;
    if (d->o.ngram < 1 || d->o.ngram > 64 || d->o.bands < 1 || d->o.rows < 1 ||
        d->o.bands > VALUES_MAX || d->o.rows > VALUES_MAX || d->o.bands * d->o.rows > VALUES_MAX)
        rc = lm_fail(e, LM_EUSAGE, "minhash", "at most 1024 values in all, n-grams of 1 to 64",
                     "%d bands of %d values over %d-grams", d->o.bands, d->o.rows, d->o.ngram);
    d->values = d->o.bands * d->o.rows;
    if (!rc)
        rc = lm_alloc_n(&d->a, (size_t)d->values, sizeof *d->a, "hash functions", e);
    if (!rc)
        rc = lm_alloc_n(&d->b, (size_t)d->values, sizeof *d->b, "hash functions", e);
    if (rc) {
        lm_dedup_free(d);
        return rc;
    }
    lm_rng r = lm_rng_make(o->seed, "minhash", 0);
    for (int i = 0; i < d->values; i++) {
        d->a[i] = 1 + lm_rng_below(r, 2 * (uint64_t)i, M61 - 1);
        d->b[i] = lm_rng_below(r, 2 * (uint64_t)i + 1, M61);
    }
    *out = d;
    return LM_OK;
}

void lm_dedup_free(lm_dedup *d)
{
    if (!d)
        return;
    lm_free(d->a);
    lm_free(d->b);
    lm_free(d->exact);
    lm_free(d->cells);
    lm_free(d->sigs);
    lm_free(d->next);
    lm_free(d);
}

/* ---- signatures ---- */

typedef enum { GAP, NOTHING, WORD } role;

/* The simplified form of one character: out[0..*n) inside a word, a gap between words, or nothing
 * (marks). */
static role simplify(uint32_t cp, char out[64], size_t *n)
{
    int32_t part[16];
    int last = 0;
    *n = 0;
    switch (utf8proc_category((int32_t)cp)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_CF:
        return NOTHING;
    case UTF8PROC_CATEGORY_ND:
        out[(*n)++] = '0';
        return WORD;
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        break;
    default:
        return GAP;
    }
    long k =
        utf8proc_decompose_char(utf8proc_tolower((int32_t)cp), part, 16, UTF8PROC_DECOMPOSE, &last);
    for (long i = 0; i < k && i < 16; i++)
        if (utf8proc_category(part[i]) != UTF8PROC_CATEGORY_MN)
            *n += lm_utf8_put((uint32_t)part[i], out + *n);
    return *n ? WORD : NOTHING;
}

static role simplify_ascii(unsigned char c, char out[64], size_t *n)
{
    bool upper = c >= 'A' && c <= 'Z', digit = c >= '0' && c <= '9';
    *n = 1;
    out[0] = digit ? '0' : upper ? (char)(c + 32) : (char)c;
    return upper || digit || (c >= 'a' && c <= 'z') ? WORD : GAP;
}

/* text -> sig->plain[0..*n): words separated by one space; each character of the scripts of cjk.h
 * is a word. */
static lm_code make_plain(const char *text, size_t len, lm_dedup_sig *sig, size_t *n, size_t *words,
                          lm_err *e)
{
    char piece[64];
    bool in_word = false;
    *n = *words = 0;
    for (size_t i = 0, k = 1, m; i < len; i += k) {
        unsigned char c = (unsigned char)text[i];
        role r;
        k = 1;
        if (c < 0x80)
            r = simplify_ascii(c, piece, &m);
        else
            r = simplify(lm_utf8_get(text + i, len - i, &k), piece, &m);
        bool alone = r == WORD && c >= 0xE2 && lm_is_cjk(lm_utf8_get(text + i, len - i, &k));
        if (r == GAP || alone)
            in_word = false;
        if (r != WORD)
            continue;
        if (*n + m + 1 > sig->cap_plain) {
            lm_code rc = lm_grow(&sig->plain, &sig->cap_plain, *n + m + 1 + (len - i), 1,
                                 "a simplified text", e);
            if (rc)
                return rc;
        }
        if (!in_word && *n)
            sig->plain[(*n)++] = ' ';
        *words += !in_word;
        in_word = !alone;
        memcpy(sig->plain + *n, piece, m);
        *n += m;
    }
    return LM_OK;
}

/* (a x + b) mod 2^61 - 1, all below it. */
static inline uint64_t affine(uint64_t a, uint64_t x, uint64_t b)
{
    unsigned __int128 p = (unsigned __int128)a * x + b;
    uint64_t r = ((uint64_t)p & M61) + (uint64_t)(p >> 61), less = r - M61;
    return less < r ? less : r; /* below M61 the difference wraps to a large number */
}

/* Hashes of the n-grams of the simplified text; each n-gram is a substring of it. */
static lm_code hash_grams(const lm_dedup *d, lm_dedup_sig *sig, size_t n, size_t words,
                          size_t *grams, lm_err *e)
{
    size_t want = (size_t)d->o.ngram < words ? (size_t)d->o.ngram : words;
    size_t starts[64], seen = 0, at = 0;
    *grams = words - want + 1;
    lm_code rc = lm_grow(&sig->gram, &sig->cap_gram, *grams, sizeof *sig->gram, "n-grams", e);
    if (rc)
        return rc;
    while (at < n) {
        const char *space = memchr(sig->plain + at, ' ', n - at);
        size_t end = space ? (size_t)(space - sig->plain) : n;
        starts[seen % want] = at;
        seen++;
        if (seen >= want) {
            size_t from = starts[seen % want];
            uint64_t x = lm_hash64(sig->plain + from, end - from, 0) >> 3;
            sig->gram[seen - want] = x == M61 ? 0 : x;
        }
        at = end + 1;
    }
    return LM_OK;
}

lm_code lm_dedup_sign(const lm_dedup *d, const char *text, size_t len, lm_dedup_sig *sig, lm_err *e)
{
    size_t n = 0, words = 0, grams = 0;
    sig->exact[0] = lm_hash64(text, len, 0);
    sig->exact[1] = lm_hash64(text, len, 0x9e3779b97f4a7c15u);
    sig->empty = true;
    if (!d->o.near)
        return LM_OK;
    lm_code rc = LM_OK;
    if (!sig->value)
        rc = lm_alloc_n(&sig->value, (size_t)d->values, sizeof *sig->value, "a signature", e);
    if (!rc)
        rc = make_plain(text, len, sig, &n, &words, e);
    if (rc || !words)
        return rc;
    rc = hash_grams(d, sig, n, words, &grams, e);
    if (rc)
        return rc;
    sig->empty = false;
    for (int i = 0; i < d->values; i++) {
        uint64_t a = d->a[i], b = d->b[i], min = M61;
        for (size_t g = 0; g < grams; g++) {
            uint64_t h = affine(a, sig->gram[g], b);
            min = h < min ? h : min;
        }
        sig->value[i] = min;
    }
    return LM_OK;
}

void lm_dedup_sig_fini(lm_dedup_sig *sig)
{
    lm_free(sig->value);
    lm_free(sig->plain);
    lm_free(sig->gram);
    *sig = (lm_dedup_sig){ 0 };
}

/* ---- the exact table ---- */

static size_t exact_place(uint64_t (*tab)[2], size_t cap, const uint64_t key[2])
{
    size_t i = key[0] & (cap - 1);
    while ((tab[i][0] || tab[i][1]) && (tab[i][0] != key[0] || tab[i][1] != key[1]))
        i = (i + 1) & (cap - 1);
    return i;
}

static lm_code exact_room(lm_dedup *d, lm_err *e)
{
    if (d->exact_n * 10 < d->exact_cap * 7)
        return LM_OK;
    size_t cap = d->exact_cap ? d->exact_cap * 2 : 1024;
    uint64_t(*tab)[2];
    lm_code rc = lm_alloc_n(&tab, cap, sizeof *tab, "digests of documents", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < d->exact_cap; i++)
        if (d->exact[i][0] || d->exact[i][1])
            memcpy(tab[exact_place(tab, cap, d->exact[i])], d->exact[i], sizeof *tab);
    lm_free(d->exact);
    d->exact = tab;
    d->exact_cap = cap;
    return LM_OK;
}

/* ---- the band table ---- */

static size_t band_place(const cell *tab, size_t cap, uint64_t key)
{
    size_t i = key & (cap - 1);
    while (tab[i].key && tab[i].key != key)
        i = (i + 1) & (cap - 1);
    return i;
}

static lm_code band_room(lm_dedup *d, lm_err *e)
{
    if ((d->cells_n + (size_t)d->o.bands) * 10 < d->cells_cap * 7)
        return LM_OK;
    size_t cap = d->cells_cap ? d->cells_cap * 2 : 16384;
    cell *tab;
    lm_code rc = lm_alloc_n(&tab, cap, sizeof *tab, "band hashes", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < d->cells_cap; i++)
        if (d->cells[i].key)
            tab[band_place(tab, cap, d->cells[i].key)] = d->cells[i];
    lm_free(d->cells);
    d->cells = tab;
    d->cells_cap = cap;
    return LM_OK;
}

static uint64_t band_key(const lm_dedup *d, const lm_dedup_sig *sig, int band)
{
    uint64_t h = lm_hash64(sig->value + band * d->o.rows, sizeof(uint64_t) * (size_t)d->o.rows,
                           (uint64_t)band + 1);
    return h ? h : 1;
}

static bool near_enough(const lm_dedup *d, const uint16_t *old, const lm_dedup_sig *sig)
{
    int same = 0;
    for (int i = 0; i < d->values; i++)
        same += old[i] == (uint16_t)sig->value[i];
    return same >= d->o.threshold * d->values;
}

static bool seen_near(const lm_dedup *d, const lm_dedup_sig *sig)
{
    for (int band = 0; band < d->o.bands && d->cells_cap; band++) {
        uint32_t doc = d->cells[band_place(d->cells, d->cells_cap, band_key(d, sig, band))].doc;
        for (int k = 0; doc && k < WALK_MAX; k++) {
            size_t i = doc - 1;
            if (near_enough(d, d->sigs + i * (size_t)d->values, sig))
                return true;
            doc = d->next[i * (size_t)d->o.bands + (size_t)band];
        }
    }
    return false;
}

static lm_code remember_near(lm_dedup *d, const lm_dedup_sig *sig, lm_err *e)
{
    size_t doc = d->docs, values = (size_t)d->values, bands = (size_t)d->o.bands;
    if (d->docs == UINT32_MAX - 1)
        return lm_fail(e, LM_ELIMIT, "minhash", "clean the data in parts",
                       "more than 2^32 documents");
    lm_code rc = band_room(d, e);
    if (!rc)
        rc = lm_grow(&d->sigs, &d->sigs_cap, (doc + 1) * values, sizeof *d->sigs, "signatures", e);
    if (!rc)
        rc = lm_grow(&d->next, &d->next_cap, (doc + 1) * bands, sizeof *d->next, "chains", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < values; i++)
        d->sigs[doc * values + i] = (uint16_t)sig->value[i];
    for (size_t b = 0; b < bands; b++) {
        uint64_t key = band_key(d, sig, (int)b);
        cell *s = &d->cells[band_place(d->cells, d->cells_cap, key)];
        d->cells_n += !s->key;
        d->next[doc * bands + b] = s->doc;
        *s = (cell){ key, (uint32_t)doc + 1 };
    }
    d->docs++;
    return LM_OK;
}

lm_code lm_dedup_add(lm_dedup *d, const lm_dedup_sig *sig, lm_dedup_verdict *v, lm_err *e)
{
    lm_code rc = exact_room(d, e);
    if (rc)
        return rc;
    size_t at = exact_place(d->exact, d->exact_cap, sig->exact);
    if (d->exact[at][0] || d->exact[at][1]) {
        *v = LM_DEDUP_EXACT;
        return LM_OK;
    }
    if (!sig->empty && seen_near(d, sig)) {
        *v = LM_DEDUP_NEAR;
        return LM_OK;
    }
    memcpy(d->exact[at], sig->exact, sizeof sig->exact);
    d->exact_n++;
    *v = LM_DEDUP_NEW;
    return sig->empty ? LM_OK : remember_near(d, sig, e);
}
