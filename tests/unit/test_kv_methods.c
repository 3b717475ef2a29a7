/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_methods.c -- methods of storing keys and values, against references that are written from the equations of
 * the papers and of their published code, on arrays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "kv/spec.h"
#include "numeric/format.h"
#include "numeric/kv_impl.h"

enum { MOST_T = 512, MOST_D = 128 };

static lm_kv_plan *bind_text(const char *text, int64_t head_dim)
{
    lm_kv_site site[1] = { { .layers = 1,
                             .kv_heads = 1,
                             .head_dim = head_dim,
                             .max_positions = 4096,
                             .act = LM_DTYPE_F32,
                             .rope = true } };
    lm_err e = { 0 };
    lm_kv_spec *s;
    lm_kv_plan *p;
    if (lm_kv_spec_parse(text, &s, &e) || lm_kv_spec_bind(s, site, 1, NULL, &p, &e))
        fail_msg("%s: %s: %s", text, e.where, e.what);
    lm_kv_spec_free(s);
    return p;
}

/* Normally distributed numbers, some channels of which are large, with an offset. */
static void draw_heads(uint64_t seed, int64_t T, int64_t D, float *x)
{
    lm_rng r = lm_rng_make(seed, "kv heads", 0);
    for (int64_t t = 0; t < T; t++)
        for (int64_t d = 0; d < D; d++)
            x[t * D + d] = (float)(lm_rng_normal(r, (uint64_t)(t * D + d)) * (d % 17 == 3 ? 8 : 1) +
                                   (d % 17 == 3 ? 5 : 0.1 * (double)(d % 5)));
}

/* A page of one head with T tokens, all of which are encoded. */
static lm_kv_view encode(const lm_kv_format *f, int64_t T, int64_t D, const float *x)
{
    lm_kv_view v = { .f = f, .T = T, .D = D };
    lm_err e = { 0 };
    assert_int_equal(lm_kv_page(f, T, D, &v.at, &e), LM_OK);
    assert_int_equal(lm_alloc_n(&v.data, v.at.all, 1, "page", &e), LM_OK);
    lm_kv_encode(f, T, D, 0, x, D, 0, T, NULL, v.data);
    return v;
}

static unsigned code_at(const lm_kv_view *v, int64_t t, int64_t d)
{
    return lm_kv_get_code(v, t, d);
}

/* ---- whole numbers, FP8, ggml's blocks ---- */

static double to_f16(double x)
{
    return (double)(float)(_Float16)(float)x;
}

static void whole_numbers(void **state)
{
    static const struct {
        const char *text;
        int bits, group;
        bool sym;
    } cases[] = {
        { "int8", 8, 0, true },
        { "int8:group=16,sym=off", 8, 16, false },
        { "int6", 6, 32, false },
        { "int5:sym=on", 5, 32, true },
        { "int4", 4, 32, false },
        { "int4:group=0,sym=on", 4, 0, true },
        { "int3", 3, 32, false },
        { "int2", 2, 32, false },
        { "int2:group=48", 2, 48, false },
    };
    static float x[64 * 80];
    (void)state;
    draw_heads(1, 64, 80, x);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_kv_plan *p = bind_text(cases[i].text, 80);
        lm_kv_view v = encode(p->side[LM_KV_V].format, 64, 80, x);
        int64_t group = cases[i].group ? cases[i].group : 80;
        double n = (1 << cases[i].bits) - 1, half = 1 << (cases[i].bits - 1);
        for (int64_t t = 0; t < 64; t++)
            for (int64_t g = 0; g < 80; g += group) {
                int64_t end = g + group < 80 ? g + group : 80;
                double lo = INFINITY, hi = -INFINITY, s;
                for (int64_t d = g; d < end; d++) {
                    lo = fmin(lo, (double)x[t * 80 + d]);
                    hi = fmax(hi, (double)x[t * 80 + d]);
                }
                s = to_f16(cases[i].sym ? fmax(-lo, hi) / (n / 2) : (hi - lo) / n);
                lo = to_f16(lo);
                for (int64_t d = g; d < end; d++) {
                    double y = (double)x[t * 80 + d];
                    double c = cases[i].sym ? fmin(fmax(rint(y / s), -half), half - 1) + half
                                            : fmin(fmax(rint((y - lo) / s), 0), n);
                    assert_int_equal(code_at(&v, t, d), (int)c);
                }
            }
        lm_free(v.data);
        lm_kv_plan_free(p);
    }
}

