/* SPDX-License-Identifier: Apache-2.0 */
/* pool.c -- pages over three tiers: lists of idle pages, and moves that make room. */
#include "base/mem.h"
#include "kv/pool_impl.h"

enum { MOST_PAGES = 1 << 30, CHAIN = LM_TIERS, LOOK = 8 };
/* CHAIN: moves that one place needs at most.  LOOK: cached pages among which one that was never hit goes first. */

typedef struct {
    lm_tier tier;
    int32_t place; /* -1: no room */
} spot;

static const spot NO_ROOM = { LM_TIER_DEVICE, -1 };

/* --- lists --- */

static void add_last(lm_pool *p, int32_t page, status s)
{
    page_state *g = &p->page[page];
    page_list *l = &p->tier[g->tier].list[s];
    g->status = (uint8_t)s;
    g->prev = l->last;
    g->next = -1;
    *(l->last < 0 ? &l->first : &p->page[l->last].next) = page;
    l->last = page;
    l->n++;
}

static void unlink_page(lm_pool *p, int32_t page)
{
    page_state *g = &p->page[page];
    page_list *l = &p->tier[g->tier].list[g->status];
    *(g->prev < 0 ? &l->first : &p->page[g->prev].next) = g->next;
    *(g->next < 0 ? &l->last : &p->page[g->next].prev) = g->prev;
    l->n--;
    g->status = PINNED;
}

static void free_place(lm_pool *p, spot at)
{
    tier_state *t = &p->tier[at.tier];
    if (t->closed)
        t->closed++;
    else
        t->free[t->n_stack++] = at.place;
}

/* A free place; the first time in the order of their numbers. */
static int32_t take_place(tier_state *t)
{
    return t->n_stack ? t->free[--t->n_stack] : (int32_t)t->unused++;
}

static spot spot_of(const page_state *g)
{
    return (spot){ (lm_tier)g->tier, g->place };
}

/* The number and the place of a page without references are free again. */
static void release(lm_pool *p, int32_t page)
{
    page_state *g = &p->page[page];
    free_place(p, spot_of(g));
    *g = (page_state){ .status = FREE, .place = -1, .next = p->reuse };
    p->reuse = page + 1;
}

static void discard(lm_pool *p, int32_t page)
{
    if (p->forget)
        p->forget(p->ctx, page);
    p->page[page].keep = p->page[page].hit = false;
}

/* A page without pins goes to the list where it belongs. */
static void list_idle(lm_pool *p, int32_t page)
{
    page_state *g = &p->page[page];
    if (!g->refs && g->keep && p->tier[g->tier].closed)
        discard(p, page);
    if (g->refs)
        add_last(p, page, PARKED);
    else if (g->keep)
        add_last(p, page, CACHED);
    else
        release(p, page);
}

/* --- making room --- */

static void add_move(lm_pool *p, int32_t page, spot from, spot to)
{
    p->move[p->n_moves++] = (lm_kv_move){ page, from.tier, to.tier, from.place, to.place };
}

static bool may_move(const lm_pool *p, int64_t pages)
{
    return (p->read ? 0 : p->n_moves) + CHAIN * pages <= p->most_moves;
}

static void begin_moves(lm_pool *p)
{
    if (p->read)
        p->n_moves = 0;
    p->read = false;
}

static spot room(lm_pool *p, int tier, bool displace);

static void lower(lm_pool *p, int32_t page, spot to)
{
    page_state *g = &p->page[page];
    status s = (status)g->status;
    add_move(p, page, spot_of(g), to);
    unlink_page(p, page);
    g->tier = (uint8_t)to.tier;
    g->place = to.place;
    add_last(p, page, s);
}

static spot empty_parked(lm_pool *p, int tier)
{
    int32_t page = p->tier[tier].list[PARKED].first;
    spot from = spot_of(&p->page[page]), to = room(p, tier + 1, true);
    if (to.place < 0)
        return NO_ROOM;
    lower(p, page, to);
    return from;
}

/* The cached page that was released first, or one soon after it that need not be moved. */
static int32_t cheapest(const lm_pool *p, int tier)
{
    int32_t first = p->tier[tier].list[CACHED].first, page = first;
    for (int i = 0; i < LOOK && page >= 0 && !p->tidies; i++, page = p->page[page].next)
        if (!p->page[page].hit)
            return page;
    return first;
}

/* The cached page is discarded where no lower tier has room, if it was never hit, and with a page that it follows. */
static spot empty_cached(lm_pool *p, int tier)
{
    int32_t page = cheapest(p, tier);
    page_state *g = &p->page[page];
    spot from = spot_of(g);

    unlink_page(p, page); /* so that the calls below do not release it */
    spot to = g->hit || p->tidies ? room(p, tier + 1, false) : NO_ROOM;
    if (to.place < 0)
        discard(p, page);
    if (g->keep) {
        add_last(p, page, CACHED);
        lower(p, page, to);
        return from;
    }
    if (to.place >= 0)
        free_place(p, to);
    release(p, page);
    return room(p, tier, false);
}

