/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler: random runs with small caches, forks, lost pages and closed tiers give the tokens
 * that each request would get alone; 64 requests of mixed lengths; sizes that are refused.
 *
 * The model of a graph: a row is a number made of the row before it, its token and its kind, stored
 * in the page that the table names; a token is drawn from the last row.  With a lag there is a second copy of a row, which
 * is written so many rows later. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kv/sched.h"

enum { PLACES = 64, MOST_T = 4, ROWS = 72, REQUESTS = 24, SLOTS = 20, RUNS = 10000 };

typedef struct {
    bool live;
    int64_t prompt, most, known; /* most: tokens in all */
    uint32_t ids[ROWS];
    uint32_t sample;
    int64_t number; /* of the scheduler */
} request;

typedef struct {
    uint64_t random;
    lm_sched_opts o;
    lm_sched *s;
    request r[REQUESTS];
    int n;
    uint64_t content[LM_TIERS][PLACES][2 * MOST_T], state[SLOTS]; /* rows, and their late copies */
    bool disk_full, on_disk[PLACES];
    int32_t failed[1000];
    int64_t n_failed;
    int64_t written[PLACES][MOST_T]; /* the step */
    int64_t ended, forks, lost;
    uint64_t trace;
    char error[400];
} world;

static uint32_t draw(world *w, uint32_t n)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return (uint32_t)((w->random >> 33) % n);
}

static bool wrong(world *w, const char *what, int64_t a, int64_t b)
{
    if (!w->error[0])
        snprintf(w->error, sizeof w->error, "%s (%lld, %lld)", what, (long long)a, (long long)b);
    return false;
}

static uint64_t mix(uint64_t before, uint32_t id, lm_rows_kind kind)
{
    uint64_t x = (before ^ id) * 0x9e3779b97f4a7c15u + (kind == LM_ROWS_TOKEN ? 77 : 0);
    return x ^ x >> 29;
}

static uint32_t token_of(uint64_t row, uint32_t sample)
{
    return (uint32_t)(mix(row, sample, LM_ROWS_PROMPT) >> 11) % 5;
}

static uint64_t row_of(const request *r, int64_t position)
{
    uint64_t x = 1;
    for (int64_t i = 0; i <= position; i++)
        x = mix(x, r->ids[i], i < r->prompt ? LM_ROWS_PROMPT : LM_ROWS_TOKEN);
    return x;
}

static request *request_of(world *w, int64_t number)
{
    for (int i = 0; i < w->n; i++)
        if (w->r[i].live && w->r[i].number == number)
            return &w->r[i];
    return NULL;
}

/* As a caller does it: a disk that is full, or damaged, loses a page. */
static void perform(world *w, const lm_kv_move *m, int64_t n)
{
    for (; n-- > 0; m++) {
        uint64_t *to = w->content[m->to][m->target], *from = w->content[m->from][m->source];
        bool full = m->to == LM_TIER_DISK && (w->disk_full || !draw(w, 400));
        bool none = m->from == LM_TIER_DISK && !w->on_disk[m->source];
        if (m->to == LM_TIER_DISK)
            w->on_disk[m->target] = !full && !none;
        if (full || none)
            w->failed[w->n_failed++] = m->page;
        w->disk_full |= full;
        memcpy(to, from, sizeof w->content[0][0]);
        if (full || none)
            memset(to, 0xee, sizeof w->content[0][0]);
    }
}

static void report_failed(world *w)
{
    if (w->disk_full)
        lm_pool_close(lm_sched_pool(w->s), LM_TIER_DISK);
    for (; w->n_failed > 0; w->lost++)
        lm_sched_lost(w->s, w->failed[--w->n_failed]);
}

/* What must hold for every part. */
static bool check_part(world *w, const lm_sched_part *p, const request *r)
{
    int64_t at = p->used, stop = at + p->n, chunk = w->o.chunk;
    bool prompt = at < r->prompt;
    if (p->n < 1 || stop > r->known || (prompt && stop > r->prompt))
        return wrong(w, "a part has wrong rows", at, p->n);
    if (prompt != (p->kind == LM_ROWS_PROMPT) || p->last != (stop == r->known))
        return wrong(w, "a part has a wrong kind", at, r->prompt);
    if (chunk > 1 && prompt && (at % chunk || (stop % chunk && stop != r->prompt)))
        return wrong(w, "a prompt is cut at a wrong place", at, p->n);
    if (!prompt && p->n != 1)
        return wrong(w, "generated tokens are computed together", at, p->n);
    if (p->pages != (stop + w->o.page - 1) / w->o.page ||
        memcmp(p->ids, r->ids + at, (size_t)p->n * 4))
        return wrong(w, "a part has wrong pages or tokens", at, p->n);
    if (w->o.state && at && w->state[p->slot] != row_of(r, at - 1))
        return wrong(w, "the state of a slot is wrong", at, p->slot);
    return true;
}

