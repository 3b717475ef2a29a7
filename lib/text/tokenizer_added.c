/* SPDX-License-Identifier: Apache-2.0 */
/* Finding added tokens: jump to a byte that begins one, then narrow the sorted patterns byte by
 * byte. */
#include "text/tokenizer_added.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "text/pretok_class.h"

static const char *pattern_of(const lm_added_token *t, size_t *len)
{
    *len = t->pattern ? t->pattern_len : t->len;
    return t->pattern ? t->pattern : t->text;
}

static int by_pattern(const void *x, const void *y, void *tokens)
{
    const lm_added_token *v = tokens;
    size_t m, n;
    uint32_t i = *(const uint32_t *)x, j = *(const uint32_t *)y;
    const char *a = pattern_of(&v[i], &m), *b = pattern_of(&v[j], &n);
    int c = memcmp(a, b, m < n ? m : n);

    if (c)
        return c;
    if (m != n)
        return m < n ? -1 : 1;
    return i < j ? -1 : 1;
}

lm_code lm_added_index(lm_added *a, lm_err *e)
{
    for (int g = 0; g < 2; g++) {
        size_t len, n = 0;
        lm_code rc = lm_alloc_n(&a->group[g].order, a->n, sizeof(uint32_t), "added tokens", e);
        if (rc)
            return rc;
        for (size_t i = 0; i < a->n; i++) {
            pattern_of(&a->v[i], &len);
            if (a->v[i].normalized == (g == LM_ADDED_NORMAL) && len)
                a->group[g].order[n++] = (uint32_t)i;
        }
        a->group[g].n = n;
        if (n)
            qsort_r(a->group[g].order, n, sizeof(uint32_t), by_pattern, a->v);
        a->group[g].only = -1;
        int kinds = 0;
        size_t k = 0;
        for (int b = 0; b < 256; b++) {
            a->group[g].first[b] = (uint32_t)k;
            while (k < n && (uint8_t)pattern_of(&a->v[a->group[g].order[k]], &len)[0] == b)
                k++;
            if (k > a->group[g].first[b]) {
                a->group[g].only = kinds++ ? -1 : b;
            }
        }
        a->group[g].first[256] = (uint32_t)k;
    }
    return LM_OK;
}

void lm_added_fini(lm_added *a)
{
    for (size_t i = 0; i < a->n; i++) {
        lm_free(a->v[i].text);
        lm_free(a->v[i].pattern);
    }
    lm_free(a->v);
    lm_free(a->group[0].order);
    lm_free(a->group[1].order);
    memset(a, 0, sizeof *a);
}

/* The byte at `depth` of order[i]'s pattern, -1 past its end (which sorts first, as it must). */
static int byte_at(const lm_added *a, int g, uint32_t i, size_t depth)
{
    size_t len;
    const char *p = pattern_of(&a->v[a->group[g].order[i]], &len);
    return depth < len ? (uint8_t)p[depth] : -1;
}

/* First i in [lo, hi) whose byte at depth is >= b. */
static uint32_t lower_bound(const lm_added *a, int g, uint32_t lo, uint32_t hi, size_t depth, int b)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (byte_at(a, g, mid, depth) < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The longest pattern of the group that text[at..len) begins with. */
static const lm_added_token *match_at(const lm_added *a, int g, const char *text, size_t len,
                                      size_t at)
{
    uint8_t b0 = (uint8_t)text[at];
    uint32_t lo = a->group[g].first[b0], hi = a->group[g].first[b0 + 1];
    const lm_added_token *best = NULL;

    for (size_t depth = 1; lo < hi; depth++) {
        if (byte_at(a, g, lo, depth) < 0) {
            best = &a->v[a->group[g].order[lo]];
            lo = lower_bound(a, g, lo, hi, depth, 0);
        }
        if (at + depth >= len)
            break;
        int b = (uint8_t)text[at + depth];
        lo = lower_bound(a, g, lo, hi, depth, b);
        hi = lower_bound(a, g, lo, hi, depth, b + 1);
    }
    return best;
}

static const lm_added_token *find_added(const lm_added *a, int g, const char *text, size_t len,
                                        size_t *at)
{
    for (size_t i = *at; i < len; i++) {
        if (a->group[g].only >= 0) {
            const char *p = memchr(text + i, a->group[g].only, len - i);
            if (!p)
                return NULL;
            i = (size_t)(p - text);
        }
        uint8_t b = (uint8_t)text[i];
        const lm_added_token *t =
            a->group[g].first[b] < a->group[g].first[b + 1] ? match_at(a, g, text, len, i) : NULL;
        if (t) {
            *at = i;
            return t;
        }
    }
    return NULL;
}

/* True if the characters around the match [begin, end) do not belong to a word. */
static bool stands_alone(const char *text, size_t len, size_t begin, size_t end)
{
    const uint8_t *tab = lm_class_table(), *t = (const uint8_t *)text;
    unsigned k;

    if (begin && (tab[lm_class_before(t, t + begin, &k)] & LM_CLASS_WORD))
        return false;
    return end == len || !(tab[lm_class_get(t + end, &k)] & LM_CLASS_WORD);
}

bool lm_added_next(lm_added_walk *w)
{
    const uint8_t *tab = lm_class_table(), *t = (const uint8_t *)w->text;

    w->gap = w->next_gap;
    while (w->added->group[w->group].n) {
        size_t begin = w->at, end, plen;
        unsigned k;
        const lm_added_token *a = find_added(w->added, w->group, w->text, w->len, &begin);
        if (!a)
            return false;
        pattern_of(a, &plen);
        w->at = end = begin + plen;
        if (a->single_word && !stands_alone(w->text, w->len, begin, end))
            continue;
        while (a->lstrip && begin > w->gap &&
               (tab[lm_class_before(t, t + begin, &k)] & LM_CLASS_SPACE))
            begin -= k;
        while (a->rstrip && end < w->len && (tab[lm_class_get(t + end, &k)] & LM_CLASS_SPACE))
            end += k;
        w->token = a;
        w->begin = begin > w->gap ? begin : w->gap;
        w->next_gap = end > w->gap ? end : w->gap;
        return true;
    }
    return false;
}