static void float8(void **state)
{
    static float x[64 * 32], y[64 * 32];
    (void)state;
    draw_heads(2, 64, 32, x);
    x[5] = 1000; /* beyond 448 */
    for (int k = 0; k < 4; k++) {
        static const char *const texts[] = { "fp8", "fp8_e5m2", "fp8:scale=token",
                                             "fp8_e5m2:scale=token" };
        lm_kv_plan *p = bind_text(texts[k], 32);
        lm_kv_view v = encode(p->side[LM_KV_K].format, 64, 32, x);
        double most = k % 2 ? 57344 : 448, least = k % 2 ? 0x1p-16 : 0x1p-9; /* subnormal step */
        int digits = k % 2 ? 2 : 3;
        lm_kv_decode(v.f, 64, 32, 0, v.data, 0, 64, y, 32);
        for (int64_t i = 0; i < 64 * 32; i++) {
            double a = 0, s = 1, step = least, z;
            for (int64_t d = 0; d < 32 && k >= 2; d++)
                a = fmax(a, fabs((double)x[i / 32 * 32 + d]));
            if (k >= 2)
                s = to_f16(a / most);
            z = fmin(fmax((double)x[i] / s, -most), most);
            if (fabs(z) > 0)
                step = fmax(step, ldexp(1, ilogb(z) - digits));
            assert_true(fabs((double)y[i] - rint(z / step) * step * s) <=
                        1e-6 * fabs((double)y[i]));
        }
        lm_free(v.data);
        lm_kv_plan_free(p);
    }
}

/* The numbers that ggml's formats of the same names give, to the bit. */
static void blocks_of_ggml(void **state)
{
    static const char *const names[] = { "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl" };
    static float x[64 * 96], y[64 * 96], want[64 * 96];
    static uint8_t block[64 * 96 * 4];
    (void)state;
    draw_heads(3, 64, 96, x);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const lm_format *f;
        lm_err e = { 0 };
        void *plane[1] = { block };
        const void *from[1] = { block };
        lm_kv_plan *p = bind_text(names[i], 96);
        lm_kv_view v = encode(p->side[LM_KV_V].format, 64, 96, x);
        assert_int_equal(lm_format_find(names[i], NULL, &f, &e), LM_OK);
        f->encode(f, x, 64, 96, 96, plane, NULL);
        f->decode(f, from, 64, 96, want, 96);
        lm_kv_decode(v.f, 64, 96, 0, v.data, 0, 64, y, 96);
        assert_memory_equal(y, want, sizeof y);
        assert_int_equal(p->side[LM_KV_V].rotate, strcmp(names[i], "q8_0") != 0);
        lm_free(v.data);
        lm_kv_plan_free(p);
    }
}

/* ---- KIVI ---- */

/* new_pack.py: mn, mx of a group; scale = (mx - mn) / (2^bits - 1); data = clamp((data - mn) / scale, 0,
 * 2^bits - 1), rounded; in the type of the tensors, F32 here.  *close: the nearest tie is too near. */
static unsigned kivi_code(const float *group, int64_t n, int64_t step, int64_t i, int bits,
                          bool *close)
{
    float lo = group[0], hi = group[0], top = (float)((1 << bits) - 1);
    for (int64_t k = 0; k < n; k++) {
        lo = fminf(lo, group[k * step]);
        hi = fmaxf(hi, group[k * step]);
    }
    float y = (group[i * step] - lo) / ((hi - lo) / top);
    *close = fabsf(y - floorf(y) - 0.5F) < 1e-4F;
    return (unsigned)rintf(fminf(fmaxf(y, 0), top));
}

