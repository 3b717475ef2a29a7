/* SPDX-License-Identifier: Apache-2.0 */
/* test_parallel_run.c -- schedules run by threads whose stages are small sums: what crosses borders arrives where it belongs,
 * in any schedule; slots are as many as are needed; schedules that cannot be run are named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "comm/threads.h"
#include "parallel/pipeline_run.h"

enum { STAGES = 16, SLOTS = 32 };

/* A stage's numbers of one micro-batch: what it received, what it sends, and what its forward left. */
typedef struct {
    int64_t from_above, to_below, from_below, to_above, kept;
} cell;

typedef struct {
    const lm_pipeline *p;
    cell cell[STAGES][SLOTS];
    int64_t weights[STAGES]; /* sum over micro-batches, in an order that shows in it */
    int slots[STAGES];
} rank_work;

typedef struct {
    const lm_pipeline *p;
    int64_t weights[2][STAGES]; /* by way */
} shared;

static int64_t forward(int stage, int64_t micro, int64_t above)
{
    return 3 * above + 1000 * micro + stage + 1;
}

static lm_code compute(void *ctx, const lm_pipe_step *s, int slot, lm_err *e)
{
    rank_work *w = ctx;
    cell *c = &w->cell[s->stage][slot];
    const bool first = s->stage == 0, last = s->stage + 1 == w->p->stages;
    if (slot >= w->slots[s->stage])
        return lm_fail(e, LM_EBUG, "test", NULL, "slot %d of %d", slot, w->slots[s->stage]);
    if (s->kind == LM_PIPE_F)
        c->kept = c->to_below = forward(s->stage, s->micro, first ? s->micro : c->from_above);
    if (s->kind == LM_PIPE_B || s->kind == LM_PIPE_I)
        c->to_above = c->kept + (last ? 7 : c->from_below);
    if (s->kind == LM_PIPE_B || s->kind == LM_PIPE_W)
        w->weights[s->stage] = (5 * w->weights[s->stage] + c->to_above) % 1000003;
    return LM_OK;
}

/* Two parts go down, one goes up. */
static bool part(void *ctx, int border, bool up, bool sender, int slot, size_t k, lm_pipe_part *out)
{
    rank_work *w = ctx;
    cell *c = &w->cell[border + (up == sender)][slot];
    static char nothing[4];
    if (k > (up ? 0 : 1))
        return false;
    *out = k == 1 ? (lm_pipe_part){ nothing, 0 }
                  : (lm_pipe_part){ up ? (sender ? &c->to_above : &c->from_below)
                                       : (sender ? &c->to_below : &c->from_above),
                                    sizeof(int64_t) };
    return true;
}

static lm_code run_rank(void *ctx, lm_comm *c, lm_err *e)
{
    shared *x = ctx;
    rank_work *w = NULL;
    lm_pipe_runner *r = NULL;
    if (lm_alloc_n(&w, 1, sizeof *w, "a test", e))
        return e->code;
    w->p = x->p;
    for (int k = 0; k < x->p->stages && !e->code; k++)
        lm_pipeline_slots(x->p, k, lm_comm_rank(c), &w->slots[k], e);
    const lm_pipe_work work = { w, compute, part };
    if (!e->code && !lm_pipe_runner_new(x->p, &work, c, &r, e))
        for (int step = 0; step < 2 && !e->code; step++)
            lm_pipe_runner_run(r, e);
    for (int way = 0; way < lm_pipeline_ways(x->p); way++) {
        int rank[STAGES];
        lm_pipeline_ranks(x->p, way, rank);
        for (int k = 0; k < x->p->stages; k++)
            if (rank[k] == lm_comm_rank(c))
                x->weights[way][k] = w->weights[k];
    }
    if (e->code)
        lm_comm_abort(c, e);
    lm_pipe_runner_free(r);
    lm_free(w);
    return e->code;
}

/* The same without stages, of micro-batches from `first` on. */
static void expect(int stages, int64_t first, int64_t micros, int64_t weights[STAGES])
{
    memset(weights, 0, STAGES * sizeof *weights);
    for (int64_t i = 0; i < 2 * micros; i++) {
        int64_t kept[STAGES], down = first + i % micros, up = 7;
        for (int s = 0; s < stages; s++)
            down = kept[s] = forward(s, first + i % micros, down);
        for (int s = stages; s-- > 0;) {
            up = kept[s] + up;
            weights[s] = (5 * weights[s] + up) % 1000003;
        }
    }
}

