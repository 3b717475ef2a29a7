/* SPDX-License-Identifier: Apache-2.0 */
/* sched.c -- requests of a scheduler: adding, forking, ending, pausing. */
#include "kv/sched.h"

#include <string.h>

#include "base/mem.h"
#include "kv/sched_impl.h"

/* --- the list of sequences, by age --- */

/* After `at`, -1: as the youngest. */
static void insert_after(lm_sched *s, int32_t i, int32_t at)
{
    lm_seq *q = &s->seq[i];
    q->older = at < 0 ? s->youngest : at;
    q->younger = at < 0 ? -1 : s->seq[at].younger;
    *(q->older < 0 ? &s->oldest : &s->seq[q->older].younger) = i;
    *(q->younger < 0 ? &s->youngest : &s->seq[q->younger].older) = i;
}

static void remove_seq(lm_sched *s, int32_t i)
{
    lm_seq *q = &s->seq[i];
    *(q->older < 0 ? &s->oldest : &s->seq[q->older].younger) = q->younger;
    *(q->younger < 0 ? &s->youngest : &s->seq[q->younger].older) = q->older;
    lm_free(q->ids);
    lm_free(q->page);
    *q = (lm_seq){ .older = s->unused };
    s->unused = i;
}

/* --- statuses --- */

static void free_slot(lm_sched *s, lm_seq *q)
{
    if (q->slot >= 0)
        s->slot[s->slots++] = q->slot;
    q->slot = -1;
}

static void unpin(lm_sched *s, lm_seq *q)
{
    for (int64_t i = q->pages; i-- > 0;)
        lm_pool_unpin(s->pool, q->page[i]);
    s->active--;
}

void sched_park(lm_sched *s, lm_seq *q)
{
    unpin(s, q);
    q->status = PARKED;
    if (s->o.state)
        s->kept++;
    else
        free_slot(s, q);
}

void sched_drop(lm_sched *s, lm_seq *q)
{
    if (sched_active(q))
        unpin(s, q);
    if (q->status == PARKED && q->slot >= 0)
        s->kept--;
    sched_forget_states(s, q);
    while (q->pages > 0)
        lm_pool_drop(s->pool, q->page[--q->pages]);
    free_slot(s, q);
    q->status = WAITING;
    q->used = q->indexed = 0;
    q->last = lm_prefix_root(q->group);
    q->index = s->prefix;
}

/* Pages that only this sequence keeps on the device. */
static int64_t own_pages(const lm_sched *s, const lm_seq *q)
{
    int64_t n = 0;
    for (int64_t i = 0; i < q->pages; i++)
        n += lm_pool_pins(s->pool, q->page[i]) == 1;
    return n;
}

void sched_pause(lm_sched *s, lm_seq *q)
{
    const lm_sched_opts *o = &s->o;
    int64_t own = own_pages(s, q), prompt = q->used < q->prompt ? q->used : q->prompt;
    double rate = o->rate[lm_pool_size(s->pool, LM_TIER_HOST) ? LM_TIER_HOST : LM_TIER_DISK];
    double move = rate > 0 ? 2.0 * (double)own * (double)o->page_bytes / rate : 0;
    double compute = (double)prompt * o->row_seconds + (double)(q->used - prompt) * o->step_seconds;
    bool slot = !o->state || s->kept < o->slots - o->sequences;

    if (slot && lm_pool_below(s->pool) >= own && (compute <= 0 || move <= compute)) {
        sched_park(s, q);
        s->count.paused++;
    } else {
        s->count.dropped++;
        s->count.dropped_rows += q->used;
        sched_drop(s, q);
    }
}

/* --- requests --- */

static lm_code check_size(const lm_sched *s, int64_t prompt, int64_t most_new, lm_err *e)
{
    if (prompt < 1 || most_new < 1)
        return lm_fail(e, LM_EUSAGE, "request", NULL, "needs a token and a token to generate");
    if (prompt > s->o.context)
        return lm_fail(e, LM_EUSAGE, "request", NULL, "has %lld tokens, the context %lld",
                       (long long)prompt, (long long)s->o.context);
    int64_t left = s->o.context - prompt + 1, rows = prompt - 1;
    int64_t need = sched_pages_of(s, rows + (most_new < left ? most_new : left));
    if (need > lm_pool_size(s->pool, LM_TIER_DEVICE))
        return lm_fail(e, LM_ELIMIT, "request", NULL,
                       "needs %lld pages of the cache, which has %lld", (long long)need,
                       (long long)lm_pool_size(s->pool, LM_TIER_DEVICE));
    return LM_OK;
}

