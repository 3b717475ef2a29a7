/* SPDX-License-Identifier: Apache-2.0 */
/* sched_state.c -- states of sequences at the ends of chunks of prompts, for other prompts that begin alike.
 *
 * A state after p rows goes with the pages of these rows.  The index has these pages only when all of their rows are
 * written, o.lag rows later; until then the state belongs to the request that computed it.  When all slots are in use, the
 * state that was not used for the longest time makes room. */
#include "base/mem.h"
#include "kv/sched_impl.h"

static bool placed(const lm_sched *s, int64_t i)
{
    const lm_snapshot *x = &s->snapshot[i];
    return x->used && x->request < 0 && lm_prefix_of(s->prefix, x->at.page).serial == x->at.serial;
}

/* The state of an entry of the index; -1: none. */
static int32_t state_at(const lm_sched *s, lm_prefix_entry at)
{
    int32_t i = s->snapshot_at[at.page];
    bool valid = i >= 0 && placed(s, i) && s->snapshot[i].at.page == at.page &&
                 s->snapshot[i].at.serial == at.serial;
    return valid ? i : -1;
}

/* A slot for a state: one without, or the one that was used first. */
static int64_t make_slot(const lm_sched *s)
{
    int64_t oldest = 0;
    for (int64_t i = 0; i < s->o.snapshots; i++) {
        const lm_snapshot *x = &s->snapshot[i];
        if (!x->used || (x->request < 0 && !placed(s, i)))
            return i;
        if (x->used < s->snapshot[oldest].used)
            oldest = i;
    }
    return oldest;
}

/* The state after q's rows if another prompt has left it; -1: none. */
static int32_t known_state(const lm_sched *s, const lm_seq *q)
{
    lm_prefix_entry at = q->last;
    int64_t T = s->o.page, n = q->indexed;
    for (; (n + 1) * T <= q->used; n++) {
        at = lm_prefix_after(s->prefix, at, q->ids + n * T);
        if (at.page < 0)
            return -1;
    }
    return state_at(s, at);
}

void sched_keep_state(lm_sched *s, lm_seq *q)
{
    if (!s->o.snapshots || !q->stepped || !q->index || q->used > q->prompt || q->used % s->o.chunk)
        return;
    int32_t known = known_state(s, q);
    if (known >= 0) {
        s->snapshot[known].used = ++s->clock;
        return;
    }
    int64_t i = make_slot(s);
    s->snapshot[i] = (lm_snapshot){ ++s->clock, (int32_t)(q - s->seq), LM_PREFIX_ROOT, q->used };
    sched_copy(s, q->slot, s->o.slots + i);
}

void sched_place_state(lm_sched *s, const lm_seq *q)
{
    const int32_t me = (int32_t)(q - s->seq);
    const int64_t rows = q->indexed * s->o.page;
    if (rows % s->o.chunk)
        return;
    for (int64_t i = 0; i < s->o.snapshots; i++) {
        lm_snapshot *x = &s->snapshot[i];
        if (!x->used || x->request != me || x->rows != rows)
            continue;
        if (state_at(s, q->last) >= 0) {
            x->used = 0;
            return;
        }
        x->request = -1;
        x->at = q->last;
        s->snapshot_at[q->last.page] = (int32_t)i;
        return;
    }
}

void sched_forget_states(lm_sched *s, const lm_seq *q)
{
    const int32_t me = (int32_t)(q - s->seq);
    for (int64_t i = 0; i < s->o.snapshots; i++)
        if (s->snapshot[i].request == me)
            s->snapshot[i].used = 0;
}

int64_t sched_state_rows(const lm_sched *s, const lm_seq *q, int64_t rows)
{
    for (; s->o.state && rows > 0; rows -= s->o.chunk)
        if (state_at(s, lm_prefix_of(s->prefix, q->page[rows / s->o.page - 1])) >= 0)
            break;
    return rows;
}

void sched_take_state(lm_sched *s, const lm_seq *q)
{
    int32_t i = state_at(s, lm_prefix_of(s->prefix, q->page[q->used / s->o.page - 1]));
    s->snapshot[i].used = ++s->clock;
    sched_copy(s, s->o.slots + i, q->slot);
}

lm_code sched_open_states(lm_sched *s, lm_err *e)
{
    int64_t pages = lm_pool_size(s->pool, LM_TIERS);
    if (s->o.state &&
        lm_grow(&s->copy, &s->copy_cap, 4 * (size_t)s->o.sequences, sizeof *s->copy, "states", e))
        return e->code;
    if (!s->o.snapshots)
        return LM_OK;
    if (lm_alloc_n(&s->snapshot, (size_t)s->o.snapshots, sizeof *s->snapshot, "states", e) ||
        lm_lazy_alloc(&s->snapshot_at, (size_t)pages, sizeof *s->snapshot_at, "states", e))
        return e->code;
    return LM_OK;
}