static void check(const char *spec, int ranks, int micros)
{
    lm_err e = { 0 };
    lm_pipeline p;
    shared x = { 0 };
    int64_t want[STAGES];
    assert_int_equal(lm_pipeline_make(spec, ranks, micros, &p, &e), LM_OK);
    assert_int_equal(lm_pipeline_check_run(&p, &e), LM_OK);
    x.p = &p;
    if (lm_threads_run(ranks, 20, run_rank, &x, &e))
        fail_msg("%s of %d ranks, %d micro-batches: %s: %s", spec, ranks, micros, e.where, e.what);
    const int ways = lm_pipeline_ways(&p), each = micros / ways;
    assert_int_equal(ways, lm_pipeline_ranks_of_stage(spec));
    for (int way = 0; way < ways; way++) {
        expect(p.stages, way * each, each, want);
        for (int k = 0; k < p.stages; k++)
            if (x.weights[way][k] != want[k])
                fail_msg("%s of %d ranks, %d micro-batches: stage %d has %ld, not %ld", spec, ranks,
                         micros, k, (long)x.weights[way][k], (long)want[k]);
    }
    lm_pipeline_fini(&p);
}

static void all_schedules(void **state)
{
    static const char *const specs[] = {
        "gpipe", "1f1b",  "interleaved:2", "interleaved:3", "breadth-first:2",
        "zb-h1", "zb-h2", "zb-v",          "dualpipev"
    };
    (void)state;
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++)
        for (int ranks = 2; ranks <= 5; ranks++)
            for (int m = 2; m <= 4; m++)
                check(specs[k], ranks, m * ranks);
    for (int ranks = 2; ranks <= 6; ranks += 2)
        for (int m = 2; m <= 4; m++)
            check("dualpipe", ranks, m * ranks);
}

static void slots_are_those_in_flight(void **state)
{
    static const struct {
        const char *spec;
        int stage, slots;
    } cases[] = { { "gpipe", 0, 8 }, { "1f1b", 0, 5 },     { "1f1b", 3, 2 },
                  { "zb-h2", 0, 8 }, { "dualpipe", 0, 4 }, { "dualpipe", 1, 4 } };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_err e = { 0 };
        lm_pipeline p;
        int n;
        assert_int_equal(lm_pipeline_make(cases[k].spec, 4, 8, &p, &e), LM_OK);
        assert_int_equal(lm_pipeline_slots(&p, cases[k].stage, cases[k].stage, &n, &e), LM_OK);
        if (n != cases[k].slots)
            fail_msg("%s: stage %d has %d slots, not %d", cases[k].spec, cases[k].stage, n,
                     cases[k].slots);
        lm_pipeline_fini(&p);
    }
}

static void refuse(const char *rows, const char *what)
{
    lm_err e = { 0 };
    lm_pipeline p;
    assert_int_equal(lm_pipeline_read(rows, strlen(rows), "rows", &p, &e), LM_OK);
    assert_int_equal(lm_pipeline_check_run(&p, &e), LM_EUSAGE);
    assert_string_equal(e.what, what);
    lm_pipeline_fini(&p);
}

static void schedules_that_cannot_be_run(void **state)
{
    (void)state;
    refuse("0F1,0F0,0B0,0B1\n1F1,1B1,1F0,1B0\n",
           "stage 0 computes F of micro-batch 1, where 0 is next: sums would change their order");
    refuse("0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1B0,1F1,1B1\n",
           "stage 0 computes W of micro-batch 1, where 0 is next: sums would change their order");
    refuse("0F0,0F1,0B0,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,0F3,0B3\n2F0,2F1,2B0,2B1,1F2,1F3,1B2,1B3\n"
           "2F2,2B2,2F3,2B3\n",
           "micro-batches of the second half are on ranks 0 and 1 in stage 0");
    refuse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1,2F2,2F3,2B2,2B3\n"
           "1F2,1B2,1F3,1B3,0F2,0F3,0B2,0B3\n",
           "the copies of stage 0 are on ranks 0 and 3, which have other stages besides");
}

/* A rank that fails ends the waiting of all. */
static lm_code failing(void *ctx, const lm_pipe_step *s, int slot, lm_err *e)
{
    (void)ctx, (void)slot;
    return s->stage == 2 && s->kind == LM_PIPE_B ? lm_fail(e, LM_ENUMERIC, "loss", NULL, "is nan")
                                                 : LM_OK;
}

static lm_code fail_rank(void *ctx, lm_comm *c, lm_err *e)
{
    rank_work *w = NULL;
    lm_pipe_runner *r = NULL;
    if (lm_alloc_n(&w, 1, sizeof *w, "a test", e))
        return e->code;
    const lm_pipe_work work = { w, failing, part };
    w->p = ctx;
    if (!lm_pipe_runner_new(ctx, &work, c, &r, e) && lm_pipe_runner_run(r, e))
        lm_comm_abort(c, e);
    lm_pipe_runner_free(r);
    lm_free(w);
    return e->code;
}

static void a_failure_ends_all(void **state)
{
    lm_err e = { 0 };
    lm_pipeline p;
    (void)state;
    assert_int_equal(lm_pipeline_make("1f1b", 4, 8, &p, &e), LM_OK);
    assert_int_equal(lm_threads_run(4, 20, fail_rank, &p, &e), LM_ENUMERIC);
    assert_string_equal(e.what, "is nan");
    lm_pipeline_fini(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_schedules),
        cmocka_unit_test(slots_are_those_in_flight),
        cmocka_unit_test(schedules_that_cannot_be_run),
        cmocka_unit_test(a_failure_ends_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
