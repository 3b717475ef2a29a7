/* SPDX-License-Identifier: Apache-2.0 */
/* bench_merge.c -- bytes per second of each merge method, inputs read and output written counted
 * once each, as a share of memcpy's in the same run; the CPU time per element, which is more
 * meaningful on a shared machine; and the scratch memory.
 *
 * usage: bench_merge [--quick] [--threads N] [METHOD]      (only methods whose name starts so)
 *
 * One BF16 tensor of 2,048 x 8,192 elements of three models (two, or one, where the method takes no
 * more) and a base; density 0.5 where there is one.  Deltas are normal numbers times 0.01, weights
 * times 0.02. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "merge/method.h"
#include "tests/bench/ceilings.h"

enum { ROWS = 2048, COLS = 8192, MODELS = 3, IN_QUICK = 1024 };

static lm_par *par;
static lm_ceilings *ceilings;
static void *data[MODELS + 1], *out, *gram;
static int64_t dim[2] = { ROWS, COLS };
static bool quick;

static void must(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_merge: %s: %s\n", e->where, e->what);
    exit(1);
}

typedef struct {
    uint16_t *to;
    uint64_t which;
} filling;

static void fill(void *ctx, int64_t begin, int64_t end, int worker)
{
    const filling *f = ctx;
    lm_rng base = lm_rng_make(1, "bench", 0), mine = lm_rng_make(1, "bench", f->which);
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        double v = 0.02 * lm_rng_normal(base, (uint64_t)i);
        if (f->which)
            v += 0.01 * lm_rng_normal(mine, (uint64_t)i);
        f->to[i] = lm_f64_to_bf16(v);
    }
}

static void make_data(void)
{
    lm_err e = { 0 };
    size_t bytes = (size_t)dim[0] * (size_t)dim[1] * 2, square = (size_t)dim[1] * (size_t)dim[1];
    for (int i = 0; i <= MODELS; i++) {
        must(lm_block_alloc(&data[i], bytes, "bench data", &e), &e);
        filling f = { data[i], (uint64_t)i };
        lm_par_for(par, dim[0] * dim[1], 65536, fill, &f);
    }
    must(lm_block_alloc(&out, bytes, "bench data", &e), &e);
    must(lm_block_alloc(&gram, square * 4, "bench data", &e), &e);
    for (int64_t k = 0; k < dim[1]; k++)
        ((float *)gram)[k * dim[1] + k] = 1;
    memset(out, 1, bytes);
}

/* The job of `m`, with all required parameters. */
static lm_merge_job make_job(const lm_merge_method *m, lm_merge_operand *model,
                             lm_merge_operand *base)
{
    int n = m->max_models && m->max_models < MODELS ? m->max_models : MODELS;
    lm_merge_job j = { .name = "bench",
                       .ndim = 2,
                       .dim = dim,
                       .count = dim[0] * dim[1],
                       .model = model,
                       .n_models = n,
                       .out = out,
                       .out_dtype = LM_DTYPE_BF16,
                       .par = par,
                       .cpu = lm_cpu_detect() };
    *base = (lm_merge_operand){ .data = data[0], .dtype = LM_DTYPE_BF16 };
    j.base = m->base_allowed ? base : NULL;
    for (int i = 0; i < n; i++)
        model[i] = (lm_merge_operand){ .data = data[i + 1], .dtype = LM_DTYPE_BF16 };
    for (int p = 0; p < LM_MERGE_PARAMS; p++) {
        bool needed = m->required >> p & 1;
        j.param[p] = base->param[p] = NAN;
        if (needed && !lm_merge_params[p].per_model)
            j.param[p] = 0.4;
        for (int i = 0; i < n; i++)
            model[i].param[p] = needed && lm_merge_params[p].per_model ? 0.4 : NAN;
    }
    for (int i = 0; i < n; i++) {
        if (m->takes >> LM_MERGE_DENSITY & 1)
            model[i].param[LM_MERGE_DENSITY] = 0.5;
        if (m->extra == LM_EXTRA_GRAM) {
            model[i].extra = gram;
            model[i].extra_dtype = LM_DTYPE_F32;
            model[i].extra_count = dim[1] * dim[1];
        }
    }
    if (m->takes >> LM_MERGE_SELECT_TOPK & 1)
        j.param[LM_MERGE_SELECT_TOPK] = 0.5;
    lm_merge_defaults(m, j.param);
    return j;
}

/* CPU seconds of the threads of this process. */
static double busy(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void measure(const lm_merge_method *m)
{
    lm_err e = { 0 };
    lm_merge_operand model[MODELS], base;
    lm_merge_job j = make_job(m, model, &base);
    double copy = lm_ceiling_copy(ceilings), t[9], cpu[9], rate;
    size_t work = m->work(&j, lm_par_threads(par)) + 64;
    int rounds = quick || m->extra == LM_EXTRA_GRAM ? 1 : 9;
    int arrays = j.n_models + (j.base != NULL) + 1;
    must(lm_block_alloc(&j.work, work, "bench scratch", &e), &e);
    for (int i = rounds > 1 ? -1 : 0; i < rounds; i++) {
        double from = lm_now(), ran = busy();
        must(m->run(&j, &e), &e);
        if (i >= 0) {
            t[i] = lm_now() - from;
            cpu[i] = busy() - ran;
        }
    }
    lm_block_free(j.work, work);
    rate = 2.0 * (double)j.count * arrays / lm_median(t, rounds);
    printf("  %-18s %d%s %7.2f GB/s %5.1f %% of memcpy %6.2f GB/s, CPU %6.2f ns, scratch %5.2f B "
           "an element\n",
           m->name, j.n_models, j.base ? "+base" : "     ", rate / 1e9, 100 * rate / copy,
           copy / 1e9, 1e9 * lm_median(cpu, rounds) / (double)j.count,
           (double)work / (double)j.count);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    const lm_merge_method *m;
    const char *only = "";
    int threads = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
        else
            only = argv[i];
    }
    must(lm_par_new(&par, threads, &e), &e);
    must(lm_ceilings_new(&ceilings, par, &e), &e);
    if (quick)
        dim[0] = dim[1] = IN_QUICK;
    make_data();
    printf("  merge methods, %lld x %lld BF16, %d threads\n", (long long)dim[0], (long long)dim[1],
           lm_par_threads(par));
    for (int i = 0; (m = lm_merge_method_at(i)); i++)
        if (!strncmp(m->name, only, strlen(only)))
            measure(m);
    lm_ceilings_free(ceilings);
    lm_par_free(par);
    return 0;
}