/* A place of this tier, or of a lower one if this has none at all; parked pages go down for it only
 * if displace. */
static spot room(lm_pool *p, int tier, bool displace)
{
    for (; tier < LM_TIERS; tier++) {
        tier_state *t = &p->tier[tier];
        if (t->closed || !t->size)
            continue;
        if (pool_free(t))
            return (spot){ (lm_tier)tier, take_place(t) };
        if (t->list[CACHED].n)
            return empty_cached(p, tier);
        if (displace && t->list[PARKED].n) {
            spot at = empty_parked(p, tier);
            if (at.place >= 0)
                return at;
        }
        if (tier == LM_TIER_DEVICE)
            break;
    }
    return NO_ROOM;
}

void lm_pool_hit(lm_pool *p, int32_t page)
{
    p->page[page].hit = true;
}

void lm_pool_tidy(lm_pool *p, int64_t most)
{
    const tier_state *t = &p->tier[LM_TIER_DEVICE];
    int64_t stop = lm_pool_pending(p) + most;
    p->tidies = true;
    while (pool_free(t) <= t->size / 8 && t->list[CACHED].n && lm_pool_below(p) && may_move(p, 1) &&
           lm_pool_pending(p) + CHAIN - 1 <= stop) {
        begin_moves(p);
        free_place(p, empty_cached(p, LM_TIER_DEVICE));
    }
    p->tidies = false;
}

int64_t lm_pool_below(const lm_pool *p)
{
    int64_t n = 0;
    for (int i = LM_TIER_HOST; i < LM_TIERS; i++)
        n += pool_free(&p->tier[i]) + p->tier[i].list[CACHED].n;
    return n;
}

/* Places of the device that can be had while `busy` of its parked pages stay. */
static int64_t available(const lm_pool *p, int64_t busy)
{
    const tier_state *t = &p->tier[LM_TIER_DEVICE];
    int64_t below = lm_pool_below(p), parked = t->list[PARKED].n - busy;
    return pool_free(t) + t->list[CACHED].n + (parked < below ? parked : below);
}

/* --- pages --- */

static int32_t new_page(lm_pool *p, spot at)
{
    int32_t page = p->reuse ? p->reuse - 1 : (int32_t)p->unused++;
    page_state *g = &p->page[page];
    if (p->reuse)
        p->reuse = g->next;
    *g = (page_state){ .refs = 1, .pins = 1, .place = at.place, .status = PINNED };
    return page;
}

int32_t lm_pool_take(lm_pool *p)
{
    if (!may_move(p, 1))
        return -1;
    begin_moves(p);
    spot at = room(p, LM_TIER_DEVICE, true);
    return at.place < 0 ? -1 : new_page(p, at);
}

int32_t lm_pool_own(lm_pool *p, int32_t page)
{
    page_state *g = &p->page[page];
    if (g->refs == 1 && !g->keep)
        return page;
    if (!may_move(p, 2))
        return -1;
    int32_t copy = lm_pool_take(p);
    if (copy >= 0) {
        add_move(p, copy, spot_of(g), spot_of(&p->page[copy]));
        lm_pool_unpin(p, page);
        lm_pool_drop(p, page);
    }
    return copy;
}

void lm_pool_ref(lm_pool *p, int32_t page)
{
    page_state *g = &p->page[page];
    if (g->status == CACHED) {
        unlink_page(p, page);
        add_last(p, page, PARKED);
    }
    g->refs++;
}

void lm_pool_drop(lm_pool *p, int32_t page)
{
    page_state *g = &p->page[page];
    if (--g->refs == 0) {
        unlink_page(p, page);
        list_idle(p, page);
    }
}

void lm_pool_unpin(lm_pool *p, int32_t page)
{
    if (--p->page[page].pins == 0)
        list_idle(p, page);
}

/* Pages of the list that are parked on the device, and pages that are elsewhere. */
static void count_idle(const lm_pool *p, const int32_t *page, int64_t n, int64_t *here,
                       int64_t *elsewhere)
{
    *here = *elsewhere = 0;
    for (int64_t i = 0; i < n; i++) {
        const page_state *g = &p->page[page[i]];
        *here += g->tier == LM_TIER_DEVICE && g->status == PARKED;
        *elsewhere += g->tier != LM_TIER_DEVICE;
    }
}

bool lm_pool_fits(const lm_pool *p, const int32_t *page, int64_t n, int64_t more)
{
    int64_t here, elsewhere;
    count_idle(p, page, n, &here, &elsewhere);
    return available(p, here) >= elsewhere + more && may_move(p, elsewhere + more);
}

