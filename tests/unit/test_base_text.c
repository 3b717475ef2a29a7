/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_text.c -- numbers, sizes, nearest names, UTF-8. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "base/text.h"

static void counts(void **state)
{
    static const struct {
        const char *s;
        int64_t want;
    } good[] = {
        { "0", 0 },          { "300", 300 },       { "1.5k", 1500 },
        { "20M", 20000000 }, { "3B", 3000000000 }, { "1T", 1000000000000 },
        { "-7", -7 },        { "0.001k", 1 },      { "9223372036854775807", INT64_MAX },
        { "1.0", 1 },        { "007", 7 },         { "-9223372036854775808", INT64_MIN },
        { ".5k", 500 },
    };
    static const char *const bad[] = { "",
                                       " 1",
                                       "1 ",
                                       "k",
                                       "1.5",
                                       "1.2345k",
                                       "1e6",
                                       "0x10",
                                       "1kk",
                                       "1G",
                                       "--1",
                                       "-",
                                       "1.k",
                                       ".",
                                       "+1",
                                       "1,5",
                                       "9223372036854775808",
                                       "9223372036854775T",
                                       "1.2.3",
                                       "99999999999999999999999999999999999999999999999999" };
    int64_t v;

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_true(lm_parse_count(good[i].s, &v));
        assert_true(v == good[i].want);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        v = 42;
        assert_false(lm_parse_count(bad[i], &v));
        assert_true(v == 42);
    }
}

static void bytes(void **state)
{
    int64_t v;

    (void)state;
    assert_true(lm_parse_bytes("64K", &v) && v == 65536);
    assert_true(lm_parse_bytes("1.5G", &v) && v == 3LL << 29);
    assert_true(lm_parse_bytes("0.3K", &v) && v == 307);
    assert_true(lm_parse_bytes("2T", &v) && v == 2LL << 40);
    assert_true(lm_parse_bytes("17", &v) && v == 17);
    assert_false(lm_parse_bytes("1.5", &v));
    assert_false(lm_parse_bytes("1B", &v));
    assert_false(lm_parse_bytes("9999999T", &v));
}

static void seconds_and_reals(void **state)
{
    double v;

    (void)state;
    assert_true(lm_parse_seconds("90", &v) && v == 90);
    assert_true(lm_parse_seconds("90s", &v) && v == 90);
    assert_true(lm_parse_seconds("1.5m", &v) && v == 90);
    assert_true(lm_parse_seconds("2h", &v) && v == 7200);
    assert_false(lm_parse_seconds("2d", &v));
    assert_false(lm_parse_seconds("", &v));
    assert_false(lm_parse_seconds("s", &v));
    assert_false(lm_parse_seconds("1ms", &v));
    assert_false(lm_parse_seconds("inf", &v));
    assert_true(lm_parse_double("3e-4", &v) && v == 3e-4);
    assert_true(lm_parse_double("-.5", &v) && v == -0.5);
    assert_true(lm_parse_double("+2.E1", &v) && v == 20);
    static const char *const none[] = {
        "inf",    "-inf", "infinity", "0x10", "0x1p3", "-0XA", "1e400", "-1e400", "1e-400",
        "4e-320", "1e",   "1e+",      ".",    "-",     "e5",   "1 ",    "--1",    "nan(1)"
    };
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        v = 7;
        assert_false(lm_parse_double(none[i], &v));
        assert_false(lm_parse_seconds(none[i], &v));
        assert_true(v == 7);
    }
    assert_true(lm_parse_double("0e-999", &v) && v == 0);
    assert_false(lm_parse_seconds("1e308h", &v));
    assert_false(lm_parse_double("nan", &v));
    assert_false(lm_parse_double("1,5", &v));
    assert_false(lm_parse_double(" 1", &v));
    assert_false(lm_parse_double("1x", &v));
    assert_false(lm_parse_double("", &v));
}

