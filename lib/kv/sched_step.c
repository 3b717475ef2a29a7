/* SPDX-License-Identifier: Apache-2.0 */
/* sched_step.c -- a step: pages for rows of sequences that run, sequences that enter, rows. */
#include <string.h>

#include "kv/sched_impl.h"

enum { LEAST_PROMPT = 16, LEAST_BUCKET = 16 }; /* rows */
enum {
    TIDY = 16,
    MOST_TIDY = 64
}; /* a 16th of a step's time is for moves ahead of the need; pages */

/* --- room --- */

static void drop_one(lm_sched *s, lm_seq *q)
{
    s->count.dropped++;
    s->count.dropped_rows += q->used;
    sched_drop(s, q);
}

/* Drop the youngest sequence that waits with pages, except q. */
static bool drop_parked(lm_sched *s, const lm_seq *q)
{
    for (int32_t i = s->youngest; i >= 0; i = s->seq[i].older)
        if (s->seq[i].status == PARKED && &s->seq[i] != q) {
            drop_one(s, &s->seq[i]);
            return true;
        }
    return false;
}

/* Pause the youngest sequence that is younger than *q, or drop one that waits with pages that cannot
 * leave the device.  Without such a sequence pause q, or if q runs alone, drop any that waits with pages.
 * False: q is paused. */
static bool make_room(lm_sched *s, lm_seq *q)
{
    bool stuck = lm_pool_counts(s->pool, LM_TIER_DEVICE).parked > 0;
    for (int32_t i = s->youngest; &s->seq[i] != q; i = s->seq[i].older) {
        lm_seq *victim = &s->seq[i];
        if (sched_active(victim)) {
            sched_pause(s, victim);
            return true;
        }
        if (victim->status == PARKED && stuck) {
            drop_one(s, victim);
            return true;
        }
    }
    if (s->active == 1 && drop_parked(s, q)) /* also pages that q shares and must copy */
        return true;
    sched_pause(s, q);
    return false;
}

/* Pages for all known rows, and those that the next row is written with for this sequence alone. */
static bool prepare(lm_sched *s, lm_seq *q)
{
    int64_t need = sched_pages_of(s, q->known), written = sched_pages_of(s, q->used);
    int64_t at = (q->used > s->o.lag ? q->used - s->o.lag : 0) / s->o.page;
    while (at < written || q->pages < need) {
        bool own = at < written;
        int32_t page = own ? lm_pool_own(s->pool, q->page[at]) : lm_pool_take(s->pool);
        if (page < 0) {
            if (!make_room(s, q))
                return false;
            continue;
        }
        int64_t i = own ? at++ : q->pages++;
        q->page[i] = page;
        q->place[i] = lm_pool_place(s->pool, page);
    }
    return true;
}

/* --- entering --- */

/* Rows of prompt pages that others have computed, at most `rows`; their pages are referenced. */
static void find_pages(lm_sched *s, lm_seq *q, int64_t rows)
{
    q->last = lm_prefix_root(q->group);
    q->pages = lm_prefix_find(s->prefix, q->ids, rows, q->page, &q->last);
    q->indexed = q->pages;
    q->used = q->pages * s->o.page;
}

/* Rows that are worth fetching: whole chunks up to a state, and no page that is computed faster than moved. */
static int64_t good_rows(const lm_sched *s, const lm_seq *q)
{
    const lm_sched_opts *o = &s->o;
    int64_t n = 0;
    for (; n < q->pages; n++) {
        double rate = o->rate[lm_pool_tier(s->pool, q->page[n])];
        bool here = lm_pool_tier(s->pool, q->page[n]) == LM_TIER_DEVICE;
        if (!here && rate > 0 && o->row_seconds > 0 &&
            (double)o->page_bytes / rate > (double)o->page * o->row_seconds)
            break;
    }
    return sched_state_rows(s, q, n * o->page / o->chunk * o->chunk);
}

static void find_beginning(lm_sched *s, lm_seq *q)
{
    int64_t rows = q->prompt < q->known - 1 ? q->prompt : q->known - 1;
    if (s->o.lag && sched_pages_of(s, q->known) >= lm_pool_size(s->pool, LM_TIER_DEVICE))
        return; /* no page for a copy of one that is written again */
    find_pages(s, q, rows);
    int64_t good = good_rows(s, q);
    if (good == q->used)
        return;
    while (q->pages > 0)
        lm_pool_drop(s->pool, q->page[--q->pages]);
    find_pages(s, q, good);
}

