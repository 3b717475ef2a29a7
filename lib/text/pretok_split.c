/* SPDX-License-Identifier: Apache-2.0 */
/* Two passes over each piece: find the segments (matches and the text between), then join or drop
 * them according to the behaviour.  Empty matches count as segments until the end, as in
 * `tokenizers`. */
#include "text/pretok_split.h"

#include <string.h>

#include "base/mem.h"
#include "text/pretok_class.h"

/* In the list of segments lm_piece.start is true for a match. */
static lm_code push(lm_pieces *l, size_t begin, size_t end, bool flag, lm_err *e)
{
    if (l->n == l->cap) {
        lm_code rc = lm_grow(&l->v, &l->cap, l->n + 1, sizeof *l->v, "words", e);
        if (rc)
            return rc;
    }
    l->v[l->n++] = (lm_piece){ begin, end - begin, flag };
    return LM_OK;
}

static unsigned word_kind(const uint8_t *tab, uint32_t c)
{
    return tab[c] & LM_CLASS_WORD ? 1 : tab[c] & LM_CLASS_SPACE ? 0 : 2;
}

/* The next match in text[from..len), for the kinds without an engine. */
static bool find_plain(const lm_pretok_cut *c, const char *text, size_t len, size_t from,
                       size_t *begin, size_t *end)
{
    const uint8_t *tab = lm_class_table(), *t = (const uint8_t *)text, *e = t + len, *p = t + from;
    unsigned k;

    if (c->kind == LM_CUT_SCAN && from < len) {
        *begin = from;
        *end = from + lm_scan_word(c->scan, text + from, text + len);
        return true;
    }
    for (; p < e; p += k) {
        uint32_t cp = lm_class_get(p, &k);
        bool hit = c->kind == LM_CUT_CLASS  ? (tab[cp] & c->mask) != 0
                   : c->kind == LM_CUT_CHAR ? cp == c->ch
                                            : word_kind(tab, cp) != 0;
        if (!hit)
            continue;
        *begin = (size_t)(p - t);
        p += k;
        if (c->kind == LM_CUT_WORDS)
            for (unsigned kind = word_kind(tab, cp);
                 p < e && word_kind(tab, lm_class_get(p, &k)) == kind;)
                p += k;
        *end = (size_t)(p - t);
        return true;
    }
    return false;
}

/* All segments of one piece. */
static lm_code find_segments(const lm_pretok_cut *c, lm_regex_match *m, const char *text,
                             size_t len, lm_pieces *out, lm_err *e)
{
    size_t done = 0, from = 0, begin = 0, end = 0;
    bool found = true, any = false;
    lm_code rc = LM_OK;

    out->n = 0;
    while (!rc && from <= len) {
        if (c->kind == LM_CUT_REGEX)
            rc = lm_regex_find(c->regex, m, text, len, from, &begin, &end, &found, e);
        else
            found = find_plain(c, text, len, from, &begin, &end);
        if (rc || !found || begin < done)
            break;
        if (begin == end && any && begin == done) { /* empty, right after a match: not counted */
            from = lm_regex_step(text, len, from);
            continue;
        }
        if (begin > done)
            rc = push(out, done, begin, c->invert, e);
        if (!rc)
            rc = push(out, begin, end, !c->invert, e);
        any = true;
        done = from = end;
        if (begin == end)
            from = lm_regex_step(text, len, from);
    }
    if (!rc && done < len)
        rc = push(out, done, len, c->invert, e);
    return rc;
}

static void join(lm_piece *last, const lm_piece *s)
{
    last->len = s->off + s->len - last->off;
}

/* Apply the behaviour in place; v[0..return) are the remaining segments. */
static size_t apply(lm_cut_behavior b, lm_piece *v, size_t n)
{
    size_t k = 0;
    bool before = false;

    for (size_t i = 0; i < n; i++) {
        lm_piece s = v[i];
        bool match = s.start, joins = false;
        switch (b) {
        case LM_CUT_ISOLATED:
            break;
        case LM_CUT_REMOVED:
            if (match)
                continue;
            break;
        case LM_CUT_PREVIOUS:
            joins = match && !before && k;
            break;
        case LM_CUT_NEXT: /* joins the pending match; two matches are not joined */
            joins = !match && before && k;
            break;
        case LM_CUT_CONTIGUOUS:
            joins = match == before && k;
            break;
        }
        if (joins)
            join(&v[k - 1], &s);
        else
            v[k++] = s;
        before = match;
    }
    return k;
}

lm_code lm_cut_all(const lm_pretok_cut *c, lm_regex_match *m, const char *base,
                   const lm_pieces *from, lm_pieces *tmp, lm_pieces *to, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < from->n && !rc; i++) {
        const lm_piece *p = &from->v[i];
        rc = find_segments(c, m, base + p->off, p->len, tmp, e);
        if (rc)
            break;
        size_t n = apply(c->behavior, tmp->v, tmp->n);
        for (size_t k = 0; k < n && !rc; k++) {
            const lm_piece *s = &tmp->v[k];
            if (s->len)
                rc = push(to, p->off + s->off, p->off + s->off + s->len, p->start && !s->off, e);
        }
    }
    return rc;
}
