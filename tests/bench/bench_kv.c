/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kv.c -- the attention part of decoding over coded caches, beside a plain cache in the same run: one token (or
 * the rows of a prompt) of one sequence with 16,384 tokens, all layers one after another, so that no cache of the
 * processor holds what is read.
 *
 * usage: bench_kv [--quick] [--threads N] [--level avx2|avx512|amx] [--rows N] [--f32] [--only FORMAT] [--write] [NAME]
 *        (only shapes NAME*, formats FORMAT*; --rows 5 or more: a part of a prompt behind 16,384 - N tokens; --write:
 *        writes of so many rows, 1,024 if 1, per second and thread)
 *
 * Figures are medians; bytes are those of keys, values and their scales. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "graph/op.h"
#include "kernels/kv.h"
#include "numeric/code_rows.h"
#include "tests/bench/call.h"

enum { TOKENS = 16384, PAGE = 256, PAGES = TOKENS / PAGE, ROUNDS = 15 };

typedef struct {
    const char *name;
    int64_t layers, H, K, D;
} shape;

static const shape shapes[] = { { "llama-1b", 16, 32, 8, 64 }, { "llama-8b", 8, 32, 8, 128 } };

#define GRID(name_, b, x, l, g)                                                             \
    {                                                                                       \
        .name = name_, .bits = b, .axis = x, .levels = l, .group = g, .scale = LM_DTYPE_F16 \
    }
static const lm_kv_format formats[] = {
    GRID("int8", 8, LM_KV_TOKEN, LM_KV_SYM, 0),
    GRID("int4 32", 4, LM_KV_TOKEN, LM_KV_ASYM, 32),
    GRID("int4", 4, LM_KV_TOKEN, LM_KV_ASYM, 0),
    GRID("values 4", 4, LM_KV_TOKEN, LM_KV_ASYM, 0), /* plain keys */
    GRID("int2 32", 2, LM_KV_TOKEN, LM_KV_ASYM, 32),
    GRID("int2", 2, LM_KV_TOKEN, LM_KV_ASYM, 0),
    GRID("int4 ch.", 4, LM_KV_CHANNEL, LM_KV_ASYM, 128),
    GRID("kivi keys", 2, LM_KV_CHANNEL, LM_KV_ASYM, 32),
    { .name = "k4v2", /* keys; values have 2 bits by token */
      .bits = 4,
      .axis = LM_KV_CHANNEL,
      .levels = LM_KV_ASYM,
      .group = 128,
      .second = true,
      .scale = LM_DTYPE_F16 },
    { .name = "fp8",
      .bits = 8,
      .levels = LM_KV_FLOAT8,
      .float8 = LM_DTYPE_F8E4M3,
      .scale = LM_DTYPE_NONE,
      .constant = 1 },
    { .name = "codebook 4",
      .bits = 4,
      .levels = LM_KV_TABLE,
      .norm = true,
      .renorm = true,
      .scale = LM_DTYPE_F16,
      .n_table = 16,
      .table = { -2.73f, -2.07f, -1.62f, -1.26f, -0.94f, -0.66f, -0.39f, -0.13f, 0.13f, 0.39f,
                 0.66f, 0.94f, 1.26f, 1.62f, 2.07f, 2.73f } },
    { .name = "q8_0", .bits = 8, .group = 32, .ggml = true, .scale = LM_DTYPE_F16 },
    { .name = "q4_0", .bits = 4, .group = 32, .ggml = true, .scale = LM_DTYPE_F16 },
    { .name = "iq4_nl",
      .bits = 4,
      .levels = LM_KV_TABLE,
      .group = 32,
      .ggml = true,
      .scale = LM_DTYPE_F16,
      .n_table = 16,
      .table = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 } },
};
enum { N_FORMATS = sizeof formats / sizeof *formats };

static lm_par *par;
static bool quick, writes;
static int64_t rows = 1;
static lm_dtype act = LM_DTYPE_BF16;
static const char *only_format = "";
static lm_cpu_level level;

static void die(const lm_err *e)
{
    fprintf(stderr, "bench_kv: %s: %s\n", e->where, e->what);
    exit(1);
}

