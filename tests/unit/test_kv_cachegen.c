/* SPDX-License-Identifier: Apache-2.0 */
/* Caches coded for streaming: the quantiser against its definition in double, bounds, levels, any
 * shape, the same bytes for any threads and processor, damaged tables and chunks. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kv/cachegen.h"

enum { MOST_PARTS = 4, GROUP = LM_CACHEGEN_GROUP, CHUNK = LM_CACHEGEN_CHUNK };

typedef struct {
    lm_cachegen_part part[MOST_PARTS];
    int64_t parts;
    lm_cachegen_rows rows, back;
    void *data[MOST_PARTS], *out[MOST_PARTS];
} cache;

static size_t part_count(const cache *c, int64_t p)
{
    return (size_t)(c->part[p].heads * c->part[p].width * c->rows.tokens);
}

/* Channels with a mean and a spread of their own, neighbouring tokens alike. */
static void make(cache *c, lm_dtype dtype, int64_t heads, int64_t width, int64_t tokens, int level)
{
    lm_rng g = lm_rng_make((uint64_t)(heads * 1000 + width), "cache", 0);
    uint64_t at = 0;
    memset(c, 0, sizeof *c);
    c->parts = 2;
    for (int p = 0; p < 2; p++) {
        c->part[p] = (lm_cachegen_part){ heads + p, width, lm_cachegen_bins(level, p, 0, 2) };
        size_t n = (size_t)((heads + p) * width * tokens);
        c->data[p] = malloc(n * lm_dtype_size(dtype) + 1);
        c->out[p] = malloc(n * lm_dtype_size(dtype) + 1);
        for (int64_t ch = 0; ch < (heads + p) * width; ch++) {
            double mean = 3 * lm_rng_normal(g, at++), spread = exp(lm_rng_normal(g, at++)), x = 0;
            for (int64_t t = 0; t < tokens; t++) {
                x = 0.8 * x + 0.6 * lm_rng_normal(g, at++);
                lm_set(dtype, c->data[p], (ch / width * tokens + t) * width + ch % width,
                       mean + spread * x);
            }
        }
    }
    c->rows = (lm_cachegen_rows){ dtype, tokens, c->data };
    c->back = (lm_cachegen_rows){ dtype, tokens, c->out };
}

static void drop(cache *c)
{
    for (int p = 0; p < MOST_PARTS; p++)
        free(c->data[p]), free(c->out[p]);
}

static lm_cachegen *learn(const cache *c, lm_par *par)
{
    lm_cachegen *g = NULL;
    lm_err e = { 0 };
    if (lm_cachegen_learn(c->part, c->parts, &c->rows, par, &g, &e))
        fail_msg("%s: %s", e.where, e.what);
    return g;
}

/* A chunk, coded and decoded; the caller frees it. */
static lm_buf round_trip(const cache *c, const lm_cachegen *g, int64_t chunk, lm_cpu_level cpu,
                         lm_par *par)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    if (lm_cachegen_encode(g, &c->rows, chunk, cpu, par, &b, &e) ||
        lm_cachegen_decode(g, b.data, b.len, &c->back, chunk, cpu, par, &e))
        fail_msg("%s: %s", e.where, e.what);
    return b;
}