static void compute(world *w, const lm_sched_part *p, const request *r)
{
    int64_t T = w->o.page, now = lm_sched_count(w->s).steps;
    for (int64_t i = 0; i < p->used; i++)
        if (w->content[LM_TIER_DEVICE][p->table[i / T]][i % T] != row_of(r, i) ||
            (i < p->used - w->o.lag &&
             w->content[LM_TIER_DEVICE][p->table[i / T]][MOST_T + i % T] != row_of(r, i))) {
            wrong(w, "a row is not what was computed", p->request, i);
            return;
        }
    for (int64_t i = p->used > w->o.lag ? p->used - w->o.lag : 0; i < p->used + p->n; i++) {
        int64_t *written = &w->written[p->table[i / T]][i % T];
        if (*written == now)
            wrong(w, "two sequences write a row", p->request, i);
        *written = now;
    }
    for (int64_t i = p->used; i < p->used + p->n; i++) {
        uint64_t x = i ? w->content[LM_TIER_DEVICE][p->table[(i - 1) / T]][(i - 1) % T] : 1;
        w->content[LM_TIER_DEVICE][p->table[i / T]][i % T] = mix(x, p->ids[i - p->used], p->kind);
    }
    for (int64_t i = p->used > w->o.lag ? p->used - w->o.lag : 0; i < p->used + p->n - w->o.lag;
         i++)
        w->content[LM_TIER_DEVICE][p->table[i / T]][MOST_T + i % T] = row_of(r, i);
    w->state[p->slot] = row_of(r, p->used + p->n - 1);
}

static void give_token(world *w, request *r)
{
    bool ends = !draw(w, 25);
    uint32_t id = token_of(row_of(r, r->known - 1), r->sample);
    r->ids[r->known++] = id;
    bool goes_on = lm_sched_token(w->s, r->number, id, ends);
    if (goes_on != (!ends && r->known < r->most))
        wrong(w, "a request ends at a wrong token", r->known, r->most);
    r->live = goes_on;
    w->ended += !goes_on;
}

/* At a time when the parent's next token is wanted, the fork's is, too. */
static void fork_of(world *w, const request *parent, bool wanted)
{
    request *r = &w->r[w->n];
    lm_err e = { 0 };
    int64_t new = parent->known - parent->prompt + 1 + draw(w, 8);
    if (w->n == REQUESTS || parent->prompt + new > ROWS ||
        lm_sched_fork(w->s, parent->number, new, &r->number, &e))
        return;
    int64_t number = r->number;
    *r = *parent;
    r->number = number;
    r->most = r->prompt + new;
    r->sample = (uint32_t)w->n++;
    w->forks++;
    if (wanted)
        give_token(w, r);
}

static void add(world *w)
{
    request *r = &w->r[w->n];
    uint32_t text = draw(w, 2), same = draw(w, 40);
    lm_err e = { 0 };
    *r = (request){ .prompt = 1 + draw(w, 48), .sample = (uint32_t)w->n };
    r->known = r->prompt;
    r->most = r->prompt + 1 + draw(w, 20);
    for (uint32_t i = 0; i < r->prompt; i++)
        r->ids[i] = i < same ? text * 10 + i / 6 : draw(w, 3);
    int64_t need = (r->most - 1 + w->o.page - 1) / w->o.page;
    lm_code rc = lm_sched_add(w->s, r->ids, r->prompt, r->most - r->prompt, 0, &r->number, &e);
    if ((rc == LM_ELIMIT) != (need > lm_pool_size(lm_sched_pool(w->s), LM_TIER_DEVICE)))
        wrong(w, "a request is refused, or accepted, wrongly", need, rc);
    r->live = !rc;
    w->n += !rc;
}

