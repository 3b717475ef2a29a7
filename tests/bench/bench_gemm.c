/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gemm.c -- our matrix products over the 27 shapes of training next to oneDNN and OpenBLAS
 * and to the ceilings of the machine, and the reading of weights at small batches.
 *
 * usage: bench_gemm [--quick] [--threads N] [--bf16 | --f32 | --small]
 *
 * All contenders of a shape run in turn, in several rounds; ratios are medians over rounds of
 * ratios within the round, so a slow phase of a shared machine affects both.  Shares are of the
 * ceiling measured in that round.
 *
 * Built with -DHAVE_DNNL -ldnnl and -DHAVE_OPENBLAS -lopenblas where a trial compile finds these;
 * without them their columns are empty. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "kernels/linear.h"
#include "kernels/peak.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/peer_cpuid.h"

#ifdef HAVE_DNNL
#include <dnnl.h>
#endif
#ifdef HAVE_OPENBLAS
#include <cblas-openblas.h>
#endif

enum { MOST_ROUNDS = 9 };
enum { OURS, PACKED, PEER, PEER_PACKED, BLAS, CONTENDERS };
typedef enum { FWD, DGRAD, WGRAD } pass;
static const char *const pass_name[] = { "fwd", "dgrad", "wgrad" };

static const struct {
    int64_t k, n, t; /* weight [n,k], t rows */
} layers[] = {
    { 768, 2304, 4096 },  { 768, 768, 4096 },   { 768, 3072, 4096 },
    { 3072, 768, 4096 },  { 768, 50304, 4096 }, { 2048, 5632, 2048 },
    { 5632, 2048, 2048 }, { 4096, 11008, 512 }, { 4096, 11008, 2048 },
};
enum { LAYERS = sizeof(layers) / sizeof(layers[0]), HEAD = 4 };

static lm_par *par;
static lm_ceilings *ceilings;
static lm_cpu_level level;
static int threads;
static bool quick;

static void die(lm_err *e)
{
    fprintf(stderr, "bench_gemm: %s: %s\n", e->where, e->what);
    exit(1);
}

static void *must(size_t bytes)
{
    lm_err e = { 0 };
    void *p;

    if (lm_block_alloc(&p, bytes ? bytes : 1, "bench", &e))
        die(&e);
    return p;
}

/* n normal numbers; 65,521 drawn, then repeated (drawing is slow). */
static void *random_data(lm_dtype d, int64_t n, uint64_t sub)
{
    enum { DRAWN = 65521 };
    size_t size = lm_dtype_size(d);
    char *p = must((size_t)n * size);
    lm_rng r = lm_rng_make(3, "bench", sub);

    for (int64_t i = 0; i < n && i < DRAWN; i++)
        lm_set(d, p, i, lm_rng_normal(r, (uint64_t)i));
    for (int64_t i = DRAWN; i < n; i += DRAWN)
        memcpy(p + (size_t)i * size, p, size * (size_t)(n - i < DRAWN ? n - i : DRAWN));
    return p;
}

/* One product and the data of all contenders. */
typedef struct {
    lm_gemm g;
    void *a, *b, *c, *work, *packed;
    size_t a_bytes, b_bytes, c_bytes, work_bytes, packed_bytes;
#ifdef HAVE_DNNL
    dnnl_primitive_t prim[2];
    dnnl_memory_t mem[2][3];
#endif
} product;

#ifdef HAVE_DNNL
static dnnl_engine_t engine;
static dnnl_stream_t stream;

static void ok(dnnl_status_t s)
{
    if (s != dnnl_success) {
        fprintf(stderr, "bench_gemm: oneDNN: status %d\n", (int)s);
        exit(1);
    }
}

static dnnl_memory_desc_t matrix(int64_t r, int64_t c, bool t, int64_t ld, dnnl_data_type_t type)
{
    dnnl_memory_desc_t d;
    dnnl_dims_t dims = { r, c }, strides = { t ? 1 : ld, t ? ld : 1 };

    ok(dnnl_memory_desc_init_by_strides(&d, 2, dims, type, strides));
    return d;
}

