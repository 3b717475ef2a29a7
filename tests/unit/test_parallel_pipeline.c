/* SPDX-License-Identifier: Apache-2.0 */
/* test_parallel_pipeline.c -- pipeline schedules: orders against published ones, bubbles and memory against their formulas,
 * files there and back. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"
#include "parallel/pipeline.h"

static lm_pipeline make(const char *spec, int64_t ranks, int64_t micros)
{
    lm_pipeline p;
    lm_err e = { 0 };

    if (lm_pipeline_make(spec, ranks, micros, &p, &e))
        fail_msg("%s, %d ranks, %d micro-batches: %s", spec, (int)ranks, (int)micros, e.what);
    return p;
}

/* Costs of a stage when all of a rank's stages together take f, b and w. */
static lm_pipe_cost *costs(const lm_pipeline *p, double f, double b, double w, double comm)
{
    lm_pipe_cost *c = calloc((size_t)p->stages, sizeof *c);
    double part = (double)p->ranks / p->stages;

    assert_non_null(c);
    for (int s = 0; s < p->stages; s++)
        c[s] = (lm_pipe_cost){ f * part, b * part, w * part, comm };
    return c;
}

static lm_pipe_times run(const lm_pipeline *p, double f, double b, double w, double comm)
{
    lm_pipe_cost *c = costs(p, f, b, w, comm);
    lm_pipe_times t;
    lm_err e = { 0 };

    if (lm_pipeline_time(p, c, &t, &e))
        fail_msg("%s", e.what);
    free(c);
    return t;
}

/* A row as the notes of the field write it: F3, of the second stage of a rank F3b, of the way back F3', joined steps F3&B1. */
static void row_text(const lm_pipeline *p, int r, bool letters, int first_of_back, char *out,
                     size_t size)
{
    size_t len = 0;

    for (size_t k = 0; k < p->row[r].n; k++) {
        const lm_pipe_step *s = &p->row[r].step[k];
        bool second = letters         ? s->stage >= p->ranks
                      : first_of_back ? s->micro >= first_of_back
                                      : s->stage >= p->ranks;
        int micro = first_of_back && second ? s->micro - first_of_back : s->micro;

        len += (size_t)snprintf(out + len, size - len, "%s%c%d%s",
                                k == 0         ? ""
                                : s[-1].joined ? "&"
                                               : " ",
                                lm_pipe_letter((lm_pipe_kind)s->kind), micro,
                                letters  ? second ? "b" : "a"
                                : second ? "'"
                                         : "");
        assert_true(len < size);
    }
}

typedef struct {
    const char *spec;
    int rank;
    const char *row;
} order;

