/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink.cu -- attention_dsinks: a block for each head; the order of its sums follows from the shapes alone. */
#include "kernels/cuda/rows.cuh"

extern "C" {
#include "kernels/attention.h"
}

enum { THREADS = 256 };

template <class T>
static __global__ void __launch_bounds__(THREADS)
    sum_heads(int64_t batch, int64_t heads, int64_t seq, int64_t width, const T *dout, const T *o,
              const float *lse, const float *sinks, bool add, float *out)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t W = width / heads;
#pragma unroll 1
    for (int64_t h = blockIdx.x; h < heads; h += gridDim.x) {
        double sum = 0;
#pragma unroll 1
        for (int64_t i = (int)threadIdx.x / 32; i < batch * seq; i += THREADS / 32) {
            const int64_t at = i * width + h * W;
            float dot = 0;
            for (int64_t w = lane; w < W; w += 32)
                dot = fmaf(to_float(dout[at + w]), to_float(o[at + w]), dot);
            dot = warp_sum(dot);
            if (lane == 0)
                sum -= (double)(expf(sinks[h] - lse[(i / seq * heads + h) * seq + i % seq]) * dot);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0)
            out[h] = (float)(sum + (add ? (double)out[h] : 0));
    }
}

template <class T> static void attention_dsinks(const lm_call *c)
{
    const lm_attention_dsinks_attr *a = (const lm_attention_dsinks_attr *)c->attr;
    const lm_tensor *lse = &c->in[2];
    LM_LAUNCH((sum_heads<T>), grid_for(a->heads, 1, c->stream), THREADS, 0, c->stream, lse->dim[0],
              a->heads, lse->dim[2], c->in[0].dim[1], in_ptr<const T>(c, 0), in_ptr<const T>(c, 1),
              in_ptr<const float>(c, 2), in_ptr<const float>(c, 3), !overwrites(c, a->acc),
              out_ptr<float>(c, 0));
}

extern "C" const lm_kernel lm_attention_sink_cuda_kernels[] = {
    LM_CUDA_ROWS("attention_dsinks", attention_dsinks, nullptr),
    LM_CUDA_END,
};
