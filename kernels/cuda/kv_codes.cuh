/* SPDX-License-Identifier: Apache-2.0 */
/* kv_codes.cuh -- scales and codes of the tokens of a cell, with the host's bits: a warp has a group of channels of a token,
 * or a lane a channel of a group of tokens. */
#ifndef LM_KERNELS_CUDA_KV_CODES_CUH
#define LM_KERNELS_CUDA_KV_CODES_CUH

#include "kernels/cuda/kv_cell.cuh"

/* ---- a scale for groups of channels of each token ---- */

/* The numbers of lanes d0 + lane, ... of a group, 32 at a time. */
template <class T>
static __device__ inline kv_extent extent_of(const kv_side &f, const kv_cell<T> &c, int t, int d0,
                                             int n)
{
    const int lane = (int)threadIdx.x % 32;
    kv_extent r = { INFINITY, -INFINITY, 0, true };
#pragma unroll 1
    for (int i = 0; i < n; i += 32) {
        const bool there = i + lane < n;
        const double x = there ? c.number(f, t, d0 + i + lane) : 0;
        if (there) {
            r.least = fmin(r.least, x);
            r.most = fmax(r.most, x);
            r.finite = r.finite && isfinite(x);
        }
        if (f.norm)
            r.squares = kv_sum_in_order(r.squares, there ? x * x : 0);
    }
    return kv_warp_extent(r);
}

/* A warp codes a group of n channels of token t; codes: of channel 0. */
template <class T>
static __device__ inline void code_token_group(const kv_side &f, const kv_cell<T> &c, int64_t kv,
                                               int t, int d0, int n, uint8_t *codes)
{
    const int lane = (int)threadIdx.x % 32, at = kv_scale_at(f, t, d0);
    kv_scale by = {}, stored;
    if (f.ggml) {
        const kv_coded_number x = kv_ggml_code(f, c.plain(t, d0 + (lane < n ? lane : n - 1)));
        if (lane < n)
            codes[d0 + lane] = (uint8_t)x.code;
        stored = { kv_ggml_scale(x.s), kv_ggml_scale(x.m) };
    } else {
        kv_extent r = { 0, 0, 0, true };
        if (f.scale != LM_DTYPE_NONE)
            r = extent_of(f, c, t, d0, n);
        if (c.range) {
            r.least = (double)c.range_of(t)[0];
            r.most = (double)c.range_of(t)[1];
        }
        if (f.second)
            by = kv_balanced_scale(f, r);
        else if (f.scale != LM_DTYPE_NONE)
            by = kv_group_scale(f, r, n);
        double levels = 0; /* the sum of squares */
#pragma unroll 1
        for (int i = 0; i < n; i += 32) {
            const int d = d0 + i + lane;
            double level = 0;
            if (i + lane < n) {
                const kv_scale own = f.scale != LM_DTYPE_NONE ? by : kv_fixed_scale(f, kv, d);
                const uint32_t code = kv_code_of(f, own, c.number(f, t, d));
                codes[d] = (uint8_t)code;
                level = kv_level(f, code);
            }
            if (f.renorm)
                levels = kv_sum_in_order(levels, level * level);
        }
        stored = by;
        if (f.renorm && r.finite && levels > 0)
            stored.s = kv_stored(f.scale, sqrt(r.squares / levels));
        if (f.second) {
            const double row = c.row[t - c.tile];
            stored = { kv_stored(f.scale, row * by.s), kv_stored(f.scale, row * by.m) };
        }
    }
    if (lane == 0 && f.scale != LM_DTYPE_NONE) {
        kv_put_scale(f.scale, c.page + f.at_scale, at, stored.s);
        if (f.minima)
            kv_put_scale(f.scale, c.page + f.at_min, at, stored.m);
    }
}

