/* SPDX-License-Identifier: Apache-2.0 */
/* Maps: colours, numbers in cells, the arrangement of panels, and the three back ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/chart.h"

static const char *const lengths[3] = { "256", "512", "1024" };
static const char *const depths[2] = { "0 %", "100 %" };
static const double first[6] = { 1, 0.953, 0.5, 0, NAN, 2 };
static const double second[6] = { 1, 1, 1, 1, 1, -1 };
static const lm_chart_map_panel panels[2] = { { "a<b>\x1b[31m", first }, { "two", second } };
static const lm_chart_map map = { .title = "title",
                                  .quantity = "share",
                                  .x_label = "tokens",
                                  .y_label = "depth",
                                  .x = lengths,
                                  .y = depths,
                                  .cols = 3,
                                  .rows = 2,
                                  .lo = 0,
                                  .hi = 1,
                                  .panel = panels,
                                  .n = 2 };

static size_t count(const char *text, const char *what)
{
    size_t n = 0;

    for (; (text = strstr(text, what)) != NULL; text++)
        n++;
    return n;
}

static void svg_has_a_box_for_each_value(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_buf a = { 0 }, b = { 0 };

    assert_int_equal(lm_chart_map_svg(&map, 480, 640, &a, &e), 0);
    assert_int_equal(lm_chart_map_svg(&map, 480, 640, &b, &e), 0);
    assert_string_equal(a.data, b.data);
    assert_non_null(strstr(a.data, "a&lt;b&gt;\xEF\xBF\xBD[31m</text>"));
    assert_null(strchr(a.data, 27));
    assert_null(strstr(a.data, "nan"));
    /* paper, 24 parts of the scale, 11 measured cells; a line in the other one */
    assert_int_equal(count(a.data, "<rect"), 1 + 24 + 11);
    assert_int_equal(count(a.data, "<polyline"), 1);
    /* cells of 1 or above, and the scale's upper end; then 0 or below, and the lower end */
    assert_int_equal(count(a.data, "#172554"), 1 + 1 + 6);
    assert_int_equal(count(a.data, "#eff6ff"), 1 + 2);
    assert_int_equal(count(a.data, ">0.95</text>"), 1);
    assert_int_equal(count(a.data, ">-1</text>"), 1); /* clamped is the colour, not the number */
    for (size_t i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, ">%s</text>", lengths[i]);
        assert_int_equal(count(a.data, name), 1); /* panels below each other: once */
    }
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

/* The sum of the channels falls along the whole scale. */
static void colors_run_from_light_to_dark(void **state)
{
    (void)state;
    enum { N = 64 };
    static double value[N];
    static const char *names[N], *one[1] = { "" };
    lm_chart_map m = { .quantity = "", .x_label = "", .y_label = "", .x = names, .y = one };
    lm_chart_map_panel p = { "", value };
    lm_err e = { 0 };
    lm_buf b = { 0 };
    int last = 3 * 256;

    for (int i = 0; i < N; i++)
        value[i] = i, names[i] = "";
    m.cols = N, m.rows = 1, m.hi = N - 1, m.panel = &p, m.n = 1;
    assert_int_equal(lm_chart_map_svg(&m, 640, 200, &b, &e), 0);
    const char *at = b.data;
    for (int i = 0; i < 1 + 24; i++)
        at = strstr(at, "<rect") + 1;
    for (int i = 0; i < N; i++) {
        at = strstr(at, "<rect") + 1;
        unsigned long rgb = strtoul(strstr(at, "fill=\"#") + 7, NULL, 16);
        int sum = (int)((rgb >> 16) + (rgb >> 8 & 255) + (rgb & 255));
        assert_true(sum < last);
        last = sum;
    }
    lm_buf_fini(&b);
}

/* Every panel lies in the picture, and none on another, for one to forty panels. */
static void panels_share_the_picture(void **state)
{
    (void)state;
    static const double value[6] = { 0, 0, 0, 0, 0, 0 };
    lm_chart_map_panel many[40];
    lm_chart_map m = map;
    lm_err e = { 0 };

    for (int i = 0; i < 40; i++)
        many[i] = (lm_chart_map_panel){ "m", value };
    m.panel = many;
    for (m.n = 1; m.n <= 40; m.n += 3) {
        lm_buf b = { 0 };
        double x[240], y[240], w, h;
        const char *at;
        size_t n = 6 * m.n;

        assert_int_equal(lm_chart_map_svg(&m, 800, 600, &b, &e), 0);
        at = b.data;
        for (int i = 0; i < 1 + 24; i++)
            at = strstr(at, "<rect") + 1;
        for (size_t i = 0; i < n; i++) {
            at = strstr(at, "<rect") + 1;
            assert_int_equal(sscanf(at, "rect x=\"%lf\" y=\"%lf\" width=\"%lf\" height=\"%lf\"",
                                    &x[i], &y[i], &w, &h),
                             4);
            assert_true(w > 3 && h > 3 && x[i] > 0 && x[i] + w < 800 && y[i] > 40 &&
                        y[i] + h < 600);
            for (size_t k = 0; k < i; k++)
                assert_true(fabs(x[i] - x[k]) >= w || fabs(y[i] - y[k]) >= h);
        }
        lm_buf_fini(&b);
    }
}

