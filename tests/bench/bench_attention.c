/* SPDX-License-Identifier: Apache-2.0 */
/* bench_attention.c -- FLOP/s of attention, forward and backward, as a share of the ceiling
 * measured in the same run (AMX with tiles from L1 for BF16, vector FMA for F32); decoding as a
 * share of the read bandwidth.
 *
 * usage: bench_attention [--quick] [--threads N] [NAME]     (only shapes NAME*)
 *
 * FLOPs are those of the usual convention: forward 4 B H T^2 D, halved for the causal mask,
 * backward 2.5 times that; of short documents in a window only the pairs of a query and a key that
 * it sees count.  Recomputed and masked work inside a tile does not count.  Lines `gaussian` are
 * attention with a Gaussian kernel, as FLOPs of softmax attention of the same sizes.  Figures are
 * medians.
 * LM_CPU=LEVEL measures the kernels of another level. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "kernels/attention.h"
#include "kernels/gaussian.h"
#include "op/attention_blocks.h"
#include "tests/bench/call.h"

typedef struct {
    const char *name;
    int64_t B, T, H, K, D, document; /* mean length of documents; 0: one */
    int64_t block;                   /* block-sparse with blocks of so many keys; 0: none */
} shape;

/* The pattern of Phi-3-small. */
static lm_attention_blocks pattern(int64_t block)
{
    return (lm_attention_blocks){ .size = block, .local = 16, .stride = 8 };
}

static const shape shapes[] = {
    { "gpt2-124m", 4, 256, 12, 12, 64, 0, 0 },    { "gpt2-124m", 4, 1024, 12, 12, 64, 0, 0 },
    { "gpt2-124m", 1, 1024, 12, 12, 64, 170, 0 }, { "gpt2-124m", 1, 1024, 12, 12, 64, 40, 0 },
    { "llama-1b", 1, 2048, 32, 8, 64, 0, 0 },     { "llama-8b", 1, 2048, 32, 8, 128, 0, 0 },
    { "llama-8b", 1, 2048, 32, 8, 128, 170, 0 },  { "head-80", 1, 1024, 32, 32, 80, 0, 0 },
    { "head-96", 1, 1024, 32, 32, 96, 0, 0 },     { "full", 1, 4096, 8, 8, 64, 0, 0 },
    { "blocks", 1, 4096, 8, 8, 64, 0, 64 },       { "full", 1, 8192, 8, 8, 64, 0, 0 },
    { "blocks", 1, 8192, 8, 8, 64, 0, 64 },
};
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

static lm_par *par;
static lm_ceilings *ceilings;
static lm_cpu_level level;
static bool quick;

static void die(const lm_err *e)
{
    fprintf(stderr, "bench_attention: %s: %s\n", e->where, e->what);
    exit(1);
}

static size_t bytes_of(const lm_tensor *t)
{
    return (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype);
}

/* Normal numbers, a block of them repeated. */
static lm_tensor make(lm_dtype type, int64_t rows, int64_t cols)
{
    enum { DRAWN = 65521 };
    lm_tensor t = { .dtype = type, .ndim = 2, .dim = { rows, cols } };
    lm_err e = { 0 };
    if (lm_block_alloc(&t.data, bytes_of(&t), "a bench operand", &e))
        die(&e);
    lm_rng r = lm_rng_make(5, "bench", (uint64_t)cols);
    int64_t n = lm_tensor_count(&t);
    size_t size = lm_dtype_size(type);
    for (int64_t i = 0; i < n && i < DRAWN; i++)
        lm_set(type, t.data, i, lm_rng_normal(r, (uint64_t)i));
    for (int64_t i = DRAWN; i < n; i += DRAWN)
        memcpy((char *)t.data + (size_t)i * size, t.data,
               size * (size_t)(n - i < DRAWN ? n - i : DRAWN));
    return t;
}

static double seconds(const lm_kernel *k, lm_call *c)
{
    double t = 0;
    lm_err e = { 0 };
    if (call_seconds(k, c, quick ? 3 : 9, &t, &e))
        die(&e);
    return t;
}

static void report(const shape *s, const char *op, const lm_kernel *k, lm_dtype act, double flops,
                   double t)
{
    double peak = act == LM_DTYPE_BF16 ? lm_ceiling_amx_l1(ceilings) : lm_ceiling_fma_f32(ceilings);
    char documents[24] = "";
    if (s->document)
        snprintf(documents, sizeof documents, "/%lld", (long long)s->document);
    printf("%-10s T %4lld%-4s H %2lld K %2lld D %3lld  %-12s %-5s %-10s %8.2f ms %8.0f GFLOP/s",
           s->name, (long long)s->T, documents, (long long)s->H, (long long)s->K, (long long)s->D,
           op, lm_dtype_name(act), lm_cpu_level_name(k->level), t * 1e3, flops / t * 1e-9);
    if (peak > 0)
        printf(" %5.1f %% of %.0f", 100 * flops / t / peak, peak * 1e-9);
    putchar('\n');
}

/* Starts of documents of half to three halves of the mean length; pairs of a query and a key that
 * it sees. */