static uint32_t get32(const char *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* ---- The definition ---- */

static double value(const cache *c, void *const *data, int64_t p, int64_t t, int64_t channel)
{
    int64_t width = c->part[p].width;
    return lm_get(c->rows.dtype, data[p],
                  (channel / width * c->rows.tokens + t) * width + channel % width);
}

/* The least BF16 number >= x. */
static double bf16_above(double x)
{
    int exponent;
    if (x < 0x1p-100)
        return 0;
    frexp(x, &exponent);
    return ldexp(ceil(ldexp(x, 8 - exponent)), exponent - 8);
}

/* Check token t of a part in F32: its stored scale, that decoded numbers are levels, and the nearest
 * ones.  `anchor` are its decoded numbers. */
static void check_token(const cache *c, int64_t p, int64_t t, double scale, double *anchor)
{
    bool first = t % CHUNK % GROUP == 0;
    int half = first ? 127 : c->part[p].bins / 2 - 1;
    double most = 0, step = scale / half;
    for (int64_t ch = 0; ch < c->part[p].heads * c->part[p].width; ch++) {
        double d = value(c, c->data, p, t, ch) - (first ? 0 : anchor[ch]);
        most = fmax(most, fabs(d));
    }
    /* differences are rounded to F32 */
    assert_true(scale >= bf16_above(most * (1 - 1e-6)) && scale <= bf16_above(most * (1 + 1e-6)));
    for (int64_t ch = 0; ch < c->part[p].heads * c->part[p].width; ch++) {
        double x = value(c, c->data, p, t, ch), y = value(c, c->out, p, t, ch);
        double base = first ? 0 : anchor[ch], q = scale > 0 ? rint((y - base) / step) : 0;
        double slack = 0x1p-22 * (fabs(y) + fabs(base)) + 1e-6 * scale;
        double bound = scale > 0 ? step / 2 + slack : 0x1p-100;
        assert_true(fabs(q) <= half);
        if (fabs(base + q * step - y) > slack || fabs(x - y) > bound)
            fail_msg("part %d token %d channel %d: %.9g from %.9g", (int)p, (int)t, (int)ch, y, x);
        if (first)
            anchor[ch] = y;
    }
}

static void check_cache(const cache *c, const lm_cachegen *g)
{
    for (int64_t k = 0; k < lm_cachegen_chunks(c->rows.tokens); k++) {
        lm_buf b = round_trip(c, g, k, lm_cpu_detect(), NULL);
        const char *stream = b.data + 4 + 4 * c->parts;
        for (int64_t p = 0; p < c->parts; p++) {
            double *anchor = calloc((size_t)(c->part[p].heads * c->part[p].width), sizeof *anchor);
            for (int64_t t = 0; t < lm_cachegen_chunk_tokens(c->rows.tokens, k); t++) {
                double scale = lm_get(LM_DTYPE_BF16, stream, t);
                check_token(c, p, k * CHUNK + t, scale, anchor);
            }
            stream += get32(b.data + 4 + 4 * p);
            free(anchor);
        }
        assert_ptr_equal(stream, b.data + b.len);
        lm_buf_fini(&b);
    }
}

/* The same numbers in F32. */
static cache twin_of(const cache *c)
{
    cache t = *c;
    for (int64_t p = 0; p < c->parts; p++) {
        t.data[p] = malloc(4 * part_count(c, p) + 1), t.out[p] = malloc(4 * part_count(c, p) + 1);
        lm_convert(c->rows.dtype, c->data[p], LM_DTYPE_F32, t.data[p], (int64_t)part_count(c, p));
    }
    return t;
}

/* Other types have the codes of the same numbers in F32, and their decoded numbers, rounded. */
static void check_type(cache *c, const lm_cachegen *g)
{
    cache t = twin_of(c);
    t.rows.dtype = t.back.dtype = LM_DTYPE_F32;
    t.rows.data = t.data, t.back.data = t.out;
    check_cache(&t, g);
    for (int64_t k = 0; k < lm_cachegen_chunks(c->rows.tokens); k++) {
        lm_buf a = round_trip(c, g, k, lm_cpu_detect(), NULL);
        lm_buf b = round_trip(&t, g, k, lm_cpu_detect(), NULL);
        assert_int_equal(a.len, b.len);
        assert_memory_equal(a.data, b.data, a.len);
        lm_buf_fini(&a), lm_buf_fini(&b);
    }
    for (int64_t p = 0; p < c->parts; p++) {
        size_t n = part_count(c, p), size = lm_dtype_size(c->rows.dtype);
        lm_convert(LM_DTYPE_F32, t.out[p], c->rows.dtype, t.data[p], (int64_t)n);
        assert_memory_equal(t.data[p], c->out[p], n * size);
        free(t.data[p]), free(t.out[p]);
    }
}

static void test_definition(void **state)
{
    static const int64_t tokens[] = { 1, 2, 9, 10, 11, 255, 256, 257, 521 };
    static const int64_t shape[][2] = { { 1, 1 }, { 1, 7 }, { 3, 20 }, { 2, 64 } };
    static const lm_dtype dtype[] = { LM_DTYPE_F32, LM_DTYPE_F16, LM_DTYPE_BF16 };
    (void)state;
    for (size_t i = 0; i < 9 * 4 * 3; i++) {
        cache c;
        make(&c, dtype[i % 3], shape[i / 3 % 4][0], shape[i / 3 % 4][1], tokens[i / 12],
             (int)(i % 4));
        lm_cachegen *g = learn(&c, NULL);
        check_type(&c, g);
        lm_cachegen_free(g), drop(&c);
    }
}

/* Coarser levels take fewer bytes and have larger errors. */
static void test_levels(void **state)
{
    double bytes[4], error[4];
    (void)state;
    for (int level = 0; level < LM_CACHEGEN_LEVELS; level++) {
        cache c;
        make(&c, LM_DTYPE_BF16, 2, 64, 700, level);
        lm_cachegen *g = learn(&c, NULL);
        bytes[level] = error[level] = 0;
        for (int64_t k = 0; k < 3; k++) {
            lm_buf b = round_trip(&c, g, k, lm_cpu_detect(), NULL);
            bytes[level] += (double)b.len;
            lm_buf_fini(&b);
        }
        for (int64_t p = 0; p < 2; p++)
            for (size_t i = 0; i < part_count(&c, p); i++)
                error[level] += pow(lm_get(LM_DTYPE_BF16, c.data[p], (int64_t)i) -
                                        lm_get(LM_DTYPE_BF16, c.out[p], (int64_t)i),
                                    2);
        if (level) {
            assert_true(bytes[level] < 0.85 * bytes[level - 1]);
            assert_true(error[level] > 2 * error[level - 1]);
        }
        lm_cachegen_free(g), drop(&c);
    }
    assert_true(bytes[0] < 0.4 * 2 * 700 * 64 * 5); /* of BF16 */
}

static void test_bins(void **state)
{
    (void)state;
    assert_int_equal(lm_cachegen_bins(0, false, 0, 32), 64);
    assert_int_equal(lm_cachegen_bins(1, false, 10, 32), 32);
    assert_int_equal(lm_cachegen_bins(1, false, 21, 32), 32);
    assert_int_equal(lm_cachegen_bins(1, false, 22, 32), 16);
    assert_int_equal(lm_cachegen_bins(3, false, 31, 32), 4);
    assert_int_equal(lm_cachegen_bins(1, true, 1, 32), 32);
    assert_int_equal(lm_cachegen_bins(1, true, 2, 32), 16);
    assert_int_equal(lm_cachegen_bins(2, true, 0, 1), 16);
    assert_int_equal(lm_cachegen_bins(3, false, 0, 1), 8);
    for (int level = 1; level < LM_CACHEGEN_LEVELS; level++)
        for (int64_t layer = 0; layer < 12; layer++)
            for (int v = 0; v < 2; v++)
                assert_true(lm_cachegen_bins(level, v, layer, 12) <
                            lm_cachegen_bins(level - 1, v, layer, 12));
}

/* Channels without change cost hardly anything: distributions are those of channels. */
static void test_channels(void **state)
{
    double bytes[2];
    (void)state;
    for (int quiet = 0; quiet < 2; quiet++) {
        cache c;
        make(&c, LM_DTYPE_F32, 1, 64, 512, 0);
        for (int64_t i = 0; i < 512 * 64; i++)
            lm_set(LM_DTYPE_F32, c.data[0], i,
                   quiet && i % 2 ? 0 : lm_rng_normal(lm_rng_make(1, "channels", 0), (uint64_t)i));
        c.parts = 1;
        lm_cachegen *g = learn(&c, NULL);
        lm_buf b = round_trip(&c, g, 1, lm_cpu_detect(), NULL);
        bytes[quiet] = (double)b.len;
        lm_buf_fini(&b), lm_cachegen_free(g), drop(&c);
    }
    assert_true(bytes[1] < 0.56 * bytes[0]);
}

static void test_same_bytes(void **state)
{
    cache c;
    lm_par *par;
    lm_err e = { 0 };
    lm_buf first = { 0 }, other = { 0 }, tables = { 0 }, again = { 0 };
    lm_cachegen *g, *h, *read;
    (void)state;
    make(&c, LM_DTYPE_F16, 3, 20, 300, 1);
    assert_int_equal(lm_par_new(&par, 3, &e), 0);
    g = learn(&c, NULL), h = learn(&c, par);
    assert_int_equal(lm_cachegen_write(g, &tables, &e), 0);
    assert_int_equal(lm_cachegen_write(h, &again, &e), 0);
    assert_int_equal(tables.len, again.len);
    assert_memory_equal(tables.data, again.data, tables.len);
    assert_int_equal(lm_cachegen_read(c.part, c.parts, tables.data, tables.len, &read, &e), 0);
    again.len = 0;
    assert_int_equal(lm_cachegen_write(read, &again, &e), 0);
    assert_int_equal(tables.len, again.len);
    assert_memory_equal(tables.data, again.data, tables.len);
    first = round_trip(&c, g, 1, LM_CPU_REF, NULL);
    for (lm_cpu_level l = LM_CPU_REF; l <= lm_cpu_detect(); l++) {
        other = round_trip(&c, read, 1, l, l % 2 ? par : NULL);
        assert_int_equal(other.len, first.len);
        assert_memory_equal(other.data, first.data, first.len);
        lm_buf_fini(&other);
    }
    lm_buf_fini(&first), lm_buf_fini(&tables), lm_buf_fini(&again);
    lm_cachegen_free(g), lm_cachegen_free(h), lm_cachegen_free(read);
    lm_par_free(par), drop(&c);
}

/* Zeros, tiny numbers, the largest of a type; a chunk leaves the others alone. */
static void test_extremes(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        cache c;
        lm_dtype dtype = i < 3 ? LM_DTYPE_F16 : i < 5 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        double big = i == 0 ? 65504 : i == 3 ? lm_bf16_to_f32(0x7f7f) : i == 5 ? 3.38e38 : 0;
        make(&c, dtype, 1, 9, 300, 3);
        for (int64_t n = 0; n < 300 * 9; n++)
            lm_set(dtype, c.data[0], n,
                   i == 1   ? 0
                   : i == 4 ? 1e-33
                   : i == 2 ? 6e-8
                   : n % 9  ? n % 5
                            : big);
        memset(c.out[0], 0x11, 300 * 9 * lm_dtype_size(dtype));
        c.parts = 1;
        lm_cachegen *g = learn(&c, NULL);
        lm_buf b = round_trip(&c, g, 1, lm_cpu_detect(), NULL);
        assert_int_equal(((uint8_t *)c.out[0])[256 * 9 * lm_dtype_size(dtype) - 1], 0x11);
        lm_buf_fini(&b);
        if (big == 0)
            check_type(&c, g);
        for (int64_t n = 0; n < 300 * 9; n++)
            assert_true(isfinite(lm_get(dtype, c.out[0], n)));
        lm_cachegen_free(g), drop(&c);
    }
}

