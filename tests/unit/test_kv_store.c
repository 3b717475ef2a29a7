/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_store.c -- what caches return, for all methods: parts that stay plain, tokens that were coded earlier, errors within
 * bounds; rotations and attention against their sums. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "kv/spec.h"
#include "kv/store.h"
#include "kvquant_case.h"

enum { HEADS = 2, MOST_D = 128, MOST_N = 320 };

static float x[MOST_N * HEADS * MOST_D], y[MOST_N * HEADS * MOST_D], z[MOST_N * HEADS * MOST_D];

/* Some channels are large with an offset, as keys have them. */
static void draw_heads(uint64_t seed, int64_t n, int64_t C, float *to)
{
    lm_rng r = lm_rng_make(seed, "kv store", 0);
    for (int64_t i = 0; i < n * C; i++)
        to[i] = (float)(lm_rng_normal(r, (uint64_t)i) * (i % C % 21 == 5 ? 6 : 1) +
                        (i % C % 21 == 5 ? 10 : 0));
}

static void hadamard(void **state)
{
    static const int64_t sizes[] = { 1, 7, 20, 64, 80, 96, 128 };
    (void)state;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t D = sizes[s], block = D & -D;
        draw_heads(s, 1, D, x);
        memcpy(y, x, (size_t)D * sizeof *x);
        lm_kv_rotate(D, y);
        for (int64_t i = 0; i < D; i++) { /* H[i][j] = (-1)^popcount(i & j) / sqrt(block) */
            double sum = 0;
            for (int64_t j = 0; j < block; j++)
                sum += (double)x[i / block * block + j] *
                       (__builtin_popcountll((uint64_t)(i % block & j)) % 2 ? -1 : 1);
            assert_true(fabs((double)y[i] - sum / sqrt((double)block)) < 1e-4);
        }
        lm_kv_rotate(D, y);
        for (int64_t i = 0; i < D; i++)
            assert_true(fabs((double)(y[i] - x[i])) < 1e-5F * 16);
    }
}

/* ---- storing ---- */

static float lower[HEADS * MOST_D], upper[HEADS * MOST_D], tables[2][16];
static lm_kv_numbers numbers[2];
static lm_kv_data calibration = { .layers = 1,
                                  .side = numbers,
                                  .outliers = 0.02,
                                  .weights = "",
                                  .config = "",
                                  .candidates = "",
                                  .path = "c" };

static void calibrate(int64_t D)
{
    const lm_kvquant_opts o = { .bits = 4, .outliers = 0.02 };
    lm_err e = { 0 };
    draw_heads(99, MOST_N, HEADS * D, x);
    assert_int_equal(kvquant_keys(&o, x, NULL, MOST_N, HEADS * D, lower, upper, tables[0], &e),
                     LM_OK);
    assert_int_equal(kvquant_values(&o, x, NULL, MOST_N, HEADS * D, tables[1], &e), LM_OK);
    numbers[0] = (lm_kv_numbers){ .lower = lower,
                                  .upper = upper,
                                  .kv_heads = HEADS,
                                  .head_dim = D,
                                  .table = tables[0],
                                  .bits = 4 };
    numbers[1] = (lm_kv_numbers){ .table = tables[1], .bits = 4 };
}

static lm_code bind_text(const char *text, int64_t D, lm_kv_plan **out)
{
    lm_kv_site site[1] = { { .layers = 1,
                             .kv_heads = HEADS,
                             .head_dim = D,
                             .max_positions = 4096,
                             .act = LM_DTYPE_F32,
                             .rope = true } };
    const lm_kv_data *const data[1] = { &calibration };
    lm_err e = { 0 };
    lm_kv_spec *s;
    if (lm_kv_spec_parse(text, &s, &e))
        fail_msg("%s: %s", text, e.what);
    lm_code rc = lm_kv_spec_bind(s, site, 1, data, out, &e);
    lm_kv_spec_free(s);
    return rc;
}