/* Codes equal those of the published code; with F32 scales, as its tensors have. */
static void kivi_codes(void **state)
{
    static const struct {
        const char *text;
        int bits, group;
    } cases[] = { { "kivi", 2, 32 },
                  { "kivi:bits=4,group=128,residual=128", 4, 128 },
                  { "kivi:bits=2,group=64,residual=64", 2, 64 },
                  { "kivi:bits=1,group=16", 1, 16 },
                  { "kivi:bits=8", 8, 32 } };
    static float x[256 * 128];
    int64_t checked = 0;
    (void)state;
    draw_heads(4, 256, 128, x);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_kv_plan *p = bind_text(cases[i].text, 128);
        lm_kv_format f[2] = { *p->side[LM_KV_K].format, *p->side[LM_KV_V].format };
        int64_t T = p->page, G = cases[i].group;
        assert_int_equal(p->page, G == 128 ? 128 : 64);
        assert_false(p->side[LM_KV_K].rotate || p->side[LM_KV_V].rotate);
        f[0].scale = f[1].scale = LM_DTYPE_F32;
        lm_kv_view k = encode(&f[LM_KV_K], T, 128, x), v = encode(&f[LM_KV_V], T, 128, x);
        for (int64_t t = 0; t < T; t++)
            for (int64_t d = 0; d < 128; d++) {
                bool close;
                unsigned c =
                    kivi_code(x + t / G * G * 128 + d, G, 128, t % G, cases[i].bits, &close);
                checked += !close;
                if (!close)
                    assert_int_equal(code_at(&k, t, d), c);
                c = kivi_code(x + t * 128 + d / G * G, G, 1, d % G, cases[i].bits, &close);
                if (!close)
                    assert_int_equal(code_at(&v, t, d), c);
            }
        lm_free(k.data);
        lm_free(v.data);
        lm_kv_plan_free(p);
    }
    assert_true(checked > 48000); /* of 49,152 keys */
}

/* llama_kivi.py: lengths of the coded and the plain part after a prompt, and after each token. */
static void kivi_residual(void **state)
{
    static const int64_t R[] = { 32, 64, 128 };
    (void)state;
    for (int r = 0; r < 3; r++) {
        char text[64];
        snprintf(text, sizeof text, "kivi:residual=%d", (int)R[r]);
        lm_kv_plan *p = bind_text(text, 64);
        for (int64_t n = 1; n < 300; n++) {
            int64_t key_coded, key_plain, value_coded, value_plain;
            if (n % R[r]) {
                key_coded = n < R[r] ? 0 : n - n % R[r];
                key_plain = n < R[r] ? n : n % R[r];
            } else {
                key_coded = n;
                key_plain = 0;
            }
            value_coded = n <= R[r] ? 0 : n - R[r];
            value_plain = n <= R[r] ? n : R[r];
            for (int64_t now = n; now < n + 140; now++) {
                assert_int_equal(key_coded + key_plain, now);
                assert_int_equal(lm_kv_side_coded(&p->side[LM_KV_K], now), key_coded);
                assert_int_equal(lm_kv_side_coded(&p->side[LM_KV_V], now), value_coded);
                if (++key_plain == R[r]) {
                    key_coded += R[r];
                    key_plain = 0;
                }
                if (++value_plain > R[r]) {
                    value_coded++;
                    value_plain--;
                }
            }
        }
        lm_kv_plan_free(p);
    }
}

/* ---- TurboQuant ---- */

/* Levels for N(0,1), the positive half, as published with four digits. */
static const double levels_2[] = { .4528, 1.5104 }, levels_3[] = { .2451, .7560, 1.3440, 2.1520 },
                    levels_4[] = { .1284, .3881, .6568, .9424, 1.2562, 1.6180, 2.0690, 2.7326 };
static const double *const levels[] = { levels_2, levels_3, levels_4 };

