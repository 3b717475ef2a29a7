/* SPDX-License-Identifier: Apache-2.0 */
/* The registry of number formats: every format encodes and decodes as its entry states. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "numeric/format.h"
#include "numeric/format_normal.h"

static void *take(size_t bytes)
{
    void *p = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_alloc_n(&p, bytes + 1, 1, "test", &e), 0);
    return p;
}

/* The i-th of the formats that are planar, round, and may be written. */
static const lm_format *planar_at(int i)
{
    for (int k = 0; lm_format_at(k); k++) {
        const lm_format *f = lm_format_at(k);
        if (f->encode && !lm_format_interleaved(f) && f->plane[0].bits < 64 && !i--)
            return f;
    }
    return NULL;
}

/* Scales of the scales, of up to eight short rows. */
static float second[2][8];

static void encode(const lm_format *f, const float *x, int64_t n, void *codes, void *scales,
                   const lm_encode_mode *mode)
{
    f->encode(f, x, 1, n, n, (void *[]){ codes, scales, second[0], second[1] }, mode);
}

static void decode(const lm_format *f, const void *codes, const void *scales, int64_t n, float *y)
{
    f->decode(f, (const void *[]){ codes, scales, second[0], second[1] }, 1, n, y, n);
}

/* ---- The walk ---- */

enum { PAD = 5, GUARD = 0x5a };

/* The planes of a matrix, each at an odd address between two guard bytes. */
typedef struct {
    const lm_format *f;
    lm_tensor_size size;
    uint8_t *room[LM_MAX_PLANES];
    void *plane[LM_MAX_PLANES];
} planes;

static planes take_planes(const lm_format *f, int64_t rows, int64_t cols)
{
    planes p = { .f = f };
    lm_err e = { 0 };

    assert_int_equal(lm_tensor_bytes(f, 2, (int64_t[]){ rows, cols }, &p.size, &e), LM_OK);
    for (int k = 0; k < f->n_planes; k++) {
        p.room[k] = take(p.size.plane[k] + 3);
        p.plane[k] = p.room[k] + 3;
        memset(p.room[k], GUARD, p.size.plane[k] + 4);
    }
    return p;
}

static void check_guards(const planes *p)
{
    for (int k = 0; k < p->f->n_planes; k++)
        if (p->room[k][2] != GUARD || p->room[k][3 + p->size.plane[k]] != GUARD)
            fail_msg("%s: writes beside plane %d", p->f->name, k);
}

static void drop_planes(planes *p)
{
    for (int k = 0; k < p->f->n_planes; k++)
        lm_free(p->room[k]);
}

/* The largest magnitude of the block of element j of a row. */
static double block_most(const lm_format *f, const float *row, int64_t cols, int64_t j)
{
    int64_t group = lm_format_group(f), from = j / group * group;
    double most = 0;

    for (int64_t k = from; k < cols && k < from + group; k++)
        most = fmax(most, fabs(row[k]));
    return most;
}

static void check_errors(const lm_format *f, const float *x, const float *y, int64_t rows,
                         int64_t cols, int64_t pitch)
{
    double err = 0, norm = 0;

    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            double v = x[i * pitch + j], d = fabs(v - y[i * pitch + j]);
            double most = f->err_block > 0 ? block_most(f, x + i * pitch, cols, j) : 0;
            double bound = fmax(f->err_rel * fabs(v), f->err_abs) + f->err_block * most;
            if (f->err_rms == 0 && !(d <= bound))
                fail_msg("%s: %g becomes %g, beyond %g", f->name, v, y[i * pitch + j], bound);
            err += d * d;
            norm += v * v;
        }
    if (f->err_rms > 0 && rows * cols >= 1024 && !(sqrt(err / norm) <= f->err_rms))
        fail_msg("%s: error %g, beyond %g", f->name, sqrt(err / norm), f->err_rms);
}

/* rows x cols of a wider matrix: in one call and row by row the same bytes, errors within what the
 * entry states, no byte beside the planes and no number between the rows touched. */
