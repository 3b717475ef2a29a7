/* SPDX-License-Identifier: Apache-2.0 */
/* selftest.cpp -- kernels for test_emu.c, in the language of device.h alone. */
#include "selftest.h"

#include "device.h"

struct stream {
    cudaStream_t handle;
};

__device__ inline int64_t thread_number(void)
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

/* ---- plain work ---- */

struct filling {
    float *y, value;
    int64_t n;
};
__global__ static void fill(filling f)
{
    int64_t i = thread_number();
    if (i < f.n)
        f.y[i] = f.value;
}
void emu_try_fill(float *y, float value, int64_t n, cudaStream_t handle)
{
    stream s = { handle };
    filling f = { y, value, n };
    LM_LAUNCH(fill, (unsigned)((n + 127) / 128), 128, 0, &s, f);
    f.value = -1; /* the launch has its own */
}

__global__ static void next(const float *__restrict__ x, float *__restrict__ y, int64_t n)
{
    for (int64_t i = thread_number(); i < n; i += (int64_t)gridDim.x * blockDim.x)
        y[i] = x[i] + 1;
}
void emu_try_next(const float *x, float *y, int64_t n, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(next, 2, 64, 0, &s, x, y, n);
}

/* ---- blocks ---- */

template <class T, int LANES> __device__ static T warp_total(T x)
{
    for (int o = LANES / 2; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}
template <class T> __global__ void __launch_bounds__(1024) sum(const T *x, T *y, int64_t n)
{
    __shared__ T part[32];
    T total = 0;
    for (int64_t i = thread_number(); i < n; i += (int64_t)gridDim.x * blockDim.x)
        total += x[i];
    total = warp_total<T, 32>(total);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x < 32) {
        total = warp_total<T, 32>(threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0);
        if (threadIdx.x == 0)
            y[blockIdx.x] = total;
    }
}
void emu_try_sum(const float *x, float *y, int64_t n, int blocks, int threads, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH((sum<float>), blocks, threads, 0, &s, x, y, n);
}

__global__ static void rotate(float *y, int rounds, int racy)
{
    LM_DYNAMIC_SHARED(float, seat);
    float mine = (float)threadIdx.x;
    for (int i = 0; i < rounds; i++) {
        seat[threadIdx.x] = mine;
        __syncthreads();
        mine = seat[(threadIdx.x + 1) % blockDim.x];
        if (!racy)
            __syncthreads();
    }
    y[threadIdx.x] = mine;
}
void emu_try_rotate(float *y, int threads, int rounds, int racy, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(rotate, 1, threads, sizeof(float) * (size_t)threads, &s, y, rounds, racy);
}

/* 0: sum of lanes up to this one; 1: of 8 lanes downwards; 2: lane 3's; 3: the votes of odd lanes;
 * 4: any, all; 5: the sum over the half that the lane is in, by a mask of it; 6: of a double
 * through lane^1; 7: its own for a lane that asks beyond the end. */
__global__ static void warp(uint32_t *y)
{
    const unsigned all = 0xffffffffu;
    unsigned lane = threadIdx.x, up = lane, down = lane;
    for (unsigned o = 1; o < 32; o *= 2) {
        unsigned other = __shfl_up_sync(all, up, o);
        up += lane >= o ? other : 0;
    }
    for (unsigned o = 4; o > 0; o /= 2)
        down += __shfl_down_sync(all, down, o, 8);
    unsigned third = __shfl_sync(all, lane * 10, 3);
    unsigned votes = __ballot_sync(all, lane & 1);
    unsigned any = (unsigned)__any_sync(all, lane == 5) << 1 | (unsigned)__all_sync(all, lane < 31);
    unsigned half = lane < 16 ? 0xffffu : 0xffff0000u, total = lane;
    for (int o = 8; o > 0; o /= 2)
        total += __shfl_xor_sync(half, total, o);
    double twin = __shfl_xor_sync(all, (double)lane + 0.25, 1);
    unsigned last = __shfl_down_sync(all, lane, 7);
    __syncwarp();
    uint32_t *mine = y + 8 * lane;
    mine[0] = up, mine[1] = down, mine[2] = third, mine[3] = votes;
    mine[4] = any, mine[5] = total, mine[6] = (uint32_t)(4 * twin), mine[7] = last;
}
void emu_try_warp(uint32_t *y, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(warp, 1, 32, 0, &s, y);
}

