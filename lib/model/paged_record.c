/* SPDX-License-Identifier: Apache-2.0 */
/* paged_record.c -- the work of a step: its inputs and its graph, as one recording for each number of rows where the backend
 * has recordings.  Only numbers in memory change between steps: which sequences there are, their rows and pages. */
#include "model/paged_impl.h"

typedef struct {
    lm_paged *g;
    bucket *s;
} step_of;

static lm_code put_step(void *ctx, lm_err *e)
{
    const step_of *x = ctx;
    const lm_step step = { 0 };
    return lm_mirror_push(&x->s->inputs, x->s->inputs.bytes, NULL, e) ||
                   lm_exec_run(x->s->x, &step, e)
               ? e->code
               : LM_OK;
}

lm_code paged_run(lm_paged *g, bucket *s, lm_err *e)
{
    step_of x = { g, s };
    lm_exec_span timed;
    /* A recording is made after the kernels have run once, and not of steps whose nodes are timed. */
    if (s->ran && !s->recorded && !g->unrecorded)
        g->unrecorded = !g->b->record_begin || lm_exec_span_at(s->x, 0, &timed) ||
                        lm_record(g->b, put_step, &x, &s->recorded, &g->refused);
    s->ran = true;
    g->replayed = s->recorded;
    return s->recorded ? g->b->replay(g->b, s->recorded, g->b->main, e) : put_step(&x, e);
}

void paged_forget_recordings(lm_paged *g)
{
    for (int i = 0; i < g->n_buckets; i++)
        if (g->bucket[i].recorded)
            g->b->recording_free(g->b, g->bucket[i].recorded);
}

const lm_recording *lm_paged_recorded(const lm_paged *g)
{
    return g->replayed;
}

const char *lm_paged_unrecorded(const lm_paged *g)
{
    return g->refused.code ? g->refused.what : NULL;
}