/* Of n rows that prompts share with r, those that they can share when r's prompt is computed. */
static int64_t sharable(const lm_sched *s, const lm_seq *r, int64_t n)
{
    int64_t written = r->prompt - s->o.lag;
    return (n < written ? n : written) / s->o.chunk * s->o.chunk;
}

/* True if a sequence is computing pages now that this one could share after it. */
static bool comes_soon(const lm_sched *s, const lm_seq *q)
{
    int64_t T = s->o.page, rows = q->prompt < q->known - 1 ? q->prompt : q->known - 1;
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger) {
        const lm_seq *r = &s->seq[i];
        if (!sched_active(r) || r->group != q->group || r->used >= r->prompt || !r->index)
            continue;
        int64_t most = rows < r->prompt ? rows : r->prompt, n = 0;
        while (n + T <= most && !memcmp(q->ids + n, r->ids + n, (size_t)T * sizeof *q->ids))
            n += T;
        n = s->o.state ? sharable(s, r, n) : n;
        if (n / s->o.chunk * s->o.chunk > q->used && n > r->used - s->o.lag)
            return true;
    }
    return false;
}

bool sched_enter(lm_sched *s, lm_seq *q, int64_t more)
{
    int64_t fresh = sched_pages_of(s, q->known) - q->pages;
    if (s->active == s->o.sequences || (q->slot < 0 && !s->slots) ||
        !lm_pool_fits(s->pool, q->page, q->pages, fresh + more) ||
        !lm_pool_pin(s->pool, q->page, q->pages))
        return false;
    s->active++;
    for (; fresh > 0; fresh--) { /* lm_pool_fits has promised these */
        int32_t page = lm_pool_take(s->pool);
        if (page < 0)
            break;
        q->page[q->pages++] = page;
    }
    for (int64_t i = 0; i < q->pages; i++)
        q->place[i] = lm_pool_place(s->pool, q->page[i]);
    if (q->slot < 0)
        q->slot = s->slot[--s->slots];
    else if (q->status == PARKED)
        s->kept--;
    return true;
}

/* A page of each hundred, and one, stay for the growth of those that run. */
static int64_t reserve(const lm_sched *s)
{
    return s->active ? 1 + (lm_pool_size(s->pool, LM_TIER_DEVICE) + 99) / 100 : 0;
}

/* It runs in this step if its pages are in place without moves that may come after the rows. */
static bool try_enter(lm_sched *s, lm_seq *q, int64_t urgent)
{
    bool fresh = q->status == WAITING;
    int64_t moves = lm_pool_pending(s->pool), hits;
    if (s->active == s->o.sequences)
        return false;
    if (fresh && s->prefix)
        find_beginning(s, q);
    hits = q->pages;
    bool written =
        hits && fresh && s->o.lag; /* pages of the tail will be written again, into copies */
    if ((fresh && s->prefix && comes_soon(s, q)) || !sched_enter(s, q, reserve(s) + written)) {
        if (fresh)
            sched_drop(s, q);
        return false;
    }
    if (fresh) {
        s->count.pages += sched_pages_of(s, q->prompt);
        s->count.hits += hits;
        if (hits && s->o.state)
            sched_take_state(s, q);
    }
    int64_t now = lm_pool_pending(s->pool);
    q->status = !fresh || now > moves || (hits && now > urgent) || written ? LOADING : RUNNING;
    return true;
}

/* In order of age, until one has to wait. */
static void enter_all(lm_sched *s, int64_t urgent)
{
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger) {
        lm_seq *q = &s->seq[i];
        if (sched_active(q))
            continue;
        bool entered = try_enter(s, q, urgent);
        while (!entered && !s->active && drop_parked(s, q))
            entered = try_enter(s, q, urgent);
        if (!entered) {
            s->count.waits++;
            return;
        }
    }
}

/* --- rows --- */

/* Its next row, a generated token, is part of the step. */
static bool generates(const lm_seq *q)
{
    return q->used >= q->prompt && q->known > q->used;
}

