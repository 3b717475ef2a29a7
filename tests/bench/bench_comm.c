/* SPDX-License-Identifier: Apache-2.0 */
/* bench_comm.c -- reductions and gathers of two ranks, as threads and as processes that share memory, beside as many streams of
 * memcpy that move as many bytes.
 *
 * usage: bench_comm [--ranks N] [--piece KIB] [--quick] [--cpu-time]
 *
 * What a rank of N must read and write for S bytes of F32, halved, is what memcpy would have to copy:
 *   all-gather       in place: reads and writes (N-1)/N S
 *   reduce-scatter   reads S, in its own operand and those of others, and writes S/N
 *   all-reduce       in place: both
 * Each stream copies that within the memory of its rank, all at once; copies and calls alternate, and medians are shown.
 * --piece: of the buffers between processes.
 * --cpu-time: processor seconds of the slower rank instead of elapsed ones, for a machine that others use too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/shm.h"
#include "comm/threads.h"
#include "tests/bench/ceilings.h"

enum { SCATTER, GATHER, REDUCE, CALLS, SIZES = 6, ROUNDS = 21, MOST = 8 };
static const char *const names[] = { "reduce-scatter", "all-gather", "all-reduce" };
static const size_t sizes[SIZES] = { 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20 };

typedef struct {
    int sizes;
    double copy[CALLS][SIZES], call[CALLS][SIZES]; /* seconds */
} result;

static void check(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_comm: %s: %s\n", e->where, e->what);
    exit(1);
}

static bool cpu_time;

