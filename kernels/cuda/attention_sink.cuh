/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink.cuh -- how a sink (kernels/attention.h) ends the softmax of a row: it is added to the finished maximum
 * and sum, so that loops over keys do not know of it. */
#ifndef LM_KERNELS_CUDA_ATTENTION_SINK_CUH
#define LM_KERNELS_CUDA_ATTENTION_SINK_CUH

#include "kernels/cuda/device.cuh"

/* The maximum and the sum of exp(score - top) become those with the sink of head h.  Returns the factor that the sums of
 * values need beside 1 / all; 0 of a row that sees nothing.  sinks null: nothing happens, and the factor is 1. */
__device__ inline float add_sink(const float *sinks, int64_t h, float &top, float &all)
{
    if (!sinks)
        return 1;
    const float s = sinks[h], both = fmaxf(top, s);
    if (both == -INFINITY)
        return 0;
    const float fade = all > 0 ? expf(top - both) : 0;
    all = all * fade + expf(s - both);
    top = both;
    return fade;
}

/* The same of a maximum in log2 units: sums are of exp2(score * log2(e) - top). */
__device__ inline float add_sink2(const float *sinks, int64_t h, float &top, float &all)
{
    if (!sinks)
        return 1;
    const float s = sinks[h] * 1.44269504f, both = fmaxf(top, s);
    if (both == -INFINITY)
        return 0;
    const float fade = all > 0 ? exp2f(top - both) : 0;
    all = all * fade + exp2f(s - both);
    top = both;
    return fade;
}

#endif
