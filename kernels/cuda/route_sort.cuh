/* SPDX-License-Identifier: Apache-2.0 */
/* route_sort.cuh -- assignments in order of their experts: a counting sort over chunks, a warp
 * each.
 *
 * Three kernels: counts of each chunk; their sums over the chunks before, and the first row of each
 * expert; the row of each assignment.  Within an expert the order is that of the sequence, which is
 * that of the assignments, or with `slots` all first choices before all second ones. */
#ifndef LM_KERNELS_CUDA_ROUTE_SORT_CUH
#define LM_KERNELS_CUDA_ROUTE_SORT_CUH

#include "kernels/cuda/route_scores.cuh"

struct route_sort {
    const int32_t *expert; /* negative: of no expert */
    int64_t tokens, k, count, experts, chunk, chunks;
    bool slots;
    int32_t *at; /* [chunks,E] */
};

inline route_sort route_sort_of(const int32_t *expert, int64_t tokens, int64_t k, int64_t experts,
                                bool slots)
{
    route_sort s = { expert, tokens, k, tokens * k, experts, 256, 0, slots, nullptr };
    if (s.count > 256 * 128)
        s.chunk = (s.count + 128 * 32 - 1) / (128 * 32) * 32;
    s.chunks = (s.count + s.chunk - 1) / s.chunk;
    return s;
}

/* The assignment at place i of the sequence. */
__device__ inline int64_t assignment_at(const route_sort &s, int64_t i)
{
    return s.slots ? i % s.tokens * s.k + i / s.tokens : i;
}

/* Its expert; -1 from the end of the chunk on. */
__device__ inline int32_t expert_at(const route_sort &s, int64_t i, int64_t end)
{
    return i < end ? s.expert[assignment_at(s, i)] : -1;
}

__device__ inline int64_t chunk_end(const route_sort &s)
{
    int64_t end = (blockIdx.x + (int64_t)1) * s.chunk;
    return end < s.count ? end : s.count;
}

/* A block of a warp for each chunk. */
static __global__ void route_sort_count(route_sort s)
{
    LM_DYNAMIC_SHARED(int, count);
    for (int64_t e = threadIdx.x; e < s.experts; e += 32)
        count[e] = 0;
    __syncwarp();
    for (int64_t i = blockIdx.x * s.chunk + threadIdx.x; i < chunk_end(s); i += 32) {
        int32_t e = expert_at(s, i, s.count);
        if (e >= 0)
            atomicAdd(&count[e], 1);
    }
    __syncwarp();
    for (int64_t e = threadIdx.x; e < s.experts; e += 32)
        s.at[blockIdx.x * s.experts + e] = count[e];
}

/* total[e] becomes the sum of those before, by the first warp; the sum of all is returned. */
static __device__ inline int sum_before(int *total, int64_t experts)
{
    int before = 0;
    for (int64_t first = 0; first < experts; first += 32) {
        int64_t e = first + lane_of();
        int own = e < experts ? total[e] : 0, sum = own;
        for (int o = 1; o < 32; o *= 2) {
            int other = __shfl_up_sync(full_warp, sum, o);
            sum += lane_of() >= o ? other : 0;
        }
        if (e < experts)
            total[e] = before + sum - own;
        before += __shfl_sync(full_warp, sum, 31);
    }
    return before;
}

/* One block.  rows: at counts rows of the sort, from offsets[e], or e pad; else the assignments of
 * the expert before, and offsets[e] is their number, at most `most`. */
static __global__ void route_sort_sums(route_sort s, bool rows, int64_t pad, int64_t most,
                                       int32_t *offsets)
{
    LM_DYNAMIC_SHARED(int, total);
    for (int64_t e = threadIdx.x; e < s.experts; e += blockDim.x) {
        int sum = 0;
        for (int64_t b = 0; b < s.chunks; b++)
            sum += s.at[b * s.experts + e];
        total[e] = sum;
        if (!rows)
            offsets[e] = (int32_t)(sum < most ? sum : most);
    }
    __syncthreads();
    if (rows && threadIdx.x < 32) {
        int all = sum_before(total, s.experts);
        if (threadIdx.x == 0)
            offsets[s.experts] = pad ? (int32_t)(s.experts * pad) : all;
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < s.experts; e += blockDim.x) {
        int sum = !rows ? 0 : pad ? (int)(e * pad) : total[e];
        if (rows)
            offsets[e] = sum;
        for (int64_t b = 0; b < s.chunks; b++) {
            int n = s.at[b * s.experts + e];
            s.at[b * s.experts + e] = sum;
            sum += n;
        }
    }
}

/* A block of a warp for each chunk: then(assignment, expert, row) for each assignment with an
 * expert, then(assignment, -1, -1) for the others. */
template <class F> __global__ void route_sort_rows(route_sort s, F then)
{
    LM_DYNAMIC_SHARED(int, at);
    for (int64_t e = threadIdx.x; e < s.experts; e += 32)
        at[e] = s.at[blockIdx.x * s.experts + e];
    __syncwarp();
    for (int64_t i = blockIdx.x * s.chunk; i < chunk_end(s); i += 32) {
        int64_t own = i + threadIdx.x;
        int32_t e = expert_at(s, own, chunk_end(s));
        int lower = 0, all = 0; /* lanes with this expert */
        for (int l = 0; l < 32; l++) {
            int same = __shfl_sync(full_warp, e, l) == e;
            all += same;
            lower += same && l < (int)threadIdx.x;
        }
        int row = e < 0 ? -1 : at[e] + lower;
        __syncwarp();
        if (e >= 0 && lower == all - 1)
            at[e] = row + 1;
        __syncwarp();
        if (own < chunk_end(s))
            then(assignment_at(s, own), e, row);
    }
}

inline void route_sort_offsets(const lm_call *c, const route_sort &s, bool rows, int64_t pad,
                               int64_t most, int32_t *offsets)
{
    size_t shared = (size_t)s.experts * sizeof(int);
    LM_LAUNCH(route_sort_count, (unsigned)s.chunks, 32, shared, c->stream, s);
    LM_LAUNCH(route_sort_sums, 1, 256, shared, c->stream, s, rows, pad, most, offsets);
}

/* Rows and assignments of a plan (kernels/route.h); place may be null, from holds -1. */
struct place_rows {
    int64_t pad;
    int32_t *from, *place;
    __device__ void operator()(int64_t a, int32_t e, int row) const
    {
        if (pad && row >= (e + 1) * pad)
            row = -1;
        if (place)
            place[a] = row;
        if (row >= 0)
            from[row] = (int32_t)a;
    }
};

inline void route_sort_run(const lm_call *c, const route_sort &s, int64_t pad, int64_t rows,
                           int32_t *offsets, int32_t *from, int32_t *place)
{
    fill_with<int32_t>(c, from, rows, -1);
    route_sort_offsets(c, s, true, pad, 0, offsets);
    place_rows then = { pad, from, place };
    LM_LAUNCH((route_sort_rows<place_rows>), (unsigned)s.chunks, 32,
              (size_t)s.experts * sizeof(int), c->stream, s, then);
}

#endif
