/* SPDX-License-Identifier: Apache-2.0 */
/* chart.c -- the layout of a chart and its painting onto any canvas.
 *
 * Text is measured by a fixed width for each letter, not by a font, so that the layout does not
 * depend on the back end or the machine. */
#include "format/chart.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/chart_canvas.h"

/* Eight colours that can be distinguished with most kinds of colour blindness, dark enough for
 * white paper. */
static const uint32_t palette[8] = { 0x2563EB, 0xEA580C, 0x059669, 0xA21CAF,
                                     0x0891B2, 0xCA8A04, 0xDC2626, 0x64748B };
enum { ALARM = 0xDC2626 };

static const double LETTER = 0.58; /* mean width of a letter, in sizes */

/* The position of one panel. */
typedef struct {
    double x, y, w, h;
    lm_chart_axis ax, ay;
} frame;

size_t lm_chart_letters(const char *s)
{
    size_t n = 0;

    for (; *s; s++)
        n += (*s & 0xC0) != 0x80;
    return n;
}

void lm_chart_clean(char *out, size_t size, const char *s)
{
    size_t len = strlen(s), n = 0;

    while (len > 0) {
        size_t ok = lm_utf8_valid(s, len), took = 1;
        const char *put = "\xEF\xBF\xBD";

        if (ok > 0 && (unsigned char)*s >= 0x20 && *s != 0x7F) {
            lm_utf8_get(s, len, &took);
            put = s;
        }
        size_t bytes = put == s ? took : 3;
        if (n + bytes + 1 > size)
            break;
        memcpy(out + n, put, bytes);
        n += bytes;
        s += took;
        len -= took;
    }
    out[n] = '\0';
}

bool lm_chart_has_place(const lm_chart *c, const lm_chart_panel *p, double x, double y)
{
    return isfinite(x) && isfinite(y) && !(c->log_x && x <= 0) && !(p->log_y && y <= 0);
}

/* Widen [*min, *max] by the points of panel p; along x or along y. */
static bool widen(const lm_chart *c, const lm_chart_panel *p, bool along_x, double *min,
                  double *max)
{
    bool any = false;

    for (size_t j = 0; j < p->n; j++) {
        const lm_chart_line *l = &p->line[j];
        for (size_t k = 0; k < l->n; k++) {
            double v = along_x ? l->x[k] : l->y[k];
            if (!lm_chart_has_place(c, p, l->x[k], l->y[k]))
                continue;
            *min = fmin(*min, v);
            *max = fmax(*max, v);
            any = true;
        }
    }
    return any;
}

bool lm_chart_x_range(const lm_chart *c, double *min, double *max)
{
    bool any = false;

    *min = INFINITY;
    *max = -INFINITY;
    for (size_t i = 0; i < c->n; i++)
        any |= widen(c, &c->panel[i], true, min, max);
    if (!any)
        *min = c->log_x, *max = 1 + 9 * c->log_x;
    return any;
}

bool lm_chart_y_range(const lm_chart *c, size_t panel, double *min, double *max)
{
    const lm_chart_panel *p = &c->panel[panel];

    *min = INFINITY;
    *max = -INFINITY;
    if (widen(c, p, false, min, max))
        return true;
    *min = p->log_y;
    *max = 1 + 9 * p->log_y;
    return false;
}

lm_code lm_chart_check_size(int w, int h, lm_err *e)
{
    if (w >= LM_CHART_MIN && w <= LM_CHART_MAX && h >= LM_CHART_MIN && h <= LM_CHART_MAX)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "picture", NULL, "%d x %d pixels: each side must be %d to %d", w,
                   h, LM_CHART_MIN, LM_CHART_MAX);
}

double lm_canvas_text_width(const char *s, double size)
{
    return LETTER * size * (double)lm_chart_letters(s);
}

void lm_canvas_text(lm_canvas *v, double x, double y, const char *s, lm_face face)
{
    char clean[512];

    lm_chart_clean(clean, sizeof clean, s);
    v->text(v, x, y, clean, face);
}

