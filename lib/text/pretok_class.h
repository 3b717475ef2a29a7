/* SPDX-License-Identifier: Apache-2.0 */
/* pretok_class.h -- Unicode classes of code points, as one byte each in a flat table.
 *
 * The table is filled once, on the first call, from utf8proc's categories (about a millisecond);
 * after that a class is one load.  Unassigned code points have no class.  Private to lib/text. */
#ifndef LM_TEXT_PRETOK_CLASS_H
#define LM_TEXT_PRETOK_CLASS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LM_CLASS_LETTER = 1,  /* \p{L} */
    LM_CLASS_NUMBER = 2,  /* \p{N} */
    LM_CLASS_SPACE = 4,   /* White_Space: \s */
    LM_CLASS_NEWLINE = 8, /* CR and LF only, beside LM_CLASS_SPACE */
    LM_CLASS_MARK = 16,   /* \p{M} */
    LM_CLASS_PUNCT = 32,  /* \p{P}, and all ASCII punctuation */
    LM_CLASS_WORD = 64,   /* \w: alphabetic, marks, digits, connectors, joiners */
    LM_CLASS_OTHER = 128, /* \p{C}: control, format, private, unassigned */
};

/* Bits of the cased table.  Title-case letters are upper, as in o200k's pattern; letters without
 * case and marks have both bits. */
enum {
    LM_CASED_UPPER = 16, /* \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M} */
    LM_CASED_LOWER = 32, /* \p{Ll}\p{Lm}\p{Lo}\p{M} */
};

/* 0x110000 entries; borrowed, constant, for the life of the process.  Threads: safe. */
const uint8_t *lm_class_table(void);
/* The same for patterns that distinguish case: LETTER, NUMBER, SPACE and NEWLINE as above, and
 * LM_CASED_* in place of the others. */
const uint8_t *lm_cased_table(void);

/* Decode the code point at p; *n = its bytes.  The text must be valid UTF-8. */
static inline uint32_t lm_class_get(const uint8_t *p, unsigned *n)
{
    if (p[0] < 0x80) {
        *n = 1;
        return p[0];
    }
    if (p[0] < 0xE0) {
        *n = 2;
        return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    }
    if (p[0] < 0xF0) {
        *n = 3;
        return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    }
    *n = 4;
    return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

/* \p{C}, also in the planes that the table leaves empty. */
static inline bool lm_class_is_other(const uint8_t *table, uint32_t c)
{
    return (table[c] & LM_CLASS_OTHER) || (c >= 0x32400 && (c < 0xE0000 || c >= 0xE0200));
}

/* The last code point before p (p > begin); *n = its bytes. */
static inline uint32_t lm_class_before(const uint8_t *begin, const uint8_t *p, unsigned *n)
{
    const uint8_t *q = p - 1;
    while (q > begin && (*q & 0xC0) == 0x80)
        q--;
    return lm_class_get(q, n);
}

#endif