/* All methods: plain parts are plain, and what was coded stays as it was when further tokens follow. */
static void parts_and_order(void **state)
{
    static const int64_t lengths[] = { 1, 31, 32, 64, 127, 128, 129, 200, 256, 257, 300 };
    static const int64_t dims[] = { 20, 64, 80, 128 };
    int stored = 0;
    (void)state;
    for (size_t s = 0; s < sizeof dims / sizeof *dims; s++)
        for (int i = 0; lm_kv_method_at(i); i++) {
            const lm_kv_method *m = lm_kv_method_at(i);
            int64_t D = dims[s], C = HEADS * D, before[2] = { 0, 0 };
            char text[64];
            lm_err e = { 0 };
            lm_kv_plan *p;
            if (m->policy)
                continue;
            snprintf(text, sizeof text, "%s%s", m->name,
                     !strcmp(m->name, "kvquant")      ? ":file=c"
                     : !strcmp(m->name, "turboquant") ? ":first=0,last=0"
                                                      : "");
            calibrate(D);
            if (bind_text(text, D, &p))
                continue; /* blocks of 32 */
            stored++;
            draw_heads(7, MOST_N, C, x);
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
                for (int k = 0; k < 2; k++) {
                    const lm_kv_side *side = &p->side[k];
                    int64_t n = lengths[l], coded = lm_kv_side_coded(side, n);
                    static float last[2][MOST_N * HEADS * MOST_D];
                    double error = 0, all = 0;
                    assert_true(coded >= 0 && coded <= n);
                    assert_int_equal(lm_kv_store(side, p->page, HEADS, D, x, n, y, &e), LM_OK);
                    int64_t plain = side->format ? coded * C : 0;
                    for (int64_t j = 0; j < n * C && side->format; j++)
                        if (j >= plain || j < side->sinks * C)
                            assert_true(y[j] == x[j]);
                    /* Rows that were coded with fewer tokens; the room for outliers of a page is shared with
                     * tokens that follow. */
                    assert_true(coded >= before[k]);
                    if (strcmp(m->name, "kvquant") &&
                        memcmp(y, last[k], (size_t)(before[k] * C) * sizeof *y))
                        fail_msg("%s, heads of %d, %d tokens: rows that were coded have changed",
                                 text, (int)D, (int)n);
                    memcpy(last[k], y, (size_t)(coded * C) * sizeof *y);
                    before[k] = coded;
                    for (int64_t j = 0; j < n * C; j++) {
                        error += pow((double)y[j] - (double)x[j], 2);
                        all += pow((double)x[j], 2);
                    }
                    if (!(error < 0.3 * all))
                        fail_msg("%s, heads of %d, %d tokens, side %d: %g of %g", text, (int)D,
                                 (int)n, k, error, all);
                }
            lm_kv_plan_free(p);
        }
    assert_true(stored >= 4 * 14);
}

/* The range of a token's values is that of all its heads, in any page. */
static void ranges_of_tokens(void **state)
{
    enum { D = 64, C = HEADS * D, N = 150 };
    static uint64_t page[8192];
    float work[C], range[2], one[D];
    lm_kv_plan *p;
    lm_err e = { 0 };
    (void)state;
    calibrate(D);
    assert_int_equal(bind_text("kvquant:file=c", D, &p), LM_OK);
    const lm_kv_side *v = &p->side[LM_KV_V];
    assert_true(v->outliers == 0.02 && p->side[LM_KV_K].outliers < 0);
    draw_heads(12, N, C, x);
    assert_int_equal(lm_kv_store(v, p->page, HEADS, D, x, N, y, &e), LM_OK);
    assert_true(lm_kv_page_bytes(v->format, p->page, D) <= sizeof page);
    for (int64_t t = 1; t < N; t++)
        for (int64_t h = 0; h < HEADS; h++) {
            lm_kv_token_range(0.02, x + t * C, C, range, work);
            memset(page, 0, sizeof page);
            lm_kv_encode(v->format, p->page, D, h, x + t * C + h * D, C, 0, 1, range, page);
            lm_kv_decode(v->format, p->page, D, h, page, 0, 1, one, D);
            assert_memory_equal(one, y + t * C + h * D, sizeof one);
        }
    lm_kv_plan_free(p);
}

/* Each method by itself: fewer bits, larger errors; rotation helps where channels are large. */
static void errors_fall_with_bits(void **state)
{
    static const char *const rising[] = {
        "int8", "int6", "int5", "int4", "int3", "int2:residual=0"
    };
    double last = 0;
    lm_kv_plan *p;
    lm_err e = { 0 };
    (void)state;
    draw_heads(8, 256, HEADS * 64, x);
    for (size_t i = 0; i < sizeof rising / sizeof *rising; i++) {
        double error = 0;
        assert_int_equal(bind_text(rising[i], 64, &p), LM_OK);
        assert_int_equal(lm_kv_store(&p->side[0], p->page, HEADS, 64, x, 256, y, &e), LM_OK);
        for (int j = 0; j < 256 * HEADS * 64; j++)
            error += pow((double)y[j] - (double)x[j], 2);
        assert_true(error > last);
        last = error;
        lm_kv_plan_free(p);
    }
}