/* The grid, the axes and their labels.  `bottom`: this panel carries the labels of x. */
static void paint_frame(lm_canvas *v, const frame *f, const char *label, const char *x_label,
                        bool bottom)
{
    lm_face tick = { .rgb = LM_GREY, .size = 12 },
            name = { .rgb = LM_INK, .size = 13, .bold = true };
    lm_pen grid = { LM_GRID, 1, 1, 0 }, axis = { LM_AXIS, 1, 1, 0 };

    for (int i = 0; i < f->ay.n; i++) {
        double y = floor(f->y + f->h * (1 - lm_axis_at(&f->ay, f->ay.tick[i]))) + 0.5;
        double xy[4] = { f->x, y, f->x + f->w, y };

        v->path(v, xy, 2, grid);
        tick.anchor = 1;
        lm_canvas_text(v, f->x - 8, y + 4, f->ay.label[i], tick);
    }
    for (int i = 0; i < f->ax.n; i++) {
        double x = floor(f->x + f->w * lm_axis_at(&f->ax, f->ax.tick[i])) + 0.5;
        double xy[4] = { x, f->y + f->h, x, f->y + f->h + 5 };

        v->path(v, xy, 2, axis);
        tick.anchor = 0;
        if (bottom)
            lm_canvas_text(v, x, f->y + f->h + 19, f->ax.label[i], tick);
    }
    double base[4] = { f->x, floor(f->y + f->h) + 0.5, f->x + f->w, floor(f->y + f->h) + 0.5 };
    v->path(v, base, 2, axis);
    name.anchor = -1;
    lm_canvas_text(v, f->x, f->y - 9, label, name);
    tick.anchor = 1;
    if (bottom)
        lm_canvas_text(v, f->x + f->w, f->y + f->h + 36, x_label, tick);
}

/* Thin a run of pixels in place so that no column of half a pixel keeps more than its first,
 * lowest, highest and last point, in their order.  Returns the number left. */
static size_t thin(double *xy, size_t n)
{
    size_t out = 0, i = 0;

    while (i < n) {
        double column = floor(2 * xy[2 * i]);
        size_t keep[4] = { i, i, i, i }, end = i;

        for (; end < n && floor(2 * xy[2 * end]) == column; end++) {
            if (xy[2 * end + 1] < xy[2 * keep[1] + 1])
                keep[1] = end;
            if (xy[2 * end + 1] > xy[2 * keep[2] + 1])
                keep[2] = end;
        }
        keep[3] = end - 1;
        if (keep[1] > keep[2]) {
            size_t swap = keep[1];
            keep[1] = keep[2];
            keep[2] = swap;
        }
        for (int k = 0; k < 4; k++) {
            if (k > 0 && keep[k] == keep[k - 1])
                continue;
            xy[2 * out] = xy[2 * keep[k]];
            xy[2 * out + 1] = xy[2 * keep[k] + 1];
            out++;
        }
        i = end;
    }
    return out;
}

/* A small cross at the top of the panel: the value here was not finite. */
static void paint_alarm(lm_canvas *v, double x, double y)
{
    lm_pen pen = { ALARM, 1, 1.5, 0 };
    double a[4] = { x - 4, y + 2, x + 4, y + 10 }, b[4] = { x - 4, y + 10, x + 4, y + 2 };

    v->path(v, a, 2, pen);
    v->path(v, b, 2, pen);
}

static void paint_run(lm_canvas *v, double *xy, size_t n, const lm_chart_line *l)
{
    uint32_t rgb = palette[(unsigned)l->color % 8];
    lm_pen pen = { rgb, 1, 2, 0 };

    if (n == 0)
        return;
    if (l->style == LM_LINE_FAINT)
        pen.alpha = 0.28, pen.width = 1;
    if (l->style == LM_LINE_MARKS)
        pen.alpha = 0.7, pen.width = 1.25, pen.dash = 4;
    if (n == 1 && l->style != LM_LINE_MARKS) {
        v->dot(v, xy[0], xy[1], 2.5, rgb);
        return;
    }
    if (l->style != LM_LINE_MARKS) {
        n = thin(xy, n);
        v->path(v, xy, n, pen);
        return;
    }
    v->path(v, xy, n, pen);
    for (size_t i = 0; i < n; i++)
        v->dot(v, xy[2 * i], xy[2 * i + 1], n > 60 ? 3 : 4, rgb);
}