/* Tables and chunks of differences that leave the type's range: numbers stay finite. */
static void test_clamp(void **state)
{
    cache c;
    (void)state;
    make(&c, LM_DTYPE_F16, 1, 4, 20, 3);
    c.parts = 1;
    for (int64_t n = 0; n < 20 * 4; n++)
        lm_set(LM_DTYPE_F16, c.data[0], n, n % 4 ? 65504 : n < 4 ? -65504 : 65504);
    for (int64_t n = 4; n < 8; n++)
        lm_set(LM_DTYPE_F16, c.data[0], n, 65504 - 11000);
    lm_cachegen *g = learn(&c, NULL);
    lm_buf b = round_trip(&c, g, 0, lm_cpu_detect(), NULL);
    for (int64_t n = 0; n < 20 * 4; n++)
        assert_true(fabs(lm_get(LM_DTYPE_F16, c.out[0], n)) <= 65504);
    lm_buf_fini(&b), lm_cachegen_free(g), drop(&c);
}

static void refused(lm_code want, lm_code got, const lm_err *e, const char *what)
{
    assert_int_equal(got, want);
    if (!strstr(e->what, what))
        fail_msg("'%s' lacks '%s'", e->what, what);
}

static void test_bad_rows(void **state)
{
    static const double bad[] = { NAN, INFINITY, -INFINITY, FLT_MAX };
    (void)state;
    for (int i = 0; i < 4; i++) {
        cache c;
        lm_cachegen *g = NULL, *good;
        lm_err e = { 0 };
        lm_buf b = { 0 };
        make(&c, LM_DTYPE_F32, 2, 8, 30, 0);
        good = learn(&c, NULL);
        lm_set(LM_DTYPE_F32, c.data[1], 17 * 8 + 3, bad[i]);
        refused(LM_ENUMERIC, lm_cachegen_learn(c.part, 2, &c.rows, NULL, &g, &e), &e, "token 17");
        assert_string_equal(e.where, "part 1");
        assert_null(g);
        e = (lm_err){ 0 };
        refused(LM_ENUMERIC, lm_cachegen_encode(good, &c.rows, 0, LM_CPU_REF, NULL, &b, &e), &e,
                "17");
        assert_int_equal(b.len, 0);
        lm_set(LM_DTYPE_F32, c.data[1], 17 * 8 + 3, 1e30); /* the others now have codes 0 */
        e = (lm_err){ 0 };
        lm_cachegen_encode(good, &c.rows, 0, lm_cpu_detect(), NULL, &b, &e);
        if (e.code)
            assert_int_equal(e.code, LM_EUSAGE);
        lm_buf_fini(&b), lm_cachegen_free(good), drop(&c);
    }
}