/* Four ranks, eight micro-batches. */
static const order orders[] = {
    { "gpipe", 2, "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7" },
    { "1f1b", 0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7" },
    { "1f1b", 1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7" },
    { "1f1b", 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7" },
    { "interleaved:2", 0,
      "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b F4b B2b F5b B3b F6b B0a F7b B1a B2a "
      "B3a B4b B5b B6b B7b B4a B5a "
      "B6a B7a" },
    { "interleaved:2", 3,
      "F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a F6a B2a F7a B3a F4b B4b F5b "
      "B5b F6b B6b F7b B7b B4a B5a "
      "B6a B7a" },
    { "breadth-first:2", 1,
      "F0a F1a F2a F3a F4a F5a F6a F7a F0b F1b F2b F3b F4b F5b F6b F7b B0b B1b B2b B3b B4b B5b B6b "
      "B7b B0a B1a B2a B3a B4a B5a "
      "B6a B7a" },
    { "zb-h1", 0, "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7" },
    { "zb-h1", 1, "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7" },
    { "zb-h1", 3, "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7" },
    { "zb-h2", 0, "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7" },
    { "zb-h2", 2, "F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7" },
    { "zb-h2", 3, "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7" },
    { "zb-v", 0,
      "F0a F1a F2a F3a F4a F5a F6a F0b I0b W0b F1b I1b W1b F2b I2b W2b F3b I3b W3b F7a I0a W0a F4b "
      "I4b W4b I1a W1a F5b I5b W5b I2a "
      "W2a F6b I6b W6b I3a W3a F7b I7b I4a W7b I5a W4a I6a W5a I7a W6a W7a" },
    { "zb-v", 3,
      "F0a F0b F1a F1b F2a F2b F3a F3b I0b W0b F4a I0a W0a F4b I1b W1b F5a I1a W1a F5b I2b W2b F6a "
      "I2a W2a F6b I3b W3b F7a I3a W3a "
      "F7b I4b I4a I5b I5a I6b I6a I7b I7a W4b W4a W5b W5a W6b W6a W7b W7a" },
    { "dualpipe", 0, "F0 F1 F2 F0' I0' W0' F1' F3&B1' F2'&B0 B2' F3'&B1 B3' I2 W2 I3 W3" },
    { "dualpipe", 1, "F0 F0' F1 F1' F2 B0' F2'&B0 F3&B1' F3'&B1 B2' B2 I3' I3 W3' W3" },
    { "dualpipe", 2, "F0' F0 F1' F1 F2' B0 F2&B0' F3'&B1 F3&B1' B2 B2' I3 I3' W3 W3'" },
    { "dualpipe", 3, "F0' F1' F2' F0 I0 W0 F1 F3'&B1 F2&B0' B2 F3&B1' B3 I2' W2' I3' W3'" },
    { "dualpipev", 3,
      "F0 F0' F1 F1' F2 F2' F3 F3' F4 B0' F4'&B0 F5&B1' F5'&B1 F6&B2' F6'&B2 F7&B3' F7'&B3 B4' B4 "
      "B5' B5 I6' I6 I7' I7 W6' W6 W7' "
      "W7" },
};

static void test_orders(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        const order *o = &orders[i];
        bool dual = !strncmp(o->spec, "dual", 4);
        lm_pipeline p = make(o->spec, 4, 8);
        char text[1024];

        row_text(&p, o->rank, !dual && p.stages > 4, !strcmp(o->spec, "dualpipe") ? 4 : 0, text,
                 sizeof text);
        if (strcmp(text, o->row))
            fail_msg("%s, rank %d:\n%s\nnot\n%s", o->spec, o->rank, text, o->row);
        lm_pipeline_fini(&p);
    }
}

/* Makespans of four ranks and eight micro-batches where F, I and W of a rank take 1 each, and what rank 0 holds. */
static void test_published_times(void **state)
{
    static const struct {
        const char *spec;
        double makespan, idle0;
        int held; /* stages of micro-batches on rank 0 */
    } known[] = {
        { "gpipe", 33, 9, 8 },
        { "1f1b", 33, 9, 4 },
        { "interleaved:2", 28.5, 4.5, 11 },
        { "breadth-first:2", 28.5, 4.5, 16 },
        { "zb-h1", 27, 3, 4 },
        { "zb-h2", 27, 0, 7 },
        { "zb-v", 25.5, 0, 8 },
        { "dualpipe", 26, 2, 5 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        lm_pipeline p = make(known[i].spec, 4, 8);
        lm_pipe_times t = run(&p, 1, 1, 1, 0);

        if (fabs(t.makespan - known[i].makespan) > 1e-9 ||
            fabs(t.idle[0] - known[i].idle0) > 1e-9 || t.inflight[0] != known[i].held)
            fail_msg("%s: makespan %g, idle %g, held %d", known[i].spec, t.makespan, t.idle[0],
                     (int)t.inflight[0]);
        lm_pipe_times_fini(&t, p.ranks);
        lm_pipeline_fini(&p);
    }
}

/* The bubble's formulas over many sizes, with unequal times of F, I and W where the formula has them. */
static void test_bubbles(void **state)
{
    (void)state;
    for (int p = 2; p <= 12; p += p < 4 ? 1 : 2)
        for (int m = 2 * p; m <= 4 * p; m += p) {
            const double f = 1, b = 1.25, w = 0.75, all = f + b + w;
            const struct {
                const char *spec;
                double bubble, f, b, w;
                int held, stages;
            } row[] = {
                { "gpipe", (p - 1) * all, f, b, w, m, 1 },
                { "1f1b", (p - 1) * all, f, b, w, p, 1 },
                { "interleaved:2", (p - 1) * all / 2, f, b, w, 0, 2 },
                { "breadth-first:3", (p - 1) * all / 3, f, b, w, 3 * m, 3 },
                { "zb-h1", p - 1, 1, 1, 1, p, 1 },
                { "zb-v", (p - 1) / 2.0, 1, 1, 1, 2 * p,
                  2 }, /* no rank waits, but the last one begins later */
            };

            for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
                lm_pipeline s = make(row[i].spec, p, m);
                lm_pipe_times t = run(&s, row[i].f, row[i].b, row[i].w, 0);
                double work = m * (row[i].f + row[i].b + row[i].w);

                assert_int_equal(s.stages, p * row[i].stages);
                if (fabs(t.ideal - work) > 1e-9 * work ||
                    fabs(t.makespan - work - row[i].bubble) > 1e-9 * work)
                    fail_msg("%s, %d ranks, %d micro-batches: bubble %g, not %g", row[i].spec, p, m,
                             t.makespan - work, row[i].bubble);
                for (int r = 0; r < p && !strcmp(row[i].spec, "zb-v"); r++)
                    assert_true(fabs(t.idle[r]) < 1e-9);
                if (row[i].held)
                    assert_int_equal(t.inflight[0], row[i].held);
                lm_pipe_times_fini(&t, s.ranks);
                lm_pipeline_fini(&s);
            }
        }
}

/* (PP/2 - 1)(F&B + B - 3W) of deepseek-ai/DualPipe, where F&B takes the time of F and B. */
static void test_dual_bubbles(void **state)
{
    (void)state;
    for (int p = 2; p <= 12; p += 2)
        for (int m = 2 * p; m <= 6 * p; m += 2 * p) {
            lm_pipeline a = make("dualpipe", p, m), b = make("dualpipev", p, m);
            lm_pipe_times s = run(&a, 1, 1, 1, 0), t = run(&b, 1, 1, 1, 0);

            assert_true(fabs(s.makespan - 3 * m - (p / 2 - 1) * (3 + 2 - 3)) < 1e-9);
            assert_true(fabs(t.makespan - 3 * m - (p - 1) * (3 + 2 - 3) / 2.0) < 1e-9);
            for (int r = 0; r < p; r++) {
                assert_int_equal(s.inflight[r], p + 1);
                assert_int_equal(t.inflight[r], 2 * p + 1);
            }
            lm_pipe_times_fini(&s, p);
            lm_pipe_times_fini(&t, p);
            lm_pipeline_fini(&a);
            lm_pipeline_fini(&b);
        }
}

/* Every generator, for every size that it takes, gives rows that can be run and are whole, as their file shows. */
static void test_files(void **state)
{
    static const char *const spec[] = {
        "gpipe", "1f1b",  "interleaved:2", "interleaved:3", "breadth-first:2",
        "zb-h1", "zb-h2", "zb-v",          "dualpipe",      "dualpipev"
    };

    (void)state;
    for (size_t i = 0; i < sizeof spec / sizeof *spec; i++)
        for (int ranks = 1; ranks <= 6; ranks++)
            for (int micros = 1; micros <= 14; micros++) {
                lm_pipeline p, q;
                lm_buf text = { 0 }, again = { 0 };
                lm_err e = { 0 };

                if (lm_pipeline_make(spec[i], ranks, micros, &p, &e)) {
                    assert_int_equal(e.code, LM_EUSAGE);
                    continue;
                }
                lm_pipe_times t = run(&p, 1, 2, 1, 0.5);
                assert_true(t.makespan >= t.span && t.span >= t.ideal);
                assert_true(lm_pipe_bubble_ideal(&t) >= lm_pipe_bubble_total(&t));
                assert_true(lm_pipe_bubble_total(&t) >= lm_pipe_bubble_span(&t));
                if (lm_pipeline_write(&p, &text, &e) ||
                    lm_pipeline_read(text.data, text.len, "file", &q, &e) ||
                    lm_pipeline_write(&q, &again, &e))
                    fail_msg("%s, %d, %d: %s", spec[i], ranks, micros, e.what);
                assert_string_equal(text.data, again.data);
                assert_int_equal(q.micros, micros);
                lm_pipe_times_fini(&t, p.ranks);
                lm_pipeline_fini(&p);
                lm_pipeline_fini(&q);
                lm_buf_fini(&text);
                lm_buf_fini(&again);
            }
}

static void test_refused(void **state)
{
    static const struct {
        const char *spec;
        int ranks, micros;
        const char *what;
    } bad[] = {
        { "1f2b", 4, 8, "not the name" },
        { "interleaved", 4, 8, "no such number" },
        { "interleaved:1", 4, 8, "no such number" },
        { "interleaved:x", 4, 8, "no such number" },
        { "1f1b:2", 4, 8, "no number behind it" },
        { "interleaved:2", 4, 10, "takes 8 or 12" },
        { "dualpipe", 3, 12, "from both ends" },
        { "dualpipe", 4, 6, "at least 8" },
        { "dualpipev", 4, 7, "at least 8" },
        { "1f1b", 0, 8, "0 ranks" },
        { "1f1b", 4, 0, "0 micro-batches" },
        { "breadth-first:16384", 4, 8, "at most" },
        { "1f1b", 4096, 1 << 20, "at most" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_pipeline p;
        lm_err e = { 0 };

        assert_int_equal(lm_pipeline_make(bad[i].spec, bad[i].ranks, bad[i].micros, &p, &e),
                         LM_EUSAGE);
        if (!strstr(e.what, bad[i].what))
            fail_msg("%s: %s", bad[i].spec, e.what);
    }
}

/* Steps that are left out of a file, or stand where they cannot be. */
static void test_bad_files(void **state)
{
    static const struct {
        const char *text, *what;
    } bad[] = {
        { "", "no steps" },
        { "0F0,0B0,", NULL },
        { " 0F0 , 0UNSHARD, 0SEND_F0,0I0,0W0\n", NULL },
        { "0F0,0B0,0W0\n", "not forward and backward once" },
        { "0F0,0I0\n", "not forward and backward once" },
        { "0F0,0B0,0B0\n", "stands twice" },
        { "0F0,0B0\n1F0,1B1\n", "forward steps" },
        { "0F0\n0B0\n", "the rest of it" },
        { "0X0\n", "not a step" },
        { "F0\n", "not a step" },
        { "0F\n", "not a step" },
        { "0F0x\n", "not a step" },
        { "99999F0\n", "not a step" },
        { "0F99999999999999999999\n", "not a step" },
        { "16383F1048575\n", "1 forward steps" },
        { "(0F0;0B0)\n", "not a step" },
        { "(0F0)OVERLAP_F_B\n", "not a step" },
        { "(0F0;0F1)OVERLAP_F_B,0B0,0B1\n", "not a step" },
        { "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", NULL },
        { "0F0,0B0\n\n \t\r\n", NULL }, /* an editor's end of a file is no rank */
        { "0F0,0B0\r\n", NULL },
        { "0F0,0B0\n\n1F0,1B0\n", "line 2 has no steps" },
        { "\n0F0,0B0\n", "line 1 has no steps" },
        { "0F0,0B0\n0UNSHARD\n", "line 2 has no steps" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_pipeline p;
        lm_err e = { 0 };
        lm_code got = lm_pipeline_read(bad[i].text, strlen(bad[i].text), "file", &p, &e);

        if (got != (bad[i].what ? LM_EFORMAT : LM_OK) ||
            (bad[i].what && !strstr(e.what, bad[i].what)))
            fail_msg("%s: %d %s", bad[i].text, got, e.what);
        lm_pipeline_fini(&p);
    }
}

/* Rows that wait for each other. */
static void test_circle(void **state)
{
    static const char text[] = "0B0,0F0\n1F0,1B0\n";
    lm_pipeline p;
    lm_pipe_cost c[2] = { { 1, 1, 1, 0 }, { 1, 1, 1, 0 } };
    lm_pipe_times t;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_pipeline_read(text, sizeof text - 1, "file", &p, &e), LM_OK);
    assert_int_equal(lm_pipeline_time(&p, c, &t, &e), LM_EFORMAT);
    assert_non_null(
        strstr(e.what, "rank 0 waits without end: step 0, B of micro-batch 0 in stage 0"));
    lm_pipeline_fini(&p);
}

/* Sending delays by its time, but only between ranks; unequal stages wait for the slowest. */
static void test_costs(void **state)
{
    lm_pipeline p = make("1f1b", 2, 1), v = make("zb-v", 2, 4);
    lm_pipe_times t = run(&p, 1, 1, 1, 10);
    lm_pipe_cost c[2] = { { 1, 0, 0, 0 }, { 5, 0, 0, 0 } };
    lm_err e = { 0 };

    (void)state;
    assert_true(fabs(t.makespan - (3 + 3 + 20)) < 1e-12);
    assert_true(fabs(t.start[1][0] - 11) < 1e-12);
    lm_pipe_times_fini(&t, 2);
    t = run(&v, 2, 2, 2, 10);
    assert_true(fabs(t.start[1][1] - t.start[1][0] - 1) < 1e-12); /* stages 1 and 2 are on rank 1 */
    lm_pipe_times_fini(&t, 2);
    lm_pipeline_fini(&p);
    p = make("gpipe", 2, 10);
    assert_int_equal(lm_pipeline_time(&p, c, &t, &e), LM_OK);
    assert_true(fabs(t.makespan - 51) < 1e-12);
    assert_true(fabs(t.ideal - 50) < 1e-12);
    lm_pipe_times_fini(&t, 2);
    lm_pipeline_fini(&p);
    lm_pipeline_fini(&v);
}

/* Each rank waits for the last one in every micro-batch: a pass over all ranks would run one step. */
static void test_long_waits(void **state)
{
    enum { RANKS = 4096, MICROS = 64 };
    lm_buf text = { 0 };
    lm_pipeline p;
    lm_pipe_times t;
    lm_pipe_cost *c = calloc(RANKS, sizeof *c);
    lm_err e = { 0 };
    clock_t from;

    (void)state;
    assert_non_null(c);
    for (int r = 0; r < RANKS; r++) {
        c[r] = (lm_pipe_cost){ 1, 1, 0, 0 };
        for (int m = 0; m < MICROS; m++)
            assert_int_equal(lm_buf_addf(&text, &e, "%s%dF%d,%dB%d", m ? "," : "", r, m, r, m), 0);
        assert_int_equal(lm_buf_add(&text, "\n", 1, &e), 0);
    }
    assert_int_equal(lm_pipeline_read(text.data, text.len, "file", &p, &e), LM_OK);
    from = clock();
    assert_int_equal(lm_pipeline_time(&p, c, &t, &e), LM_OK);
    assert_true((double)(clock() - from) / CLOCKS_PER_SEC < 1.5);
    assert_true(fabs(t.makespan - 2.0 * RANKS * MICROS) < 1e-6);
    lm_pipe_times_fini(&t, RANKS);
    lm_pipeline_fini(&p);
    lm_buf_fini(&text);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_orders),    cmocka_unit_test(test_published_times),
        cmocka_unit_test(test_bubbles),   cmocka_unit_test(test_dual_bubbles),
        cmocka_unit_test(test_files),     cmocka_unit_test(test_refused),
        cmocka_unit_test(test_bad_files), cmocka_unit_test(test_circle),
        cmocka_unit_test(test_costs),     cmocka_unit_test(test_long_waits),
    };
    return cmocka_run_group_tests_name("parallel_pipeline", tests, NULL, NULL);
}
