/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_time.c -- run a pipeline schedule in thought: when each step begins, and what waits. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "parallel/pipeline.h"

/* When what others wait for is done: forwards and gradients of inputs of each stage and micro-batch, [S][m]; -1: not yet.
 * With the rank of either. */
typedef struct {
    const lm_pipeline *p;
    const lm_pipe_cost *cost;
    double *f, *b;
    int32_t *rank; /* [S][m], of the forward */
    size_t *next;  /* [ranks] index of the next step */
    double *free;  /* [ranks] when the rank has done the one before it */
    int64_t *held; /* [S] micro-batches that are forward, not yet wholly backward */
    /* Ranks, plus one, in lists that end with 0: `ready` may go on, waiting [2][S][m] do when f or b of the cell is there.
     * Each rank is in one list at most, and follow [ranks] is the next one in it. */
    int32_t ready, *waiting, *follow;
    lm_pipe_times *out;
} clockwork;

static size_t cell(const clockwork *k, int32_t stage, int32_t micro)
{
    return (size_t)stage * (size_t)k->p->micros + (size_t)micro;
}

/* When a step's operands are there; -1: that is not known yet. */
static double operands(const clockwork *k, int r, const lm_pipe_step *s)
{
    size_t at = cell(k, s->stage, s->micro);
    double own, from;
    int32_t other;

    switch ((lm_pipe_kind)s->kind) {
    case LM_PIPE_F:
        if (s->stage == 0)
            return 0;
        from = k->f[at - (size_t)k->p->micros];
        other = k->rank[at - (size_t)k->p->micros];
        return from < 0 ? -1 : from + (other == r ? 0 : k->cost[s->stage - 1].comm);
    case LM_PIPE_W:
        return k->b[at];
    default:
        own = k->f[at];
        if (own < 0 || s->stage + 1 == k->p->stages)
            return own;
        from = k->b[at + (size_t)k->p->micros];
        other = k->rank[at + (size_t)k->p->micros];
        return from < 0 ? -1 : fmax(own, from + (other == r ? 0 : k->cost[s->stage + 1].comm));
    }
}

static size_t cells_of(const clockwork *k)
{
    return (size_t)k->p->stages * (size_t)k->p->micros;
}

/* Of a step whose operands are not all there, the list of those that wait for one of them. */
static int32_t *list_for(const clockwork *k, const lm_pipe_step *s)
{
    size_t at = cell(k, s->stage, s->micro), micros = (size_t)k->p->micros;

    if (s->kind == LM_PIPE_F)
        return &k->waiting[at - micros];
    if (s->kind == LM_PIPE_W)
        return &k->waiting[cells_of(k) + at];
    return &k->waiting[k->f[at] < 0 ? at : cells_of(k) + at + micros];
}

static void put_in(clockwork *k, int32_t *list, int r)
{
    k->follow[r] = *list;
    *list = r + 1;
}

/* The first rank of a list, taken out; -1: it is empty. */
static int take_out(clockwork *k, int32_t *list)
{
    int r = *list - 1;

    if (r >= 0)
        *list = k->follow[r];
    return r;
}

double lm_pipe_took(const lm_pipe_cost *c, lm_pipe_kind kind)
{
    switch (kind) {
    case LM_PIPE_F:
        return c->f;
    case LM_PIPE_I:
        return c->b;
    case LM_PIPE_W:
        return c->w;
    default:
        return c->b + c->w;
    }
}

static double duration(const clockwork *k, const lm_pipe_step *s)
{
    return lm_pipe_took(&k->cost[s->stage], (lm_pipe_kind)s->kind);
}

static void finish(clockwork *k, int r, const lm_pipe_step *s, double end)
{
    size_t at = cell(k, s->stage, s->micro);
    int32_t *list = &k->waiting[s->kind == LM_PIPE_F ? at : cells_of(k) + at];

    if (s->kind == LM_PIPE_W)
        return;
    if (s->kind == LM_PIPE_F) {
        k->f[at] = end;
        k->rank[at] = r;
    } else {
        k->b[at] = end;
    }
    for (int other; (other = take_out(k, list)) >= 0;)
        put_in(k, &k->ready, other);
}

/* Run the rank's next step, with the one that is joined to it, if all operands are there; otherwise it waits for one. */
static bool run_next(clockwork *k, int r)
{
    const lm_pipe_row *row = &k->p->row[r];
    size_t at = k->next[r], n = 1;
    double from = k->free[r], took = 0;

    if (at == row->n)
        return false;
    while (at + n < row->n && row->step[at + n - 1].joined)
        n++;
    for (size_t i = at; i < at + n; i++) {
        double there = operands(k, r, &row->step[i]);

        if (there < 0) {
            put_in(k, list_for(k, &row->step[i]), r);
            return false;
        }
        from = fmax(from, there);
        took += duration(k, &row->step[i]);
    }
    double start = from;
    for (size_t i = at; i < at + n; i++) {
        k->out->start[r][i] = start;
        start += duration(k, &row->step[i]);
        finish(k, r, &row->step[i], from + took);
    }
    k->out->busy[r] += took;
    k->free[r] = from + took;
    k->next[r] = at + n;
    return true;
}

