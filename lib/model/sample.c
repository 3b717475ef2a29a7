/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c -- counted draws. */
#include "model/sample.h"

#include "base/rng.h"

double lm_sample_draw(uint64_t seed, int64_t prompt, int64_t sample, int64_t position)
{
    return lm_sample_draw_for("sample", seed, prompt, sample, position);
}

double lm_sample_draw_for(const char *purpose, uint64_t seed, int64_t prompt, int64_t sample,
                          int64_t position)
{
    return lm_rng_uniform(lm_rng_make(seed, purpose, (uint64_t)prompt),
                          (uint64_t)sample << 32 | (uint32_t)position);
}