/* ---- attention ---- */

static void attention(void **state)
{
    enum { N = 40, H = 4, D = 16, C = HEADS * D };
    static float q[N * H * D], k2[N * C], v2[N * C];
    (void)state;
    draw_heads(1, N, H * D, q);
    draw_heads(2, N, C, x);
    draw_heads(3, N, C, z);
    draw_heads(4, N, C, k2);
    draw_heads(5, N, C, v2);
    for (int64_t window = 0; window <= 50; window += 10) {
        lm_kv_attention a = { H, HEADS, D, window, 0.05, 0 };
        double error, norm, want = 0, all = 0;
        lm_err e = { 0 };
        assert_int_equal(lm_kv_attention_error(&a, N, q, x, z, x, z, &error, &norm, &e), LM_OK);
        assert_true(error == 0 && norm > 0);
        assert_int_equal(lm_kv_attention_error(&a, N, q, x, z, k2, v2, &error, &norm, &e), LM_OK);
        for (int i = 0; i < N; i++)
            for (int h = 0; h < H; h++) {
                double o[2][D] = { { 0 } };
                for (int which = 0; which < 2; which++) {
                    const float *k = which ? k2 : x, *v = which ? v2 : z;
                    double sum = 0, w[N];
                    for (int j = 0; j <= i; j++) {
                        double s = 0;
                        for (int d = 0; d < D; d++)
                            s +=
                                (double)q[i * H * D + h * D + d] * (double)k[j * C + h / 2 * D + d];
                        w[j] = window && i - j >= window ? 0 : exp(0.05 * s);
                        sum += w[j];
                    }
                    for (int j = 0; j <= i; j++)
                        for (int d = 0; d < D; d++)
                            o[which][d] += w[j] / sum * (double)v[j * C + h / 2 * D + d];
                }
                for (int d = 0; d < D; d++) {
                    want += pow(o[0][d] - o[1][d], 2);
                    all += pow(o[0][d], 2);
                }
            }
        assert_true(fabs(error - want) < 1e-9 * want);
        assert_true(fabs(norm - all) < 1e-9 * all);
    }
}

/* Sums of the columns of softmax(scale q k^T), causal; of all rows, and of the last eight. */
static void masses(void **state)
{
    enum { N = 50, H = 6, D = 8, C = HEADS * D };
    static float q[N * H * D], mass[HEADS * N];
    (void)state;
    draw_heads(21, N, H * D, q);
    draw_heads(22, N, C, x);
    for (int64_t from = 0; from < N; from += N - 8)
        for (int64_t window = 0; window < 30; window += 15) {
            lm_kv_attention a = { H, HEADS, D, window, 0.1, 0 };
            lm_err e = { 0 };
            double want[HEADS][N] = { { 0 } }, all = 0;
            assert_int_equal(lm_kv_masses(&a, N, from, q, x, mass, &e), LM_OK);
            for (int64_t i = from; i < N; i++)
                for (int h = 0; h < H; h++) {
                    double w[N] = { 0 }, sum = 0;
                    for (int64_t j = 0; j <= i; j++) {
                        double s = 0;
                        for (int d = 0; d < D; d++)
                            s += (double)q[(i * H + h) * D + d] * (double)x[j * C + h / 3 * D + d];
                        w[j] = window && i - j >= window ? 0 : exp(0.1 * s);
                        sum += w[j];
                    }
                    for (int64_t j = 0; j <= i; j++)
                        want[h / 3][j] += w[j] / sum;
                }
            for (int kv = 0; kv < HEADS; kv++)
                for (int64_t j = 0; j < N; j++) {
                    assert_true(fabs((double)mass[kv * N + j] - want[kv][j]) < 1e-5);
                    all += (double)mass[kv * N + j];
                }
            assert_true(fabs(all - (double)((N - from) * H)) < 1e-3); /* each query gives 1 */
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hadamard),         cmocka_unit_test(parts_and_order),
        cmocka_unit_test(ranges_of_tokens), cmocka_unit_test(errors_fall_with_bits),
        cmocka_unit_test(attention),        cmocka_unit_test(masses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
