/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_fit.c -- which schedules can be run, and what their ranks need. */
#include <string.h>

#include "base/mem.h"
#include "parallel/pipeline_run.h"

/* ---- stages and their ranks ---- */

int lm_pipeline_way(const lm_pipeline *p, int ways, int64_t micro)
{
    return ways == 2 && micro >= p->micros / 2;
}

static const lm_pipe_row *row_with(const lm_pipeline *p, int stage, int32_t micro, int *rank)
{
    for (*rank = 0; *rank < p->ranks; ++*rank)
        for (size_t k = 0; k < p->row[*rank].n; k++)
            if (p->row[*rank].step[k].stage == stage && p->row[*rank].step[k].micro == micro)
                return &p->row[*rank];
    return NULL;
}

int lm_pipeline_ways(const lm_pipeline *p)
{
    int first, last;
    return row_with(p, 0, 0, &first) != row_with(p, 0, p->micros - 1, &last) ? 2 : 1;
}

void lm_pipeline_ranks(const lm_pipeline *p, int way, int *rank)
{
    const int ways = lm_pipeline_ways(p);
    for (int r = 0; r < p->ranks; r++)
        for (size_t k = 0; k < p->row[r].n; k++)
            if (lm_pipeline_way(p, ways, p->row[r].step[k].micro) == way)
                rank[p->row[r].step[k].stage] = r;
}

bool lm_pipeline_is_apart(const lm_pipeline *p)
{
    for (int r = 0; r < p->ranks; r++)
        for (size_t k = 0; k < p->row[r].n; k++)
            if (p->row[r].step[k].kind == LM_PIPE_W)
                return true;
    return false;
}

/* ---- what can be run ---- */

/* How far a stage is on a rank: its next micro-batch forward, backward to its inputs, and to its weights. */
typedef struct {
    int32_t next[3];
} progress;

typedef struct {
    const lm_pipeline *p;
    int ways;
    int *rank[2]; /* by way: [stages] */
    progress *at[2];
} checker;

static lm_code check_order(const lm_pipe_step *s, progress *at, lm_err *e)
{
    static const bool does[4][3] = { [LM_PIPE_F] = { true },
                                     [LM_PIPE_B] = { false, true, true },
                                     [LM_PIPE_I] = { false, true },
                                     [LM_PIPE_W] = { false, false, true } };
    for (int i = 0; i < 3; i++) {
        if (does[s->kind][i] && s->micro != at->next[i])
            return lm_fail(
                e, LM_EUSAGE, "schedule", "let each stage take micro-batches in their order",
                "stage %d computes %c of micro-batch %d, where %d is next: sums would "
                "change their order",
                s->stage, lm_pipe_letter((lm_pipe_kind)s->kind), (int)s->micro, (int)at->next[i]);
        at->next[i] += does[s->kind][i];
    }
    return LM_OK;
}

static lm_code check_step(const checker *x, const lm_pipe_step *s, int r, lm_err *e)
{
    const int way = lm_pipeline_way(x->p, x->ways, s->micro), rank = x->rank[way][s->stage];
    if (rank == r)
        return check_order(s, &x->at[way][s->stage], e);
    return lm_fail(e, LM_EUSAGE, "schedule",
                   "give each stage one rank, or one for each half of the micro-batches",
                   "micro-batches%s are on ranks %d and %d in stage %d",
                   x->ways == 1 ? ""
                   : way        ? " of the second half"
                                : " of the first half",
                   r < rank ? r : rank, r < rank ? rank : r, s->stage);
}

/* Gradients of copies are added up block by block. */
static lm_code check_twins(const checker *x, lm_err *e)
{
    const int n = x->p->stages;
    for (int s = 0; x->ways == 2 && s < n; s++) {
        const int a = x->rank[0][s], b = x->rank[1][s];
        bool twins = a != b && b == x->rank[0][n - 1 - s] && a == x->rank[1][n - 1 - s];
        for (int k = 0; k < n; k++)
            twins &= (x->rank[0][k] == a) == (x->rank[1][k] == b);
        if (!twins)
            return lm_fail(e, LM_EUSAGE, "schedule",
                           "let the second half go through the ranks of the first from end to end",
                           "the copies of stage %d are on ranks %d and %d, which have other stages "
                           "besides",
                           s, a < b ? a : b, a < b ? b : a);
    }
    return LM_OK;
}

static lm_code check_rows(checker *x, lm_err *e)
{
    for (int way = 0; way < x->ways; way++) {
        lm_pipeline_ranks(x->p, way, x->rank[way]);
        for (int k = 0; k < x->p->stages; k++)
            for (int i = 0; i < 3; i++)
                x->at[way][k].next[i] = way ? x->p->micros / 2 : 0;
    }
    for (int r = 0; r < x->p->ranks; r++)
        for (size_t k = 0; k < x->p->row[r].n; k++)
            if (check_step(x, &x->p->row[r].step[k], r, e))
                return e->code;
    return check_twins(x, e);
}

lm_code lm_pipeline_check_run(const lm_pipeline *p, lm_err *e)
{
    checker x = { .p = p, .ways = lm_pipeline_ways(p) };
    for (int way = 0; way < x.ways && !e->code; way++)
        if (!lm_alloc_n(&x.rank[way], (size_t)p->stages, sizeof *x.rank[way], "a schedule", e))
            lm_alloc_n(&x.at[way], (size_t)p->stages, sizeof *x.at[way], "a schedule", e);
    if (!e->code)
        check_rows(&x, e);
    for (int way = 0; way < x.ways; way++) {
        lm_free(x.rank[way]);
        lm_free(x.at[way]);
    }
    return e->code;
}

/* ---- slots ---- */

/* The micro-batches of a stage between two events of a row, of which the first happens one step ahead.  handed: the row has the
 * stage before it, too, whose results it hands over.  first: micro-batch of the way. */
static int count_slots(const lm_pipe_row *row, int stage, bool handed, int32_t first)
{
    int now = 0, most = 0;
    int32_t forward = first; /* behind the last micro-batch that has a slot */
    for (size_t k = 0; k < row->n; k++) {
        for (size_t i = k; i < row->n && i <= k + 1; i++) {
            const lm_pipe_step *s = &row->step[i];
            if (s->kind == LM_PIPE_F && s->micro >= forward &&
                (s->stage == stage || (handed && i == k && s->stage == stage - 1))) {
                forward = s->micro + 1;
                now++;
            }
        }
        most = now > most ? now : most;
        const lm_pipe_step *s = &row->step[k];
        now -= s->stage == stage && (s->kind == LM_PIPE_B || s->kind == LM_PIPE_W);
    }
    return most;
}

lm_code lm_pipeline_slots(const lm_pipeline *p, int stage, int rank, int *slots, lm_err *e)
{
    const int ways = lm_pipeline_ways(p);
    int *of = NULL;
    *slots = 0;
    if (lm_alloc_n(&of, (size_t)p->stages, sizeof *of, "a schedule", e))
        return e->code;
    for (int way = 0; way < ways && !*slots; way++) {
        lm_pipeline_ranks(p, way, of);
        if (of[stage] == rank)
            *slots = count_slots(&p->row[rank], stage, stage > 0 && of[stage - 1] == rank,
                                 way ? p->micros / 2 : 0);
    }
    lm_free(of);
    return LM_OK;
}
