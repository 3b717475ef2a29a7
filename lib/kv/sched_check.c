/* SPDX-License-Identifier: Apache-2.0 */
/* sched_check.c -- pages, pins and slots of all sequences, recounted. */
#include "base/mem.h"
#include "kv/sched_impl.h"

typedef struct {
    int32_t *refs, *pins; /* by page */
    uint8_t *slot;
    int64_t active, kept;
} census;

static lm_code bad(lm_err *e, int64_t request, const char *what)
{
    return lm_fail(e, LM_EBUG, "scheduler", NULL, "request %lld %s", (long long)request, what);
}

static lm_code check_seq(const lm_sched *s, int32_t i, census *c, lm_err *e)
{
    const lm_seq *q = &s->seq[i];
    bool active = sched_active(q);
    if (q->used > q->known || q->known > q->most || q->pages > sched_pages_of(s, q->most) ||
        q->pages < sched_pages_of(s, q->used))
        return bad(e, i, "has wrong counts");
    if (q->status == WAITING && (q->pages || q->used || q->slot >= 0))
        return bad(e, i, "waits and has pages or a slot");
    if ((q->slot >= 0) != (active || (q->status == PARKED && s->o.state)))
        return bad(e, i, "has a slot, or no slot, wrongly");
    if (q->slot >= 0 && c->slot[q->slot]++)
        return bad(e, i, "shares its slot");
    c->active += active;
    c->kept += q->status == PARKED && q->slot >= 0;
    for (int64_t j = 0; j < q->pages; j++) {
        c->refs[q->page[j]]++;
        c->pins[q->page[j]] += active;
        if (active && q->place[j] != lm_pool_place(s->pool, q->page[j]))
            return bad(e, i, "has a wrong place in its table");
    }
    return LM_OK;
}

/* A state has its pages in the index, or a request that will add them. */
static lm_code check_states(const lm_sched *s, lm_err *e)
{
    for (int64_t i = 0; i < s->o.snapshots; i++) {
        const lm_snapshot *x = &s->snapshot[i];
        const lm_seq *q = x->request < 0 ? NULL : &s->seq[x->request];
        if (x->used && (x->rows < 1 || x->rows % s->o.chunk || (!q && x->at.page < 0) ||
                        (q && (q->status == WAITING || q->used < x->rows))))
            return lm_fail(e, LM_EBUG, "scheduler", NULL, "state %lld belongs to no rows",
                           (long long)i);
    }
    return LM_OK;
}

static lm_code check_all(const lm_sched *s, census *c, lm_err *e)
{
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger)
        if (check_seq(s, i, c, e))
            return e->code;
    for (int64_t i = 0; i < s->slots; i++)
        if (c->slot[s->slot[i]]++)
            return lm_fail(e, LM_EBUG, "scheduler", NULL, "slot %lld is free and in use",
                           (long long)s->slot[i]);
    if (c->active != s->active || c->kept != s->kept || c->active > s->o.sequences)
        return lm_fail(e, LM_EBUG, "scheduler", NULL, "a count of sequences is wrong");
    for (int32_t i = 0; i < lm_pool_size(s->pool, LM_TIERS); i++)
        if (c->refs[i] != lm_pool_refs(s->pool, i) || c->pins[i] != lm_pool_pins(s->pool, i))
            return lm_fail(e, LM_EBUG, "scheduler", NULL, "references of page %d are wrong",
                           (int)i);
    return check_states(s, e) ? e->code : lm_pool_check(s->pool, e);
}

lm_code lm_sched_check(const lm_sched *s, lm_err *e)
{
    size_t n = (size_t)lm_pool_size(s->pool, LM_TIERS);
    census c = { 0 };
    if (lm_alloc_n(&c.refs, 2 * n, sizeof *c.refs, "recount of pages", e))
        return e->code;
    c.pins = c.refs + n;
    lm_code rc = lm_alloc_n(&c.slot, (size_t)s->o.slots, 1, "recount of slots", e);
    rc = rc ? rc : check_all(s, &c, e);
    lm_free(c.refs);
    lm_free(c.slot);
    return rc;
}
