/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_run.c -- see pipeline_run.h. */
#include "parallel/pipeline_run.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/lane.h"

enum { WAYS = 2 };

/* The border behind a stage.  Without a lane both sides are this rank's, or both are not. */
typedef struct {
    lm_comm *comm[2]; /* down, up */
    lm_lane *lane[2];
    uint64_t given[2]; /* the last message that this rank sends there */
} border;

struct lm_pipe_runner {
    const lm_pipeline *p;
    const lm_pipe_work *w;
    int rank, ways;
    int *of[WAYS]; /* [stages] rank of each */
    int32_t *
        *micro; /* [stages][slots], of this rank's: the micro-batch that is in it; -1: it is free */
    int *slots; /* [stages] */
    border *border[WAYS]; /* [stages - 1] */
    uint64_t *comes;      /* [steps of the row]: the last message that the step waits for */
    bool *asked;          /* its messages have begun, or it has none */
    lm_pipe_use use;
};

static const lm_pipe_row *row_of(const lm_pipe_runner *r)
{
    return &r->p->row[r->rank];
}

static int way_of(const lm_pipe_runner *r, const lm_pipe_step *s)
{
    return lm_pipeline_way(r->p, r->ways, s->micro);
}

static bool has_up(const lm_pipe_step *s)
{
    return s->kind == LM_PIPE_B || s->kind == LM_PIPE_I;
}

/* ---- slots ---- */

/* The slot that holds a micro-batch, or with micro = -1 the first free one.  -1 if no slot does. */
static int find_slot(const lm_pipe_runner *r, int stage, int32_t micro)
{
    for (int i = 0; i < r->slots[stage]; i++)
        if (r->micro[stage][i] == micro)
            return i;
    return -1;
}

/* The slot of a micro-batch, which may be a new one. */
static lm_code take_slot(lm_pipe_runner *r, int stage, int32_t micro, int *out, lm_err *e)
{
    *out = find_slot(r, stage, micro);
    if (*out < 0)
        *out = find_slot(r, stage, -1);
    if (*out < 0)
        return lm_fail(e, LM_EBUG, "pipeline", NULL, "stage %d has no slot for micro-batch %d",
                       stage, (int)micro);
    r->micro[stage][*out] = micro;
    return LM_OK;
}

/* ---- messages ---- */

/* Receive the parts of a border, or send them. */
static lm_code take_parts(const lm_pipe_work *w, border *b, int at, bool up, int slot,
                          uint64_t *last, lm_err *e)
{
    lm_pipe_part x;
    for (size_t k = 0; w->part(w->ctx, at, up, false, slot, k, &x); k++)
        if (lm_lane_take(b->lane[up], x.data, x.bytes, last, e))
            return e->code;
    return LM_OK;
}

static lm_code give_parts(lm_pipe_runner *r, const lm_pipe_work *w, border *b, int at, bool up,
                          int slot, lm_err *e)
{
    lm_pipe_part x;
    for (size_t k = 0; w->part(w->ctx, at, up, true, slot, k, &x); k++) {
        if (lm_lane_give(b->lane[up], x.data, x.bytes, &b->given[up], e))
            return e->code;
        r->use.bytes += (double)x.bytes;
    }
    return LM_OK;
}

/* Both stages are this rank's. */
static void hand_over(const lm_pipe_work *w, int at, bool up, int from, int to)
{
    lm_pipe_part x, y;
    for (size_t k = 0;
         w->part(w->ctx, at, up, true, from, k, &x) && w->part(w->ctx, at, up, false, to, k, &y);
         k++)
        if (x.bytes)
            memcpy(y.data, x.data, x.bytes);
}

/* The border over which a step receives, or sends; -1: it does not. */
static int border_in(const lm_pipe_runner *r, const lm_pipe_step *s)
{
    if (s->kind == LM_PIPE_F)
        return s->stage - 1;
    return has_up(s) && s->stage + 1 < r->p->stages ? s->stage : -1;
}

static int border_out(const lm_pipe_runner *r, const lm_pipe_step *s)
{
    if (s->kind == LM_PIPE_F)
        return s->stage + 1 < r->p->stages ? s->stage : -1;
    return has_up(s) ? s->stage - 1 : -1;
}

/* The border with number `at` as the micro-batch of a step crosses it. */
static border *border_of(const lm_pipe_runner *r, const lm_pipe_step *s, int at)
{
    return &r->border[way_of(r, s)][at];
}

