/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_json.c -- getters, hostile texts, the streaming writer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"

static json_t *parse(const char *text)
{
    json_t *v = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_json_parse(text, strlen(text), "x.json", &v, &e), LM_OK);
    return v;
}

static void getters(void **state)
{
    json_t *v = parse("{\"n\": 5, \"r\": 1.5, \"b\": true, \"s\": \"text\", \"z\": null}");
    int64_t n;
    double r;
    bool b;
    const char *s;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_json_i64(v, "n", 0, 5, &n, "x", &e), LM_OK);
    assert_int_equal(n, 5);
    assert_int_equal(lm_json_i64_or(v, "none", 9, 0, 1, &n, "x", &e), LM_OK);
    assert_int_equal(n, 9); /* a default need not be in range */
    assert_int_equal(lm_json_i64_or(v, "z", 8, 0, 1, &n, "x", &e), LM_OK);
    assert_int_equal(n, 8);
    assert_int_equal(lm_json_f64_or(v, "r", 0, &r, "x", &e), LM_OK);
    assert_true(r == 1.5);
    assert_int_equal(lm_json_f64_or(v, "n", 0, &r, "x", &e), LM_OK);
    assert_true(r == 5);
    assert_int_equal(lm_json_bool_or(v, "b", false, &b, "x", &e), LM_OK);
    assert_true(b);
    assert_int_equal(lm_json_bool_or(v, "none", true, &b, "x", &e), LM_OK);
    assert_true(b);
    assert_int_equal(lm_json_str_or(v, "s", NULL, &s, "x", &e), LM_OK);
    assert_string_equal(s, "text");
    assert_int_equal(lm_json_str_or(v, "none", NULL, &s, "x", &e), LM_OK);
    assert_null(s);
    json_decref(v);
}

static void refused(lm_code rc, lm_err *e, const char *part)
{
    assert_int_equal(rc, LM_EFORMAT);
    assert_string_equal(e->where, "x");
    if (!strstr(e->what, part))
        fail_msg("'%s' lacks '%s'", e->what, part);
    *e = (lm_err){ 0 };
}

static void getters_refuse(void **state)
{
    json_t *v = parse(
        "{\"n\": 5, \"r\": 1.5, \"b\": true, \"s\": \"text\", \"a\": [], \"nul\": \"a\\u0000b\"}");
    int64_t n = 77;
    double r;
    bool b;
    const char *s;
    lm_err e = { 0 };

    (void)state;
    refused(lm_json_i64(v, "none", 0, 9, &n, "x", &e), &e, "'none' is missing");
    refused(lm_json_i64(v, "n", 6, 9, &n, "x", &e), &e, "'n' is 5, 6 to 9");
    refused(lm_json_i64_or(v, "n", 0, 0, 4, &n, "x", &e), &e, "'n' is 5, 0 to 4");
    refused(lm_json_i64_or(v, "r", 0, 0, 4, &n, "x", &e), &e, "an integer is needed");
    refused(lm_json_f64_or(v, "s", 0, &r, "x", &e), &e, "a number is needed");
    refused(lm_json_bool_or(v, "n", 0, &b, "x", &e), &e, "true or false");
    refused(lm_json_str_or(v, "a", "", &s, "x", &e), &e, "is an array, a string");
    refused(lm_json_str_or(v, "nul", "", &s, "x", &e), &e, "NUL");
    refused(lm_json_i64(json_object_get(v, "a"), "k", 0, 9, &n, "x", &e), &e, "object");
    refused(lm_json_i64(NULL, "k", 0, 9, &n, "x", &e), &e, "object");
    assert_int_equal(n, 77);
    json_decref(v);
}

static void hostile_texts(void **state)
{
    static const char *const bad[] = {
        "",
        "{",
        "{\"a\":1,}",
        "[1 2]",
        "{\"a\":1}{}",
        "{\"a\":1,\"a\":2}",
        "nul",
        "'a'",
        "[1e999]",
        "99999999999999999999",
        "\"\\ud800\"",
        "\"\xff\"",
        "[\"\x01\"]",
        "{\"a\" 1}",
        "[NaN]",

        "01",
        "\xEF\xBB\xBF{}",
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *v = NULL;
        lm_err e = { 0 };

        assert_int_equal(lm_json_parse(bad[i], strlen(bad[i]), "x", &v, &e), LM_EFORMAT);
        assert_non_null(strstr(e.what, "line"));
        for (const char *s = e.what; *s; s++)
            assert_true(*s >= ' ' && *s <= '~');
    }
}

