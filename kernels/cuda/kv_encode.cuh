/* SPDX-License-Identifier: Apache-2.0 */
/* kv_encode.cuh -- scales and codes of coded caches by the arithmetic of lm_kv_encode (numeric/kv_levels.c), so that the
 * bits are those of the host: double, sums in the host's order, one rounding at each store.  A compiler may join
 * a product and a sum where that changes no bit alone; elsewhere the operations are separate ones (__fmul_rn).
 * Logarithms and exponentials of balanced formats are the one exception: their last bit in double is the library's. */
#ifndef LM_KERNELS_CUDA_KV_ENCODE_CUH
#define LM_KERNELS_CUDA_KV_ENCODE_CUH

#include "kernels/cuda/kv_format.cuh"

struct kv_scale {
    double s, m;
};

static const unsigned every_lane = 0xffffffffu;

/* ---- numbers of few bits, rounded once from double (numeric/dtype.c) ---- */

/* e exponent and m mantissa bits; `top`: the largest finite code. */
__device__ inline uint32_t kv_encode_float(double x, int e, int m, uint32_t top, bool has_inf)
{
    const uint64_t bits = (uint64_t)__double_as_longlong(x), mag = bits & 0x7fffffffffffffffull;
    const uint32_t sign = (uint32_t)(bits >> 63) << (e + m);
    const uint32_t inf = has_inf ? ((1u << e) - 1) << m : top + 1;
    const int bias = (1 << (e - 1)) - 1, least = 1 - bias, own = (int)(mag >> 52) - 1023;
    if (mag == 0x7ff0000000000000ull)
        return sign | inf;
    if (mag > 0x7ff0000000000000ull)
        return sign |
               (has_inf ? inf | ((uint32_t)(mag >> (52 - m)) & ((1u << m) - 1)) | 1u << (m - 1)
                        : top + 1);
    uint64_t part = (mag & 0xfffffffffffffull) | (own > -1023 ? 1ull << 52 : 0);
    int shift = 52 - m + (own < least ? least - own : 0);
    if (shift > 63) {
        part = shift - 63 > 63 ? 0 : part >> (shift - 63);
        shift = 63;
    }
    uint64_t q = part >> shift, rest = part & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    q += rest > half || (rest == half && (q & 1));
    const uint32_t code = ((uint32_t)((own < least ? least : own) + bias - 1) << m) + (uint32_t)q;
    return sign | (code > top ? inf : code);
}

__device__ inline double kv_limited(double v, double least, double most)
{
    return v < least ? least : v > most ? most : v;
}

/* A scale into its section; NaN as the host's constant has it. */
__device__ inline void kv_put_scale(lm_dtype type, char *to, int i, double v)
{
    if (isnan(v))
        v = __longlong_as_double(0x7ff8000000000000ll);
    if (type == LM_DTYPE_F32)
        ((uint32_t *)to)[i] = isnan(v) ? 0x7fc00000u : __float_as_uint((float)v);
    else if (type == LM_DTYPE_F16)
        ((uint16_t *)to)[i] = (uint16_t)kv_encode_float(v, 5, 10, 0x7bff, true);
    else
        ((uint16_t *)to)[i] = (uint16_t)kv_encode_float(v, 8, 7, 0x7f7f, true);
}

/* v as it would be read back from a section of scales. */
__device__ inline double kv_stored(lm_dtype type, double v)
{
    if (type == LM_DTYPE_F32)
        return (double)(float)v;
    if (type == LM_DTYPE_F16) {
        v = isnan(v) ? v : kv_limited(v, -65504, 65504);
        return (double)to_float(f16{ (uint16_t)kv_encode_float(v, 5, 10, 0x7bff, true) });
    }
    return (double)to_float(bf16{ (uint16_t)kv_encode_float(v, 8, 7, 0x7f7f, true) });
}

/* ---- levels ---- */

__device__ inline double kv_level(const kv_side &f, uint32_t code)
{
    if (f.levels == LM_KV_SYM)
        return (double)code - (double)(1 << (f.bits - 1));
    if (f.levels == LM_KV_TABLE)
        return (double)f.table[code];
    if (f.levels == LM_KV_FLOAT8)
        return (double)kv_float8(f.float8 == LM_DTYPE_F8E5M2, code);
    return (double)code;
}

__device__ inline double kv_float8_most(const kv_side &f)
{
    return f.float8 == LM_DTYPE_F8E5M2 ? 57344.0 : 448.0;
}

