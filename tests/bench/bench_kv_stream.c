/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kv_stream -- caches coded for streaming (kv/cachegen.h) on one core: bits for a number, error
 * and speed of each level.
 *
 * usage: bench_kv_stream [--quick]
 *
 * The cache is synthetic: 2 layers of 8 heads of 128 numbers in BF16, channels with a mean and a spread
 * of their own, neighbouring tokens correlated with 0.8.  Rates are of bytes of the cache; `tables` is
 * the first of two passes of coding, `rans` the entropy coder alone.  The best of several rounds
 * counts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "kernels/rans.h"
#include "kv/cachegen.h"

enum { LAYERS = 2, PARTS = 2 * LAYERS, HEADS = 8, WIDTH = 128, CHANNELS = HEADS * WIDTH };

static int rounds = 5;
static int64_t tokens = 2048;
static uint16_t *data[PARTS], *back[PARTS];

static void must(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_kv_stream: %s: %s\n", e->where, e->what);
    exit(1);
}

static void fill(uint16_t *x, uint64_t part)
{
    lm_rng g = lm_rng_make(part, "cache", 0);
    for (int64_t c = 0; c < CHANNELS; c++) {
        uint64_t at = (uint64_t)(c * (tokens + 3));
        double mean = 2 * lm_rng_normal(g, at), spread = exp(0.5 * lm_rng_normal(g, at + 1)), v = 0;
        for (int64_t t = 0; t < tokens; t++) {
            v = 0.8 * v + 0.6 * lm_rng_normal(g, at + 3 + (uint64_t)t);
            x[(c / WIDTH * tokens + t) * WIDTH + c % WIDTH] =
                lm_f32_to_bf16((float)(mean + spread * v));
        }
    }
}

typedef struct {
    double bits, tables_bits, error; /* of a number; relative */
    double tables, encode, decode;   /* seconds */
} figures;

static void code_all(const lm_cachegen_part *part, figures *f)
{
    const lm_cachegen_rows rows = { LM_DTYPE_BF16, tokens, (void *const *)data };
    const lm_cachegen_rows out = { LM_DTYPE_BF16, tokens, (void *const *)back };
    lm_cachegen *g = NULL;
    lm_buf b = { 0 };
    lm_err e = { 0 };
    double t = lm_now(), coded = 0, encode = 0, decode = 0,
           numbers = (double)tokens * PARTS * CHANNELS;
    must(lm_cachegen_learn(part, PARTS, &rows, NULL, &g, &e), &e);
    f->tables = fmin(f->tables, lm_now() - t);
    must(lm_cachegen_write(g, &b, &e), &e);
    f->tables_bits = 8.0 * (double)b.len / numbers;
    for (int64_t c = 0; c < lm_cachegen_chunks(tokens); c++) {
        b.len = 0;
        t = lm_now();
        must(lm_cachegen_encode(g, &rows, c, lm_cpu_detect(), NULL, &b, &e), &e);
        encode += lm_now() - t;
        coded += (double)b.len;
        t = lm_now();
        must(lm_cachegen_decode(g, b.data, b.len, &out, c, lm_cpu_detect(), NULL, &e), &e);
        decode += lm_now() - t;
    }
    f->bits = 8 * coded / numbers;
    f->encode = fmin(f->encode, encode), f->decode = fmin(f->decode, decode);
    lm_buf_fini(&b);
    lm_cachegen_free(g);
}

static double error_of(void)
{
    double sum = 0, all = 0;
    for (int p = 0; p < PARTS; p++)
        for (int64_t i = 0; i < tokens * CHANNELS; i++) {
            double x = lm_bf16_to_f32(data[p][i]), y = lm_bf16_to_f32(back[p][i]);
            sum += (x - y) * (x - y), all += x * x;
        }
    return sqrt(sum / all);
}