static void raw_nul(void **state)
{
    static const char text[] = "{\"a\":2\0}";
    json_t *v = NULL;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_json_parse(text, sizeof text - 1, "x", &v, &e), LM_EFORMAT);
}

static void depth(void **state)
{
    enum { N = 100000 };
    char *text = malloc(2 * N);
    json_t *v = NULL;
    lm_err e = { 0 }, f = { 0 };

    (void)state;
    memset(text, '[', N);
    memset(text + N, ']', N);
    assert_int_equal(lm_json_parse(text, 2 * N, "x", &v, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "512"));
    assert_int_equal(lm_json_parse(text + N - 512, 1024, "x", &v, &f), LM_OK);
    json_decref(v);
    assert_int_equal(lm_json_parse(text + N - 513, 1026, "x", &v, &f), LM_EFORMAT);
    free(text);
    v = parse("[\"[[[[\\\"[[[[\"]"); /* brackets inside strings do not count */
    json_decref(v);
}

static void from_a_file(void **state)
{
    char path[] = "/tmp/test_json.XXXXXX";
    int fd = mkstemp(path);
    json_t *v = NULL;
    lm_err e = { 0 }, f = { 0 }, g = { 0 };

    (void)state;
    assert_int_equal(write(fd, "{\"a\": [1]}", 10), 10);
    close(fd);
    assert_int_equal(lm_json_load(path, 10, &v, &e), LM_OK);
    json_decref(v);
    assert_int_equal(lm_json_load(path, 9, &v, &f), LM_EFORMAT);
    assert_string_equal(f.where, path);
    unlink(path);
    assert_int_equal(lm_json_load(path, 9, &v, &g), LM_EIO);
}

static void writer(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    json_t *tree = parse("{\"x\": [1, 0.5]}");
    lm_jw w;

    (void)state;
    lm_jw_begin(&w, &b, 0, &e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "s", "a\"\\\n\x01\x7f\xC3\xA4");
    lm_jw_str(&w, "none", NULL);
    lm_jw_strn(&w, "n", "a\0b", 3);
    lm_jw_int(&w, "i", INT64_MIN);
    lm_jw_f32(&w, "f", 0.1f);
    lm_jw_f64(&w, "d", 0.1);
    lm_jw_f64(&w, "t", 1.0 / 3);
    lm_jw_f64(&w, "nan", NAN);
    lm_jw_f32(&w, "inf", INFINITY);
    lm_jw_bool(&w, "b", true);
    lm_jw_arr(&w, "a");
    lm_jw_int(&w, NULL, 1);
    lm_jw_obj(&w, NULL);
    lm_jw_close_obj(&w);
    lm_jw_json(&w, NULL, tree);
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    assert_int_equal(lm_jw_end(&w), LM_OK);
    assert_string_equal(
        b.data, "{\"s\":\"a\\\"\\\\\\n\\u0001\\u007f\xC3\xA4\",\"none\":null,\"n\":\"a\\u0000b\","
                "\"i\":-9223372036854775808,\"f\":0.1,\"d\":0.1,\"t\":0.3333333333333333,"
                "\"nan\":null,\"inf\":null,\"b\":true,\"a\":[1,{},{\"x\":[1,0.5]}]}");
    json_decref(tree);
    lm_buf_fini(&b);
}

/* A tree is printed with the numbers as they were written. */
static void writer_keeps_numbers(void **state)
{
    static const char text[] = "{\"a\":[3.7,1.0,1e-06,1000000.0,0.1,-2.5e+300],\"b\":{\"n\":null,"
                               "\"t\":true,\"s\":\"\\u0000x\",\"i\":-7},\"c\":[],\"d\":{}}";
    lm_buf b = { 0 };
    lm_err e = { 0 };
    json_t *tree = NULL;
    lm_jw w;
    (void)state;
    assert_int_equal(lm_json_parse(text, strlen(text), "t", &tree, &e), LM_OK);
    lm_jw_begin(&w, &b, 2, &e);
    lm_jw_json(&w, NULL, tree);
    assert_int_equal(lm_jw_end(&w), LM_OK);
    assert_string_equal(b.data, text);
    json_decref(tree);
    lm_buf_fini(&b);
}

