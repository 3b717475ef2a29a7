/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kv_pages -- the time that pages and scheduling take in a step, apart from all computing:
 * lm_sched_next, the tables of the parts copied into one array as a graph needs them, and
 * lm_sched_token for every sequence.
 *
 * usage: bench_kv_pages [--quick]
 *
 * generate: 64 sequences with one row each in every step, at several lengths and sizes of pages.
 * waiting: 63 of 1,024 tokens, while a prompt of 16,384 tokens waits for room.
 * shared: prompts of 2,000 tokens of which all but the last page are in the cache: one prompt enters,
 * has its step and ends.  fresh: the same without sharing.  full: 64 sequences in a cache that is
 * full, with half of the pages that they need on the device and the others on the host. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kv/sched.h"
#include "tests/bench/ceilings.h"

enum { SEQUENCES = 64, REPEATS = 9 };

static int steps = 400;
static int32_t *tables;
static int64_t width;

static void must(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_kv_pages: %s: %s\n", e->where, e->what);
    exit(1);
}

static lm_sched *new_sched(int64_t page, int64_t context, int64_t device, int64_t host, bool share)
{
    lm_sched_opts o = { .page = page,
                        .rows = 256,
                        .sequences = SEQUENCES,
                        .context = context,
                        .chunk = 1,
                        .share = share,
                        .page_bytes = 1 << 20 };
    lm_sched *s = NULL;
    lm_err e = { 0 };
    must(lm_sched_new(&o, (int64_t[]){ device, host, 0 }, &s, &e), &e);
    return s;
}

static int64_t add(lm_sched *s, uint32_t text, int64_t n, int64_t most)
{
    static uint32_t ids[1 << 16];
    int64_t number;
    lm_err e = { 0 };
    for (int64_t i = 0; i < n; i++)
        ids[i] = text * 100000 + (uint32_t)i;
    must(lm_sched_add(s, ids, n, most, 0, &number, &e), &e);
    return number;
}

/* One step with all of its bookkeeping; rows computed, -1 if there was none. */
static int64_t one_step(lm_sched *s)
{
    lm_sched_step step;
    int64_t wanted[SEQUENCES], n = 0;
    if (!lm_sched_next(s, &step))
        return -1;
    for (int64_t i = 0; i < step.n; i++) {
        const lm_sched_part *p = &step.part[i];
        memcpy(tables + i * width, p->table, (size_t)p->pages * sizeof *tables);
        if (p->last)
            wanted[n++] = p->request;
    }
    for (int64_t i = 0; i < n; i++)
        lm_sched_token(s, wanted[i], 1, false);
    return step.rows;
}

/* Median seconds of a step, of n steps each time. */
static double time_steps(lm_sched *s, int n)
{
    double t[REPEATS];
    for (int r = 0; r < REPEATS; r++) {
        double start = lm_now();
        for (int i = 0; i < n; i++)
            one_step(s);
        t[r] = (lm_now() - start) / n;
    }
    return lm_median(t, REPEATS);
}

/* A step in which 64 sequences generate after prompts of n tokens. */
static double generate(int64_t page, int64_t n)
{
    int64_t context = n + (REPEATS + 1) * steps + 64, pages = (context + page - 1) / page;
    lm_sched *s = new_sched(page, context, pages * SEQUENCES + 100, 0, true);
    width = pages;
    for (int i = 0; i < SEQUENCES; i++)
        add(s, 0, n, context); /* shared, so that all of them generate soon */
    while (one_step(s) != SEQUENCES)
        ;
    double t = time_steps(s, steps);
    lm_sched_free(s);
    return t;
}

/* A step in which 63 sequences generate after prompts of 1,024 tokens, while a prompt of 16,384
 * tokens waits for room. */
static double waiting(lm_sched_stats *count)
{
    int64_t busy = SEQUENCES - 1;
    lm_sched *s = new_sched(16, 16385, busy * 86 + 70, 0, true);
    width = 1100;
    for (uint32_t i = 0; i < (uint32_t)busy; i++)
        add(s, i, 1024, 352);
    while (one_step(s) != busy)
        ;
    add(s, 1, 16384, 1);
    double t = time_steps(s, 8);
    *count = lm_sched_count(s);
    lm_sched_free(s);
    return t;
}

/* Median seconds of a prompt of 2,000 tokens. */
static double prompt(bool share)
{
    lm_sched *s = new_sched(16, 4096, 1000, 0, share);
    double t[REPEATS];
    add(s, 1, 2000, 1);
    while (one_step(s) >= 0)
        ;
    for (int r = 0; r < REPEATS; r++) {
        double start = lm_now();
        for (int i = 0; i < steps / 10; i++) {
            add(s, 1, 2000, 1);
            while (one_step(s) >= 0)
                ;
        }
        t[r] = (lm_now() - start) / (steps / 10);
    }
    lm_sched_free(s);
    return lm_median(t, REPEATS);
}

/* Seconds of a step, of 128 requests of 512 tokens and 256 new ones that have half of the room. */
static double full(lm_sched_stats *count)
{
    int64_t pages = SEQUENCES * 768 / 16, n = 0;
    lm_sched *s = new_sched(16, 1024, pages / 2, pages, true);
    for (uint32_t i = 0; i < 2 * SEQUENCES; i++)
        add(s, i, 512, 256);
    double start = lm_now();
    while (one_step(s) >= 0)
        n++;
    double t = (lm_now() - start) / (double)n;
    *count = lm_sched_count(s);
    lm_sched_free(s);
    return t;
}

int main(int argc, char **argv)
{
    static const int64_t page[] = { 16, 16, 16, 128 }, length[] = { 64, 1024, 16384, 16384 };
    lm_sched_stats c;
    lm_err e = { 0 };
    if (argc > 1 && !strcmp(argv[1], "--quick"))
        steps = 40;
    must(lm_alloc_n(&tables, SEQUENCES << 12, sizeof *tables, "tables", &e), &e);
    printf("%-10s %6s %8s %12s %10s\n", "case", "page", "tokens", "us a step", "ns a row");
    for (int i = 0; i < 4; i++) {
        double t = generate(page[i], length[i]);
        printf("%-10s %6lld %8lld %12.2f %10.1f\n", "generate", (long long)page[i],
               (long long)length[i], 1e6 * t, 1e9 * t / SEQUENCES);
    }
    double t = waiting(&c);
    printf("%-10s %6d %8d %12.2f %10.1f  waited %lld\n", "waiting", 16, 16384, 1e6 * t,
           1e9 * t / SEQUENCES, (long long)c.waits);
    t = full(&c);
    printf("%-10s %6d %8d %12.2f %10.1f  paused %lld, dropped %lld\n", "full", 16, 768, 1e6 * t,
           1e9 * t * (double)c.steps / (double)c.rows, (long long)c.paused, (long long)c.dropped);
    printf("%-10s %6d %8d %12.2f us a prompt\n", "shared", 16, 2000, 1e6 * prompt(true));
    printf("%-10s %6d %8d %12.2f us a prompt\n", "fresh", 16, 2000, 1e6 * prompt(false));
    lm_free(tables);
    return 0;
}
