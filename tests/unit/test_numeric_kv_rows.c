/* SPDX-License-Identifier: Apache-2.0 */
/* Codes of a cache in the order of files: the same numbers by a naive reader of that order, the same pages
 * when they are restored, damaged rows. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "numeric/kv_rows.h"

enum { T = 64, MOST_PAGES = 3, MOST_D = 80 };

static char page[MOST_PAGES][1 << 16], again[MOST_PAGES][1 << 16];
static float x[MOST_PAGES * T * MOST_D], y[MOST_PAGES * T * MOST_D];

#define INT(b, ax, lv, g, sc)                                                        \
    {                                                                                \
        .name = #lv #b, .bits = b, .axis = ax, .levels = lv, .group = g, .scale = sc \
    }

static lm_kv_format formats[] = {
    INT(8, LM_KV_TOKEN, LM_KV_SYM, 0, LM_DTYPE_F16),
    INT(6, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_BF16),
    INT(5, LM_KV_CHANNEL, LM_KV_ASYM, 32, LM_DTYPE_F32),
    INT(4, LM_KV_TOKEN, LM_KV_ASYM, 32, LM_DTYPE_F16),
    INT(3, LM_KV_TOKEN, LM_KV_SYM, 16, LM_DTYPE_F16),
    INT(3, LM_KV_CHANNEL, LM_KV_SYM, 16, LM_DTYPE_F16),
    INT(2, LM_KV_CHANNEL, LM_KV_ASYM, 0, LM_DTYPE_F16),
    INT(1, LM_KV_TOKEN, LM_KV_ASYM, 0, LM_DTYPE_F32),
    { .name = "fp8",
      .bits = 8,
      .levels = LM_KV_FLOAT8,
      .float8 = LM_DTYPE_F8E4M3,
      .scale = LM_DTYPE_NONE,
      .constant = 1 },
    { .name = "balanced keys",
      .bits = 4,
      .axis = LM_KV_CHANNEL,
      .levels = LM_KV_ASYM,
      .group = 32,
      .scale = LM_DTYPE_F16,
      .second = true },
    { .name = "balanced values",
      .values = true,
      .bits = 2,
      .levels = LM_KV_ASYM,
      .scale = LM_DTYPE_F16,
      .second = true,
      .span = 32 },
    { .name = "outliers",
      .bits = 3,
      .levels = LM_KV_TABLE,
      .scale = LM_DTYPE_F16,
      .zero = true,
      .n_table = 8,
      .table = { -1, -0.7f, -0.4f, -0.1f, 0.1f, 0.4f, 0.7f, 1 },
      .outliers = 40 },
};
enum { FORMATS = sizeof formats / sizeof *formats };

static const void *const *pages(void)
{
    static const void *p[MOST_PAGES] = { page[0], page[1], page[2] };
    return p;
}

static lm_kv_rows rows_for(const lm_kv_rows_size *s)
{
    lm_kv_rows r = { calloc(s->codes + 1, 1),
                     calloc(s->scale + 1, 1),
                     calloc(s->min + 1, 1),
                     calloc(s->second + 1, 1),
                     calloc((size_t)s->pages + 1, 4),
                     calloc((size_t)s->outliers + 1, 2),
                     calloc((size_t)s->outliers + 1, 2) };
    return r;
}

static void drop(lm_kv_rows *r)
{
    free(r->codes), free(r->scale), free(r->min), free(r->second), free(r->begin), free(r->index);
    free(r->value);
}

/* Encode n tokens to `page`. */
static void encode(const lm_kv_format *f, int64_t D, int64_t n)
{
    lm_rng g = lm_rng_make(2, "rows", (uint64_t)(D + n));
    float range[2 * T];
    memset(page, 0, sizeof page);
    for (int64_t i = 0; i < n * D; i++)
        x[i] =
            (float)(lm_rng_normal(g, (uint64_t)i) * (i % D % 5 == 2 ? 4 : 1) + (double)(i % D % 3));
    for (int t = 0; t < T; t++)
        range[2 * t] = -3, range[2 * t + 1] = 4;
    for (int64_t first = 0; first < n; first += T) {
        int64_t held = n - first < T ? n - first : T;
        lm_kv_encode(f, T, D, 0, x + first * D, D, 0, held, f->outliers ? range : NULL,
                     page[first / T]);
        lm_kv_decode(f, T, D, 0, page[first / T], 0, held, y + first * D, D);
    }
}

