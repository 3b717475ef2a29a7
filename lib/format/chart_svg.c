/* SPDX-License-Identifier: Apache-2.0 */
/* chart_svg.c -- the SVG back end: plain SVG 1.1 with real text, two decimals for each coordinate.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format/chart.h"
#include "format/chart_canvas.h"

typedef struct {
    lm_buf *out;
    lm_err *e;
    lm_code rc;
} svg;

/* 12.50 -> "12.5", 12.00 -> "12". */
static const char *number(double v, char s[32])
{
    size_t n = (size_t)snprintf(s, 32, "%.2f", v);

    while (s[n - 1] == '0')
        s[--n] = '\0';
    if (s[n - 1] == '.')
        s[--n] = '\0';
    return strcmp(s, "-0") ? s : "0";
}

static void write_text(svg *s, const char *text, size_t len)
{
    if (!s->rc)
        s->rc = lm_buf_add(s->out, text, len, s->e);
}

static void put_str(svg *s, const char *text)
{
    write_text(s, text, strlen(text));
}

static void put_number(svg *s, const char *before, double v, const char *after)
{
    char n[32];

    put_str(s, before);
    put_str(s, number(v, n));
    put_str(s, after);
}

static void put_color(svg *s, const char *name, uint32_t rgb)
{
    char t[48];

    snprintf(t, sizeof t, " %s=\"#%06x\"", name, (unsigned)rgb);
    put_str(s, t);
}

/* XML text: the markup letters escaped.  The input is valid UTF-8 without control characters. */
static void put_escaped(svg *s, const char *text)
{
    for (; *text; text++) {
        if (*text == '&')
            put_str(s, "&amp;");
        else if (*text == '<')
            put_str(s, "&lt;");
        else if (*text == '>')
            put_str(s, "&gt;");
        else
            write_text(s, text, 1);
    }
}

static void svg_path(lm_canvas *c, const double *xy, size_t n, lm_pen pen)
{
    svg *s = c->ctx;

    put_str(s, "<polyline fill=\"none\"");
    put_color(s, "stroke", pen.rgb);
    put_number(s, " stroke-width=\"", pen.width, "\"");
    if (pen.alpha < 1)
        put_number(s, " stroke-opacity=\"", pen.alpha, "\"");
    if (pen.dash > 0)
        put_number(s, " stroke-dasharray=\"", pen.dash, "\"");
    put_str(s, " points=\"");
    for (size_t i = 0; i < n; i++) {
        put_number(s, i ? " " : "", xy[2 * i], ",");
        put_number(s, "", xy[2 * i + 1], "");
    }
    put_str(s, "\"/>\n");
}

static void svg_box(lm_canvas *c, double x, double y, double w, double h, uint32_t rgb)
{
    svg *s = c->ctx;

    put_number(s, "<rect x=\"", x, "\"");
    put_number(s, " y=\"", y, "\"");
    put_number(s, " width=\"", w, "\"");
    put_number(s, " height=\"", h, "\"");
    put_color(s, "fill", rgb);
    put_str(s, "/>\n");
}

static void svg_dot(lm_canvas *c, double x, double y, double r, uint32_t rgb)
{
    svg *s = c->ctx;

    put_number(s, "<circle cx=\"", x, "\"");
    put_number(s, " cy=\"", y, "\"");
    put_number(s, " r=\"", r, "\"");
    put_color(s, "fill", rgb);
    put_str(s, " stroke=\"#ffffff\"/>\n");
}

static void svg_text(lm_canvas *c, double x, double y, const char *text, lm_face face)
{
    static const char *const anchor[3] = { "start", "middle", "end" };
    svg *s = c->ctx;

    put_number(s, "<text x=\"", x, "\"");
    put_number(s, " y=\"", y, "\"");
    put_number(s, " font-size=\"", face.size, "\"");
    if (face.bold)
        put_str(s, " font-weight=\"bold\"");
    if (face.anchor > -1) {
        put_str(s, " text-anchor=\"");
        put_str(s, anchor[face.anchor + 1]);
        put_str(s, "\"");
    }
    if (face.up) {
        put_number(s, " transform=\"rotate(-90 ", x, " ");
        put_number(s, "", y, ")\"");
    }
    put_color(s, "fill", face.rgb);
    put_str(s, ">");
    put_escaped(s, text);
    put_str(s, "</text>\n");
}

lm_code lm_canvas_svg(lm_painter *paint, const void *picture, const char *name, int w, int h,
                      lm_buf *out, lm_err *e)
{
    svg s = { .out = out, .e = e };
    lm_canvas canvas = { svg_path, svg_box, svg_dot, svg_text, &s };
    char size[160];
    lm_code rc = lm_chart_check_size(w, h, e);

    if (rc)
        return rc;
    snprintf(size, sizeof size,
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\""
             " viewBox=\"0 0 %d %d\"",
             w, h, w, h);
    put_str(&s, size);
    put_str(&s, " font-family=\"DejaVu Sans, Verdana, sans-serif\" stroke-linejoin=\"round\""
                " stroke-linecap=\"butt\">\n");
    if (name) {
        char title[512];

        lm_chart_clean(title, sizeof title, name);
        put_str(&s, "<title>");
        put_escaped(&s, title);
        put_str(&s, "</title>\n");
    }
    rc = paint(picture, w, h, &canvas, e);
    put_str(&s, "</svg>\n");
    return rc ? rc : s.rc;
}

lm_code lm_chart_svg(const lm_chart *c, int w, int h, lm_buf *out, lm_err *e)
{
    return lm_canvas_svg(lm_chart_paint, c, c->title, w, h, out, e);
}

lm_code lm_chart_map_svg(const lm_chart_map *m, int w, int h, lm_buf *out, lm_err *e)
{
    return lm_canvas_svg(lm_chart_map_paint, m, m->title, w, h, out, e);
}

lm_code lm_chart_lanes_svg(const lm_chart_lanes *c, int w, int h, lm_buf *out, lm_err *e)
{
    return lm_canvas_svg(lm_chart_lanes_paint, c, c->title, w, h, out, e);
}