static void peer_make(product *x, int which)
{
    const lm_gemm *g = &x->g;
    dnnl_data_type_t type = g->ab == LM_DTYPE_BF16 ? dnnl_bf16 : dnnl_f32;
    dnnl_memory_desc_t a = matrix(g->m, g->k, g->ta, g->lda, type);
    dnnl_memory_desc_t b = matrix(g->k, g->n, g->tb, g->ldb, type), want = b;
    dnnl_memory_desc_t c = matrix(g->m, g->n, false, g->ldc, dnnl_f32);
    dnnl_matmul_desc_t d;
    dnnl_primitive_desc_t pd;

    if (which == 1) {
        dnnl_dims_t dims = { g->k, g->n };
        ok(dnnl_memory_desc_init_by_tag(&want, 2, dims, type, dnnl_format_tag_any));
    }
    ok(dnnl_matmul_desc_init(&d, &a, &want, NULL, &c));
    ok(dnnl_primitive_desc_create(&pd, &d, NULL, engine, NULL));
    ok(dnnl_primitive_create(&x->prim[which], pd));
    ok(dnnl_memory_create(&x->mem[which][0], &a, engine, x->a));
    ok(dnnl_memory_create(&x->mem[which][2], &c, engine, x->c));
    if (which == 0) {
        ok(dnnl_memory_create(&x->mem[0][1], &b, engine, x->b));
    } else {
        const dnnl_memory_desc_t *wanted =
            dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
        dnnl_primitive_desc_t rpd;
        dnnl_primitive_t reorder;
        ok(dnnl_memory_create(&x->mem[1][1], wanted, engine, DNNL_MEMORY_ALLOCATE));
        ok(dnnl_reorder_primitive_desc_create(&rpd, &b, engine, wanted, engine, NULL));
        ok(dnnl_primitive_create(&reorder, rpd));
        dnnl_exec_arg_t args[] = { { DNNL_ARG_FROM, x->mem[0][1] }, { DNNL_ARG_TO, x->mem[1][1] } };
        ok(dnnl_primitive_execute(reorder, stream, 2, args));
        ok(dnnl_stream_wait(stream));
        dnnl_primitive_destroy(reorder);
        dnnl_primitive_desc_destroy(rpd);
    }
    dnnl_primitive_desc_destroy(pd);
}

static void peer_run(product *x, int which)
{
    dnnl_exec_arg_t args[] = { { DNNL_ARG_SRC, x->mem[which][0] },
                               { DNNL_ARG_WEIGHTS, x->mem[which][1] },
                               { DNNL_ARG_DST, x->mem[which][2] } };

    ok(dnnl_primitive_execute(x->prim[which], stream, 3, args));
    ok(dnnl_stream_wait(stream));
}

static void peer_free(product *x)
{
    for (int w = 0; w < 2; w++) {
        dnnl_primitive_destroy(x->prim[w]);
        for (int i = 0; i < 3; i++)
            dnnl_memory_destroy(x->mem[w][i]);
    }
}
#endif

static product product_make(lm_dtype ab, int64_t m, int64_t n, int64_t k, bool ta, bool tb)
{
    product x = { .g = { .m = m,
                         .n = n,
                         .k = k,
                         .ab = ab,
                         .cd = LM_DTYPE_F32,
                         .ta = ta,
                         .tb = tb,
                         .lda = ta ? m : k,
                         .ldb = tb ? k : n,
                         .ldc = n } };
    size_t size = lm_dtype_size(ab);

    x.a_bytes = (size_t)(m * k) * size;
    x.b_bytes = (size_t)(n * k) * size;
    x.c_bytes = (size_t)(m * n) * 4;
    x.work_bytes = lm_gemm_work(&x.g, level, threads);
    x.packed_bytes = lm_gemm_pack_size(&x.g, level);
    x.g.a = x.a = random_data(ab, m * k, 1);
    x.g.b = x.b = random_data(ab, n * k, 2);
    x.g.c = x.c = must(x.c_bytes);
    x.g.work = x.work = must(x.work_bytes);
    x.packed = must(x.packed_bytes);
    lm_gemm_pack(&x.g, level, par, x.packed);
#ifdef HAVE_DNNL
    peer_make(&x, 0);
    peer_make(&x, 1);
#endif
    return x;
}