/* The number of token t and channel d by the text of kv_rows.h; `code` bit by bit. */
static float number(const lm_kv_format *f, int64_t D, int64_t n, const lm_kv_rows *r, int64_t t,
                    int64_t d)
{
    bool channel = f->axis == LM_KV_CHANNEL;
    int64_t row = channel ? d : t, in_row = channel ? t : d;
    size_t row_bytes = (size_t)((channel ? n : D) * f->bits + 7) / 8;
    int64_t groups = f->group ? (D + f->group - 1) / f->group : 1, span = f->span ? f->span : T;
    int64_t at = channel ? t / (f->group ? f->group : T) * D + d
                         : t * groups + (f->group ? d / f->group : 0);
    unsigned code = 0;
    float level[256];
    for (int b = 0; b < f->bits; b++) {
        int64_t bit = in_row * f->bits + b;
        code |= (r->codes[(size_t)row * row_bytes + (size_t)bit / 8] >> bit % 8 & 1u) << b;
    }
    for (uint32_t i = r->begin[t / T]; f->outliers && i < r->begin[t / T + 1]; i++)
        if (r->index[i] == t % T * D + d)
            return lm_f16_to_f32(r->value[i]);
    lm_kv_level_numbers(f, level);
    double v = level[code];
    v *= f->scale == LM_DTYPE_NONE ? f->constant : lm_get(f->scale, r->scale, at);
    v += lm_kv_has_min(f) ? lm_get(f->scale, r->min, at) : 0;
    if (f->second)
        v *= lm_get(f->scale, r->second, channel ? t : t / span * D + d);
    return (float)v;
}

static void check(const lm_kv_format *f, int64_t D, int64_t n)
{
    static void *const to[MOST_PAGES] = { again[0], again[1], again[2] };
    lm_kv_rows_size s;
    lm_err e = { 0 };
    if (lm_kv_rows_size_of(f, T, D, 0, n, &s, &e))
        fail_msg("%s: %s", e.where, e.what);
    encode(f, D, n);
    lm_kv_rows r = rows_for(&s);
    lm_kv_rows_get(f, T, D, 0, n, pages(), &r);
    for (int64_t t = 0; t < n; t++)
        for (int64_t d = 0; d < D; d++)
            if (number(f, D, n, &r, t, d) != y[t * D + d])
                fail_msg("%s, D %d, %d tokens: token %d channel %d: %g, not %g", f->name, (int)D,
                         (int)n, (int)t, (int)d, (double)number(f, D, n, &r, t, d),
                         (double)y[t * D + d]);
    assert_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
    memset(again, 0, sizeof again);
    lm_kv_rows_put(f, T, D, 0, n, &r, to);
    assert_memory_equal(again, page, sizeof page);
    drop(&r);
}

