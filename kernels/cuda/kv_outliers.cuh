/* SPDX-License-Identifier: Apache-2.0 */
/* kv_outliers.cuh -- the outliers of a page of a head: a list by rising index, which a warp changes. */
#ifndef LM_KERNELS_CUDA_KV_OUTLIERS_CUH
#define LM_KERNELS_CUDA_KV_OUTLIERS_CUH

#include "kernels/cuda/kv_cell.cuh"

struct kv_list {
    uint16_t *count, *index, *value;
    int n, most;
    const char *page;
};

/* How far beyond the range of its channel or group a number of the list is. */
static __device__ inline double excess(const kv_side &f, int64_t kv, const kv_list &o,
                                       uint32_t index, uint16_t value)
{
    const int t = (int)index / f.D, d = (int)index % f.D, at = kv_scale_at(f, t, d);
    kv_scale by;
    if (f.fixed)
        by = kv_fixed_scale(f, kv, d);
    else
        by = { (double)kv_get_scale(f.scale, o.page + f.at_scale, at),
               (double)kv_get_scale(f.scale, o.page + f.at_min, at) };
    const double x = (double)to_float(f16{ value });
    return by.s > 0 ? fabs((x - by.m) / by.s) : fabs(x - by.m) > 0 ? (double)INFINITY : 0;
}

/* Remove entries [i, i + n). */
static __device__ inline void drop_entries(kv_list &o, int i, int n)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int at = i; n && at < o.n - n; at += 32) {
        const bool there = at + lane < o.n - n;
        const uint16_t index = there ? o.index[at + lane + n] : 0,
                       value = there ? o.value[at + lane + n] : 0;
        __syncwarp();
        if (there) {
            o.index[at + lane] = index;
            o.value[at + lane] = value;
        }
        __syncwarp();
    }
    o.n -= n;
}

/* Entries before the first with an index of at least `index`. */
static __device__ inline int entries_before(const kv_list &o, uint32_t index)
{
    int lo = 0, hi = o.n;
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (o.index[mid] < index)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static __device__ inline void insert_entry(kv_list &o, uint32_t index, uint16_t value)
{
    const int lane = (int)threadIdx.x % 32, to = entries_before(o, index);
#pragma unroll 1
    for (int end = o.n; end > to; end -= 32) { /* [end - 32, end) up by one */
        const int i = end - 1 - lane;
        const bool there = i >= to;
        const uint16_t x = there ? o.index[i] : 0, v = there ? o.value[i] : 0;
        __syncwarp();
        if (there) {
            o.index[i + 1] = x;
            o.value[i + 1] = v;
        }
        __syncwarp();
    }
    if (lane == 0) {
        o.index[to] = (uint16_t)index;
        o.value[to] = value;
    }
    __syncwarp();
    o.n++;
}

/* Into the list, or in the place of the smallest (the last of several) if it is larger than that. */
static __device__ inline void add_entry(const kv_side &f, int64_t kv, kv_list &o, uint32_t index,
                                        uint16_t value)
{
    if (o.n == o.most) {
        double least = INFINITY;
        int at = -1;
#pragma unroll 1
        for (int i = (int)threadIdx.x % 32; i < o.n; i += 32) {
            const double x = excess(f, kv, o, o.index[i], o.value[i]);
            if (at < 0 || x <= least) {
                least = x;
                at = i;
            }
        }
#pragma unroll
        for (int s = 16; s > 0; s >>= 1) {
            const double x = __shfl_xor_sync(every_lane, least, s);
            const int i = __shfl_xor_sync(every_lane, at, s);
            if (i >= 0 && (at < 0 || x < least || (x == least && i > at))) {
                least = x;
                at = i;
            }
        }
        const double mine = excess(f, kv, o, index, value);
        if (mine < least || (mine == least && index > o.index[at]))
            return;
        __syncwarp();
        drop_entries(o, at, 1);
    }
    insert_entry(o, index, value);
}

/* The outliers of tokens [t0, t1) of a page. */
template <class T>
static __device__ inline void list_outliers(const kv_side &f, const kv_cell<T> &c, int64_t kv,
                                            int t0, int t1, bool begins)
{
    uint16_t *at = (uint16_t *)(c.page + f.at_outliers);
    kv_list o = { at, at + 1, at + 1 + f.outliers, begins ? 0 : *at, f.outliers, c.page };
    const int lane = (int)threadIdx.x % 32, before = entries_before(o, (uint32_t)(t0 * f.D));
    __syncwarp();
    drop_entries(o, before, entries_before(o, (uint32_t)(t1 * f.D)) - before);
#pragma unroll 1
    for (int i = 0; i < (t1 - t0) * f.D; i += 32) {
        const int t = t0 + (i + lane) / f.D, d = (i + lane) % f.D;
        float x = 0;
        bool out = false;
        if (t < t1) {
            x = c.plain(t, d);
            const float lo = c.range ? c.range_of(t)[0] : f.lower[kv * f.D + d];
            const float hi = c.range ? c.range_of(t)[1] : f.upper[kv * f.D + d];
            out = x < lo || x > hi;
        }
        const uint16_t value =
            (uint16_t)kv_encode_float(kv_limited((double)x, -65504, 65504), 5, 10, 0x7bff, true);
        for (unsigned left = __ballot_sync(every_lane, out); left; left &= left - 1) {
            const int k = __ffs((int)left) - 1;
            add_entry(f, kv, o, (uint32_t)(t0 * f.D + i + k),
                      (uint16_t)__shfl_sync(every_lane, (int)value, k));
        }
    }
    if (lane == 0)
        *o.count = (uint16_t)o.n;
}

#endif
