/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_trace.c -- the time line of one step, of every rank with the clock of rank 0. */
#include <stdio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/clock.h"
#include "train/trainer_impl.h"

lm_code trainer_trace_open(lm_trainer *t, lm_err *e)
{
    const int rank = t->io.comm ? lm_comm_rank(t->io.comm) : 0;
    char name[32] = "train";
    if (!t->io.trace)
        return LM_OK;
    if (t->io.comm)
        snprintf(name, sizeof name, "rank %d", rank);
    if ((t->leads && lm_out_open(t->io.trace, t->io.force, &t->trace_out, e)) ||
        lm_trace_new(name, 1 + rank, &t->trace, e))
        return e->code;
    for (int i = 0; i < LM_PHASE_UPDATE; i++)
        lm_trace_row(t->trace, i, lm_phase_name((lm_phase)i));
    lm_trace_row(t->trace, TRACE_OPTIMIZER, "optimizer");
    lm_trace_row(t->trace, TRACE_DATA, "data");
    if (t->leads) {
        lm_trace_row(t->trace, TRACE_CHECKPOINT, "checkpoint");
        lm_trace_row(t->trace, TRACE_WRITER, "checkpoint writer");
    }
    if (t->io.comm) {
        lm_trace_row(t->trace, TRACE_COMM, "communication");
        lm_trace_row(t->trace, TRACE_HIDDEN, "communication, hidden");
    }
    if (t->gatherer)
        lm_trace_row(t->trace, TRACE_AHEAD, "weights, hidden");
    return LM_OK;
}

/* The ranks of one machine have one clock. */
static lm_code set_zero(lm_trainer *t, lm_err *e)
{
    lm_comm *c = t->io.comm;
    double zero = lm_now(), ahead = 0;
    const bool far = c && t->o.ranks_here > 0 && t->o.ranks_here < lm_comm_size(c);
    if (c && ((far && lm_comm_clock(c, lm_now, &ahead, e)) ||
              lm_comm_broadcast(c, &zero, sizeof zero, 0, e)))
        return e->code;
    lm_trace_zero(t->trace, zero + ahead);
    return LM_OK;
}

lm_code trainer_trace_begin(lm_trainer *t, lm_err *e)
{
    t->tracing = t->trace && !t->traced &&
                 (t->r.steps_run == 2 || (t->r.steps_run < 2 && t->s.step + 1 == t->o.steps));
    if (!t->tracing)
        return LM_OK;
    return set_zero(t, e) || lm_program_trace(t->program, t->trace, e) ? e->code : LM_OK;
}

void trainer_trace_exchange(lm_trainer *t, int hidden, const char *what, double began, double ended,
                            double waiting)
{
    if (t->tracing && began < waiting)
        lm_trace_span(t->trace, hidden, what, began, ended < waiting ? ended : waiting);
    if (t->tracing && ended > waiting)
        lm_trace_span(t->trace, TRACE_COMM, what, began > waiting ? began : waiting, ended);
}

lm_code trainer_trace_end(lm_trainer *t, lm_err *e)
{
    if (!t->tracing)
        return LM_OK;
    t->tracing = false;
    t->traced = true;
    return lm_program_trace(t->program, NULL, e);
}

/* On rank 0. */
static lm_code take_from(lm_trainer *t, int rank, uint64_t bytes, lm_err *e)
{
    char *text = NULL;
    lm_code rc = lm_alloc_n(&text, bytes + 1, 1, "the trace of another rank", e);
    rc = rc ? rc : lm_comm_recv(t->io.comm, rank, text, bytes, e);
    if (!rc)
        lm_trace_take(t->trace, text, bytes);
    lm_free(text);
    return rc;
}

lm_code trainer_trace_merge(lm_trainer *t, lm_err *e)
{
    lm_comm *c = t->io.comm;
    const char *text = NULL;
    size_t len = 0;
    uint64_t mine = 0, *all = NULL;
    if (!c || !t->traced || t->trace_merged)
        return LM_OK;
    t->trace_merged = true;
    if (!t->leads && lm_trace_give(t->trace, &text, &len, e))
        return e->code;
    mine = len;
    lm_code rc = lm_comm_gather_each(c, &mine, sizeof mine, (void *)&all, e);
    if (!rc && !t->leads)
        rc = lm_comm_send(c, 0, text, len, e);
    for (int r = 1; t->leads && !rc && r < lm_comm_size(c); r++)
        rc = take_from(t, r, all[r], e);
    lm_free(all);
    if (!t->leads) {
        lm_trace_free(t->trace);
        t->trace = NULL;
    }
    return rc;
}

void trainer_trace_saved(lm_trainer *t)
{
    double begin, end;
    if (!t->trace || !t->trace_writing)
        return;
    lm_ckpt_span(t->place->ckpt, &begin, &end);
    if (end > begin)
        lm_trace_span(t->trace, TRACE_WRITER, "write", begin, end);
    t->trace_writing = false;
}

lm_code trainer_write_trace(lm_trainer *t, bool end, lm_err *e)
{
    if (!t->leads || !t->trace || !t->traced || (t->trace_writing && !end && t->place->saving >= 0))
        return LM_OK;
    trainer_trace_saved(t);
    lm_out *out = t->trace_out;
    lm_code rc = lm_trace_write(t->trace, out, e);
    t->trace_out = NULL;
    lm_trace_free(t->trace);
    t->trace = NULL;
    if (!rc)
        return lm_out_commit(out, e);
    lm_out_drop(out);
    return rc;
}
