/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_share.c -- ranks along dp that share the update of a step (ZeRO): gradients to the ranks whose parameters they are
 * of, and new parameters from these to all.
 *
 * Each rank has a contiguous range of the blocks (lm_update_bounds).  Parameters travel as graphs read them: those that are
 * computed with in BF16 in BF16, and the others, of which each rank has all, in F32. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "train/trainer_impl.h"

/* Elements [from, end) of a block, of which rank r has what is in its range: their bytes. */
static void parts_of(const lm_trainer *t, int64_t from, int64_t end, size_t element, size_t *bytes)
{
    const int64_t *bound = lm_update_bounds(t->program->update);
    for (int r = 0; r < t->ranks; r++) {
        const int64_t lo = bound[r] > from ? bound[r] : from,
                      hi = bound[r + 1] < end ? bound[r + 1] : end;
        bytes[r] = lo < hi ? (size_t)(hi - lo) * element : 0;
    }
}

static size_t before(const lm_trainer *t, const size_t *n)
{
    size_t sum = 0;
    for (int r = 0; r < t->rank; r++)
        sum += n[r];
    return sum;
}

bool trainer_shares(const lm_trainer *t)
{
    return lm_update_bounds(t->program->update);
}

/* What is not this rank's of a range that is added up is needed no longer. */
static void drop_others(const lm_trainer *t, int64_t from, int64_t end)
{
    const int64_t *bound = lm_update_bounds(t->program->update) + t->rank;
    lm_store_drop(t->s.store, from, bound[0] < end ? bound[0] : end);
    lm_store_drop(t->s.store, bound[1] > from ? bound[1] : from, end);
}

lm_code trainer_share_take(lm_trainer *t, int64_t from, int64_t end, lm_err *e)
{
    float *g = (float *)lm_store_flat(t->s.store, LM_KEPT_GRAD, 0) + from;
    lm_links *l = t->sums;
    if (!trainer_shares(t)) {
        l->all_reduce(l, g, g, (size_t)(end - from), LM_DTYPE_F32, LM_EXCHANGE_SUM);
    } else {
        parts_of(t, from, end, 1, t->parts_of_ranks);
        l->reduce_scatter(l, g, g + before(t, t->parts_of_ranks), t->parts_of_ranks, LM_DTYPE_F32,
                          LM_EXCHANGE_SUM);
        if (!l->failure.code)
            drop_others(t, from, end);
    }
    if (l->failure.code)
        *e = l->failure;
    return e->code;
}

lm_code trainer_share_reduce(lm_trainer *t, lm_err *e)
{
    bool done;
    if (!t->b->host_memory)
        t->summed += (double)lm_store_find(t->s.store, LM_KEPT_GRAD, 0)->bytes;
    if (trainer_ahead_end(t, &done, e) || done)
        return e->code;
    return trainer_share_take(t, 0, lm_store_find(t->s.store, LM_KEPT_GRAD, 0)->count, e);
}

/* ---- parameters and samples ---- */

/* Elements [from, end) of a block, from the ranks that have them. */
static lm_code gather_range(lm_trainer *t, void *data, size_t element, int64_t from, int64_t end,
                            lm_err *e)
{
    size_t *bytes = t->parts_of_ranks;
    char *at = (char *)data + (size_t)from * element;
    parts_of(t, from, end, element, bytes);
    return lm_comm_all_gather(t->along[LM_AXIS_DP], at + before(t, bytes), at, bytes, e);
}

lm_code trainer_share_gather(lm_trainer *t, lm_err *e)
{
    const lm_store *s = t->s.store;
    const lm_store_block *low = lm_store_find(s, LM_KEPT_DERIVED, 0),
                         *p = lm_store_find(s, LM_KEPT_PARAM, 0);
    const double began = lm_now();
    int64_t from, end;
    if (!trainer_shares(t) || t->o.zero >= 3) /* then graphs gather them */
        return LM_OK;
    if (low && gather_range(t, low->data, sizeof(uint16_t), 0, low->count, e))
        return e->code;
    for (int i = 0; lm_store_read_run(s, &i, &from, &end);)
        if (gather_range(t, p->data, sizeof(float), from, end, e))
            return e->code;
    if (t->tracing)
        lm_trace_span(t->trace, TRACE_COMM, "parameters", began, lm_now());
    return LM_OK;
}

/* Samples, of which each rank has those in its range. */
lm_code trainer_share_samples(lm_trainer *t, float *sample, lm_err *e)
{
    const lm_update *u = t->program->update;
    size_t *bytes = t->parts_of_ranks;
    for (int r = 0; r < t->ranks; r++)
        bytes[r] = (size_t)(lm_update_first_sample(u, r + 1) - lm_update_first_sample(u, r)) *
                   sizeof *sample;
    return lm_comm_all_gather(t->along[LM_AXIS_DP], (char *)sample + before(t, bytes), sample,
                              bytes, e);
}
