/* SPDX-License-Identifier: Apache-2.0 */
/* Codes of caches on vectors: the bits of the definition in every format, for pages, for the order of files, and for
 * numbers that are decoded. */
#include "base/rng.h"
#include "kernels/kv_code.h"

#include "kv_attention_case.h"

enum { PAGES = 3 };

/* Numbers of a page: of different sizes, with some that are rare. */
static void draw(float *x, int64_t n, int64_t D, uint64_t seed)
{
    lm_rng r = lm_rng_make(11, "kv code", seed);
    for (int64_t i = 0; i < n; i++) {
        uint64_t kind = lm_rng_u64(r, (uint64_t)(2 * n + i)) % 4096;
        x[i] = number(r, i, i % D);
        if (seed % 3 == 1 && i / D % 5 == 2) /* quotients that lie between two codes */
            x[i] = (float)(lm_rng_u64(r, (uint64_t)i) % 64) * 0.5f;
        if (seed % 3 == 2)
            x[i] = kind == 0   ? NAN
                   : kind == 1 ? INFINITY
                   : kind == 2 ? 1e30f
                   : kind == 3 ? -1e-30f
                   : kind < 20 ? 0
                               : x[i] * 1e-7f;
        if (seed % 3 == 2 && i / D % 7 == 3)
            x[i] = 0;
    }
}

/* The level, and the definition beside it. */
typedef struct {
    const lm_kv_code_kernels *k, *ref;
    lm_kv_format f;
    int64_t T, D, from, end;
    char *page[PAGES], *other[PAGES]; /* those of the level, of the definition */
    float *x, *y[2], range[2 * PAGES * 128];
} trial_code;

static bool same_numbers(const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i])))
            return false;
    return true;
}

/* Pieces of tokens that are multiples of the step. */
static void check_pages(trial_code *t, const char *name)
{
    int64_t step = lm_kv_step(&t->f, t->T), cut = 0;
    size_t bytes = lm_kv_page_bytes(&t->f, t->T, t->D);
    bool ranges = t->f.outliers && !t->f.lower;
    for (int64_t at = t->from, n; at < t->end; at += n) {
        int64_t p = at / t->T, first = at % t->T;
        n = step * (1 + cut++ % 5 * 9);
        n = n < t->T - first ? n : t->T - first;
        n = n < t->end - at ? n : t->end - at;
        const float *r = ranges ? t->range + 2 * at : NULL;
        t->k->encode(&t->f, t->T, t->D, 1, t->x + at * (t->D + 3), t->D + 3, first, n, r,
                     t->page[p]);
        t->ref->encode(&t->f, t->T, t->D, 1, t->x + at * (t->D + 3), t->D + 3, first, n, r,
                       t->other[p]);
    }
    for (int p = 0; p < PAGES; p++) {
        if (memcmp(t->page[p], t->other[p], bytes))
            fail_msg("%s: D %d T %d: pages differ", name, (int)t->D, (int)t->T);
        for (int64_t from = 0, n = t->T; from < t->T; from += 13, n = t->T - from) {
            memset(t->y[0], 0, (size_t)(t->T * t->D) * sizeof(float));
            memset(t->y[1], 0, (size_t)(t->T * t->D) * sizeof(float));
            t->k->decode(&t->f, t->T, t->D, 1, t->page[p], from, n, t->y[0], t->D);
            t->ref->decode(&t->f, t->T, t->D, 1, t->page[p], from, n, t->y[1], t->D);
            if (!same_numbers(t->y[0], t->y[1], t->T * t->D))
                fail_msg("%s: D %d T %d: numbers differ", name, (int)t->D, (int)t->T);
        }
    }
}

static lm_kv_rows rows_of_size(const lm_kv_rows_size *z)
{
    size_t n = (size_t)z->outliers;
    return (lm_kv_rows){ .codes = take(z->codes + 64),
                         .scale = take(z->scale + 64),
                         .min = take(z->min + 64),
                         .second = take(z->second + 64),
                         .begin = take(((size_t)z->pages + 1) * 4 + 64),
                         .index = take(2 * n + 64),
                         .value = take(2 * n + 64) };
}

static void free_rows(lm_kv_rows *r)
{
    void *const all[] = { r->codes, r->scale, r->min, r->second, r->begin, r->index, r->value };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        lm_free(all[i]);
}

