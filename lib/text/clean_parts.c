/* SPDX-License-Identifier: Apache-2.0 */
/* clean_parts.c -- see clean_parts.h.  Words, lines and n-grams are compared by 64-bit hashes: in a
 * document of 10^5 words the probability of a false repeat is 3e-10. */
#include "text/clean_parts.h"

#include <string.h>
#include <utf8proc.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/text.h"
#include "text/cjk.h"

struct lm_seen {
    uint64_t hash;
    uint32_t count; /* 0: free */
};

typedef enum { PUNCT, SPACE, LETTER, DIGIT } char_class;

static const uint8_t ascii_class[128] = {
    /* PUNCT covers the rest */
    [9 ... 13] = SPACE,     [' '] = SPACE,          ['0' ... '9'] = DIGIT,
    ['A' ... 'Z'] = LETTER, ['a' ... 'z'] = LETTER,
};

static char_class classify_wide(uint32_t cp)
{
    switch (utf8proc_category((int32_t)cp)) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return SPACE;
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
        return LETTER;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return DIGIT;
    default:
        return cp == 0x85 ? SPACE : PUNCT;
    }
}

static inline char_class classify(uint32_t cp)
{
    return cp < 0x80 ? (char_class)ascii_class[cp] : classify_wide(cp);
}

static inline uint32_t decode(const char *s, size_t n, size_t *k)
{
    *k = 1;
    return (unsigned char)*s < 0x80 ? (unsigned char)*s : lm_utf8_get(s, n, k);
}

/* ASCII white space only: lines are cut and trimmed by it. */
static bool is_blank(char c)
{
    return c == ' ' || (c >= 9 && c <= 13);
}

void lm_trim(const char **begin, const char **end)
{
    while (*begin < *end && is_blank(**begin))
        (*begin)++;
    while (*end > *begin && is_blank((*end)[-1]))
        (*end)--;
}

static int64_t count_chars(const char *s, size_t n)
{
    int64_t k = 0;
    for (size_t i = 0; i < n; i++)
        k += ((unsigned char)s[i] & 0xC0) != 0x80;
    return k;
}

static bool ends_with(const char *s, size_t n, const char *tail)
{
    size_t k = strlen(tail);
    return n >= k && memcmp(s + n - k, tail, k) == 0;
}

static bool ends_in_ellipsis(const char *s, size_t n)
{
    return ends_with(s, n, "...") || ends_with(s, n, "\xE2\x80\xA6");
}

/* Marks that end sentences in any script, and characters that may follow them: the code points. */
static bool is_full_stop(uint32_t cp)
{
    static const uint16_t wide[] = {
        0x0589, 0x061F, 0x06D4, 0x0964, 0x0965, 0x1362, 0x17D4, 0x104B, /* Armenian to Burmese */
        0x3002, 0xFF01, 0xFF0E, 0xFF1F, 0xFF61                          /* Chinese and Japanese */
    };
    for (size_t i = 0; cp >= 0x80 && i < sizeof wide / sizeof *wide; i++)
        if (cp == wide[i])
            return true;
    return cp == '.' || cp == '?' || cp == '!';
}

static bool is_end_quote(uint32_t cp)
{
    return cp == '"' || cp == '\'' || cp == 0xBB || (cp >= 0x2018 && cp <= 0x201D) ||
           cp == 0x300D || cp == 0x300F;
}

bool lm_line_ends_sentence(const char *s, size_t n)
{
    size_t at = n ? n - 1 : 0, k;
    if (!n || ends_with(s, n, "..."))
        return false;
    while (at && ((unsigned char)s[at] & 0xC0) == 0x80)
        at--;
    uint32_t cp = decode(s + at, n - at, &k);
    return is_full_stop(cp) || is_end_quote(cp);
}

/* Where words begin.  in_word and plain: the word so far, and whether a letter or digit is in
 * it. */
typedef struct {
    bool in_word, plain, cjk;
} cutter;

static bool is_mark(uint32_t cp)
{
    utf8proc_category_t k = utf8proc_category((int32_t)cp);
    return k == UTF8PROC_CATEGORY_MN || k == UTF8PROC_CATEGORY_MC;
}

/* begins_word for characters of which one is beyond ASCII. */
static bool begins_wide(cutter *t, char_class c, uint32_t cp)
{
    bool cjk = lm_is_cjk(cp), begins = !t->in_word;
    if (t->in_word && t->plain && c != PUNCT && (cjk || t->cjk))
        begins = cjk || c == LETTER || !is_mark(cp);
    if (begins)
        *t = (cutter){ .in_word = true };
    if (c != PUNCT) {
        t->plain = true;
        t->cjk |= cjk;
    }
    return begins;
}