static double cut(const shape *s, int32_t *lo)
{
    lm_rng r = lm_rng_make(5, "bench", 0);
    double pairs = 0;
    for (int64_t i = 0, n = 0, from = 0, to = 0; i < s->B * s->T; i++) {
        if (i % s->T == 0 || i == to) {
            from = i;
            to = i + s->document / 2 + lm_rng_u32(r, (uint64_t)n++) % (s->document + 1);
        }
        lo[i] = (int32_t)(from % s->T);
        pairs += (double)(i - from + 1);
    }
    return pairs;
}

static void measure(const shape *s, lm_dtype act)
{
    static const lm_step step = { .seed = 1 };
    lm_attention_attr a = { .batch = s->B,
                            .seq = s->T,
                            .heads = s->H,
                            .kv_heads = s->K,
                            .head_dim = s->D,
                            .causal = true,
                            .scale = 1 / sqrt((double)s->D),
                            .blocks = s->block ? pattern(s->block) : (lm_attention_blocks){ 0 } };
    int64_t n = s->B * s->T, wide = (s->H + 2 * s->K) * s->D;
    lm_tensor qkv = make(act, n, wide), dqkv = make(act, n, wide), o = make(act, n, s->H * s->D);
    lm_tensor dout = make(act, n, s->H * s->D), lse = make(LM_DTYPE_F32, s->B * s->H, s->T);
    double flops = 2.0 * (double)(s->B * s->H * s->D) * (double)s->T * (double)s->T;
    lm_tensor lo = { 0 };
    if (s->block)
        flops =
            4.0 * (double)(s->B * s->H * s->D) * lm_attention_block_pairs(&a.blocks, s->H, s->T);
    if (s->document) {
        lo = make(LM_DTYPE_I32, n, 1);
        flops = 4.0 * (double)(s->H * s->D) * cut(s, lo.data);
    }
    lm_tensor in[5] = { qkv, lo }, out[2] = { o, lse };
    lm_call c = {
        .attr = &a, .in = in, .n_in = 2, .out = out, .n_out = 2, .par = par, .step = &step
    };
    const lm_kernel *k = lm_cpu_kernel("attention", act, level);
    report(s, k->op, k, act, flops, seconds(k, &c));
    memcpy(in, (lm_tensor[]){ dout, qkv, o, lse, lo }, 5 * sizeof *in);
    out[0] = dqkv;
    c.n_in = 5;
    c.n_out = 1;
    k = lm_cpu_kernel("attention_dx", act, level);
    report(s, k->op, k, act, 2.5 * flops, seconds(k, &c));
    lm_tensor *all[] = { &qkv, &dqkv, &o, &dout, &lse, &lo };
    for (int i = 0; i < 6; i++)
        if (all[i]->data)
            lm_block_free(all[i]->data, bytes_of(all[i]));
}

static double seconds_of(const char *op, lm_dtype act, const void *attr, const lm_tensor *in,
                         int n_in, lm_tensor *out, int n_out, const lm_kernel **k)
{
    static const lm_step step = { .seed = 1 };
    lm_call c = {
        .attr = attr, .in = in, .n_in = n_in, .out = out, .n_out = n_out, .par = par, .step = &step
    };
    *k = lm_cpu_kernel(op, act, level);
    return seconds(*k, &c);
}

/* Attention with a Gaussian kernel (kernels/gaussian.h): of both directions the rows and the attention together, as FLOPs
 * of softmax attention of the same sizes. */
static void measure_gaussian(const shape *s, lm_dtype act)
{
    const lm_gaussian_attr g = { s->H, s->K, s->D, true };
    const lm_attention_attr a = { .batch = s->B,
                                  .seq = s->T,
                                  .heads = s->H,
                                  .kv_heads = s->K,
                                  .head_dim = s->D + LM_GAUSSIAN_MORE,
                                  .value_dim = s->D,
                                  .causal = true,
                                  .undivided = true,
                                  .scale = 1 / sqrt((double)s->D) };
    const lm_kernel *k;
    int64_t n = s->B * s->T, wide = (s->H + 2 * s->K) * s->D, longer = lm_gaussian_row(&g);
    lm_tensor qkv = make(act, n, wide), y = make(act, n, longer), dy = make(act, n, longer);
    lm_tensor o = make(act, n, s->H * s->D), dout = make(act, n, s->H * s->D);
    lm_tensor lse = make(LM_DTYPE_F32, s->B * s->H, s->T), out[2] = { o, lse };
    const lm_tensor back[5] = { dout, y, o, lse };
    double flops = 2.0 * (double)(s->B * s->H * s->D) * (double)s->T * (double)s->T;
    double t = seconds_of("gaussian_rows", act, &g, &qkv, 1, &y, 1, &k);
    t += seconds_of("attention", act, &a, &y, 1, out, 2, &k);
    report(s, "gaussian", k, act, flops, t);
    t = seconds_of("attention_dx", act, &a, back, 5, &dy, 1, &k);
    t += seconds_of("gaussian_rows_dx", act, &g, (lm_tensor[]){ dy, y }, 2, &qkv, 1,
                    &(const lm_kernel *){ NULL });
    report(s, "gaussian_dx", k, act, 2.5 * flops, t);
    lm_tensor *all[] = { &qkv, &y, &dy, &o, &dout, &lse };
    for (int i = 0; i < 6; i++)
        lm_block_free(all[i]->data, bytes_of(all[i]));
}