/* The content of a page of a lower tier is damaged. */
static void lose_page(world *w)
{
    lm_pool *p = lm_sched_pool(w->s);
    int32_t page = (int32_t)draw(w, (uint32_t)lm_pool_size(p, LM_TIERS));
    if (lm_pool_tier(p, page) == LM_TIER_DEVICE)
        return;
    memset(w->content[lm_pool_tier(p, page)][lm_pool_place(p, page)], 255, sizeof w->content[0][0]);
    lm_sched_lost(w->s, page);
    w->lost++;
}

/* Rows of a step; then, as if it had been done at the same time, the moves that are not urgent. */
static bool one_step(world *w)
{
    lm_sched_step step;
    int64_t rows = 0, wanted[SLOTS], n = 0;
    bool slot[SLOTS] = { false };

    if (!lm_sched_next(w->s, &step))
        return false;
    for (int64_t i = 0; i < step.copies; i++)
        w->state[step.copy[i].to] = w->state[step.copy[i].from];
    perform(w, step.move, step.urgent);
    for (int64_t i = 0; i < step.n; i++) {
        const lm_sched_part *p = &step.part[i];
        const request *r = request_of(w, p->request);
        if (!r || slot[p->slot]) {
            wrong(w, "a part of no request, or of a slot in use", p->request, p->slot);
            return true;
        }
        slot[p->slot] = true;
        if (!check_part(w, p, r))
            return true;
        compute(w, p, r);
        rows += p->n;
        w->trace = mix(w->trace, (uint32_t)(p->request * 1000 + p->n), p->kind);
        if (p->last)
            wanted[n++] = p->request;
    }
    perform(w, step.move + step.urgent, step.moves - step.urgent);
    report_failed(w);
    if (rows != step.rows || (rows && step.bucket < rows) || rows > w->o.rows + w->o.sequences ||
        step.n > w->o.sequences)
        wrong(w, "a step has wrong rows", rows, step.bucket);
    for (int64_t i = 0; i < n; i++) {
        while (!draw(w, 6))
            fork_of(w, request_of(w, wanted[i]), true);
        give_token(w, request_of(w, wanted[i]));
    }
    return true;
}

static const double rates[] = { 0, 1, 100, 1e9 };

static void configure(world *w)
{
    lm_err e = { 0 };
    int64_t T = 1 + draw(w, MOST_T), sequences = 1 + draw(w, 6);
    int64_t pages[LM_TIERS] = { 4 + draw(w, PLACES / 3), draw(w, 3) ? draw(w, PLACES / 2) : 0,
                                draw(w, 3) ? draw(w, PLACES / 2) : 0 };
    w->o = (lm_sched_opts){ .page = T,
                            .rows = 16 + draw(w, 32),
                            .sequences = sequences,
                            .slots = draw(w, 2) ? sequences + draw(w, 6) : 0,
                            .context = ROWS - 1,
                            .chunk = draw(w, 2) ? 1 : T * (1 + draw(w, 3)),
                            .row_seconds = rates[draw(w, 3)],
                            .step_seconds = rates[draw(w, 3)],
                            .page_bytes = 100 };
    w->o.beside = draw(w, 2);
    w->o.state = !draw(w, 4);
    w->o.lag = w->o.state ? draw(w, 8) : 0;
    w->o.share = draw(w, 4);
    w->o.snapshots = w->o.state && w->o.share ? 1 + draw(w, 6) : 0;
    if (w->o.snapshots)
        w->o.chunk = T * (1 + draw(w, 3));
    if (!w->o.share && w->o.chunk > 1)
        w->o.chunk = 2 + draw(w, 15);
    w->o.rate[LM_TIER_HOST] = rates[draw(w, 4)];
    w->o.rate[LM_TIER_DISK] = rates[draw(w, 4)];
    assert_int_equal(lm_sched_new(&w->o, pages, &w->s, &e), LM_OK);
}

static void between_steps(world *w)
{
    uint32_t what = draw(w, 60);
    request *r = w->n ? &w->r[draw(w, (uint32_t)w->n)] : NULL;
    if (what < 15 && w->n < REQUESTS - 4)
        add(w);
    else if (what < 18 && r && r->live)
        fork_of(w, r, false);
    else if (what == 18 && r && r->live) {
        lm_sched_end(w->s, r->number);
        r->live = false;
    } else if (what < 22)
        lose_page(w);
    else if (what == 22 && !draw(w, 10))
        lm_pool_close(lm_sched_pool(w->s), LM_TIER_DISK);
    else if (what < 26)
        lm_sched_estimate(w->s, rates[draw(w, 3)], rates[draw(w, 3)],
                          (double[LM_TIERS]){ 0, rates[draw(w, 4)], rates[draw(w, 4)] });
}

