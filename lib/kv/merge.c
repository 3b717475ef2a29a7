/* SPDX-License-Identifier: Apache-2.0 */
/* merge.c -- merging of neighbours with similar keys. */
#include "kv/merge.h"

#include <math.h>
#include <stdlib.h>

/* The cosine of two rows; 0 where one is zero or not finite. */
static double cosine(const float *a, const float *b, int64_t D)
{
    double ab = 0, aa = 0, bb = 0;
    for (int64_t d = 0; d < D; d++) {
        ab += (double)a[d] * (double)b[d];
        aa += (double)a[d] * (double)a[d];
        bb += (double)b[d] * (double)b[d];
    }
    double c = ab / sqrt(aa * bb);
    return isfinite(c) ? c : 0;
}

/* The most similar first, of equal ones the first. */
static int by_similarity(const void *a, const void *b)
{
    const lm_kv_joint *x = a, *y = b;
    return x->similarity != y->similarity
               ? (x->similarity < y->similarity) - (x->similarity > y->similarity)
               : (x->at > y->at) - (x->at < y->at);
}

/* Mark the tokens that stay alone. */
static void mark_alone(const lm_kv_policy *p, int64_t n, const float *mass, bool *keep,
                       double *work)
{
    int64_t old = n > p->window ? n - p->window : 0;
    int64_t heavy = (int64_t)ceil(p->heavy * (double)old);
    for (int64_t i = 0; i < n; i++) {
        keep[i] = i >= old;
        work[i] = (double)mass[i];
    }
    lm_kv_mark_largest(work, old, heavy, keep, work + n);
}

int64_t lm_kv_merge_runs(const lm_kv_policy *p, int64_t n, int64_t D, const float *key,
                         int64_t pitch, const float *mass, int32_t *run, lm_kv_joint *joint,
                         bool *keep, double *work)
{
    int64_t budget = (int64_t)(p->keep * (double)n), joints = 0, left = n;
    mark_alone(p, n, mass, keep, work);
    for (int64_t i = 0; i + 1 < n; i++) {
        if (keep[i] || keep[i + 1])
            continue;
        double c = cosine(key + i * pitch, key + (i + 1) * pitch, D);
        if (c >= p->threshold)
            joint[joints++] = (lm_kv_joint){ c, (int32_t)i };
    }
    qsort(joint, (size_t)joints, sizeof *joint, by_similarity);
    for (int64_t i = 0; i < n; i++) /* from here on: token i is joined with the one before it */
        keep[i] = false;
    for (int64_t k = 0; k < joints && left > budget; k++, left--)
        keep[joint[k].at + 1] = true;
    for (int64_t i = 0; i < n; i++)
        run[i] = keep[i] ? run[i - 1] : (int32_t)i;
    return left;
}

static double distance(const float *a, const float *b, int64_t D)
{
    double sum = 0;
    for (int64_t d = 0; d < D; d++)
        sum += ((double)a[d] - (double)b[d]) * ((double)a[d] - (double)b[d]);
    return sqrt(sum);
}

int64_t lm_kv_merge_weights(const lm_kv_policy *p, int64_t n, int64_t D, const float *key,
                            int64_t pitch, const float *mass, double *weight)
{
    int64_t pivot = 0;
    double mean = 0, sum = 0;
    for (int64_t i = 1; i < n; i++)
        if (mass[i] > mass[pivot] || (isnan(mass[pivot]) && !isnan(mass[i])))
            pivot = i;
    for (int64_t i = 0; i < n; i++) {
        weight[i] = distance(key + i * pitch, key + pivot * pitch, D);
        mean += n > 1 ? weight[i] / (double)(n - 1) : 0;
    }
    for (int64_t i = 0; i < n; i++) {
        if (p->halves)
            weight[i] = i == pivot ? (double)(n + 1) / 2 : 0.5;
        else
            weight[i] = mean > 0 ? exp(-weight[i] * weight[i] / (2 * mean * mean)) : 1;
        sum += weight[i];
    }
    for (int64_t i = 0; i < n; i++)
        weight[i] /= sum;
    return pivot;
}

void lm_kv_merge_rows(int64_t n, int64_t D, const float *x, int64_t pitch, const double *weight,
                      float *y)
{
    for (int64_t d = 0; d < D; d++) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += weight[i] * (double)x[i * pitch + d];
        y[d] = (float)sum;
    }
}
