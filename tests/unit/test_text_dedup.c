/* SPDX-License-Identifier: Apache-2.0 */
/* Deduplication: exact, near, the estimate of similarity, and the probability of a shared band. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/rng.h"
#include "base/text.h"
#include "text/dedup.h"

/* n different words, numbered from `from`. */
static void add_words(lm_buf *b, int from, int n)
{
    lm_err e = { 0 };
    for (int i = 0; i < n; i++) /* letters only: digits are all alike after simplifying */
        lm_buf_addf(b, &e, "w%c%c%c%c ", 'a' + (from + i) % 26, 'a' + (from + i) / 26 % 26,
                    'a' + (from + i) / 676 % 26, 'a' + (from + i) / 17576 % 26);
}

static lm_dedup_verdict add_text(lm_dedup *d, const char *s)
{
    lm_dedup_sig sig = { 0 };
    lm_dedup_verdict v;
    lm_err e = { 0 };
    assert_int_equal(lm_dedup_sign(d, s, strlen(s), &sig, &e), LM_OK);
    assert_int_equal(lm_dedup_add(d, &sig, &v, &e), LM_OK);
    lm_dedup_sig_fini(&sig);
    return v;
}

static lm_dedup *make(lm_dedup_opts o)
{
    lm_dedup *d = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_dedup_new(&o, &d, &e), LM_OK);
    return d;
}

static void exact_only(void **st)
{
    (void)st;
    lm_dedup *d = make((lm_dedup_opts){ 0 });
    char text[32];
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 5000; i++) {
            snprintf(text, sizeof text, "text %d", i);
            assert_int_equal(add_text(d, text), round ? LM_DEDUP_EXACT : LM_DEDUP_NEW);
        }
    assert_int_equal(add_text(d, "Text 1"), LM_DEDUP_NEW);
    lm_dedup_free(d);
}

static void what_is_near(void **st)
{
    (void)st;
    lm_dedup *d = make((lm_dedup_opts){ .near = true, .threshold = 0.7 });
    const char *a =
        "On 12 May the caf\xC3\xA9 in the High Street, once so popular, closed its doors.";
    assert_int_equal(add_text(d, a), LM_DEDUP_NEW);
    /* case, digits, punctuation, spaces and accents do not count */
    assert_int_equal(add_text(d,
                              "on 34 MAY the cafe\xCC\x81 in the high street -- once so popular -- "
                              "closed\n its doors"),
                     LM_DEDUP_NEAR);
    assert_int_equal(
        add_text(d, "Quite another sentence, with nothing that was there before at all."),
        LM_DEDUP_NEW);
    assert_int_equal(add_text(d, "..."), LM_DEDUP_NEW); /* no words: exact only */
    assert_int_equal(add_text(d, "???"), LM_DEDUP_NEW);
    assert_int_equal(add_text(d, "one word"), LM_DEDUP_NEW); /* shorter than an n-gram */
    assert_int_equal(add_text(d, "One, word"), LM_DEDUP_NEAR);
    lm_dedup_free(d);
}