/* Without the first tokens: rows of their own, which restore the others alone. */
static void check_end(const lm_kv_format *f, int64_t D, int64_t from, int64_t n)
{
    static void *const to[MOST_PAGES] = { again[0], again[1], again[2] };
    float z[MOST_D];
    lm_kv_rows_size s;
    lm_err e = { 0 };
    if (lm_kv_rows_size_of(f, T, D, from, n, &s, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_int_equal(s.pages, (n + T - 1) / T - from / T);
    encode(f, D, n);
    for (int64_t p = 0; p < MOST_PAGES && f->outliers;
         p++) /* of the first page those that are rows */
        if (p < from / T || p == from / T) {
            lm_kv_sections at;
            assert_int_equal(lm_kv_page(f, T, D, &at, &e), 0);
            memset(page[p] + at.outliers, 0, 2);
        }
    lm_kv_rows r = rows_for(&s);
    lm_kv_rows_get(f, T, D, from, n, pages(), &r);
    assert_null(lm_kv_rows_wrong(f, T, D, from, n, &r));
    memset(again, 0, sizeof again);
    lm_kv_rows_put(f, T, D, from, n, &r, to);
    for (int64_t t = 0; t < n; t++) {
        lm_kv_decode(f, T, D, 0, page[t / T], t % T / lm_kv_step(f, T) * lm_kv_step(f, T),
                     lm_kv_step(f, T), y, D);
        memcpy(z, y + t % T % lm_kv_step(f, T) * D, (size_t)D * sizeof *z);
        lm_kv_decode(f, T, D, 0, again[t / T], t % T / lm_kv_step(f, T) * lm_kv_step(f, T),
                     lm_kv_step(f, T), y, D);
        if (t >= from)
            assert_memory_equal(z, y + t % T % lm_kv_step(f, T) * D, (size_t)D * sizeof *z);
    }
    lm_kv_rows_size all;
    assert_int_equal(lm_kv_rows_size_of(f, T, D, 0, n, &all, &e), 0);
    assert_true(s.codes < all.codes);
    drop(&r);
}

static void test_without_the_first(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        int64_t step = lm_kv_step(&formats[i], T);
        int64_t from = step > 1 ? step : 5;
        check_end(&formats[i], 20, from, from + step);
        check_end(&formats[i], 20, from, 2 * T);
        check_end(&formats[i], 20, T + (step < T ? from : 0), 3 * T);
    }
}

static void test_both_ways(void **state)
{
    static const int64_t dims[] = { 4, 20, 64, 80 };
    (void)state;
    for (int i = 0; i < 2 * FORMATS; i++) {
        lm_kv_format f = formats[i / 2];
        int64_t step = lm_kv_step(&f, T);
        f.values = f.values || i % 2;
        for (int d = 0; d < 4; d++)
            for (int64_t n = step; n <= MOST_PAGES * T;
                 n += n < 2 * step ? step : 37 / step * step + step)
                check(&f, dims[d], n);
    }
}

static void test_sizes(void **state)
{
    lm_kv_rows_size s;
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_kv_rows_size_of(&formats[3], T, 80, 0, 70, &s, &e),
                     0); /* 4 bits, groups of 32 */
    assert_int_equal(s.codes, 70 * 40);
    assert_int_equal(s.scale, 70 * 3 * 2);
    assert_int_equal(s.min, 70 * 3 * 2);
    assert_int_equal(s.second + (size_t)s.outliers, 0);
    assert_int_equal(lm_kv_rows_size_of(&formats[5], T, 20, 0, 48, &s, &e),
                     0); /* 3 bits by channel */
    assert_int_equal(s.codes, 20 * 18);
    assert_int_equal(s.scale, 3 * 20 * 2);
    assert_int_equal(s.min, 0);
    assert_int_equal(lm_kv_rows_size_of(&formats[5], T, 20, 0, 49, &s, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "tokens 0 to 49"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_kv_rows_size_of(&formats[5], 63, 20, 0, 48, &s, &e), LM_EUSAGE);
}

/* What a hostile file may have in these sections. */
static void test_wrong(void **state)
{
    lm_kv_rows_size s;
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        const lm_kv_format *f = &formats[i];
        int64_t D = 20, n = 128;
        assert_int_equal(lm_kv_rows_size_of(f, T, D, 0, n, &s, NULL), 0);
        encode(f, D, n);
        lm_kv_rows r = rows_for(&s);
        lm_kv_rows_get(f, T, D, 0, n, pages(), &r);
        if (s.scale) {
            double old = lm_get(f->scale, r.scale, 3);
            lm_set(f->scale, r.scale, 3, NAN);
            assert_non_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
            lm_set(f->scale, r.scale, 3, old);
        }
        if (s.min) {
            double old = lm_get(f->scale, r.min, 1);
            lm_set(f->scale, r.min, 1, INFINITY);
            assert_non_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
            lm_set(f->scale, r.min, 1, old);
        }
        if (s.second) {
            lm_set(f->scale, r.second, 0, NAN);
            assert_non_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
            lm_set(f->scale, r.second, 0, 1);
        }
        if (f->axis == LM_KV_TOKEN && D * f->bits % 8) {
            r.codes[(size_t)(D * f->bits + 7) / 8 - 1] ^= 0x80;
            assert_non_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
            r.codes[(size_t)(D * f->bits + 7) / 8 - 1] ^= 0x80;
        }
        assert_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
        drop(&r);
    }
}

static void test_wrong_outliers(void **state)
{
    const lm_kv_format *f = &formats[FORMATS - 1];
    lm_kv_rows_size s;
    int64_t D = 20, n = 128;
    (void)state;
    assert_int_equal(lm_kv_rows_size_of(f, T, D, 0, n, &s, NULL), 0);
    assert_int_equal(s.outliers, 80);
    encode(f, D, n);
    lm_kv_rows r = rows_for(&s);
    lm_kv_rows_get(f, T, D, 0, n, pages(), &r);
    assert_int_equal(r.begin[0], 0);
    assert_true(r.begin[1] > 2 && r.begin[2] > r.begin[1]);
    for (int i = 0; i < 6; i++) {
        uint32_t begin[3];
        uint16_t index = r.index[1], value = r.value[0];
        memcpy(begin, r.begin, sizeof begin);
        if (i == 0)
            r.index[1] = r.index[0];
        else if (i == 1)
            r.index[1] = (uint16_t)(T * D);
        else if (i == 2)
            r.value[0] = 0x7c00;
        else if (i == 3)
            r.begin[0] = 1;
        else if (i == 4)
            r.begin[2] = r.begin[1] - 1;
        else
            r.begin[1] = 41;
        assert_non_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
        memcpy(r.begin, begin, sizeof begin);
        r.index[1] = index, r.value[0] = value;
        assert_null(lm_kv_rows_wrong(f, T, D, 0, n, &r));
    }
    drop(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ways),      cmocka_unit_test(test_without_the_first),
        cmocka_unit_test(test_sizes),          cmocka_unit_test(test_wrong),
        cmocka_unit_test(test_wrong_outliers),
    };
    return cmocka_run_group_tests_name("numeric_kv_rows", tests, NULL, NULL);
}