/* Begin to receive for step k of the row. */
static lm_code ask_for(lm_pipe_runner *r, size_t k, lm_err *e)
{
    const lm_pipe_step *s = &row_of(r)->step[k];
    const int at = border_in(r, s);
    int slot;
    if (r->asked[k] || take_slot(r, s->stage, s->micro, &slot, e))
        return e->code;
    r->asked[k] = true;
    border *b = at < 0 ? NULL : border_of(r, s, at);
    return b && b->lane[has_up(s)] ? take_parts(r->w, b, at, has_up(s), slot, &r->comes[k], e)
                                   : LM_OK;
}

static lm_code send(lm_pipe_runner *r, const lm_pipe_step *s, int slot, lm_err *e)
{
    const bool up = has_up(s);
    const int at = border_out(r, s), stage = up ? s->stage - 1 : s->stage + 1;
    int to;
    if (at < 0)
        return LM_OK;
    border *b = border_of(r, s, at);
    if (b->lane[up])
        return give_parts(r, r->w, b, at, up, slot, e);
    if (take_slot(r, stage, s->micro, &to, e))
        return e->code;
    hand_over(r->w, at, up, slot, to);
    return LM_OK;
}

/* ---- running ---- */

static lm_code run_step(lm_pipe_runner *r, size_t k, lm_err *e)
{
    const lm_pipe_step *s = &row_of(r)->step[k];
    const int at = border_in(r, s);
    if (ask_for(r, k, e) || (k + 1 < row_of(r)->n && ask_for(r, k + 1, e)))
        return e->code;
    if (r->comes[k] && lm_lane_wait(border_of(r, s, at)->lane[has_up(s)], r->comes[k], e))
        return e->code;
    const int slot = find_slot(r, s->stage, s->micro);
    const double began = lm_now();
    if (r->w->compute(r->w->ctx, s, slot, e))
        return e->code;
    r->use.busy += lm_now() - began;
    if (send(r, s, slot, e))
        return e->code;
    if (s->kind == LM_PIPE_B || s->kind == LM_PIPE_W)
        r->micro[s->stage][slot] = -1;
    return LM_OK;
}

/* Border number i of all, those of way 0 first. */
static border *border_at(const lm_pipe_runner *r, int i)
{
    const int n = r->p->stages - 1;
    return &r->border[i / n][i % n];
}

static int borders(const lm_pipe_runner *r)
{
    return r->ways * (r->p->stages - 1);
}

static lm_code wait_given(lm_pipe_runner *r, lm_err *e)
{
    for (int i = 0; i < borders(r); i++)
        for (int up = 0; up < 2; up++) {
            const border *b = border_at(r, i);
            if (b->given[up] && lm_lane_wait(b->lane[up], b->given[up], e))
                return e->code;
        }
    return LM_OK;
}

lm_code lm_pipe_runner_run(lm_pipe_runner *r, lm_err *e)
{
    const size_t n = row_of(r)->n;
    const double began = lm_now();
    memset(r->asked, 0, n * sizeof *r->asked);
    memset(r->comes, 0, n * sizeof *r->comes);
    for (size_t k = 0; k < n; k++)
        if (run_step(r, k, e))
            return e->code;
    if (wait_given(r, e))
        return e->code;
    r->use.all += lm_now() - began;
    return LM_OK;
}

lm_code lm_pipe_runner_forward(lm_pipe_runner *r, const lm_pipe_work *w, lm_err *e)
{
    for (int k = 0; k < r->p->stages; k++) {
        const lm_pipe_step s = { .stage = (int16_t)k, .kind = LM_PIPE_F };
        const bool has_next = k + 1 < r->p->stages;
        uint64_t last = 0;
        if (r->of[0][k] != r->rank)
            continue;
        border *in = k > 0 ? &r->border[0][k - 1] : NULL, *out = has_next ? &r->border[0][k] : NULL;
        in = in && in->lane[0] ? in : NULL;
        out = out && out->lane[0] ? out : NULL;
        if ((in && (take_parts(w, in, k - 1, false, 0, &last, e) ||
                    lm_lane_wait(in->lane[0], last, e))) ||
            w->compute(w->ctx, &s, 0, e) || (out && give_parts(r, w, out, k, false, 0, e)))
            return e->code;
        if (!out && has_next)
            hand_over(w, k, false, 0, 0);
    }
    return wait_given(r, e);
}

/* ---- life ---- */

