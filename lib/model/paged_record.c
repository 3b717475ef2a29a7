/* SPDX-License-Identifier: Apache-2.0 */
/* paged_record.c -- the work of a step: its inputs and its graph, as one recording for each number of rows where the backend
 * has recordings.
 *
 * A replay repeats the same copies and launches with the same addresses.  That is enough, because steps of one number of
 * rows differ only in numbers of the inputs' memory: which sequences there are, their rows and pages.  So the copy of the
 * inputs to the device is part of the recording.
 *
 * The first step of a number of rows is launched, as kernels must have run once before they are recorded.  The second
 * one is recorded and replayed.  Steps are launched throughout if the backend refuses a recording
 * (lm_paged_unrecorded has the reason) or while nodes are timed. */
#include "model/paged_impl.h"

static lm_code put_step(void *ctx, lm_err *e)
{
    bucket *s = ctx;
    const lm_step step = { 0 };
    return lm_mirror_push(&s->inputs, s->inputs.bytes, NULL, e) || lm_exec_run(s->x, &step, e)
               ? e->code
               : LM_OK;
}

lm_code paged_run(lm_paged *g, bucket *s, lm_err *e)
{
    lm_exec_span timed;
    if (s->ran && !s->recorded && !g->unrecorded)
        g->unrecorded = !g->b->record_begin || lm_exec_span_at(s->x, 0, &timed) ||
                        lm_record(g->b, put_step, s, &s->recorded, &g->refused);
    s->ran = true;
    g->replayed = s->recorded;
    return s->recorded ? g->b->replay(g->b, s->recorded, g->b->main, e) : put_step(s, e);
}

void paged_forget_recordings(lm_paged *g)
{
    for (int64_t k = 0; k < g->n_models; k++)
        for (int i = 0; i < g->n_buckets; i++)
            if (g->of[k]->bucket[i].recorded)
                g->b->recording_free(g->b, g->of[k]->bucket[i].recorded);
}

const lm_recording *lm_paged_recorded(const lm_paged *g)
{
    return g->replayed;
}

const char *lm_paged_unrecorded(const lm_paged *g)
{
    return g->refused.code ? g->refused.what : NULL;
}
