/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant.c -- ranges and levels of KVQuant. */
#include "kv/kvquant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kv/kmeans.h"
#include "numeric/kv_format.h"

static lm_code check_numbers(const float *x, const float *w, int64_t n, int64_t C, lm_err *e)
{
    for (int64_t i = 0; i < n * C; i++)
        if (!isfinite(x[i]) || (w && !(w[i] >= 0 && isfinite(w[i]))))
            return lm_fail(e, LM_ENUMERIC, "kvquant", NULL,
                           "token %lld, channel %lld: %g with the weight %g", (long long)(i / C),
                           (long long)(i % C), (double)x[i], w ? (double)w[i] : 1.0);
    return LM_OK;
}

/* ---- ranges ---- */

/* The percentiles of a channel are among its largest numbers, and among the largest of their negatives. */
struct lm_kvquant_ranges {
    double outliers;
    int64_t n, C, seen, most;
    float *heap; /* [C][2][most]: the least of each is its first */
};

/* Numbers of one side that the percentile at a share of outliers / 2 from its end lies between. */
static int64_t kept_of(double outliers, int64_t n)
{
    int64_t low = (int64_t)(outliers / 2 * (double)(n - 1)) + 2;
    int64_t high = n - (int64_t)((1 - outliers / 2) * (double)(n - 1));
    int64_t most = low > high ? low : high;
    return most < n ? most : n;
}

double lm_kvquant_ranges_bytes(double outliers, int64_t n, int64_t C)
{
    return 2.0 * (double)C * (double)kept_of(outliers, n) * (double)sizeof(float);
}

lm_code lm_kvquant_ranges_new(double outliers, int64_t n, int64_t C, lm_kvquant_ranges **out,
                              lm_err *e)
{
    lm_kvquant_ranges *r;
    *out = NULL;
    if (n < 1)
        return lm_fail(e, LM_EUSAGE, "kvquant", NULL, "there are no tokens to calibrate with");
    if (lm_alloc_n(&r, 1, sizeof *r, "ranges", e))
        return e->code;
    *r = (lm_kvquant_ranges){ .outliers = outliers, .n = n, .C = C, .most = kept_of(outliers, n) };
    if (lm_alloc_n(&r->heap, 2 * (size_t)C * (size_t)r->most, sizeof *r->heap, "ranges", e)) {
        lm_free(r);
        return e->code;
    }
    *out = r;
    return LM_OK;
}

void lm_kvquant_ranges_free(lm_kvquant_ranges *r)
{
    if (!r)
        return;
    lm_free(r->heap);
    lm_free(r);
}

/* Move the number at `at` of a heap of n down to its place. */
static void sift_down(float *heap, int64_t n, int64_t at)
{
    float x = heap[at];
    for (int64_t next; (next = 2 * at + 1) < n; at = next) {
        next += next + 1 < n && heap[next + 1] < heap[next];
        if (x <= heap[next])
            break;
        heap[at] = heap[next];
    }
    heap[at] = x;
}

/* The k-th number, from 0, is x; the heap keeps the largest `most` ones. */
static void push(float *heap, int64_t most, int64_t k, float x)
{
    if (k < most) {
        heap[k] = x;
        if (k + 1 == most)
            for (int64_t at = most / 2; at-- > 0;)
                sift_down(heap, most, at);
    } else if (x > heap[0]) {
        heap[0] = x;
        sift_down(heap, most, 0);
    }
}