static void codebook_keys(void **state)
{
    static float x[64 * 128], y[64 * 128];
    (void)state;
    draw_heads(5, 64, 128, x);
    for (int bits = 2; bits <= 4; bits++)
        for (int correct = 0; correct < 2; correct++) {
            char text[80];
            snprintf(text, sizeof text, "turboquant:kbits=%d,correct=%s", bits,
                     correct ? "on" : "off");
            lm_kv_plan *p = bind_text(text, 128);
            const lm_kv_format *f = p->side[LM_KV_K].format;
            int half = 1 << (bits - 1), close = 0;
            double at[16];
            for (int i = 0; i < half; i++) {
                at[half + i] = levels[bits - 2][i];
                at[half - 1 - i] = -at[half + i];
            }
            for (int i = 0; i < 2 * half; i++)
                assert_true(fabs((double)f->table[i] - at[i]) < 1e-4);
            lm_kv_view v = encode(f, 64, 128, x);
            lm_kv_decode(f, 64, 128, 0, v.data, 0, 64, y, 128);
            for (int64_t t = 0; t < 64; t++) {
                double norm = 0, norm_of_levels = 0;
                for (int64_t d = 0; d < 128; d++)
                    norm += (double)x[t * 128 + d] * (double)x[t * 128 + d];
                norm = sqrt(norm);
                for (int64_t d = 0; d < 128; d++) {
                    /* u of norm 1; levels of N(0, 1 / 128) */
                    double u = (double)x[t * 128 + d] / norm, best = INFINITY, second = INFINITY;
                    int c = 0;
                    for (int i = 0; i < 2 * half; i++) {
                        double gap = fabs(u - at[i] / sqrt(128));
                        if (gap < best) {
                            second = best;
                            best = gap;
                            c = i;
                        } else {
                            second = fmin(second, gap);
                        }
                    }
                    c = second - best < 3e-4 ? (int)code_at(&v, t, d) : c;
                    close += second - best < 3e-4;
                    assert_int_equal(code_at(&v, t, d), c);
                    norm_of_levels += at[c] * at[c] / 128;
                }
                norm = to_f16(norm);
                if (correct)
                    norm = to_f16(norm / sqrt(norm_of_levels));
                for (int64_t d = 0; d < 128; d++) {
                    double want = norm * at[code_at(&v, t, d)] / sqrt(128);
                    assert_true(fabs((double)y[t * 128 + d] - want) < 2e-3 * fabs(want));
                }
            }
            assert_true(close < 600);
            lm_free(v.data);
            lm_kv_plan_free(p);
        }
}

/* Bytes of keys and values of a token, heads of 128 numbers; vLLM's slots add 2 to all but the first. */
static void codebook_presets(void **state)
{
    static const struct {
        const char *name;
        double bytes;
        bool rotate_keys, rotate_values;
    } cases[] = {
        { "turboquant_k8v4", 196, false, false },
        { "turboquant_4bit_nc", 134, true, false },
        { "turboquant_k3v4_nc", 118, true, false },
        { "turboquant_3bit_nc", 102, true, false },
        { "k8v4", 196, false, true },
        { "k4v4", 134, true, true },
        { "k4v3", 118, true, true },
        { "k3v4", 118, true, true },
        { "k3v3", 102, true, true },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_kv_plan *p = bind_text(cases[i].name, 128);
        double bytes = 0;
        for (int k = 0; k < 2; k++)
            bytes += (double)lm_kv_page_bytes(p->side[k].format, p->page, 128) / (double)p->page;
        assert_true(bytes == cases[i].bytes);
        assert_int_equal(p->side[LM_KV_K].rotate, cases[i].rotate_keys);
        assert_int_equal(p->side[LM_KV_V].rotate, cases[i].rotate_values);
        lm_kv_plan_free(p);
    }
}

/* ---- KVarN ---- */

typedef struct {
    int64_t rows, cols;
    double x[MOST_D * MOST_D], row[MOST_D], col[MOST_D]; /* logarithms of the scales */
} tile;