static void test_bad_requests(void **state)
{
    cache c;
    lm_cachegen *g = NULL;
    lm_err e = { 0 };
    (void)state;
    make(&c, LM_DTYPE_F32, 1, 4, 3, 0);
    c.part[1].bins = 66;
    refused(LM_EUSAGE, lm_cachegen_learn(c.part, 2, &c.rows, NULL, &g, &e), &e, "66 bins");
    c.part[1].bins = 15, e = (lm_err){ 0 };
    refused(LM_EUSAGE, lm_cachegen_learn(c.part, 2, &c.rows, NULL, &g, &e), &e, "15 bins");
    c.part[1].bins = 16, c.part[1].heads = 1 << 15, e = (lm_err){ 0 };
    refused(LM_EUSAGE, lm_cachegen_learn(c.part, 2, &c.rows, NULL, &g, &e), &e, "32768 heads of 4");
    e = (lm_err){ 0 };
    refused(LM_EUSAGE, lm_cachegen_learn(c.part, 0, &c.rows, NULL, &g, &e), &e, "0 parts");
    c.rows.dtype = LM_DTYPE_I8, e = (lm_err){ 0 };
    refused(LM_EUSAGE, lm_cachegen_learn(c.part, 1, &c.rows, NULL, &g, &e), &e, "i8");
    assert_null(g);
    drop(&c);
}