static lm_tensor made(lm_tensor t)
{
    lm_err e = { 0 };
    if (lm_block_alloc(&t.data, lm_stored_bytes(&t), "a bench operand", &e))
        die(&e);
    memset(t.data, 0, lm_stored_bytes(&t));
    return t;
}

static void drop(lm_tensor *t)
{
    lm_block_free(t->data, lm_stored_bytes(t));
}

/* Seconds for all layers: keys and values, `bytes` of each a layer, are where[0] and where[1]. */
static double seconds(const lm_kernel *k, lm_call *c, lm_tensor *where, int64_t layers,
                      const size_t bytes[2])
{
    double t[ROUNDS];
    int rounds = quick ? 3 : ROUNDS;
    char *data[2] = { where[0].data, where[1].data };
    lm_err e = { 0 };
    size_t work = k->work ? k->work(c, lm_par_threads(par)) : 0;
    if (lm_block_alloc(&c->work, work + 64, "scratch", &e))
        die(&e);
    for (int i = 0; i < rounds; i++) {
        double from = lm_now();
        for (int64_t l = 0; l < layers; l++) {
            where[0].data = data[0] + (size_t)l * bytes[0];
            where[1].data = data[1] + (size_t)l * bytes[1];
            k->run(c);
        }
        t[i] = lm_now() - from;
    }
    where[0].data = data[0];
    where[1].data = data[1];
    lm_block_free(c->work, work + 64);
    return lm_median(t, rounds);
}

/* Numbers of the first page of the first head, repeated. */
static void fill_pages(const lm_tensor *t)
{
    static float x[PAGE * 128];
    size_t bytes = lm_kv_page_bytes(t->kv, PAGE, t->dim[3]);
    lm_rng r = lm_rng_make(1, "bench kv", (uint64_t)t->kv->values);
    for (int64_t i = 0; i < PAGE * t->dim[3]; i++)
        x[i] = (float)lm_rng_normal(r, (uint64_t)i);
    lm_kv_encode(t->kv, PAGE, t->dim[3], 0, x, t->dim[3], 0, PAGE, NULL, t->data);
    for (int64_t p = 1; p < t->dim[0] * t->dim[1]; p++)
        memcpy((char *)t->data + (size_t)p * bytes, t->data, bytes);
}

static double measure_plain(const shape *s, const lm_attention_attr *a, lm_tensor qkv)
{
    lm_tensor in[3] = { qkv, made(lm_shape1(LM_DTYPE_I32, 1)), made(lm_shape1(LM_DTYPE_I32, 1)) };
    lm_tensor out[3] = { made(lm_shape2(act, rows, s->H * s->D)) };
    size_t size = lm_dtype_size(act);
    for (int i = 1; i < 3; i++) {
        out[i] =
            made((lm_tensor){ .dtype = act, .ndim = 4, .dim = { s->layers, s->K, TOKENS, s->D } });
        char *x = out[i].data;
        lm_rng r = lm_rng_make(2, "bench kv", (uint64_t)i);
        for (int64_t k = 0; k < 65521; k++)
            lm_set(act, x, k, lm_rng_normal(r, (uint64_t)k));
        for (int64_t k = 65521, n = lm_tensor_count(&out[i]); k < n; k += 65521)
            memcpy(x + (size_t)k * size, x, (size_t)(n - k < 65521 ? n - k : 65521) * size);
        out[i].dim[0] = 1;
    }
    *(int32_t *)in[1].data = (int32_t)(TOKENS - rows);
    *(int32_t *)in[2].data = (int32_t)rows;
    lm_call c = { .attr = a, .in = in, .n_in = 3, .out = out, .n_out = 3, .par = par };
    size_t of = (size_t)(s->K * TOKENS * s->D) * size;
    double t = seconds(lm_cpu_kernel("attention_cached", act, level), &c, out + 1, s->layers,
                       (const size_t[]){ of, of });
    double bytes = 2 * (double)of * (double)s->layers;
    printf("%-9s %-10s %9.2f ms %6.1f GB/s\n", s->name, lm_dtype_name(act), t * 1e3,
           bytes / t * 1e-9);
    for (int i = 1; i < 3; i++) {
        drop(&in[i]);
        out[i].dim[0] = s->layers;
        drop(&out[i]);
    }
    drop(&out[0]);
    return t;
}

