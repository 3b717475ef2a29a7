/* SPDX-License-Identifier: Apache-2.0 */
/* bench_pipe.c -- schedules of pipelines run by threads whose stages sleep instead of computing:
 * the waiting that is measured beside that of the simulation.
 *
 * usage: bench_pipe [--ranks N] [--micro-batches N] [--step-ms MS] [--quick]
 *
 * Forward, gradients of inputs and of weights of a rank's stages take 20 ms each in all; a message has 64 KiB.  Both numbers
 * are shares of the time from the first step of any rank to the last one's end in which ranks do nothing
 * (lm_pipe_bubble_total). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/threads.h"
#include "parallel/pipeline_run.h"

enum { STAGES = 64, BYTES = 64 << 10 };

static double step_us = 20000;

typedef struct {
    const lm_pipeline *p;
    double busy, all; /* of all ranks */
} job;

static void check(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_pipe: %s: %s\n", e->where, e->what);
    exit(1);
}

/* Microseconds of a step: a stage is a part of a rank's work. */
static double time_of(const lm_pipeline *p, lm_pipe_kind kind)
{
    const lm_pipe_cost c = { step_us, step_us, step_us, 0 };
    return lm_pipe_took(&c, kind) * p->ranks / p->stages;
}

static lm_code compute(void *ctx, const lm_pipe_step *s, int slot, lm_err *e)
{
    const job *j = ctx;
    const long us = (long)time_of(j->p, (lm_pipe_kind)s->kind);
    const struct timespec t = { us / 1000000, us % 1000000 * 1000 };
    (void)slot, (void)e;
    nanosleep(&t, NULL);
    return LM_OK;
}

static char room[2][BYTES];

static bool part(void *ctx, int border, bool up, bool sender, int slot, size_t k, lm_pipe_part *out)
{
    (void)ctx, (void)border, (void)up, (void)slot;
    *out = (lm_pipe_part){ room[sender], BYTES };
    return k == 0;
}

static lm_code run_rank(void *ctx, lm_comm *c, lm_err *e)
{
    job *j = ctx;
    const lm_pipe_work work = { ctx, compute, part };
    lm_pipe_runner *r;
    if (lm_pipe_runner_new(j->p, &work, c, &r, e))
        return e->code;
    if (!lm_comm_barrier(c, e) && !lm_pipe_runner_run(r, e)) {
        const lm_pipe_use use = lm_pipe_runner_used(r);
        double n[] = { use.busy, use.all }, most = use.all;
        if (!lm_comm_all_reduce(c, n, n, 2, LM_DTYPE_F64, LM_COMM_SUM, e) &&
            !lm_comm_all_reduce(c, &most, &most, 1, LM_DTYPE_F64, LM_COMM_MAX, e) &&
            lm_comm_rank(c) == 0) {
            j->busy = n[0];
            j->all = most * lm_comm_size(c);
        }
    }
    lm_pipe_runner_free(r);
    return e->code;
}

static void measure(const char *spec, int ranks, int micros)
{
    lm_err e = { 0 };
    lm_pipeline p;
    lm_pipe_times times;
    lm_pipe_cost cost[STAGES];
    check(lm_pipeline_make(spec, ranks, micros, &p, &e), &e);
    check(lm_pipeline_check_run(&p, &e), &e);
    for (int k = 0; k < p.stages; k++)
        cost[k] = (lm_pipe_cost){ time_of(&p, LM_PIPE_F), time_of(&p, LM_PIPE_I),
                                  time_of(&p, LM_PIPE_W), 0 };
    check(lm_pipeline_time(&p, cost, &times, &e), &e);
    job j = { .p = &p };
    check(lm_threads_run(ranks, 60, run_rank, &j, &e), &e);
    const double planned = lm_pipe_bubble_total(&times), found = 1 - j.busy / j.all;
    printf("%-16s %6d %14d %9.1f %% %9.1f %% %+8.1f\n", spec, ranks, micros, 100 * planned,
           100 * found, 100 * (found - planned));
    lm_pipe_times_fini(&times, p.ranks);
    lm_pipeline_fini(&p);
}

int main(int argc, char **argv)
{
    static const char *const specs[] = { "gpipe",    "1f1b",  "interleaved:2", "breadth-first:2",
                                         "zb-h1",    "zb-h2", "zb-v",          "dualpipe",
                                         "dualpipev" };
    int ranks = 4, micros = 0;
    bool quick = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
            ranks = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--micro-batches") && i + 1 < argc)
            micros = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--step-ms") && i + 1 < argc)
            step_us = 1000 * atof(argv[++i]);
    }
    micros = micros > 0 ? micros : (quick ? 2 : 4) * ranks;
    printf("%-16s %6s %14s %11s %11s %8s\n", "schedule", "ranks", "micro-batches", "simulated",
           "measured", "points");
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++)
        measure(specs[k], ranks, micros);
    return 0;
}
