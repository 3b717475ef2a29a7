/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_hyper.c -- values of hyper-parameters: read, refused, written, listed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/hyper.h"
#include "base/text.h"

static const lm_hyper table[] = {
    { "beta", 0.9, 0, 0.999, "a number", NULL },
    { "group_size", 32, 0, 1024, "a whole number", LM_WHOLE },
    { "axis", 1, 0, 2, "a word", "token channel 8" },
    { 0 },
};

static void texts_up_to_an_end(void **state)
{
    char out[4];
    const char *at = "ab;cdefg,h";
    (void)state;
    assert_true(lm_text_until(&at, ",;", out, sizeof out));
    assert_string_equal(out, "ab");
    assert_string_equal(at, ";cdefg,h");
    at++;
    assert_false(lm_text_until(&at, ",", out, sizeof out));
    assert_string_equal(out, "cde");
    assert_string_equal(at, ",h");
    at += 2;
    assert_true(lm_text_until(&at, ",", out, sizeof out));
    assert_string_equal(out, "");
}

static void pairs(void **state)
{
    lm_hyper_text t;
    lm_err e = { 0 };
    const char *at = "group-size=8,axis=channel+int8,v=3";
    (void)state;
    assert_int_equal(lm_hyper_next(&at, ";+", "cache", "grid", &t, &e), LM_OK);
    assert_string_equal(t.key, "group_size");
    assert_string_equal(t.value, "8");
    assert_string_equal(at, ",axis=channel+int8,v=3");
    at++;
    assert_int_equal(lm_hyper_next(&at, ";+", "cache", "grid", &t, &e), LM_OK);
    assert_string_equal(t.value, "channel");
    assert_string_equal(at, "+int8,v=3");
    at = "axis=channel+int8";
    assert_int_equal(lm_hyper_next(&at, ";", "cache", "grid", &t, &e), LM_OK);
    assert_string_equal(t.value, "channel+int8");
    assert_string_equal(at, "");
}

/* Each value of the table's kinds, and the message where it is refused. */
static void values(void **state)
{
    static const struct {
        const char *text;
        double want;
        const char *what;
    } cases[] = {
        { "beta=0.5", 0.5, NULL },
        { "beta=0", 0, NULL },
        { "beta=5e-1", 0.5, NULL },
        { "beta=0.9999", 0, "beta of grid is a number from 0 to 0.999, not '0.9999'" },
        { "beta=nan", 0, "beta of grid is a number from 0 to 0.999, not 'nan'" },
        { "beta=", 0, "beta of grid is a number from 0 to 0.999, not ''" },
        { "beta=-1e-9", 0, "beta of grid is a number from 0 to 0.999, not '-1e-9'" },
        { "group_size=64", 64, NULL },
        { "group-size=64", 64, NULL },
        { "group_size=6.5", 0, "group_size of grid is a whole number from 0 to 1024, not '6.5'" },
        { "axis=token", 0, NULL },
        { "axis=8", 2, NULL },
        { "axis=1", 0, "axis of grid is one of: token channel 8; not '1'" },
        { "axis=tok", 0, "axis of grid is one of: token channel 8; not 'tok'" },
        { "axis=", 0, "axis of grid is one of: token channel 8; not ''" },
        { "gamma=1", 0, "grid has no 'gamma'" },
        { "=1", 0, "grid has no ''" },
        { "beta", 0, "'beta' of grid has no value" },
        { "", 0, "'' of grid has no value" },
        { "beta=0000000000000000000000000000000000000000000000000000000000000001", 0,
          "the value of beta is too long" },
        { "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa=1", 0,
          "grid has no 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_err e = { 0 };
        lm_hyper_text t;
        const char *at = cases[i].text;
        double x = -5;
        lm_code rc = lm_hyper_next(&at, ";", "cache", "grid", &t, &e);
        int k = rc ? -1 : lm_hyper_find(table, t.key);
        if (!rc)
            rc = k < 0 ? lm_hyper_fail(table, "cache", "grid", "", t.key, &e)
                       : lm_hyper_set(&table[k], "cache", "grid", t.value, &x, &e);
        assert_int_equal(rc, cases[i].what ? LM_EUSAGE : LM_OK);
        assert_string_equal(e.what, cases[i].what ? cases[i].what : "");
        assert_true(x == (cases[i].what ? -5 : cases[i].want));
        if (k < 0 && cases[i].what && strstr(cases[i].what, "has no '"))
            assert_string_equal(e.todo, "its keys are: beta group_size axis");
    }
}

/* A value that was written reads back equal. */
static void shown(void **state)
{
    static const double numbers[] = { 0.1, 0.25, 1.0 / 3, 0.2, 1e-7, 0 };
    char text[64];
    double x;
    lm_err e = { 0 };
    (void)state;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        lm_hyper_show(&table[0], numbers[i], text);
        assert_int_equal(lm_hyper_set(&table[0], "cache", "grid", text, &x, &e), LM_OK);
        assert_true(x == numbers[i]);
    }
    lm_hyper_show(&table[0], 0.2, text);
    assert_string_equal(text, "0.2");
    lm_hyper_show(&table[1], 128, text);
    assert_string_equal(text, "128");
    lm_hyper_show(&table[2], 0, text);
    assert_string_equal(text, "token");
    lm_hyper_show(&table[2], 2, text);
    assert_string_equal(text, "8");
}

static void listed(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_jw w;
    (void)state;
    for (const lm_hyper *h = table; h->name; h++)
        assert_int_equal(lm_hyper_add_line(h, &b, &e), LM_OK);
    assert_string_equal(
        b.data,
        "  beta                    a number                                     0 to 0.999 [0.9]\n"
        "  group_size              a whole number                               0 to 1024 [32]\n"
        "  axis                    a word                                       "
        "token channel 8 [channel]\n");
    b.len = 0;
    lm_jw_begin(&w, &b, 0, &e);
    lm_jw_obj(&w, NULL);
    for (const lm_hyper *h = table; h->name; h++)
        lm_hyper_add_json(h, &w);
    lm_jw_close_obj(&w);
    assert_int_equal(lm_jw_end(&w), LM_OK);
    assert_string_equal(
        b.data, "{\"beta\":{\"value\":0.9,\"least\":0,\"most\":0.999,\"help\":\"a number\"},"
                "\"group_size\":{\"value\":32,\"least\":0,\"most\":1024,\"whole\":true,"
                "\"help\":\"a whole number\"},"
                "\"axis\":{\"value\":\"channel\",\"words\":[\"token\",\"channel\",\"8\"],"
                "\"help\":\"a word\"}}");
    lm_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_up_to_an_end),
        cmocka_unit_test(pairs),
        cmocka_unit_test(values),
        cmocka_unit_test(shown),
        cmocka_unit_test(listed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