static void add_part(lm_sched *s, lm_sched_step *step, int32_t i, int64_t n)
{
    lm_seq *q = &s->seq[i];
    s->part[step->n++] = (lm_sched_part){
        .request = i,
        .slot = q->slot,
        .used = q->used,
        .n = n,
        .kind = q->used < q->prompt ? LM_ROWS_PROMPT : LM_ROWS_TOKEN,
        .last = q->used + n == q->known,
        .ids = q->ids + q->used,
        .table = q->place,
        .pages = sched_pages_of(s, q->used + n),
    };
    step->rows += n;
    q->used += n;
    q->stepped = true;
}

/* Rows of prompts, and a row of those that entered in this step with the whole prompt. */
static void add_prompts(lm_sched *s, lm_sched_step *step)
{
    int64_t left = s->o.rows - step->rows, chunk = s->o.chunk;
    bool first = true;
    if (left < LEAST_PROMPT)
        left = LEAST_PROMPT < s->o.rows ? LEAST_PROMPT : s->o.rows;
    for (int32_t i = s->oldest; i >= 0 && left > 0; i = s->seq[i].younger) {
        lm_seq *q = &s->seq[i];
        int64_t n = generates(q) ? 1 : q->prompt - q->used;
        if (q->status != RUNNING || q->stepped || n <= 0)
            continue;
        if (chunk > 1 && n > chunk - q->used % chunk)
            n = chunk - q->used % chunk;
        if (chunk > 1 && n > left && !first)
            return;
        if (chunk == 1 && n > left)
            n = left;
        add_part(s, step, i, n);
        left -= n;
        first = false;
    }
}

static int64_t bucket_of(const lm_sched *s, int64_t rows)
{
    int64_t n = LEAST_BUCKET;
    while (n < rows)
        n *= 2;
    if (n > s->o.rows)
        n = rows > s->o.rows ? s->o.rows + s->o.sequences : s->o.rows;
    return n;
}

/* The rows of the last step are computed, and pages that were being moved are in place. */
static void end_last_step(lm_sched *s)
{
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger) {
        lm_seq *q = &s->seq[i];
        if (sched_active(q)) {
            sched_keep_state(s, q);
            sched_index(s, q);
        }
        if (q->status == LOADING)
            q->status = RUNNING;
        q->stepped = false;
    }
}

static void plan(lm_sched *s, lm_sched_step *step)
{
    end_last_step(s);
    for (int32_t i = s->oldest; i >= 0; i = s->seq[i].younger) {
        lm_seq *q = &s->seq[i];
        if (q->status == RUNNING && q->known > q->used && prepare(s, q) && generates(q))
            add_part(s, step, i, 1);
    }
    step->urgent = lm_pool_pending(s->pool);
    enter_all(s, step->urgent);
    add_prompts(s, step);
}

/* Moves of cached pages in the shadow of the rows, if no others are there. */
static void tidy(lm_sched *s, const lm_sched_step *step)
{
    const lm_sched_opts *o = &s->o;
    double rate = 0, seconds = 0, n = 1;
    if (!o->beside || lm_pool_pending(s->pool) > step->urgent)
        return;
    for (int i = LM_TIER_HOST; i < LM_TIERS; i++)
        if (lm_pool_size(s->pool, (lm_tier)i) && (rate <= 0 || o->rate[i] < rate))
            rate = o->rate[i];
    for (int64_t i = 0; i < step->n; i++)
        seconds += step->part[i].kind == LM_ROWS_PROMPT ? (double)step->part[i].n * o->row_seconds
                                                        : o->step_seconds / (double)step->n;
    s->spare += seconds / TIDY;
    if (rate > 0 && seconds > 0)
        n = s->spare * rate / (double)o->page_bytes;
    if (n < 1)
        return;
    lm_pool_tidy(s->pool, n < MOST_TIDY ? (int64_t)n + 1 : MOST_TIDY);
    s->spare = 0;
}

bool lm_sched_next(lm_sched *s, lm_sched_step *out)
{
    *out = (lm_sched_step){ .part = s->part, .copy = s->copy };
    plan(s, out);
    if (!out->rows && !lm_pool_pending(s->pool) && s->active) /* those that came in now */
        plan(s, out);
    if (out->rows)
        tidy(s, out);
    out->copies = s->copied ? 0 : s->copies;
    s->copied = true;
    out->moves = lm_pool_moves(s->pool, &out->move);
    if (!out->rows && !out->moves)
        return false;
    s->count.steps += out->rows > 0;
    s->count.rows += out->rows;
    out->bucket = out->rows ? bucket_of(s, out->rows) : 0;
    s->count.padding += out->bucket - out->rows;
    return true;
}
