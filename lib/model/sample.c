/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c -- counted draws. */
#include "model/sample.h"

#include "base/rng.h"

double lm_sample_draw(uint64_t seed, int64_t prompt, int64_t sample, int64_t position)
{
    return lm_rng_uniform(lm_rng_make(seed, "sample", (uint64_t)prompt),
                          (uint64_t)sample << 32 | (uint32_t)position);
}
