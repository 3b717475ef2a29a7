/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_v.c -- ZB-V: two stages a rank, placed like a V, that keep every rank busy in the memory of 1F1B.
 *
 * Rank r has stage r, on the way down, and stage 2p-1-r, on the way up.  The order is found by running it: in units of time
 * in which any step takes one, each rank chooses the next among its steps that are ready.
 *     no forward left: I, else W
 *     behind an I: W, so that memory falls before it rises again
 *     else F, unless the last step was one and an I is ready; of the way up first
 *     else I, else W
 * At most 2p stages of micro-batches wait for their backward on a rank.  The way up never lacks a place: its first forward is
 * ready when a rank has begun fewer. */
#include <string.h>

#include "base/mem.h"
#include "parallel/pipeline_impl.h"

enum { DOWN, UP };

/* How far a rank is. */
typedef struct {
    int64_t f[2], i[2]; /* micro-batches of each way that are begun */
    int64_t w;
    size_t behind; /* where in the row the search for the I of the next W begins */
    int last;      /* kind of the last step; -1: none */
    int turn;      /* the way of the last I */
} walker;

/* Everything a choice reads.  `other` is how far all ranks were when the unit began: what they do in it is not ready yet. */
typedef struct {
    lm_pipeline *p;
    walker *own;
    const walker *other;
    int rank;
} choice;

static int stage_of(const lm_pipeline *p, int rank, int way)
{
    return way == DOWN ? rank : 2 * p->ranks - 1 - rank;
}

/* Micro-batches that stage s has forward; that it has backward. */
static int64_t forward_of(const choice *c, int s)
{
    return s < c->p->ranks ? c->other[s].f[DOWN] : c->other[2 * c->p->ranks - 1 - s].f[UP];
}

static int64_t backward_of(const choice *c, int s)
{
    return s < c->p->ranks ? c->other[s].i[DOWN] : c->other[2 * c->p->ranks - 1 - s].i[UP];
}

static bool forward_ready(const choice *c, int way)
{
    int s = stage_of(c->p, c->rank, way);
    return c->own->f[way] < c->p->micros && (s == 0 || forward_of(c, s - 1) > c->own->f[way]);
}

static bool input_ready(const choice *c, int way)
{
    int s = stage_of(c->p, c->rank, way);
    return c->own->i[way] < c->own->f[way] &&
           (s == 2 * c->p->ranks - 1 || backward_of(c, s + 1) > c->own->i[way]);
}

static void step_forward(const choice *c, int way)
{
    lm_pipe_add(c->p, c->rank, LM_PIPE_F, c->own->f[way]++, stage_of(c->p, c->rank, way));
    c->own->last = LM_PIPE_F;
}

static void step_input(const choice *c, int way)
{
    lm_pipe_add(c->p, c->rank, LM_PIPE_I, c->own->i[way]++, stage_of(c->p, c->rank, way));
    c->own->last = LM_PIPE_I;
    c->own->turn = way;
}

/* The W of the first I of the row that has none yet. */
static void step_weights(const choice *c)
{
    const lm_pipe_row *row = &c->p->row[c->rank];

    while (row->step[c->own->behind].kind != LM_PIPE_I)
        c->own->behind++;
    lm_pipe_step s = row->step[c->own->behind++];
    lm_pipe_add(c->p, c->rank, LM_PIPE_W, s.micro, s.stage);
    c->own->last = LM_PIPE_W;
    c->own->w++;
}

/* One unit of a rank; false: nothing is ready. */
static bool step(const choice *c)
{
    const walker *o = c->own;
    int input = input_ready(c, !o->turn) ? !o->turn : input_ready(c, o->turn) ? o->turn : -1;
    int64_t waiting = o->f[DOWN] + o->f[UP] - o->w, most = 2 * c->p->ranks;
    bool left =
        o->f[DOWN] < c->p->micros || o->f[UP]<c->p->micros, pending = o->i[DOWN] + o->i[UP]> o->w;
    int forward = waiting == most          ? -1
                  : forward_ready(c, UP)   ? UP
                  : forward_ready(c, DOWN) ? DOWN
                                           : -1;

    if (left && pending && o->last == LM_PIPE_I)
        step_weights(c);
    else if (forward >= 0 && (o->last != LM_PIPE_F || input < 0))
        step_forward(c, forward);
    else if (input >= 0)
        step_input(c, input);
    else if (pending)
        step_weights(c);
    else
        return false;
    return true;
}

lm_code lm_pipe_make_zb_v(lm_pipeline *p, lm_err *e)
{
    walker *now = NULL, *before = NULL;
    bool moved = true;

    if (lm_alloc_n(&now, (size_t)p->ranks, sizeof *now, "ranks of a schedule", e) ||
        lm_alloc_n(&before, (size_t)p->ranks, sizeof *before, "ranks of a schedule", e)) {
        lm_free(now);
        return e->code;
    }
    for (int r = 0; r < p->ranks; r++)
        now[r] = (walker){ .last = -1, .turn = UP };
    while (moved) {
        moved = false;
        memcpy(before, now, (size_t)p->ranks * sizeof *now);
        for (int r = 0; r < p->ranks; r++)
            moved |= step(&(choice){ .p = p, .own = &now[r], .other = before, .rank = r });
    }
    lm_free(now);
    lm_free(before);
    return LM_OK;
}
