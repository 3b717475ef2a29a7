/* SPDX-License-Identifier: Apache-2.0 */
/* finite.h -- finds the first number of an array that a merge cannot use.  Private to lib/merge. */
#ifndef LM_MERGE_FINITE_H
#define LM_MERGE_FINITE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/par.h"
#include "numeric/dtype.h"

/* The least index of a NaN or an infinity among the n numbers at x, at any address, or, with
 * `negative`, of a number below zero; -1: none.  F8E4M3 has no infinity: its NaN is found.  Integer
 * types have none. */
int64_t lm_merge_first_bad(lm_dtype d, const void *x, int64_t n, bool negative, lm_par *par);

#endif