static void levels(void)
{
    double bytes = 2.0 * (double)tokens * PARTS * CHANNELS / 1e6;
    printf("level  bits/number  tables  relative error  tables MB/s  encode  both  decode\n");
    for (int level = 0; level < LM_CACHEGEN_LEVELS; level++) {
        lm_cachegen_part part[PARTS];
        figures f = { .tables = INFINITY, .encode = INFINITY, .decode = INFINITY };
        for (int i = 0; i < PARTS; i++)
            part[i] =
                (lm_cachegen_part){ HEADS, WIDTH, lm_cachegen_bins(level, i % 2, i / 2, LAYERS) };
        for (int r = 0; r < rounds; r++)
            code_all(part, &f);
        printf("%5d  %11.2f  %6.2f  %14.4f  %11.0f  %6.0f  %4.0f  %6.0f\n", level, f.bits,
               f.tables_bits, error_of(), bytes / f.tables, bytes / f.encode,
               bytes / (f.tables + f.encode), bytes / f.decode);
    }
}

/* The entropy coder with a table of its own for every column. */
static void coder(int symbols)
{
    enum { ROWS = LM_CACHEGEN_CHUNK };
    static uint8_t symbol[ROWS * CHANNELS], out[4 * LM_RANS_STATES + 2 * ROWS * CHANNELS];
    static uint8_t kind[ROWS];
    static uint16_t start[CHANNELS * 256];
    static uint32_t at[CHANNELS];
    lm_rng g = lm_rng_make(7, "symbols", 0);
    int width = lm_rans_width(symbols);
    double bits = 0;
    for (int64_t c = 0; c < CHANNELS; c++) {
        uint32_t count[LM_RANS_SYMBOLS] = { 0 };
        double spread = symbols * (0.03 + 0.1 * (double)(c % 13) / 13);
        for (int64_t r = 0; r < ROWS; r++) {
            double v = symbols / 2 + spread * lm_rng_normal(g, (uint64_t)(c * ROWS + r));
            uint8_t s = (uint8_t)(v < 0 ? 0 : v >= symbols ? symbols - 1 : v);
            symbol[r * CHANNELS + c] = s;
            count[s]++;
        }
        at[c] = (uint32_t)(c * width);
        lm_rans_fit(count, symbols, start + at[c]);
        bits += lm_rans_bits(count, symbols, start + at[c]);
    }
    lm_rans_shape f = { ROWS, CHANNELS, kind, { { width, start, at } } };
    for (lm_cpu_level l = LM_CPU_REF; l <= LM_CPU_AVX512 && l <= lm_cpu_detect(); l++) {
        const lm_rans_kernels *k = lm_rans_at(l);
        double put = INFINITY, get = INFINITY, bytes = 2e-6 * sizeof symbol;
        size_t len = 0;
        for (int r = 0; r < 2 * rounds; r++) {
            double t = lm_now();
            len = k->put(&f, symbol, out);
            put = fmin(put, lm_now() - t);
            t = lm_now();
            if (!k->get(&f, out + sizeof out - len, len, symbol))
                exit(1);
            get = fmin(get, lm_now() - t);
        }
        printf("rans, %3d symbols, %-6s  length / tables' %.4f, encode %5.0f, decode %5.0f MB/s\n",
               symbols, lm_cpu_level_name(l), 8.0 * (double)len / bits, bytes / put, bytes / get);
    }
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    if (argc > 1 && !strcmp(argv[1], "--quick"))
        rounds = 2, tokens = 512;
    for (int p = 0; p < PARTS; p++) {
        size_t n = (size_t)(tokens * CHANNELS);
        must(lm_alloc_n(&data[p], n, sizeof *data[p], "a cache", &e), &e);
        must(lm_alloc_n(&back[p], n, sizeof *back[p], "a cache", &e), &e);
        fill(data[p], (uint64_t)p);
    }
    levels();
    for (int symbols = 7; symbols < 256; symbols = 2 * symbols + 1)
        coder(symbols);
    for (int p = 0; p < PARTS; p++)
        lm_free(data[p]), lm_free(back[p]);
    return 0;
}