/* Both ranks of a border that are not the same. */
static lm_code open_border(lm_pipe_runner *r, lm_comm *c, int way, int at, lm_err *e)
{
    const int above = r->of[way][at], below = r->of[way][at + 1];
    const bool here = above != below && (r->rank == above || r->rank == below);
    for (int up = 0; up < 2; up++) {
        border *b = &r->border[way][at];
        if (lm_comm_split(c, here ? 0 : -1, r->rank == above ? 0 : 1, &b->comm[up], e))
            return e->code;
        const bool sends = r->rank == (up ? below : above);
        if (here && lm_lane_new(b->comm[up], 1 - lm_comm_rank(b->comm[up]), sends, &b->lane[up], e))
            return e->code;
    }
    return LM_OK;
}

static lm_code make_slots(lm_pipe_runner *r, int stage, lm_err *e)
{
    if (lm_pipeline_slots(r->p, stage, r->rank, &r->slots[stage], e) || !r->slots[stage] ||
        lm_alloc_n(&r->micro[stage], (size_t)r->slots[stage], sizeof **r->micro, "a schedule", e))
        return e->code;
    for (int i = 0; i < r->slots[stage]; i++)
        r->micro[stage][i] = -1;
    return LM_OK;
}

static lm_code open_way(lm_pipe_runner *r, lm_comm *c, int way, lm_err *e)
{
    const size_t n = (size_t)r->p->stages;
    if (lm_alloc_n(&r->of[way], n, sizeof *r->of[way], "a schedule", e) ||
        lm_alloc_n(&r->border[way], n, sizeof *r->border[way], "a schedule", e))
        return e->code;
    lm_pipeline_ranks(r->p, way, r->of[way]);
    for (int k = 0; k + 1 < r->p->stages; k++)
        if (open_border(r, c, way, k, e))
            return e->code;
    return LM_OK;
}

static lm_code open_runner(lm_pipe_runner *r, lm_comm *c, lm_err *e)
{
    const size_t n = (size_t)r->p->stages;
    if (lm_comm_size(c) != r->p->ranks)
        return lm_fail(e, LM_EBUG, "pipeline", NULL, "%d ranks run a schedule of %d",
                       lm_comm_size(c), r->p->ranks);
    if (lm_alloc_n(&r->micro, n, sizeof *r->micro, "a schedule", e) ||
        lm_alloc_n(&r->slots, n, sizeof *r->slots, "a schedule", e) ||
        lm_alloc_n(&r->comes, row_of(r)->n, sizeof *r->comes, "a schedule", e) ||
        lm_alloc_n(&r->asked, row_of(r)->n, sizeof *r->asked, "a schedule", e))
        return e->code;
    for (int k = 0; k < r->p->stages; k++)
        if (make_slots(r, k, e))
            return e->code;
    for (int way = 0; way < r->ways; way++)
        if (open_way(r, c, way, e))
            return e->code;
    return LM_OK;
}

lm_code lm_pipe_runner_new(const lm_pipeline *p, const lm_pipe_work *w, lm_comm *c,
                           lm_pipe_runner **out, lm_err *e)
{
    lm_pipe_runner *r = NULL;
    *out = NULL;
    if (lm_alloc_n(&r, 1, sizeof *r, "a schedule", e))
        return e->code;
    r->p = p;
    r->w = w;
    r->rank = lm_comm_rank(c);
    r->ways = lm_pipeline_ways(p);
    if (open_runner(r, c, e)) {
        lm_pipe_runner_free(r);
        return e->code;
    }
    *out = r;
    return LM_OK;
}

void lm_pipe_runner_free(lm_pipe_runner *r)
{
    if (!r)
        return;
    for (int way = 0; way < r->ways; way++) {
        for (int k = 0; r->border[way] && k + 1 < r->p->stages; k++)
            for (int up = 0; up < 2; up++) {
                lm_lane_free(r->border[way][k].lane[up]);
                lm_comm_free(r->border[way][k].comm[up]);
            }
        lm_free(r->border[way]);
        lm_free(r->of[way]);
    }
    for (int k = 0; r->micro && k < r->p->stages; k++)
        lm_free(r->micro[k]);
    lm_free(r->micro);
    lm_free(r->slots);
    lm_free(r->comes);
    lm_free(r->asked);
    lm_free(r);
}

lm_pipe_use lm_pipe_runner_used(const lm_pipe_runner *r)
{
    return r->use;
}

void lm_pipe_runner_patience(lm_pipe_runner *r, double seconds)
{
    for (int i = 0; i < borders(r); i++)
        for (int up = 0; up < 2; up++)
            if (border_at(r, i)->comm[up])
                lm_comm_patience(border_at(r, i)->comm[up], seconds);
}
