/* SPDX-License-Identifier: Apache-2.0 */
/* chart.h -- line charts, maps and lanes: one layout each, three back ends (SVG, PNG through cairo, text
 * for a terminal).
 *
 * A chart is a column of panels over one common x axis; a panel holds lines and marks.  A map
 * shows values over two lists of names as colours; its panels have one scale, so that they can be
 * compared: the retrieval of a model over length and depth, a panel for each kind of cache.  The
 * same picture gives the same bytes: SVG names fonts instead of embedding them.  Only PNG needs cairo; a
 * program that draws no PNG does not link it (static libcore). */
#ifndef LM_FORMAT_CHART_H
#define LM_FORMAT_CHART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

/* How the numbers of an axis are rounded and written. */
typedef enum {
    LM_AXIS_NUMBER, /* 0.5, 120, 3e-04            */
    LM_AXIS_COUNT,  /* 500, 20k, 1.5M             */
    LM_AXIS_TIME,   /* seconds: 30s, 5m, 2h, 3d   */
} lm_axis_kind;

enum { LM_AXIS_TICKS = 24 };

/* A fitted axis: lo < hi; ticks ascend and lie in [lo, hi]. */
typedef struct {
    lm_axis_kind kind;
    bool log;
    double lo, hi;
    int n;
    double tick[LM_AXIS_TICKS];
    char label[LM_AXIS_TICKS][16];
} lm_chart_axis;

/* Fit a->kind and a->log (set by the caller) to data in [min, max]: choose round ticks, at most
 * `most` (2..LM_AXIS_TICKS) of them.  `tight`: lo and hi are the data's own ends (usual for x);
 * otherwise they are widened to whole ticks, or by a small margin when whole ticks would leave much
 * space empty.  A log axis needs min > 0; min == max is widened. */
void lm_axis_fit(lm_chart_axis *a, double min, double max, int most, bool tight);
/* The position of v: 0 at lo, 1 at hi (outside: beyond); NAN for a value that a log axis cannot
 * show. */
double lm_axis_at(const lm_chart_axis *a, double v);

/* Exponential moving average without the bias of its start (Kingma & Ba, arXiv:1412.6980, section
 * 3): m_k = beta m_{k-1} + (1-beta) y_k, out_k = m_k / (1 - beta^k).  beta in [0,1); values that
 * are not finite are copied and do not change the average.  out may be y. */
void lm_chart_smooth(double *out, const double *y, size_t n, double beta);

typedef enum {
    LM_LINE_SOLID,
    LM_LINE_FAINT, /* the raw values behind a smoothed line */
    LM_LINE_MARKS, /* points, joined by a thin line: values measured at intervals */
} lm_line_style;

/* Points in order of x.  A y that is not finite breaks the line and is shown by a cross at the top
 * of the panel; a point that a log axis cannot show is left out. */
typedef struct {
    const double *x, *y; /* borrowed */
    size_t n;
    const char *name; /* in the legend; NULL: not listed.  UTF-8 */
    int color;        /* index into the palette of 8, modulo 8 */
    lm_line_style style;
} lm_chart_line;

typedef struct {
    const char *label; /* the quantity drawn: "loss" */
    bool log_y;
    const lm_chart_line *line;
    size_t n;
} lm_chart_panel;

typedef struct {
    const char *title;   /* may be NULL */
    const char *x_label; /* "step" */
    lm_axis_kind x_kind;
    bool log_x;
    const lm_chart_panel *panel;
    size_t n;
} lm_chart;

enum { LM_CHART_MIN = 160, LM_CHART_MAX = 16384 }; /* pixels per side */

/* Append the picture to *out.  w, h in pixels, LM_CHART_MIN..LM_CHART_MAX (LM_EUSAGE).  A chart
 * without any point gives empty axes. */
lm_code lm_chart_svg(const lm_chart *c, int w, int h, lm_buf *out, lm_err *e);
lm_code lm_chart_png(const lm_chart *c, int w, int h, lm_buf *out, lm_err *e);

