/* SPDX-License-Identifier: Apache-2.0 */
/* The table of pretok_class.h.  It lives in zero-initialised memory; only the planes that have
 * assigned code points are touched. */
#include "text/pretok_class.h"

#include <pthread.h>
#include <utf8proc.h>

static uint8_t table[0x110000], cased[0x110000];
static pthread_once_t once = PTHREAD_ONCE_INIT, cased_once = PTHREAD_ONCE_INIT;

static bool is_white_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* Other_Alphabetic outside the marks: circled and squared Latin letters (PropList.txt). */
static bool is_circled_letter(uint32_t c)
{
    return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
           (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

static bool is_ascii_punct(uint32_t c)
{
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
           (c >= '{' && c <= '~');
}

static uint8_t class_of(uint32_t c)
{
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
    unsigned m = 0;

    if (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO)
        m |= LM_CLASS_LETTER | LM_CLASS_WORD;
    else if (k >= UTF8PROC_CATEGORY_MN && k <= UTF8PROC_CATEGORY_ME)
        m |= LM_CLASS_WORD | LM_CLASS_MARK;
    else if (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO)
        m |= LM_CLASS_NUMBER | (k != UTF8PROC_CATEGORY_NO ? LM_CLASS_WORD : 0);
    else if (k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO)
        m |= LM_CLASS_PUNCT | (k == UTF8PROC_CATEGORY_PC ? LM_CLASS_WORD : 0);
    else if (k >= UTF8PROC_CATEGORY_CC || k == UTF8PROC_CATEGORY_CN)
        m |= LM_CLASS_OTHER;
    if (is_white_space(c))
        m |= LM_CLASS_SPACE | (c == '\r' || c == '\n' ? LM_CLASS_NEWLINE : 0);
    if (is_ascii_punct(c))
        m |= LM_CLASS_PUNCT;
    if (is_circled_letter(c) || c == 0x200C || c == 0x200D)
        m |= LM_CLASS_WORD;
    return (uint8_t)m;
}

static void fill_table(void)
{
    for (uint32_t c = 0; c < 0x32400; c++)
        table[c] = class_of(c);
    for (uint32_t c = 0xE0000; c < 0xE0200; c++)
        table[c] = class_of(c);
}

const uint8_t *lm_class_table(void)
{
    pthread_once(&once, fill_table);
    return table;
}

static uint8_t cased_of(uint32_t c)
{
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
    unsigned m =
        class_of(c) & (LM_CLASS_LETTER | LM_CLASS_NUMBER | LM_CLASS_SPACE | LM_CLASS_NEWLINE);

    if (k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LT)
        m |= LM_CASED_UPPER;
    else if (k == UTF8PROC_CATEGORY_LL)
        m |= LM_CASED_LOWER;
    else if (k == UTF8PROC_CATEGORY_LM || k == UTF8PROC_CATEGORY_LO ||
             (k >= UTF8PROC_CATEGORY_MN && k <= UTF8PROC_CATEGORY_ME))
        m |= LM_CASED_UPPER | LM_CASED_LOWER;
    return (uint8_t)m;
}

static void fill_cased(void)
{
    for (uint32_t c = 0; c < 0x32400; c++)
        cased[c] = cased_of(c);
    for (uint32_t c = 0xE0000; c < 0xE0200; c++)
        cased[c] = cased_of(c);
}

const uint8_t *lm_cased_table(void)
{
    pthread_once(&cased_once, fill_cased);
    return cased;
}
