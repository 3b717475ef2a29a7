/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h -- the draws of sampling: counted, so that each depends only on the seed, the numbers of
 * prompt and sample and the position.  kernels/sample.h uses them.  Private to lib/model. */
#ifndef LM_MODEL_SAMPLE_H
#define LM_MODEL_SAMPLE_H

#include <stdint.h>

/* In [0,1): for new token `position` (below 2^32) of sample `sample` (below 2^32) of prompt `prompt`. */
double lm_sample_draw(uint64_t seed, int64_t prompt, int64_t sample, int64_t position);
/* The same for another purpose than "sample". */
double lm_sample_draw_for(const char *purpose, uint64_t seed, int64_t prompt, int64_t sample,
                          int64_t position);

#endif
