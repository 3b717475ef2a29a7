/* SPDX-License-Identifier: Apache-2.0 */
/* choose.h -- forms of many caches within a budget of bytes.  Private to lib/kv. */
#ifndef LM_KV_CHOOSE_H
#define LM_KV_CHOOSE_H

#include <stdint.h>

#include "base/err.h"

/* One form of one cache: its bytes, and the error that it makes.  bytes infinite: not possible. */
typedef struct {
    double bytes, error;
} lm_kv_choice;

/* One of the m offers [n,m] of each of n caches into out [n], so that their bytes are at most
 * `limit`.
 *
 * Each cache begins with its cheapest offer (of equal ones that of the least error).  Then, as long
 * as one fits, the exchange is made that saves most error per byte, of equal ones that of the first
 * cache and the first offer; exchanges that save error without bytes come first.  Fails: LM_EUSAGE
 * when the cheapest offers exceed the limit, or a cache has no possible offer. */
lm_code lm_kv_choose(const lm_kv_choice *offer, int64_t n, int m, double limit, int *out,
                     lm_err *e);

#endif