/* `xy` has room for the points of the line. */
static void paint_line(const lm_chart *c, const lm_chart_panel *p, const lm_chart_line *l,
                       const frame *f, double *xy, lm_canvas *v)
{
    double last_alarm = -1e9;
    size_t n = 0;

    for (size_t i = 0; i < l->n; i++) {
        if (lm_chart_has_place(c, p, l->x[i], l->y[i])) {
            xy[2 * n] = f->x + f->w * lm_axis_at(&f->ax, l->x[i]);
            xy[2 * n + 1] = f->y + f->h * (1 - lm_axis_at(&f->ay, l->y[i]));
            n++;
            continue;
        }
        paint_run(v, xy, n, l);
        n = 0;
        if (!isfinite(l->y[i]) && isfinite(l->x[i]) && !(c->log_x && l->x[i] <= 0)) {
            double x = f->x + f->w * lm_axis_at(&f->ax, l->x[i]);
            if (x >= f->x && x <= f->x + f->w && fabs(x - last_alarm) >= 6) {
                paint_alarm(v, x, f->y);
                last_alarm = x;
            }
        }
    }
    paint_run(v, xy, n, l);
}

/* The index of the last point of a line that can be drawn; l->n if there is none, or if the line is
 * only the background of another. */
static size_t last_point(const lm_chart *c, const lm_chart_panel *p, const lm_chart_line *l)
{
    size_t k = l->n;

    while (k > 0 && !lm_chart_has_place(c, p, l->x[k - 1], l->y[k - 1]))
        k--;
    return k == 0 || l->style == LM_LINE_FAINT ? l->n : k - 1;
}

/* The label of the last value of l; returns its width in pixels, 0 without a point. */
static double show_last(const lm_chart *c, const lm_chart_panel *p, const lm_chart_line *l,
                        char s[24])
{
    size_t k = last_point(c, p, l);

    s[0] = '\0';
    if (k == l->n)
        return 0;
    snprintf(s, 24, "%.4g", l->y[k]);
    return lm_canvas_text_width(s, 12) * 1.15; /* bold */
}

/* The last values of the lines at the right edge, moved apart where they would overlap. */
static void paint_ends(const lm_chart *c, const lm_chart_panel *p, const frame *f, lm_canvas *v)
{
    enum { MOST = 12 };
    struct {
        double y;
        const lm_chart_line *line;
    } end[MOST], swap;
    size_t n = 0;

    for (size_t j = 0; j < p->n && n < MOST; j++) {
        const lm_chart_line *l = &p->line[j];
        size_t k = last_point(c, p, l);

        if (k == l->n)
            continue;
        end[n].line = l;
        end[n++].y = f->y + f->h * (1 - lm_axis_at(&f->ay, l->y[k]));
    }
    for (size_t i = 1; i < n; i++)
        for (size_t j = i; j > 0 && end[j - 1].y > end[j].y; j--)
            swap = end[j], end[j] = end[j - 1], end[j - 1] = swap;
    for (size_t i = 1; i < n; i++)
        end[i].y = fmax(end[i].y, end[i - 1].y + 14);
    for (size_t i = n; i-- > 0;) /* move labels below the panel up again */
        end[i].y = fmin(end[i].y, i + 1 < n ? end[i + 1].y - 14 : f->y + f->h);
    for (size_t i = 0; i < n; i++) {
        char s[24];
        lm_face face = { palette[(unsigned)end[i].line->color % 8], 12, true, false, -1 };

        show_last(c, p, end[i].line, s);
        lm_canvas_text(v, f->x + f->w + 8, end[i].y + 4, s, face);
    }
}

/* One entry: a sample of the line and its name.  Returns its width; paints unless v is NULL. */
static double legend_entry(const lm_chart_line *l, double x, double y, lm_canvas *v)
{
    lm_face face = { LM_INK, 12, false, false, -1 };
    uint32_t rgb = palette[(unsigned)l->color % 8];
    double xy[4] = { x, y - 4, x + 22, y - 4 };

    if (v) {
        lm_pen pen = { rgb, 1, l->style == LM_LINE_MARKS ? 1.25 : 2.5,
                       l->style == LM_LINE_MARKS ? 4 : 0 };
        v->path(v, xy, 2, pen);
        if (l->style == LM_LINE_MARKS)
            v->dot(v, x + 11, y - 4, 4, rgb);
        lm_canvas_text(v, x + 28, y, l->name, face);
    }
    return 28 + lm_canvas_text_width(l->name, face.size) + 20;
}

