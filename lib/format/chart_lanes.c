/* SPDX-License-Identifier: Apache-2.0 */
/* chart_lanes.c -- lanes of work over time: their layout, and painting onto any canvas. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format/chart.h"
#include "format/chart_canvas.h"

enum { EDGE = 18, TOP = 40, BOTTOM = 44 };

lm_code lm_chart_lanes_check(const lm_chart_lanes *c, lm_err *e)
{
    if (c->n < 1 || c->n > LM_CHART_MAP_MOST)
        return lm_fail(e, LM_EUSAGE, "lanes", NULL, "%zu lanes: 1 to %d can be drawn", c->n,
                       LM_CHART_MAP_MOST);
    if (c->colors < 1 || c->colors > LM_CHART_LANE_COLORS)
        return lm_fail(e, LM_EUSAGE, "lanes", NULL, "%zu colours: 1 to %d can be told apart",
                       c->colors, LM_CHART_LANE_COLORS);
    if (!(c->end > 0) || !isfinite(c->end))
        return lm_fail(e, LM_EUSAGE, "lanes", NULL, "a time from 0 to %g has no length", c->end);
    return LM_OK;
}

/* The places of the lanes: a lane is `each` high, time 0 is at `left`, one unit `scale` wide. */
typedef struct {
    double left, right, top, bottom, each, scale;
} frame;

static frame place(const lm_chart_lanes *c, int w, int h, double top)
{
    double name = 0, note = 0;
    frame f = { .top = top, .bottom = h - BOTTOM };

    for (size_t i = 0; i < c->n; i++) {
        name = fmax(name, lm_canvas_text_width(c->lane[i].name, 12));
        note = fmax(note, c->lane[i].note ? lm_canvas_text_width(c->lane[i].note, 11) + 10 : 0);
    }
    f.left = EDGE + fmin(name, w / 4.0) + 10;
    f.right = w - EDGE - fmin(note, w / 4.0);
    f.each = fmax((f.bottom - f.top) / (double)c->n, 0.1);
    f.scale = fmax(f.right - f.left, 1) / c->end;
    return f;
}

static void paint_axis(const lm_chart_lanes *c, const frame *f, int w, int h, lm_canvas *v)
{
    lm_chart_axis axis = { .kind = LM_AXIS_NUMBER };
    lm_face tick = { LM_GREY, 12, false, false, 0 }, unit = { LM_GREY, 12, false, false, 1 };
    lm_pen pen = { LM_GRID, 1, 1, 0 };

    lm_axis_fit(&axis, 0, c->end, (int)fmin(fmax((f->right - f->left) / 70, 2), LM_AXIS_TICKS),
                true);
    for (int i = 0; i < axis.n; i++) {
        double x = f->left + axis.tick[i] * f->scale, line[4] = { x, f->top, x, f->bottom };

        v->path(v, line, 2, pen);
        lm_canvas_text(v, x, f->bottom + 17, axis.label[i], tick);
    }
    lm_canvas_text(v, w - EDGE, h - 10, c->unit, unit);
}

static void paint_lane(const lm_chart_lanes *c, const frame *f, size_t i, lm_canvas *v)
{
    const lm_chart_lane *lane = &c->lane[i];
    double y = f->top + f->each * (double)i, gap = f->each > 6 ? fmin(f->each * 0.15, 6) : 0,
           h = f->each - gap;
    lm_face name = { LM_INK, 12, false, false, 1 }, note = { LM_GREY, 11, false, false, -1 };

    for (size_t k = 0; k < lane->n; k++) {
        const lm_chart_box *b = &lane->box[k];
        double x = f->left + b->from * f->scale, w = (b->to - b->from) * f->scale;
        uint32_t rgb = c->rgb[(size_t)b->color % c->colors];
        lm_face face = { lm_chart_map_ink(rgb), fmin(11, h * 0.8), false, false, 0 };

        v->box(v, x, y, w > 3 ? w - 1 : w, h, rgb);
        if (h >= 9 && lm_canvas_text_width(b->text, face.size) + 2 <= w)
            lm_canvas_text(v, x + w / 2, y + h / 2 + face.size * 0.36, b->text, face);
    }
    if (f->each < 11 && i % (size_t)ceil(11 / f->each))
        return; /* names would overlap */
    lm_canvas_text(v, f->left - 8, y + h / 2 + 4, lane->name, name);
    if (lane->note)
        lm_canvas_text(v, f->right + 10, y + h / 2 + 4, lane->note, note);
}

/* The colours and their names, at the right edge above the lanes. */
static void paint_legend(const lm_chart_lanes *c, double right, double y, lm_canvas *v)
{
    lm_face face = { LM_GREY, 12, false, false, -1 };

    for (size_t i = c->colors; i-- > 0;) {
        right -= lm_canvas_text_width(c->legend[i], 12);
        lm_canvas_text(v, right, y, c->legend[i], face);
        v->box(v, right - 17, y - 10, 12, 12, c->rgb[i]);
        right -= 32;
    }
}

lm_code lm_chart_lanes_paint(const void *picture, int w, int h, lm_canvas *v, lm_err *e)
{
    const lm_chart_lanes *c = picture;
    lm_face title = { LM_INK, 14, true, false, -1 };
    double top = TOP;

    if (lm_chart_lanes_check(c, e))
        return e->code;
    v->box(v, 0, 0, w, h, 0xFFFFFF);
    if (c->title) {
        lm_canvas_text(v, EDGE, 28, c->title, title);
        top += 22;
    }
    paint_legend(c, w - EDGE, top - 12, v);
    frame f = place(c, w, h, top);
    paint_axis(c, &f, w, h, v);
    for (size_t i = 0; i < c->n; i++)
        paint_lane(c, &f, i, v);
    return LM_OK;
}
