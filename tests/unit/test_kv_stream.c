/* SPDX-License-Identifier: Apache-2.0 */
/* Levels of a streamed cache: each choice by its definition, and whole transfers simulated over
 * bandwidths that are steady, drop, rise and vary. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kv/stream.h"

enum { CHUNKS = 40, LEVELS = 4 };

static uint64_t bytes[CHUNKS * LEVELS];
static int64_t rows[CHUNKS];

/* 100, 60, 36 and 20 MB in all; 10,000 rows. */
static lm_kv_offer offer(double deadline)
{
    static const double part[LEVELS] = { 1, 0.6, 0.36, 0.2 };
    for (int i = 0; i < CHUNKS * LEVELS; i++)
        bytes[i] = (uint64_t)(100e6 / CHUNKS * part[i % LEVELS]);
    for (int i = 0; i < CHUNKS; i++)
        rows[i] = 250;
    return (lm_kv_offer){
        .chunks = CHUNKS, .levels = LEVELS, .bytes = bytes, .rows = rows, .deadline = deadline
    };
}

/* ---- Simulation ---- */

typedef double (*bandwidth)(double t, double scale);

typedef struct {
    double seconds, mean; /* mean level; computed rows count as -1 */
    int how[CHUNKS];
} outcome;

static double steady(double t, double scale)
{
    (void)t;
    return scale;
}
static double drops(double t, double scale)
{
    return t < 1 ? scale : scale / 4;
}
static double rises(double t, double scale)
{
    return t < 1 ? scale / 4 : scale;
}
static double varies(double t, double scale)
{
    uint64_t w = lm_rng_u64(lm_rng_make(3, "bandwidth", 0), (uint64_t)(t * 20));
    return scale * (0.7 + 0.6 * (double)(w >> 40) / 16777216.0);
}

/* Seconds for `n` bytes from time t on. */
static double transfer(bandwidth b, double scale, double t, double n)
{
    const double step = 1e-3;
    double begin = t;
    for (; n > b(t, scale) * step; t += step)
        n -= b(t, scale) * step;
    return t - begin + n / b(t, scale);
}

static outcome simulate(const lm_kv_offer *o, bandwidth b, double scale)
{
    lm_kv_transfer done[CHUNKS];
    outcome r = { 0 };
    int64_t n = 0;
    for (int64_t c = 0; c < o->chunks; c++) {
        int how = r.how[c] = lm_kv_stream_choose(o, c, r.seconds, done, n);
        double took;
        r.mean += (double)how / (double)o->chunks;
        if (how == LM_KV_COMPUTE) {
            took = (double)o->rows[c] * o->row_seconds;
        } else {
            double size = (double)o->bytes[c * o->levels + how];
            took = transfer(b, scale, r.seconds, size);
            done[n++] = (lm_kv_transfer){ size, took };
        }
        r.seconds += took;
    }
    r.seconds += (double)o->rows_behind * o->row_seconds;
    return r;
}

/* At a steady rate the answer is in time where the coarsest level allows it (the first chunk, of an
 * unknown rate, is a middle one), and more bandwidth gives no coarser levels. */
static void test_steady(void **state)
{
    double before = LEVELS;
    (void)state;
    for (double rate = 5e6; rate < 100e6; rate *= 1.05) {
        lm_kv_offer o = offer(2);
        outcome r = simulate(&o, steady, rate);
        if (20e6 / rate + 0.36 * 2.5e6 / rate < 2)
            assert_true(r.seconds <= 2);
        else
            assert_true(r.how[CHUNKS - 1] == LEVELS - 1);
        assert_true(r.mean <= before + 0.05);
        before = r.mean;
    }
    assert_true(before <= 0.05); /* only the first one was not the best level */
    /* the time is used: the level above would be too late */
    lm_kv_offer o = offer(2);
    outcome r = simulate(&o, steady, 25e6);
    assert_true(r.seconds > 1.6 && r.mean > 0.9 && r.mean < 1.5);
}

/* A drop is answered within a chunk. */
static void test_drop(void **state)
{
    (void)state;
    for (double rate = 20e6; rate < 100e6; rate *= 1.1) {
        lm_kv_offer o = offer(5);
        outcome r = simulate(&o, drops, rate);
        double late = 2.5e6 / (rate / 4); /* one chunk of the best level */
        bool possible = 20e6 <= rate + 3.5 * rate / 4;
        if (possible && r.seconds > 5 + late)
            fail_msg("%.0f B/s: %.2f s", rate, r.seconds);
    }
}

static void test_rise(void **state)
{
    lm_kv_offer o = offer(4);
    outcome r = simulate(&o, rises, 60e6);
    (void)state;
    assert_true(r.how[1] >= 1 && r.how[CHUNKS - 1] == 0 && r.seconds <= 4);
}

static void test_noise(void **state)
{
    (void)state;
    for (double rate = 15e6; rate < 60e6; rate *= 1.03) {
        lm_kv_offer o = offer(3);
        outcome r = simulate(&o, varies, rate);
        if (r.seconds > 3 * 1.02 && 20e6 / (0.8 * rate) < 3)
            fail_msg("%.0f B/s: %.2f s", rate, r.seconds);
    }
}

