/* SPDX-License-Identifier: Apache-2.0 */
/* The registry of number formats: every codec encodes and decodes what its description promises. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/mem.h"
#include "numeric/codec.h"

enum { ROWS = 5, COLS = 37, PITCH = 41 };

static void *take(size_t bytes)
{
    void *p = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_alloc_n(&p, bytes + 1, 1, "test", &e), 0);
    return p;
}

/* Encode ROWS x COLS of a wider matrix, decode, encode again: the codes repeat, the error is that
 * of the mantissa, and numbers between the rows are not touched. */
static void round_trip(void **state)
{
    (void)state;
    for (int i = 0; lm_codec_at(i); i++) {
        const lm_codec *c = lm_codec_at(i);
        float x[ROWS * PITCH], y[ROWS * PITCH];
        size_t n_codes, n_scales;
        lm_err e = { 0 };
        assert_int_equal(lm_codec_size(c, ROWS, COLS, &n_codes, &n_scales, &e), 0);
        char *codes = take(n_codes), *again = take(n_codes), *scales = take(n_scales);
        lm_rng r = lm_rng_make(1, "codec test", 0);
        for (int k = 0; k < ROWS * PITCH; k++) {
            x[k] = (float)lm_rng_normal(r, (uint64_t)k);
            y[k] = -7;
        }
        codes[n_codes] = again[n_codes] = 0x5a;
        c->encode(c, x, ROWS, COLS, PITCH, codes, scales, NULL);
        c->decode(c, codes, scales, ROWS, COLS, y, PITCH);
        c->encode(c, y, ROWS, COLS, PITCH, again, scales, NULL);
        assert_memory_equal(codes, again, n_codes + 1);
        double err = 0, norm = 0;
        for (int k = 0; k < ROWS * PITCH; k++) {
            if (k % PITCH >= COLS) {
                assert_true(y[k] == -7);
                continue;
            }
            err += (x[k] - y[k]) * (double)(x[k] - y[k]);
            norm += x[k] * (double)x[k];
        }
        assert_true(sqrt(err / norm) < (c->bits == 32 ? 1e-30 : c->bits == 16 ? 3e-3 : 0.07));
        lm_free(codes);
        lm_free(again);
        lm_free(scales);
    }
}

static void largest_and_saturation(void **state)
{
    (void)state;
    lm_codec_mode saturate = { .saturate = true };
    for (int i = 1; lm_codec_at(i); i++) {
        const lm_codec *c = lm_codec_at(i);
        if (c->scale != LM_DTYPE_NONE) /* scaled to its own largest number */
            continue;
        float x[4] = { (float)c->max, INFINITY, -INFINITY, NAN }, y[4];
        uint8_t codes[16];
        c->encode(c, x, 1, 4, 4, codes, NULL, &saturate);
        c->decode(c, codes, NULL, 1, 4, y, 4);
        assert_true(y[0] == (float)c->max && y[1] == (float)c->max && y[2] == -(float)c->max);
        assert_true(isnan(y[3]));
        c->encode(c, x, 1, 4, 4, codes, NULL, NULL);
        c->decode(c, codes, NULL, 1, 4, y, 4);
        assert_true(y[0] == (float)c->max && !isfinite(y[1]) && !isfinite(y[2]) && isnan(y[3]));
    }
}

/* Stochastic codes average to the number, and rows may be encoded one at a time. */
static void stochastic(void **state)
{
    (void)state;
    enum { N = 4096 };
    static float x[N], y[N];
    static uint8_t whole[2 * N], part[2 * N];
    static float scales[N], scale[N]; /* one number in each block is exact, and its scale */
    for (int i = 0; i < N; i++)
        x[i] = 1.01f;
    for (int i = 1; lm_codec_at(i); i++) {
        const lm_codec *c = lm_codec_at(i);
        lm_codec_mode m = { LM_ROUND_STOCHASTIC, false, lm_rng_make(3, "codec test", 1), 11 };
        for (int k = 0; k < N; k += c->block_cols) /* what the others are rounded against */
            x[k] = c->scale == LM_DTYPE_NONE ? 1.01f : -1.75f;
        c->encode(c, x, 8, N / 8, N / 8, whole, scales, &m);
        for (int row = 0; row < 8; row++, m.index += N / 8)
            c->encode(c, x, 1, N / 8, N / 8, part + row * (N / 8) * c->bits / 8, scale, &m);
        assert_memory_equal(whole, part, (size_t)(N * c->bits / 8));
        c->decode(c, whole, scales, 8, N / 8, y, N / 8);
        double sum = 0;
        for (int k = 0; k < N; k++)
            sum += x[k] < 0 ? 1.01 : y[k];
        /* a step of 2^-m at most: the mean of N draws lies within five deviations */
        double step = c->bits == 8 ? 0.25 : 0.0078125;
        assert_true(fabs(sum / N - 1.01) < 5 * step / 2 / 64);
    }
}

/* The dynamic map as its source has it, in float64: ascending, n entries. */
static int reference_map(bool with_sign, double *map)
{
    int n = 0;
    for (int d = 0; d < 7; d++)
        for (int k = 0; k < (with_sign ? 1 << d : 2 << d); k++) {
            double width = 0.9 / (with_sign ? 1 << d : 2 << d);
            double v = pow(10, d - 6) * (0.1 + width * k + width / 2);
            map[n++] = v;
            if (with_sign)
                map[n++] = d ? -v : -1;
        }
    map[n++] = 0;
    map[n++] = 1;
    assert_int_equal(n, 256);
    return n;
}