static void product_free(product *x)
{
#ifdef HAVE_DNNL
    peer_free(x);
#endif
    lm_block_free(x->a, x->a_bytes);
    lm_block_free(x->b, x->b_bytes);
    lm_block_free(x->c, x->c_bytes);
    lm_block_free(x->work, x->work_bytes ? x->work_bytes : 1);
    lm_block_free(x->packed, x->packed_bytes ? x->packed_bytes : 1);
}

/* Run contender `who`; false if it is not available. */
static bool run(product *x, int who)
{
    lm_gemm g = x->g;

    switch (who) {
    case OURS:
        lm_gemm_run(&g, level, par);
        return true;
    case PACKED:
        g.b_packed = x->packed;
        lm_gemm_run(&g, level, par);
        return x->packed_bytes > 0;
#ifdef HAVE_DNNL
    case PEER:
    case PEER_PACKED:
        peer_run(x, who - PEER);
        return true;
#endif
#ifdef HAVE_OPENBLAS
    case BLAS:
        if (g.ab != LM_DTYPE_F32)
            return false;
        cblas_sgemm(CblasRowMajor, g.ta ? CblasTrans : CblasNoTrans,
                    g.tb ? CblasTrans : CblasNoTrans, (blasint)g.m, (blasint)g.n, (blasint)g.k, 1,
                    g.a, (blasint)g.lda, g.b, (blasint)g.ldb, 0, g.c, (blasint)g.ldc);
        return true;
#endif
    default:
        return false;
    }
}

typedef struct {
    double flops[CONTENDERS]; /* medians, FLOP/s */
    double share[2];          /* ours and packed, of the ceiling */
    double ratio[2];          /* ours and packed, over the best library of the same round */
} result;

/* Wait until the machine is idle: the libraries' threads spin for some time after a call and would
 * take cores from the next measurement. */
static void rest(void)
{
    nanosleep(&(struct timespec){ .tv_nsec = 40000000 }, NULL);
}

static result measure(product *x, int rounds)
{
    double f[CONTENDERS][MOST_ROUNDS], share[2][MOST_ROUNDS], ratio[2][MOST_ROUNDS];
    double flop = 2.0 * (double)x->g.m * (double)x->g.n * (double)x->g.k;
    bool bf16 = x->g.ab == LM_DTYPE_BF16;
    bool amx = bf16 && level >= LM_CPU_AMX;
    result r = { 0 };

    for (int i = 0; i < CONTENDERS; i++)
        run(x, i); /* warm up */
    for (int round = 0; round < rounds; round++) {
        double best = 0;
        rest();
        double top = amx    ? lm_ceiling_amx_l1(ceilings)
                     : bf16 ? lm_cpu_peak(x->g.ab, level, par)
                            : lm_ceiling_fma_f32(ceilings);
        for (int i = 0; i < CONTENDERS; i++) {
            rest();
            double t = lm_now();
            bool there = run(x, i);
            f[i][round] = there ? flop / (lm_now() - t) : 0;
            if (i >= PEER && f[i][round] > best)
                best = f[i][round];
        }
        for (int i = 0; i < 2; i++) {
            share[i][round] = f[i][round] / top;
            ratio[i][round] = best > 0 ? f[i][round] / best : 0;
        }
    }
    for (int i = 0; i < CONTENDERS; i++)
        r.flops[i] = lm_median(f[i], rounds);
    for (int i = 0; i < 2; i++) {
        r.share[i] = lm_median(share[i], rounds);
        r.ratio[i] = lm_median(ratio[i], rounds);
    }
    return r;
}