static void png_is_valid_and_reproducible(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_buf a = { 0 }, b = { 0 };

    assert_int_equal(lm_chart_map_png(&map, 320, 200, &a, &e), 0);
    assert_int_equal(lm_chart_map_png(&map, 320, 200, &b, &e), 0);
    assert_memory_equal(a.data, "\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x01\x40\0\0\0\xc8", 24);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
}

static void text_is_a_table(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_buf b = { 0 };

    assert_int_equal(lm_chart_map_text(&map, 40, false, &b, &e), 0);
    assert_string_equal(b.data, "title\n"
                                "depth: share, scale 0 to 1\n"
                                "a<b>\xEF\xBF\xBD[31m\n"
                                "  0 %      1  0.95  0.50\n"
                                "100 %      0     -     2\n"
                                "         256   512  1024 tokens\n"
                                "two\n"
                                "  0 %      1     1     1\n"
                                "100 %      1     1    -1\n"
                                "         256   512  1024 tokens\n");
    b.len = 0;
    assert_int_equal(lm_chart_map_text(&map, 40, true, &b, &e), 0);
    assert_int_equal(count(b.data, "\033[48;5;"), 11);
    assert_int_equal(count(b.data, "\033[0m"), 11 + 2);
    lm_buf_fini(&b);
}

/* Letters in the widest line. */
static size_t widest(const char *s)
{
    size_t n = 0, most = 0;

    for (; *s; s++) {
        n = *s == '\n' ? 0 : n + ((*s & 0xC0) != 0x80);
        most = n > most ? n : most;
    }
    return most;
}

static void narrow_text_is_shade(void **state)
{
    (void)state;
    enum { N = 30 };
    static double value[N];
    static const char *names[N];
    static const char *const one[1] = { "a long name of a row" };
    const lm_chart_map_panel p = { "a label that is longer than the terminal", value };
    lm_chart_map m = map;
    lm_err e = { 0 };
    lm_buf b = { 0 };

    for (int i = 0; i < N; i++)
        value[i] = (double)i / (N - 1), names[i] = "12345";
    m.panel = &p, m.n = 1, m.x = names, m.y = one, m.cols = N, m.rows = 1;
    for (int cols = 46; cols < 120; cols += 7) {
        b.len = 0;
        assert_int_equal(lm_chart_map_text(&m, cols, false, &b, &e), 0);
        assert_true(widest(b.data) <= (size_t)cols);
        assert_true(count(b.data, "░") > 0 && count(b.data, "█") > 0);
    }
    assert_int_equal(lm_chart_map_text(&m, 30, false, &b, &e), LM_EUSAGE);
    lm_buf_fini(&b);
}

static void what_cannot_be_drawn_is_refused(void **state)
{
    (void)state;
    lm_chart_map m = map;
    lm_err e = { 0 };
    lm_buf b = { 0 };

    assert_int_equal(lm_chart_map_svg(&map, 159, 480, &b, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_chart_map_png(&map, 640, 16385, &b, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_chart_map_text(&map, 19, false, &b, &e), LM_EUSAGE);
    for (int i = 0; i < 4; i++) {
        m = map;
        e = (lm_err){ 0 };
        m.cols = i == 0 ? 0 : m.cols;
        m.rows = i == 1 ? LM_CHART_MAP_MOST + 1 : m.rows;
        m.hi = i == 2 ? m.lo : i == 3 ? INFINITY : m.hi;
        assert_int_equal(lm_chart_map_svg(&m, 640, 480, &b, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        assert_int_equal(lm_chart_map_text(&m, 80, false, &b, &e), LM_EUSAGE);
    }
    lm_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(svg_has_a_box_for_each_value),
        cmocka_unit_test(colors_run_from_light_to_dark),
        cmocka_unit_test(panels_share_the_picture),
        cmocka_unit_test(png_is_valid_and_reproducible),
        cmocka_unit_test(text_is_a_table),
        cmocka_unit_test(narrow_text_is_shade),
        cmocka_unit_test(what_cannot_be_drawn_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
