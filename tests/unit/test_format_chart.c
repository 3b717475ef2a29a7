/* SPDX-License-Identifier: Apache-2.0 */
/* Charts: ticks and their labels, smoothing, and what the three back ends draw. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format/chart.h"

/* "2 4 6" of the labels of an axis over [min, max]. */
static const char *labels(lm_axis_kind kind, bool log, double min, double max, int most, bool tight)
{
    static char text[512];
    lm_chart_axis a = { .kind = kind, .log = log };

    lm_axis_fit(&a, min, max, most, tight);
    assert_true(a.lo < a.hi && a.n >= 2 && a.n <= LM_AXIS_TICKS);
    text[0] = '\0';
    for (int i = 0; i < a.n; i++) {
        assert_true(lm_axis_at(&a, a.tick[i]) > -1e-6 && lm_axis_at(&a, a.tick[i]) < 1 + 1e-6);
        assert_true(i == 0 || a.tick[i] > a.tick[i - 1]);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "", a.label[i]);
    }
    return text;
}

static void ticks_are_round(void **state)
{
    (void)state;
    assert_string_equal(labels(LM_AXIS_NUMBER, false, 3.1, 8.4, 7, false), "3 4 5 6 7 8 9");
    assert_string_equal(labels(LM_AXIS_NUMBER, false, 0.0003, 0.003, 5, false),
                        "0 0.001 0.002 0.003");
    assert_string_equal(labels(LM_AXIS_NUMBER, false, 1e-6, 3e-6, 5, false),
                        "1.0e-6 1.5e-6 2.0e-6 2.5e-6 3.0e-6");
    assert_string_equal(labels(LM_AXIS_NUMBER, false, -1, 1, 5, false), "-1.0 -0.5 0 0.5 1.0");
    assert_string_equal(labels(LM_AXIS_COUNT, false, 1, 600, 7, true), "100 200 300 400 500 600");
    assert_string_equal(labels(LM_AXIS_COUNT, false, 0, 2.4e6, 6, true), "0 500k 1M 1.5M 2M");
    assert_string_equal(labels(LM_AXIS_COUNT, false, 1, 3, 9, true), "1 2 3");
    assert_string_equal(labels(LM_AXIS_TIME, false, 0, 180, 7, true), "0 30s 1m 1m30 2m 2m30 3m");
    assert_string_equal(labels(LM_AXIS_TIME, false, 0, 7200, 5, true), "0 30m 1h 1h30 2h");
    assert_string_equal(labels(LM_AXIS_NUMBER, true, 2e-4, 3e-2, 4, false),
                        "0.0001 0.001 0.01 0.1");
    assert_string_equal(labels(LM_AXIS_NUMBER, true, 2.1, 7.9, 8, false), "2 5 10");
}

static void odd_ranges_still_give_an_axis(void **state)
{
    (void)state;
    static const double odd[][2] = { { 0, 0 },         { 5, 5 },           { -3, -3 },
                                     { 1e300, 2e300 }, { 1e-300, 1e-299 }, { -1e9, 1e9 },
                                     { 7, 7.0000001 }, { 1, 1e12 } };

    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int kind = 0; kind < 3; kind++)
            for (int log = 0; log < 2; log++)
                for (int most = 2; most <= LM_AXIS_TICKS; most++)
                    for (int tight = 0; tight < 2; tight++) {
                        lm_chart_axis a = { .kind = (lm_axis_kind)kind, .log = log };
                        lm_axis_fit(&a, odd[i][0], odd[i][1], most, tight);
                        assert_true(a.lo < a.hi && a.n <= LM_AXIS_TICKS);
                        assert_true(isfinite(a.lo) && isfinite(a.hi));
                    }
}

static void smoothing_has_no_bias(void **state)
{
    (void)state;
    double flat[5] = { 2, 2, NAN, 2, 2 }, y[3] = { 1, 2, 4 }, out[5];

    lm_chart_smooth(out, flat, 5, 0.99);
    for (int i = 0; i < 5; i++)
        assert_true(i == 2 ? isnan(out[i]) : fabs(out[i] - 2) < 1e-12);
    lm_chart_smooth(out, y, 3, 0.5); /* (.25 * 1 + .5 * 2) / .75, (.125 + .5 + 2) / .875 */
    assert_true(fabs(out[0] - 1) < 1e-12 && fabs(out[1] - 5 / 3.0) < 1e-12 &&
                fabs(out[2] - 3) < 1e-12);
    lm_chart_smooth(out, y, 3, 0);
    assert_memory_equal(out, y, sizeof y);
}

static const double xs[4] = { 1, 2, 3, 4 }, ys[4] = { 4, 3, NAN, 1 };
static const lm_chart_line lines[2] = {
    { xs, ys, 4, "a<b>&\x1b[31m", 0, LM_LINE_SOLID },
    { xs, xs, 4, "marks", 1, LM_LINE_MARKS },
};
static const lm_chart_panel panel = { "loss", false, lines, 2 };
static const lm_chart chart = { "title", "step", LM_AXIS_COUNT, false, &panel, 1 };