static bool run(world *w, uint64_t seed, int *step)
{
    lm_err e = { 0 };
    bool more = true;
    *w = (world){ .random = seed * 0x9e3779b97f4a7c15u + 1 };
    draw(w, 2);
    configure(w);
    for (*step = 0; *step < 5000 && !w->error[0] && (more || *step < 60); ++*step) {
        if (*step < 60)
            between_steps(w);
        more = one_step(w);
        if (!w->error[0] && lm_sched_check(w->s, &e))
            wrong(w, e.what, 0, 0);
    }
    for (int i = 0; i < w->n && !w->error[0]; i++)
        if (w->r[i].live)
            wrong(w, "a request never ends", i, w->r[i].known);
    lm_pool_count c = lm_pool_counts(lm_sched_pool(w->s), LM_TIER_DEVICE);
    if (c.free + c.cached != lm_pool_size(lm_sched_pool(w->s), LM_TIER_DEVICE))
        wrong(w, "pages are in use at the end", c.free, c.cached);
    return !w->error[0];
}

static void random_runs(void **state)
{
    (void)state;
    static world w;
    lm_sched_stats sum = { 0 };
    int64_t ended = 0, forks = 0, lost = 0, states = 0;
    const char *one = getenv("LM_TEST_SEED");
    int step;
    for (uint64_t i = 0; i < (one ? 1 : RUNS); i++) {
        uint64_t seed = one ? strtoull(one, NULL, 10) : i;
        if (!run(&w, seed, &step))
            fail_msg("LM_TEST_SEED=%llu, step %d: %s", (unsigned long long)seed, step, w.error);
        lm_sched_stats c = lm_sched_count(w.s);
        sum.hits += c.hits;
        states += w.o.state ? c.hits : 0;
        sum.paused += c.paused;
        sum.dropped += c.dropped;
        sum.waits += c.waits;
        ended += w.ended;
        forks += w.forks;
        lost += w.lost;
        lm_sched_free(w.s);
    }
    print_message("ended %lld, forks %lld, hits %lld (%lld with states), waits %lld, paused %lld, "
                  "dropped %lld, lost %lld\n",
                  (long long)ended, (long long)forks, (long long)sum.hits, (long long)states,
                  (long long)sum.waits, (long long)sum.paused, (long long)sum.dropped,
                  (long long)lost);
    assert_true(one || (sum.hits > RUNS && states > RUNS / 4 && sum.paused > RUNS / 2 &&
                        sum.dropped > RUNS / 2 && forks > RUNS));
}

/* --- runs with known results; a request generates `most` tokens --- */

static const lm_sched_opts usual = { .page = 16,
                                     .rows = 256,
                                     .sequences = 16,
                                     .context = 4096,
                                     .chunk = 1,
                                     .share = true,
                                     .page_bytes = 1 << 20 };

static lm_sched *sched_of(const lm_sched_opts *o, int64_t device, int64_t host)
{
    lm_sched *s = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_sched_new(o, (int64_t[]){ device, host, 0 }, &s, &e), LM_OK);
    return s;
}

/* Tokens 0..n-1 of a text. */
static int64_t add_text(lm_sched *s, uint32_t text, int64_t n, int64_t same, int64_t most)
{
    static uint32_t ids[4096];
    int64_t number;
    lm_err e = { 0 };
    for (int64_t i = 0; i < n; i++)
        ids[i] = i < same ? (uint32_t)i : text * 5000 + (uint32_t)i;
    assert_int_equal(lm_sched_add(s, ids, n, most, 0, &number, &e), LM_OK);
    return number;
}

enum { STREAM = 64 };