/* ---- Damage ---- */

/* Tables with a flipped bit or cut: refused, or tables that decode without harm. */
static void test_damaged_tables(void **state)
{
    cache c;
    lm_err e = { 0 };
    lm_buf t = { 0 };
    int taken = 0;
    (void)state;
    make(&c, LM_DTYPE_BF16, 1, 12, 40, 1);
    lm_cachegen *g = learn(&c, NULL), *h;
    lm_buf b = round_trip(&c, g, 0, lm_cpu_detect(), NULL);
    assert_int_equal(lm_cachegen_write(g, &t, &e), 0);
    for (size_t i = 0; i < 8 * t.len + t.len; i++) {
        bool cut = i >= 8 * t.len;
        size_t len = cut ? i - 8 * t.len : t.len;
        char *copy = malloc(len + 1); /* ASan sees accesses beyond it */
        memcpy(copy, t.data, len);
        if (!cut)
            copy[i / 8] ^= (char)(1 << i % 8);
        e = (lm_err){ 0 };
        lm_code rc = lm_cachegen_read(c.part, c.parts, copy, len, &h, &e);
        if (rc) {
            assert_int_equal(rc, LM_EFORMAT);
            assert_null(h);
        } else {
            assert_false(cut);
            lm_cachegen_decode(h, b.data, b.len, &c.back, 0, lm_cpu_detect(), NULL, &e);
            lm_cachegen_free(h);
            taken++;
        }
        free(copy);
    }
    assert_true(taken < (int)t.len); /* means and classes of channels */
    e = (lm_err){ 0 };
    refused(LM_EFORMAT, lm_cachegen_read(c.part, 1, t.data, t.len, &h, &e), &e, "1 parts");
    c.part[0].width = 13, e = (lm_err){ 0 };
    refused(LM_EFORMAT, lm_cachegen_read(c.part, 2, t.data, t.len, &h, &e), &e, "12 channels");
    lm_buf_fini(&t), lm_buf_fini(&b), lm_cachegen_free(g);
    drop(&c);
}

