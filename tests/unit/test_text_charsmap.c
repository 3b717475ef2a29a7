/* SPDX-License-Identifier: Apache-2.0 */
/* test_text_charsmap.c -- compiled maps of characters: small ones made here, and damaged ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "text/charsmap.h"

enum { BLOCKS = 24 };

/* A double array in which each node has a separate block of 256 units. */
typedef struct {
    uint32_t unit[256 * BLOCKS];
    size_t blocks; /* in use; the first holds the root */
    lm_buf text;
} map;

/* The first unit of the children of node `at`. */
static size_t children(map *m, size_t at)
{
    if (!(m->unit[at] >> 10)) {
        assert_true(m->blocks < BLOCKS);
        m->unit[at] |= (uint32_t)(at ^ 256 * m->blocks++) << 10;
    }
    return at ^ m->unit[at] >> 10;
}

static void add_key(map *m, const char *key, const char *to)
{
    lm_err e = { 0 };
    size_t at = 0;
    for (const char *k = key; *k; k++) {
        at = children(m, at) ^ (uint8_t)*k;
        m->unit[at] |= (uint8_t)*k;
    }
    m->unit[children(m, at)] = 1u << 31 | (uint32_t)m->text.len;
    m->unit[at] |= 1u << 8;
    assert_int_equal(lm_buf_add(&m->text, to, strlen(to) + 1, &e), 0);
}

/* The map as base 64. */
static void code(const map *m, lm_buf *out)
{
    uint32_t n = (uint32_t)sizeof m->unit;
    lm_buf raw = { 0 };
    lm_err e = { 0 };
    lm_buf_add(&raw, &n, 4, &e);
    lm_buf_add(&raw, m->unit, n, &e);
    lm_buf_add(&raw, m->text.data, m->text.len, &e);
    out->len = 0;
    assert_int_equal(lm_base64_encode(raw.data, raw.len, out, &e), 0);
    lm_buf_fini(&raw);
}

static void becomes(const lm_charsmap *c, const char *text, const char *want)
{
    lm_buf out = { 0 };
    lm_err e = { 0 };
    assert_int_equal(lm_charsmap_run(c, text, strlen(text), &out, &e), 0);
    assert_int_equal(out.len, strlen(want));
    if (out.len)
        assert_memory_equal(out.data, want, out.len);
    lm_buf_fini(&out);
}

static void as_tokenizers_does(void **state)
{
    map *m = calloc(1, sizeof *m);
    lm_buf coded = { 0 };
    lm_charsmap *c = NULL;
    lm_err e = { 0 };

    (void)state;
    assert_non_null(m);
    m->blocks = 1;
    add_key(m, "\uFB01", "fi");
    add_key(m, "\t", " ");
    add_key(m, "\x01", "");
    add_key(m, "e\u0301", "\u00e9");
    add_key(m, "a\u0308", "\u00e4");
    add_key(m, "Q", "q");
    add_key(m, "Q\u0308", "never"); /* a shorter key begins it */
    code(m, &coded);
    assert_int_equal(lm_charsmap_new(coded.data, coded.len, "x", &c, &e), 0);
    becomes(c, "", "");
    becomes(c, "plain", "plain");
    becomes(c, "\uFB01n\ta\x01lly", "fin ally");
    becomes(c,
            "caf"
            "e\u0301"
            "s",
            "caf\u00e9s");
    becomes(c, "a\u0308\u0301b",
            "\u00e4"
            "b");                                             /* the grapheme goes as a whole */
    becomes(c, "a\u0308\u0301\u0302", "a\u0308\u0301\u0302"); /* 7 bytes: one by one */
    becomes(c, "Q\u0308Q", "qq");
    becomes(c, "\u4f60\U0001f600", "\u4f60\U0001f600");
    lm_charsmap_free(c);
    lm_buf_fini(&coded);
    lm_buf_fini(&m->text);
    free(m);
}

static void refused(const char *raw, size_t len, const char *what)
{
    lm_buf coded = { 0 };
    lm_charsmap *c = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_base64_encode(raw, len, &coded, &e), 0);
    assert_int_equal(lm_charsmap_new(coded.data ? coded.data : "", coded.len, "x.json", &c, &e),
                     LM_EFORMAT);
    assert_null(c);
    assert_string_equal(e.where, "x.json");
    assert_non_null(strstr(e.what, what));
    lm_buf_fini(&coded);
}

static void damaged(void **state)
{
    lm_charsmap *c = NULL;
    lm_err e = { 0 };
    /* One unit: its child lies outside; and a leaf whose value lies outside. */
    static const char outside[] = "\x04\0\0\0\0\xfc\xff\xff";
    uint32_t unit[257] = { [0] = 256u << 10 }, n = 4 * 257;
    lm_buf raw = { 0 }, coded = { 0 };

    (void)state;
    refused("", 0, "0 bytes");
    refused("\0\0\0\0", 4, "its trie takes 0");
    refused("\x08\0\0\0abcd", 8, "its trie takes 8");
    refused("\x03\0\0\0abcd", 8, "its trie takes 3");
    refused("\x04\0\0\0abcd\xff", 9, "not UTF-8");
    assert_int_equal(lm_charsmap_new("!!", 2, "x", &c, &e), LM_EFORMAT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_base64_encode(outside, 8, &coded, &e), 0);
    assert_int_equal(lm_charsmap_new(coded.data, coded.len, "x", &c, &e), 0);
    becomes(c, "ab\u4f60", "ab\u4f60");
    lm_charsmap_free(c);
    unit[97] = 97 | 1u << 8 | 97u << 10; /* unreachable: its block is the first one */
    unit[256] = 1u << 31 | 1u << 20;
    lm_buf_add(&raw, &n, 4, &e);
    lm_buf_add(&raw, unit, n, &e);
    lm_buf_add(&raw, "x", 2, &e);
    coded.len = 0;
    assert_int_equal(lm_base64_encode(raw.data, raw.len, &coded, &e), 0);
    assert_int_equal(lm_charsmap_new(coded.data, coded.len, "x", &c, &e), 0);
    becomes(c, "a\u0301ab", "a\u0301ab");
    lm_charsmap_free(c);
    lm_buf_fini(&raw);
    lm_buf_fini(&coded);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_tokenizers_does),
        cmocka_unit_test(damaged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