lm_code lm_kvquant_ranges_add(lm_kvquant_ranges *r, const float *x, int64_t n, lm_err *e)
{
    if (n > r->n - r->seen)
        return lm_fail(e, LM_EUSAGE, "kvquant", NULL, "more tokens than %lld", (long long)r->n);
    if (check_numbers(x, NULL, n, r->C, e))
        return e->code;
    for (int64_t c = 0; c < r->C; c++) {
        float *high = r->heap + 2 * c * r->most, *low = high + r->most;
        for (int64_t t = 0; t < n; t++) {
            push(high, r->most, r->seen + t, x[t * r->C + c]);
            push(low, r->most, r->seen + t, -x[t * r->C + c]);
        }
    }
    r->seen += n;
    return LM_OK;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The quantile q of n numbers with linear interpolation.  sorted(i) is their i-th one: of a heap of the largest ones, with
 * factor 1, or of one of the largest negatives, with factor -1. */
static double quantile(const float *heap, int64_t most, int64_t n, double q, int factor)
{
    double at = q * (double)(n - 1), x[2];
    int64_t i = (int64_t)at;
    for (int k = 0; k < 2; k++) {
        int64_t j = i + k < n ? i + k : n - 1;
        x[k] = factor * (double)heap[factor > 0 ? j - (n - most) : most - 1 - j];
    }
    return x[0] + (x[1] - x[0]) * (at - (double)i);
}

lm_code lm_kvquant_ranges_end(lm_kvquant_ranges *r, float *lower, float *upper, lm_err *e)
{
    if (r->seen != r->n)
        return lm_fail(e, LM_EUSAGE, "kvquant", NULL, "%lld of %lld tokens", (long long)r->seen,
                       (long long)r->n);
    for (int64_t c = 0; c < r->C; c++) {
        float *high = r->heap + 2 * c * r->most, *low = high + r->most;
        qsort(high, (size_t)r->most, sizeof *high, by_value);
        qsort(low, (size_t)r->most, sizeof *low, by_value);
        lower[c] = (float)quantile(low, r->most, r->n, r->outliers / 2, -1);
        upper[c] = (float)quantile(high, r->most, r->n, 1 - r->outliers / 2, 1);
    }
    r->seen = 0;
    return LM_OK;
}

/* ---- levels ---- */

/* Numbers over their ranges: weighted for the levels, and counted for their moments. */
struct lm_kvquant_levels {
    lm_kvquant_opts o;
    int64_t C;
    lm_kmeans_histogram weighted, counted;
    float *work; /* [C] */
};

lm_code lm_kvquant_levels_new(const lm_kvquant_opts *o, int64_t C, lm_kvquant_levels **out,
                              lm_err *e)
{
    lm_kvquant_levels *l;
    *out = NULL;
    if (lm_alloc_n(&l, 1, sizeof *l, "a histogram", e))
        return e->code;
    l->o = *o;
    l->C = C;
    if (lm_alloc_n(&l->work, (size_t)C, sizeof *l->work, "a token's values", e)) {
        lm_free(l);
        return e->code;
    }
    *out = l;
    return LM_OK;
}

void lm_kvquant_levels_free(lm_kvquant_levels *l)
{
    if (!l)
        return;
    lm_free(l->work);
    lm_free(l);
}

/* One number x of the range [low, high]; outliers and ranges of one number do not count. */
static void add_number(lm_kvquant_levels *l, double x, double low, double high, double w)
{
    double half = (high - low) / 2, y = (x - (high + low) / 2) / half;
    if (!(half > 0) || !(fabs(y) <= 1))
        return;
    lm_kmeans_count(&l->weighted, y, w);
    if (l->o.moments)
        lm_kmeans_count(&l->counted, y, 1);
}

lm_code lm_kvquant_levels_add(lm_kvquant_levels *l, const float *x, const float *w, int64_t n,
                              const float *lower, const float *upper, lm_err *e)
{
    if (check_numbers(x, w, n, l->C, e))
        return e->code;
    for (int64_t t = 0; t < n; t++) {
        const float *row = x + t * l->C;
        float range[2] = { 0, 0 };
        if (!lower)
            lm_kv_token_range(l->o.outliers, row, l->C, range, l->work);
        for (int64_t c = 0; c < l->C; c++)
            add_number(l, (double)row[c], (double)(lower ? lower[c] : range[0]),
                       (double)(lower ? upper[c] : range[1]), w ? (double)w[t * l->C + c] : 1);
    }
    return LM_OK;
}

static double nearest(const double *level, int n, double y)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (fabs(y - level[i]) < fabs(y - level[best]))
            best = i;
    return level[best];
}

/* Move levels so that mean and deviation are those of the numbers. */
static void correct_moments(const lm_kmeans_histogram *h, double *level, int levels)
{
    double n = 0, mean[2] = { 0 }, square[2] = { 0 };
    for (int i = 0; i < LM_KMEANS_CELLS; i++) {
        const lm_kmeans_cell *c = &h->cell[i];
        double z = c->w > 0 ? nearest(level, levels, c->wx / c->w) : 0;
        n += c->w;
        mean[0] += c->wx;
        mean[1] += c->w * z;
        square[0] += c->wxx;
        square[1] += c->w * z * z;
    }
    double m1 = mean[0] / n, m2 = mean[1] / n;
    double s1 = sqrt(square[0] / n - m1 * m1), s2 = sqrt(square[1] / n - m2 * m2);
    if (!(s1 > 0) || !(s2 > 0))
        return;
    for (int i = 0; i < levels; i++)
        level[i] = level[i] * (s1 / s2) + (m1 - m2 * (s1 / s2));
}

lm_code lm_kvquant_levels_end(const lm_kvquant_levels *l, float *table, lm_err *e)
{
    double level[32];
    int levels = 1 << l->o.bits;
    if (lm_kmeans(l->weighted.cell, LM_KMEANS_CELLS, levels, level, NULL, e))
        return e->code;
    if (l->o.moments)
        correct_moments(&l->counted, level, levels);
    for (int i = 0; i < levels; i++) {
        table[i] = (float)level[i];
        if (i && !(table[i] > table[i - 1])) /* equal when rounded */
            table[i] = nextafterf(table[i - 1], INFINITY);
    }
    return LM_OK;
}
