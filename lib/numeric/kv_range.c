/* SPDX-License-Identifier: Apache-2.0 */
/* kv_range.c -- the range of a token's numbers without outliers, by selection. */
#include <math.h>

#include "numeric/kv_format.h"
#include "numeric/select.h"

/* The quantile q, with linear interpolation. */
static double quantile(float *x, int64_t n, double q)
{
    double at = q * (double)(n - 1);
    int64_t i = (int64_t)at;
    double low = (double)lm_select_nth(x, 0, n, i), high = low;
    if (i + 1 < n) {
        high = (double)x[i + 1];
        for (int64_t k = i + 2; k < n; k++)
            high = fmin(high, (double)x[k]);
    }
    return low + (high - low) * (at - (double)i);
}

void lm_kv_token_range(double outliers, const float *x, int64_t n, float range[2], float *work)
{
    int64_t m = 0;
    float least = INFINITY, most = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(x[i]))
            work[m++] = x[i];
    range[0] = range[1] = 0;
    if (!m)
        return;
    double high = outliers > 0 ? quantile(work, m, 1 - outliers / 2) : (double)INFINITY;
    double low = outliers > 0 ? quantile(work, m, outliers / 2) : -(double)INFINITY;
    for (int64_t i = 0; i < m; i++)
        if ((double)work[i] > low && (double)work[i] < high) {
            least = fminf(least, work[i]);
            most = fmaxf(most, work[i]);
        }
    if (least > most) /* all are outliers, and the published code puts the median for them */
        least = most = lm_select_nth(work, 0, m, (m - 1) / 2);
    range[0] = least;
    range[1] = most;
}