/* The formats of keys and of values of an entry of `formats`. */
static void sides_of(const lm_kv_format *f, lm_kv_format side[2])
{
    side[0] = side[1] = *f;
    side[1].values = true;
    if (!strcmp(f->name, "kivi keys")) /* with values by token */
        side[1].axis = LM_KV_TOKEN;
    if (!strcmp(f->name, "k4v2")) {
        side[1].axis = LM_KV_TOKEN;
        side[1].bits = 2;
        side[1].group = 0;
        side[1].span = 128;
    }
}

/* Rows of a prompt into empty pages. */
static void measure_write(const shape *s, const lm_kv_format *f)
{
    int64_t n = rows > 1 ? rows : 1024, pages = (n + PAGE - 1) / PAGE;
    lm_kv_format side[2];
    lm_kv_attr attr = { .attention = { .batch = 1,
                                       .seq = n,
                                       .heads = s->H,
                                       .kv_heads = s->K,
                                       .head_dim = s->D,
                                       .causal = true } };
    lm_tensor in[5] = { made(lm_shape2(act, n, (s->H + 2 * s->K) * s->D)),
                        made(lm_shape1(LM_DTYPE_I32, 1)),
                        made(lm_shape1(LM_DTYPE_I32, 1)),
                        { 0 },
                        made(lm_shape2(LM_DTYPE_I32, 1, pages)) };
    lm_tensor out[4] = { { 0 } };
    sides_of(f, side);
    for (int i = 0; i < 2; i++) {
        bool steps = lm_kv_step(&side[i], PAGE) > 1;
        attr.residual[i] = steps ? PAGE : 0; /* all rows leave it, but the last ones of a page */
        out[i] = made((lm_tensor){
            .dtype = act, .ndim = 4, .dim = { pages, s->K, PAGE, s->D }, .kv = &side[i] });
        if (steps)
            out[2 + i] =
                made((lm_tensor){ .dtype = act, .ndim = 4, .dim = { 1, s->K, PAGE, s->D } });
    }
    lm_tensor slot = made(lm_shape1(LM_DTYPE_I32, 1));
    lm_tensor all[6] = { in[0], in[1], in[2], in[3], in[4], slot };
    for (int64_t i = 0; i < lm_tensor_count(&in[0]); i++)
        lm_set(act, in[0].data, i, lm_rng_normal(lm_rng_make(3, "rows", 0), (uint64_t)i));
    *(int32_t *)in[2].data = (int32_t)n;
    for (int i = 0; i < pages; i++)
        ((int32_t *)in[4].data)[i] = i;
    lm_call c = { .attr = &attr, .in = all, .n_in = 6, .out = out, .n_out = 4, .par = par };
    double t = seconds(lm_cpu_kernel("kv_write", act, level), &c, out, 1, (const size_t[]){ 0, 0 });
    double bytes = 2 * (double)(n * s->K * s->D) * (double)lm_dtype_size(act);
    printf("%-9s %-10s %9.2f ms %6.2f GB/s of rows a thread\n", s->name, f->name, t * 1e3,
           bytes / t * 1e-9 / lm_par_threads(par));
    for (int i = 0; i < 4; i++)
        if (out[i].data)
            drop(&out[i]);
    for (int i = 0; i < 6; i++)
        if (all[i].data)
            drop(&all[i]);
}