static size_t count(const char *text, const char *what)
{
    size_t n = 0;

    for (; (text = strstr(text, what)) != NULL; text++)
        n++;
    return n;
}

static void svg_has_the_points(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_buf a = { 0 }, b = { 0 };

    assert_int_equal(lm_chart_svg(&chart, 640, 480, &a, &e), 0);
    assert_int_equal(lm_chart_svg(&chart, 640, 480, &b, &e), 0);
    assert_string_equal(a.data, b.data);
    assert_non_null(strstr(a.data, "a&lt;b&gt;&amp;\xEF\xBF\xBD[31m</text>"));
    assert_null(strchr(a.data, 27));
    /* four marks, one in the legend, one for the point alone behind the gap */
    assert_int_equal(count(a.data, "<circle"), 6);
    assert_int_equal(count(a.data, "#dc2626"), 2); /* the cross for a value that is not a number */
    assert_null(strstr(a.data, "nan"));
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

static void png_is_valid_and_reproducible(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_buf a = { 0 }, b = { 0 };

    assert_int_equal(lm_chart_png(&chart, 320, 200, &a, &e), 0);
    assert_int_equal(lm_chart_png(&chart, 320, 200, &b, &e), 0);
    assert_memory_equal(a.data, "\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x01\x40\0\0\0\xc8", 24);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

/* Letters in the widest line, escapes not counted. */
static size_t widest(const char *s)
{
    size_t n = 0, most = 0;

    for (; *s; s++) {
        if (*s == 27)
            while (*s != 'm')
                s++;
        else if (*s == '\n')
            n = 0;
        else
            n += (*s & 0xC0) != 0x80;
        most = n > most ? n : most;
    }
    return most;
}

static void text_keeps_to_its_size(void **state)
{
    (void)state;
    lm_err e = { 0 };

    for (int color = 0; color < 2; color++) {
        for (int cols = 40; cols <= 200; cols += 23) {
            lm_buf b = { 0 };
            assert_int_equal(lm_chart_text(&chart, cols, 20, color, &b, &e), 0);
            assert_int_equal(count(b.data, "\n"), 20);
            assert_true(widest(b.data) <= (size_t)cols);
            assert_int_equal(strchr(b.data, 27) != NULL, color);
            assert_int_equal(count(b.data, "●"), 5);
            assert_int_equal(count(b.data, "×"), 1);
            lm_buf_fini(&b);
        }
    }
}

/* y = x from corner to corner: the lowest row holds the first dots, the top row the last. */
static void text_draws_from_corner_to_corner(void **state)
{
    (void)state;
    static const double d[2] = { 0, 10 };
    static const lm_chart_line l = { d, d, 2, NULL, 0, LM_LINE_SOLID };
    static const lm_chart_panel p = { "y", false, &l, 1 };
    static const lm_chart c = { NULL, "x", LM_AXIS_NUMBER, false, &p, 1 };
    lm_err e = { 0 };
    lm_buf b = { 0 };

    assert_int_equal(lm_chart_text(&c, 23, 8, false, &b, &e), 0);
    assert_string_equal(b.data, "   y\n"
                                "10 ┤        ⡠⠊ 10\n"
                                "   │      ⡠⠊  \n"
                                "   │    ⡠⠊    \n"
                                "   │  ⡠⠊      \n"
                                " 0 ┤⡠⠊        \n"
                                "   └┬────────┬\n"
                                "    0        10 x\n");
    lm_buf_fini(&b);
}

static void empty_and_logarithmic_charts(void **state)
{
    (void)state;
    static const double y[3] = { 0, -1, NAN };
    static const lm_chart_line l = { xs, y, 3, "none", 0, LM_LINE_SOLID };
    static const lm_chart_panel p = { "loss", true, &l, 1 };
    static const lm_chart c = { "t", "step", LM_AXIS_COUNT, true, &p, 1 };
    lm_err e = { 0 };
    lm_buf b = { 0 };

    assert_int_equal(lm_chart_svg(&c, 640, 480, &b, &e), 0);
    assert_null(strstr(b.data, "nan"));
    assert_int_equal(lm_chart_text(&c, 80, 24, false, &b, &e), 0);
    lm_buf_fini(&b);
}

static void sizes_out_of_range(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_buf b = { 0 };

    assert_int_equal(lm_chart_svg(&chart, 159, 480, &b, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_chart_png(&chart, 640, 16385, &b, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_chart_text(&chart, 19, 24, false, &b, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_chart_text(&chart, 80, 501, false, &b, &e), LM_EUSAGE);
    lm_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ticks_are_round),
        cmocka_unit_test(odd_ranges_still_give_an_axis),
        cmocka_unit_test(smoothing_has_no_bias),
        cmocka_unit_test(svg_has_the_points),
        cmocka_unit_test(png_is_valid_and_reproducible),
        cmocka_unit_test(text_keeps_to_its_size),
        cmocka_unit_test(text_draws_from_corner_to_corner),
        cmocka_unit_test(empty_and_logarithmic_charts),
        cmocka_unit_test(sizes_out_of_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