static void try_shape(const lm_format *f, int64_t rows, int64_t cols)
{
    int64_t pitch = cols + PAD, n = rows * pitch;
    float *x = take((size_t)n * sizeof *x), *y = take((size_t)n * sizeof *y);
    planes all = take_planes(f, rows, cols), one = take_planes(f, 1, cols);
    lm_rng r = lm_rng_make(1, "format test", (uint64_t)cols);

    for (int64_t k = 0; k < n; k++) {
        x[k] = (float)lm_rng_normal(r, (uint64_t)k);
        y[k] = -7;
    }
    f->encode(f, x, rows, cols, pitch, all.plane, NULL);
    f->decode(f, (const void *const *)all.plane, rows, cols, y, pitch);
    check_guards(&all);
    check_errors(f, x, y, rows, cols, pitch);
    for (int64_t k = 0; k < n; k++)
        assert_true(k % pitch < cols || y[k] == -7);
    for (int64_t i = 0; i < rows; i++) {
        f->encode(f, x + i * pitch, 1, cols, pitch, one.plane, NULL);
        check_guards(&one);
        for (int k = 0; k < f->n_planes; k++)
            assert_memory_equal((char *)all.plane[k] + (size_t)i * one.size.plane[k], one.plane[k],
                                one.size.plane[k]);
    }
    drop_planes(&all);
    drop_planes(&one);
    lm_free(x);
    lm_free(y);
}

static void every_format(void **state)
{
    (void)state;
    static const int64_t shape[][2] = { { 1, 1 }, { 5, 37 }, { 3, 256 }, { 7, 515 }, { 1, 4099 } };

    for (int i = 0; lm_format_at(i); i++) {
        const lm_format *f = lm_format_at(i);
        int64_t whole = lm_format_interleaved(f) ? f->plane[0].cols : 1;
        for (size_t s = 0; f->encode && s < sizeof shape / sizeof *shape; s++)
            try_shape(f, shape[s][0], (shape[s][1] + whole - 1) / whole * whole);
    }
}

/* The fields of each entry are consistent, and each entry is found by each of its keys. */
static void every_entry(void **state)
{
    (void)state;
    lm_err e = { 0 };
    const lm_format *found;

    for (int i = 0; lm_format_at(i); i++) {
        const lm_format *f = lm_format_at(i);
        assert_int_equal(lm_format_find(f->name, NULL, &found, &e), LM_OK);
        assert_ptr_equal(found, f);
        if (f->also) {
            assert_int_equal(lm_format_find(f->also, NULL, &found, &e), LM_OK);
            assert_ptr_equal(found, f);
        }
        if (f->gguf != LM_NO_GGUF)
            assert_ptr_equal(lm_format_of_gguf((uint32_t)f->gguf), f);
        if (f->element != LM_DTYPE_NONE)
            assert_ptr_equal(lm_format_of_dtype(f->element), f);
        assert_true(f->about && f->n_planes >= 1 && f->n_planes <= LM_MAX_PLANES);
        assert_true(f->decode || !f->encode);
        assert_true((f->block != NULL) == (lm_format_interleaved(f) && f->decode));
        for (int k = 0; k < f->n_planes; k++) {
            const lm_plane *p = &f->plane[k];
            assert_true(p->bits > 0 && p->rows > 0 && p->cols > 0);
            assert_true((k == 0) == (p->kind != LM_PLANE_SCALE));
            if (p->dtype != LM_DTYPE_NONE)
                assert_int_equal(p->bits, 8 * lm_dtype_size(p->dtype));
        }
    }
    for (int d = 0; d < LM_DTYPE_COUNT; d++)
        assert_int_equal(lm_format_of_dtype((lm_dtype)d)->element, d);
    assert_null(lm_format_of_dtype(LM_DTYPE_NONE));
    assert_null(lm_format_of_gguf(43));
    assert_null(lm_format_of_gguf(UINT32_MAX));
}