static void lists(void **state)
{
    double v[3];
    int n;

    (void)state;
    assert_true(lm_parse_list("0,0.5,-1e-3", v, 3, &n) && n == 3 && v[1] == 0.5 && v[2] == -1e-3);
    assert_true(lm_parse_list("7", v, 3, &n) && n == 1 && v[0] == 7);
    assert_false(lm_parse_list("", v, 3, &n));
    assert_false(lm_parse_list("1,", v, 3, &n));
    assert_false(lm_parse_list("1,,2", v, 3, &n));
    assert_false(lm_parse_list("1,2,3,4", v, 3, &n));
    assert_false(lm_parse_list("1;2", v, 3, &n));
    assert_false(lm_parse_list("1,0x2", v, 3, &n));
}

static void shown(void **state)
{
    char b[32];

    (void)state;
    assert_string_equal(lm_show_bytes(0, b), "0 B");
    assert_string_equal(lm_show_bytes(1023, b), "1023 B");
    assert_string_equal(lm_show_bytes(1024, b), "1.00 KiB");
    assert_string_equal(lm_show_bytes(18.3 * (1 << 30), b), "18.3 GiB");
    assert_string_equal(lm_show_count(999, b), "999");
    assert_string_equal(lm_show_count(4.96e6, b), "4.96 M");
    assert_string_equal(lm_show_count(999999, b), "1.00 M");
    assert_string_equal(lm_show_count(124e6, b), "124 M");
    assert_true(strlen(lm_show_bytes(1e30, b)) < 32);
}

static void nearest(void **state)
{
    static const char *const list[] = { "steps", "seq-len", "lr", "warmup", NULL };
    static const char *const none[] = { NULL };

    (void)state;
    assert_string_equal(lm_nearest("stpes", list), "steps");
    assert_string_equal(lm_nearest("seqlen", list), "seq-len");
    assert_string_equal(lm_nearest("seq_len", list), "seq-len");
    assert_null(lm_nearest("elephant", list));
    assert_null(lm_nearest("xy", list));
    assert_null(lm_nearest("steps", none));
    assert_null(lm_nearest(
        "a-name-that-is-much-longer-than-any-option-could-sensibly-be-in-a-tool-of-ours", list));
}

static void utf8_of_every_code_point(void **state)
{
    char b[4];
    size_t n;

    (void)state;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        size_t len = lm_utf8_put(c, b);

        if (c >= 0xD800 && c < 0xE000) {
            assert_memory_equal(b, "\xEF\xBF\xBD", 3);
            continue;
        }
        assert_int_equal(lm_utf8_valid(b, len), len);
        assert_int_equal(lm_utf8_valid(b, len - 1), 0); /* truncated (or empty) */
        assert_int_equal(lm_utf8_get(b, len, &n), c);
        assert_int_equal(n, len);
    }
}

static void utf8_refuses(void **state)
{
    static const char *const bad[] = {
        "\x80",         "\xBF",         "\xC0\x80",         "\xC1\xBF",         "\xE0\x9F\xBF",
        "\xED\xA0\x80", "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80",
        "\xFF",         "\xC3\x28",     "\xE2\x82\x28",
    };
    size_t n;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(lm_utf8_valid(bad[i], strlen(bad[i])), 0);
        assert_int_equal(lm_utf8_get(bad[i], strlen(bad[i]), &n), 0xFFFD);
        assert_int_equal(n, 1);
    }
    assert_int_equal(lm_utf8_valid("twelve ascii \xC3\xA4 then \xFF", 22), 21);
    assert_int_equal(lm_utf8_valid("", 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts),
        cmocka_unit_test(bytes),
        cmocka_unit_test(seconds_and_reals),
        cmocka_unit_test(lists),
        cmocka_unit_test(shown),
        cmocka_unit_test(nearest),
        cmocka_unit_test(utf8_of_every_code_point),
        cmocka_unit_test(utf8_refuses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
