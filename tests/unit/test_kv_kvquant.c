/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_kvquant.c -- ranges, levels, codes and outliers of KVQuant against the equations of its code
 * (simquant_module_quantizer.py), written out on arrays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kv/kmeans.h"
#include "kvquant_case.h"
#include "numeric/kv_impl.h"

enum { N = 320, HEADS = 2, D = 48, C = HEADS * D, T = 64 };

static float x[N * C], w[N * C];
static double y_of[N * C];  /* normalised numbers */
static bool outlier[N * C]; /* of the reference */

static void draw_numbers(uint64_t seed)
{
    lm_rng r = lm_rng_make(seed, "kvquant", 0);
    for (int64_t i = 0; i < N * C; i++) {
        double v = lm_rng_normal(r, (uint64_t)i), c = (double)(i % C);
        x[i] = (float)(v * v * v * (1 + fmod(c, 7)) + fmod(c, 5));
        w[i] = (float)exp(lm_rng_normal(r, (uint64_t)(i + N * C)));
    }
}

static int by_value(const void *a, const void *b)
{
    double s = *(const double *)a, t = *(const double *)b;
    return (s > t) - (s < t);
}

/* numpy.percentile(v, 100 q), linear */
static double percentile(const double *v, int64_t n, double q)
{
    double sorted[N];
    memcpy(sorted, v, (size_t)n * sizeof *v);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    double at = q * (double)(n - 1), low = floor(at);
    int64_t i = (int64_t)low;
    return i + 1 < n ? sorted[i] * (1 - (at - low)) + sorted[i + 1] * (at - low) : sorted[i];
}

/* Keys: thresholds of each channel; outliers |y| > 1. */
static void normalise_keys(double tau, double *lower, double *upper)
{
    double t = 1 - (1 - tau) / 2, column[N];
    for (int64_t c = 0; c < C; c++) {
        for (int64_t i = 0; i < N; i++)
            column[i] = (double)x[i * C + c];
        upper[c] = percentile(column, N, t);
        lower[c] = percentile(column, N, 1 - t);
        for (int64_t i = 0; i < N; i++) {
            double range = (upper[c] - lower[c]) / 2, zero = (upper[c] + lower[c]) / 2;
            y_of[i * C + c] = (column[i] - zero) / range;
            outlier[i * C + c] = fabs(y_of[i * C + c]) > 1;
        }
    }
}

/* Values: thresholds of each token, both inclusive; the range is that of the row in which outliers are replaced by
 * its median. */
static void normalise_values(double tau, double *lower, double *upper)
{
    double t = 1 - (1 - tau) / 2, row[C];
    for (int64_t i = 0; i < N; i++) {
        for (int64_t c = 0; c < C; c++)
            row[c] = (double)x[i * C + c];
        double high = percentile(row, C, t), low = percentile(row, C, 1 - t);
        double median = percentile(row, C, 0.5), most = -INFINITY, least = INFINITY;
        for (int64_t c = 0; c < C; c++) {
            outlier[i * C + c] = tau < 1 && (row[c] >= high || row[c] <= low);
            double z = outlier[i * C + c] ? median : row[c];
            most = fmax(most, z);
            least = fmin(least, z);
        }
        lower[i] = least;
        upper[i] = most;
        for (int64_t c = 0; c < C; c++)
            y_of[i * C + c] = (row[c] - (most + least) / 2) / ((most - least) / 2);
    }
}

static double cost_of_table(const float *table, int k, const float *weight)
{
    double sum = 0;
    for (int64_t i = 0; i < N * C; i++) {
        double best = INFINITY;
        for (int g = 0; g < k && !outlier[i]; g++)
            best = fmin(best, fabs(y_of[i] - (double)table[g]));
        sum += outlier[i] ? 0 : best * best * (weight ? (double)weight[i] : 1);
    }
    return sum;
}

typedef struct {
    double y, w;
} weighted;

static int by_y(const void *a, const void *b)
{
    return by_value(&((const weighted *)a)->y, &((const weighted *)b)->y);
}

/* The least cost of any table, from the numbers themselves. */
static double least_cost(int k, const float *weight)
{
    static weighted list[N * C];
    static lm_kmeans_cell cell[N * C];
    double level[32], cost;
    lm_err e = { 0 };
    int64_t n = 0;
    for (int64_t i = 0; i < N * C; i++)
        if (!outlier[i])
            list[n++] = (weighted){ y_of[i], weight ? (double)weight[i] : 1 };
    qsort(list, (size_t)n, sizeof *list, by_y);
    for (int64_t i = 0; i < n; i++)
        cell[i] =
            (lm_kmeans_cell){ list[i].w, list[i].w * list[i].y, list[i].w * list[i].y * list[i].y };
    assert_int_equal(lm_kmeans(cell, n, k, level, &cost, &e), LM_OK);
    return cost;
}

