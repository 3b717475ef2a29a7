/* SPDX-License-Identifier: Apache-2.0 */
/* pool_check.c -- every invariant of a pool, recounted. */
#include "base/mem.h"
#include "kv/pool_impl.h"

/* Times that each place of a tier, and each page in a list, was found. */
typedef struct {
    uint8_t *place[LM_TIERS], *page;
    int64_t used[LM_TIERS];
} census;

static lm_code bad(lm_err *e, int64_t page, const char *what)
{
    return lm_fail(e, LM_EBUG, "page pool", NULL, "page %lld %s", (long long)page, what);
}

static lm_code check_page(const lm_pool *p, int32_t i, census *c, lm_err *e)
{
    const page_state *g = &p->page[i];
    if (g->refs < 0 || g->pins < 0 || g->pins > g->refs)
        return bad(e, i, "has wrong counts");
    if (g->status == FREE)
        return g->refs || g->keep || g->place >= 0 ? bad(e, i, "is free and in use") : LM_OK;
    if (g->status == CACHED && (g->refs || !g->keep))
        return bad(e, i, "is cached and in use");
    if (g->status == PARKED && (!g->refs || g->pins))
        return bad(e, i, "is parked and in use");
    if (g->status == PINNED && (!g->pins || g->tier != LM_TIER_DEVICE))
        return bad(e, i, "is in no list, and not pinned on the device");
    if (g->place < 0 || g->place >= p->tier[g->tier].unused)
        return bad(e, i, "has no place");
    if (c->place[g->tier][g->place]++)
        return bad(e, i, "shares its place with another");
    c->used[g->tier]++;
    return LM_OK;
}

static lm_code check_list(const lm_pool *p, int tier, status s, census *c, lm_err *e)
{
    const page_list *l = &p->tier[tier].list[s];
    int32_t last = -1;
    int64_t n = 0;
    for (int32_t i = l->first; i >= 0; last = i, i = p->page[i].next, n++)
        if (c->page[i]++ || p->page[i].status != s || p->page[i].tier != tier ||
            p->page[i].prev != last)
            return bad(e, i, "is in a wrong list");
    return n != l->n || last != l->last ? bad(e, last, "ends a list of wrong length") : LM_OK;
}

static lm_code check_tier(const lm_pool *p, int tier, census *c, lm_err *e)
{
    const tier_state *t = &p->tier[tier];
    if (t->unused < 0 || t->unused > t->size)
        return lm_fail(e, LM_EBUG, "page pool", NULL, "places of tier %d are counted wrongly",
                       tier);
    for (int64_t i = 0; i < t->n_stack && !t->closed; i++)
        if (t->free[i] < 0 || t->free[i] >= t->unused || c->place[tier][t->free[i]]++)
            return lm_fail(e, LM_EBUG, "page pool", NULL, "place %d of tier %d is free and in use",
                           (int)t->free[i], tier);
    if (pool_free(t) + c->used[tier] + (t->closed ? t->closed - 1 : 0) != t->size)
        return lm_fail(e, LM_EBUG, "page pool", NULL, "places of tier %d are lost", tier);
    lm_code rc = check_list(p, tier, CACHED, c, e);
    return rc ? rc : check_list(p, tier, PARKED, c, e);
}

static lm_code check_all(const lm_pool *p, census *c, lm_err *e)
{
    int64_t n = 0;
    for (int32_t i = 0; i < p->unused; i++)
        if (check_page(p, i, c, e))
            return e->code;
    for (int i = 0; i < LM_TIERS; i++)
        if (check_tier(p, i, c, e))
            return e->code;
    for (int32_t i = p->reuse; i > 0 && n <= p->n; i = p->page[i - 1].next, n++)
        if (p->page[i - 1].status != FREE || c->page[i - 1]++)
            return bad(e, i - 1, "is in the list of free numbers, and in use");
    for (int32_t i = 0; i < p->unused; i++)
        if (c->page[i] != (p->page[i].status != PINNED))
            return bad(e, i, "is in no list");
    return LM_OK;
}

lm_code lm_pool_check(const lm_pool *p, lm_err *e)
{
    census c = { 0 };
    uint8_t *all = NULL;
    if (lm_alloc_n(&all, (size_t)p->n * 2, 1, "recount of pages", e))
        return e->code;
    c.page = all;
    all += p->n;
    for (int i = 0; i < LM_TIERS; all += p->tier[i++].size)
        c.place[i] = all;
    lm_code rc = check_all(p, &c, e);
    lm_free(c.page);
    return rc;
}