/* The sample standard deviation along a column (dim 0) or a row (dim 1) of X / e^col / e^row. */
static double deviation(const tile *m, int64_t i, int dim)
{
    int64_t n = dim == 0 ? m->rows : m->cols;
    double v[MOST_D], mean = 0, sum = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t r = dim == 0 ? k : i, c = dim == 0 ? i : k;
        v[k] = m->x[r * m->cols + c] / exp(m->col[c]) / exp(m->row[r]);
        mean += v[k] / (double)n;
    }
    for (int64_t k = 0; k < n; k++)
        sum += (v[k] - mean) * (v[k] - mean);
    return sqrt(sum / (double)(n - 1));
}

static double imbalance(const tile *m)
{
    double sum = 0;
    for (int dim = 0; dim < 2; dim++) {
        double least = INFINITY, most = 0;
        for (int64_t i = 0; i < (dim == 0 ? m->cols : m->rows); i++) {
            double s = deviation(m, i, dim);
            least = fmin(least, s);
            most = fmax(most, s);
        }
        sum += most / fmax(least, 1e-8);
    }
    return sum;
}

/* 8 rounds: log col += log clamp(std, 1e-3, 1e3), clipped to [-0.3, 10]; then the rows; the best is kept. */
static void balance(tile *m)
{
    static tile best;
    for (int64_t i = 0; i < MOST_D; i++)
        m->row[i] = m->col[i] = 0;
    best = *m;
    double least = imbalance(m);
    for (int round = 0; round < 8; round++) {
        for (int dim = 0; dim < 2; dim++) {
            double more[MOST_D], *log_scale = dim == 0 ? m->col : m->row;
            int64_t n = dim == 0 ? m->cols : m->rows;
            for (int64_t i = 0; i < n; i++)
                more[i] = log(fmin(fmax(deviation(m, i, dim), 1e-3), 1e3));
            for (int64_t i = 0; i < n; i++)
                log_scale[i] = fmin(fmax(log_scale[i] + more[i], -0.3), 10);
        }
        double now = imbalance(m);
        if (now <= least) {
            least = now;
            best = *m;
        }
    }
    *m = best;
}

/* The decoded tile, and the codes: per row lo, hi, s = max((hi - lo) / n, 1e-10), q = RNE((B - lo) / s);
 * (q S + Z) C with S = e^row s, Z = e^row lo and C = e^col in F16.  near[]: distance of a code from a tie. */
static void decode_tile(const tile *m, int bits, double *y, double *near)
{
    double top = (1 << bits) - 1;
    for (int64_t r = 0; r < m->rows; r++) {
        double lo = INFINITY, hi = -INFINITY;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t c = 0; c < m->cols; c++) {
                double b = m->x[r * m->cols + c] / exp(m->col[c]) / exp(m->row[r]);
                if (pass == 0) {
                    lo = fmin(lo, b);
                    hi = fmax(hi, b);
                    continue;
                }
                double s = fmax((hi - lo) / top, 1e-10), q = (b - lo) / s;
                near[r * m->cols + c] = fabs(q - floor(q) - 0.5);
                q = fmin(fmax(rint(q), 0), top);
                y[r * m->cols + c] =
                    (q * to_f16(exp(m->row[r]) * s) + to_f16(exp(m->row[r]) * lo)) *
                    to_f16(exp(m->col[c]));
            }
    }
}