/* The most that a rank holds at a time follows from its row alone. */
static void count_held(clockwork *k, int r)
{
    const lm_pipe_row *row = &k->p->row[r];
    int32_t all = 0;

    for (size_t i = 0; i < row->n; i++) {
        int32_t s = row->step[i].stage;

        if (row->step[i].kind == LM_PIPE_F) {
            k->held[s]++;
            all++;
        }
        if (all > k->out->inflight[r])
            k->out->inflight[r] = all;
        if (k->held[s] > k->out->stage_inflight[s])
            k->out->stage_inflight[s] = (int32_t)k->held[s];
        if (row->step[i].kind == LM_PIPE_B || row->step[i].kind == LM_PIPE_W) {
            k->held[s]--;
            all--;
        }
    }
}

/* LM_EFORMAT if a rank has steps left. */
static lm_code check_all_run(const clockwork *k, lm_err *e)
{
    for (int r = 0; r < k->p->ranks; r++)
        if (k->next[r] < k->p->row[r].n) {
            const lm_pipe_step *s = &k->p->row[r].step[k->next[r]];

            return lm_fail(e, LM_EFORMAT, "schedule", "change the order of the rows",
                           "rank %d waits without end: step %zu, %c of micro-batch %" PRId32
                           " in stage %d, needs what a rank computes "
                           "only behind it",
                           r, k->next[r], lm_pipe_letter((lm_pipe_kind)s->kind), s->micro,
                           s->stage);
        }
    return LM_OK;
}

static void add_up(clockwork *k)
{
    lm_pipe_times *t = k->out;

    for (int r = 0; r < k->p->ranks; r++) {
        double first = k->p->row[r].n ? t->start[r][0] : 0, span = k->free[r] - first;

        count_held(k, r);
        t->idle[r] = span - t->busy[r];
        t->makespan = fmax(t->makespan, k->free[r]);
        t->ideal = fmax(t->ideal, t->busy[r]);
        t->span = fmax(t->span, span);
    }
}

static lm_code allocate(clockwork *k, lm_err *e)
{
    const lm_pipeline *p = k->p;
    lm_pipe_times *t = k->out;
    size_t ranks = (size_t)p->ranks, cells = 0;
    const char *what = "times of a pipeline schedule";

    if (!lm_mul_ok((size_t)p->stages, (size_t)p->micros, &cells))
        return lm_fail(e, LM_ELIMIT, "schedule", NULL, "too many stages and micro-batches");
    if (lm_alloc_n(&t->start, ranks, sizeof *t->start, what, e) ||
        lm_alloc_n(&t->busy, ranks, sizeof *t->busy, what, e) ||
        lm_alloc_n(&t->idle, ranks, sizeof *t->idle, what, e) ||
        lm_alloc_n(&t->inflight, ranks, sizeof *t->inflight, what, e) ||
        lm_alloc_n(&t->stage_inflight, (size_t)p->stages, sizeof *t->stage_inflight, what, e) ||
        lm_alloc_n(&k->held, (size_t)p->stages, sizeof *k->held, what, e) ||
        lm_alloc_n(&k->f, cells, sizeof *k->f, what, e) ||
        lm_alloc_n(&k->b, cells, sizeof *k->b, what, e) ||
        lm_alloc_n(&k->rank, cells, sizeof *k->rank, what, e) ||
        lm_alloc_n(&k->waiting, 2 * cells, sizeof *k->waiting, what, e) ||
        lm_alloc_n(&k->follow, ranks, sizeof *k->follow, what, e) ||
        lm_alloc_n(&k->next, ranks, sizeof *k->next, what, e) ||
        lm_alloc_n(&k->free, ranks, sizeof *k->free, what, e))
        return e->code;
    for (size_t i = 0; i < cells; i++)
        k->f[i] = k->b[i] = -1;
    for (size_t r = 0; r < ranks; r++)
        if (lm_alloc_n(&t->start[r], p->row[r].n, sizeof *t->start[r], what, e))
            return e->code;
    return LM_OK;
}

lm_code lm_pipeline_time(const lm_pipeline *p, const lm_pipe_cost *cost, lm_pipe_times *out,
                         lm_err *e)
{
    clockwork k = { .p = p, .cost = cost, .out = out };

    *out = (lm_pipe_times){ 0 };
    if (!allocate(&k, e)) {
        for (int r = p->ranks - 1; r >= 0; r--)
            put_in(&k, &k.ready, r);
        for (int r; (r = take_out(&k, &k.ready)) >= 0;)
            while (run_next(&k, r))
                continue;
        if (!check_all_run(&k, e))
            add_up(&k);
    }
    lm_free(k.held);
    lm_free(k.f);
    lm_free(k.b);
    lm_free(k.rank);
    lm_free(k.waiting);
    lm_free(k.follow);
    lm_free(k.next);
    lm_free(k.free);
    if (e->code)
        lm_pipe_times_fini(out, p->ranks);
    return e->code;
}

void lm_pipe_times_fini(lm_pipe_times *t, int32_t ranks)
{
    for (int32_t r = 0; t->start && r < ranks; r++)
        lm_free(t->start[r]);
    lm_free(t->start);
    lm_free(t->busy);
    lm_free(t->idle);
    lm_free(t->inflight);
    lm_free(t->stage_inflight);
    *t = (lm_pipe_times){ 0 };
}

double lm_pipe_bubble_ideal(const lm_pipe_times *t)
{
    return t->ideal > 0 ? (t->makespan - t->ideal) / t->ideal : 0;
}

double lm_pipe_bubble_total(const lm_pipe_times *t)
{
    return t->makespan > 0 ? (t->makespan - t->ideal) / t->makespan : 0;
}

double lm_pipe_bubble_span(const lm_pipe_times *t)
{
    return t->span > 0 ? (t->span - t->ideal) / t->span : 0;
}
