/* SPDX-License-Identifier: Apache-2.0 */
/* Span corruption: the lengths of the published code, sources and targets that are the text between them, every
 * segmentation as likely as another, and windows of a feed that depend on seed and number alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "train/batch.h"

/* What random_spans_helper of the published code gives. */
static void test_lengths(void **state)
{
    static const struct {
        int64_t source;
        double density, mean;
        int64_t window, target;
    } known[] = { { 512, 0.15, 3, 568, 114 }, { 64, 0.15, 3, 70, 14 },
                  { 128, 0.15, 3, 141, 29 },  { 1024, 0.15, 3, 1137, 229 },
                  { 256, 0.15, 10, 295, 49 }, { 512, 0.15, 2, 552, 126 },
                  { 512, 0.25, 4, 629, 197 }, { 20, 0.15, 3, 21, 5 } };
    lm_err e = { 0 };
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        lm_span s;
        assert_int_equal(lm_span_fit(known[i].source, known[i].density, known[i].mean, &s, &e), 0);
        assert_int_equal(s.source, known[i].source);
        assert_int_equal(s.window, known[i].window);
        assert_int_equal(s.target, known[i].target);
        assert_int_equal(s.window - s.noise + s.spans + 1, s.source);
        assert_int_equal(s.noise + s.spans + 1, s.target);
    }
}

static void test_no_room(void **state)
{
    lm_err e = { 0 };
    lm_span s;
    (void)state;
    assert_int_equal(lm_span_fit(2, 0.15, 3, &s, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_span_fit(3, 0.15, 3, &s, &e), 0); /* a token, a sentinel, the end */
    assert_int_equal(s.window, 2);
    assert_int_equal(lm_span_fit(100, 0.999, 1e6, &s, &e), LM_EUSAGE);
}

enum { EOS = 1, START = 0, FIRST = 5000 };

static lm_span span_of(int64_t source, double density, double mean, int32_t *sentinel)
{
    lm_err e = { 0 };
    lm_span s;
    assert_int_equal(lm_span_fit(source, density, mean, &s, &e), 0);
    for (int64_t k = 0; k < s.spans; k++)
        sentinel[k] = (int32_t)(FIRST - k);
    s.sentinel = sentinel;
    s.eos = EOS;
    s.start = START;
    return s;
}

/* Put the spans of a target back into a source. */
static int64_t join(const lm_span *s, const int32_t *source, const int32_t *target, int32_t *out)
{
    int64_t n = 0, at = 0, k = 0;
    for (int64_t i = 0; source[i] != EOS; i++) {
        if (source[i] != FIRST - k) {
            out[n++] = source[i];
            continue;
        }
        assert_int_equal(target[at++], FIRST - k++);
        for (; target[at] != EOS && target[at] != FIRST - k; at++)
            out[n++] = target[at];
    }
    assert_int_equal(k, s->spans);
    assert_int_equal(target[at], EOS);
    assert_int_equal(at, s->target - 1);
    return n;
}

static void test_text_is_whole(void **state)
{
    static const double density[] = { 0.15, 0.5, 0.05 }, mean[] = { 3, 1, 7.5 };
    enum { MOST = 600 };
    int32_t sentinel[MOST], source[MOST], tokens[MOST], target[MOST], out[2 * MOST];
    uint32_t ids[2 * MOST];
    (void)state;
    for (int i = 0; i < 2 * MOST; i++)
        ids[i] = (uint32_t)(10 + i);
    for (int i = 0; i < 3; i++)
        for (uint64_t n = 0; n < 200; n++) {
            lm_span s = span_of(40 + (int64_t)n, density[i], mean[i], sentinel);
            lm_span_cut(&s, lm_rng_make(3, "span", n), ids, source, tokens, target);
            assert_int_equal(source[s.source - 1], EOS);
            assert_int_not_equal(source[0], FIRST); /* text is first, noise last */
            assert_int_equal(source[s.source - 2], FIRST - (s.spans - 1));
            assert_int_equal(join(&s, source, target, out), s.window);
            for (int64_t k = 0; k < s.window; k++)
                assert_int_equal(out[k], ids[k]);
            assert_int_equal(tokens[0], START);
            for (int64_t k = 1; k < s.target; k++)
                assert_int_equal(tokens[k], target[k - 1]);
        }
}

/* 9 ids, of which 4 in 2 spans: 3 ways to divide the noise, 4 for the text. */
static void test_segmentations(void **state)
{
    lm_span s = { .window = 9, .noise = 4, .spans = 2, .source = 8, .target = 7 };
    int32_t sentinel[2] = { FIRST, FIRST - 1 }, source[8], tokens[7], target[7];
    uint32_t ids[9] = { 10, 11, 12, 13, 14, 15, 16, 17, 18 };
    int count[5][4] = { { 0 } };
    double chi = 0, each = 12000 / 12.0;
    (void)state;
    s.sentinel = sentinel;
    s.eos = EOS;
    for (uint64_t n = 0; n < 12000; n++) {
        int text = 0, noise = 0;
        lm_span_cut(&s, lm_rng_make(7, "span", n), ids, source, tokens, target);
        while (source[text] != FIRST)
            text++;
        while (target[noise + 1] != FIRST - 1)
            noise++;
        assert_true(text >= 1 && text <= 4 && noise >= 1 && noise <= 3);
        count[text][noise]++;
    }
    for (int i = 1; i <= 4; i++)
        for (int k = 1; k <= 3; k++)
            chi += (count[i][k] - each) * (count[i][k] - each) / each;
    assert_true(chi < 31.3); /* 11 degrees of freedom, 0.1 % */
}

static void test_feed(void **state)
{
    enum { MOST = 64 };
    int32_t sentinel[MOST], a[3][MOST], b[3][MOST], pos[MOST];
    int64_t valid, length;
    lm_err e = { 0 };
    lm_feed *f = NULL, *g = NULL;
    lm_span s = span_of(32, 0.15, 3, sentinel);
    lm_feed_opts o = { .seq = s.target, .shuffle = true, .seed = 5, .vocab = 4000, .span = &s };
    (void)state;
    assert_int_equal(lm_feed_new(NULL, &o, &f, &e), 0);
    assert_int_equal(lm_feed_new(NULL, &o, &g, &e), 0);
    for (int64_t i = 0; i < 5; i++) /* another order of reading */
        assert_int_equal(lm_feed_pair(g, i, b[0], &length, b[1], b[2], pos, &valid, &e), 0);
    assert_int_equal(lm_feed_pair(f, 3, a[0], &length, a[1], a[2], pos, &valid, &e), 0);
    assert_int_equal(lm_feed_pair(g, 3, b[0], &length, b[1], b[2], pos, &valid, &e), 0);
    assert_int_equal(valid, s.target);
    assert_memory_equal(a[0], b[0], (size_t)s.source * sizeof **a);
    assert_memory_equal(a[2], b[2], (size_t)s.target * sizeof **a);
    int64_t again = 3 + lm_feed_windows(g); /* the next epoch cuts otherwise */
    assert_int_equal(lm_feed_pair(g, again, b[0], &length, b[1], b[2], pos, &valid, &e), 0);
    assert_memory_not_equal(a[0], b[0], (size_t)s.source * sizeof **a);
    lm_feed_free(f);
    lm_feed_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_lengths),
                                        cmocka_unit_test(test_no_room),
                                        cmocka_unit_test(test_text_is_whole),
                                        cmocka_unit_test(test_segmentations),
                                        cmocka_unit_test(test_feed) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