static void check_table(const float *table, int bits, const float *weight)
{
    int k = 1 << bits;
    for (int g = 1; g < k; g++)
        assert_true(table[g] > table[g - 1]);
    assert_true(cost_of_table(table, k, weight) <= 1.001 * least_cost(k, weight));
}

/* The code of a number: argmin of the distances, the first of equal ones; -1: too near to a border. */
static int code_of(const float *table, int k, double y)
{
    int best = 0;
    double second = INFINITY;
    for (int g = 1; g < k; g++)
        best = fabs(y - (double)table[g]) < fabs(y - (double)table[best]) ? g : best;
    for (int g = 0; g < k; g++)
        second = g == best ? second : fmin(second, fabs(y - (double)table[g]));
    return second - fabs(y - (double)table[best]) < 1e-3 ? -1 : best;
}

static const double shares[] = { 0, 0.01, 0.05 };

static void keys(void **state)
{
    (void)state;
    for (int bits = 2; bits <= 4; bits++)
        for (int s = 0; s < 3; s++) {
            lm_kvquant_opts o = { .bits = bits, .outliers = shares[s] };
            const float *weight = s == 1 ? w : NULL;
            static float lower[C], upper[C];
            float table[32], decoded[T * D];
            double low[C], high[C];
            lm_err e = { 0 };
            draw_numbers((uint64_t)(bits * 10 + s));
            assert_int_equal(kvquant_keys(&o, x, weight, N, C, lower, upper, table, &e), LM_OK);
            normalise_keys(1 - shares[s], low, high);
            for (int c = 0; c < C; c++) {
                assert_true(fabs((double)lower[c] - low[c]) <= 1e-6 * (1 + fabs(low[c])));
                assert_true(fabs((double)upper[c] - high[c]) <= 1e-6 * (1 + fabs(high[c])));
            }
            check_table(table, bits, weight);

            /* Codes and outliers of pages of each head. */
            lm_kv_format f = { .name = "kvquant",
                               .bits = bits,
                               .axis = LM_KV_CHANNEL,
                               .levels = LM_KV_TABLE,
                               .zero = true,
                               .scale = LM_DTYPE_NONE,
                               .lower = lower,
                               .upper = upper,
                               .outliers = s ? T * D : 0,
                               .n_table = 1 << bits };
            memcpy(f.table, table, sizeof f.table);
            int64_t checked = 0, found = 0;
            for (int h = 0; h < HEADS; h++) {
                static uint64_t page[T * D * 4 / 8 + 4096];
                lm_kv_view v = { .f = &f, .T = T, .D = D, .kv = h, .data = (char *)page };
                memset(page, 0, sizeof page);
                assert_int_equal(lm_kv_page(&f, T, D, &v.at, &e), LM_OK);
                assert_true(v.at.all <= sizeof page);
                lm_kv_encode(&f, T, D, h, x + h * D, C, 0, T, NULL, page);
                lm_kv_decode(&f, T, D, h, page, 0, T, decoded, D);
                for (int64_t t = 0; t < T; t++)
                    for (int64_t d = 0; d < D; d++) {
                        int64_t i = t * C + h * D + d;
                        int c = code_of(table, 1 << bits, y_of[i]);
                        if (fabs(fabs(y_of[i]) - 1) < 1e-6)
                            continue; /* at a threshold, which is rounded to F32 */
                        if (outlier[i]) {
                            found++;
                            assert_true(decoded[t * D + d] == (float)(_Float16)x[i]);
                        } else if (c >= 0) {
                            checked++;
                            assert_int_equal(lm_kv_get_code(&v, t, d), c);
                        }
                    }
            }
            assert_true(checked > T * C * 9 / 10);
            assert_true(s ? found > 0 : !found);
        }
}

static void values(void **state)
{
    (void)state;
    for (int bits = 2; bits <= 4; bits++)
        for (int s = 0; s < 3; s++) {
            lm_kvquant_opts o = { .bits = bits, .outliers = shares[s] };
            const float *weight = s == 1 ? w : NULL;
            float table[32], range[2 * N], work[C], decoded[T * D];
            double low[N], high[N];
            lm_err e = { 0 };
            draw_numbers((uint64_t)(bits * 20 + s));
            assert_int_equal(kvquant_values(&o, x, weight, N, C, table, &e), LM_OK);
            normalise_values(1 - shares[s], low, high);
            for (int64_t t = 0; t < N; t++) {
                lm_kv_token_range(shares[s], x + t * C, C, range + 2 * t, work);
                assert_true((double)range[2 * t] == low[t]);
                assert_true((double)range[2 * t + 1] == high[t]);
            }
            check_table(table, bits, weight);

            lm_kv_format f = { .name = "kvquant",
                               .values = true,
                               .bits = bits,
                               .axis = LM_KV_TOKEN,
                               .levels = LM_KV_TABLE,
                               .zero = true,
                               .scale = LM_DTYPE_F32,
                               .outliers = s ? T * D : 0,
                               .n_table = 1 << bits };
            memcpy(f.table, table, sizeof f.table);
            int64_t checked = 0;
            for (int h = 0; h < HEADS; h++) {
                static uint64_t page[T * D * 4 / 8 + 4096];
                lm_kv_view v = { .f = &f, .T = T, .D = D, .kv = h, .data = (char *)page };
                memset(page, 0, sizeof page);
                assert_int_equal(lm_kv_page(&f, T, D, &v.at, &e), LM_OK);
                assert_true(v.at.all <= sizeof page);
                lm_kv_encode(&f, T, D, h, x + h * D, C, 0, T, range, page);
                lm_kv_decode(&f, T, D, h, page, 0, T, decoded, D);
                for (int64_t t = 0; t < T; t++)
                    for (int64_t d = 0; d < D; d++) {
                        int64_t i = t * C + h * D + d;
                        int c = code_of(table, 1 << bits, y_of[i]);
                        if (outlier[i])
                            assert_true(decoded[t * D + d] == (float)(_Float16)x[i]);
                        else if (c >= 0)
                            assert_int_equal(lm_kv_get_code(&v, t, d), c);
                        checked += !outlier[i] && c >= 0;
                    }
            }
            assert_true(checked > T * C * 8 / 10);
        }
}