/* The code of (x - m) / s. */
__device__ inline uint32_t kv_code_of(const kv_side &f, kv_scale by, double x)
{
    const double half = (double)(1 << (f.bits - 1)), top = (double)((1 << f.bits) - 1);
    const double y = by.s != 0 ? (x - by.m) / by.s : 0;
    if (!isfinite(by.s) || !isfinite(y))
        return 0;
    if (f.levels == LM_KV_SYM)
        return (uint32_t)(kv_limited(rint(y), -half, half - 1) + half);
    if (f.levels == LM_KV_FLOAT8) {
        const double most = kv_float8_most(f), v = kv_limited(y, -most, most);
        return f.float8 == LM_DTYPE_F8E5M2 ? kv_encode_float(v, 5, 2, 0x7b, true)
                                           : kv_encode_float(v, 4, 3, 0x7e, false);
    }
    if (f.levels != LM_KV_TABLE)
        return (uint32_t)kv_limited(rint(y), 0, top);
    uint32_t best = 0;
    double near = fabs(y - (double)f.table[0]);
#pragma unroll 1
    for (uint32_t i = 1; i < 1u << f.bits; i++) {
        const double other = fabs(y - (double)f.table[i]);
        if (other < near) {
            near = other;
            best = i;
        }
    }
    return best;
}

/* Scale and minimum over numbers in [least, most], before they are rounded. */
__device__ inline kv_scale kv_over_range(const kv_side &f, double least, double most)
{
    const double largest = fmax(fabs(least), fabs(most)), top = (double)((1 << f.bits) - 1);
    if (f.levels == LM_KV_SYM)
        return { largest / (top / 2), 0 };
    if (f.levels == LM_KV_ASYM)
        return { (most - least) / top, least };
    if (f.levels == LM_KV_FLOAT8)
        return { largest / kv_float8_most(f), 0 };
    if (f.zero)
        return { (most - least) / 2, (most + least) / 2 };
    return { largest, 0 };
}

/* Of channel d where no scales are stored. */
__device__ inline kv_scale kv_fixed_scale(const kv_side &f, int64_t kv, int d)
{
    if (f.fixed)
        return kv_over_range(f, (double)f.lower[kv * f.D + d], (double)f.upper[kv * f.D + d]);
    return { f.head ? (double)f.head[kv] : f.constant, 0 };
}

/* What is needed of the numbers of a group. */
struct kv_extent {
    double least, most, squares;
    bool finite;
};

__device__ inline kv_scale kv_group_scale(const kv_side &f, const kv_extent &r, int n)
{
    kv_scale by = { NAN, 0 };
    if (r.finite && f.levels == LM_KV_TABLE && f.norm)
        by = { sqrt(r.squares / (double)n), 0 };
    else if (r.finite)
        by = kv_over_range(f, r.least, r.most);
    return { kv_stored(f.scale, by.s), by.m != 0 ? kv_stored(f.scale, by.m) : 0 };
}

/* A group of a balanced tile: the scale that finds codes (kv_balance.c). */
__device__ inline kv_scale kv_balanced_scale(const kv_side &f, const kv_extent &r)
{
    const double top = (double)((1 << f.bits) - 1);
    if (!r.finite)
        return { NAN, 0 };
    return { fmax((r.most - r.least) / top, 1e-10), r.least };
}

/* Over the lanes of a warp. */
__device__ inline kv_extent kv_warp_extent(kv_extent r)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        r.least = fmin(r.least, __shfl_xor_sync(every_lane, r.least, o));
        r.most = fmax(r.most, __shfl_xor_sync(every_lane, r.most, o));
    }
    r.finite = __all_sync(every_lane, r.finite);
    return r;
}

/* sum + x of lane 0 + x of lane 1 + ...: in this order. */
__device__ inline double kv_sum_in_order(double sum, double x)
{
#pragma unroll 4
    for (int i = 0; i < 32; i++)
        sum = sum + __shfl_sync(every_lane, x, i);
    return sum;
}

/* ---- ggml's formats: a warp codes a block of 32 numbers, one in each lane (numeric/ggml_simple.c, ggml_iq4.c) ---- */

struct kv_coded_number {
    uint32_t code;
    float s, m; /* of the block, before they are stored */
};

/* Truncated and limited; NaN gives lo. */
__device__ inline int kv_clamp_int(float f, int lo, int hi)
{
    return f > (float)lo ? (f < (float)hi ? (int)f : hi) : lo;
}

/* The first number of largest magnitude; +0 if there are zeros alone. */
__device__ inline float kv_extreme(float v)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        const float other = __shfl_xor_sync(every_lane, v, o);
        const int from = __shfl_xor_sync(every_lane, lane, o);
        if (fabsf(other) > fabsf(v) || (fabsf(other) == fabsf(v) && from < lane)) {
            v = other;
            lane = from;
        }
    }
    return v != 0 ? v : 0.0f;
}

