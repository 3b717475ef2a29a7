/* SPDX-License-Identifier: Apache-2.0 */
/* chart_text.c -- the terminal back end: braille cells of 2 x 4 dots, Unicode U+2800..U+28FF.
 *
 * Each cell of a panel keeps its dots, the colour of the last line, and a rank: a smoothed line
 * erases the raw values behind it, a mark erases both. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/chart.h"
#include "format/chart_canvas.h"

typedef struct {
    uint8_t dots;  /* braille pattern */
    uint8_t color; /* index into `ansi` */
    uint8_t rank;  /* 0 empty, 1 faint, 2 solid, 3 mark, 4 alarm */
} cell;

/* Colours of the 256-colour palette that are readable on black and on white; then grey, then
 * alarm. */
static const int ansi[10] = { 33, 208, 35, 170, 37, 178, 196, 245, 240, 196 };
enum { FAINT_COLOR = 8, ALARM_COLOR = 9 };

typedef struct {
    const lm_chart *chart;
    int cols, rows; /* of the plot area of one panel, in cells */
    int left;       /* columns for the labels of y, axis not counted */
    bool color;
    cell *cells;
    lm_chart_axis ax, ay;
    lm_buf *out;
    lm_err *e;
    lm_code rc;
} screen;

enum { RIGHT = 9 }; /* columns for the last values */

static void write_text(screen *s, const char *text)
{
    if (!s->rc)
        s->rc = lm_buf_add(s->out, text, strlen(text), s->e);
}

static void put_times(screen *s, const char *text, int times)
{
    while (times-- > 0)
        write_text(s, text);
}

static void put_color(screen *s, int index, bool bold)
{
    char code[32];

    if (!s->color)
        return;
    snprintf(code, sizeof code, "\033[%s38;5;%dm", bold ? "1;" : "", ansi[index]);
    write_text(s, code);
}

static void put_plain(screen *s)
{
    if (s->color)
        write_text(s, "\033[0m");
}

/* Text of at most `room` columns, one for each letter. */
static int put_cut(screen *s, const char *text, int room)
{
    char clean[512];
    size_t len = 0, n = 0;

    lm_chart_clean(clean, sizeof clean, text);
    while (clean[len] && (int)n < room) {
        len++;
        while ((clean[len] & 0xC0) == 0x80)
            len++;
        n++;
    }
    clean[len] = '\0';
    write_text(s, clean);
    return (int)n;
}

/* Set the dot at (x, y), counted from the top left of the panel. */
static void set_dot(screen *s, int x, int y, uint8_t color, uint8_t rank)
{
    static const uint8_t bit[4][2] = { { 1, 8 }, { 2, 16 }, { 4, 32 }, { 64, 128 } };
    cell *c;

    if (x < 0 || y < 0 || x >= 2 * s->cols || y >= 4 * s->rows)
        return;
    c = &s->cells[(size_t)(y / 4) * (size_t)s->cols + (size_t)(x / 2)];
    if (c->rank > rank)
        return;
    if (c->rank < rank)
        c->dots = 0;
    c->dots |= bit[y % 4][x % 2];
    c->color = color;
    c->rank = rank;
}

/* Bresenham's line. */
static void draw_segment(screen *s, int x0, int y0, int x1, int y1, uint8_t color, uint8_t rank)
{
    int dx = abs(x1 - x0), dy = -abs(y1 - y0), sx = x0 < x1 ? 1 : -1, sy = y0 < y1 ? 1 : -1;
    int err = dx + dy;

    for (;;) {
        int twice = 2 * err;

        set_dot(s, x0, y0, color, rank);
        if (x0 == x1 && y0 == y1)
            return;
        if (twice >= dy) {
            err += dy;
            x0 += sx;
        }
        if (twice <= dx) {
            err += dx;
            y0 += sy;
        }
    }
}

static void draw_line(screen *s, const lm_chart_panel *p, const lm_chart_line *l)
{
    uint8_t color = l->style == LM_LINE_FAINT ? FAINT_COLOR : (uint8_t)((unsigned)l->color % 8);
    uint8_t rank = l->style == LM_LINE_FAINT ? 1 : l->style == LM_LINE_SOLID ? 2 : 3;
    bool joined = false;
    int px = 0, py = 0;

    for (size_t i = 0; i < l->n; i++) {
        double at = lm_axis_at(&s->ax, l->x[i]);
        int x, y;

        if (!isfinite(at))
            continue;
        x = (int)lround(at * (2 * s->cols - 1));
        if (!isfinite(l->y[i])) {
            set_dot(s, x, 0, ALARM_COLOR, 4);
            joined = false;
            continue;
        }
        if (!lm_chart_has_place(s->chart, p, l->x[i], l->y[i])) {
            joined = false;
            continue;
        }
        y = (int)lround((1 - lm_axis_at(&s->ay, l->y[i])) * (4 * s->rows - 1));
        if (joined && rank < 3)
            draw_segment(s, px, py, x, y, color, rank);
        else
            set_dot(s, x, y, color, rank);
        joined = true;
        px = x;
        py = y;
    }
}

