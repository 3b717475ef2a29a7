/* SPDX-License-Identifier: Apache-2.0 */
/* gated_norm.cu -- the norm of heads times SiLU of a gate (kernels/gated_norm.h): a warp a head; gradients of weights by
 * parts of PART heads, which are then added in order. */
#include "kernels/cuda/sigmoid.cuh"

extern "C" {
#include "kernels/gated_norm.h"
}

enum { BLOCK = 256, WARPS = BLOCK / 32, PART = 512 };

template <class T> struct gated_args {
    const T *x, *z, *dy;
    const float *w, *given; /* given: stat of the forward */
    T *y, *dx, *dz;
    float *stat, *dw, *part;
    int64_t all, d; /* heads of all rows, of d numbers */
    float eps;
    bool fresh;
};

template <class T> static __global__ void __launch_bounds__(BLOCK) norm_kernel(gated_args<T> a)
{
    int64_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + warp; i < a.all;
         i += (int64_t)gridDim.x * WARPS) {
        float sum = 0;
        for (int64_t e = lane; e < a.d; e += 32)
            sum = fmaf(to_float(a.x[i * a.d + e]), to_float(a.x[i * a.d + e]), sum);
        float r = 1 / sqrtf(warp_sum(sum) / (float)a.d + a.eps);
        for (int64_t e = lane; e < a.d; e += 32) {
            float z = to_float(a.z[i * a.d + e]), xh = rounded<T>(to_float(a.x[i * a.d + e]) * r);
            a.y[i * a.d + e] = from_float<T>(xh * a.w[e] * z * sigmoid_of(z));
        }
        if (a.stat && lane == 0)
            a.stat[i] = r;
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dx_kernel(gated_args<T> a)
{
    int64_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + warp; i < a.all;
         i += (int64_t)gridDim.x * WARPS) {
        float sum = 0, r = a.given[i];
        for (int64_t e = lane; e < a.d; e += 32) {
            float z = to_float(a.z[i * a.d + e]), d = to_float(a.dy[i * a.d + e]) * a.w[e];
            sum = fmaf(d * z * sigmoid_of(z), to_float(a.x[i * a.d + e]), sum);
        }
        float along = warp_sum(sum) * r / (float)a.d;
        for (int64_t e = lane; e < a.d; e += 32) {
            float z = to_float(a.z[i * a.d + e]), d = to_float(a.dy[i * a.d + e]) * a.w[e];
            float p = sigmoid_of(z), xh = to_float(a.x[i * a.d + e]) * r;
            if (a.dx)
                a.dx[i * a.d + e] = from_float<T>(r * fmaf(-xh, along, d * z * p));
            if (a.dz)
                a.dz[i * a.d + e] = from_float<T>(d * rounded<T>(xh) * silu_slope(z, p));
        }
    }
}

/* A block a part. */
template <class T> static __global__ void __launch_bounds__(BLOCK) part_kernel(gated_args<T> a)
{
    for (int64_t k = blockIdx.x; k * PART < a.all; k += gridDim.x)
        for (int64_t e = threadIdx.x; e < a.d; e += blockDim.x) {
            float sum = 0;
            for (int64_t i = k * PART; i < (k + 1) * PART && i < a.all; i++) {
                float z = to_float(a.z[i * a.d + e]);
                float xh = rounded<T>(to_float(a.x[i * a.d + e]) * a.given[i]);
                sum = fmaf(to_float(a.dy[i * a.d + e]) * z * sigmoid_of(z), xh, sum);
            }
            a.part[k * a.d + e] = sum;
        }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dw_kernel(gated_args<T> a)
{
    for (int64_t e = global_thread(); e < a.d; e += global_threads()) {
        float sum = a.fresh ? 0 : a.dw[e];
        for (int64_t k = 0; k * PART < a.all; k++)
            sum += a.part[k * a.d + e];
        a.dw[e] = sum;
    }
}

/* With operand x at `at`, behind which is z. */
template <class T> static gated_args<T> args_of(const lm_call *c, int at)
{
    const lm_gated_norm_attr *attr = (const lm_gated_norm_attr *)c->attr;
    gated_args<T> a = {};
    a.x = in_ptr<T>(c, at);
    a.z = in_ptr<T>(c, at + 1);
    a.all = c->in[at].dim[0] * attr->heads;
    a.d = attr->head_dim;
    a.eps = (float)attr->eps;
    a.fresh = overwrites(c, attr->acc);
    return a;
}

template <class T> static void gated_norm(const lm_call *c)
{
    gated_args<T> a = args_of<T>(c, 0);
    a.w = in_ptr<float>(c, 2);
    a.y = out_ptr<T>(c, 0);
    a.stat = out_ptr<float>(c, 1);
    LM_LAUNCH((norm_kernel<T>), grid_for(a.all, WARPS, c->stream), BLOCK, 0, c->stream, a);
}

template <class T> static void gated_norm_dx(const lm_call *c)
{
    gated_args<T> a = args_of<T>(c, 1);
    a.dy = in_ptr<T>(c, 0);
    a.w = in_ptr<float>(c, 3);
    a.given = in_ptr<float>(c, 4);
    a.dx = out_ptr<T>(c, 0);
    a.dz = out_ptr<T>(c, 1);
    LM_LAUNCH((dx_kernel<T>), grid_for(a.all, WARPS, c->stream), BLOCK, 0, c->stream, a);
}

template <class T> static void gated_norm_dw(const lm_call *c)
{
    gated_args<T> a = args_of<T>(c, 1);
    a.dy = in_ptr<T>(c, 0);
    a.given = in_ptr<float>(c, 3);
    a.dw = out_ptr<float>(c, 0);
    a.part = (float *)c->work;
    LM_LAUNCH((part_kernel<T>), grid_for(a.all, PART, c->stream), BLOCK, 0, c->stream, a);
    LM_LAUNCH((dw_kernel<T>), grid_for(a.d, BLOCK, c->stream), BLOCK, 0, c->stream, a);
}

static size_t gated_norm_dw_work(const lm_call *c, int)
{
    gated_args<float> a = args_of<float>(c, 1);
    return (size_t)((a.all + PART - 1) / PART * a.d) * sizeof(float);
}

extern "C" const lm_kernel lm_gated_norm_cuda_kernels[] = {
    LM_CUDA_ROWS("gated_norm", gated_norm, nullptr),
    LM_CUDA_ROWS("gated_norm_dx", gated_norm_dx, nullptr),
    LM_CUDA_ROWS("gated_norm_dw", gated_norm_dw, gated_norm_dw_work),
    LM_CUDA_END,
};
