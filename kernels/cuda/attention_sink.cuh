/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink.cuh -- what ends a row of attention (kernels/attention.h), so that loops over keys do not know of it: a
 * sink, which is added to the finished maximum and sum, and the division, or none with `undivided`. */
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

/* The factor of the sums of values of a row, and its lse. */
__device__ inline float row_factor(bool undivided, float fade, float top, float all)
{
    return undivided ? expf(top) : fade / all;
}
__device__ inline float row_lse(bool undivided, float top, float all)
{
    return undivided ? 0.0f : top + logf(all);
}

/* The same of a maximum in log2 units. */
__device__ inline float row_factor2(bool undivided, float fade, float top, float all)
{
    return undivided ? exp2f(top) : fade / all;
}
__device__ inline float row_lse2(bool undivided, float top, float all)
{
    return undivided ? 0.0f : top * 0.69314718f + logf(all);
}

#endif