/* Encoding what was decoded gives the same codes. */
static void codes_repeat(void **state)
{
    (void)state;
    enum { N = 1500 };
    static float x[N], y[N], scale[2][N];
    static uint8_t code[2][4 * N];
    lm_rng r = lm_rng_make(1, "format test", 0);

    for (int k = 0; k < N; k++)
        x[k] = (float)lm_rng_normal(r, (uint64_t)k);
    for (int i = 0; planar_at(i); i++) {
        encode(planar_at(i), x, N, code[0], scale[0], NULL);
        decode(planar_at(i), code[0], scale[0], N, y);
        encode(planar_at(i), y, N, code[1], scale[1], NULL);
        if (planar_at(i)->n_planes > 2) /* its scales are other ones, and coded again */
            continue;
        assert_memory_equal(code[0], code[1], (size_t)(N * planar_at(i)->plane[0].bits / 8));
    }
}

static void largest_and_saturation(void **state)
{
    (void)state;
    lm_encode_mode saturate = { .saturate = true };
    for (int i = 0; planar_at(i); i++) {
        const lm_format *c = planar_at(i);
        if (c->n_planes > 1 || c->element == LM_DTYPE_F32) /* scaled to its own largest number */
            continue;
        float x[4] = { (float)c->max, INFINITY, -INFINITY, NAN }, y[4];
        uint8_t codes[16];
        encode(c, x, 4, codes, NULL, &saturate);
        decode(c, codes, NULL, 4, y);
        assert_true(y[0] == (float)c->max && y[1] == (float)c->max && y[2] == -(float)c->max);
        assert_true(isnan(y[3]));
        encode(c, x, 4, codes, NULL, NULL);
        decode(c, codes, NULL, 4, y);
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
    for (int i = 0; planar_at(i); i++) {
        const lm_format *c = planar_at(i);
        lm_encode_mode m = { LM_ROUND_STOCHASTIC, false, lm_rng_make(3, "format test", 1), 11,
                             NULL };
        int bits = c->plane[0].bits, group = lm_format_group(c);
        if (bits == 32)
            continue;
        for (int k = 0; k<N; k += group> 256 ? 64 : group) /* the scale for the others */
            x[k] = c->n_planes == 1 ? 1.01f : -1.75f;
        c->encode(c, x, 8, N / 8, N / 8, (void *[]){ whole, scales, second[0], second[1] }, &m);
        for (int row = 0; row < 8; row++, m.index += N / 8)
            encode(c, x, N / 8, part + row * (N / 8) * bits / 8, scale, &m);
        assert_memory_equal(whole, part, (size_t)(N * bits / 8));
        c->encode(c, x, 8, N / 8, N / 8, (void *[]){ whole, scales, second[0], second[1] },
                  &(lm_encode_mode){ LM_ROUND_STOCHASTIC, false, m.rng, 11, NULL });
        c->decode(c, (const void *[]){ whole, scales, second[0], second[1] }, 8, N / 8, y, N / 8);
        double sum = 0;
        for (int k = 0; k < N; k++)
            sum += x[k] < 0 ? 1.01 : y[k];
        /* a step of 2^-m at most: the mean of N draws lies within five deviations */
        double step = bits == 4 ? 0.55 : bits == 8 ? 0.25 : 0.0078125;
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

/* Blocks of every kind of number against the nearest entry of the reference map: no code does
 * better than the one that was chosen, and the bound holds. */
static void dynamic_is_nearest(void **state)
{
    (void)state;
    enum { N = 256 * 40 + 77 };
    const lm_format *c = NULL;
    lm_err e = { 0 };
    double map[2][256];
    static float x[N], y[N], scale[N / 256 + 1];
    static uint8_t code[N];
    lm_rng r = lm_rng_make(5, "format test", 2);
    assert_int_equal(lm_format_find("dynamic8", NULL, &c, &e), 0);
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
    encode(c, x, N, code, scale, NULL);
    decode(c, code, scale, N, y);
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
    encode(c, x, N, code, scale, NULL);
    decode(c, code, scale, N, y);
    assert_true(isnan(y[699]) && isnan(y[700]) && !isnan(y[768]));
}

/* NF4 against its definition in float64: codes of blocks with and without negative numbers, zeros, and a number that is
 * not finite; with double quantisation the scales are near. */
static void normal_is_nearest(void **state)
{
    enum { N = 64 * 300 + 13, BLOCKS = 301 };
    static const char *const names[] = { "nf4", "nf4_dq" };
    static float x[N], y[N], scale[BLOCKS], twice[2][2];
    static uint8_t code[N];
    lm_rng r = lm_rng_make(6, "format test", 4);
    (void)state;
    for (int i = 0; i < N; i++)
        x[i] = (float)(lm_rng_normal(r, (uint64_t)i) * (i / 64 == 9 ? 0 : 1 + i / 64 % 7));
    for (int k = 0; k < 2; k++) {
        const lm_format *f = NULL;
        lm_err e = { 0 };
        void *plane[] = { code, scale, twice[0], twice[1] };
        double off = k ? 0.9 / 128 * 30 : 0; /* of a scale: the largest is below 30 */
        assert_int_equal(lm_format_find(names[k], NULL, &f, &e), 0);
        f->encode(f, x, 1, N, N, plane, NULL);
        f->decode(f, (const void *const *)plane, 1, N, y, N);
        for (int b = 0; b < BLOCKS; b++) {
            double most = 0;
            for (int i = b * 64; i < N && i < b * 64 + 64; i++)
                most = fmax(most, fabs(x[i]));
            for (int i = b * 64; i < N && i < b * 64 + 64; i++) {
                double best = INFINITY;
                for (int v = 0; v < 16; v++)
                    best = fmin(best, fabs(x[i] - lm_normal_values[v] * most));
                assert_true(fabs((double)x[i] - y[i]) <= best + off + most * 1e-6);
                if (!k && fabs(x[i]) == most)
                    assert_true(y[i] == x[i]);
            }
        }
        x[N - 1] = INFINITY;
        f->encode(f, x, 1, N, N, plane, NULL);
        f->decode(f, (const void *const *)plane, 1, N, y, N);
        assert_true(isnan(y[N - 1]) && isnan(y[N - 13]) && !isnan(y[0]));
        x[N - 1] = 0;
    }
}

/* The stated bound of each codec, on numbers down to the denormal ones. */
static void bounds(void **state)
{
    (void)state;
    enum { N = 4096 };
    static float x[N], y[N], scale[N];
    static uint32_t code[N];
    lm_rng r = lm_rng_make(7, "format test", 3);
    for (int i = 0; planar_at(i); i++) {
        const lm_format *c = planar_at(i);
        for (int k = 0; k < N; k++)
            x[k] = (float)ldexp(2 * lm_rng_uniform(r, (uint64_t)(2 * k)) - 1,
                                (int)(lm_rng_u32(r, (uint64_t)k) % 40) - 35 +
                                    (c->plane[0].bits != 16) * 4);
        encode(c, x, N, code, scale, NULL);
        decode(c, code, scale, N, y);
        for (int k = 0; k < N; k++) {
            double most = c->err_block > 0 ? block_most(c, x, N, k) : 0;
            assert_true(fabs((double)x[k] - y[k]) <=
                        fmax(c->err_rel * fabs(x[k]), c->err_abs) + c->err_block * most);
        }
    }
}

static bool is_narrow(const lm_format *f)
{
    return f->plane[0].bits == 8 && f->element != LM_DTYPE_NONE && f->encode;
}

static void names(void **state)
{
    (void)state;
    const lm_format *c = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_format_find("fp8_e4m3", NULL, &c, &e), 0);
    assert_true(c == lm_format_of_dtype(LM_DTYPE_F8E4M3) && c->max == 448);
    assert_int_equal(lm_format_find("bfloat16", NULL, &c, &e), 0);
    assert_int_equal(lm_format_find("float16", NULL, &c, &e), 0);
    assert_true(c->element == LM_DTYPE_F16);
    assert_int_equal(lm_format_find("bf16", is_narrow, &c, &e), LM_EUSAGE);
    assert_string_equal(e.what, "no such number format; there are fp8_e4m3, fp8_e5m2");
    assert_null(lm_format_at(-1));
    assert_null(lm_format_at(1000));
}

/* Any number of planes and dimensions, short blocks, and shapes without a valid size. */
static void sizes(void **state)
{
    (void)state;
    const lm_format odd = { .name = "odd",
                            .n_planes = 3,
                            .plane = { { LM_PLANE_CODES, LM_DTYPE_NONE, 4, 1, 1 },
                                       { LM_PLANE_SCALE, LM_DTYPE_U8, 8, 1, 32 },
                                       { LM_PLANE_SCALE, LM_DTYPE_F32, 32, 128, 64 } } };
    const lm_format *q4_k = lm_format_of_gguf(12), *f32 = lm_format_of_gguf(0);
    const int64_t three[] = { 10, 13, 33 }, empty[] = { INT64_MAX, INT64_MAX, 0, 7 };
    const int64_t large[] = { INT64_MAX, INT64_MAX }, less[] = { 3, -1 }, ragged[] = { 4, 300 };
    lm_tensor_size s;
    lm_err e = { 0 };
    assert_int_equal(lm_tensor_bytes(&odd, 3, three, &s, &e), 0);
    assert_int_equal(s.plane[0], 130 * 17);
    assert_int_equal(s.plane[1], 130 * 2);
    assert_int_equal(s.plane[2], 2 * 1 * 4);
    assert_int_equal(s.all, 130 * 19 + 8);
    assert_int_equal(lm_tensor_bytes(f32, 0, NULL, &s, &e), 0);
    assert_int_equal(s.all, 4);
    assert_int_equal(lm_tensor_bytes(&odd, 4, empty, &s, &e), 0);
    assert_int_equal(s.all, 0);
    assert_int_equal(lm_tensor_bytes(q4_k, 2, (int64_t[]){ 5, 512 }, &s, &e), 0);
    assert_int_equal(s.all, 5 * 288);
    assert_int_equal(lm_tensor_bytes(f32, 2, large, &s, &e), LM_ELIMIT);
    assert_non_null(strstr(e.what, "9223372036854775807 x 9223372036854775807"));
    assert_true(s.all == SIZE_MAX);
    assert_int_equal(lm_tensor_bytes(f32, 2, less, &s, NULL), LM_ELIMIT);
    assert_true(lm_plain_bytes(LM_DTYPE_BF16, 77) == 154);
    assert_int_equal(lm_plane_bytes(&odd.plane[0], 1, 33), 17);
    assert_int_equal(lm_plane_bytes(&odd.plane[2], 129, 65), 2 * 2 * 4);
    assert_int_equal(lm_plane_bytes(&q4_k->plane[0], 3, 512), 3 * 288);
    assert_true(lm_plane_bytes(&f32->plane[0], INT64_MAX, INT64_MAX) == SIZE_MAX);
    assert_true(lm_plane_bytes(&f32->plane[0], 3, -1) == SIZE_MAX);
    assert_true(lm_plain_bytes(LM_DTYPE_F64, INT64_MAX) == SIZE_MAX);
    assert_true(lm_plain_bytes(LM_DTYPE_NONE, 77) == 0);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tensor_bytes(q4_k, 2, ragged, &s, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "multiple of 256"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format), cmocka_unit_test(every_entry),
        cmocka_unit_test(codes_repeat), cmocka_unit_test(largest_and_saturation),
        cmocka_unit_test(stochastic),   cmocka_unit_test(names),
        cmocka_unit_test(sizes),        cmocka_unit_test(dynamic_is_nearest),
        cmocka_unit_test(bounds),       cmocka_unit_test(normal_is_nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
