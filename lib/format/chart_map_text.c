/* SPDX-License-Identifier: Apache-2.0 */
/* chart_map_text.c -- maps for a terminal: a table of numbers on their colours. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format/chart.h"
#include "format/chart_canvas.h"

typedef struct {
    const lm_chart_map *m;
    int cols;       /* of the terminal */
    int left, each; /* columns of the names of rows, and of a cell */
    bool numbers;   /* cells have room for them */
    bool color;
    lm_buf *out;
    lm_err *e;
    lm_code rc;
} sheet;

static void put(sheet *s, const char *text)
{
    if (!s->rc)
        s->rc = lm_buf_add(s->out, text, strlen(text), s->e);
}

static void put_blanks(sheet *s, int n)
{
    while (n-- > 0)
        put(s, " ");
}

static int letters(const char *s)
{
    size_t n = lm_chart_letters(s);
    return n < 512 ? (int)n : 512;
}

/* Text in a field of `width` columns, cut where it is longer; at its right end if `right`. */
static void put_field(sheet *s, const char *text, int width, bool right)
{
    char clean[512];
    int n, len = 0, k = 0;

    lm_chart_clean(clean, sizeof clean, text);
    n = letters(clean);
    if (right)
        put_blanks(s, width - n);
    while (clean[len] && k < width) {
        for (len++; (clean[len] & 0xC0) == 0x80;)
            len++;
        k++;
    }
    clean[len] = '\0';
    put(s, clean);
    if (!right)
        put_blanks(s, width - k);
}

int lm_chart_cube(uint32_t rgb)
{
    int n = 16, weight[3] = { 36, 6, 1 };

    for (int i = 0; i < 3; i++) {
        int v = (int)(rgb >> (16 - 8 * i) & 255);
        n += weight[i] * (v < 48 ? 0 : v < 115 ? 1 : (v - 35) / 40); /* 0 95 135 175 215 255 */
    }
    return n;
}

static void put_cell(sheet *s, double v)
{
    static const char *const shade[5] = { "░", "▒", "▓", "█", "█" };
    char text[40];

    if (!isfinite(v)) {
        put_field(s, "-", s->each, true);
        return;
    }
    if (s->color) {
        uint32_t rgb = lm_chart_map_color(s->m, v);
        snprintf(text, sizeof text, "\033[48;5;%d;38;5;%dm", lm_chart_cube(rgb),
                 lm_chart_map_ink(rgb) == 0xFFFFFF ? 231 : 16);
        put(s, text);
    }
    lm_chart_map_number(v, text);
    if (s->numbers)
        put_field(s, text, s->each, true);
    else if (s->color)
        put_blanks(s, s->each);
    else
        for (int i = 0; i < s->each; i++)
            put(s, shade[(int)(4 * fmin(fmax((v - s->m->lo) / (s->m->hi - s->m->lo), 0), 1))]);
    if (s->color)
        put(s, "\033[0m");
}

/* The names of columns, each at the right end of its cell, those left out that have no room. */
static void put_x_names(sheet *s)
{
    int at = 0; /* columns written */

    put_blanks(s, s->left);
    for (size_t k = 0; k < s->m->cols; k++) {
        int end = s->each * (int)(k + 1), n = letters(s->m->x[k]);

        if (end - n < at + (at > 0))
            continue;
        put_blanks(s, end - n - at);
        put_field(s, s->m->x[k], n, false);
        at = end;
    }
    if (at + 1 + letters(s->m->x_label) <= s->cols - s->left) {
        put(s, " ");
        put_field(s, s->m->x_label, letters(s->m->x_label), false);
    }
    put(s, "\n");
}

static void put_panel(sheet *s, const lm_chart_map_panel *p)
{
    if (s->color)
        put(s, "\033[1m");
    put_field(s, p->label, letters(p->label) < s->cols ? letters(p->label) : s->cols, false);
    put(s, s->color ? "\033[0m\n" : "\n");
    for (size_t r = 0; r < s->m->rows; r++) {
        put_field(s, s->m->y[r], s->left - 1, true);
        put(s, " ");
        for (size_t k = 0; k < s->m->cols; k++)
            put_cell(s, p->value[r * s->m->cols + k]);
        put(s, "\n");
    }
    put_x_names(s);
}

/* Columns of the names of rows and of a cell.  Numbers when they fit, else as wide as possible. */
static void divide(sheet *s)
{
    const lm_chart_map *m = s->m;
    int widest = letters(m->y_label), number = 4;
    char text[16];

    for (size_t r = 0; r < m->rows; r++)
        widest = letters(m->y[r]) > widest ? letters(m->y[r]) : widest;
    s->left = (widest < s->cols / 3 ? widest : s->cols / 3) + 1;
    for (size_t i = 0; i < m->n; i++)
        for (size_t k = 0; k < m->rows * m->cols; k++) {
            lm_chart_map_number(m->panel[i].value[k], text);
            number = letters(text) > number ? letters(text) : number;
        }
    s->each = (s->cols - s->left) / (int)m->cols;
    s->numbers = s->each > number;
    if (s->each > number + 2)
        s->each = number + 2;
}

lm_code lm_chart_map_text(const lm_chart_map *m, int cols, bool color, lm_buf *out, lm_err *e)
{
    sheet s = { .m = m, .cols = cols, .color = color, .out = out, .e = e };
    char lo[16], hi[16], text[600];

    if (cols < 20 || cols > 1000)
        return lm_fail(e, LM_EUSAGE, "terminal", NULL, "%d columns: 20 to 1000 can be drawn", cols);
    if (lm_chart_map_check(m, e))
        return e->code;
    divide(&s);
    if (s.each < 1)
        return lm_fail(e, LM_EUSAGE, "terminal", "make it wider, or draw a picture",
                       "a map of %zu columns does not fit into %d", m->cols, cols);
    if (m->title) {
        put_field(&s, m->title, letters(m->title) < cols ? letters(m->title) : cols, false);
        put(&s, "\n");
    }
    lm_chart_map_number(m->lo, lo);
    lm_chart_map_number(m->hi, hi);
    snprintf(text, sizeof text, "%s: %s, scale %s to %s", m->y_label, m->quantity, lo, hi);
    put_field(&s, text, letters(text) < cols ? letters(text) : cols, false);
    put(&s, "\n");
    for (size_t i = 0; i < m->n; i++)
        put_panel(&s, &m->panel[i]);
    return s.rc;
}
