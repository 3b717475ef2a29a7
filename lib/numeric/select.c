/* SPDX-License-Identifier: Apache-2.0 */
/* select.c -- C. A. R. Hoare, Algorithm 65: Find. */
#include "numeric/select.h"

float lm_select_nth(float *x, int64_t from, int64_t n, int64_t k)
{
    int64_t lo = from, hi = n - 1;
    while (lo < hi) {
        float pivot = x[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (x[i] < pivot)
                i++;
            while (pivot < x[j])
                j--;
            if (i > j)
                break;
            float t = x[i];
            x[i++] = x[j];
            x[j--] = t;
        }
        if (k <= j)
            hi = j;
        else if (k >= i)
            lo = i;
        else
            break;
    }
    return x[k];
}
