/* SPDX-License-Identifier: Apache-2.0 */
/* call.h -- how long one call of a kernel takes, scratch memory provided. */
#ifndef LM_BENCH_CALL_H
#define LM_BENCH_CALL_H

#include "base/clock.h"
#include "base/mem.h"
#include "kernels/kernel.h"
#include "tests/bench/ceilings.h"

/* Set *out to the median seconds of `rounds` calls (at most 15); a first one warms up. */
static inline lm_code call_seconds(const lm_kernel *k, lm_call *c, int rounds, double *out,
                                   lm_err *e)
{
    double t[15];
    size_t work = k->work ? k->work(c, lm_par_threads(c->par)) : 0;
    if (lm_block_alloc(&c->work, work + 64, "bench scratch", e))
        return e->code;
    for (int i = -1; i < rounds; i++) {
        double from = lm_now();
        k->run(c);
        if (i >= 0)
            t[i] = lm_now() - from;
    }
    lm_block_free(c->work, work + 64);
    *out = lm_median(t, rounds);
    return LM_OK;
}

#endif