/* The legend of the whole chart (its first panel's names), in rows from y down, broken at x1.
 * Returns the height that it takes. */
static double paint_legend(const lm_chart *c, double x0, double x1, double y, lm_canvas *v)
{
    double x = x0, height = 0;

    for (size_t j = 0; c->n > 0 && j < c->panel[0].n; j++) {
        const lm_chart_line *l = &c->panel[0].line[j];
        double w;

        if (!l->name)
            continue;
        w = legend_entry(l, 0, 0, NULL);
        if (x > x0 && x + w - 20 > x1) {
            x = x0;
            height += 19;
        }
        legend_entry(l, x, y + height, v);
        x += w;
    }
    return x > x0 ? height + 19 : 0;
}

/* The widest labels of the y axes and of the values at the right edge set the margins. */
static void fit_axes(const lm_chart *c, frame *f, double *left, double *right, int w, double h)
{
    double min, max, widest = 0;
    char s[24];

    for (size_t i = 0; i < c->n; i++) {
        f[i].ay = (lm_chart_axis){ .kind = LM_AXIS_NUMBER, .log = c->panel[i].log_y };
        lm_chart_y_range(c, i, &min, &max);
        lm_axis_fit(&f[i].ay, min, max, (int)fmin(fmax(h / 42, 2), 11), false);
        for (int k = 0; k < f[i].ay.n; k++)
            widest = fmax(widest, lm_canvas_text_width(f[i].ay.label[k], 12));
    }
    *left = 18 + widest + 8;
    *right = 18;
    for (size_t i = 0; i < c->n; i++)
        for (size_t j = 0; j < c->panel[i].n; j++)
            *right = fmax(*right, 18 + show_last(c, &c->panel[i], &c->panel[i].line[j], s));
    lm_chart_x_range(c, &min, &max);
    for (size_t i = 0; i < c->n; i++) {
        f[i].ax = (lm_chart_axis){ .kind = c->x_kind, .log = c->log_x };
        lm_axis_fit(&f[i].ax, min, max, (int)fmin(fmax((w - *left - *right) / 80, 2), 14), true);
    }
}

static size_t longest_line(const lm_chart *c)
{
    size_t n = 0;

    for (size_t i = 0; i < c->n; i++)
        for (size_t j = 0; j < c->panel[i].n; j++)
            n = c->panel[i].line[j].n > n ? c->panel[i].line[j].n : n;
    return n;
}

lm_code lm_chart_paint(const void *picture, int w, int h, lm_canvas *v, lm_err *e)
{
    const lm_chart *c = picture;
    const double gap = 38, bottom = 50;
    double left, right, y = 16, each;
    frame *f = NULL;
    double *xy = NULL;
    lm_code rc = lm_alloc_n(&f, c->n ? c->n : 1, sizeof *f, "panels of a chart", e);

    if (!rc)
        rc = lm_alloc_n(&xy, longest_line(c) + 1, 2 * sizeof *xy, "points of a chart", e);
    if (rc) {
        lm_free(f);
        return rc;
    }
    v->box(v, 0, 0, w, h, 0xFFFFFF);
    if (c->title) {
        lm_face title = { LM_INK, 16, true, false, -1 };
        lm_canvas_text(v, 18, y + 14, c->title, title);
        y += 28;
    }
    y += paint_legend(c, 18, w - 18, y + 12, v);
    y += 26; /* the names in the first panel */
    each = (h - y - bottom - gap * (c->n ? c->n - 1 : 0)) / (c->n ? c->n : 1);
    each = fmax(each, 24);
    fit_axes(c, f, &left, &right, w, each);
    for (size_t i = 0; i < c->n; i++) {
        f[i].x = left;
        f[i].y = y + i * (each + gap);
        f[i].w = w - left - right;
        f[i].h = each;
        paint_frame(v, &f[i], c->panel[i].label, c->x_label, i + 1 == c->n);
        for (size_t j = 0; j < c->panel[i].n; j++)
            paint_line(c, &c->panel[i], &c->panel[i].line[j], &f[i], xy, v);
        paint_ends(c, &c->panel[i], &f[i], v);
    }
    lm_free(xy);
    lm_free(f);
    return LM_OK;
}
