/* SPDX-License-Identifier: Apache-2.0 */
/* head_turn.h -- the orthonormal Hadamard matrix by butterflies: up to eight vectors stay in registers, larger blocks in
 * the first-level cache.  The scale is applied once, at the end. */
#ifndef LM_KERNELS_CPU_HEAD_TURN_H
#define LM_KERNELS_CPU_HEAD_TURN_H

#include "kernels/cpu/simd.h"
#include "kernels/kv.h"

enum { ROTATE_VECTORS = 8, ROTATE_PART = ROTATE_VECTORS * VF_LANES };

/* Lane i ^ half of v. */
LM_INLINE vf partner(vf v, int half)
{
#ifdef __AVX512F__
    switch (half) {
    case 1:
        return _mm512_permute_ps(v, 0xb1);
    case 2:
        return _mm512_permute_ps(v, 0x4e);
    case 4:
        return _mm512_shuffle_f32x4(v, v, 0xb1);
    default:
        return _mm512_shuffle_f32x4(v, v, 0x4e);
    }
#else
    switch (half) {
    case 1:
        return _mm256_permute_ps(v, 0xb1);
    case 2:
        return _mm256_permute_ps(v, 0x4e);
    default:
        return _mm256_permute2f128_ps(v, v, 1);
    }
#endif
}

/* Sums in lanes without the bit `half`, differences in those with it. */
LM_INLINE vf turn(vf v, int half)
{
    vf other = partner(v, half);
#ifdef __AVX512F__
    unsigned with = half == 1 ? 0xaaaa : half == 2 ? 0xcccc : half == 4 ? 0xf0f0 : 0xff00;
    return _mm512_mask_sub_ps(other + v, (__mmask16)with, other, v);
#else
    vf with =
        _mm256_setr_ps(0, half & 1 ? -0.0f : 0, half & 2 ? -0.0f : 0, half & 3 ? -0.0f : 0,
                       half & 4 ? -0.0f : 0, half & 5 ? -0.0f : 0, half & 6 ? -0.0f : 0, -0.0f);
    return other + _mm256_xor_ps(v, with);
#endif
}

/* The stages within blocks of `block` lanes. */
LM_INLINE vf turn_lanes(vf v, int64_t block)
{
    if (block > 1)
        v = turn(v, 1);
    if (block > 2)
        v = turn(v, 2);
    if (block > 4)
        v = turn(v, 4);
#if VF_LANES > 8
    if (block > 8)
        v = turn(v, 8);
#endif
    return v;
}

/* One block of `vectors` vectors, a constant: x to y. */
LM_INLINE void turn_vectors(lm_dtype t, const void *x, lm_dtype ty, void *y, int vectors, vf scale)
{
    vf v[ROTATE_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
        v[i] = turn_lanes(vf_get(t, x, i * VF_LANES), VF_LANES);
#pragma GCC unroll 3
    for (int half = 1; half < vectors; half *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++)
            if (!(i & half)) {
                vf low = v[i], high = v[i + half];
                v[i] = low + high;
                v[i + half] = low - high;
            }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
        vf_put(ty, y, i * VF_LANES, v[i] * scale);
}

/* Blocks of more than ROTATE_PART numbers. */
LM_INLINE void turn_large(lm_dtype t, const char *x, lm_dtype ty, char *y, int64_t block, vf scale)
{
    float b[LM_KV_MAX_DIM];
    int64_t size = t == LM_DTYPE_BF16 ? 2 : 4;
    for (int64_t i = 0; i < block; i += ROTATE_PART)
        turn_vectors(t, x + i * size, LM_DTYPE_F32, b + i, ROTATE_VECTORS, vf_set(1));
    for (int64_t half = ROTATE_PART; half < block; half *= 2)
        for (int64_t i = 0; i < block; i += 2 * half)
            for (int64_t j = i; j < i + half; j += VF_LANES) {
                vf low = vf_load(b + j), high = vf_load(b + j + half);
                vf_store(b + j, low + high);
                vf_store(b + j + half, low - high);
            }
    for (int64_t i = 0; i < block; i += VF_LANES)
        vf_put(ty, y, i, vf_load(b + i) * scale);
}

/* A head of D numbers in blocks of `block`: x, of type t, to y, of type ty; they may be the same. */
LM_INLINE void turn_head(lm_dtype t, const char *x, lm_dtype ty, char *y, int64_t D, int64_t block,
                         vf scale)
{
    int64_t size = t == LM_DTYPE_BF16 ? 2 : 4, size_y = ty == LM_DTYPE_BF16 ? 2 : 4;
    if (block < VF_LANES) {
        VF_FOR(d, n, D,
               { vf_put_any(ty, y, d, turn_lanes(vf_get_any(t, x, d, n), block) * scale, n); });
        return;
    }
    for (int64_t d = 0; d < D; d += block, x += block * size, y += block * size_y)
        switch (block / VF_LANES) {
        case 1:
            turn_vectors(t, x, ty, y, 1, scale);
            break;
        case 2:
            turn_vectors(t, x, ty, y, 2, scale);
            break;
        case 4:
            turn_vectors(t, x, ty, y, 4, scale);
            break;
        case 8:
            turn_vectors(t, x, ty, y, 8, scale);
            break;
        default:
            turn_large(t, x, ty, y, block, scale);
        }
}

#endif
