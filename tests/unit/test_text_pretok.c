/* SPDX-License-Identifier: Apache-2.0 */
/* test_text_pretok.c -- the scanners against PCRE2 on the patterns that they implement;
 * normalisation forms. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>
#include <utf8proc.h>

#include "base/rng.h"
#include "base/text.h"
#include "text/normal_form.h"
#include "text/pretok_class.h"
#include "text/pretok_regex.h"
#include "text/pretok_scan.h"

static const char *const bits[] = {
    "'s",           "'S",   "'LL",    "'re",    "'",          "\u017f", "'\u017f",  " ",
    "  ",           "\n",   "\r\n",   "\t",     "\u00a0",     "\u3000", "\xC2\x85", "1",
    "23",           "4567", "\u0663", "\u00bd", "a",          "Word",   "\u00e9",   "e\u0301",
    "\u0928\u093f", "!",    "...",    "-",      "\U0001f600", "\u4f60", "\u180e",   "\u200b",
    "WORD",         "iPod", "\u01c5", "\u02b0", "\u0301",     "/",      "\n/",      "B",
};

/* Assigned before Unicode 15, so that every library agrees. */
static uint32_t old_char(lm_rng r, uint64_t *at)
{
    for (;;) {
        uint32_t c = (uint32_t)lm_rng_below(r, (*at)++, 0x3100);
        if (utf8proc_category((int32_t)c) != UTF8PROC_CATEGORY_CN && c != 0x0CF3 && c != 0x0ECE)
            return c;
    }
}

static size_t random_text(lm_rng r, uint64_t *at, char *x, size_t most)
{
    size_t len = 0, n = lm_rng_below(r, (*at)++, most / 8);

    for (size_t i = 0; i < n; i++) {
        if (lm_rng_below(r, (*at)++, 3)) {
            const char *b = bits[lm_rng_below(r, (*at)++, sizeof bits / sizeof *bits)];
            memcpy(x + len, b, strlen(b));
            len += strlen(b);
        } else {
            len += lm_utf8_put(old_char(r, at), x + len);
        }
    }
    return len;
}

/* The text of pattern p cut by the regular expression and by the scanner. */
static void scanner_equals(lm_scan_kind k, const char *p, lm_regex_match *m)
{
    lm_rng r = lm_rng_make(5, "test", 0);
    uint64_t at = 0;
    lm_regex *re;
    lm_err e = { 0 };

    assert_int_equal(lm_regex_new(p, strlen(p), false, "pattern", &re, &e), 0);
    for (int round = 0; round < 2000; round++) {
        char x[400];
        size_t len = random_text(r, &at, x, sizeof x), from = 0, begin, end;
        while (from < len) {
            bool found;
            assert_int_equal(lm_regex_find(re, m, x, len, from, &begin, &end, &found, &e), 0);
            assert_true(found && begin == from);
            assert_int_equal(lm_scan_word(k, x + from, x + len), end - from);
            from = end;
        }
    }
    lm_regex_free(re);
}

/* As tiktoken 0.14 has them (tiktoken_ext/openai_public.py). */
static const char tiktoken_cl100k[] =
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+| "
    "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s";
static const char tiktoken_o200k[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*"
    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+"
    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

static void scanners_equal_patterns(void **state)
{
    lm_regex_match *m;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_regex_match_new(&m, &e), 0);
    for (int k = LM_SCAN_GPT2; k < LM_SCAN_KINDS; k++) {
        const char *p = lm_scan_pattern((lm_scan_kind)k);
        assert_int_equal(lm_scan_of_pattern(p), k);
        scanner_equals((lm_scan_kind)k, p, m);
    }
    scanner_equals(LM_SCAN_CL100K, tiktoken_cl100k, m);
    scanner_equals(LM_SCAN_O200K, tiktoken_o200k, m);
    lm_regex_match_free(m);
}