static lm_code new_seq(lm_sched *s, const uint32_t *ids, int64_t known, int64_t prompt,
                       int64_t most_new, int32_t group, int32_t after, int32_t *out, lm_err *e)
{
    if (check_size(s, prompt, most_new, e))
        return e->code;
    int64_t left = s->o.context - prompt + 1;
    lm_seq q = { .status = WAITING, .group = group, .known = known, .prompt = prompt, .slot = -1 };
    q.most = prompt + (most_new < left ? most_new : left);
    q.index = s->prefix;
    q.last = lm_prefix_root(group);
    if (q.most < known)
        return lm_fail(e, LM_EUSAGE, "request", NULL, "has more tokens than it may have");
    size_t pages = (size_t)sched_pages_of(s, q.most);
    if (s->unused < 0 && lm_grow(&s->seq, &s->cap, s->n + 1, sizeof *s->seq, "requests", e))
        return e->code;
    if (lm_alloc_n(&q.ids, (size_t)q.most, sizeof *q.ids, "requests", e))
        return e->code;
    if (lm_alloc_n(&q.page, 2 * pages, sizeof *q.page, "requests", e)) {
        lm_free(q.ids);
        return e->code;
    }
    q.place = q.page + pages;
    memcpy(q.ids, ids, (size_t)known * sizeof *ids);
    *out = s->unused;
    if (*out < 0)
        *out = (int32_t)s->n++;
    else
        s->unused = s->seq[*out].older;
    s->seq[*out] = q;
    insert_after(s, *out, after);
    return LM_OK;
}

lm_code lm_sched_add(lm_sched *s, const uint32_t *ids, int64_t n, int64_t most_new, int32_t group,
                     int64_t *request, lm_err *e)
{
    int32_t i;
    if (new_seq(s, ids, n, n, most_new, group, -1, &i, e))
        return e->code;
    *request = i;
    return LM_OK;
}

void sched_copy(lm_sched *s, int64_t from, int64_t to)
{
    if (s->copied)
        s->copies = 0;
    s->copied = false;
    s->copy[s->copies++] = (lm_sched_copy){ from, to };
}

/* The fork has the parent's rows: their pages, and the state of its slot. */
static void share_rows(lm_sched *s, const lm_seq *p, lm_seq *q)
{
    bool run = sched_active(p) && s->active < s->o.sequences && s->slots > 0;
    bool keep = s->kept < s->o.slots - s->o.sequences && s->slots > 0;
    if (p->status == WAITING || (s->o.state && !run && !keep))
        return;
    q->used = p->used;
    q->index = p->index;
    q->last = p->last;
    q->pages = sched_pages_of(s, p->used);
    q->indexed = p->indexed;
    for (int64_t i = 0; i < q->pages; i++) {
        q->page[i] = p->page[i];
        q->place[i] = p->place[i];
        lm_pool_ref(s->pool, q->page[i]);
    }
    q->status = run ? p->status : PARKED;
    if (run) {
        lm_pool_pin(s->pool, q->page, q->pages); /* all are on the device */
        s->active++;
    }
    if (run || s->o.state)
        q->slot = s->slot[--s->slots];
    if (s->o.state) {
        s->kept += !run;
        sched_copy(s, p->slot, q->slot);
    }
}

lm_code lm_sched_fork(lm_sched *s, int64_t parent, int64_t most_new, int64_t *request, lm_err *e)
{
    const lm_seq *p = &s->seq[parent];
    int32_t i;
    size_t copies = (size_t)s->copies + 1 + 4 * (size_t)s->o.sequences; /* those of a step, too */
    if (s->o.state && lm_grow(&s->copy, &s->copy_cap, copies, sizeof *s->copy, "forks", e))
        return e->code;
    if (new_seq(s, p->ids, p->known, p->prompt, most_new, p->group, (int32_t)parent, &i, e))
        return e->code;
    share_rows(s, &s->seq[parent], &s->seq[i]);
    *request = i;
    return LM_OK;
}

void sched_index(lm_sched *s, lm_seq *q)
{
    int64_t written = q->used - s->o.lag, rows = written < q->prompt ? written : q->prompt;
    while (q->index && (q->indexed + 1) * s->o.page <= rows) {
        q->index = lm_prefix_add(s->prefix, q->ids + q->indexed * s->o.page, q->page[q->indexed],
                                 &q->last);
        q->indexed++;
        if (q->index)
            sched_place_state(s, q);
    }
}

void lm_sched_end(lm_sched *s, int64_t request)
{
    sched_index(s, &s->seq[request]);
    sched_drop(s, &s->seq[request]);
    remove_seq(s, (int32_t)request);
}

