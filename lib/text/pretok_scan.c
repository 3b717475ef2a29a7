/* SPDX-License-Identifier: Apache-2.0 */
/* The scanners of pretok_scan.h.  At each position the classes of one or two characters select the
 * alternative of the pattern; backtracking never goes beyond the last white space. */
#include "text/pretok_scan.h"

#include <string.h>

#include "text/pretok_class.h"

#define WORDS_END "\\s+(?!\\S)|\\s+"

#define CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define NO_WORD     "[^\\r\\n\\p{L}\\p{N}]"
#define UPPER       "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER       "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"

static const char *const patterns[LM_SCAN_KINDS] = {
    [LM_SCAN_GPT2] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|" WORDS_END,
    [LM_SCAN_LLAMA3] =
        CONTRACTION "|" NO_WORD "?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                    "\\s*[\\r\\n]+|" WORDS_END,
    [LM_SCAN_QWEN] = CONTRACTION "|" NO_WORD "?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                 "\\s*[\\r\\n]+|" WORDS_END,
    [LM_SCAN_CL100K] =
        CONTRACTION "|" NO_WORD "?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                    "\\s+\\z|\\s*[\\r\\n]+|" WORDS_END,
    [LM_SCAN_O200K] = NO_WORD "?" UPPER "*" LOWER "+" CONTRACTION "?|" NO_WORD "?" UPPER "+" LOWER
                              "*" CONTRACTION "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|"
                              "\\s*[\\r\\n]+|" WORDS_END,
};

const char *const lm_scan_names[] = { "gpt2",   "llama3", "qwen",  "gpt4",
                                      "cl100k", "gpt4o",  "o200k", NULL };
static const lm_scan_kind named[] = { LM_SCAN_GPT2,   LM_SCAN_LLAMA3, LM_SCAN_QWEN, LM_SCAN_CL100K,
                                      LM_SCAN_CL100K, LM_SCAN_O200K,  LM_SCAN_O200K };

enum { KIND = LM_CLASS_LETTER | LM_CLASS_NUMBER | LM_CLASS_SPACE };

lm_scan_kind lm_scan_of_pattern(const char *pattern)
{
    for (int k = LM_SCAN_GPT2; k < LM_SCAN_KINDS; k++)
        if (!strcmp(pattern, patterns[k]))
            return (lm_scan_kind)k;
    return LM_SCAN_NONE;
}

lm_scan_kind lm_scan_of_name(const char *name)
{
    char plain[16];
    size_t n = 0, len = strlen(name);

    if (len > 5 && !strcmp(name + len - 5, "_base"))
        len -= 5;
    for (size_t i = 0; i < len; i++) {
        if (name[i] == '-')
            continue;
        if (n + 1 == sizeof plain)
            return LM_SCAN_NONE;
        plain[n++] = (char)(name[i] | (name[i] >= 'A' && name[i] <= 'Z' ? 0x20 : 0));
    }
    plain[n] = 0;
    for (int k = 0; lm_scan_names[k]; k++)
        if (!strcmp(plain, lm_scan_names[k]))
            return named[k];
    return LM_SCAN_NONE;
}

const char *lm_scan_pattern(lm_scan_kind k)
{
    return patterns[k];
}

static inline unsigned class_at(const uint8_t *tab, const uint8_t *p, unsigned *n)
{
    return tab[lm_class_get(p, n)];
}

/* End of the run of characters whose kind (letter, number, space, other) is `kind`. */
static inline const uint8_t *run_of(const uint8_t *tab, const uint8_t *p, const uint8_t *end,
                                    unsigned kind)
{
    unsigned n;
    while (p < end && (class_at(tab, p, &n) & KIND) == kind)
        p += n;
    return p;
}

