/* SPDX-License-Identifier: Apache-2.0 */
/* device.cuh -- used by every .cu file: launches, element types, packed access, sums.
 *
 * The same source is compiled twice: by nvcc for GPUs, and as C++ of the host with -DLM_EMU against
 * tests/emu, where a grid runs block by block on the CPU.  So a kernel uses only features of both:
 * grid and block indices, shared memory, __syncthreads, __syncwarp, shuffles and votes with a full
 * mask, atomics, and the arithmetic of the C library (fmaf, expf, rsqrtf, ...).  GPU-only code is
 * inside #ifndef LM_EMU, with a plain form beside it.
 *
 * Rules: indices of elements are int64_t (a tensor may have more than 2^31); grids are bounded and
 * kernels stride over the rest (grid_for); no result depends on the order of blocks, so none of
 * them adds by atomics unless !stream->deterministic; sums go in F32 or wider, in a fixed order.  A
 * launcher never allocates and never waits. */
#ifndef LM_KERNELS_CUDA_DEVICE_CUH
#define LM_KERNELS_CUDA_DEVICE_CUH

#include <math.h>
#include <stdint.h>

#ifdef LM_EMU
#include <device.h> /* tests/emu */
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

/* LM_LAUNCH((kernel<T, 4>), grid, block, bytes of dynamic shared memory, stream, arguments...) */
#define LM_LAUNCH(kernel, grid, block, bytes, s, ...)                      \
    do {                                                                   \
        auto launched_ = kernel;                                           \
        launched_<<<(grid), (block), (bytes), (s)->handle>>>(__VA_ARGS__); \
    } while (0)
/* Let a kernel have more than 48 KiB of dynamic shared memory; before its launch. */
#define LM_ALLOW_SHARED(kernel, bytes)                                                        \
    do {                                                                                      \
        auto allowed_ = kernel;                                                               \
        cudaFuncSetAttribute(allowed_, cudaFuncAttributeMaxDynamicSharedMemorySize, (bytes)); \
    } while (0)
/* The block's dynamic shared memory, as `type *name`. */
#define LM_DYNAMIC_SHARED(type, name)                                \
    extern __shared__ __align__(16) unsigned char dynamic_shared_[]; \
    type *name = reinterpret_cast<type *>(dynamic_shared_)
#endif

extern "C" {
#include "kernels/cuda/stream.h"
}

/* ---- element types: bits in memory, float in registers ---- */

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

#ifdef LM_EMU
__device__ inline float to_float(bf16 x)
{
    return lm_bf16_to_f32(x.bits);
}
__device__ inline float to_float(f16 x)
{
    return lm_emu_half(x.bits);
}
#else
__device__ inline float to_float(bf16 x)
{
    return __uint_as_float((uint32_t)x.bits << 16);
}
__device__ inline float to_float(f16 x)
{
    return __half2float(__ushort_as_half(x.bits));
}
#endif
__device__ inline float to_float(float x)
{
    return x;
}

/* Rounded to nearest, ties to even. */
template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x)
{
    return x;
}
#ifdef LM_EMU
template <> __device__ inline bf16 from_float<bf16>(float x)
{
    return bf16{ lm_f32_to_bf16(x) };
}
template <> __device__ inline f16 from_float<f16>(float x)
{
    return f16{ lm_f32_to_f16(x) };
}
#else
template <> __device__ inline bf16 from_float<bf16>(float x)
{
    return bf16{ __bfloat16_as_ushort(__float2bfloat16_rn(x)) };
}
template <> __device__ inline f16 from_float<f16>(float x)
{
    return f16{ __half_as_ushort(__float2half_rn(x)) };
}
#endif

/* x as it would be read back from memory of type T. */
template <class T> __device__ inline float rounded(float x)
{
    return to_float(from_float<T>(x));
}

/* ---- packed access: N elements in one load or store of at most 16 bytes ---- */

template <class T, int N> struct alignas(sizeof(T) * N) pack {
    T v[N];
};
/* As many elements as 16 bytes hold. */
template <class T> struct wide {
    static const int n = 16 / (int)sizeof(T);
};
/* Whether pointers and a row width in elements let rows be read in packs of n. */
template <class T>
inline bool packs(int n, int64_t width, const void *a, const void *b = nullptr,
                  const void *c = nullptr, const void *d = nullptr)
{
    uintptr_t all = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d;
    return width % n == 0 && all % (sizeof(T) * (size_t)n) == 0;
}

/* ---- operands, on the host ---- */

template <class T> inline T *in_ptr(const lm_call *c, int i)
{
    return i < c->n_in ? (T *)c->in[i].data : nullptr;
}
template <class T> inline T *out_ptr(const lm_call *c, int i)
{
    return i < c->n_out ? (T *)c->out[i].data : nullptr;
}
inline int64_t width_of(const lm_tensor *t)
{
    return t->ndim ? t->dim[t->ndim - 1] : 1;
}
inline int64_t rows_of(const lm_tensor *t)
{
    int64_t w = width_of(t);
    return w ? lm_tensor_count(t) / w : 0;
}
/* Whether a weight gradient is replaced (true) or added to: a choice of the launcher, so a recording
 * holds for the first micro-batch or for the others. */
inline bool overwrites(const lm_call *c, lm_acc acc)
{
    return !lm_acc_adds(acc, c->step);
}

/* Blocks for n pieces of work of `per_block` each, bounded: kernels stride over the rest. */
inline unsigned grid_for(int64_t n, int64_t per_block, const lm_stream *s, int waves = 8)
{
    int64_t blocks = (n + per_block - 1) / per_block, most = (int64_t)s->sms * waves * 4;
    return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/* ---- indices and sums, on the device ---- */

__device__ inline int64_t global_thread(void)
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ inline int64_t global_threads(void)
{
    return (int64_t)gridDim.x * blockDim.x;
}

/* Over the 32 lanes of a warp, by a butterfly: every lane gets the same bits. */
template <class F> __device__ inline F warp_sum(F x)
{
    for (int o = 16; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}
__device__ inline float warp_max(float x)
{
    for (int o = 16; o > 0; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* Over a block whose threads are a multiple of 32 and at most 1024; every thread gets the same
 * bits.  All threads must call it. */
template <class F> __device__ inline F block_sum(F x)
{
    __shared__ F part[32];
    unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned warps = blockDim.x * blockDim.y * blockDim.z / 32;
    x = warp_sum(x);
    __syncthreads(); /* part may still be read by an earlier sum */
    if (t % 32 == 0)
        part[t / 32] = x;
    __syncthreads();
    return warp_sum(t % 32 < warps ? part[t % 32] : F(0));
}
__device__ inline float block_max(float x)
{
    __shared__ float part[32];
    unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned warps = blockDim.x * blockDim.y * blockDim.z / 32;
    x = warp_max(x);
    __syncthreads();
    if (t % 32 == 0)
        part[t / 32] = x;
    __syncthreads();
    return warp_max(t % 32 < warps ? part[t % 32] : -INFINITY);
}

/* ---- tables ---- */

/* The rows of a kernel that is a template over the type of activations. */
#define LM_CUDA_ROWS(op, fn, work)                            \
    { op, LM_DTYPE_F32, LM_CUDA_PLAIN, fn<float>, work },     \
        { op, LM_DTYPE_BF16, LM_CUDA_PLAIN, fn<bf16>, work }, \
    {                                                         \
        op, LM_DTYPE_F16, LM_CUDA_PLAIN, fn<f16>, work        \
    }
#define LM_CUDA_END                                 \
    {                                               \
        nullptr, LM_DTYPE_NONE, 0, nullptr, nullptr \
    }

#endif