static void names_of_patterns(void **state)
{
    (void)state;
    for (int i = 0; lm_scan_names[i]; i++)
        assert_int_not_equal(lm_scan_of_name(lm_scan_names[i]), LM_SCAN_NONE);
    assert_int_equal(lm_scan_of_name("GPT-4"), LM_SCAN_CL100K);
    assert_int_equal(lm_scan_of_name("cl100k_base"), LM_SCAN_CL100K);
    assert_int_equal(lm_scan_of_name("gpt-4o"), LM_SCAN_O200K);
    assert_int_equal(lm_scan_of_name("o200k_base"), LM_SCAN_O200K);
    assert_int_equal(lm_scan_of_name("lama3"), LM_SCAN_NONE);
    assert_int_equal(lm_scan_of_name("a-name-longer-than-any"), LM_SCAN_NONE);
    assert_int_equal(lm_scan_of_name("_base"), LM_SCAN_NONE);
    assert_int_equal(lm_scan_of_name(""), LM_SCAN_NONE);
}

static void classes(void **state)
{
    const uint8_t *t = lm_class_table();
    static const uint32_t spaces[] = { 9,      10,     11,     12,     13,     32,     0x85,  0xA0,
                                       0x1680, 0x2000, 0x200A, 0x2028, 0x202F, 0x205F, 0x3000 };

    (void)state;
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
        assert_true(t[spaces[i]] & LM_CLASS_SPACE);
    assert_false(t[0x1C] & LM_CLASS_SPACE);
    assert_false(t[0x180E] & LM_CLASS_SPACE);
    assert_false(t[0x200B] & LM_CLASS_SPACE);
    assert_true((t['a'] & t[0x4E00] & t[0x31350] & LM_CLASS_LETTER) != 0);
    assert_true((t['7'] & t[0x2167] & t[0xBD] & LM_CLASS_NUMBER) != 0);
    assert_int_equal(t[0x10FFFF] & LM_CLASS_LETTER, 0);
}

/* The fast path, the ordering of marks and the composition against utf8proc as a whole. */
static void forms_equal_utf8proc(void **state)
{
    static const utf8proc_option_t o[] = {
        [LM_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
        [LM_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
        [LM_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
        [LM_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
    };
    static const uint32_t blocks[] = { 0x20,   0xC0,   0x300,  0x340,   0x900,   0x9C0,
                                       0x1100, 0x1160, 0x11A8, 0x1E00,  0x1F00,  0x3040,
                                       0xAC00, 0xF900, 0xFB00, 0x1D15E, 0x2F800, 0x110B0 };
    lm_rng r = lm_rng_make(6, "test", 0);
    uint64_t at = 0;

    (void)state;
    for (int round = 0; round < 4000; round++) {
        char x[256];
        size_t len = 0, n = lm_rng_below(r, at++, 20);
        for (size_t i = 0; i < n; i++) {
            uint32_t b = blocks[lm_rng_below(r, at++, sizeof blocks / sizeof *blocks)];
            len += lm_utf8_put(b + (uint32_t)lm_rng_below(r, at++, 0x30), x + len);
        }
        for (int f = LM_NFC; f <= LM_NFKD; f++) {
            int32_t cp[2000];
            lm_buf out = { 0 };
            lm_err e = { 0 };
            utf8proc_ssize_t m =
                utf8proc_decompose((const uint8_t *)x, (utf8proc_ssize_t)len, cp, 1999, o[f]);
            assert_true(m >= 0 && m < 1999);
            m = utf8proc_reencode(cp, m, o[f]);
            assert_true(m >= 0);
            assert_int_equal(lm_form_append((lm_form)f, x, len, &out, &e), 0);
            assert_int_equal(out.len, m);
            if (m)
                assert_memory_equal(out.data, cp, (size_t)m);
            lm_buf_fini(&out);
        }
    }
}

static void long_run_of_marks_is_linear(void **state)
{
    lm_buf in = { 0 }, out = { 0 };
    lm_err e = { 0 };

    (void)state;
    for (int i = 0; i < 400000;
         i++) /* classes 230 and 220 in turn: quadratic for an exchange sort */
        assert_int_equal(lm_buf_add(&in, i & 1 ? "\u0301" : "\u0316", 2, &e), 0);
    assert_int_equal(lm_form_append(LM_NFC, in.data, in.len, &out, &e), 0);
    assert_int_equal(out.len, in.len);
    assert_memory_equal(out.data, "\u0316\u0316", 4);
    lm_buf_fini(&in);
    lm_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scanners_equal_patterns),
        cmocka_unit_test(names_of_patterns),
        cmocka_unit_test(classes),
        cmocka_unit_test(forms_equal_utf8proc),
        cmocka_unit_test(long_run_of_marks_is_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
