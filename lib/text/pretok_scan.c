/* SPDX-License-Identifier: Apache-2.0 */
/* The scanners of pretok_scan.h.  At each position the alternatives of the pattern are told apart
 * by the classes of one or two characters; none needs to go back further than to the last white
 * space. */
#include "text/pretok_scan.h"

#include <string.h>

#include "text/pretok_class.h"

#define WORDS_END "\\s+(?!\\S)|\\s+"

static const struct {
    const char *name, *pattern;
} scans[] = {
    [LM_SCAN_GPT2] = { "gpt2", "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| "
                               "?[^\\s\\p{L}\\p{N}]+|" WORDS_END },
    [LM_SCAN_LLAMA3] = { "llama3",
                         "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
                         "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|" WORDS_END },
    [LM_SCAN_QWEN] = { "qwen", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
                               "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|" WORDS_END },
};

enum { KIND = LM_CLASS_LETTER | LM_CLASS_NUMBER | LM_CLASS_SPACE };

lm_scan_kind lm_scan_of_pattern(const char *pattern)
{
    for (int k = LM_SCAN_GPT2; k <= LM_SCAN_QWEN; k++)
        if (!strcmp(pattern, scans[k].pattern))
            return (lm_scan_kind)k;
    return LM_SCAN_NONE;
}

lm_scan_kind lm_scan_of_name(const char *name)
{
    for (int k = LM_SCAN_GPT2; k <= LM_SCAN_QWEN; k++)
        if (!strcmp(name, scans[k].name))
            return (lm_scan_kind)k;
    return LM_SCAN_NONE;
}

const char *lm_scan_pattern(lm_scan_kind k)
{
    return scans[k].pattern;
}

static inline unsigned class_at(const uint8_t *tab, const uint8_t *p, unsigned *n)
{
    return tab[lm_class_get(p, n)];
}

/* End of the run of characters whose kind (letter, number, space, none of them) is `kind`. */
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
 * A run before other text gives up its last character, unless that is all there is. */
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

static size_t scan_llama3(const uint8_t *tab, const uint8_t *p, const uint8_t *end, int digits)
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
    if (c & LM_CLASS_NUMBER) {
        for (int i = 1; i < digits && q < end && (class_at(tab, q, &n) & LM_CLASS_NUMBER); i++)
            q += n;
        return (size_t)(q - p);
    }
    unsigned c1 = q < end ? class_at(tab, q, &n1) : LM_CLASS_SPACE;
    if (!(c & LM_CLASS_NEWLINE) && (c1 & LM_CLASS_LETTER))
        return (size_t)(run_of(tab, q + n1, end, LM_CLASS_LETTER) - p);
    if (!(c & LM_CLASS_SPACE) || (*p == ' ' && !(c1 & KIND))) {
        q = run_of(tab, q, end, 0);
        while (q < end && (*q == '\r' || *q == '\n'))
            q++;
        return (size_t)(q - p);
    }
    return space_run(tab, p, end, true);
}

size_t lm_scan_word(lm_scan_kind k, const char *p, const char *end)
{
    const uint8_t *tab = lm_class_table(), *b = (const uint8_t *)p, *e = (const uint8_t *)end;

    if (k == LM_SCAN_GPT2)
        return scan_gpt2(tab, b, e);
    return scan_llama3(tab, b, e, k == LM_SCAN_LLAMA3 ? 3 : 1);
}
