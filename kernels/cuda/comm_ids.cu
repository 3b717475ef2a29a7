/* SPDX-License-Identifier: Apache-2.0 */
/* comm_ids.cu -- ids of a whole table as rows of a rank's part of it (part_ids of kernels/comm.h). */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/cuda/comm.h"
}

static const int threads = 256;

__global__ void part_ids_kernel(const int32_t *id, int64_t n, int64_t first, int64_t count,
                                int32_t *to, float *real)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < n; i += global_threads()) {
        const int32_t x = id[i];
        const bool here = x >= first && x - first < count;
        if (real)
            real[i] = x >= 0;
        to[i] = x < 0 ? x : (int32_t)(here ? x - first : count);
    }
}

void lm_cuda_part_ids(const int32_t *id, int64_t n, int64_t first, int64_t count, int32_t *to,
                      float *real, const lm_stream *s)
{
    if (n)
        LM_LAUNCH(part_ids_kernel, grid_for(n, threads, s), threads, 0, s, id, n, first, count, to,
                  real);
}