/* True if a word begins with this character.  At white space a word ends. */
static inline bool begins_word(cutter *t, char_class c, uint32_t cp)
{
    if (c == SPACE) {
        t->in_word = false;
        return false;
    }
    bool begins = !t->in_word;
    if (cp >= 0x80 || t->cjk)
        return begins_wide(t, c, cp);
    if (begins)
        *t = (cutter){ .in_word = true };
    t->plain |= c != PUNCT;
    return begins;
}

void lm_line_words(const char *s, size_t n, int64_t *words, int64_t *longest)
{
    cutter t = { 0 };
    int64_t run = 0;
    *words = *longest = 0;
    for (size_t i = 0, k; i < n; i += k) {
        uint32_t cp = decode(s + i, n - i, &k);
        bool begins = begins_word(&t, classify(cp), cp);
        *words += begins;
        run = !t.in_word ? 0 : begins ? 1 : run + 1;
        *longest = run > *longest ? run : *longest;
    }
}

/* The first byte of '.', '?', '!' and of all wider marks. */
static bool may_be_stop(unsigned char c)
{
    return c == '.' || c == '?' || c == '!' || c == 0xD6 || c == 0xD8 || c == 0xDB ||
           (c >= 0xE0 && c <= 0xEF);
}

int64_t lm_line_sentences(const char *s, size_t n)
{
    int64_t count = 0;
    for (size_t i = 0, k = 1; i < n; i += k) {
        k = 1;
        if (!may_be_stop((unsigned char)s[i]))
            continue;
        bool wide = (unsigned char)s[i] >= 0x80;
        if (!is_full_stop(decode(s + i, n - i, &k)))
            continue;
        for (size_t m; i + k < n; k += m) {
            uint32_t cp = decode(s + i + k, n - i - k, &m);
            if (!is_full_stop(cp) && !is_end_quote(cp) && cp != ')' && cp != 0xFF09)
                break;
            wide |= m > 1 && is_full_stop(cp);
        }
        count += wide || i + k == n || is_blank(s[i + k]);
    }
    return count ? count : 1;
}

/* ---- splitting ---- */

/* The word being read. */
typedef struct {
    size_t start, first, last; /* bytes: from the first to behind the last character that counts */
    int64_t chars, to_first, to_last; /* the same in characters */
    bool plain, alpha, cjk;
} word;

static void count_stop_word(lm_parts *p, const lm_stop_words *stop, const char *s, size_t n)
{
    int64_t k = lm_stop_words_find(stop, s, n);
    if (k < 0 || p->stop_seen[k] == p->n_texts)
        return;
    p->stop_seen[k] = p->n_texts;
    p->stop_words++;
}

static lm_code add_word(lm_parts *p, const char *s, size_t end, const word *w,
                        const lm_stop_words *stop, lm_err *e)
{
    if (w->plain) {
        p->plain_words++;
        p->plain_chars += w->to_last - w->to_first;
        p->alpha_words += w->alpha;
        p->cjk_words += w->cjk;
        if (stop)
            count_stop_word(p, stop, s + w->first, w->last - w->first);
    }
    lm_code rc = lm_grow(&p->words, &p->cap_words, (size_t)p->n_words + 1, sizeof *p->words,
                         "words of a document", e);
    if (rc)
        return rc;
    int64_t before = p->n_words ? p->words[p->n_words - 1].chars : 0;
    p->words[p->n_words++] =
        (lm_unit){ lm_hash64(s + w->start, end - w->start, 0), before + w->chars };
    return LM_OK;
}

static lm_code split_words(lm_parts *p, const char *s, size_t n, const lm_stop_words *stop,
                           lm_err *e)
{
    word w = { 0 };
    cutter t = { 0 };
    lm_code rc = LM_OK;
    for (size_t i = 0, k; i < n && !rc; i += k) {
        uint32_t cp = decode(s + i, n - i, &k);
        char_class c = classify(cp);
        bool before = t.in_word, begins = begins_word(&t, c, cp);
        p->chars++;
        if (before && (begins || c == SPACE))
            rc = add_word(p, s, i, &w, stop, e);
        if (c == SPACE) {
            p->newlines += cp == '\n';
            continue;
        }
        if (begins)
            w = (word){ .start = i };
        if (c == PUNCT) {
            p->hashes += cp == '#';
            p->ellipses += cp == 0x2026;
        } else {
            w.first = w.plain ? w.first : i;
            w.to_first = w.plain ? w.to_first : w.chars;
            w.last = i + k;
            w.to_last = w.chars + 1;
            w.plain = true;
            w.alpha |= c == LETTER;
            w.cjk = t.cjk;
        }
        w.chars++;
    }
    if (t.in_word && !rc)
        rc = add_word(p, s, n, &w, stop, e);
    for (const char *q = s; (q = memmem(q, (size_t)(s + n - q), "...", 3)); q += 3)
        p->ellipses++;
    return rc;
}