/* The last value of a line that ends in this row, or -1. */
static int end_in_row(const screen *s, const lm_chart_panel *p, int row, double *value)
{
    for (size_t j = 0; j < p->n; j++) {
        const lm_chart_line *l = &p->line[j];
        size_t k = l->n;

        while (k > 0 && !lm_chart_has_place(s->chart, p, l->x[k - 1], l->y[k - 1]))
            k--;
        if (k == 0 || l->style == LM_LINE_FAINT)
            continue;
        *value = l->y[k - 1];
        if ((int)lround((1 - lm_axis_at(&s->ay, *value)) * (4 * s->rows - 1)) / 4 == row)
            return (int)((unsigned)l->color % 8);
    }
    return -1;
}

static void put_cells(screen *s, int row)
{
    int now = -1;

    for (int x = 0; x < s->cols; x++) {
        const cell *c = &s->cells[(size_t)row * (size_t)s->cols + (size_t)x];
        char utf8[5] = { 0 };

        if (c->rank == 0) {
            write_text(s, " ");
            continue;
        }
        if (c->color != now)
            put_color(s, now = c->color, false);
        if (c->rank < 3) {
            lm_utf8_put(0x2800u + c->dots, utf8);
            write_text(s, utf8);
        } else {
            write_text(s, c->rank == 3 ? "●" : "×");
        }
    }
    if (now >= 0)
        put_plain(s);
}

/* The label of the tick of y that lies in this row, or "". */
static const char *label_in_row(const screen *s, int row)
{
    for (int i = 0; i < s->ay.n; i++)
        if ((int)lround((1 - lm_axis_at(&s->ay, s->ay.tick[i])) * (4 * s->rows - 1)) / 4 == row)
            return s->ay.label[i];
    return "";
}

static void put_rows(screen *s, const lm_chart_panel *p)
{
    for (int row = 0; row < s->rows; row++) {
        const char *label = label_in_row(s, row);
        double value = 0;
        int color = end_in_row(s, p, row, &value);
        char text[32];

        snprintf(text, sizeof text, "%*s %s", s->left, label, *label ? "┤" : "│");
        write_text(s, text);
        put_cells(s, row);
        if (color >= 0) {
            snprintf(text, sizeof text, " %.4g", value);
            put_color(s, color, true);
            write_text(s, text);
            put_plain(s);
        }
        write_text(s, "\n");
    }
}

static int tick_column(const screen *s, int i)
{
    return (int)lround(lm_axis_at(&s->ax, s->ax.tick[i]) * (2 * s->cols - 1)) / 2;
}

/* The axis of x, and below it its labels when this is the last panel. */
static void put_x_axis(screen *s, bool labels)
{
    char line[1100];
    int end = s->left + 2 + s->cols, from = 0, name = (int)lm_chart_letters(s->chart->x_label);

    put_times(s, " ", s->left + 1);
    write_text(s, "└");
    for (int x = 0, i = 0; x < s->cols; x++) {
        bool tick = false;
        for (; i < s->ax.n && tick_column(s, i) <= x; i++)
            tick |= tick_column(s, i) == x;
        write_text(s, tick ? "┬" : "─");
    }
    write_text(s, "\n");
    if (!labels)
        return;
    memset(line, ' ', sizeof line);
    for (int i = 0; i < s->ax.n; i++) {
        int len = (int)strlen(s->ax.label[i]);
        int at = s->left + 2 + tick_column(s, i) - (len - 1) / 2;

        if (at < from || at + len + 1 + name > end + RIGHT)
            continue;
        memcpy(line + at, s->ax.label[i], (size_t)len);
        from = at + len + 1;
    }
    line[from > 0 ? from : 0] = '\0';
    write_text(s, line);
    if (from + name <= end + RIGHT)
        put_cut(s, s->chart->x_label, end + RIGHT - from);
    write_text(s, "\n");
}