/* Computing wins when it is in time, whatever the bandwidth; between both when it is faster. */
static void test_compute(void **state)
{
    lm_kv_offer o = offer(2);
    (void)state;
    o.compute = true, o.row_seconds = 1.9e-4; /* 1.9 s for all rows */
    outcome r = simulate(&o, steady, 1e9);
    for (int c = 0; c < CHUNKS; c++)
        assert_int_equal(r.how[c], LM_KV_COMPUTE);
    assert_true(r.seconds <= 2);
    o.rows_behind = 1000; /* 0.19 s more: too late */
    r = simulate(&o, steady, 1e9);
    assert_true(r.how[0] == (LEVELS - 1) / 2 && r.how[1] == 0);
    assert_true(r.seconds <= 2);
    o.row_seconds = 1e-3, o.rows_behind = 0; /* 10 s: faster than 20 MB at 1 MB/s, though late */
    r = simulate(&o, steady, 1e6);
    assert_int_equal(r.how[1], LM_KV_COMPUTE);
    o.compute = false;
    r = simulate(&o, steady, 1e6);
    assert_int_equal(r.how[1], LEVELS - 1);
}

static void test_no_deadline(void **state)
{
    lm_kv_offer o = offer(INFINITY);
    (void)state;
    o.compute = true, o.row_seconds = 1e-9;
    outcome r = simulate(&o, steady, 1e3);
    for (int c = 0; c < CHUNKS; c++)
        assert_int_equal(r.how[c], 0);
}

/* Before the first transfer: the best level if there is time for it, of two the better one if there is little. */
static void test_unknown(void **state)
{
    lm_kv_offer o = offer(10);
    (void)state;
    assert_int_equal(lm_kv_stream_choose(&o, 0, 0, NULL, 0), 0); /* 100 MB at 10 MB/s */
    assert_int_equal(lm_kv_stream_choose(&o, 0, 3, NULL, 0), 1);
    assert_int_equal(lm_kv_stream_choose(&o, 0, 9.9, NULL, 0), 1);
    for (int i = 0; i < CHUNKS; i++)
        bytes[i * LEVELS] = bytes[i * LEVELS + 2] = 0; /* levels 1 and 3 are left */
    assert_int_equal(lm_kv_stream_choose(&o, 0, 9.9, NULL, 0), 1);
    for (int i = 0; i < CHUNKS; i++)
        bytes[i * LEVELS + 1] = 0;
    assert_int_equal(lm_kv_stream_choose(&o, 0, 9.9, NULL, 0), 3);
}

static void test_rate(void **state)
{
    lm_kv_transfer t[] = {
        { 1, 100 }, { 8, 1 }, { 8, 1 }, { 0, 1 }, { 8, 1 }, { 8, 0 }, { 16, 1 }
    };
    (void)state;
    assert_true(isnan(lm_kv_stream_rate(t, 0)));
    assert_true(isnan(lm_kv_stream_rate(&t[3], 1)));
    assert_true(lm_kv_stream_rate(t, 1) == 0.01);
    assert_true(lm_kv_stream_rate(t, 3) == 17.0 / 102);
    assert_true(lm_kv_stream_rate(t, 7) == 10); /* 8, 8, 8, 16; the last one is faster */
    t[6].bytes = 2;
    assert_true(lm_kv_stream_rate(t, 7) == 2);
}

static uint64_t draw_seed, draws;

/* 0 .. n - 1 */
static uint64_t draw(uint64_t n)
{
    return (lm_rng_u64(lm_rng_make(draw_seed, "offers", 0), draws++) >> 20) % n;
}

/* 20,000 random offers: the choice is present; nothing better is feasible; if the choice is not
 * feasible nothing is, and it is the fastest. */
static void check_choice(uint64_t seed)
{
    uint64_t size[8 * 5] = { 0 };
    int64_t count[8];
    draw_seed = seed, draws = 0;
    lm_kv_offer o = { .chunks = 1 + (int64_t)(draw(8)), .levels = 1 + (int)(draw(5)) };
    unsigned present = 1 + (unsigned)(draw((1u << o.levels) - 1));
    for (int64_t c = 0; c < o.chunks; c++) {
        count[c] = (int64_t)(draw(300));
        for (int l = 0; l < o.levels; l++)
            size[c * o.levels + l] = present >> l & 1 ? 1 + draw(1000) : 0;
    }
    o.bytes = size, o.rows = count, o.compute = draw(2), o.row_seconds = (double)(draw(100)) / 5000;
    o.rows_behind = (int64_t)(draw(100)), o.deadline = (double)(draw(400)) / 20;
    lm_kv_transfer done = { 1 + (double)(draw(500)), 1 };
    double rate = done.bytes, now = (double)(draw(100)) / 20, left = o.deadline - now;
    int64_t next = (int64_t)(draw((uint64_t)o.chunks));
    int how = lm_kv_stream_choose(&o, next, now, &done, 1);
    double mine = lm_kv_stream_seconds(&o, next, how, rate);
    assert_true(how == LM_KV_COMPUTE ? o.compute
                                     : how >= 0 && how < o.levels && present >> how & 1);
    for (int other = o.compute ? LM_KV_COMPUTE : 0; other < o.levels; other++) {
        if (other >= 0 && !(present >> other & 1))
            continue;
        double theirs = lm_kv_stream_seconds(&o, next, other, rate);
        assert_false(other < how && theirs <= left && mine <= left);
        if (mine > left)
            assert_true(theirs > left && theirs >= mine);
    }
}

static void test_choices(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 20000; i++)
        check_choice(i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steady),  cmocka_unit_test(test_drop),
        cmocka_unit_test(test_rise),    cmocka_unit_test(test_noise),
        cmocka_unit_test(test_compute), cmocka_unit_test(test_no_deadline),
        cmocka_unit_test(test_rate),    cmocka_unit_test(test_choices),
        cmocka_unit_test(test_unknown),
    };
    return cmocka_run_group_tests_name("kv_stream", tests, NULL, NULL);
}