/* Blocks of every kind of number against the nearest entry of the reference map: no code does better
 * than the one that was chosen, and the bound holds. */
static void dynamic_is_nearest(void **state)
{
    (void)state;
    enum { N = 256 * 40 + 77 };
    const lm_codec *c = NULL;
    lm_err e = { 0 };
    double map[2][256];
    static float x[N], y[N], scale[N / 256 + 1];
    static uint8_t code[N];
    lm_rng r = lm_rng_make(5, "codec test", 2);
    assert_int_equal(lm_codec_find("dynamic8", &c, &e), 0);
    reference_map(false, map[0]);
    reference_map(true, map[1]);
    for (int i = 0; i < N; i++) { /* blocks over 60 binades, every third without negative numbers */
        double wide = exp(2.0 * lm_rng_normal(r, (uint64_t)(2 * i)));
        double v = ldexp(lm_rng_normal(r, (uint64_t)(2 * i + 1)) * wide, i / 256 * 3 - 60);
        x[i] = (float)(i / 256 % 3 ? v : fabs(v));
    }
    x[300] = -0.0f;
    x[3] = x[6] = 0;
    x[5] = 1e-30f; /* far below the least entry of its block */
    memset(x + 512, 0, 256 * sizeof *x);
    c->encode(c, x, 1, N, N, code, scale, NULL);
    c->decode(c, code, scale, 1, N, y, N);
    for (int i = 0; i < N; i++) {
        double s = fabs((double)scale[i / 256]), best = INFINITY;
        const double *m = map[scale[i / 256] < 0];
        for (int k = 0; k < 256; k++)
            if (m[k] != 0 || x[i] <= 0 || m == map[1]) /* a second moment stays positive */
                best = fmin(best, fabs(x[i] - m[k] * s));
        assert_true(fabs((double)x[i] - y[i]) <= best + s * 2e-7);
        assert_true(fabs((double)x[i] - y[i]) <= c->err_block * s);
        if (i / 256 % 3 == 0)
            assert_true((x[i] > 0) == (y[i] > 0));
    }
    x[700] = NAN;
    c->encode(c, x, 1, N, N, code, scale, NULL);
    c->decode(c, code, scale, 1, N, y, N);
    assert_true(isnan(y[699]) && isnan(y[700]) && !isnan(y[768]));
}

/* The stated bound of each codec, on numbers down to the denormal ones. */
static void bounds(void **state)
{
    (void)state;
    enum { N = 4096 };
    static float x[N], y[N], scale[N];
    static uint32_t code[N];
    lm_rng r = lm_rng_make(7, "codec test", 3);
    for (int i = 0; lm_codec_at(i); i++) {
        const lm_codec *c = lm_codec_at(i);
        for (int k = 0; k < N; k++)
            x[k] = (float)ldexp(2 * lm_rng_uniform(r, (uint64_t)(2 * k)) - 1,
                                (int)(lm_rng_u32(r, (uint64_t)k) % 40) - 35 + (c->bits != 16) * 4);
        c->encode(c, x, 1, N, N, code, scale, NULL);
        c->decode(c, code, scale, 1, N, y, N);
        for (int k = 0; k < N; k++) {
            double most = 0;
            for (int j = k / c->block_cols * c->block_cols; c->err_block > 0 && j < N; j++)
                if (j / c->block_cols == k / c->block_cols)
                    most = fmax(most, fabs(x[j]));
            assert_true(fabs((double)x[k] - y[k]) <=
                        fmax(c->err_rel * fabs(x[k]), c->err_abs) + c->err_block * most);
        }
    }
}

static void names(void **state)
{
    (void)state;
    const lm_codec *c = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_codec_find("fp8_e4m3", &c, &e), 0);
    assert_true(c->element == LM_DTYPE_F8E4M3 && c->max == 448);
    assert_int_equal(lm_codec_find("bfloat16", &c, &e), 0);
    assert_int_equal(lm_codec_find("nf3", &c, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "fp8_e5m2"));
    assert_null(lm_codec_at(-1));
    assert_null(lm_codec_at(1000));
}

static void sizes(void **state)
{
    (void)state;
    const lm_codec odd = {
        .name = "odd", .bits = 4, .block_rows = 1, .block_cols = 32, .scale = LM_DTYPE_U8
    };
    size_t codes, scales;
    lm_err e = { 0 };
    assert_int_equal(lm_codec_size(&odd, 3, 33, &codes, &scales, &e), 0);
    assert_int_equal(codes, 3 * 17);
    assert_int_equal(scales, 3 * 2);
    assert_int_equal(lm_codec_size(lm_codec_at(0), INT64_MAX, INT64_MAX, &codes, &scales, &e),
                     LM_ELIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip), cmocka_unit_test(largest_and_saturation),
        cmocka_unit_test(stochastic), cmocka_unit_test(names),
        cmocka_unit_test(sizes),      cmocka_unit_test(dynamic_is_nearest),
        cmocka_unit_test(bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