/* The first of the least numbers. */
__device__ inline float kv_least(float v)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        const float other = __shfl_xor_sync(every_lane, v, o);
        const int from = __shfl_xor_sync(every_lane, lane, o);
        if (other < v || (other == v && from < lane)) {
            v = other;
            lane = from;
        }
    }
    return v;
}

static __device__ const float kv_iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                                    1,    13,   25,  38,  53,  69,  89,  113 };

/* The scale of a block by weighted least squares: lane k tries the k-th of 16 steps, and the first of the best wins. */
__device__ inline float kv_iq4_scale(float v)
{
    const int lane = (int)threadIdx.x % 32, k = lane % 16 - 1;
    const float most = kv_extreme(v), first = kv_iq4_values[0];
    const bool alive = fabsf(most) >= 1e-15f;
    const float safe = alive ? most : 1.0f;
    const float inv = k < 0 ? 1.0f / (-safe / first) : ((float)(k - 7) + first) / safe;
    float xq = 0, q2 = 0, scale = 0, best = 0;
#pragma unroll 1
    for (int i = 0; i < 32; i++) {
        const float x = __shfl_sync(every_lane, v, i), w = __fmul_rn(x, x), f = __fmul_rn(inv, x);
        float q = first;
#pragma unroll
        for (int j = 0; j < 15; j++) {
            const float gap =
                __fsub_rn(__fsub_rn(f, kv_iq4_values[j]), __fsub_rn(kv_iq4_values[j + 1], f));
            q = __float_as_uint(gap) >> 31 ? q : kv_iq4_values[j + 1];
        }
        const float wq = __fmul_rn(w, q);
        xq = __fadd_rn(xq, __fmul_rn(wq, x));
        q2 = __fadd_rn(q2, __fmul_rn(wq, q));
    }
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        const float a = __shfl_sync(every_lane, xq, i), b = __shfl_sync(every_lane, q2, i);
        const bool some = __float_as_uint(__fsub_rn(0.0f, b)) >> 31;
        const float gain = __fsub_rn(__fmul_rn(best, b), __fmul_rn(a, a));
        if (i == 0 || (some && __float_as_uint(gain) >> 31)) {
            scale = some ? a / b : 0.0f;
            best = __fmul_rn(scale, a);
        }
    }
    return alive ? scale : 0.0f;
}

__device__ inline uint32_t kv_iq4_code(float f)
{
    uint32_t q = 0;
#pragma unroll
    for (int k = 0; k < 15; k++)
        q += !(__fsub_rn(f, kv_iq4_values[k]) < __fsub_rn(kv_iq4_values[k + 1], f));
    return q;
}

/* F16 as ggml stores it: NaN as 0, the largest number for larger ones. */
__device__ inline double kv_ggml_scale(float s)
{
    return kv_stored(LM_DTYPE_F16, isnan(s) ? 0.0 : (double)s);
}

/* x: the lane's number; lanes beyond the group have the group's last one. */
__device__ inline kv_coded_number kv_ggml_code(const kv_side &f, float x)
{
    const float v = isfinite(x) ? x : 0.0f;
    const int top = (1 << f.bits) - 1;
    if (f.levels == LM_KV_TABLE) {
        const float d = kv_iq4_scale(v), inv = d != 0.0f ? 1.0f / d : 0.0f;
        return { kv_iq4_code(__fmul_rn(inv, v)), d, 0 };
    }
    if (f.levels == LM_KV_ASYM) {
        const float lo = kv_least(v), hi = -kv_least(-v), d = __fsub_rn(hi, lo) / (float)top;
        const float inv = d != 0.0f ? 1.0f / d : 0.0f;
        return { (uint32_t)kv_clamp_int(__fadd_rn(__fmul_rn(__fsub_rn(v, lo), inv), 0.5f), 0, top),
                 d, lo };
    }
    const float e = kv_extreme(v);
    if (f.bits == 8) {
        const float d = fabsf(e) / 127.0f, inv = d != 0.0f ? 1.0f / d : 0.0f;
        return { (uint32_t)(kv_clamp_int(roundf(__fmul_rn(v, inv)), -127, 127) + 128), d, 0 };
    }
    const float half = (float)(1 << (f.bits - 1)), d = e / -half, inv = d != 0.0f ? 1.0f / d : 0.0f;
    return { (uint32_t)kv_clamp_int(__fadd_rn(__fmul_rn(v, inv), half + 0.5f), 0, top), d, 0 };
}

#endif
