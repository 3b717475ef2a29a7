/* SPDX-License-Identifier: Apache-2.0 */
/* attention_join.cuh -- adds up the parts of a row's keys (attention_step.cu): partial results in
 * scratch, joined in a fixed order by the blocks that finish last. */
#ifndef LM_KERNELS_CUDA_ATTENTION_JOIN_CUH
#define LM_KERNELS_CUDA_ATTENTION_JOIN_CUH

#include "kernels/cuda/attention_cached.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, PART = 128 };

/* For each (row, head) and part: sums over v [vdim], the largest score, the sum of exponentials. */
struct partial {
    float *out, *max, *sum;
};

static partial partial_of(const cached &c, int64_t parts, void *work)
{
    int64_t n = c.batch * c.seq * c.heads * parts;
    partial p = { (float *)work, nullptr, nullptr };
    p.max = p.out + n * c.vdim;
    p.sum = p.max + n;
    return p;
}

/* tickets: tickets_each for each row and key/value head; null: a separate kernel joins the
 * parts. */
template <class T> struct step_args {
    cached c;
    row_front front;
    const T *qkv;
    T *o, *keys, *values;
    partial r;
    int64_t parts, tickets_each;
    int64_t few; /* parts that can be prefetched at once */
    unsigned *tickets;
};

/* The parts with keys that a row sees; none for a row of padding. */
struct seen_parts {
    int64_t first;
    int count;
};

static __device__ inline seen_parts parts_of(span s)
{
    int64_t first = s.start / PART;
    return seen_parts{ first, (int)((s.end + PART - 1) / PART - first) };
}

/* Parts are joined by a tree, FAN at a time, so that the blocks of a long row share the work: FAN
 * parts are a run, FAN runs a longer run.  The result of a run replaces that of its first part that
 * the row sees. */
enum { FAN = 32 };

/* The `count` units of a run that a row sees, beginning with unit number `first`. */
struct run {
    int64_t unit, first; /* unit: in parts */
    int count;
    bool whole; /* the row sees no other parts */
};

static __device__ inline run run_around(seen_parts seen, int64_t k, int64_t unit)
{
    const int64_t all = unit * FAN, from = k / all * all, past = seen.first + seen.count;
    const int64_t lo = from > seen.first ? from : seen.first,
                  hi = from + all < past ? from + all : past;
    const int64_t first = lo / unit;
    return run{ unit, first, (int)((hi - 1) / unit - first) + 1, lo == seen.first && hi == past };
}

/* The part in whose place the result of the i-th unit of a run is stored. */
static __device__ inline int64_t place_of(seen_parts seen, const run &r, int i)
{
    const int64_t k = (r.first + i) * r.unit;
    return k > seen.first ? k : seen.first;
}

/* The tickets of a row and key/value head: one for each run. */
static int64_t tickets_for(int64_t parts)
{
    int64_t n = 1;
    while (parts > FAN) {
        parts = (parts + FAN - 1) / FAN;
        n += parts;
    }
    return n;
}

/* Read numbers that other blocks wrote, bypassing the cache of this multiprocessor, which may be
 * stale. */
template <int M> static __device__ inline pack<float, M> load_theirs(const float *p)
{
    pack<float, M> v;
    if constexpr (M == 4) {
        float4 x = __ldcg(reinterpret_cast<const float4 *>(p));
        v = { { x.x, x.y, x.z, x.w } };
    } else {
        v.v[0] = __ldcg(p);
    }
    return v;
}

/* Join a run for `n` heads from `head`, counted over all rows: into o if the run is the whole row,
 * else into its place as a unit.  Shared memory: weight [n * FAN], factors sum [n]. */
template <class T, int M, bool SERVED>
static __device__ inline void join_run(const step_args<T> &a, int64_t head, int n, seen_parts seen,
                                       const run &r, float *weight, float *sum)
{
    const int dim = a.c.vdim, wide = dim / M, lane = (int)threadIdx.x % 32;
    for (int g = (int)threadIdx.x / 32; g < n; g += WARPS) {
        const int64_t at = (head + g) * a.parts + place_of(seen, r, lane);
        float max = lane < r.count ? __ldcg(a.r.max + at) : -INFINITY;
        float all = lane < r.count ? __ldcg(a.r.sum + at) : 0;
        float top = warp_max(max), w = expf(max - base_of(top));
        all = warp_sum(w * all);
        if (r.whole)
            w *= add_sink(a.c.sinks, (head + g) % a.c.heads, top, all);
        const float by = r.whole ? row_factor(a.c.undivided, 1, top, all) : 1;
        weight[g * FAN + lane] = w;
        if (lane == 0)
            sum[g] = by;
        if (SERVED && lane == 0 && r.whole && a.c.lse)
            a.c.lse[head + g] = row_lse(a.c.undivided, top, all);
        if (lane == 0 && !r.whole) {
            a.r.max[at] = top;
            a.r.sum[at] = all;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < n * wide; t += THREADS) {
        const int g = t / wide, d = t % wide * M;
        float *out = a.r.out + (head + g) * a.parts * dim + d;
        float *first = out + place_of(seen, r, 0) * dim;
        const int64_t step = r.unit * dim;
        float x[M] = {};
        out += r.first * step;
#pragma unroll(M == 1 ? 4 : 8)
        for (int k = 0; k < r.count; k++) {
            float w = weight[g * FAN + k];
            pack<float, M> v = load_theirs<M>(k ? out + k * step : first);
#pragma unroll
            for (int e = 0; e < M; e++)
                x[e] = fmaf(w, v.v[e], x[e]);
        }
        if (r.whole) {
            pack<T, M> y;
#pragma unroll
            for (int e = 0; e < M; e++)
                y.v[e] = from_float<T>(x[e] * sum[g]);
            store<T, M>(a.o + (head + g) * dim + d, y);
        } else {
            pack<float, M> y;
#pragma unroll
            for (int e = 0; e < M; e++)
                y.v[e] = x[e];
            store<float, M>(first, y);
        }
    }
    __syncthreads();
}

/* True in the last of `count` blocks that call this with a ticket.  That block resets the ticket to
 * zero, and can read what the others wrote before their calls.  All threads of a block call it. */
static __device__ inline bool comes_last(unsigned *ticket, unsigned count)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(ticket, count - 1) == count - 1;
    __syncthreads();
    __threadfence();
    return last;
}

/* Called after part k of a row and key/value head was stored: join the runs whose other parts are
 * all stored, short runs first. tickets: of that row and head; G: the heads for which weight and
 * sum have room. */
template <class T, int M, int G, bool SERVED>
static __device__ inline void join_up(const step_args<T> &a, int64_t head, int64_t k,
                                      seen_parts seen, unsigned *tickets, float *weight, float *sum)
{
    const int group = a.c.group;
#pragma unroll 1
    for (int64_t unit = 1;; unit *= FAN) {
        const run r = run_around(seen, k, unit);
        if (r.count > 1) {
            if (!comes_last(tickets + k / (unit * FAN), (unsigned)r.count))
                return;
#pragma unroll 1
            for (int h = 0; h < group; h += G)
                join_run<T, M, SERVED>(a, head + h, group - h < G ? group - h : G, seen, r, weight,
                                       sum);
        }
        if (r.whole)
            return;
        tickets += (a.parts + unit * FAN - 1) / (unit * FAN);
    }
}

#endif