/* Text without spaces: characters are the words. */
static void near_without_spaces(void **st)
{
    (void)st;
    lm_dedup *d = make((lm_dedup_opts){ .near = true, .threshold = 0.7 });
    lm_buf a = { 0 }, b = { 0 };
    lm_err e = { 0 };
    char c[4];
    for (uint32_t i = 0; i < 300; i++) { /* a story, and the same with two characters changed */
        assert_int_equal(lm_buf_add(&a, c, lm_utf8_put(0x4E00 + 17 * i, c), &e), 0);
        uint32_t other = i == 100 || i == 200 ? 0x3042 : 0x4E00 + 17 * i;
        assert_int_equal(lm_buf_add(&b, c, lm_utf8_put(other, c), &e), 0);
    }
    assert_int_equal(add_text(d, a.data), LM_DEDUP_NEW);
    assert_int_equal(add_text(d, b.data), LM_DEDUP_NEAR);
    assert_int_equal(add_text(d, "\u4f60\u597d\u4e16\u754c"), LM_DEDUP_NEW);
    assert_int_equal(add_text(d, "\u300c\u4f60\u597d\u300d \u4e16\u754c\u3002"), LM_DEDUP_NEAR);
    lm_dedup_free(d);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

/* The fraction of n equal values. */
static double similarity(const lm_dedup_sig *a, const lm_dedup_sig *b, int n)
{
    int same = 0;
    for (int i = 0; i < n; i++)
        same += a->value[i] == b->value[i];
    return (double)same / n;
}

/* The fraction of equal values estimates the Jaccard similarity of the 5-grams. */
static void similarity_is_estimated(void **st)
{
    (void)st;
    lm_dedup *d = make((lm_dedup_opts){ .near = true, .bands = 64, .rows = 16 });
    for (int shared = 100; shared <= 900; shared += 200) {
        lm_buf a = { 0 }, b = { 0 };
        lm_dedup_sig sa = { 0 }, sb = { 0 };
        lm_err e = { 0 };
        add_words(&a, 0, 1000);
        add_words(&b, 1000 - shared, 1000);
        double inter = shared - 4, s = inter / (2 * 996 - inter);
        assert_int_equal(lm_dedup_sign(d, a.data, a.len, &sa, &e), LM_OK);
        assert_int_equal(lm_dedup_sign(d, b.data, b.len, &sb, &e), LM_OK);
        double got = similarity(&sa, &sb, 64 * 16), sigma = sqrt(s * (1 - s) / 1024);
        if (fabs(got - s) > 4 * sigma)
            fail_msg("similarity %g, estimated %g (sigma %g)", s, got, sigma);
        lm_dedup_sig_fini(&sa);
        lm_dedup_sig_fini(&sb);
        lm_buf_fini(&a);
        lm_buf_fini(&b);
    }
    lm_dedup_free(d);
}

/* With threshold 0 a pair of similarity s is found with probability 1 - (1 - s^8)^14. */
static void bands_have_the_stated_probability(void **st)
{
    (void)st;
    enum { PAIRS = 200, WORDS = 300 };
    static const int shared[] = { 180, 250, 290 };
    for (int k = 0; k < 3; k++) {
        int found = 0;
        double inter = shared[k] - 4, s = inter / (2 * (WORDS - 4) - inter);
        double p = 1 - pow(1 - pow(s, 8), 14), sigma = sqrt(p * (1 - p) * PAIRS);
        for (int i = 0; i < PAIRS; i++) {
            lm_dedup *d = make((lm_dedup_opts){ .near = true, .seed = (uint64_t)i });
            lm_buf a = { 0 }, b = { 0 };
            add_words(&a, i * 1000, WORDS);
            add_words(&b, i * 1000 + WORDS - shared[k], WORDS);
            add_text(d, a.data);
            found += add_text(d, b.data) == LM_DEDUP_NEAR;
            lm_buf_fini(&a);
            lm_buf_fini(&b);
            lm_dedup_free(d);
        }
        if (fabs(found - p * PAIRS) > 4 * sigma + 1)
            fail_msg("s = %g: %d of %d found, expected %g", s, found, PAIRS, p * PAIRS);
    }
}

static void threshold_spares_candidates(void **st)
{
    (void)st;
    lm_buf a = { 0 }, b = { 0 };
    add_words(&a, 0, 300);
    add_words(&b, 50, 300); /* similarity 0.71 */
    lm_dedup *all = make((lm_dedup_opts){ .near = true, .bands = 128, .rows = 2 });
    lm_dedup *few =
        make((lm_dedup_opts){ .near = true, .bands = 128, .rows = 2, .threshold = 0.9 });
    add_text(all, a.data);
    add_text(few, a.data);
    assert_int_equal(add_text(all, b.data), LM_DEDUP_NEAR);
    assert_int_equal(add_text(few, b.data), LM_DEDUP_NEW);
    lm_dedup_free(all);
    lm_dedup_free(few);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

static void many_documents(void **st)
{
    (void)st;
    lm_dedup *d = make((lm_dedup_opts){ .near = true, .threshold = 0.7 });
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 3000; i++) {
            lm_buf a = { 0 };
            lm_err e = { 0 };
            add_words(&a, i * 40, 40);
            if (round)
                lm_buf_addf(&a, &e, "!");
            assert_int_equal(add_text(d, a.data), round ? LM_DEDUP_NEAR : LM_DEDUP_NEW);
            lm_buf_fini(&a);
        }
    lm_dedup_free(d);
}

static void bad_numbers(void **st)
{
    (void)st;
    lm_dedup *d = NULL;
    lm_err e = { 0 };
    const lm_dedup_opts o = { .near = true, .bands = 100, .rows = 100 };
    assert_int_equal(lm_dedup_new(&o, &d, &e), LM_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_only),
        cmocka_unit_test(what_is_near),
        cmocka_unit_test(near_without_spaces),
        cmocka_unit_test(similarity_is_estimated),
        cmocka_unit_test(bands_have_the_stated_probability),
        cmocka_unit_test(threshold_spares_candidates),
        cmocka_unit_test(many_documents),
        cmocka_unit_test(bad_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