/* 64 requests of mixed lengths; the step in which each ended. */
static uint64_t stream(int64_t end[STREAM], int64_t most_rows[STREAM], int64_t host)
{
    lm_sched *s = sched_of(&usual, 100, host);
    lm_sched_step step;
    lm_err e = { 0 };
    int64_t of[STREAM], left = STREAM, now = 0;
    uint64_t trace = 1;
    for (int i = 0; i < STREAM; i++) {
        int64_t n = 32 + i * 389 % 993, most = 16 + i * 101 % 240;
        of[i] = add_text(s, (uint32_t)i, n, i % 4 ? 0 : 64, most);
        most_rows[i] = n / 16 + 1 + most;
    }
    uint64_t allocations = lm_alloc_count();
    for (; lm_sched_next(s, &step); now++) {
        assert_true(now < 20000);
        for (int64_t i = 0; i < step.n; i++) {
            const lm_sched_part *p = &step.part[i];
            trace = mix(trace, (uint32_t)(p->request * 1000 + p->n), p->kind);
            if (!p->last || lm_sched_token(s, p->request, 1, false))
                continue;
            for (int j = 0; j < STREAM; j++)
                if (of[j] == p->request) {
                    end[j] = now;
                    of[j] = -1;
                }
            left--;
        }
    }
    assert_int_equal(lm_alloc_count(), allocations);
    assert_int_equal(lm_sched_check(s, &e), LM_OK);
    assert_int_equal(left, 0);
    lm_sched_stats c = lm_sched_count(s);
    print_message("%lld steps, %lld rows, %lld of padding, paused %lld, dropped %lld, hits %lld\n",
                  (long long)c.steps, (long long)c.rows, (long long)c.padding, (long long)c.paused,
                  (long long)c.dropped, (long long)c.hits);
    assert_true(c.paused + c.dropped > 0 && c.paused + c.dropped < 25);
    assert_true(c.hits >= 4);
    lm_sched_free(s);
    return trace;
}

/* Each request ends soon after those before it have ended, whatever came after it: the oldest one
 * has rows in every step.  Two runs are equal. */
static void no_request_starves(void **state)
{
    (void)state;
    for (int64_t host = 0; host < 200; host += 60) {
        int64_t end[STREAM], rows[STREAM], last = 0;
        uint64_t once = stream(end, rows, host), twice = stream(end, rows, host);
        assert_true(once == twice);
        for (int i = 0; i < STREAM; i++) {
            assert_true(end[i] <= last + rows[i] + 4);
            last = end[i] > last ? end[i] : last;
        }
    }
}

/* Of prompts that come at the same time, all but the first wait for the pages that they share. */
static void prompts_share(void **state)
{
    (void)state;
    lm_sched *s = sched_of(&usual, 400, 0);
    lm_sched_step step;
    int64_t rows = 0;
    for (uint32_t i = 0; i < 8; i++)
        add_text(s, i + 1, 480, 400, 1);
    while (lm_sched_next(s, &step))
        for (int64_t i = 0; i < step.n; i++) {
            rows += step.part[i].n;
            if (step.part[i].last)
                assert_false(lm_sched_token(s, step.part[i].request, 1, false));
        }
    assert_int_equal(rows, 480 + 7 * 80);
    assert_int_equal(lm_sched_count(s).hits, 7 * 25);
    assert_int_equal(lm_sched_count(s).pages, 8 * 30);
    lm_sched_free(s);
}

/* With a state, prompts continue from those that are kept after chunks of 64 rows, if there is a slot for them; the rows
 * of a tail are written later. */
static void prompts_share_states(void **state)
{
    static const struct {
        int64_t snapshots, same, rows, copies;
    } cases[] = { { 1, 200, 250 + 7 * (250 - 192), 3 + 7 },
                  { 3, 200, 250 + 7 * (250 - 192), 3 + 7 },
                  { 1, 100, 8 * 250, 8 * 3 },
                  { 3, 100, 250 + 7 * (250 - 64), 8 * 2 + 1 + 7 } };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_sched_opts o = usual;
        lm_sched_step step;
        lm_err e = { 0 };
        int64_t rows = 0, copies = 0;
        o.state = true;
        o.lag = 30;
        o.chunk = 64;
        o.snapshots = cases[k].snapshots;
        lm_sched *s = sched_of(&o, 400, 0);
        for (uint32_t i = 0; i < 8; i++)
            add_text(s, i + 1, 250, cases[k].same, 1);
        while (lm_sched_next(s, &step)) {
            copies += step.copies;
            for (int64_t i = 0; i < step.n; i++) {
                rows += step.part[i].n;
                if (step.part[i].last)
                    assert_false(lm_sched_token(s, step.part[i].request, 1, false));
            }
        }
        assert_int_equal(rows, cases[k].rows);
        assert_int_equal(copies, cases[k].copies);
        assert_int_equal(lm_sched_count(s).hits * o.page, 8 * 250 - rows);
        assert_int_equal(lm_sched_check(s, &e), LM_OK);
        lm_sched_free(s);
    }
}