/* One token for each of B sequences over a cache of S positions: bytes of the cache per second.  E: of values; 0: as
 * keys; those of another size are the first numbers of the keys (latent attention). */
static void measure_decoding(int64_t B, int64_t S, int64_t H, int64_t K, int64_t D, int64_t E,
                             int64_t block, lm_dtype act)
{
    static const lm_step step = { .seed = 1 };
    lm_attention_attr a = { .batch = B,
                            .seq = 1,
                            .heads = H,
                            .kv_heads = K,
                            .head_dim = D,
                            .causal = true,
                            .scale = 1 / sqrt((double)D),
                            .value_dim = E,
                            .blocks = block ? pattern(block) : (lm_attention_blocks){ 0 } };
    const int sides = E ? 1 : 2;
    lm_tensor in[3] = { make(act, B, lm_attention_row(&a, !E)), make(LM_DTYPE_I32, B, 1),
                        make(LM_DTYPE_I32, B, 1) };
    lm_tensor out[3] = { make(act, B, H * lm_attention_value_dim(&a)), make(act, B * K * S, D) };
    if (!E)
        out[2] = make(act, B * K * S, D);
    for (int64_t b = 0; b < B; b++) {
        ((int32_t *)in[1].data)[b] = (int32_t)S - 1;
        ((int32_t *)in[2].data)[b] = 1;
    }
    for (int i = 1; i <= sides; i++) {
        out[i].ndim = 4;
        memcpy(out[i].dim, (int64_t[]){ B, K, S, D }, 4 * sizeof(int64_t));
    }
    lm_call c = {
        .attr = &a, .in = in, .n_in = 3, .out = out, .n_out = 3, .par = par, .step = &step
    };
    const lm_kernel *k = lm_cpu_kernel("attention_cached", act, level);
    double bytes = sides * (double)bytes_of(&out[1]), t = seconds(k, &c);
    if (block)
        bytes *= (lm_attention_block_pairs(&a.blocks, H, S) -
                  lm_attention_block_pairs(&a.blocks, H, S - 1)) /
                 (double)S;
    double peak = lm_ceiling_read(ceilings);
    printf("%-10s B %2lld S %5lld H %2lld K %2lld D %3lld       %-5s %-7s %8.2f ms %8.1f GB/s"
           " %5.1f %% of %.1f\n",
           block ? "  blocks" : "decoding", (long long)B, (long long)S, (long long)H, (long long)K,
           (long long)D, lm_dtype_name(act), lm_cpu_level_name(k->level), t * 1e3, bytes / t * 1e-9,
           100 * bytes / t / peak, peak * 1e-9);
    for (int i = 0; i < 3; i++) {
        lm_block_free(in[i].data, bytes_of(&in[i]));
        if (out[i].data)
            lm_block_free(out[i].data, bytes_of(&out[i]));
    }
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    int threads = 0;
    const char *only = "";
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
        else
            only = argv[i];
    }
    level = lm_cpu_detect();
    if (getenv("LM_CPU") && lm_cpu_level_parse(getenv("LM_CPU"), &level, &e))
        die(&e);
    if (lm_par_new(&par, threads, &e) || lm_ceilings_new(&ceilings, par, &e))
        die(&e);
    printf("%s, %d threads\n", lm_cpu_model(), lm_par_threads(par));
    for (int i = 0; i < N_SHAPES; i++) {
        if (strncmp(shapes[i].name, only, strlen(only)))
            continue;
        measure(&shapes[i], LM_DTYPE_BF16);
        if (!quick || shapes[i].T <= 256)
            measure(&shapes[i], LM_DTYPE_F32);
        if (shapes[i].document)
            continue;
        measure_gaussian(&shapes[i], LM_DTYPE_BF16);
        if (!quick || shapes[i].T <= 256)
            measure_gaussian(&shapes[i], LM_DTYPE_F32);
    }
    if (!strncmp("decoding", only, strlen(only))) {
        measure_decoding(8, 4096, 32, 8, 128, 0, 0, LM_DTYPE_BF16);
        measure_decoding(1, 16384, 12, 12, 64, 0, 0, LM_DTYPE_BF16);
        measure_decoding(1, 16384, 12, 12, 64, 0, 0, LM_DTYPE_F32);
        measure_decoding(1, 16384, 12, 12, 64, 0, 64, LM_DTYPE_BF16);
        measure_decoding(1, 16384, 12, 12, 64, 0, 64, LM_DTYPE_F32);
        measure_decoding(1, 4096, 16, 1, 576, 512, 0, LM_DTYPE_BF16);
    }
    lm_ceilings_free(ceilings);
    lm_par_free(par);
    return 0;
}
