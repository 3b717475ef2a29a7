/* SPDX-License-Identifier: Apache-2.0 */
/* example.c -- operands that examples of several operators share. */
#include "op/example.h"

void lm_example_documents(lm_rng r, int64_t batch, int64_t seq, uint64_t mean, int32_t *lo,
                          int32_t *hi)
{
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0, start = 0; t < seq; t++) {
            uint64_t next = (UINT64_C(1) << 33) + (uint64_t)(b * seq + t + 1);
            bool ends = t + 1 == seq || lm_rng_below(r, next, mean) == 0;
            if (lo)
                lo[b * seq + t] = (int32_t)start;
            for (int64_t i = start; hi && ends && i <= t; i++)
                hi[b * seq + i] = (int32_t)(t + 1);
            start = ends ? t + 1 : start;
        }
}