/* Length of 's 't 're 've 'm 'll 'd at p (which is an apostrophe), 0 if none; `fold`: any case. */
static size_t contraction(const uint8_t *p, const uint8_t *end, bool fold)
{
    uint8_t a = end - p > 1 ? p[1] : 0, b = end - p > 2 ? p[2] : 0;

    if (fold && a == 0xC5 && b == 0xBF) /* U+017F */
        return 3;
    if (fold) {
        a |= (uint8_t)(a >= 'A' && a <= 'Z' ? 0x20 : 0);
        b |= (uint8_t)(b >= 'A' && b <= 'Z' ? 0x20 : 0);
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return 3;
    return 0;
}

/* White space at p.  `newlines`: \s*[\r\n]+ comes first and ends after the last newline of the run.
 * A run before other text excludes its last character, unless it has only one. */
static size_t space_run(const uint8_t *tab, const uint8_t *p, const uint8_t *end, bool newlines)
{
    const uint8_t *q = p, *last = p, *after_newline = NULL;
    unsigned n, c;

    while (q < end && ((c = class_at(tab, q, &n)) & LM_CLASS_SPACE)) {
        last = q;
        q += n;
        if (c & LM_CLASS_NEWLINE)
            after_newline = q;
    }
    if (newlines && after_newline)
        return (size_t)(after_newline - p);
    return (size_t)((q == end || last == p ? q : last) - p);
}

static size_t scan_gpt2(const uint8_t *tab, const uint8_t *p, const uint8_t *end)
{
    unsigned n, c = class_at(tab, p, &n);
    const uint8_t *q = p;

    if (*p == '\'') {
        size_t k = contraction(p, end, false);
        if (k)
            return k;
    }
    if (*p == ' ' && p + 1 < end) {
        q = p + 1;
        c = class_at(tab, q, &n);
    }
    if (c & LM_CLASS_SPACE)
        return space_run(tab, p, end, false);
    return (size_t)(run_of(tab, q + n, end, c & KIND) - p);
}

/* White space at p: all of it when nothing follows; otherwise as space_run with newlines. */
static size_t space_or_end(const uint8_t *tab, const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = run_of(tab, p, end, LM_CLASS_SPACE);

    return q == end ? (size_t)(q - p) : space_run(tab, p, end, true);
}

static const uint8_t *digits_of(const uint8_t *tab, const uint8_t *p, const uint8_t *end, int most)
{
    unsigned n;

    for (int i = 0; i < most && p < end && (class_at(tab, p, &n) & LM_CLASS_NUMBER); i++)
        p += n;
    return p;
}

static size_t scan_llama3(const uint8_t *tab, const uint8_t *p, const uint8_t *end,
                          lm_scan_kind kind)
{
    unsigned n, n1, c = class_at(tab, p, &n);
    const uint8_t *q = p + n;

    if (*p == '\'') {
        size_t k = contraction(p, end, true);
        if (k)
            return k;
    }
    if (c & LM_CLASS_LETTER)
        return (size_t)(run_of(tab, q, end, LM_CLASS_LETTER) - p);
    if (c & LM_CLASS_NUMBER)
        return (size_t)(digits_of(tab, q, end, kind == LM_SCAN_QWEN ? 0 : 2) - p);
    unsigned c1 = q < end ? class_at(tab, q, &n1) : LM_CLASS_SPACE;
    if (!(c & LM_CLASS_NEWLINE) && (c1 & LM_CLASS_LETTER))
        return (size_t)(run_of(tab, q + n1, end, LM_CLASS_LETTER) - p);
    if (!(c & LM_CLASS_SPACE) || (*p == ' ' && !(c1 & KIND))) {
        q = run_of(tab, q, end, 0);
        while (q < end && (*q == '\r' || *q == '\n'))
            q++;
        return (size_t)(q - p);
    }
    return kind == LM_SCAN_CL100K ? space_or_end(tab, p, end) : space_run(tab, p, end, true);
}

/* U*L+ at q, of upper and lower as in LM_CASED_*: its end, or NULL where no lower character
 * follows.  *upper is the end of U*.  U* matches as much as possible, then backtracks to the last
 * character that is both, unless a lower one follows. */
static const uint8_t *upper_lower(const uint8_t *tab, const uint8_t *q, const uint8_t *end,
                                  const uint8_t **upper)
{
    const uint8_t *both = NULL;
    unsigned n, c;

    while (q < end && ((c = class_at(tab, q, &n)) & LM_CASED_UPPER)) {
        q += n;
        if (c & LM_CASED_LOWER)
            both = q;
    }
    *upper = q;
    while (q < end && (class_at(tab, q, &n) & LM_CASED_LOWER))
        q += n;
    return q > *upper ? q : both;
}

/* The first two alternatives of o200k at p, whose class is c and whose first character has n bytes;
 * NULL: neither matches. */
static const uint8_t *cased_word(const uint8_t *tab, const uint8_t *p, const uint8_t *end,
                                 unsigned c, unsigned n)
{
    const uint8_t *from = c & LM_CLASS_LETTER ? p : p + n, *upper, *stop;

    if (c & (LM_CLASS_NEWLINE | LM_CLASS_NUMBER))
        return NULL;
    stop = upper_lower(tab, from, end, &upper);
    if (!stop && from > p && (c & LM_CASED_LOWER)) /* a mark matches U*L+ alone */
        stop = from;
    return stop || upper == from ? stop : upper;
}

static size_t scan_o200k(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *tab = lm_cased_table(), *q;
    unsigned n, n1, c = class_at(tab, p, &n);

    if (c & LM_CLASS_NUMBER)
        return (size_t)(digits_of(tab, p + n, end, 2) - p);
    q = cased_word(tab, p, end, c, n);
    if (q)
        return (size_t)(q - p) + (q < end && *q == '\'' ? contraction(q, end, true) : 0);
    bool other = *p == ' ' && p + 1 < end && !(class_at(tab, p + 1, &n1) & KIND);
    if (!(c & LM_CLASS_SPACE) || other) {
        q = run_of(tab, p + n, end, 0);
        while (q < end && (*q == '\r' || *q == '\n' || *q == '/'))
            q++;
        return (size_t)(q - p);
    }
    return space_run(tab, p, end, true);
}

size_t lm_scan_word(lm_scan_kind k, const char *p, const char *end)
{
    const uint8_t *b = (const uint8_t *)p, *e = (const uint8_t *)end;

    if (k == LM_SCAN_O200K)
        return scan_o200k(b, e);
    return k == LM_SCAN_GPT2 ? scan_gpt2(lm_class_table(), b, e)
                             : scan_llama3(lm_class_table(), b, e, k);
}
