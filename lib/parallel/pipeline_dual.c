/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_dual.c -- DualPipe and DualPipeV: eight phases of a rank, in the numbers of steps of deepseek-ai/DualPipe.
 *
 * A rank has two stages, of way 0 and of way 1, through which micro-batches pass in opposite directions; h counts from the end
 * at which those of way 0 enter, to n - 1, where they turn (V) or meet the others.  F of one way and B of the other are computed
 * together, so that the communication of the one hides behind the products of the other. */
#include "parallel/pipeline_impl.h"

typedef struct {
    lm_pipeline *p;
    int rank, stage[2];
    int64_t f[2], b[2]; /* next micro-batches of each way */
    size_t behind;      /* where in the row the search for the I of the next W begins */
} dual;

static void forward(dual *d, int way)
{
    lm_pipe_add(d->p, d->rank, LM_PIPE_F, d->f[way]++, d->stage[way]);
}

static void backward(dual *d, int way, lm_pipe_kind kind)
{
    lm_pipe_add(d->p, d->rank, kind, d->b[way]++, d->stage[way]);
}

static void weights(dual *d)
{
    const lm_pipe_row *row = &d->p->row[d->rank];

    while (row->step[d->behind].kind != LM_PIPE_I)
        d->behind++;
    lm_pipe_step s = row->step[d->behind++];
    lm_pipe_add(d->p, d->rank, LM_PIPE_W, s.micro, s.stage);
}

static void both(dual *d, int way, bool joined)
{
    forward(d, way);
    d->p->row[d->rank].step[d->p->row[d->rank].n - 1].joined = joined;
    backward(d, !way, LM_PIPE_B);
}

/* steady: pairs of the fourth phase. */
static void make_row(dual *d, int h, int n, int64_t steady)
{
    int k;

    for (k = 0; k < 2 * (n - h - 1); k++)
        forward(d, 0);
    for (k = 0; k <= h; k++) {
        forward(d, 0);
        forward(d, 1);
    }
    for (k = 0; k < n - h - 1; k++) {
        backward(d, 1, LM_PIPE_I);
        weights(d);
        forward(d, 1);
    }
    for (int64_t i = 0; i < steady; i++) {
        both(d, 0, i > 0 || h < n - 1); /* the first backward of all needs the forward before it */
        both(d, 1, true);
    }
    for (k = 0; k < n - h - 1; k++) {
        backward(d, 1, LM_PIPE_B);
        both(d, 1, true);
    }
    for (k = 0; k <= h; k++) {
        backward(d, 1, 2 * k > h ? LM_PIPE_I : LM_PIPE_B);
        backward(d, 0, 2 * k >= h ? LM_PIPE_I : LM_PIPE_B);
    }
    for (k = 0; k < n - h - 1; k++) {
        weights(d);
        backward(d, 0, LM_PIPE_I);
    }
    for (k = 0; k <= h; k++)
        weights(d);
}

lm_code lm_pipe_make_dualpipe(lm_pipeline *p, lm_err *e)
{
    int n = p->ranks / 2;
    int64_t half = p->micros / 2;

    (void)e;
    for (int r = 0; r < p->ranks; r++) {
        bool near = r < n; /* way 0 enters at rank 0 */
        int h = near ? r : p->ranks - 1 - r;
        dual d = { .p = p,
                   .rank = r,
                   .stage = { h, p->ranks - 1 - h },
                   .f = { near ? 0 : half, near ? half : 0 },
                   .b = { near ? 0 : half, near ? half : 0 } };

        make_row(&d, h, n, half - p->ranks + h + 1);
    }
    return LM_OK;
}

lm_code lm_pipe_make_dualpipev(lm_pipeline *p, lm_err *e)
{
    (void)e;
    for (int r = 0; r < p->ranks; r++) {
        dual d = { .p = p, .rank = r, .stage = { r, 2 * p->ranks - 1 - r } };

        make_row(&d, r, p->ranks, p->micros - 2 * p->ranks + r + 1);
    }
    return LM_OK;
}