/* The number of lines of the title and the legend; painted unless `dry`. */
static int put_head(screen *s, int cols, bool dry)
{
    const lm_chart *c = s->chart;
    int rows = 0, x = 0;

    if (c->title) {
        rows++;
        if (!dry) {
            if (s->color)
                write_text(s, "\033[1m");
            put_cut(s, c->title, cols);
            put_plain(s);
            write_text(s, "\n");
        }
    }
    for (size_t j = 0; c->n > 0 && j < c->panel[0].n; j++) {
        const lm_chart_line *l = &c->panel[0].line[j];
        int w;

        if (!l->name)
            continue;
        w = 5 + (int)lm_chart_letters(l->name);
        w = w > cols ? cols : w;
        if (x == 0 || x + w > cols) {
            if (x > 0 && !dry)
                write_text(s, "\n");
            rows++;
            x = 0;
        }
        x += w + 1;
        if (dry)
            continue;
        put_color(s, (int)((unsigned)l->color % 8), false);
        write_text(s, l->style == LM_LINE_MARKS ? " ●  " : " ━━ ");
        put_plain(s);
        put_cut(s, l->name, w - 5);
        write_text(s, "  ");
    }
    if (x > 0 && !dry)
        write_text(s, "\n");
    return rows;
}

/* Without colours the raw values would only thicken the smoothed line. */
static bool shown(const screen *s, const lm_chart_panel *p, const lm_chart_line *l)
{
    if (l->style != LM_LINE_FAINT || s->color)
        return true;
    for (size_t j = 0; j < p->n; j++)
        if (p->line[j].style == LM_LINE_SOLID)
            return false;
    return true;
}

static void put_panel(screen *s, size_t i)
{
    const lm_chart_panel *p = &s->chart->panel[i];
    double min, max;

    s->ay = (lm_chart_axis){ .kind = LM_AXIS_NUMBER, .log = p->log_y };
    lm_chart_y_range(s->chart, i, &min, &max);
    lm_axis_fit(&s->ay, min, max, s->rows / 2 > 10 ? 10 : s->rows / 2, false);
    memset(s->cells, 0, (size_t)s->cols * (size_t)s->rows * sizeof *s->cells);
    for (int style = 0; style < 3; style++) { /* marks last, faint first */
        static const lm_line_style order[3] = { LM_LINE_FAINT, LM_LINE_SOLID, LM_LINE_MARKS };
        for (size_t j = 0; j < p->n; j++)
            if (p->line[j].style == order[style] && shown(s, p, &p->line[j]))
                draw_line(s, p, &p->line[j]);
    }
    put_times(s, " ", s->left + 1);
    if (s->color)
        write_text(s, "\033[1m");
    put_cut(s, p->label, s->cols);
    put_plain(s);
    write_text(s, "\n");
    put_rows(s, p);
    put_x_axis(s, i + 1 == s->chart->n);
}

/* The widest label of any y axis, when panels have `rows` rows. */
static int label_width(const lm_chart *c, int rows)
{
    size_t widest = 1;

    for (size_t i = 0; i < c->n; i++) {
        lm_chart_axis a = { .kind = LM_AXIS_NUMBER, .log = c->panel[i].log_y };
        double min, max;

        lm_chart_y_range(c, i, &min, &max);
        lm_axis_fit(&a, min, max, rows / 2 > 10 ? 10 : rows / 2, false);
        for (int k = 0; k < a.n; k++)
            widest = strlen(a.label[k]) > widest ? strlen(a.label[k]) : widest;
    }
    return (int)widest;
}

lm_code lm_chart_text(const lm_chart *c, int cols, int rows, bool color, lm_buf *out, lm_err *e)
{
    screen s = { .chart = c, .color = color, .out = out, .e = e };
    int panels = c->n ? (int)c->n : 1;
    double min, max;

    if (cols < 20 || cols > 1000 || rows < 6 || rows > 500)
        return lm_fail(e, LM_EUSAGE, "terminal", NULL,
                       "%d column%s and %d row%s: 20 to 1000 and 6 to 500 can be drawn", cols,
                       lm_plural(cols), rows, lm_plural(rows));
    s.rows = (rows - put_head(&s, cols, true) - 1) / panels - 2;
    if (s.rows < 2)
        s.rows = 2;
    s.left = label_width(c, s.rows);
    s.cols = cols - s.left - 2 - RIGHT;
    if (s.cols < 4)
        s.cols = 4;
    lm_chart_x_range(c, &min, &max);
    s.ax = (lm_chart_axis){ .kind = c->x_kind, .log = c->log_x };
    lm_axis_fit(&s.ax, min, max, s.cols / 9 > 14 ? 14 : s.cols / 9, true);
    s.rc = lm_alloc_n(&s.cells, (size_t)s.cols * (size_t)s.rows, sizeof *s.cells,
                      "cells of a chart", e);
    if (s.rc)
        return s.rc;
    put_head(&s, cols, false);
    for (size_t i = 0; i < c->n; i++)
        put_panel(&s, i);
    lm_free(s.cells);
    return s.rc;
}