/* Append `rows` lines of at most `cols` columns (20..1000 and 6..500, LM_EUSAGE): braille dots, 2 x
 * 4 a cell, with ANSI colours when `color`. */
lm_code lm_chart_text(const lm_chart *c, int cols, int rows, bool color, lm_buf *out, lm_err *e);

/* ---- maps ---- */

typedef struct {
    const char *label;
    const double *value; /* [rows, cols], the first row at the top; not finite: not measured */
} lm_chart_map_panel;

/* All pointers are borrowed; strings are UTF-8. */
typedef struct {
    const char *title;             /* may be NULL */
    const char *quantity;          /* what the colours mean: "share of right answers" */
    const char *x_label, *y_label; /* of the names: "tokens", "depth" */
    const char *const *x;          /* [cols] */
    const char *const *y;          /* [rows] */
    size_t cols, rows;             /* 1 to LM_CHART_MAP_MOST */
    double lo, hi;                 /* the ends of the scale, lo < hi; values outside have its end */
    const lm_chart_map_panel *panel;
    size_t n;
} lm_chart_map;

enum { LM_CHART_MAP_MOST = 1024 };

/* Append the picture to *out, w by h pixels as lm_chart_svg.  Panels stand beside and below each
 * other in the arrangement with the largest cells; a cell shows its number where that fits.
 * Fails: LM_EUSAGE for a size out of range, of the picture or the grid, and without lo < hi. */
lm_code lm_chart_map_svg(const lm_chart_map *m, int w, int h, lm_buf *out, lm_err *e);
lm_code lm_chart_map_png(const lm_chart_map *m, int w, int h, lm_buf *out, lm_err *e);

/* Append lines of at most `cols` columns (20 to 1000), the panels below each other: a cell is its
 * number, on its colour when `color`; in a grid too wide for numbers it is a column of shade.
 * Fails also with LM_EUSAGE when the grid is wider than that. */
lm_code lm_chart_map_text(const lm_chart_map *m, int cols, bool color, lm_buf *out, lm_err *e);

/* ---- lanes ---- */

/* A box of a lane: work from one time to another. */
typedef struct {
    double from, to;
    int color;     /* index into the legend */
    char text[12]; /* written into the box where it fits; in a terminal its beginning */
} lm_chart_box;

typedef struct {
    const char *name, *note; /* at the left and right edge; note may be NULL */
    const lm_chart_box *box; /* in order of time, without overlap */
    size_t n;
} lm_chart_lane;

enum { LM_CHART_LANE_COLORS = 8 };

/* Work of several workers over one axis of time.  All pointers are borrowed; strings are UTF-8. */
typedef struct {
    const char *title;         /* may be NULL */
    const char *unit;          /* of time: "ms" */
    double end;                /* of the axis, > 0 */
    const char *const *legend; /* names of the colours */
    const uint32_t *rgb;       /* of the legend's entries: 0xRRGGBB */
    size_t colors;             /* 1 to LM_CHART_LANE_COLORS */
    const lm_chart_lane *lane;
    size_t n; /* 1 to LM_CHART_MAP_MOST */
} lm_chart_lanes;

/* Append the picture to *out, w by h pixels as lm_chart_svg. */
lm_code lm_chart_lanes_svg(const lm_chart_lanes *c, int w, int h, lm_buf *out, lm_err *e);
lm_code lm_chart_lanes_png(const lm_chart_lanes *c, int w, int h, lm_buf *out, lm_err *e);

/* Append lines of at most `cols` columns (20 to 1000), one for each lane: a column is a part of the time, with the text of the
 * box that covers its middle, or a character for its colour; on the colour itself when `color`. */
lm_code lm_chart_lanes_text(const lm_chart_lanes *c, int cols, bool color, lm_buf *out, lm_err *e);

#endif