static void test_damaged_chunks(void **state)
{
    cache c;
    lm_err e = { 0 };
    int taken = 0;
    (void)state;
    make(&c, LM_DTYPE_BF16, 1, 12, 40, 1);
    lm_cachegen *g = learn(&c, NULL);
    lm_buf b = round_trip(&c, g, 0, lm_cpu_detect(), NULL);
    for (size_t i = 0; i < 8 * b.len + b.len; i++) {
        bool cut = i >= 8 * b.len;
        size_t len = cut ? i - 8 * b.len : b.len, at = i / 8;
        char *copy = malloc(len + 1);
        memcpy(copy, b.data, len);
        if (!cut)
            copy[at] ^= (char)(1 << i % 8);
        e = (lm_err){ 0 };
        lm_code rc = lm_cachegen_decode(g, copy, len, &c.back, 0, lm_cpu_detect(), NULL, &e);
        size_t second = 12 + get32(b.data + 4);
        bool scale = (at >= 12 && at < 12 + 80) || (at >= second && at < second + 80);
        if (cut || at < 12)
            assert_int_equal(rc, LM_EFORMAT);
        else
            assert_true(!rc || rc == LM_EFORMAT), taken += !rc && !scale;
        for (int64_t p = 0; p < 2; p++)
            for (size_t n = 0; n < part_count(&c, p); n++)
                assert_true(isfinite(lm_get(LM_DTYPE_BF16, c.out[p], (int64_t)n)));
        free(copy);
    }
    assert_in_range(taken, 0, 8 * b.len / 100); /* a few are other streams */
    e = (lm_err){ 0 };
    refused(LM_EUSAGE, lm_cachegen_decode(g, b.data, b.len, &c.back, 1, 0, NULL, &e), &e,
            "chunk 1");
    c.back.tokens = 39, e = (lm_err){ 0 };
    refused(LM_EFORMAT, lm_cachegen_decode(g, b.data, b.len, &c.back, 0, 0, NULL, &e), &e, "39");
    lm_buf_fini(&b), lm_cachegen_free(g), drop(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definition),     cmocka_unit_test(test_levels),
        cmocka_unit_test(test_bins),           cmocka_unit_test(test_channels),
        cmocka_unit_test(test_same_bytes),     cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_clamp),          cmocka_unit_test(test_bad_rows),
        cmocka_unit_test(test_bad_requests),   cmocka_unit_test(test_damaged_tables),
        cmocka_unit_test(test_damaged_chunks),
    };
    return cmocka_run_group_tests_name("kv_cachegen", tests, NULL, NULL);
}