static double now(void)
{
    struct timespec t;

    if (!cpu_time)
        return lm_now();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of the slowest rank. */
static double slowest(lm_comm *c, double t, lm_err *e)
{
    check(lm_comm_all_reduce(c, &t, &t, 1, LM_DTYPE_F64, LM_COMM_MAX, e), e);
    return t;
}

typedef struct {
    lm_comm *c;
    float *in, *out;
    size_t bytes, count[MOST], part[MOST];
} operands;

static double time_call(operands *o, int call, lm_err *e)
{
    int rank = lm_comm_rank(o->c);
    char *own = (char *)o->out + (size_t)rank * o->part[0];
    double begin;

    check(lm_comm_barrier(o->c, e), e);
    begin = now();
    if (call == SCATTER)
        check(lm_comm_reduce_scatter(o->c, o->in, own, o->count, LM_DTYPE_F32, LM_COMM_SUM, e), e);
    else if (call == GATHER)
        check(lm_comm_all_gather(o->c, own, o->out, o->part, e), e);
    else
        check(lm_comm_all_reduce(o->c, o->out, o->out, o->bytes / 4, LM_DTYPE_F32, LM_COMM_SUM, e),
              e);
    return slowest(o->c, now() - begin, e);
}

/* Bytes that memcpy would copy. */
static double moved(int call, double bytes, int ranks)
{
    double gather = bytes * (ranks - 1) / ranks, scatter = (bytes + bytes / ranks) / 2;

    return call == SCATTER ? scatter : call == GATHER ? gather : scatter + gather;
}

static double time_copy(operands *o, int call, lm_err *e)
{
    size_t left = (size_t)moved(call, (double)o->bytes, lm_comm_size(o->c));
    double begin;

    check(lm_comm_barrier(o->c, e), e);
    begin = now();
    for (size_t n; left > 0; left -= n) {
        n = left < o->bytes ? left : o->bytes;
        memcpy(o->out, o->in, n);
    }
    return slowest(o->c, now() - begin, e);
}

static void measure(operands *o, int call, int size, result *r, lm_err *e)
{
    double copy[ROUNDS], time[ROUNDS];
    int each = o->bytes < 1 << 20 ? 20 : 1; /* calls of a round */

    for (int i = -2; i < ROUNDS; i++) {
        double a = 0, b = 0;

        for (int k = 0; k < each; k++) {
            a += time_copy(o, call, e);
            b += time_call(o, call, e);
        }
        if (i >= 0)
            copy[i] = a / each, time[i] = b / each;
    }
    if (lm_comm_rank(o->c) == 0) {
        r->copy[call][size] = lm_median(copy, ROUNDS);
        r->call[call][size] = lm_median(time, ROUNDS);
    }
}

static lm_code run_all(void *ctx, lm_comm *c, lm_err *e)
{
    result *r = ctx;
    int ranks = lm_comm_size(c);
    size_t most = sizes[r->sizes - 1];
    void *in, *out;

    check(lm_block_alloc(&in, most, "bench", e), e);
    check(lm_block_alloc(&out, most, "bench", e), e);
    for (size_t i = 0; i < most / 4; i++)
        ((float *)in)[i] = (float)(i % 1000);
    memset(out, 0, most);
    for (int s = 0; s < r->sizes; s++) {
        operands o = { .c = c, .in = in, .out = out };
        size_t part = sizes[s] / (size_t)ranks / 64 * 64;

        o.bytes = part * (size_t)ranks;
        for (int k = 0; k < ranks; k++)
            o.part[k] = part, o.count[k] = part / 4;
        for (int call = 0; call < CALLS; call++)
            measure(&o, call, s, r, e);
    }
    lm_block_free(in, most);
    lm_block_free(out, most);
    return LM_OK;
}

static void run_processes(int ranks, size_t piece, result *r)
{
    lm_shm *s;
    lm_err e = { 0 };
    int status = 0;

    check(lm_shm_new(ranks, 60, piece, &s, &e), &e);
    fflush(stdout);
    for (int k = 0; k < ranks; k++) {
        lm_comm *c;

        if (fork())
            continue;
        check(lm_shm_join(s, k, &c, &e), &e);
        run_all(r, c, &e);
        _exit(0);
    }
    for (int k = 0; k < ranks; k++)
        if (wait(&status) < 0 || status)
            exit(1);
    lm_shm_drop(s);
}

static result *new_result(int sizes_used)
{
    result *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (r == MAP_FAILED)
        exit(1);
    r->sizes = sizes_used;
    return r;
}

static void print_row(int call, int s, int ranks, const result *t, const result *p)
{
    double n = moved(call, (double)sizes[s], ranks);

    printf("%-15s %8zu  %8.2f %8.2f %6.0f %%  %8.2f %8.2f %6.0f %%\n", names[call], sizes[s] >> 10,
           n / t->copy[call][s] * 1e-9, n / t->call[call][s] * 1e-9,
           100 * t->copy[call][s] / t->call[call][s], n / p->copy[call][s] * 1e-9,
           n / p->call[call][s] * 1e-9, 100 * p->copy[call][s] / p->call[call][s]);
}

int main(int argc, char **argv)
{
    int ranks = 2, used = SIZES;
    size_t piece = 0;
    lm_err e = { 0 };

    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--quick"))
            used = 4;
        else if (!strcmp(argv[i], "--cpu-time"))
            cpu_time = true;
        else if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
            ranks = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--piece") && i + 1 < argc)
            piece = (size_t)atoi(argv[++i]) << 10;
    if (ranks < 2 || ranks > MOST)
        return 2;
    result *t = new_result(used), *p = new_result(used);
    check(lm_threads_run(ranks, 60, run_all, t, &e), &e);
    run_processes(ranks, piece, p);
    printf("%d ranks, F32; bytes read and written by a rank / 2, GB/s\n", ranks);
    printf("%-15s %8s  %8s %8s %8s  %8s %8s %8s\n", "", "", "threads", "", "", "processes", "", "");
    printf("%-15s %8s  %8s %8s %8s  %8s %8s %8s\n", "call", "KiB", "memcpy", "call", "share",
           "memcpy", "call", "share");
    for (int call = 0; call < CALLS; call++)
        for (int s = 0; s < used; s++)
            print_row(call, s, ranks, t, p);
    return 0;
}