/* Keys: the rows of a tile are channels; values: tokens. */
static void kvarn_tiles(void **state)
{
    static const struct {
        const char *text;
        int64_t group, dim;
        int bits[2];
    } cases[] = {
        { "k4v2", 128, 128, { 4, 2 } },
        { "kvarn_k4v4_g64", 64, 64, { 4, 4 } },
        { "kvarn:kbits=3,vbits=5,group=32,sinks=0", 32, 80, { 3, 5 } },
        { "kvarn_k4v2_g64", 64, 20, { 4, 2 } },
    };
    static float x[MOST_D * MOST_D], have[MOST_D * MOST_D];
    static double y[MOST_D * MOST_D], near[MOST_D * MOST_D];
    static tile m;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t G = cases[i].group, D = cases[i].dim;
        lm_kv_plan *p = bind_text(cases[i].text, D);
        assert_int_equal(p->page, G < 64 ? 64 : G);
        for (int trial = 0; trial < 8; trial++)
            for (int k = 0; k < 2; k++) {
                const lm_kv_format *f = p->side[k].format;
                assert_true(p->side[k].rotate);
                assert_int_equal(p->side[k].residual, G);
                draw_heads(100 + (uint64_t)trial, G, D, x);
                for (int64_t d = 0; d < D && trial == 7; d++) /* equal tokens: deviations of 0 */
                    memcpy(x + 3 * D, x + 4 * D, (size_t)D * sizeof *x);
                m.rows = k == LM_KV_K ? D : G;
                m.cols = k == LM_KV_K ? G : D;
                for (int64_t t = 0; t < G; t++)
                    for (int64_t d = 0; d < D; d++)
                        m.x[k == LM_KV_K ? d * G + t : t * D + d] = (double)x[t * D + d];
                balance(&m);
                decode_tile(&m, cases[i].bits[k], y, near);
                lm_kv_view v = { .f = f, .T = p->page, .D = D };
                lm_err e = { 0 };
                assert_int_equal(lm_kv_page(f, p->page, D, &v.at, &e), LM_OK);
                assert_int_equal(lm_alloc_n(&v.data, v.at.all, 1, "page", &e), LM_OK);
                lm_kv_encode(f, p->page, D, 0, x, D, 0, G, NULL, v.data);
                lm_kv_decode(f, p->page, D, 0, v.data, 0, G, have, D);
                int64_t near_ties = 0;
                for (int64_t t = 0; t < G; t++)
                    for (int64_t d = 0; d < D; d++) {
                        int64_t at = k == LM_KV_K ? d * G + t : t * D + d;
                        if (near[at] < 1e-9)
                            near_ties++;
                        else if (fabs((double)have[t * D + d] - y[at]) > 1e-6 * (1 + fabs(y[at])))
                            fail_msg("%s, trial %d, side %d, token %d, channel %d: %g, not %g",
                                     cases[i].text, trial, k, (int)t, (int)d,
                                     (double)have[t * D + d], y[at]);
                    }
                assert_true(near_ties < 5);
                lm_free(v.data);
            }
        lm_kv_plan_free(p);
    }
}

/* 13,824 bytes of a tile of 128 tokens, keys and values: three quarters of q4_0's. */
static void kvarn_bytes(void **state)
{
    lm_kv_plan *p = bind_text("k4v2", 128), *q = bind_text("q4_0", 128);
    double bytes[2] = { 0 };
    (void)state;
    for (int k = 0; k < 2; k++) {
        bytes[0] += (double)lm_kv_page_bytes(p->side[k].format, p->page, 128) / (double)p->page;
        bytes[1] += (double)lm_kv_page_bytes(q->side[k].format, q->page, 128) / (double)q->page;
    }
    assert_true(bytes[0] == 13824.0 / 128);
    assert_true(bytes[0] == 0.75 * bytes[1]);
    assert_int_equal(p->side[LM_KV_K].sinks, 128);
    /* Nothing is coded before the second tile is whole. */
    assert_int_equal(lm_kv_side_coded(&p->side[LM_KV_V], 255), 128);
    assert_int_equal(lm_kv_side_coded(&p->side[LM_KV_V], 256), 256);
    lm_kv_plan_free(p);
    lm_kv_plan_free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_numbers),    cmocka_unit_test(float8),
        cmocka_unit_test(blocks_of_ggml),   cmocka_unit_test(kivi_codes),
        cmocka_unit_test(kivi_residual),    cmocka_unit_test(codebook_keys),
        cmocka_unit_test(codebook_presets), cmocka_unit_test(kvarn_tiles),
        cmocka_unit_test(kvarn_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
