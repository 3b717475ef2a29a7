/* SPDX-License-Identifier: Apache-2.0 */
/* Formats of coded caches: errors within their bounds, the order of memory against a second, naive writer of
 * it, sizes by hand, and what each kind of format promises. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "graph/graph.h"
#include "numeric/code_rows.h"
#include "numeric/kv_format.h"
#include "op/ops.h"

enum { MOST_T = 256, MOST_D = 256 };

static float x[MOST_T * MOST_D], y[MOST_T * MOST_D], z[MOST_T * MOST_D];
static char page[1 << 20], other[1 << 20];

#define INT(b, ax, lv, g, sc)                                                        \
    {                                                                                \
        .name = #lv #b, .bits = b, .axis = ax, .levels = lv, .group = g, .scale = sc \
    }

/* All but tables, which are made by the run. */
static const lm_kv_format plain[] = {
    INT(8, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16),
    INT(8, LM_KV_TOKEN, LM_KV_ASYM, 64, LM_DTYPE_F32),
    INT(8, LM_KV_CHANNEL, LM_KV_SYM, 32, LM_DTYPE_BF16),
    INT(6, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_F16),
    INT(6, LM_KV_CHANNEL, LM_KV_SYM, 16, LM_DTYPE_F16),
    INT(5, LM_KV_TOKEN, LM_KV_SYM, 48, LM_DTYPE_F16),
    INT(5, LM_KV_CHANNEL, LM_KV_ASYM, 32, LM_DTYPE_F32),
    INT(4, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_F16),
    INT(4, LM_KV_TOKEN, LM_KV_SYM, 16, LM_DTYPE_BF16),
    INT(4, LM_KV_CHANNEL, LM_KV_ASYM, 0, LM_DTYPE_F16),
    INT(3, LM_KV_TOKEN, LM_KV_ASYM, 0, LM_DTYPE_F16),
    INT(3, LM_KV_CHANNEL, LM_KV_SYM, 32, LM_DTYPE_F16),
    INT(2, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_F16),
    INT(2, LM_KV_CHANNEL, LM_KV_ASYM, 32, LM_DTYPE_F16),
    INT(1, LM_KV_TOKEN, LM_KV_ASYM, 16, LM_DTYPE_F32),
    INT(1, LM_KV_CHANNEL, LM_KV_SYM, 16, LM_DTYPE_F16),
    { .name = "e4m3",
      .bits = 8,
      .levels = LM_KV_FLOAT8,
      .float8 = LM_DTYPE_F8E4M3,
      .scale = LM_DTYPE_F16 },
    { .name = "e5m2",
      .bits = 8,
      .levels = LM_KV_FLOAT8,
      .float8 = LM_DTYPE_F8E5M2,
      .scale = LM_DTYPE_NONE,
      .constant = 0.5 },
    { .name = "q8_0", .ggml = true, .bits = 8, .group = 32, .scale = LM_DTYPE_F16 },
    { .name = "q4_0", .ggml = true, .bits = 4, .group = 32, .scale = LM_DTYPE_F16 },
    { .name = "q5_0", .ggml = true, .bits = 5, .group = 32, .scale = LM_DTYPE_F16 },
    { .name = "q4_1",
      .ggml = true,
      .bits = 4,
      .levels = LM_KV_ASYM,
      .group = 32,
      .scale = LM_DTYPE_F16 },
    { .name = "q5_1",
      .ggml = true,
      .bits = 5,
      .levels = LM_KV_ASYM,
      .group = 32,
      .scale = LM_DTYPE_F16 },
};
enum { N_PLAIN = sizeof plain / sizeof *plain, N_TABLES = 8, N_FORMATS = N_PLAIN + N_TABLES };

static lm_kv_format table_format(int i)
{
    lm_kv_format f = { .name = "table",
                       .bits = i == 0 ? 4 : 2 + i % 4,
                       .levels = LM_KV_TABLE,
                       .axis = i == 6 ? LM_KV_CHANNEL : LM_KV_TOKEN,
                       .group = i == 0   ? 32
                                : i == 6 ? 16
                                : i == 3 ? 64
                                         : 0,
                       .scale = LM_DTYPE_F16,
                       .ggml = i == 0,
                       .norm = i > 0 && i < 5,
                       .renorm = i == 2 || i == 4,
                       .zero = i == 5 };
    f.n_table = 1 << f.bits;
    if (i == 0)
        lm_kv_iq4_table(f.table);
    else if (f.norm)
        lm_kv_normal_table(f.bits, f.table);
    else
        for (int k = 0; k < f.n_table; k++)
            f.table[k] = -1 + 2 * ((float)k + 0.5f) / (float)f.n_table;
    return f;
}