typedef struct {
    double log_sum[4];
    int n;
} means;

static void means_add(means *m, const result *r)
{
    double v[4] = { r->share[0], r->share[1], r->ratio[0], r->ratio[1] };

    for (int i = 0; i < 4; i++)
        m->log_sum[i] += log(v[i] > 0 ? v[i] : 1e-9);
    m->n++;
}

static void means_show(const char *name, const means *m)
{
    double v[4];

    if (m->n == 0)
        return;
    for (int i = 0; i < 4; i++) {
        v[i] = exp(m->log_sum[i] / m->n);
        if (v[i] < 1e-6)
            v[i] = 0;
    }
    printf("%-28s %3d cases: ours %5.1f%% (packed %5.1f%%) of the ceiling, %.2fx (packed %.2fx) "
           "the best library\n",
           name, m->n, 100 * v[0], 100 * v[1], v[2], v[3]);
}

static void table(lm_dtype ab, int rounds)
{
    means all = { 0 }, weak = { 0 };

    printf("\n%s in, f32 out; GFLOP/s, medians of %d rounds\n", lm_dtype_name(ab), rounds);
    printf("%-18s %-5s %7s %7s %7s %7s %7s  %6s %6s  %6s %6s\n", "K x N, T", "pass", "ours",
           "packed", "dnnl", "dnnl-p", "blas", "share", "packed", "ratio", "packed");
    for (int i = 0; i < LAYERS; i++) {
        int64_t k = layers[i].k, n = layers[i].n, t = layers[i].t;
        if (quick && i != 0 && i != 3)
            continue;
        for (pass p = FWD; p <= WGRAD; p++) {
            product x = p == FWD     ? product_make(ab, t, n, k, false, true)
                        : p == DGRAD ? product_make(ab, t, k, n, false, false)
                                     : product_make(ab, n, k, t, true, false);
            result r = measure(&x, rounds);
            char name[48];
            snprintf(name, sizeof(name), "%" PRId64 "x%" PRId64 ", %" PRId64, k, n, t);
            printf("%-18s %-5s", name, pass_name[p]);
            for (int q = 0; q < CONTENDERS; q++)
                printf(" %7.0f", r.flops[q] * 1e-9);
            printf("  %5.1f%% %5.1f%%  %6.2f %6.2f\n", 100 * r.share[0], 100 * r.share[1],
                   r.ratio[0], r.ratio[1]);
            fflush(stdout);
            means_add(&all, &r);
            if (p == WGRAD || i == HEAD)
                means_add(&weak, &r);
            product_free(&x);
        }
    }
    means_show("geometric mean", &all);
    means_show("weight gradients and head", &weak);
}

/* Decoding: a weight of 4096 x 11008 read once for m rows. */
static void small_batches(lm_dtype ab, int rounds)
{
    const int64_t n = 11008, k = 4096;

    printf("\nsmall batches, %s: bytes of weight per second against the reading of memory\n",
           lm_dtype_name(ab));
    for (int64_t m = 1; m <= LM_GEMM_SMALL_M; m *= 2) {
        product x = { .g = { .m = m,
                             .n = n,
                             .k = k,
                             .ab = ab,
                             .cd = LM_DTYPE_F32,
                             .tb = true,
                             .lda = k,
                             .ldb = k,
                             .ldc = n } };
        double rate[MOST_ROUNDS], share[MOST_ROUNDS];
        size_t bytes = (size_t)(n * k) * lm_dtype_size(ab);
        x.g.a = x.a = random_data(ab, m * k, 1);
        x.g.b = x.b = random_data(ab, n * k, 2);
        x.g.c = x.c = must((size_t)(m * n) * 4);
        for (int i = 0; i < rounds; i++) {
            double top = lm_ceiling_read(ceilings), t = lm_now();
            lm_gemm_run(&x.g, level, par);
            rate[i] = (double)bytes / (lm_now() - t);
            share[i] = rate[i] / top;
        }
        printf("m %" PRId64 ": %5.1f GB/s, %5.1f%%\n", m, lm_median(rate, rounds) * 1e-9,
               100 * lm_median(share, rounds));
        lm_block_free(x.a, (size_t)(m * k) * lm_dtype_size(ab));
        lm_block_free(x.b, bytes);
        lm_block_free(x.c, (size_t)(m * n) * 4);
    }
}

