/* SPDX-License-Identifier: Apache-2.0 */
/* chart_map.c -- the layout of maps and their painting onto any canvas. */

#include <math.h>
#include <stdio.h>

#include "format/chart.h"
#include "format/chart_canvas.h"

/* The scale, from low to high: one hue whose lightness only falls, so that it can be read without
 * colours too. */
static const uint32_t scale[5] = { 0xEFF6FF, 0xBFDBFE, 0x60A5FA, 0x2563EB, 0x172554 };
enum { STEPS = sizeof scale / sizeof *scale - 1 };

uint32_t lm_chart_map_color(const lm_chart_map *m, double v)
{
    double at = STEPS * fmin(fmax((v - m->lo) / (m->hi - m->lo), 0), 1);
    int i = at < STEPS ? (int)at : STEPS - 1;
    uint32_t rgb = 0;

    for (int shift = 0; shift <= 16; shift += 8) {
        double low = scale[i] >> shift & 255, high = scale[i + 1] >> shift & 255;
        rgb |= (uint32_t)lround(low + (at - i) * (high - low)) << shift;
    }
    return rgb;
}

/* Ink of text on a cell: white on dark ones (the weights of ITU-R BT.601). */
uint32_t lm_chart_map_ink(uint32_t rgb)
{
    double light = 0.299 * (rgb >> 16 & 255) + 0.587 * (rgb >> 8 & 255) + 0.114 * (rgb & 255);
    return light < 140 ? 0xFFFFFF : LM_INK;
}

/* 0.953 -> "0.95", 1 -> "1". */
void lm_chart_map_number(double v, char s[16])
{
    snprintf(s, 16, fabs(v) < 10 ? "%.2f" : "%.4g", v);
    if (fabs(v) >= 10 || fabs(v - round(v)) >= 0.005)
        return;
    snprintf(s, 16, "%.0f", fabs(v) < 0.5 ? 0 : v); /* no "-0" */
}

lm_code lm_chart_map_check(const lm_chart_map *m, lm_err *e)
{
    if (m->cols < 1 || m->rows < 1 || m->cols > LM_CHART_MAP_MOST || m->rows > LM_CHART_MAP_MOST)
        return lm_fail(e, LM_EUSAGE, "map", NULL, "%zu x %zu cells: each side must be 1 to %d",
                       m->cols, m->rows, LM_CHART_MAP_MOST);
    if (!(m->lo < m->hi) || !isfinite(m->hi - m->lo))
        return lm_fail(e, LM_EUSAGE, "map", NULL, "a scale from %g to %g has no length", m->lo,
                       m->hi);
    return LM_OK;
}

/* The arrangement of the panels: `across` beside each other, cells of w x h pixels. */
typedef struct {
    size_t across, down;
    double left, top;        /* of the first panel's cells */
    double panel_w, panel_h; /* cells and gap */
    double cell_w, cell_h;
} layout;

enum { GAP = 18, LABEL = 24, BOTTOM = 52 };

static double widest_name(const char *const *name, size_t n)
{
    double widest = 0;

    for (size_t i = 0; i < n; i++)
        widest = fmax(widest, lm_canvas_text_width(name[i], 12));
    return widest;
}

/* Choose the number of panels in a row that makes the smaller side of a cell largest. */
static layout arrange(const lm_chart_map *m, int w, int h, double top)
{
    layout best = { 0 };
    double left = fmin(18 + 18 + widest_name(m->y, m->rows) + 8, w / 3.0);

    for (size_t across = 1; across <= (m->n ? m->n : 1); across++) {
        layout l = { .across = across, .left = left, .top = top + LABEL };

        l.down = m->n ? (m->n + across - 1) / across : 1;
        l.panel_w = fmax((w - left - 18 + GAP) / (double)across, GAP + 1);
        l.panel_h = fmax((h - top - BOTTOM) / (double)l.down, LABEL + 1);
        l.cell_w = (l.panel_w - GAP) / (double)m->cols;
        l.cell_h = (l.panel_h - LABEL) / (double)m->rows;
        if (across == 1 || fmin(l.cell_w, l.cell_h) > fmin(best.cell_w, best.cell_h) * 1.0001)
            best = l;
    }
    return best;
}

/* Every how many names there is room for one. */
static size_t every(size_t n, double each, double room)
{
    double k = each > 0 ? ceil(room / each) : 1;
    return k < 1 ? 1 : k > (double)n ? n : (size_t)k;
}

