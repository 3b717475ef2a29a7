/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kernels.c -- bytes per second of memory-bound kernels, as a share of memcpy's in the same
 * run; the optimiser step; and the vocabulary head as a share of the AMX ceiling.
 *
 * usage: bench_kernels [--quick] [--threads N] [NAME]      (NAME: only rows whose name starts so)
 *
 * Arrays are larger than the caches (65,536 x 768).  Bytes are those of all operands, once per
 * call; operands that are read and written count twice. Figures are medians; the copy is measured
 * before each row. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/head.h"
#include "kernels/norm.h"
#include "kernels/optim.h"
#include "kernels/ring.h"
#include "kernels/rope.h"
#include "kernels/route.h"
#include "tests/bench/call.h"

enum { ROWS = 65536, WIDTH = 768, HEADS = 12, VOCAB = 50257, PARAMS = 32 << 20 };
enum kind { NONE, ACT, F32, F64, BF16, I32 };

typedef struct {
    enum kind kind;
    int64_t rows, cols;
    int64_t limit; /* ids below it; 0: normal numbers; -1: rows of lm_sum_block */
    bool both;     /* an output that is read too */
} operand;

typedef struct {
    const char *name, *op;
    const void *attr;
    operand in[5], out[4];
} row;

static const lm_norm_attr rms = { LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
static const lm_norm_attr layer = { LM_NORM_LAYER, 1e-5, LM_ACC_FIRST, false };
static const lm_head_norm_attr head_norm = { HEADS - 4, 2, 64, 1e-6, LM_ACC_FIRST, false };
static const lm_rope_attr rope = { HEADS - 4, 2, 64, 64, false };
static const lm_gelu_attr gelu_tanh = { false }, gelu_erf = { true };
static const lm_dropout_attr drop = { .p = 0.1, .site = 1 };
static const lm_route_attr mixtral = { .k = 2, .scale = 1, .normalise = true };
static const lm_route_attr deepseek = {
    .k = 8, .scale = 2.5, .sigmoid = true, .normalise = true, .groups = 8, .kept_groups = 4
};
static const lm_route_plan_attr plan = { 64, 0 };
static const lm_ring_attr ring = { .ranks = 1 };
static const lm_ring_merge_attr ring_merge = { .batch = 1, .seq = ROWS, .heads = HEADS };
static const lm_embed_attr embed = { LM_ACC_ADD, LM_ACC_ADD, 0 };
static const lm_adamw_attr adamw = { 1e-4, 0.9, 0.95, 1e-8, 0.1, 0.5, 0.5, 1, 0 };
static const lm_sgd_attr sgd = { 1e-4, 0.9, 0, 0.1, 1, 0, false, false };

#define X                          \
    {                              \
        ACT, ROWS, WIDTH, 0, false \
    }
#define S                          \
    {                              \
        F32, ROWS, WIDTH, 0, false \
    }
#define L                          \
    {                              \
        F32, HEADS, ROWS, 0, false \
    }
#define W                       \
    {                           \
        F32, WIDTH, 0, 0, false \
    }
#define ST                     \
    {                          \
        F32, ROWS, 2, 0, false \
    }
#define P                       \
    {                           \
        F32, PARAMS, 0, 0, true \
    }
#define G                        \
    {                            \
        F32, PARAMS, 0, 0, false \
    }
#define IDS(rows, cols, limit)              \
    {                                       \
        I32, (rows), (cols), (limit), false \
    }
#define NO                   \
    {                        \
        NONE, 0, 0, 0, false \
    }

static const row rows[] = {
    { "adamw + bf16 copy", "adamw", &adamw, { G }, { P, P, P, { BF16, PARAMS, 0, 0, false } } },
    { "adamw", "adamw", &adamw, { G }, { P, P, P } },
    { "sgd + momentum", "sgd", &sgd, { G }, { P, P } },
    { "sumsq",
      "sumsq",
      NULL,
      { G, IDS(PARAMS / LM_SUM_BLOCK, 4, -1) },
      { { F64, PARAMS / LM_SUM_BLOCK, 0, 0, false } } },
    { "rmsnorm", "norm", &rms, { X, W }, { X, ST } },
    { "rmsnorm + residual", "norm", &rms, { X, W, NO, X }, { X, ST, X } },
    { "layernorm + residual", "norm", &layer, { X, W, W, X }, { X, ST, X } },
    { "rmsnorm dx", "norm_dx", &rms, { X, X, W, ST, X }, { X } },
    { "layernorm dx", "norm_dx", &layer, { X, X, W, ST, X }, { X } },
    { "layernorm dw", "norm_dw", &layer, { X, X, ST }, { W, W } },
    { "head norm",
      "head_norm",
      &head_norm,
      { X, { F32, 64, 0, 0, false }, { F32, 64, 0, 0, false } },
      { X, { F32, ROWS, 10, 0, false } } },
    { "rope",
      "rope",
      &rope,
      { X, { I32, ROWS, 0, 1024, false }, { F32, 1024, 64, 0, false } },
      { X } },
    { "gelu", "gelu", &gelu_tanh, { X }, { X } },
    { "gelu exact", "gelu", &gelu_erf, { X }, { X } },
    { "gelu dx", "gelu_dx", &gelu_tanh, { X, X }, { X } },
    { "swiglu", "swiglu", NULL, { { ACT, ROWS, 2 * WIDTH, 0, false } }, { X } },
    { "swiglu dx",
      "swiglu_dx",
      NULL,
      { X, { ACT, ROWS, 2 * WIDTH, 0, false } },
      { { ACT, ROWS, 2 * WIDTH, 0, false } } },
    { "add", "add", NULL, { X, X }, { X } },
    { "dropout", "dropout", &drop, { X }, { X } },
    { "ring add", "ring_add", &ring, { S, X }, { S } },
    { "ring merge", "ring_merge", &ring_merge, { S, L, X, L }, { S, L } },
    { "route choose, 2 of 8",
      "route_choose",
      &mixtral,
      { { F32, ROWS, 8, 0, false } },
      { { F32, ROWS, 2, 0, false }, IDS(ROWS, 2, 8) } },
    { "route choose, 8 of 256",
      "route_choose",
      &deepseek,
      { { F32, ROWS / 4, 256, 0, false }, { F32, 256, 0, 0, false } },
      { { F32, ROWS / 4, 8, 0, false }, IDS(ROWS / 4, 8, 256) } },
    { "route plan, 8 of 64",
      "route_plan",
      &plan,
      { IDS(ROWS, 8, 64) },
      { IDS(65, 0, 1), IDS(8 * ROWS, 0, 1), IDS(ROWS, 8, 1) } },
    { "route rows",
      "route_rows",
      NULL,
      { { ACT, ROWS / 2, WIDTH, 0, false }, IDS(ROWS, 0, ROWS), IDS(ROWS / 2, 2, ROWS) },
      { X } },
    { "route rows, weighted",
      "route_rows",
      NULL,
      { { ACT, ROWS / 2, WIDTH, 0, false },
        IDS(ROWS, 0, ROWS),
        IDS(ROWS / 2, 2, ROWS),
        { F32, ROWS / 2, 2, 0, false } },
      { X } },
    { "route sum",
      "route_sum",
      NULL,
      { X, IDS(ROWS, 0, ROWS), IDS(ROWS / 2, 2, ROWS), { F32, ROWS / 2, 2, 0, false } },
      { { ACT, ROWS / 2, WIDTH, 0, false } } },
    { "route dot",
      "route_dot",
      NULL,
      { { ACT, ROWS / 2, WIDTH, 0, false }, X, IDS(ROWS, 0, ROWS), IDS(ROWS / 2, 2, ROWS) },
      { { F32, ROWS / 2, 2, 0, false } } },
    { "cast to bf16",
      "cast",
      NULL,
      { { F32, ROWS, WIDTH, 0, false } },
      { { BF16, ROWS, WIDTH, 0, false } } },
    { "embed",
      "embed",
      &embed,
      { { I32, ROWS, 0, VOCAB, false }, { ACT, VOCAB, WIDTH, 0, false } },
      { X } },
    { "embed dw",
      "embed_dw",
      &embed,
      { X, { I32, ROWS, 0, VOCAB, false } },
      { { F32, VOCAB, WIDTH, 0, true } } },
};
enum { N_ROWS = sizeof(rows) / sizeof(rows[0]) };

static lm_par *par;
static lm_ceilings *ceilings;
static bool quick;
static double optimiser; /* share of memcpy that the AdamW step of mixed precision reached */

static void die(const lm_err *e)
{
    fprintf(stderr, "bench_kernels: %s: %s\n", e->where, e->what);
    exit(1);
}

static size_t bytes_of(const lm_tensor *t)
{
    return t->ndim ? (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype) : 0;
}

/* Normal numbers times `scale` (positive ones where a second moment is wanted: scale < 0), or ids.
 */
/* Number i of the table of all blocks. */
static double block_number(int64_t i)
{
    return i % 4 == 1 ? 0 : i % 4 == 2 ? LM_SUM_BLOCK : (double)(i / 4);
}

static lm_tensor make(const operand *o, lm_dtype act, double scale)
{
    static const lm_dtype type[] = {
        [F32] = LM_DTYPE_F32, [F64] = LM_DTYPE_F64, [BF16] = LM_DTYPE_BF16, [I32] = LM_DTYPE_I32
    };
    enum { DRAWN = 65521 };
    lm_tensor t = { .dtype = LM_DTYPE_NONE };
    lm_err e = { 0 };
    if (o->kind == NONE)
        return t;
    t.dtype = o->kind == ACT ? act : type[o->kind];
    t.ndim = o->cols ? 2 : 1;
    t.dim[0] = o->rows;
    t.dim[1] = o->cols;
    if (lm_block_alloc(&t.data, bytes_of(&t), "a bench operand", &e))
        die(&e);
    int64_t n = lm_tensor_count(&t);
    size_t size = lm_dtype_size(t.dtype);
    lm_rng r = lm_rng_make(5, "bench", (uint64_t)o->rows);
    for (int64_t i = 0; i < n && i < DRAWN; i++)
        lm_set(t.dtype, t.data, i,
               o->limit < 0 ? block_number(i)
               : o->limit   ? (double)lm_rng_below(r, (uint64_t)i, (uint64_t)o->limit)
               : scale < 0  ? -scale * fabs(lm_rng_normal(r, (uint64_t)i))
                            : scale * lm_rng_normal(r, (uint64_t)i));
    for (int64_t i = DRAWN; i < n; i += DRAWN)
        memcpy((char *)t.data + (size_t)i * size, t.data,
               size * (size_t)(n - i < DRAWN ? n - i : DRAWN));
    return t;
}

static double seconds(const lm_kernel *k, lm_call *c)
{
    double t = 0;
    lm_err e = { 0 };
    if (call_seconds(k, c, quick ? 3 : 7, &t, &e))
        die(&e);
    return t;
}

static void measure(const row *r, lm_dtype act)
{
    static const lm_step step = { .seed = 1, .step = 3, .more = true };
    lm_tensor in[5], out[4];
    lm_call c = {
        .attr = r->attr, .in = in, .n_in = 5, .out = out, .n_out = 4, .par = par, .step = &step
    };
    const lm_kernel *k = lm_cpu_kernel(r->op, act, lm_cpu_detect());
    double bytes = 0;
    for (int i = 0; i < 5; i++) {
        in[i] = make(&r->in[i], act, 1);
        /* rows looked up, not the whole table */
        bool table =
            (!strcmp(r->op, "embed") && i == 1) || (!strcmp(r->op, "route_rows") && i == 0);
        bytes += (double)(table ? (size_t)ROWS * WIDTH * lm_dtype_size(act) : bytes_of(&in[i]));
    }
    for (int i = 0; i < 4; i++) {
        out[i] = make(&r->out[i], act, -1);
        bytes += (double)bytes_of(&out[i]) * (r->out[i].both ? 2 : 1);
    }
    double copy = lm_ceiling_copy(ceilings), rate = bytes / seconds(k, &c);
    printf("%-22s %-5s %-7s %8.1f %8.1f %7.0f %%\n", r->name, lm_dtype_name(act),
           lm_cpu_level_name(k->level), rate * 1e-9, copy * 1e-9, 100 * rate / copy);
    if (r == rows)
        optimiser = rate / copy;
    for (int i = 0; i < 5; i++)
        lm_block_free(in[i].data, bytes_of(&in[i]));
    for (int i = 0; i < 4; i++)
        lm_block_free(out[i].data, bytes_of(&out[i]));
}

/* Loss and both gradients: six operations per weight and row. */
static void measure_head(int64_t n, lm_dtype act)
{
    static const lm_step step = { .seed = 1 };
    lm_head_attr a = { VOCAB, 0, LM_ACC_FIRST, 0 };
    operand ops_in[4] = { { ACT, n, WIDTH, 0, false },
                          { ACT, VOCAB, WIDTH, 0, false },
                          { I32, n, 0, VOCAB, false },
                          { F32, n, 0, 0, false } };
    operand ops_out[3] = { { F32, n, 0, 0, false },
                           { ACT, n, WIDTH, 0, false },
                           { F32, VOCAB, WIDTH, 0, false } };
    lm_tensor in[4], out[3];
    for (int i = 0; i < 4; i++)
        in[i] = make(&ops_in[i], act, i == 1 ? 0.05 : 1);
    for (int i = 0; i < 3; i++)
        out[i] = make(&ops_out[i], act, 1);
    lm_call c = {
        .attr = &a, .in = in, .n_in = 4, .out = out, .n_out = 3, .par = par, .step = &step
    };
    const lm_kernel *k = lm_cpu_kernel("head_loss", act, lm_cpu_detect());
    double peak = act == LM_DTYPE_BF16 ? lm_ceiling_amx_l1(ceilings) : lm_ceiling_fma_f32(ceilings);
    double t = seconds(k, &c), flops = 6.0 * (double)n * VOCAB * WIDTH;
    printf("head_loss, %5lld rows   %-5s %-7s %8.0f ms %6.2f TFLOP/s", (long long)n,
           lm_dtype_name(act), lm_cpu_level_name(k->level), t * 1e3, flops / t * 1e-12);
    if (peak > 0)
        printf(" %5.0f %% of %.2f", 100 * flops / t / peak, peak * 1e-12);
    putchar('\n');
    for (int i = 0; i < 4; i++)
        lm_block_free(in[i].data, bytes_of(&in[i]));
    for (int i = 0; i < 3; i++)
        lm_block_free(out[i].data, bytes_of(&out[i]));
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
    lm_cpu_detect();
    if (lm_par_new(&par, threads, &e) || lm_ceilings_new(&ceilings, par, &e))
        die(&e);
    printf("%s, %d threads\n", lm_cpu_model(), lm_par_threads(par));
    printf("%-22s %-5s %-7s %8s %8s %9s\n", "kernel", "act", "level", "GB/s", "memcpy", "share");
    for (int i = 0; i < N_ROWS; i++) {
        if (strncmp(rows[i].name, only, strlen(only)))
            continue;
        bool typed = false;
        for (int k = 0; k < 5; k++)
            typed |= rows[i].in[k].kind == ACT;
        if (typed)
            measure(&rows[i], LM_DTYPE_BF16);
        measure(&rows[i], LM_DTYPE_F32);
    }
    if (!strncmp("head_loss", only, strlen(only))) {
        measure_head(1024, LM_DTYPE_BF16);
        measure_head(4096, LM_DTYPE_BF16);
        if (!quick)
            measure_head(1024, LM_DTYPE_F32);
    }
    if (optimiser > 0)
        printf("optimiser step: %.0f %% of memcpy's bytes/s (at least 70 %% wanted)\n",
               100 * optimiser);
    lm_ceilings_free(ceilings);
    lm_par_free(par);
    return 0;
}