bool lm_sched_token(lm_sched *s, int64_t request, uint32_t id, bool ends)
{
    lm_seq *q = &s->seq[request];
    q->ids[q->known++] = id;
    if (!ends && q->known < q->most)
        return true;
    lm_sched_end(s, request);
    return false;
}

void lm_sched_lost(lm_sched *s, int32_t page)
{
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger) {
        lm_seq *q = &s->seq[i];
        for (int64_t j = 0; j < q->pages; j++)
            if (q->page[j] == page) {
                s->count.dropped++;
                s->count.dropped_rows += q->used;
                sched_drop(s, q);
            }
    }
    if (s->prefix)
        lm_prefix_forget(s->prefix, page);
}

void lm_sched_estimate(lm_sched *s, double row_seconds, double step_seconds,
                       const double rate[LM_TIERS])
{
    s->o.row_seconds = row_seconds;
    s->o.step_seconds = step_seconds;
    memcpy(s->o.rate, rate, sizeof s->o.rate);
}

lm_sched_stats lm_sched_count(const lm_sched *s)
{
    lm_sched_stats c = s->count;
    c.running = s->active;
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger)
        c.waiting += !sched_active(&s->seq[i]);
    return c;
}

lm_pool *lm_sched_pool(lm_sched *s)
{
    return s->pool;
}

/* --- the scheduler --- */

static lm_code check_opts(const lm_sched_opts *o, lm_err *e)
{
    static const int64_t most = INT32_MAX;
    if (o->page < 1 || o->rows < 1 || o->sequences < 1 || o->context < 1 || o->chunk < 1 ||
        o->page > most || o->rows > most || o->sequences > most || o->context > most)
        return lm_fail(e, LM_EUSAGE, "scheduler", NULL, "a size is not between 1 and 2^31 - 1");
    if (o->chunk > o->rows || (o->share && o->chunk > 1 && o->chunk % o->page))
        return lm_fail(e, LM_EUSAGE, "scheduler", NULL,
                       "chunks of %lld rows do not fit pages of %lld and steps of %lld",
                       (long long)o->chunk, (long long)o->page, (long long)o->rows);
    if (o->slots > most || (o->slots && o->slots < o->sequences))
        return lm_fail(e, LM_EUSAGE, "scheduler", NULL, "has fewer slots than sequences");
    if (o->lag < 0 || (o->lag && !o->state))
        return lm_fail(e, LM_EUSAGE, "scheduler", NULL,
                       "only a state has rows that are coded later");
    if (o->snapshots < 0 || o->snapshots > most || (o->state && o->share) != (o->snapshots > 0) ||
        (o->snapshots && o->chunk % o->page))
        return lm_fail(e, LM_EUSAGE, "scheduler", NULL,
                       "sequences with a state share prompts by states that are kept after chunks "
                       "of whole pages");
    return LM_OK;
}

size_t lm_sched_page_cost(int64_t tokens)
{
    return lm_pool_page_cost() + lm_prefix_page_cost(tokens);
}

lm_code lm_sched_new(const lm_sched_opts *o, const int64_t pages[LM_TIERS], lm_sched **out,
                     lm_err *e)
{
    lm_sched *s = NULL;
    *out = NULL;
    if (check_opts(o, e) || lm_alloc_n(&s, 1, sizeof *s, "scheduler", e))
        return e->code;
    s->o = *o;
    if (!o->slots)
        s->o.slots = o->sequences;
    s->oldest = s->youngest = s->unused = -1;
    if (lm_pool_new(pages, &s->pool, e) ||
        (o->share && lm_prefix_new(s->pool, o->page, &s->prefix, e)) ||
        lm_alloc_n(&s->part, (size_t)o->sequences, sizeof *s->part, "scheduler", e) ||
        lm_alloc_n(&s->slot, (size_t)s->o.slots, sizeof *s->slot, "scheduler", e) ||
        sched_open_states(s, e)) {
        lm_sched_free(s);
        return e->code;
    }
    for (s->slots = 0; s->slots < s->o.slots; s->slots++)
        s->slot[s->slots] = s->o.slots - 1 - s->slots;
    *out = s;
    return LM_OK;
}

void lm_sched_free(lm_sched *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->n; i++) {
        lm_free(s->seq[i].ids);
        lm_free(s->seq[i].page);
    }
    lm_free(s->seq);
    lm_free(s->part);
    lm_free(s->copy);
    lm_free(s->snapshot);
    if (s->snapshot_at)
        lm_lazy_free(s->snapshot_at, (size_t)lm_pool_size(s->pool, LM_TIERS), sizeof(int32_t));
    lm_free(s->slot);
    lm_prefix_free(s->prefix);
    lm_pool_free(s->pool);
    lm_free(s);
}