/* A prompt that is known entirely has one row to compute: its logits are wanted. */
static void whole_prompt_known(void **state)
{
    (void)state;
    lm_sched *s = sched_of(&usual, 100, 0);
    lm_sched_step step;
    for (int i = 0; i < 2; i++) {
        int64_t number = add_text(s, 1, 64, 0, 1);
        assert_true(lm_sched_next(s, &step));
        assert_int_equal(step.n, 1);
        assert_int_equal(step.part[0].n, i ? 16 : 64);
        assert_int_equal(step.part[0].pages, 4);
        assert_int_equal(step.part[0].kind, LM_ROWS_PROMPT);
        assert_true(step.part[0].last);
        assert_int_equal(step.bucket, i ? 16 : 64);
        lm_sched_end(s, number);
    }
    lm_sched_free(s);
}

/* Forks run before requests that were added before them. */
static void forks_are_as_old_as_their_parent(void **state)
{
    (void)state;
    lm_sched_opts o = usual;
    lm_sched_step step;
    lm_err e = { 0 };
    int64_t parent, late, fork;
    o.sequences = 1;
    lm_sched *s = sched_of(&o, 100, 0);
    parent = add_text(s, 1, 8, 0, 4);
    late = add_text(s, 2, 8, 0, 4);
    assert_true(lm_sched_next(s, &step) && step.n == 1 && step.part[0].request == parent);
    assert_int_equal(lm_sched_fork(s, parent, 4, &fork, &e), LM_OK);
    assert_true(lm_sched_token(s, fork, 5, false));
    assert_false(lm_sched_token(s, parent, 6, true));
    for (int i = 0; i < 3; i++) {
        assert_true(lm_sched_next(s, &step) && step.n == 1);
        assert_int_equal(step.part[0].request, fork);
        assert_int_equal(step.part[0].used, 8 + i);
        assert_int_equal(lm_sched_token(s, fork, 7, false), i < 2);
    }
    assert_true(lm_sched_next(s, &step) && step.n == 1 && step.part[0].request == late);
    lm_sched_free(s);
}

/* A request does not take the last pages, which those that run will need. */
static void pages_stay_for_growth(void **state)
{
    (void)state;
    lm_sched *s = sched_of(&usual, 10, 0);
    lm_sched_step step;
    int64_t first = add_text(s, 1, 112, 0, 30);
    add_text(s, 2, 32, 0, 1);
    assert_true(lm_sched_next(s, &step) && step.n == 1 && step.part[0].request == first);
    assert_int_equal(lm_sched_count(s).waits, 1);
    lm_sched_end(s, first);
    assert_true(lm_sched_next(s, &step) && step.n == 1);
    lm_sched_free(s);
}

/* Pages are moved or computed again, whichever is estimated to be faster. */
static void estimates_decide(void **state)
{
    (void)state;
    static const struct {
        double row, rate;
        bool moves;
    } cases[] = { { 0, 0, true }, { 1e-3, 1e9, true }, { 1e-6, 1e6, false }, { 1, 1e6, true } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_sched_opts o = usual;
        lm_sched_step step;
        o.row_seconds = cases[i].row;
        o.rate[LM_TIER_HOST] = cases[i].rate;
        lm_sched *s = sched_of(&o, 10, 20);
        for (uint32_t j = 0; j < 2; j++)
            add_text(s, j + 1, 40, 0, 100);
        while (lm_sched_next(s, &step))
            for (int64_t j = 0; j < step.n; j++)
                if (step.part[j].last)
                    lm_sched_token(s, step.part[j].request, 1, false);
        lm_sched_stats c = lm_sched_count(s);
        assert_int_equal(c.paused > 0, cases[i].moves);
        assert_int_equal(c.dropped > 0, !cases[i].moves);
        lm_sched_free(s);
    }
}