__global__ static void votes(int *y)
{
    int odd = __syncthreads_count(threadIdx.x & 1), five = __syncthreads_or(threadIdx.x == 5);
    int all = __syncthreads_and(threadIdx.x < blockDim.x);
    if (threadIdx.x == blockDim.x - 1) {
        y[0] = odd;
        y[1] = five;
        y[2] = all;
    }
}
void emu_try_votes(int *y, int threads, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(votes, 1, threads, 0, &s, y);
}

__global__ static void atomics(unsigned *y, float *f)
{
    atomicAdd(&y[0], 1u);
    atomicMax(&y[1], threadIdx.x);
    atomicCAS(&y[2], 0u, blockIdx.x + 7);
    atomicAdd(f, 0.5f);
}
void emu_try_atomics(unsigned *y, int blocks, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(atomics, blocks, 64, 0, &s, y, reinterpret_cast<float *>(y + 3));
}

__global__ static void places(int *y)
{
    unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int number = (int)(b * blockDim.x * blockDim.y * blockDim.z + t);
    y[number] = number;
}
void emu_try_places(int *y, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(places, dim3(2, 3, 2), dim3(4, 2, 3), 0, &s, y);
}

__global__ static void order(int *y)
{
    if (threadIdx.x == 0)
        y[atomicAdd(&y[gridDim.x], 1)] = (int)blockIdx.x;
    y[gridDim.x + 1] = (int)threadIdx.x;
}
void emu_try_order(int *y, int blocks, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(order, blocks, 32, 0, &s, y);
}

/* ---- errors that must be detected ---- */

__global__ static void diverge(int at_barrier)
{
    if ((int)threadIdx.x < at_barrier)
        __syncthreads();
}
void emu_try_diverge(int threads, int at_barrier, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(diverge, 3, threads, 0, &s, at_barrier);
}

__global__ static void half_warp(bool barrier)
{
    if (threadIdx.x % 32 < 16)
        __shfl_sync(0xffffffffu, 1, 0);
    if (barrier)
        __syncthreads();
}
void emu_try_half_warp(int barrier, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(half_warp, 1, 64, 0, &s, barrier != 0);
}

__global__ static void mixed_warp(void)
{
    if (threadIdx.x % 2)
        __syncwarp();
    else
        __ballot_sync(0xffffffffu, 1);
}
void emu_try_mixed_warp(cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(mixed_warp, 1, 32, 0, &s);
}

__global__ static void shared(size_t written)
{
    LM_DYNAMIC_SHARED(unsigned char, bytes);
    if (threadIdx.x == 0)
        for (size_t i = 0; i < written; i++)
            bytes[i] = (unsigned char)i;
}
void emu_try_shared(size_t asked, size_t written, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(shared, 2, 32, asked, &s, written);
}

__global__ static void much_shared(size_t bytes)
{
    LM_DYNAMIC_SHARED(unsigned char, at);
    at[bytes - 1] = 1;
}
void emu_try_shared_allowed(size_t bytes, cudaStream_t handle)
{
    stream s = { handle };
    LM_ALLOW_SHARED(much_shared, bytes);
    LM_LAUNCH(much_shared, 1, 1, bytes, &s, bytes);
}

__global__ static void write_at(float *y, int64_t at)
{
    y[at] = 1;
}
void emu_try_write(float *y, int64_t at, cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(write_at, 1, 1, 0, &s, y, at);
}

__global__ static void nothing(void)
{
}
void emu_try_shape(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   cudaStream_t handle)
{
    stream s = { handle };
    LM_LAUNCH(nothing, dim3(gx, gy, gz), dim3(bx, by, bz), 0, &s);
}