bool lm_pool_pin(lm_pool *p, const int32_t *page, int64_t n)
{
    if (!lm_pool_fits(p, page, n, 0))
        return false;
    begin_moves(p);
    for (int64_t i = 0; i < n; i++)
        if (p->page[page[i]].pins++ == 0)
            unlink_page(p, page[i]);
    for (int64_t i = 0; i < n; i++) {
        page_state *g = &p->page[page[i]];
        if (g->tier == LM_TIER_DEVICE)
            continue;
        spot from = spot_of(g), to = room(p, LM_TIER_DEVICE, true);
        add_move(p, page[i], from, to);
        free_place(p, from);
        g->tier = LM_TIER_DEVICE;
        g->place = to.place;
    }
    return true;
}

void lm_pool_keep(lm_pool *p, int32_t page, bool keep)
{
    page_state *g = &p->page[page];
    g->keep = keep;
    if (!keep && g->status == CACHED) {
        unlink_page(p, page);
        release(p, page);
    }
}

void lm_pool_on_discard(lm_pool *p, void (*forget)(void *ctx, int32_t page), void *ctx)
{
    p->forget = forget;
    p->ctx = ctx;
}

void lm_pool_close(lm_pool *p, lm_tier tier)
{
    tier_state *t = &p->tier[tier];
    if (tier == LM_TIER_DEVICE || t->closed)
        return;
    t->closed = 1 + pool_free(t);
    while (t->list[CACHED].n) {
        int32_t page = t->list[CACHED].first;
        unlink_page(p, page);
        discard(p, page);
        release(p, page);
    }
}

/* --- what there is --- */

lm_tier lm_pool_tier(const lm_pool *p, int32_t page)
{
    return (lm_tier)p->page[page].tier;
}

int32_t lm_pool_place(const lm_pool *p, int32_t page)
{
    return p->page[page].place;
}

int32_t lm_pool_refs(const lm_pool *p, int32_t page)
{
    return p->page[page].refs;
}

int32_t lm_pool_pins(const lm_pool *p, int32_t page)
{
    return p->page[page].pins;
}

int64_t lm_pool_size(const lm_pool *p, lm_tier tier)
{
    return tier == LM_TIERS ? p->n : p->tier[tier].size;
}

int64_t lm_pool_used(const lm_pool *p, lm_tier tier)
{
    const tier_state *t = &p->tier[tier];
    return t->size - (t->closed ? t->closed - 1 : pool_free(t));
}

lm_pool_count lm_pool_counts(const lm_pool *p, lm_tier tier)
{
    const tier_state *t = &p->tier[tier];
    return (lm_pool_count){ pool_free(t), t->list[CACHED].n, t->list[PARKED].n };
}

int64_t lm_pool_moves(lm_pool *p, const lm_kv_move **out)
{
    begin_moves(p);
    p->read = true;
    *out = p->move;
    return p->n_moves;
}

int64_t lm_pool_pending(const lm_pool *p)
{
    return p->read ? 0 : p->n_moves;
}

/* All pages of the device may be exchanged in a step, and exchanged again. */
static int64_t most_moves(const int64_t pages[LM_TIERS])
{
    return 4 * CHAIN * pages[LM_TIER_DEVICE] + 64;
}

size_t lm_pool_page_cost(void)
{
    return sizeof(page_state) + sizeof(int32_t);
}

lm_code lm_pool_new(const int64_t pages[LM_TIERS], lm_pool **out, lm_err *e)
{
    int64_t n = 0;
    *out = NULL;
    for (int i = 0; i < LM_TIERS; i++) {
        if (pages[i] < (i == LM_TIER_DEVICE) || pages[i] > MOST_PAGES - n)
            return lm_fail(e, LM_EUSAGE, "page pool", NULL, "cannot have %lld pages in a tier",
                           (long long)pages[i]);
        n += pages[i];
    }
    lm_pool *p = NULL;
    if (lm_alloc_n(&p, 1, sizeof *p, "page pool", e))
        return e->code;
    p->n = n;
    for (int i = 0; i < LM_TIERS; i++)
        p->tier[i].size = pages[i];
    p->most_moves = most_moves(pages);
    if (lm_lazy_alloc(&p->page, (size_t)n, sizeof *p->page, "page pool", e) ||
        lm_lazy_alloc(&p->move, (size_t)p->most_moves, sizeof *p->move, "page pool", e))
        goto fail;
    for (int i = 0; i < LM_TIERS; i++) {
        tier_state *t = &p->tier[i];
        t->list[CACHED] = t->list[PARKED] = (page_list){ -1, -1, 0 };
        if (lm_lazy_alloc(&t->free, (size_t)pages[i], sizeof *t->free, "page pool", e))
            goto fail;
    }
    *out = p;
    return LM_OK;
fail:
    lm_pool_free(p);
    return e->code;
}

void lm_pool_free(lm_pool *p)
{
    if (!p)
        return;
    for (int i = 0; i < LM_TIERS; i++)
        lm_lazy_free(p->tier[i].free, (size_t)p->tier[i].size, sizeof(int32_t));
    lm_lazy_free(p->page, (size_t)p->n, sizeof *p->page);
    lm_lazy_free(p->move, (size_t)p->most_moves, sizeof *p->move);
    lm_free(p);
}