static void run_alone(lm_sched *s, uint32_t text, int64_t n)
{
    lm_sched_step step;
    lm_err e = { 0 };
    add_text(s, text, n, 0, 1);
    while (lm_sched_next(s, &step))
        for (int64_t i = 0; i < step.n; i++)
            if (step.part[i].last)
                lm_sched_token(s, step.part[i].request, 1, false);
    assert_int_equal(lm_sched_check(s, &e), LM_OK);
}

/* Known pages of the host are fetched, unless they are computed faster. */
static void slow_pages_are_computed(void **state)
{
    (void)state;
    for (int slow = 0; slow < 2; slow++) {
        lm_sched_opts o = usual;
        o.row_seconds = 1e-3;
        o.rate[LM_TIER_HOST] = slow ? 1e3 : 1e9;
        lm_sched *s = sched_of(&o, 8, 8);
        run_alone(s, 1, 64);
        run_alone(s, 1, 64);  /* hit: worth a move */
        run_alone(s, 2, 112); /* two pages of the first go to the host; its last was never hit */
        assert_int_equal(lm_pool_counts(lm_sched_pool(s), LM_TIER_HOST).cached, 2);
        run_alone(s, 1, 64);
        assert_int_equal(lm_sched_count(s).hits, 3 + (slow ? 1 : 3));
        lm_sched_free(s);
    }
}

/* Prompts get rows also when those that generate fill the step. */
static void prompts_always_get_rows(void **state)
{
    (void)state;
    lm_sched_opts o = usual;
    lm_sched_step step = { 0 };
    o.rows = 16;
    o.sequences = 20;
    lm_sched *s = sched_of(&o, 200, 0);
    for (uint32_t i = 0; i < 19; i++)
        add_text(s, i, 1, 0, 200);
    add_text(s, 19, 160, 0, 1);
    int64_t steps = 0, rows = 0, most = 0;
    for (; rows < 160; steps++) {
        assert_true(steps < 20 && lm_sched_next(s, &step));
        assert_int_equal(step.bucket, step.rows > 16 ? 16 + 20 : 16);
        most = step.rows > most ? step.rows : most;
        for (int64_t i = 0; i < step.n; i++) {
            rows += step.part[i].request == 19 ? step.part[i].n : 0;
            if (step.part[i].last)
                lm_sched_token(s, step.part[i].request, 1, false);
        }
    }
    assert_int_equal(most, 19 + 16);
    lm_sched_free(s);
}

static void refused(void **state)
{
    (void)state;
    lm_sched *s = sched_of(&usual, 4, 100);
    static const uint32_t ids[5000] = { 0 };
    int64_t number;
    lm_err e = { 0 };
    assert_int_equal(lm_sched_add(s, ids, 50, 16, 0, &number, &e), LM_ELIMIT);
    assert_string_equal(e.what, "needs 5 pages of the cache, which has 4");
    e = (lm_err){ 0 };
    assert_int_equal(lm_sched_add(s, ids, 5000, 1, 0, &number, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_sched_add(s, ids, 0, 1, 0, &number, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_sched_add(s, ids, 1, 0, 0, &number, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_sched_add(s, ids, 50, 15, 0, &number, &e), LM_OK);
    assert_int_equal(lm_sched_fork(s, number, 16, &number, &e), LM_ELIMIT);
    lm_sched_free(s);

    lm_sched_opts bad[8];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        bad[i] = usual;
    bad[0].page = 0;
    bad[1].chunk = 24;
    bad[2].chunk = 512;
    bad[3].slots = 3;
    bad[4].state = true;
    bad[5].rows = (int64_t)1 << 40;
    bad[6].snapshots = 2;
    bad[7].state = true;
    bad[7].snapshots = 2;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_sched_new(&bad[i], (int64_t[]){ 4, 0, 0 }, &s, &e), LM_EUSAGE);
        assert_null(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused),
        cmocka_unit_test(prompts_share),
        cmocka_unit_test(prompts_share_states),
        cmocka_unit_test(whole_prompt_known),
        cmocka_unit_test(forks_are_as_old_as_their_parent),
        cmocka_unit_test(pages_stay_for_growth),
        cmocka_unit_test(estimates_decide),
        cmocka_unit_test(slow_pages_are_computed),
        cmocka_unit_test(prompts_always_get_rows),
        cmocka_unit_test(no_request_starves),
        cmocka_unit_test(random_runs),
    };
    return cmocka_run_group_tests_name("kv_sched", tests, NULL, NULL);
}