static lm_kv_format format_at(int i)
{
    return i < N_PLAIN ? plain[i] : table_format(i - N_PLAIN);
}

static size_t page_of(const lm_kv_format *f, int64_t T, int64_t D)
{
    lm_kv_sections s;
    lm_err e = { 0 };
    if (lm_kv_page(f, T, D, &s, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_true(s.all <= sizeof page);
    assert_int_equal(s.all, lm_kv_page_bytes(f, T, D));
    return s.all;
}

/* Channels of different sizes, offsets and outliers; some rows constant, some zero. */
static void numbers(uint64_t seed, int64_t T, int64_t D)
{
    lm_rng r = lm_rng_make(3, "kv format", seed);
    for (int64_t t = 0; t < T; t++)
        for (int64_t d = 0; d < D; d++) {
            double v = lm_rng_normal(r, (uint64_t)(t * D + d));
            v = d % 7 == 3 ? 6 * v - 4 : d % 11 == 5 ? 0.01 * v : v;
            x[t * D + d] = (float)(t % 13 == 5 ? 0 : t % 13 == 9 ? 0.75 : v);
        }
}

static void clear_pages(void)
{
    memset(page, 0, sizeof page);
    memset(other, 0, sizeof other);
}

static void code(const lm_kv_format *f, int64_t T, int64_t D, int64_t at, int64_t n, void *to)
{
    lm_kv_encode(f, T, D, 0, x + at * D, D, at, n, NULL, to);
}

/* ---- errors, and tokens one by one ---- */

/* The largest error of each group, divided by its bound. */
static double worst_of(const lm_kv_format *f, int64_t T, int64_t D)
{
    bool by_channel = f->axis == LM_KV_CHANNEL;
    int64_t t_step = by_channel ? lm_kv_step(f, T) : 1;
    int64_t d_step = by_channel ? 1 : f->group ? f->group : D;
    double worst = 0;
    for (int64_t t = 0; t < T; t += t_step)
        for (int64_t d = 0; d < D; d += d_step) {
            double lo = INFINITY, hi = -INFINITY, error = 0;
            int64_t n = 0;
            for (int64_t i = t; i < t + t_step; i++)
                for (int64_t k = d; k < d + d_step && k < D; k++, n++) {
                    lo = fmin(lo, (double)x[i * D + k]);
                    hi = fmax(hi, (double)x[i * D + k]);
                    error = fmax(error, fabs((double)x[i * D + k] - (double)y[i * D + k]));
                }
            worst = fmax(worst, error / lm_kv_bound(f, n, lo, hi));
        }
    return worst;
}

static void test_errors(void **state)
{
    static const int64_t dims[] = { 20, 32, 64, 80, 96, 128, 256 }, lengths[] = { 16, 32, 64, 256 };
    (void)state;
    for (int i = 0; i < N_FORMATS; i++)
        for (int k = 0; k < 28; k++) {
            lm_kv_format f = format_at(i);
            int64_t D = dims[k % 7], T = lengths[k / 7];
            f.values = (i + k) % 2;
            if (f.axis == LM_KV_CHANNEL && f.group > T)
                f.group = 16;
            numbers((uint64_t)(i * 28 + k), T, D);
            clear_pages();
            size_t bytes = page_of(&f, T, D);
            code(&f, T, D, 0, T, page);
            lm_kv_decode(&f, T, D, 0, page, 0, T, y, D);
            double worst = worst_of(&f, T, D);
            if (!(worst <= 1))
                fail_msg("%s %d T %d D %d: error %g of the bound", f.name, i, (int)T, (int)D,
                         worst);
            for (int64_t t = T - lm_kv_step(&f, T); t >= 0; t -= lm_kv_step(&f, T)) {
                code(&f, T, D, t, lm_kv_step(&f, T), other); /* one by one, backwards */
                lm_kv_decode(&f, T, D, 0, other, t, 1, z, D);
                assert_memory_equal(z, y + t * D, (size_t)D * sizeof *z);
            }
            assert_memory_equal(page, other, sizeof page);
            for (size_t b = bytes; b < bytes + 64; b++)
                assert_int_equal(page[b], 0);
        }
}

/* ---- rewriting ---- */

static void test_rewrite(void **state)
{
    (void)state;
    for (int i = 0; i < N_FORMATS; i++) {
        lm_kv_format f = format_at(i);
        int64_t T = 64, D = 80, step = lm_kv_step(&f, T), at = 32 % T / step * step;
        f.values = i % 2;
        numbers((uint64_t)i, T, D);
        clear_pages();
        code(&f, T, D, 0, T, page);
        lm_kv_decode(&f, T, D, 0, page, 0, T, y, D);
        memcpy(other, page, sizeof page);
        for (int64_t k = at * D; k < (at + step) * D; k++)
            x[k] = -3 * x[k] + 1;
        code(&f, T, D, at, step, page);
        lm_kv_decode(&f, T, D, 0, page, 0, T, z, D);
        assert_memory_equal(z, y, (size_t)(at * D) * sizeof *z);
        assert_memory_equal(z + (at + step) * D, y + (at + step) * D,
                            (size_t)((T - at - step) * D) * sizeof *z);
        assert_memory_not_equal(z + at * D, y + at * D, (size_t)(step * D) * sizeof *z);
        for (int64_t k = at * D; k < (at + step) * D; k++)
            x[k] = (x[k] - 1) / -3;
        numbers((uint64_t)i, T, D);
        code(&f, T, D, at, step, page);
        assert_memory_equal(page, other, sizeof page);
    }
}

/* ---- sizes ---- */

static void test_sizes(void **state)
{
    static const struct {
        lm_kv_format f;
        int64_t T, D;
        size_t bytes;
    } want[] = {
        /* codes + scales + minima + second scales */
        { INT(8, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16), 64, 64, 4096 + 128 },
        { INT(4, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_F16), 64, 128, 4096 + 512 + 512 },
        { INT(2, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_F16), 256, 128, 8192 + 2048 + 2048 },
        { INT(2, LM_KV_CHANNEL, LM_KV_ASYM, 32, LM_DTYPE_F16), 256, 128, 8192 + 2048 + 2048 },
        { INT(3, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F32), 64, 64, 1024 + 512 + 256 },
        { INT(5, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16), 128, 96, 6144 + 1536 + 256 },
        { INT(6, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16), 128, 96, 6144 + 3072 + 256 },
        { { .name = "fp8",
            .bits = 8,
            .levels = LM_KV_FLOAT8,
            .float8 = LM_DTYPE_F8E4M3,
            .scale = LM_DTYPE_NONE,
            .constant = 1 },
          64,
          128,
          8192 },
        /* D = 20: five lines of a tile of keys in three units; two times 16 channels of values */
        { INT(4, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16), 16, 20, 192 + 64 },
        { { .name = "v", .values = true, .bits = 4, .levels = LM_KV_SYM, .scale = LM_DTYPE_F16 },
          16,
          20,
          256 + 64 },
        /* the k4v2 tile of 128 tokens: 8,192 + 256 x 3 and 4,096 + 256 x 3, 13,824 together */
        { { .name = "k4",
            .bits = 4,
            .axis = LM_KV_CHANNEL,
            .levels = LM_KV_ASYM,
            .group = 128,
            .scale = LM_DTYPE_F16,
            .second = true },
          128,
          128,
          8960 },
        { { .name = "v2",
            .values = true,
            .bits = 2,
            .levels = LM_KV_ASYM,
            .scale = LM_DTYPE_F16,
            .second = true,
            .span = 128 },
          128,
          128,
          4864 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        assert_int_equal(page_of(&want[i].f, want[i].T, want[i].D), want[i].bytes);
    lm_kv_format f = INT(8, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16);
    lm_tensor t = { .dtype = LM_DTYPE_BF16, .ndim = 4, .dim = { 3, 2, 64, 64 }, .kv = &f };
    assert_int_equal(lm_stored_bytes(&t), 6 * 4224);
    t.dim[2] = 24;
    assert_true(lm_stored_bytes(&t) == SIZE_MAX);
    t.dim[2] = 64;
    t.dim[0] = INT64_MAX;
    assert_true(lm_stored_bytes(&t) == SIZE_MAX);
}

/* ---- the order of memory, a second time ---- */

/* Lines of a tile of codes c[tokens][D] as the header describes them. */
static int64_t naive_lines(bool values, int64_t tokens, int64_t D, const uint8_t *c, uint8_t *line)
{
    int64_t n = 0;
    if (values) {
        for (int64_t d0 = 0; d0 < D; d0 += 16)
            for (int64_t t0 = 0; t0 < tokens; t0 += 4, n++)
                for (int64_t d = d0; d < d0 + 16; d++)
                    for (int64_t t = t0; t < t0 + 4; t++)
                        *line++ = d < D ? c[t * D + d] : 0;
        return n;
    }
    for (int64_t d0 = 0; d0 < D; d0 += 4, n++)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t d = d0; d < d0 + 4; d++)
                *line++ = d < D ? c[t * D + d] : 0;
    return n;
}

/* `bits` bits of each line from bit `from` on, in units. */
static uint8_t *naive_plane(const uint8_t *line, int64_t lines, int from, int bits, uint8_t *to)
{
    int64_t each = 8 / bits;
    for (int64_t i = 0; i < lines; i += each, to += 64)
        for (int b = 0; b < 64; b++) {
            unsigned byte = 0;
            for (int64_t k = 0; k < each && i + k < lines; k++)
                byte += ((unsigned)line[(i + k) * 64 + b] >> from) % (1u << bits)
                        << (unsigned)(bits * (int)k);
            to[b] = (uint8_t)byte;
        }
    return to;
}

static void test_layout(void **state)
{
    static const int bits[] = { 1, 2, 3, 4, 5, 6, 8 }, low[] = { 1, 2, 2, 4, 4, 4, 8 };
    static const int64_t dims[] = { 20, 32, 64, 80, 96, 128, 4 }, lengths[] = { 16, 32, 64, 192 };
    static uint8_t codes[MOST_T * MOST_D], line[64 * MOST_D * 4], want[sizeof page];
    (void)state;
    for (int i = 0; i < 7 * 7 * 4 * 2; i++) {
        int64_t D = dims[i / 2 % 7], T = lengths[i / 14 % 4], b = bits[i / 56];
        lm_kv_format f = {
            .name = "codes", .bits = (int)b, .values = i % 2, .scale = LM_DTYPE_NONE, .constant = 1
        };
        int64_t tokens = !f.values ? 16 : T < 64 ? T : 64;
        lm_rng r = lm_rng_make(9, "codes", (uint64_t)i);
        for (int64_t k = 0; k < T * D; k++) {
            codes[k] = (uint8_t)lm_rng_below(r, (uint64_t)k, 1u << b);
            x[k] = (float)codes[k] - (float)(1 << (b - 1));
        }
        clear_pages();
        code(&f, T, D, 0, T, page);
        uint8_t *to = want;
        for (int64_t t = 0; t < T; t += tokens) {
            int64_t lines = naive_lines(f.values, tokens, D, codes + t * D, line);
            to = naive_plane(line, lines, 0, low[i / 56], to);
            if (b > low[i / 56])
                to = naive_plane(line, lines, low[i / 56], (int)b - low[i / 56], to);
        }
        assert_int_equal(to - want, page_of(&f, T, D));
        assert_memory_equal(page, want, (size_t)(to - want));
    }
}

/* Scales lie where the header says. */
static void test_scales(void **state)
{
    lm_kv_format token = { .name = "t", .bits = 8, .group = 32, .scale = LM_DTYPE_F32 };
    lm_kv_format channel = { .name = "c",
                             .bits = 4,
                             .axis = LM_KV_CHANNEL,
                             .group = 16,
                             .levels = LM_KV_ASYM,
                             .scale = LM_DTYPE_F32,
                             .second = true };
    lm_kv_sections s;
    lm_err e = { 0 };
    (void)state;
    numbers(1, 32, 80);
    clear_pages();
    assert_int_equal(lm_kv_page(&token, 32, 80, &s, &e), LM_OK);
    code(&token, 32, 80, 0, 32, page);
    for (int t = 0; t < 32; t++)
        for (int g = 0; g < 3; g++) {
            float most = 0, have;
            for (int d = 32 * g; d < 32 * g + 32 && d < 80; d++)
                most = fmaxf(most, fabsf(x[t * 80 + d]));
            memcpy(&have, page + s.scale + 4 * (t / 16 * 48 + g * 16 + t % 16), 4);
            assert_true(have == (float)((double)most / 127.5));
        }
    clear_pages();
    assert_int_equal(lm_kv_page(&channel, 32, 20, &s, &e), LM_OK);
    assert_int_equal(s.min - s.scale, 2 * 32 * 4);
    assert_int_equal(s.second - s.min, 2 * 32 * 4);
    assert_int_equal(s.all - s.second, 32 * 4);
    numbers(2, 32, 20);
    code(&channel, 32, 20, 16, 16, page);
    lm_kv_decode(&channel, 32, 20, 0, page, 16, 16, y, 20);
    for (int t = 0; t < 16; t++)
        for (int d = 0; d < 20; d++) {
            float scale, least, second;
            memcpy(&scale, page + s.scale + 4 * (32 + d), 4);
            memcpy(&least, page + s.min + 4 * (32 + d), 4);
            memcpy(&second, page + s.second + 4 * (16 + t), 4);
            double c = ((double)y[t * 20 + d] / (double)second - (double)least) / (double)scale;
            assert_true(fabs(c - rint(c)) < 1e-4 && c > -0.5 && c < 15.5);
        }
}

/* ---- ggml ---- */

static void test_ggml(void **state)
{
    static uint8_t row[MOST_D * 2];
    (void)state;
    for (int i = 0; i < N_FORMATS; i++) {
        lm_kv_format f = format_at(i);
        const lm_format *g;
        lm_err e = { 0 };
        if (!f.ggml)
            continue;
        assert_int_equal(lm_format_find(i == N_PLAIN ? "iq4_nl" : f.name, NULL, &g, &e), LM_OK);
        f.values = i % 2;
        numbers((uint64_t)i, 64, 128);
        x[5] = NAN;
        x[9] = INFINITY;
        clear_pages();
        code(&f, 64, 128, 0, 64, page);
        lm_kv_decode(&f, 64, 128, 0, page, 0, 64, y, 128);
        for (int t = 0; t < 64; t++) {
            void *plane = row;
            const void *from = row;
            g->encode(g, x + t * 128, 1, 128, 128, &plane, NULL);
            g->decode(g, &from, 1, 128, z, 128);
            assert_memory_equal(y + t * 128, z, 128 * sizeof *z);
        }
    }
}

/* ---- tables ---- */

static void test_tables(void **state)
{
    static const double published[3][8] = {
        { .4528, 1.5104 },
        { .2451, .7560, 1.3440, 2.1520 },
        { .1284, .3881, .6568, .9424, 1.2562, 1.6180, 2.0690, 2.7326 },
    };
    static const double error[] = { 0.3634, 0.1175, 0.03454, 0.009497, 0.002499 };
    (void)state;
    for (int bits = 1; bits <= 5; bits++) {
        float t[32];
        int half = 1 << (bits - 1);
        double sum = 0, all = 0;
        lm_kv_normal_table(bits, t);
        for (int i = 0; i < half; i++) {
            assert_true(t[half - 1 - i] == -t[half + i]);
            if (bits >= 2 && bits <= 4)
                assert_true(fabs((double)t[half + i] - published[bits - 2][i]) < 1.5e-4);
        }
        for (double v = 0; v < 8; v += 1e-3) { /* the mean square error, by integration */
            double best = INFINITY, p = exp(-v * v / 2);
            for (int i = 0; i < 2 * half; i++)
                best = fmin(best, (v - (double)t[i]) * (v - (double)t[i]));
            sum += best * p;
            all += p;
        }
        assert_true(fabs(sum / all / error[bits - 1] - 1) < 5e-3);
    }
    float values[16];
    lm_kv_iq4_table(values);
    assert_true(values[0] == -127 && values[8] == 1 && values[15] == 113);
}

/* renorm: a decoded vector has the norm of the vector, a zero vector stays zero. */
static void test_norms(void **state)
{
    lm_kv_format f = { .name = "nc",
                       .bits = 3,
                       .levels = LM_KV_TABLE,
                       .norm = true,
                       .renorm = true,
                       .scale = LM_DTYPE_F16,
                       .n_table = 8 };
    (void)state;
    lm_kv_normal_table(3, f.table);
    numbers(4, 16, 128);
    clear_pages();
    code(&f, 16, 128, 0, 16, page);
    lm_kv_decode(&f, 16, 128, 0, page, 0, 16, y, 128);
    for (int t = 0; t < 16; t++) {
        double a = 0, b = 0;
        for (int d = 0; d < 128; d++) {
            a += (double)x[t * 128 + d] * (double)x[t * 128 + d];
            b += (double)y[t * 128 + d] * (double)y[t * 128 + d];
        }
        assert_true(fabs(sqrt(b) - sqrt(a)) <= 6e-4 * sqrt(a));
    }
    f.renorm = false;
    for (int i = 0; i < 16 * 128; i++)
        x[i] = (float)(2.5 * lm_rng_normal(lm_rng_make(6, "normal", 0), (uint64_t)i));
    clear_pages();
    code(&f, 16, 128, 0, 16, page);
    lm_kv_decode(&f, 16, 128, 0, page, 0, 16, y, 128);
    double error = 0, all = 0;
    for (int i = 0; i < 16 * 128; i++) {
        error += pow((double)x[i] - (double)y[i], 2);
        all += pow((double)x[i], 2);
    }
    assert_true(error / all > 0.03 && error / all < 0.039); /* 0.0345 in the mean */
}

/* ---- second scales ---- */

static double relative_error(const lm_kv_format *f, int64_t T, int64_t D)
{
    double error = 0, all = 0;
    clear_pages();
    page_of(f, T, D);
    code(f, T, D, 0, T, page);
    lm_kv_decode(f, T, D, 0, page, 0, T, y, D);
    for (int64_t i = 0; i < T * D; i++) {
        error += pow((double)x[i] - (double)y[i], 2);
        all += pow((double)x[i], 2);
    }
    return sqrt(error / all);
}

/* Rows and columns of very different sizes cost nothing with scales along both; groups stand for themselves. */
static void test_balanced(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        bool values = i % 2;
        lm_kv_format f = { .name = "balanced",
                           .values = values,
                           .bits = values ? 2 : 4,
                           .axis = values ? LM_KV_TOKEN : LM_KV_CHANNEL,
                           .levels = LM_KV_ASYM,
                           .group = values ? 0 : 64,
                           .span = values ? 64 : 0,
                           .scale = LM_DTYPE_F32,
                           .second = true };
        int64_t T = 128, D = i < 2 ? 64 : 20;
        lm_rng r = lm_rng_make(8, "balanced", (uint64_t)i);
        for (int64_t k = 0; k < T * D; k++)
            x[k] = (float)lm_rng_normal(r, (uint64_t)k);
        double even = relative_error(&f, T, D);
        for (int64_t k = 0; k < T * D; k++) {
            double size = values ? k % D % 8 == 1 : k / D % 8 == 1;
            x[k] *= size ? 30.0f : 1.0f;
        }
        double both = relative_error(&f, T, D);
        f.second = false;
        f.span = 0;
        double one = relative_error(&f, T, D);
        assert_true(both < 1.2 * even);
        assert_true(one > 1.15 * both);
        f.second = true;
        f.span = values ? 64 : 0;
        code(&f, T, D, 64, 64, other);
        code(&f, T, D, 0, 64, other);
        clear_pages();
        code(&f, T, D, 0, T, page);
        code(&f, T, D, 64, 64, other);
        code(&f, T, D, 0, 64, other);
        assert_memory_equal(page, other, sizeof page);
        for (int64_t k = 0; k < T * D; k++)
            x[k] = 0.5f;
        assert_true(relative_error(&f, T, D) < 1e-6);
    }
}

/* ---- outliers ---- */

static void test_outliers(void **state)
{
    float low[2 * 32], high[2 * 32], range[64 * 2];
    lm_kv_format f = { .name = "nuq",
                       .bits = 3,
                       .axis = LM_KV_CHANNEL,
                       .levels = LM_KV_TABLE,
                       .scale = LM_DTYPE_NONE,
                       .zero = true,
                       .outliers = 40,
                       .n_table = 8,
                       .lower = low,
                       .upper = high };
    (void)state;
    for (int k = 0; k < 8; k++)
        f.table[k] = -1 + (float)k * (2.0f / 7);
    for (int d = 0; d < 64; d++) {
        low[d] = -2 - (float)d / 16;
        high[d] = 1 + (float)d / 16;
    }
    for (int i = 0; i < 64 * 32; i++)
        x[i] = (float)lm_rng_normal(lm_rng_make(6, "outliers", 0), (uint64_t)i);
    for (int i = 0; i < 64; i++) /* 64 beyond, of which 40 are kept: the largest */
        x[i * 32 + i % 32] = (float)(i % 3 ? 5 + i : -5 - i);
    for (int side = 0; side < 2; side++) {
        f.values = side;
        f.axis = side ? LM_KV_TOKEN : LM_KV_CHANNEL;
        f.scale = side ? LM_DTYPE_F32 : LM_DTYPE_NONE;
        f.lower = side ? NULL : low;
        f.upper = side ? NULL : high;
        for (int t = 0; t < 64; t++) {
            range[2 * t] = -3;
            range[2 * t + 1] = 3;
        }
        clear_pages();
        page_of(&f, 64, 32);
        lm_kv_encode(&f, 64, 32, 0, x, 32, 0, 64, range, page);
        for (int t = 63; t >= 0; t--)
            lm_kv_encode(&f, 64, 32, 0, x + 32 * t, 32, t, 1, range + 2 * t, other);
        assert_memory_equal(page, other, sizeof page);
        lm_kv_decode(&f, 64, 32, 0, page, 0, 64, y, 32);
        for (int i = 0; i < 64; i++) {
            float have = y[i * 32 + i % 32], put = x[i * 32 + i % 32];
            if (i >=
                24 + 8) /* ranges differ by channel: the smallest are surely out, the largest in */
                assert_true(have == put);
            if (i < 12)
                assert_true(fabsf(have) <= 5);
        }
        /* inside the range the nearest level, 2/7 of half the range apart */
        for (int i = 0; i < 64 * 32; i++)
            if (fabsf(x[i]) < 1 && !(fabsf(x[i] - y[i]) <= 0.1429f * 3.6f))
                fail_msg("side %d i %d: %g is %g", side, i, (double)x[i], (double)y[i]);
        /* without its outliers a token gives its places back */
        for (int k = 0; k < 32; k++)
            x[40 * 32 + k] = 0.5f;
        lm_kv_encode(&f, 64, 32, 0, x + 40 * 32, 32, 40, 1, range, page);
        lm_kv_decode(&f, 64, 32, 0, page, 0, 64, z, 32);
        assert_true(fabsf(z[40 * 32 + 8] - 0.5f) < 0.6f);
        assert_memory_equal(z, y, 40 * 32 * sizeof *z);
        assert_memory_equal(z + 41 * 32, y + 41 * 32, 23 * 32 * sizeof *z);
        x[40 * 32 + 8] = 45;
    }
    /* the second head has ranges of its own */
    f = (lm_kv_format){ .name = "fixed",
                        .bits = 8,
                        .axis = LM_KV_CHANNEL,
                        .levels = LM_KV_ASYM,
                        .scale = LM_DTYPE_NONE,
                        .lower = low,
                        .upper = high };
    for (int d = 0; d < 32; d++)
        x[d] = d % 2 ? low[32 + d] : high[32 + d];
    lm_kv_encode(&f, 16, 32, 1, x, 32, 3, 1, NULL, page);
    lm_kv_decode(&f, 16, 32, 1, page, 3, 1, y, 32);
    for (int d = 0; d < 32; d++)
        assert_true(fabsf(x[d] - y[d]) < 1e-6f);
}

/* ---- numbers that are not finite, and refusals ---- */

static void test_not_finite(void **state)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    (void)state;
    for (int i = 0; i < N_FORMATS; i++) {
        lm_kv_format f = format_at(i);
        if (f.ggml || f.scale == LM_DTYPE_NONE)
            continue;
        numbers(5, 64, 64);
        x[20 * 64 + 30] = bad[i % 3];
        clear_pages();
        code(&f, 64, 64, 0, 64, page);
        lm_kv_decode(&f, 64, 64, 0, page, 0, 64, y, 64);
        for (int k = 0; k < 64 * 64; k++) {
            int t = k / 64, d = k % 64, group = f.group ? f.group : 64;
            bool same = f.axis == LM_KV_TOKEN ? t == 20 && d / group == 30 / group
                                              : d == 30 && t / group == 20 / group;
            assert_true(same ? isnan(y[k]) : isfinite(y[k]));
        }
    }
}

static void refuse(lm_kv_format f, int64_t T, int64_t D, const char *text)
{
    lm_kv_sections s;
    lm_err e = { 0 };
    f.name = "a format";
    assert_int_equal(lm_kv_page(&f, T, D, &s, &e), LM_EUSAGE);
    assert_string_equal(e.where, "a format");
    if (!strstr(e.what, text))
        fail_msg("'%s' lacks '%s'", e.what, text);
    assert_true(lm_kv_page_bytes(&f, T, D) == SIZE_MAX);
}

static void test_refusals(void **state)
{
    lm_kv_format f = INT(4, LM_KV_CHANNEL, LM_KV_ASYM, 32, LM_DTYPE_F16), g;
    (void)state;
    refuse(f, 24, 64, "multiple of 64");
    refuse(f, 0, 64, "multiple of 64");
    refuse(f, 8192, 64, "at most 4096");
    refuse(f, 64, 0, "1 to 1024");
    refuse(f, 64, 1025, "1 to 1024");
    refuse(f, 16, 64, "divide a page");
    g = f, g.bits = 7;
    refuse(g, 64, 64, "1 to 6 or 8");
    g = f, g.group = 20;
    refuse(g, 64, 64, "multiples of 16");
    g = f, g.scale = LM_DTYPE_I8;
    refuse(g, 64, 64, "F16, BF16 or F32");
    g = f, g.scale = LM_DTYPE_NONE;
    refuse(g, 64, 64, "fixed ranges");
    g = f, g.levels = LM_KV_FLOAT8;
    refuse(g, 64, 64, "FP8");
    g = f, g.norm = true;
    refuse(g, 64, 64, "of tables");
    g = f, g.outliers = 3;
    refuse(g, 64, 64, "tables over a range");
    g = f, g.ggml = true;
    refuse(g, 64, 64, "q4_0");
    g = table_format(1), g.table[1] = g.table[0];
    refuse(g, 64, 64, "that rise");
}

/* ---- in a graph ---- */

static void test_graph(void **state)
{
    lm_kv_format f = INT(4, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16);
    lm_tensor t = { .dtype = LM_DTYPE_F32, .ndim = 4, .dim = { 2, 1, 32, 8 }, .kv = &f };
    lm_graph *g = NULL;
    lm_err e = { 0 };
    lm_vid in[2], out = LM_NONE;
    (void)state;
    assert_int_equal(lm_graph_new(&g, &e), LM_OK);
    assert_int_equal(lm_graph_value(g, LM_ROLE_STATE, t, "keys", &in[0], &e), LM_OK);
    assert_int_equal(lm_value_bytes(&g->value[in[0]], &lm_mesh_alone),
                     2 * lm_kv_page_bytes(&f, 32, 8));
    in[1] = in[0];
    assert_int_equal(lm_graph_append(g, &lm_op_add, NULL, in, &out, &e), LM_EBUG);
    assert_non_null(strstr(e.what, "is a coded cache"));
    lm_graph_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors),     cmocka_unit_test(test_rewrite),
        cmocka_unit_test(test_sizes),      cmocka_unit_test(test_layout),
        cmocka_unit_test(test_scales),     cmocka_unit_test(test_ggml),
        cmocka_unit_test(test_tables),     cmocka_unit_test(test_norms),
        cmocka_unit_test(test_balanced),   cmocka_unit_test(test_outliers),
        cmocka_unit_test(test_not_finite), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_graph),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
