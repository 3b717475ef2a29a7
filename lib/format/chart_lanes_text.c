/* SPDX-License-Identifier: Apache-2.0 */
/* chart_lanes_text.c -- lanes of work over time for a terminal: a line for each, a column for a part of the time. */
#include <stdio.h>
#include <string.h>

#include "format/chart.h"
#include "format/chart_canvas.h"

typedef struct {
    const lm_chart_lanes *c;
    int left, width; /* columns of the names, and of the time */
    bool color;
    lm_buf *out;
    lm_err *e;
} sheet;

/* The box at a time; NULL: a pause.  *k: where the search begins, since columns ask in order. */
static const lm_chart_box *box_at(const lm_chart_lane *lane, double at, size_t *k)
{
    while (*k < lane->n && lane->box[*k].to <= at)
        ++*k;
    return *k < lane->n && lane->box[*k].from <= at ? &lane->box[*k] : NULL;
}

/* What continues a box of a colour where there are no colours. */
static char filling(int color)
{
    static const char fill[] = "-=.~+:*#";
    _Static_assert(sizeof fill - 1 == LM_CHART_LANE_COLORS, "a character of its own for each");
    return fill[(size_t)color % (sizeof fill - 1)];
}

/* A column: the next character of the box's text, then its filling. */
static lm_code put_column(sheet *s, const lm_chart_box *b, int from_start)
{
    char c = !b                                  ? ' '
             : from_start < (int)strlen(b->text) ? b->text[from_start]
             : s->color                          ? ' '
                                                 : filling(b->color);
    uint32_t rgb = b ? s->c->rgb[(size_t)b->color % s->c->colors] : 0;

    if (!s->color || !b)
        return lm_buf_add(s->out, &c, 1, s->e);
    return lm_buf_addf(s->out, s->e, "\033[48;5;%d;38;5;%dm%c\033[0m", lm_chart_cube(rgb),
                       lm_chart_map_ink(rgb) == 0xFFFFFF ? 231 : 16, c);
}

static lm_code put_lane(sheet *s, const lm_chart_lane *lane)
{
    const lm_chart_box *last = NULL;
    size_t k = 0;
    int since = 0;
    char name[128];

    lm_chart_clean(name, sizeof name, lane->name);
    if (lm_buf_addf(s->out, s->e, "%*s ", s->left - 1, name))
        return s->e->code;
    for (int i = 0; i < s->width; i++) {
        const lm_chart_box *b = box_at(lane, (i + 0.5) * s->c->end / s->width, &k);

        since = b == last ? since + 1 : 0;
        last = b;
        if (put_column(s, b, since))
            return s->e->code;
    }
    return lm_buf_addf(s->out, s->e, "%s%s\n", lane->note ? " " : "", lane->note ? lane->note : "");
}

static lm_code put_legend(sheet *s)
{
    for (size_t i = 0; i < s->c->colors; i++) {
        uint32_t rgb = s->c->rgb[i];

        if (s->color ? lm_buf_addf(s->out, s->e, "%s\033[48;5;%dm  \033[0m %s", i ? "  " : "",
                                   lm_chart_cube(rgb), s->c->legend[i])
                     : lm_buf_addf(s->out, s->e, "%s%c%c %s", i ? "  " : "", filling((int)i),
                                   filling((int)i), s->c->legend[i]))
            return s->e->code;
    }
    return lm_buf_add(s->out, "\n", 1, s->e);
}

lm_code lm_chart_lanes_text(const lm_chart_lanes *c, int cols, bool color, lm_buf *out, lm_err *e)
{
    sheet s = { .c = c, .color = color, .out = out, .e = e };
    size_t name = 0, note = 0;
    char end[32], title[512];

    if (cols < 20 || cols > 1000)
        return lm_fail(e, LM_EUSAGE, "terminal", NULL, "%d columns: 20 to 1000 can be drawn", cols);
    if (lm_chart_lanes_check(c, e))
        return e->code;
    for (size_t i = 0; i < c->n; i++) {
        size_t a = lm_chart_letters(c->lane[i].name),
               b = c->lane[i].note ? lm_chart_letters(c->lane[i].note) + 1 : 0;

        name = a > name ? a : name;
        note = b > note ? b : note;
    }
    s.left = (int)name + 1;
    s.width = cols - s.left - (int)note;
    if (s.width < 10)
        return lm_fail(e, LM_EUSAGE, "terminal", "make it wider, or draw a picture",
                       "%d columns leave no place for the time", cols);
    if (c->title) {
        lm_chart_clean(title, sizeof title, c->title);
        if (lm_buf_addf(out, e, "%s\n", title))
            return e->code;
    }
    for (size_t i = 0; i < c->n; i++)
        if (put_lane(&s, &c->lane[i]))
            return e->code;
    snprintf(end, sizeof end, "%.6g %s", c->end, c->unit);
    if (lm_buf_addf(out, e, "%*s0%*s\n", s.left, "", s.width - 1, end))
        return e->code;
    return put_legend(&s);
}