/* Tokens [t0, t1) of the page. */
template <class T>
static __device__ inline void code_tokens(const kv_side &f, const kv_cell<T> &c, int64_t kv, int t0,
                                          int t1, uint8_t *codes)
{
    const int group = f.axis == LM_KV_TOKEN ? f.group : f.D, groups = (f.D + group - 1) / group;
#pragma unroll 1
    for (int at = t0; at < t1;) {
        const int end = at / CHUNK * CHUNK + CHUNK < t1 ? at / CHUNK * CHUNK + CHUNK : t1;
#pragma unroll 1
        for (int i = (int)threadIdx.x / 32; i < (end - at) * groups; i += WARPS) {
            const int t = at + i / groups, d = i % groups * group;
            code_token_group(f, c, kv, t, d, f.D - d < group ? f.D - d : group,
                             codes + (t - at) * f.D);
        }
        put_codes(f, c.page, { codes, at, f.D, at, end, 0, f.D });
        at = end;
    }
}

/* ---- a scale for groups of tokens of each channel ---- */

/* The scales of 32 channels from d0 on: warps share the tokens, a lane has a channel.  All threads call it; the results are
 * those of the first warp. */
template <class T>
static __device__ inline kv_extent extent_of_channel(const kv_side &f, const kv_cell<T> &c, int t0,
                                                     int n, int d)
{
    __shared__ double least[WARPS][SLAB], most[WARPS][SLAB];
    __shared__ int finite[WARPS][SLAB];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    kv_extent r = { INFINITY, -INFINITY, 0, true };
#pragma unroll 1
    for (int t = warp; t < n && d < f.D; t += WARPS) {
        const double x = c.number(f, t0 + t, d);
        r.least = fmin(r.least, x);
        r.most = fmax(r.most, x);
        r.finite = r.finite && isfinite(x);
    }
    least[warp][lane] = r.least;
    most[warp][lane] = r.most;
    finite[warp][lane] = r.finite;
    __syncthreads();
    if (warp == 0) {
        for (int w = 1; w < WARPS; w++) {
            r.least = fmin(r.least, least[w][lane]);
            r.most = fmax(r.most, most[w][lane]);
            r.finite = r.finite && finite[w][lane];
        }
        for (int t = 0; f.norm && t < n && d < f.D; t++) { /* in the host's order */
            const double x = c.number(f, t0 + t, d);
            r.squares += x * x;
        }
    }
    return r;
}

/* Tokens [t0, t0 + n) of the page, a group, of the channels [d0, d0 + 32). */
template <class T>
static __device__ inline void code_channels(const kv_side &f, const kv_cell<T> &c, int t0, int n,
                                            int d0, uint8_t *codes)
{
    __shared__ kv_scale scale[SLAB];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, d = d0 + lane;
    const int d1 = d0 + SLAB < f.D ? d0 + SLAB : f.D, at = kv_scale_at(f, t0, d);
    kv_extent r = extent_of_channel(f, c, t0, n, d);
    kv_scale by = f.second ? kv_balanced_scale(f, r) : kv_group_scale(f, r, n);
    double levels = 0;
    if (warp == 0)
        scale[lane] = by;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < n; i += CHUNK) {
        const int there = n - i < CHUNK ? n - i : CHUNK;
#pragma unroll 1
        for (int t = warp; t < there && d < f.D; t += WARPS)
            codes[t * SLAB + lane] =
                (uint8_t)kv_code_of(f, scale[lane], c.number(f, t0 + i + t, d));
        put_codes(f, c.page, { codes, t0 + i, SLAB, t0 + i, t0 + i + there, d0, d1 });
        for (int t = 0; f.renorm && warp == 0 && t < there && d < f.D; t++) {
            const double level = kv_level(f, codes[t * SLAB + lane]);
            levels += level * level;
        }
        __syncthreads();
    }
    if (warp == 0 && d < f.D) {
        if (f.renorm && r.finite && levels > 0)
            by.s = kv_stored(f.scale, sqrt(r.squares / levels));
        if (f.second)
            by = { kv_stored(f.scale, c.row[d] * by.s), kv_stored(f.scale, c.row[d] * by.m) };
        kv_put_scale(f.scale, c.page + f.at_scale, at, by.s);
        if (f.minima)
            kv_put_scale(f.scale, c.page + f.at_min, at, by.m);
    }
    __syncthreads();
}

#endif