static void paint_cell(const lm_chart_map *m, double v, double x, double y, double w, double h,
                       lm_canvas *c)
{
    double gap = w > 4 && h > 4 ? 1 : 0;
    char s[16];

    if (!isfinite(v)) {
        double line[4] = { x + 0.3 * w, y + 0.5 * h, x + 0.7 * w, y + 0.5 * h };
        lm_pen pen = { LM_AXIS, 1, 1, 0 };

        c->path(c, line, 2, pen);
        return;
    }
    uint32_t rgb = lm_chart_map_color(m, v);
    lm_face face = { lm_chart_map_ink(rgb), 11, false, false, 0 };

    c->box(c, x, y, w - gap, h - gap, rgb);
    lm_chart_map_number(v, s);
    if (h >= 15 && lm_canvas_text_width(s, face.size) + 4 <= w)
        c->text(c, x + w / 2, y + h / 2 + 4, s, face);
}

/* Panel i: its label, its cells; the names of rows at the left edge of the picture, those of columns
 * where no panel is below. */
static void paint_panel(const lm_chart_map *m, const layout *l, size_t i, lm_canvas *v)
{
    double x0 = l->left + (double)(i % l->across) * l->panel_w;
    double y0 = l->top + (double)(i / l->across) * l->panel_h;
    double bottom = y0 + l->cell_h * (double)m->rows;
    lm_face name = { LM_INK, 13, true, false, -1 }, tick = { LM_GREY, 12, false, false, 1 };
    size_t step = every(m->rows, l->cell_h, 13);

    lm_canvas_text(v, x0, y0 - 8, m->panel[i].label, name);
    for (size_t r = 0; r < m->rows; r++) {
        double y = y0 + l->cell_h * (double)r;

        if (i % l->across == 0 && r % step == 0)
            lm_canvas_text(v, x0 - 8, y + l->cell_h / 2 + 4, m->y[r], tick);
        for (size_t k = 0; k < m->cols; k++)
            paint_cell(m, m->panel[i].value[r * m->cols + k], x0 + l->cell_w * (double)k, y,
                       l->cell_w, l->cell_h, v);
    }
    if (i + l->across < m->n)
        return;
    tick.anchor = 0;
    step = every(m->cols, l->cell_w, widest_name(m->x, m->cols) + 6);
    for (size_t k = 0; k < m->cols; k += step)
        lm_canvas_text(v, x0 + l->cell_w * ((double)k + 0.5), bottom + 17, m->x[k], tick);
}

/* The scale at the right edge above the panels: its ends, and the quantity before it. */
static void paint_scale(const lm_chart_map *m, double right, double y, lm_canvas *v)
{
    enum { PARTS = 24 };
    const double each = 5;
    lm_face tick = { LM_GREY, 12, false, false, 1 };
    char s[16];

    lm_chart_map_number(m->hi, s);
    lm_canvas_text(v, right, y, s, tick);
    double x = right - lm_canvas_text_width(s, 12) - 6 - PARTS * each;
    for (int i = 0; i < PARTS; i++) {
        double at = m->lo + (m->hi - m->lo) * i / (PARTS - 1);
        v->box(v, x + i * each, y - 10, each, 12, lm_chart_map_color(m, at));
    }
    lm_chart_map_number(m->lo, s);
    lm_canvas_text(v, x - 6, y, s, tick);
    lm_canvas_text(v, x - 6 - lm_canvas_text_width(s, 12) - 10, y, m->quantity, tick);
}

lm_code lm_chart_map_paint(const void *picture, int w, int h, lm_canvas *v, lm_err *e)
{
    const lm_chart_map *m = picture;
    lm_face title = { LM_INK, 16, true, false, -1 }, axis = { LM_GREY, 12, false, false, 1 };
    double y = 16;

    if (lm_chart_map_check(m, e))
        return e->code;
    v->box(v, 0, 0, w, h, 0xFFFFFF);
    if (m->title) {
        lm_canvas_text(v, 18, y + 14, m->title, title);
        y += 28;
    }
    paint_scale(m, w - 18, y + 12, v);
    layout l = arrange(m, w, h, y + 26);
    for (size_t i = 0; i < m->n; i++)
        paint_panel(m, &l, i, v);
    lm_canvas_text(v, w - 18, h - 14, m->x_label, axis);
    axis.up = true;
    lm_canvas_text(v, 26, l.top, m->y_label, axis);
    return LM_OK;
}
