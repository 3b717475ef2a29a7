/* SPDX-License-Identifier: Apache-2.0 */
/* cjk.h -- scripts without spaces between words whose characters are counted as words: Chinese
 * characters, kana, bopomofo.  Hangul has spaces and is not among them.  Private to lib/text. */
#ifndef LM_TEXT_CJK_H
#define LM_TEXT_CJK_H

#include <stdbool.h>
#include <stdint.h>

/* Letters and numerals of these scripts; not their punctuation and combining marks. */
static inline bool lm_is_cjk(uint32_t c)
{
    if (c < 0x2E80)
        return false;
    return (c >= 0x4E00 && c <= 0x9FFF) ||                /* Chinese characters */
           (c >= 0x3041 && c <= 0x3096) || c == 0x309D || /* Hiragana, iteration marks */
           c == 0x309E || c == 0x309F || (c >= 0x30A1 && c <= 0x30FA) || /* Katakana */
           (c >= 0x30FC && c <= 0x30FF) ||   /* long vowel and iteration marks */
           (c >= 0x3400 && c <= 0x4DBF) ||   /* extension A */
           (c >= 0x3005 && c <= 0x3007) ||   /* iteration mark, zero */
           (c >= 0x3021 && c <= 0x3029) ||   /* numerals */
           (c >= 0x3105 && c <= 0x312F) ||   /* Bopomofo */
           (c >= 0x31A0 && c <= 0x31BF) ||   /* Bopomofo extended */
           (c >= 0x31F0 && c <= 0x31FF) ||   /* small Katakana */
           (c >= 0x2E80 && c <= 0x2FD5) ||   /* radicals */
           (c >= 0xF900 && c <= 0xFAFF) ||   /* compatibility forms */
           (c >= 0xFF66 && c <= 0xFF9D) ||   /* halfwidth Katakana */
           (c >= 0x1B000 && c <= 0x1B16F) || /* old kana */
           (c >= 0x20000 && c <= 0x323AF);   /* extensions B to H */
}

#endif
