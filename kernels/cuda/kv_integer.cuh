/* SPDX-License-Identifier: Apache-2.0 */
/* kv_integer.cuh -- products of rows with codes as integers, exact: four bytes at a time (dp4a).
 *
 * The other factor is quantised: a number is by (256 hi + lo), hi and lo of 8 bits with a sign, which lie as two planes of
 * words of four numbers.  `by` is the largest magnitude of a block of numbers over 32639, so its error is 2^-16 of that. */
#ifndef LM_KERNELS_CUDA_KV_INTEGER_CUH
#define LM_KERNELS_CUDA_KV_INTEGER_CUH

#include "kernels/cuda/kv_tile.cuh"

/* sum + the products of four codes without a sign and four numbers with one. */
__device__ inline int dot_codes(uint32_t codes, uint32_t by, int sum)
{
#ifdef LM_EMU
    for (int e = 0; e < 32; e += 8)
        sum += (int)(codes >> e & 255) * (int8_t)(by >> e);
#else
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(codes), "r"(by));
#endif
    return sum;
}

/* Four lines of codes from `line` on, a multiple of four: those of word `word` (0 to 15) of a tile.  LOW: bits of the low
 * plane. */
template <int LOW>
__device__ inline void four_lines(const kv_side &f, const char *tile, int line, int word,
                                  uint32_t *codes)
{
    const int shift = LOW == 8 ? 0 : LOW == 4 ? 1 : LOW == 2 ? 2 : 3, each = 1 << shift;
    const uint32_t *at = (const uint32_t *)(tile + (line >> shift) * LM_KV_LINE) + word;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int in_unit = LOW == 1 ? (line & 4) + k : k % each;
        codes[k] =
            at[k / each * (LM_KV_LINE / 4)] >> (LOW * in_unit) & ((1u << LOW) - 1) * 0x01010101u;
    }
    const int high = f.bits - LOW;
    if (LOW == 8 || LOW == 1 || !high)
        return;
    const int of = high == 1 ? 3 : 2; /* log2 of lines in a unit of the high plane: 8 or 4 */
    const uint32_t x = ((const uint32_t *)(tile + f.high_plane + (line >> of) * LM_KV_LINE))[word];
#pragma unroll
    for (int k = 0; k < 4; k++)
        codes[k] |=
            (x >> (high * (high == 1 ? (line & 4) + k : k)) & ((1u << high) - 1) * 0x01010101u)
            << LOW;
}

/* CALL(LOW) for the bits of a side's low plane. */
#define LM_KV_FOR_LOW(low, CALL) \
    do {                         \
        if ((low) == 8)          \
            CALL(8);             \
        else if ((low) == 4)     \
            CALL(4);             \
        else if ((low) == 2)     \
            CALL(2);             \
        else                     \
            CALL(1);             \
    } while (0)

/* A warp quantises `words` words, at most 64, of four numbers each, number(i) the i-th: a number that is not finite makes
 * `by` NaN, and with it all products. */
template <class F>
__device__ inline void quantize_block(int words, const F &number, uint32_t *hi, uint32_t *lo,
                                      float *by)
{
    const int lane = (int)threadIdx.x % 32;
    float v[2][4], top = 0;
    bool finite = true;
#pragma unroll
    for (int w = 0; w < 2; w++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool there = lane + 32 * w < words;
            v[w][e] = there ? number(4 * (lane + 32 * w) + e) : 0.0f;
            finite = finite && isfinite(v[w][e]);
            top = fmaxf(top, fabsf(v[w][e]));
        }
    top = warp_max(top);
    finite = __all_sync(every_lane, finite);
    const float inverse = finite && top > 1e-30f ? 32639.0f / top : 0.0f;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        uint32_t h = 0, l = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int q = inverse > 0 ? __float2int_rn(v[w][e] * inverse) : 0, up = (q + 128) >> 8;
            h |= ((uint32_t)up & 255) << (8 * e);
            l |= ((uint32_t)(q - 256 * up) & 255) << (8 * e);
        }
        if (lane + 32 * w < words) {
            hi[lane + 32 * w] = h;
            lo[lane + 32 * w] = l;
        }
    }
    if (lane == 0)
        *by = finite ? top / 32639.0f : NAN;
}

/* Sums of products with codes, by planes. */
template <int Q> struct plane_sums {
    int hi[Q], lo[Q];
    /* Add four words of codes times four words of each query: planes `next` words apart, queries `step`. */
    __device__ inline void add(const uint32_t *codes, const uint32_t *planes, int next, int step)
    {
        typedef pack<uint32_t, 4> P;
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const P h = *(const P *)(planes + q * step), l = *(const P *)(planes + q * step + next);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                hi[q] = dot_codes(codes[k], h.v[k], hi[q]);
                lo[q] = dot_codes(codes[k], l.v[k], lo[q]);
            }
        }
    }
    __device__ inline float sum(int q) const
    {
        return fmaf(256.0f, (float)hi[q], (float)lo[q]);
    }
};

/* ---- what a format multiplies by ---- */

/* The scale of token t, channel d of a page, and what every number of its group has beside it: its minimum, or what codes
 * of LM_KV_SYM are raised by. */
__device__ inline kv_scale32 integer_scale(const kv_side &f, const char *page, int t, int d)
{
    const int at = kv_scale_at(f, t, d);
    const float s = kv_get_scale(f.scale, page + f.at_scale, at);
    return { s, f.minima ? kv_get_scale(f.scale, page + f.at_min, at)
                         : -s * (float)(1 << (f.bits - 1)) };
}

__device__ inline float integer_second(const kv_side &f, const char *page, int t, int d)
{
    return f.second ? kv_get_scale(f.scale, page + f.at_second, kv_second_at(f, t, d)) : 1.0f;
}

/* Whether numbers are scales times whole codes. */
inline bool is_integer(const kv_side &f)
{
    return !f.plain && (f.levels == LM_KV_SYM || f.levels == LM_KV_ASYM) && !f.fixed &&
           !f.outliers && f.scale != LM_DTYPE_NONE;
}

#endif