static void measure_coded(const shape *s, const lm_attention_attr *a, lm_tensor qkv,
                          const lm_kv_format *f, double plain)
{
    lm_kv_format side[2];
    bool plain_keys = !strcmp(f->name, "values 4");
    lm_kv_attr attr = { .attention = *a };
    lm_tensor in[8] = {
        qkv,   made(lm_shape1(LM_DTYPE_I32, 1)),       made(lm_shape1(LM_DTYPE_I32, 1)), { 0 },
        { 0 }, made(lm_shape2(LM_DTYPE_I32, 1, PAGES))
    };
    lm_tensor out[1] = { made(lm_shape2(act, rows, s->H * s->D)) };
    sides_of(f, side);
    for (int i = 0; i < 2; i++) {
        in[6 + i] = made((lm_tensor){ .dtype = act,
                                      .ndim = 4,
                                      .dim = { s->layers * PAGES, s->K, PAGE, s->D },
                                      .kv = plain_keys && i == 0 ? NULL : &side[i] });
        if (in[6 + i].kv)
            fill_pages(&in[6 + i]);
    }
    *(int32_t *)in[1].data = (int32_t)(rows > 1 ? TOKENS - rows : TOKENS);
    *(int32_t *)in[2].data = (int32_t)rows;
    for (int i = 0; i < PAGES; i++)
        ((int32_t *)in[5].data)[i] = i;
    lm_call c = { .attr = &attr, .in = in, .n_in = 8, .out = out, .n_out = 1, .par = par };
    size_t bytes[2];
    for (int i = 0; i < 2; i++)
        bytes[i] = lm_stored_bytes(&in[6 + i]) / (size_t)s->layers;
    in[6].dim[0] = in[7].dim[0] = PAGES;
    double t = seconds(lm_cpu_kernel("kv_attention", act, level), &c, in + 6, s->layers, bytes);
    printf("%-9s %-10s %9.2f ms %6.1f GB/s %6.2f times %s\n", s->name, f->name, t * 1e3,
           (double)(bytes[0] + bytes[1]) * (double)s->layers / t * 1e-9, plain / t,
           lm_dtype_name(act));
    for (int i = 0; i < 2; i++) {
        in[6 + i].dim[0] = s->layers * PAGES;
        drop(&in[6 + i]);
    }
    drop(&in[1]);
    drop(&in[2]);
    drop(&in[5]);
    drop(&out[0]);
}

static void measure_writes(const shape *s)
{
    for (int i = 0; i < N_FORMATS; i++)
        if (!strncmp(formats[i].name, only_format, strlen(only_format)))
            measure_write(s, &formats[i]);
}

static void measure(const shape *s)
{
    lm_attention_attr a = { .batch = 1,
                            .seq = rows,
                            .heads = s->H,
                            .kv_heads = s->K,
                            .head_dim = s->D,
                            .causal = true,
                            .scale = 1 / sqrt((double)s->D) };
    lm_tensor qkv = made(lm_shape2(act, rows, (s->H + 2 * s->K) * s->D));
    for (int64_t i = 0; i < lm_tensor_count(&qkv); i++)
        lm_set(act, qkv.data, i, lm_rng_normal(lm_rng_make(3, "q", 0), (uint64_t)i));
    double plain = measure_plain(s, &a, qkv);
    for (int i = 0; i < N_FORMATS; i++)
        if (!strncmp(formats[i].name, only_format, strlen(only_format)))
            measure_coded(s, &a, qkv, &formats[i], plain);
    drop(&qkv);
}

static lm_cpu_level level_of(const char *name)
{
    for (int l = LM_CPU_REF; l < (int)lm_cpu_detect(); l++)
        if (!strcmp(lm_cpu_level_name((lm_cpu_level)l), name))
            return (lm_cpu_level)l;
    return lm_cpu_detect();
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    int threads = 0;
    const char *only = "";
    level = lm_cpu_detect();
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--level") && i + 1 < argc)
            level = level_of(argv[++i]);
        else if (!strcmp(argv[i], "--rows") && i + 1 < argc)
            rows = atoll(argv[++i]);
        else if (!strcmp(argv[i], "--only") && i + 1 < argc)
            only_format = argv[++i];
        else if (!strcmp(argv[i], "--write"))
            writes = true;
        else if (!strcmp(argv[i], "--f32"))
            act = LM_DTYPE_F32;
        else
            only = argv[i];
    }
    if (lm_par_new(&par, threads, &e))
        die(&e);
    printf("%s, %d threads, %s\n", lm_cpu_model(), lm_par_threads(par), lm_cpu_level_name(level));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (!strncmp(shapes[i].name, only, strlen(only)))
            (writes ? measure_writes : measure)(&shapes[i]);
    lm_par_free(par);
    return 0;
}