static bool is_bullet(const char *s, size_t n)
{
    static const char *const marks[] = { "-",
                                         "*",
                                         "\xE2\x80\xA2",
                                         "\xE2\x80\xA3",
                                         "\xE2\x97\x8F",
                                         "\xE2\x97\xA6",
                                         "\xE2\x96\xAA",
                                         "\xC2\xB7" };
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (n >= strlen(marks[i]) && memcmp(s, marks[i], strlen(marks[i])) == 0)
            return true;
    return false;
}

static lm_code add_line(lm_parts *p, const char *s, size_t n, lm_err *e)
{
    lm_code rc = lm_grow(&p->lines, &p->cap_lines, (size_t)p->n_lines + 1, sizeof *p->lines,
                         "lines of a document", e);
    if (rc)
        return rc;
    int64_t chars = count_chars(s, n);
    p->lines[p->n_lines++] = (lm_unit){ lm_hash64(s, n, 0), chars };
    p->bullet_lines += is_bullet(s, n);
    p->ellipsis_lines += ends_in_ellipsis(s, n);
    p->sentence_lines += lm_line_ends_sentence(s, n);
    p->short_lines += chars <= 30;
    return LM_OK;
}

static lm_code add_paragraph(lm_parts *p, const char *s, size_t n, lm_err *e)
{
    if (!n)
        return LM_OK;
    lm_code rc = lm_grow(&p->paragraphs, &p->cap_paragraphs, (size_t)p->n_paragraphs + 1,
                         sizeof *p->paragraphs, "paragraphs of a document", e);
    if (!rc)
        p->paragraphs[p->n_paragraphs++] = (lm_unit){ lm_hash64(s, n, 0), count_chars(s, n) };
    return rc;
}

static lm_code split_lines(lm_parts *p, const char *s, size_t n, lm_err *e)
{
    const char *at = s, *end = s + n, *para = NULL, *para_end = NULL;
    lm_code rc = LM_OK;
    while (at < end && !rc) {
        const char *nl = memchr(at, '\n', (size_t)(end - at)), *a = at, *b = nl ? nl : end;
        at = nl ? nl + 1 : end;
        lm_trim(&a, &b);
        if (a == b) { /* a blank line ends a paragraph */
            if (para)
                rc = add_paragraph(p, para, (size_t)(para_end - para), e);
            para = NULL;
            continue;
        }
        para = para ? para : a;
        para_end = b;
        rc = add_line(p, a, (size_t)(b - a), e);
    }
    if (para && !rc)
        rc = add_paragraph(p, para, (size_t)(para_end - para), e);
    return rc;
}

/* Allocate a mark for each stop word; a mark of another text counts as unset. */
static lm_code begin_stop_words(lm_parts *p, const lm_stop_words *stop, lm_err *e)
{
    size_t had = p->cap_stop_seen, want = lm_stop_words_count(stop);
    lm_code rc = lm_grow(&p->stop_seen, &p->cap_stop_seen, want, sizeof *p->stop_seen,
                         "stop words of a document", e);
    if (!rc && p->cap_stop_seen > had)
        memset(p->stop_seen + had, 0, (p->cap_stop_seen - had) * sizeof *p->stop_seen);
    if (!rc && ++p->n_texts == 0) {
        memset(p->stop_seen, 0, p->cap_stop_seen * sizeof *p->stop_seen);
        p->n_texts = 1;
    }
    return rc;
}

lm_code lm_parts_split(lm_parts *p, const char *text, size_t len, const lm_stop_words *stop,
                       lm_err *e)
{
    *p = (lm_parts){ .words = p->words,
                     .lines = p->lines,
                     .paragraphs = p->paragraphs,
                     .cap_words = p->cap_words,
                     .cap_lines = p->cap_lines,
                     .cap_paragraphs = p->cap_paragraphs,
                     .gram = p->gram,
                     .cap_gram = p->cap_gram,
                     .stop_seen = p->stop_seen,
                     .cap_stop_seen = p->cap_stop_seen,
                     .n_texts = p->n_texts,
                     .table = p->table,
                     .cap_table = p->cap_table };
    lm_code rc = stop ? begin_stop_words(p, stop, e) : LM_OK;
    if (!rc)
        rc = split_words(p, text, len, stop, e);
    return rc ? rc : split_lines(p, text, len, e);
}

void lm_parts_fini(lm_parts *p)
{
    lm_free(p->words);
    lm_free(p->lines);
    lm_free(p->paragraphs);
    lm_free(p->gram);
    lm_free(p->stop_seen);
    lm_free(p->table);
    *p = (lm_parts){ 0 };
}

