/* SPDX-License-Identifier: Apache-2.0 */
/* select.h -- an element of a list by its rank, without sorting the list. */
#ifndef LM_NUMERIC_SELECT_H
#define LM_NUMERIC_SELECT_H

#include <stdint.h>

/* Element k of x[from, n) as if sorted, from <= k < n; elements before it are not larger, those behind it not smaller.
 * There are no NaN. */
float lm_select_nth(float *x, int64_t from, int64_t n, int64_t k);

#endif