static void writer_repairs_text(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_jw w;
    json_t *v = NULL;

    (void)state;
    lm_jw_begin(&w, &b, 0, &e);
    lm_jw_str(&w, NULL, "a\xFF\xE2\x82z\xF0\x9F\x98\x80\xED\xA0\x80");
    assert_int_equal(lm_jw_end(&w), LM_OK);
    assert_int_equal(lm_json_parse(b.data, b.len, "x", &v, &e), LM_OK);
    assert_string_equal(json_string_value(v),
                        "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz\xF0\x9F\x98\x80"
                        "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
    json_decref(v);
    lm_buf_fini(&b);
}

static void writer_indents(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_jw w;

    (void)state;
    lm_jw_begin(&w, &b, 2, &e);
    lm_jw_obj(&w, NULL);
    lm_jw_int(&w, "a", 1);
    lm_jw_arr(&w, "b");
    lm_jw_int(&w, NULL, 2);
    lm_jw_close_arr(&w);
    lm_jw_obj(&w, "c");
    lm_jw_close_obj(&w);
    assert_int_equal(lm_jw_end(&w), LM_EBUG); /* one level is still open */
    lm_jw_begin(&w, &b, 2, &e);
    w.depth = 1;
    w.comma = true;
    lm_jw_close_obj(&w);
    assert_string_equal(b.data, "{\n  \"a\": 1,\n  \"b\": [\n    2\n  ],\n  \"c\": {}\n}");
    lm_buf_fini(&b);
}

/* Numbers that were written read back the same, bit for bit. */
static void numbers_return(void **state)
{
    lm_err e = { 0 };

    (void)state;
    for (uint32_t i = 1; i < 20000; i++) {
        lm_buf b = { 0 };
        lm_jw w;
        uint32_t bits = i * 2654435761u & 0xBFFFFFFFu;
        uint64_t wide = i * UINT64_C(0x9E3779B97F4A7C15) & UINT64_C(0xBFFFFFFFFFFFFFFF);
        float f, back;
        double d;

        memcpy(&f, &bits, 4);
        memcpy(&d, &wide, 8);
        lm_jw_begin(&w, &b, 0, &e);
        lm_jw_f32(&w, NULL, f);
        back = strtof(b.data, NULL);
        assert_memory_equal(&back, &f, 4);
        b.len = 0;
        lm_jw_begin(&w, &b, 0, &e);
        lm_jw_f64(&w, NULL, d);
        assert_true(strtod(b.data, NULL) == d);
        lm_buf_fini(&b);
    }
}

static void numbers_hold(void **state)
{
    lm_err e = { 0 };
    static const char *const good[] = { "{\"a\":1e-300,\"b\":[-0.0,1E+300,12]}", "\"1e-999\"",
                                        "{\"0x1 1e999 \\\" 1e999\":\"\\\\\"}", "[]" };
    static const char *const bad[] = { "1e-400", "[1,-3e-330]", "{\"a\":\"\\\\\",\"b\":1e999}" };

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_int_equal(lm_json_check_numbers(good[i], "x", &e), LM_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(lm_json_check_numbers(bad[i], "x", &e), LM_EFORMAT);
        assert_non_null(strstr(e.what, "does not fit a double"));
        e = (lm_err){ 0 };
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(getters),
        cmocka_unit_test(getters_refuse),
        cmocka_unit_test(hostile_texts),
        cmocka_unit_test(depth),
        cmocka_unit_test(raw_nul),
        cmocka_unit_test(from_a_file),
        cmocka_unit_test(writer),
        cmocka_unit_test(writer_keeps_numbers),
        cmocka_unit_test(writer_repairs_text),
        cmocka_unit_test(writer_indents),
        cmocka_unit_test(numbers_return),
        cmocka_unit_test(numbers_hold),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
