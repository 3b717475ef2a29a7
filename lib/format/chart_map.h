/* SPDX-License-Identifier: Apache-2.0 */
/* chart_map.h -- maps: values over two lists of names, shown as colours; the back ends of charts.
 *
 * A picture holds panels of one grid and one scale of colours, so that panels can be compared: the
 * retrieval of a model over length and depth, a panel for each kind of cache.  The same map gives
 * the same bytes. */
#ifndef LM_FORMAT_CHART_MAP_H
#define LM_FORMAT_CHART_MAP_H

#include "format/chart.h"

typedef struct {
    const char *label;
    const double *value; /* [rows, cols], the first row at the top; not finite: not measured */
} lm_chart_map_panel;

/* All pointers are borrowed; strings are UTF-8. */
typedef struct lm_chart_map {
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

#endif
