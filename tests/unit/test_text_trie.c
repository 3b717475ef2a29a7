/* SPDX-License-Identifier: Apache-2.0 */
/* test_text_trie.c -- tries of random strings against a search in the list. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "text/trie.h"

enum { STRINGS = 3000, LONGEST = 9 };

static lm_rng rng;
static uint64_t drawn;

static uint32_t draw(uint32_t n)
{
    return (uint32_t)lm_rng_below(rng, drawn++, n);
}

/* The id of the last string that equals text[0..len), LM_TRIE_NONE if none does. */
static uint32_t search(const lm_trie_string *v, size_t n, const char *text, size_t len)
{
    uint32_t id = LM_TRIE_NONE;

    for (size_t i = 0; i < n; i++)
        if (v[i].len == len && !memcmp(v[i].text, text, len) &&
            (id == LM_TRIE_NONE || v[i].id > id))
            id = v[i].id;
    return len ? id : LM_TRIE_NONE;
}

static uint32_t look_up(const lm_trie *t, const char *text, size_t len)
{
    uint32_t node = LM_TRIE_ROOT;

    for (size_t i = 0; i < len && node != LM_TRIE_NONE; i++)
        node = lm_trie_step(t, node, (uint8_t)text[i]);
    return node == LM_TRIE_NONE ? LM_TRIE_NONE : t->cell[node].id;
}

/* `letters` different bytes: few give deep tries, 256 give nodes with every child. */
static void check_random(uint32_t letters, size_t n)
{
    static char text[STRINGS * LONGEST];
    static lm_trie_string v[STRINGS];
    lm_trie t = { 0 };
    lm_err e = { 0 };

    for (size_t i = 0; i < n; i++) {
        char *s = text + i * LONGEST;
        v[i] = (lm_trie_string){ s, draw(LONGEST + 1), (uint32_t)i };
        for (uint32_t k = 0; k < v[i].len; k++)
            s[k] = (char)draw(letters);
    }
    assert_int_equal(lm_trie_build(&t, v, n, "test", &e), 0);
    assert_int_equal(t.n % 256, 0);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(look_up(&t, v[i].text, v[i].len), search(v, n, v[i].text, v[i].len));
    for (int i = 0; i < 300; i++) {
        char s[LONGEST];
        size_t len = draw(LONGEST + 1);
        for (size_t k = 0; k < len; k++)
            s[k] = (char)draw(letters);
        assert_int_equal(look_up(&t, s, len), search(v, n, s, len));
    }
    lm_trie_fini(&t);
}

static void random_strings(void **state)
{
    (void)state;
    rng = lm_rng_make(1, "test", 0);
    for (uint32_t letters = 1; letters <= 256; letters *= 4) {
        check_random(letters, 0);
        check_random(letters, 1);
        check_random(letters, STRINGS);
    }
}

static void long_strings(void **state)
{
    static char text[LM_TRIE_LONGEST + 1];
    lm_trie_string v = { text, LM_TRIE_LONGEST, 5 };
    lm_trie t = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_trie_build(&t, &v, 1, "test", &e), 0);
    assert_int_equal(look_up(&t, text, LM_TRIE_LONGEST), 5);
    lm_trie_fini(&t);
    v.len++;
    assert_int_equal(lm_trie_build(&t, &v, 1, "test", &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "token 5 has 4097 bytes"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_strings),
        cmocka_unit_test(long_strings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
