/* SPDX-License-Identifier: Apache-2.0 */
/* chart_png.c -- the PNG back end: cairo's image surface.  No other file of the library needs
 * cairo. */
#include <cairo/cairo.h>
#include <math.h>

#include "format/chart.h"
#include "format/chart_canvas.h"

static void set_rgb(cairo_t *cr, uint32_t rgb, double alpha)
{
    cairo_set_source_rgba(cr, (rgb >> 16 & 255) / 255.0, (rgb >> 8 & 255) / 255.0,
                          (rgb & 255) / 255.0, alpha);
}

static void png_path(lm_canvas *c, const double *xy, size_t n, lm_pen pen)
{
    cairo_t *cr = c->ctx;

    cairo_new_path(cr);
    for (size_t i = 0; i < n; i++)
        cairo_line_to(cr, xy[2 * i], xy[2 * i + 1]);
    set_rgb(cr, pen.rgb, pen.alpha);
    cairo_set_line_width(cr, pen.width);
    cairo_set_line_join(cr, CAIRO_LINE_JOIN_ROUND);
    cairo_set_dash(cr, &pen.dash, pen.dash > 0, 0);
    cairo_stroke(cr);
}

static void png_box(lm_canvas *c, double x, double y, double w, double h, uint32_t rgb)
{
    cairo_t *cr = c->ctx;

    cairo_rectangle(cr, x, y, w, h);
    set_rgb(cr, rgb, 1);
    cairo_fill(cr);
}

static void png_dot(lm_canvas *c, double x, double y, double r, uint32_t rgb)
{
    cairo_t *cr = c->ctx;
    const double none = 0;

    cairo_new_path(cr);
    cairo_arc(cr, x, y, r, 0, 2 * M_PI);
    set_rgb(cr, rgb, 1);
    cairo_fill_preserve(cr);
    cairo_set_dash(cr, &none, 0, 0);
    set_rgb(cr, 0xFFFFFF, 1);
    cairo_set_line_width(cr, 1);
    cairo_stroke(cr);
}

static void png_text(lm_canvas *c, double x, double y, const char *s, lm_face face)
{
    cairo_t *cr = c->ctx;
    cairo_text_extents_t t;

    cairo_select_font_face(cr, "DejaVu Sans", CAIRO_FONT_SLANT_NORMAL,
                           face.bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
    cairo_set_font_size(cr, face.size);
    cairo_text_extents(cr, s, &t);
    cairo_save(cr);
    cairo_translate(cr, x, y);
    if (face.up)
        cairo_rotate(cr, -M_PI / 2);
    cairo_move_to(cr, -t.x_advance * (face.anchor + 1) / 2, 0);
    set_rgb(cr, face.rgb, 1);
    cairo_show_text(cr, s);
    cairo_restore(cr);
}

typedef struct {
    lm_buf *out;
    lm_err *e;
    lm_code rc;
} sink;

static cairo_status_t take_bytes(void *ctx, const unsigned char *data, unsigned int len)
{
    sink *s = ctx;

    s->rc = lm_buf_add(s->out, data, len, s->e);
    return s->rc ? CAIRO_STATUS_NO_MEMORY : CAIRO_STATUS_SUCCESS;
}

lm_code lm_canvas_png(lm_painter *paint, const void *picture, int w, int h, lm_buf *out, lm_err *e)
{
    sink s = { .out = out, .e = e };
    lm_canvas canvas = { png_path, png_box, png_dot, png_text, NULL };
    cairo_surface_t *surface;
    cairo_status_t st;
    cairo_t *cr;
    lm_code rc = lm_chart_check_size(w, h, e);

    if (rc)
        return rc;
    surface = cairo_image_surface_create(CAIRO_FORMAT_RGB24, w, h);
    cr = cairo_create(surface);
    canvas.ctx = cr;
    rc = paint(picture, w, h, &canvas, e);
    st = cairo_status(cr);
    if (!rc && st == CAIRO_STATUS_SUCCESS)
        st = cairo_surface_write_to_png_stream(surface, take_bytes, &s);
    if (!rc && s.rc)
        rc = s.rc;
    if (!rc && st != CAIRO_STATUS_SUCCESS)
        rc = lm_fail(e, st == CAIRO_STATUS_NO_MEMORY ? LM_ELIMIT : LM_EIO, "picture",
                     "draw an SVG instead", "cairo: %s", cairo_status_to_string(st));
    cairo_destroy(cr);
    cairo_surface_destroy(surface);
    return rc;
}

lm_code lm_chart_png(const lm_chart *c, int w, int h, lm_buf *out, lm_err *e)
{
    return lm_canvas_png(lm_chart_paint, c, w, h, out, e);
}

lm_code lm_chart_map_png(const lm_chart_map *m, int w, int h, lm_buf *out, lm_err *e)
{
    return lm_canvas_png(lm_chart_map_paint, m, w, h, out, e);
}

lm_code lm_chart_lanes_png(const lm_chart_lanes *c, int w, int h, lm_buf *out, lm_err *e)
{
    return lm_canvas_png(lm_chart_lanes_paint, c, w, h, out, e);
}