/* ---- repeats ---- */

/* An empty table for n entries; *mask for indexing. */
static lm_code clear_table(lm_parts *p, int64_t n, size_t *mask, lm_err *e)
{
    size_t cap = 64;
    while (cap < (size_t)n * 2)
        cap *= 2;
    lm_code rc = lm_grow(&p->table, &p->cap_table, cap, sizeof *p->table, "repeats", e);
    if (rc)
        return rc;
    memset(p->table, 0, cap * sizeof *p->table);
    *mask = cap - 1;
    return LM_OK;
}

/* The entry of a hash, inserted with count 0 when it is new. */
static struct lm_seen *look_up(lm_parts *p, size_t mask, uint64_t hash)
{
    size_t i = hash & mask;
    while (p->table[i].count && p->table[i].hash != hash)
        i = (i + 1) & mask;
    p->table[i].hash = hash;
    return &p->table[i];
}

lm_code lm_parts_repeats(lm_parts *p, lm_unit_kind kind, lm_repeats *out, lm_err *e)
{
    const lm_unit *u = kind == LM_UNIT_LINE ? p->lines : p->paragraphs;
    int64_t n = kind == LM_UNIT_LINE ? p->n_lines : p->n_paragraphs, again = 0;
    size_t mask;
    lm_code rc = clear_table(p, n, &mask, e);
    *out = (lm_repeats){ 0 };
    if (rc)
        return rc;
    for (int64_t i = 0; i < n; i++) {
        struct lm_seen *s = look_up(p, mask, u[i].hash);
        if (s->count) {
            again++;
            out->chars += u[i].chars;
        }
        s->count = 1;
    }
    out->share = n ? (double)again / (double)n : 0;
    return LM_OK;
}

/* p->gram[i] = hash of the n words from i on, computed from that of n - 1: the rules query n = 2 to
 * 10 in this order. */
static lm_code make_grams(lm_parts *p, int n, lm_err *e)
{
    lm_code rc = lm_grow(&p->gram, &p->cap_gram, (size_t)p->n_words, sizeof *p->gram,
                         "n-grams of a document", e);
    if (rc)
        return rc;
    if (p->gram_n > n || p->gram_n == 0) {
        for (int64_t i = 0; i < p->n_words; i++)
            p->gram[i] = p->words[i].hash;
        p->gram_n = 1;
    }
    for (; p->gram_n < n; p->gram_n++)
        for (int64_t i = 0; i + p->gram_n < p->n_words; i++) {
            uint64_t h = p->gram[i] * 0xff51afd7ed558ccdu;
            p->gram[i] = (h ^ (h >> 32)) + p->words[i + p->gram_n].hash;
        }
    return LM_OK;
}

/* The number of words in an n-gram. */
static int gram_words(const lm_parts *p, int n)
{
    return 2 * p->cjk_words > p->n_words ? 2 * n : n;
}

/* Characters of the n words from i on, spaces between them not counted. */
static int64_t gram_chars(const lm_parts *p, int64_t i, int n)
{
    return p->words[i + n - 1].chars - (i ? p->words[i - 1].chars : 0);
}

lm_code lm_parts_top_gram(lm_parts *p, int n, int64_t *chars, lm_err *e)
{
    size_t mask;
    uint32_t top = 1;
    int spaces = n - 1;
    *chars = 0;
    n = gram_words(p, n);
    if (n > spaces + 1)
        spaces = 0;
    if (p->n_words < n)
        return LM_OK;
    lm_code rc = clear_table(p, p->n_words, &mask, e);
    if (!rc)
        rc = make_grams(p, n, e);
    for (int64_t i = 0; !rc && i + n <= p->n_words; i++) {
        struct lm_seen *s = look_up(p, mask, p->gram[i]);
        s->count++;
        if (s->count < 2 || s->count < top)
            continue;
        int64_t c = (gram_chars(p, i, n) + spaces) * s->count;
        *chars = s->count > top || c > *chars ? c : *chars; /* a tie: the longest */
        top = s->count;
    }
    return rc;
}

lm_code lm_parts_dup_grams(lm_parts *p, int n, int64_t *chars, lm_err *e)
{
    size_t mask;
    *chars = 0;
    n = gram_words(p, n);
    if (p->n_words < n)
        return LM_OK;
    lm_code rc = clear_table(p, p->n_words, &mask, e);
    if (!rc)
        rc = make_grams(p, n, e);
    for (int64_t i = 0; !rc && i + n <= p->n_words;) {
        struct lm_seen *s = look_up(p, mask, p->gram[i]);
        if (s->count) {
            *chars += gram_chars(p, i, n);
            i += n; /* the next one may not overlap it */
        } else {
            s->count = 1;
            i++;
        }
    }
    return rc;
}