static void check_rows(trial_code *t, const char *name)
{
    lm_kv_rows_size z;
    size_t bytes = lm_kv_page_bytes(&t->f, t->T, t->D);
    assert_int_equal(lm_kv_rows_size_of(&t->f, t->T, t->D, t->from, t->end, &z, NULL), 0);
    lm_kv_rows a = rows_of_size(&z), b = rows_of_size(&z);
    memset(a.codes, 0x5a, z.codes + 64);
    t->k->get(&t->f, t->T, t->D, t->from, t->end, (const void *const *)t->page, &a);
    t->ref->get(&t->f, t->T, t->D, t->from, t->end, (const void *const *)t->other, &b);
    if (memcmp(a.codes, b.codes, z.codes) || memcmp(a.scale, b.scale, z.scale) ||
        memcmp(a.min, b.min, z.min) || memcmp(a.second, b.second, z.second) ||
        memcmp(a.begin, b.begin, ((size_t)z.pages + 1) * 4) ||
        memcmp(a.index, b.index, 2 * (size_t)z.outliers))
        fail_msg("%s: D %d T %d: rows differ", name, (int)t->D, (int)t->T);
    for (int i = 0; i < 64; i++)
        assert_int_equal(a.codes[z.codes + (size_t)i], 0x5a);
    for (int p = 0; p < PAGES; p++)
        memset(t->page[p], 0, bytes);
    t->k->put(&t->f, t->T, t->D, t->from, t->end, &a, (void *const *)t->page);
    for (int p = 0; p < PAGES; p++)
        if (memcmp(t->page[p], t->other[p], bytes))
            fail_msg("%s: D %d T %d: pages from rows differ", name, (int)t->D, (int)t->T);
    free_rows(&a);
    free_rows(&b);
}

static void check_format(const lm_kv_code_kernels *k, const char *name, const lm_kv_format *f,
                         int64_t T, int64_t D, uint64_t seed)
{
    trial_code t = { .k = k, .ref = &lm_kv_code_ref, .f = *f, .T = T, .D = D };
    int64_t step, n = PAGES * T;
    t.f.values = seed % 2;
    if (lm_kv_page_bytes(&t.f, T, D) == SIZE_MAX)
        return;
    step = lm_kv_step(&t.f, T);
    t.from = step > 1 ? step : (int64_t)(seed % 19);
    t.end = step > 1 ? n / step * step - step : n - (int64_t)(seed % 23);
    t.x = take((size_t)(n * (D + 3)) * sizeof *t.x);
    draw(t.x, n * (D + 3), D + 3, seed);
    for (int64_t i = 0; i < n; i++) {
        t.range[2 * i] = -1.5f;
        t.range[2 * i + 1] = 2;
    }
    for (int i = 0; i < 2; i++)
        t.y[i] = take((size_t)(T * D) * sizeof(float));
    for (int p = 0; p < PAGES; p++) {
        t.page[p] = take(lm_kv_page_bytes(&t.f, T, D));
        t.other[p] = take(lm_kv_page_bytes(&t.f, T, D));
    }
    check_pages(&t, f->name);
    check_rows(&t, f->name);
    (void)name;
    lm_free(t.x);
    for (int i = 0; i < 2; i++)
        lm_free(t.y[i]);
    for (int p = 0; p < PAGES; p++) {
        lm_free(t.page[p]);
        lm_free(t.other[p]);
    }
}

static void test_formats(void **state)
{
    static const int64_t dims[] = { 64, 128, 20, 80, 96, 33 }, pages[] = { 16, 32, 64, 128 };
    (void)state;
    for (lm_cpu_level l = LM_CPU_AVX2; l <= LM_CPU_AVX512 && l <= lm_cpu_detect(); l++)
        for (int i = 0; i < N_FORMATS - 1; i++)
            for (uint64_t s = 0; s < 12; s++)
                check_format(lm_kv_code_at(l), lm_cpu_level_name(l), &formats[i],
                             pages[(s / 2 + (uint64_t)i) % 4], dims[(s + (uint64_t)i / 4) % 6], s);
}

static void test_rows(void **state)
{
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_F16, LM_DTYPE_BF16 };
    static const int64_t dims[] = { 64, 128, 20, 80, 33, 256, 512 };
    enum { N = 5, MOST = N * 512 };
    static float x[MOST], y[2][MOST];
    static uint32_t row[MOST], back[2][MOST];
    (void)state;
    for (int i = 0; i < 3 * 7 * 2; i++) {
        lm_dtype act = acts[i % 3];
        int64_t D = dims[i / 3 % 7];
        bool rotate = i / 21;
        draw(x, N * D, D, (uint64_t)i);
        lm_convert(LM_DTYPE_F32, x, act, row, N * D);
        for (lm_cpu_level l = LM_CPU_AVX2; l <= LM_CPU_AVX512 && l <= lm_cpu_detect(); l++) {
            lm_kv_code_ref.load(act, rotate, D, row, N, y[0]);
            lm_kv_code_at(l)->load(act, rotate, D, row, N, y[1]);
            assert_true(same_numbers(y[0], y[1], N * D));
            memset(back, 0, sizeof back);
            lm_kv_code_ref.store(act, rotate, D, x, N, back[0]);
            lm_kv_code_at(l)->store(act, rotate, D, x, N, back[1]);
            for (int64_t k = 0; k < N * D; k++)
                if (!isnan(lm_get(act, back[0], k)) || !isnan(lm_get(act, back[1], k)))
                    assert_memory_equal((char *)back[0] + (size_t)k * lm_dtype_size(act),
                                        (char *)back[1] + (size_t)k * lm_dtype_size(act),
                                        lm_dtype_size(act));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_rows),
    };
    fill_ranges();
    return cmocka_run_group_tests_name("kernels_kv_code", tests, NULL, NULL);
}
