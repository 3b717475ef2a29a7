/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant.c -- ranges and levels of KVQuant. */
#include "kv/kvquant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kv/kmeans.h"
#include "numeric/kv_format.h"

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The quantile q of n sorted numbers, with linear interpolation. */
static double quantile(const float *sorted, int64_t n, double q)
{
    double at = q * (double)(n - 1);
    int64_t i = (int64_t)at;
    double low = (double)sorted[i], high = (double)sorted[i + 1 < n ? i + 1 : i];
    return low + (high - low) * (at - (double)i);
}

/* ---- levels ---- */

/* Numbers over their ranges, seen twice: counted, then compared with their levels. */
typedef struct {
    lm_kmeans_histogram *h;
    const double *level; /* NULL: count */
    int n_levels;
    double n, mean[2], square[2]; /* of numbers, of their levels */
} statistics;

static double nearest(const double *level, int n, double y)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (fabs(y - level[i]) < fabs(y - level[best]))
            best = i;
    return level[best];
}

/* One number x of the range [low, high]; outliers and ranges of one number do not count. */
static void add_number(statistics *s, double x, double low, double high, double w)
{
    double half = (high - low) / 2, y = (x - (high + low) / 2) / half;
    if (!(half > 0) || !(fabs(y) <= 1))
        return;
    if (!s->level) {
        lm_kmeans_count(s->h, y, w);
        return;
    }
    double z = nearest(s->level, s->n_levels, y);
    s->n++;
    s->mean[0] += y;
    s->mean[1] += z;
    s->square[0] += y * y;
    s->square[1] += z * z;
}

/* The rule that yields all numbers of a layer. */
typedef struct {
    const float *x, *w;
    int64_t n, C;
    const float *lower, *upper; /* of channels; NULL: of tokens */
    double outliers;
    float *work;
} numbers;

static void add_numbers(const numbers *m, statistics *s)
{
    for (int64_t t = 0; t < m->n; t++) {
        const float *row = m->x + t * m->C;
        float range[2] = { 0, 0 };
        if (!m->lower)
            lm_kv_token_range(m->outliers, row, m->C, range, m->work);
        for (int64_t c = 0; c < m->C; c++)
            add_number(s, (double)row[c], (double)(m->lower ? m->lower[c] : range[0]),
                       (double)(m->upper ? m->upper[c] : range[1]),
                       m->w ? (double)m->w[t * m->C + c] : 1);
    }
}

/* Move levels so that mean and deviation are those of the numbers. */
static void correct_moments(const statistics *s, double *level)
{
    double m1 = s->mean[0] / s->n, m2 = s->mean[1] / s->n;
    double s1 = sqrt(s->square[0] / s->n - m1 * m1), s2 = sqrt(s->square[1] / s->n - m2 * m2);
    if (!(s1 > 0) || !(s2 > 0))
        return;
    for (int i = 0; i < s->n_levels; i++)
        level[i] = level[i] * (s1 / s2) + (m1 - m2 * (s1 / s2));
}

static lm_code make_table(const lm_kvquant_opts *o, const numbers *m, float *table, lm_err *e)
{
    double level[32];
    statistics s = { .n_levels = 1 << o->bits };
    if (lm_alloc_n(&s.h, 1, sizeof *s.h, "a histogram", e))
        return e->code;
    add_numbers(m, &s);
    lm_code rc = lm_kmeans(s.h->cell, LM_KMEANS_CELLS, s.n_levels, level, NULL, e);
    lm_free(s.h);
    if (rc)
        return rc;
    if (o->moments) {
        s.level = level;
        add_numbers(m, &s);
        correct_moments(&s, level);
    }
    for (int i = 0; i < s.n_levels; i++) {
        table[i] = (float)level[i];
        if (i && !(table[i] > table[i - 1])) /* equal when rounded */
            table[i] = nextafterf(table[i - 1], INFINITY);
    }
    return LM_OK;
}

static lm_code check_numbers(const float *x, const float *w, int64_t n, int64_t C, lm_err *e)
{
    for (int64_t i = 0; i < n * C; i++)
        if (!isfinite(x[i]) || (w && !(w[i] >= 0 && isfinite(w[i]))))
            return lm_fail(e, LM_ENUMERIC, "kvquant", NULL,
                           "token %lld, channel %lld: %g with the weight %g", (long long)(i / C),
                           (long long)(i % C), (double)x[i], w ? (double)w[i] : 1.0);
    if (n < 1)
        return lm_fail(e, LM_EUSAGE, "kvquant", NULL, "there are no tokens to calibrate with");
    return LM_OK;
}

lm_code lm_kvquant_keys(const lm_kvquant_opts *o, const float *x, const float *w, int64_t n,
                        int64_t C, float *lower, float *upper, float *table, lm_err *e)
{
    float *column;
    if (check_numbers(x, w, n, C, e) ||
        lm_alloc_n(&column, (size_t)n, sizeof *column, "a channel's keys", e))
        return e->code;
    for (int64_t c = 0; c < C; c++) {
        for (int64_t t = 0; t < n; t++)
            column[t] = x[t * C + c];
        qsort(column, (size_t)n, sizeof *column, by_value);
        lower[c] = (float)quantile(column, n, o->outliers / 2);
        upper[c] = (float)quantile(column, n, 1 - o->outliers / 2);
    }
    lm_free(column);
    numbers m = { .x = x, .w = w, .n = n, .C = C, .lower = lower, .upper = upper };
    return make_table(o, &m, table, e);
}

lm_code lm_kvquant_values(const lm_kvquant_opts *o, const float *x, const float *w, int64_t n,
                          int64_t C, float *table, lm_err *e)
{
    numbers m = { .x = x, .w = w, .n = n, .C = C, .outliers = o->outliers };
    if (check_numbers(x, w, n, C, e) ||
        lm_alloc_n(&m.work, (size_t)C, sizeof *m.work, "a token's values", e))
        return e->code;
    lm_code rc = make_table(o, &m, table, e);
    lm_free(m.work);
    return rc;
}