static void show_ceilings(void)
{
    printf("%s, level %s, %d threads\n", lm_cpu_model(), lm_cpu_level_name(level), threads);
    printf(
        "ceilings: AMX bf16 %.0f GFLOP/s from registers, %.0f from L1; FMA f32 %.0f; memory read "
        "%.1f GB/s, copy %.1f GB/s\n",
        lm_ceiling_amx_registers(ceilings) * 1e-9, lm_ceiling_amx_l1(ceilings) * 1e-9,
        lm_ceiling_fma_f32(ceilings) * 1e-9, lm_ceiling_read(ceilings) * 1e-9,
        lm_ceiling_copy(ceilings) * 1e-9);
}

/* OpenBLAS does not recognise some virtual processors and uses a kernel of 2004.  It reads the name
 * of a kernel from its environment when it is loaded, so the bench restarts itself with a better
 * name. */
static void fix_openblas(char **argv)
{
#ifdef HAVE_OPENBLAS
    if (!getenv("OPENBLAS_CORETYPE") && strcmp(openblas_get_corename(), "Prescott") == 0) {
        setenv("OPENBLAS_CORETYPE", level >= LM_CPU_AVX512 ? "SKYLAKEX" : "HASWELL", 1);
        execv("/proc/self/exe", argv);
    }
    printf("OpenBLAS kernels: %s\n", openblas_get_corename());
#else
    (void)argv;
#endif
}

/* The libraries start their threads before ours are pinned: those would inherit a mask of one core.
 */
static void start_libraries(void)
{
#ifdef HAVE_OPENBLAS
    openblas_set_num_threads(threads);
#endif
#ifdef HAVE_DNNL
    char n[16];
    snprintf(n, sizeof(n), "%d", threads);
    setenv("OMP_NUM_THREADS", n, 1);
    if (lm_peer_cpuid_repair())
        printf("CPUID leaf 1Dh is hidden here: repaired, so that oneDNN can use AMX\n");
    ok(dnnl_engine_create(&engine, dnnl_cpu, 0));
    ok(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    product x = product_make(LM_DTYPE_BF16, 256, 256, 256, false, false);
    run(&x, PEER);
    run(&x, PEER_PACKED);
    product_free(&x);
#endif
}

int main(int argc, char **argv)
{
    const char *only = "";
    lm_err e = { 0 };
    int rounds;

    level = lm_cpu_detect();
    threads = lm_cpu_count();
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            threads = atoi(argv[++i]);
        else if (strncmp(argv[i], "--", 2) == 0)
            only = argv[i] + 2;
    }
    if (level == LM_CPU_REF || threads < 1) {
        fprintf(stderr, "bench_gemm: nothing to measure without AVX2 or without threads\n");
        return 1;
    }
    rounds = quick ? 5 : 7;
    fix_openblas(argv);
    start_libraries();
    if (lm_par_new(&par, threads, &e) || lm_ceilings_new(&ceilings, par, &e))
        die(&e);
    show_ceilings();
    if (!*only || strcmp(only, "bf16") == 0)
        table(LM_DTYPE_BF16, rounds);
    if (!*only || strcmp(only, "f32") == 0)
        table(LM_DTYPE_F32, quick ? 3 : 5);
    if (!*only || strcmp(only, "small") == 0) {
        small_batches(LM_DTYPE_BF16, rounds);
        small_batches(LM_DTYPE_F32, rounds);
    }
    lm_ceilings_free(ceilings);
    lm_par_free(par);
    return 0;
}
