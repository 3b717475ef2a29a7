/* SPDX-License-Identifier: Apache-2.0 */
/* invert.h -- the inverse of one matrix in double.  Private to kernels/cpu. */
#ifndef LM_KERNELS_CPU_INVERT_H
#define LM_KERNELS_CPU_INVERT_H

#include <math.h>
#include <stdint.h>

/* Row `to` of x and y minus `factor` times row `from`. */
static inline void lm_invert_subtract(double *x, double *y, int64_t n, int64_t to, int64_t from,
                                      int64_t first, double factor)
{
    for (int64_t j = first; j < n; j++)
        x[to * n + j] -= factor * x[from * n + j];
    for (int64_t j = 0; j < n; j++)
        y[to * n + j] -= factor * y[from * n + j];
}

static inline void lm_invert_swap(double *x, double *y, int64_t n, int64_t a, int64_t b)
{
    for (int64_t j = 0; a != b && j < n; j++) {
        double kept = x[a * n + j], kept_y = y[a * n + j];
        x[a * n + j] = x[b * n + j];
        y[a * n + j] = y[b * n + j];
        x[b * n + j] = kept;
        y[b * n + j] = kept_y;
    }
}

/* y [n,n] = x^-1 by Gauss and Jordan with partial pivoting; x is destroyed.  Singular or not finite: NaN. */
static inline void lm_invert(double *x, double *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n * n; i++) {
        y[i] = i % (n + 1) == 0;
        sum += x[i] - x[i];
    }
    for (int64_t k = 0; k < n; k++) {
        int64_t pivot = k;
        for (int64_t i = k + 1; i < n; i++)
            if (fabs(x[i * n + k]) > fabs(x[pivot * n + k]))
                pivot = i;
        if (!(fabs(x[pivot * n + k]) > 0))
            sum = NAN;
        lm_invert_swap(x, y, n, k, pivot);
        double scale = 1 / x[k * n + k];
        for (int64_t j = k; j < n; j++)
            x[k * n + j] *= scale;
        for (int64_t j = 0; j < n; j++)
            y[k * n + j] *= scale;
        for (int64_t i = 0; i < n; i++)
            if (i != k)
                lm_invert_subtract(x, y, n, i, k, k, x[i * n + k]);
    }
    for (int64_t i = 0; !(sum == 0) && i < n * n; i++)
        y[i] = NAN;
}

#endif