/* The table of "Q-Norm": c s1 / s2 + (m1 - m2 s1 / s2), moments of the numbers and of their levels. */
static void moments(void **state)
{
    lm_kvquant_opts o = { .bits = 2, .outliers = 0.01 };
    static float lower[C], upper[C];
    float table[32], moved[32];
    double low[C], high[C], n = 0, m[2] = { 0 }, q[2] = { 0 };
    lm_err e = { 0 };
    (void)state;
    draw_numbers(77);
    assert_int_equal(kvquant_keys(&o, x, w, N, C, lower, upper, table, &e), LM_OK);
    o.moments = true;
    assert_int_equal(kvquant_keys(&o, x, w, N, C, lower, upper, moved, &e), LM_OK);
    normalise_keys(0.99, low, high);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < N * C; i++) {
            double z[2] = { y_of[i], (double)table[0] };
            if (outlier[i])
                continue;
            for (int g = 1; g < 4; g++)
                z[1] = fabs(y_of[i] - (double)table[g]) < fabs(y_of[i] - z[1]) ? (double)table[g]
                                                                               : z[1];
            for (int k = 0; k < 2; k++)
                *(pass ? &q[k] : &m[k]) += pass ? (z[k] - m[k] / n) * (z[k] - m[k] / n) : z[k];
            n += pass == 0;
        }
    double s = sqrt(q[0] / q[1]);
    assert_true(s > 1); /* levels lie within the numbers */
    for (int g = 0; g < 4; g++)
        assert_true(fabs((double)moved[g] - ((double)table[g] * s + m[0] / n - m[1] / n * s)) <
                    1e-4);
}

static void edges(void **state)
{
    lm_kvquant_opts o = { .bits = 3, .outliers = 0.02 };
    static float lower[C], upper[C];
    float table[32], range[2], work[8], row[8] = { 5, 5, 5, 5, 5, 5, 5, 5 };
    lm_err e = { 0 };
    (void)state;
    lm_kv_token_range(0.1, row, 8, range, work); /* equal numbers */
    assert_true(range[0] == 5 && range[1] == 5);
    /* Numbers at the thresholds, here 0 and 9, are outliers. */
    static const float ties[8] = { 9, 0, 1, 0, 3, 2, 0, 9 };
    lm_kv_token_range(0.1, ties, 8, range, work);
    assert_true(range[0] == 1 && range[1] == 3);
    row[3] = NAN;
    row[0] = INFINITY;
    lm_kv_token_range(0, row, 8, range, work);
    assert_true(range[0] == 5 && range[1] == 5);
    lm_kv_token_range(0.1, row, 1, range, work);
    assert_true(range[0] == 0 && range[1] == 0);

    draw_numbers(5);
    x[3 * C + 7] = NAN;
    assert_int_equal(kvquant_keys(&o, x, NULL, N, C, lower, upper, table, &e), LM_ENUMERIC);
    assert_string_equal(e.what, "token 3, channel 7: nan with the weight 1");
    e = (lm_err){ 0 };
    draw_numbers(5);
    w[9] = -1;
    assert_int_equal(kvquant_values(&o, x, w, N, C, table, &e), LM_ENUMERIC);
    e = (lm_err){ 0 };
    memset(w, 0, sizeof w);
    assert_int_equal(kvquant_values(&o, x, w, N, C, table, &e), LM_ENUMERIC);
    e = (lm_err){ 0 };
    assert_int_equal(kvquant_keys(&o, x, NULL, 0, C, lower, upper, table, &e), LM_EUSAGE);
    /* One token: each channel has one number. */
    e = (lm_err){ 0 };
    assert_int_equal(kvquant_keys(&o, x, NULL, 1, C, lower, upper, table, &e), LM_ENUMERIC);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys),
        cmocka_unit_test(values),
        cmocka_unit_test(moments),
        cmocka_unit_test(edges),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
