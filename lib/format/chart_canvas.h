/* SPDX-License-Identifier: Apache-2.0 */
/* chart_canvas.h -- the interface of a back end of charts, and the painters that all back ends
 * share.  Private to lib/format. */
#ifndef LM_FORMAT_CHART_CANVAS_H
#define LM_FORMAT_CHART_CANVAS_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "format/chart.h"

typedef struct {
    uint32_t rgb; /* 0xRRGGBB */
    double alpha, width;
    double dash; /* length of dashes and gaps; 0: none */
} lm_pen;

typedef struct {
    uint32_t rgb;
    double size;   /* pixels */
    bool bold, up; /* up: rotated to read from bottom to top */
    int anchor;    /* -1 begins at x, 0 is centred on it, 1 ends there */
} lm_face;

/* Coordinates in pixels from the top left.  xy holds n pairs.  The back end keeps the first
 * failure. */
typedef struct lm_canvas {
    void (*path)(struct lm_canvas *c, const double *xy, size_t n, lm_pen pen);
    void (*box)(struct lm_canvas *c, double x, double y, double w, double h, uint32_t rgb);
    void (*dot)(struct lm_canvas *c, double x, double y, double r, uint32_t rgb); /* white rim */
    void (*text)(struct lm_canvas *c, double x, double y, const char *s,
                 lm_face face); /* baseline */
    void *ctx;
} lm_canvas;

/* Colours that all kinds of charts share. */
enum { LM_INK = 0x1E293B, LM_GREY = 0x64748B, LM_GRID = 0xE2E8F0, LM_AXIS = 0x94A3B8 };

/* Paint a whole picture (an lm_chart, an lm_chart_map), background included. */
typedef lm_code lm_painter(const void *picture, int w, int h, lm_canvas *canvas, lm_err *e);

/* Append what `paint` paints as a file of SVG or PNG.  title may be NULL. */
lm_code lm_canvas_svg(lm_painter *paint, const void *picture, const char *title, int w, int h,
                      lm_buf *out, lm_err *e);
lm_code lm_canvas_png(lm_painter *paint, const void *picture, int w, int h, lm_buf *out, lm_err *e);

/* Text of any bytes, cleaned; its width in pixels, which is the same for every back end. */
void lm_canvas_text(lm_canvas *v, double x, double y, const char *s, lm_face face);
double lm_canvas_text_width(const char *s, double size);

lm_painter lm_chart_paint, lm_chart_map_paint, lm_chart_lanes_paint;

/* The ranges of x over all panels and of y in one; false when no point can be drawn (0..1 then). */
bool lm_chart_x_range(const lm_chart *c, double *min, double *max);
bool lm_chart_y_range(const lm_chart *c, size_t panel, double *min, double *max);
bool lm_chart_has_place(const lm_chart *c, const lm_chart_panel *p, double x, double y);

lm_code lm_chart_check_size(int w, int h, lm_err *e);

/* Of a map: its check, the colour of a value, that of text upon a colour, a value as text. */
lm_code lm_chart_map_check(const lm_chart_map *m, lm_err *e);
uint32_t lm_chart_map_color(const lm_chart_map *m, double v);
uint32_t lm_chart_map_ink(uint32_t rgb);
void lm_chart_map_number(double v, char s[16]);

/* Of a terminal: the nearest colour of its 6 x 6 x 6 cube. */
int lm_chart_cube(uint32_t rgb);

/* Of lanes: their check. */
lm_code lm_chart_lanes_check(const lm_chart_lanes *c, lm_err *e);

/* Copy text for a picture: valid UTF-8 unchanged; other bytes, and control characters (a name could
 * hold terminal commands), as U+FFFD; truncated to `size`. */
void lm_chart_clean(char *out, size_t size, const char *s);

/* Code points of a UTF-8 string, control characters included. */
size_t lm_chart_letters(const char *s);

#endif
