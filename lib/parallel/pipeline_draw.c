/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_draw.c -- pipeline schedules as lanes of boxes, and as JSON. */
#include "parallel/pipeline_draw.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Two shades of each kind: for a rank's first stage, and for its second one, or the way back. */
enum { SHADES = 2, KINDS = 4 };
static const uint32_t shade[KINDS * SHADES] = { 0x2563EB, 0x93C5FD, 0x059669, 0x6EE7B7,
                                                0x7C3AED, 0xC4B5FD, 0xEA580C, 0xFDBA74 };
static const char *const meaning[KINDS * SHADES] = {
    "F", "F of the second stage", "B", "B of the second stage",
    "I", "I of the second stage", "W", "W of the second stage",
};

static int shade_of(const lm_pipeline *p, int r, const lm_pipe_step *s)
{
    bool second = p->stages > p->ranks ? s->stage / p->ranks % 2 : s->stage != r;
    return s->kind * SHADES + second;
}

/* The legend has the shades that occur; index[shade]: its place in it. */
static lm_code make_legend(const lm_pipeline *p, lm_arena *a, int index[KINDS * SHADES],
                           lm_chart_lanes *out, lm_err *e)
{
    bool used[KINDS * SHADES] = { false };
    const char **names;
    uint32_t *rgb;

    for (int r = 0; r < p->ranks; r++)
        for (size_t k = 0; k < p->row[r].n; k++)
            used[shade_of(p, r, &p->row[r].step[k])] = true;
    if (lm_arena_alloc(a, &names, KINDS * SHADES, sizeof *names, e) ||
        lm_arena_alloc(a, &rgb, KINDS * SHADES, sizeof *rgb, e))
        return e->code;
    for (int i = 0; i < KINDS * SHADES; i++)
        if (used[i]) {
            index[i] = (int)out->colors;
            names[out->colors] = meaning[i];
            rgb[out->colors++] = shade[i];
        }
    out->legend = names;
    out->rgb = rgb;
    return LM_OK;
}

static lm_code make_text(lm_arena *a, const char **out, const char *text, lm_err *e)
{
    char *copy;

    if (lm_arena_strdup(a, &copy, text, strlen(text), e))
        return e->code;
    *out = copy;
    return LM_OK;
}

static lm_code make_lane(const lm_pipeline *p, const lm_pipe_times *t, const lm_pipe_cost *cost,
                         int r, const int *index, lm_arena *a, lm_chart_lane *out, lm_err *e)
{
    const lm_pipe_row *row = &p->row[r];
    lm_chart_box *box;
    char text[80];

    if (lm_arena_alloc(a, &box, row->n, sizeof *box, e))
        return e->code;
    for (size_t k = 0; k < row->n; k++) {
        const lm_pipe_step *s = &row->step[k];

        box[k] = (lm_chart_box){ .from = t->start[r][k], .color = index[shade_of(p, r, s)] };
        box[k].to = box[k].from + lm_pipe_took(&cost[s->stage], (lm_pipe_kind)s->kind);
        snprintf(box[k].text, sizeof box[k].text, "%" PRId32, s->micro);
    }
    out->box = box;
    out->n = row->n;
    snprintf(text, sizeof text, "rank %d", r);
    if (make_text(a, &out->name, text, e))
        return e->code;
    snprintf(text, sizeof text, "waits %.4g, holds %" PRId32, t->idle[r] > 0 ? t->idle[r] : 0,
             t->inflight[r]);
    return make_text(a, &out->note, text, e);
}

lm_code lm_pipeline_chart(const lm_pipeline *p, const lm_pipe_times *t, const lm_pipe_cost *cost,
                          const char *name, const char *title, lm_arena *a, lm_chart_lanes *out,
                          lm_err *e)
{
    int index[KINDS * SHADES] = { 0 };
    lm_chart_lane *lane;
    char text[256];

    *out =
        (lm_chart_lanes){ .title = title, .unit = "ms", .end = t->makespan, .n = (size_t)p->ranks };
    snprintf(text, sizeof text,
             "%.80s: %" PRId32 " micro-batches on %" PRId32
             " ranks, %.6g ms, bubble %.3g %% of the ideal time, %.3g %% of all",
             name, p->micros, p->ranks, t->makespan, 100 * lm_pipe_bubble_ideal(t),
             100 * lm_pipe_bubble_total(t));
    if (!title && make_text(a, &out->title, text, e))
        return e->code;
    if (make_legend(p, a, index, out, e) || lm_arena_alloc(a, &lane, out->n, sizeof *lane, e))
        return e->code;
    for (int r = 0; r < p->ranks; r++)
        if (make_lane(p, t, cost, r, index, a, &lane[r], e))
            return e->code;
    out->lane = lane;
    return LM_OK;
}

lm_code lm_pipeline_json(const lm_pipeline *p, const lm_pipe_times *t, const char *name,
                         lm_buf *out, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "schedule", name);
    lm_jw_int(&w, "ranks", p->ranks);
    lm_jw_int(&w, "stages", p->stages);
    lm_jw_int(&w, "micro_batches", p->micros);
    lm_jw_f64(&w, "makespan_ms", t->makespan);
    lm_jw_f64(&w, "ideal_ms", t->ideal);
    lm_jw_f64(&w, "span_ms", t->span);
    lm_jw_f64(&w, "bubble_of_ideal", lm_pipe_bubble_ideal(t));
    lm_jw_f64(&w, "bubble_of_makespan", lm_pipe_bubble_total(t));
    lm_jw_f64(&w, "bubble_of_span", lm_pipe_bubble_span(t));
    lm_jw_arr(&w, "rank");
    for (int r = 0; r < p->ranks; r++) {
        lm_jw_obj(&w, NULL);
        lm_jw_f64(&w, "busy_ms", t->busy[r]);
        lm_jw_f64(&w, "idle_ms", t->idle[r]);
        lm_jw_int(&w, "in_flight", t->inflight[r]);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    lm_jw_arr(&w, "stage");
    for (int s = 0; s < p->stages; s++) {
        lm_jw_obj(&w, NULL);
        lm_jw_int(&w, "in_flight", t->stage_inflight[s]);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}
