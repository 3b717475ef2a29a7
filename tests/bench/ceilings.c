/* SPDX-License-Identifier: Apache-2.0 */
/* ceilings.c -- the loops behind ceilings.h. */
#include "tests/bench/ceilings.h"

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "numeric/dtype.h"

#define BIG_BYTES ((size_t)256 << 20)
#define AMX       __attribute__((target("avx512f,amx-tile,amx-bf16"), noinline))

enum { TILES_BYTES = 16 << 10 };

struct lm_ceilings {
    lm_par *par;
    int threads;
    char *tiles; /* [TILES_BYTES] random BF16 */
    char *big;   /* [BIG_BYTES] */
};

typedef struct {
    lm_ceilings *c;
    int64_t rounds;
    volatile float sink;
} job;

static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} config __attribute__((aligned(64))) = {
    .palette = 1,
    .column_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

lm_code lm_ceilings_new(lm_ceilings **out, lm_par *par, lm_err *e)
{
    lm_ceilings *c = NULL;
    void *big = NULL;
    lm_rng r = lm_rng_make(1, "ceilings", 0);
    lm_code rc = lm_alloc_n(&c, 1, sizeof(*c), "ceilings", e);

    if (rc)
        return rc;
    if ((rc = lm_alloc_n(&c->tiles, TILES_BYTES, 1, "tiles", e)) ||
        (rc = lm_block_alloc(&big, BIG_BYTES, "memory to read", e))) {
        lm_free(c->tiles);
        lm_free(c);
        return rc;
    }
    c->big = big;
    c->par = par;
    c->threads = lm_par_threads(par);
    for (size_t i = 0; i < TILES_BYTES / 2; i++)
        ((uint16_t *)c->tiles)[i] = lm_f32_to_bf16((float)lm_rng_normal(r, i));
    memset(c->big, 1, BIG_BYTES);
    *out = c;
    return LM_OK;
}

void lm_ceilings_free(lm_ceilings *c)
{
    if (!c)
        return;
    lm_block_free(c->big, BIG_BYTES);
    lm_free(c->tiles);
    lm_free(c);
}

/* Seconds that fn takes on all threads: the best of three. */
static double timed(lm_ceilings *c, lm_par_fn fn, job *j)
{
    double best = 1e30;

    for (int i = 0; i < 3; i++) {
        double t = lm_now();
        lm_par_each(c->par, fn, j);
        t = lm_now() - t;
        best = t < best ? t : best;
    }
    return best;
}

#define MULTIPLY_STEP(q)                       \
    _tile_loadd(4, a + 4096 * (q), 64);        \
    _tile_loadd(6, a + 4096 * (q) + 1024, 64); \
    _tile_dpbf16ps(0, 4, 6);                   \
    _tile_loadd(7, a + 4096 * (q) + 2048, 64); \
    _tile_dpbf16ps(1, 4, 7);                   \
    _tile_loadd(5, a + 4096 * (q) + 3072, 64); \
    _tile_dpbf16ps(2, 5, 6);                   \
    _tile_dpbf16ps(3, 5, 7);

AMX static void amx_l1(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const char *a = j->c->tiles;

    (void)begin, (void)end, (void)worker;
    _tile_loadconfig(&config);
    for (int64_t i = 0; i < j->rounds; i++) {
        MULTIPLY_STEP(0)
        MULTIPLY_STEP(1)
        MULTIPLY_STEP(2)
        MULTIPLY_STEP(3)
    }
    _tile_release();
}

AMX static void amx_registers(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const char *a = j->c->tiles;

    (void)begin, (void)end, (void)worker;
    _tile_loadconfig(&config);
    MULTIPLY_STEP(0)
    for (int64_t i = 0; i < 4 * j->rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

static double amx(lm_ceilings *c, lm_par_fn fn)
{
    job j = { .c = c, .rounds = 40000 };

    if (lm_cpu_detect() < LM_CPU_AMX)
        return 0;
    return 16.0 * 16384 * (double)j.rounds * c->threads / timed(c, fn, &j);
}

double lm_ceiling_amx_l1(lm_ceilings *c)
{
    return amx(c, amx_l1);
}

double lm_ceiling_amx_registers(lm_ceilings *c)
{
    return amx(c, amx_registers);
}

/* Twelve independent chains hide the latency of the multiplication. */
#define FMA_LOOP(vec, set1, fma, sum)              \
    vec v[12], x = set1(0.999f), y = set1(0.001f); \
    for (int i = 0; i < 12; i++)                   \
        v[i] = set1((float)i);                     \
    for (int64_t i = 0; i < j->rounds; i++)        \
        for (int q = 0; q < 12; q++)               \
            v[q] = fma(v[q], x, y);                \
    for (int i = 1; i < 12; i++)                   \
        v[0] = fma(v[0], x, v[i]);                 \
    memcpy(last, &v[0], sizeof(v[0]));             \
    j->sink = last[0];

__attribute__((target("avx512f"), noinline, optimize("O3"))) static void
fma_512(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    float last[16];

    (void)begin, (void)end, (void)worker;
    FMA_LOOP(__m512, _mm512_set1_ps, _mm512_fmadd_ps, )
}

__attribute__((target("avx2,fma"), noinline, optimize("O3"))) static void
fma_256(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    float last[8];

    (void)begin, (void)end, (void)worker;
    FMA_LOOP(__m256, _mm256_set1_ps, _mm256_fmadd_ps, )
}

double lm_ceiling_fma_f32(lm_ceilings *c)
{
    job j = { .c = c, .rounds = 4000000 };
    lm_cpu_level level = lm_cpu_detect();
    double flop = 12.0 * 2 * (double)j.rounds * c->threads;

    if (level >= LM_CPU_AVX512)
        return flop * 16 / timed(c, fma_512, &j);
    return level >= LM_CPU_AVX2 ? flop * 8 / timed(c, fma_256, &j) : 0;
}

/* Each worker's part of the big block. */
static char *part(lm_ceilings *c, int worker, size_t *bytes)
{
    *bytes = BIG_BYTES / (size_t)c->threads / 4096 * 4096;
    return c->big + (size_t)worker * *bytes;
}

__attribute__((target("avx2"), noinline)) static void read_part(void *ctx, int64_t begin,
                                                                int64_t end, int worker)
{
    job *j = ctx;
    size_t bytes, lane;
    const char *p = part(j->c, worker, &bytes);
    __m256i s = _mm256_setzero_si256();

    (void)begin, (void)end;
    /* Four streams per worker keep more requests in flight than one. */
    lane = bytes / 4 / 64 * 64;
    for (size_t i = 0; i < lane; i += 64)
        for (size_t q = 0; q < 4; q++) {
            const __m256i *at = (const __m256i *)(p + q * lane + i);
            s = _mm256_add_epi32(
                s, _mm256_add_epi32(_mm256_load_si256(at), _mm256_load_si256(at + 1)));
        }
    j->sink = (float)_mm256_extract_epi32(s, 0);
}

static void copy_part(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    size_t bytes;
    char *p = part(j->c, worker, &bytes);

    (void)begin, (void)end;
    memcpy(p, p + bytes / 2, bytes / 2);
}

double lm_ceiling_read(lm_ceilings *c)
{
    job j = { .c = c };

    if (lm_cpu_detect() < LM_CPU_AVX2)
        return 0;
    return (double)BIG_BYTES / timed(c, read_part, &j);
}

double lm_ceiling_copy(lm_ceilings *c)
{
    job j = { .c = c };

    return (double)BIG_BYTES / timed(c, copy_part, &j);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double lm_median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof(*v), by_value);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}
