/* SPDX-License-Identifier: Apache-2.0 */
/* vrng.h -- Philox 4x32-10 on vectors: the numbers of lm_rng_u32, 32 (AVX2) or 64 (AVX-512) at a
 * time. */
#ifndef LM_KERNELS_CPU_VRNG_H
#define LM_KERNELS_CPU_VRNG_H

#include <immintrin.h>

#include "base/rng.h"

#ifdef __AVX512F__
#define VRNG_LANES 16
typedef __m512i vrng_u32;
#define VRNG_OP(name)  _mm512_##name
#define VRNG_SET64(v)  _mm512_set1_epi64(v)
#define VRNG_MIX(a, b) _mm512_mask_blend_epi32(0xaaaa, a, b)
#else
#define VRNG_LANES     8
typedef __m256i vrng_u32;
#define VRNG_OP(name)  _mm256_##name
#define VRNG_SET64(v)  _mm256_set1_epi64x(v)
#define VRNG_MIX(a, b) _mm256_blend_epi32(a, b, 0xaa)
#endif
#define VRNG_DRAWS (4 * VRNG_LANES)

/* High and low words of the products of every lane with m (a multiplier in each even lane). */
static inline void vrng_mul(vrng_u32 x, vrng_u32 m, vrng_u32 *hi, vrng_u32 *lo)
{
    vrng_u32 even = VRNG_OP(mul_epu32)(x, m);
    vrng_u32 odd = VRNG_OP(mul_epu32)(VRNG_OP(srli_epi64)(x, 32), m);
    *lo = VRNG_MIX(even, VRNG_OP(slli_epi64)(odd, 32));
    *hi = VRNG_MIX(VRNG_OP(srli_epi64)(even, 32), odd);
}

/* Word j of block (first + k), k < VRNG_LANES, as number 4 k + j of the VRNG_DRAWS numbers in v:
 * what lm_rng_u32(r, 4 first + ...) gives.  Lane 4 l + j (quarter l of 128 bits) works on block j L
 * + l, with L quarters in all, so that the transposition inside each quarter leaves consecutive
 * words in each vector. */
static inline void lm_philox_vectors(lm_rng r, uint64_t first, vrng_u32 v[4])
{
    static const uint32_t offset[16] = {
#ifdef __AVX512F__
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15
#else
        0, 2, 4, 6, 1, 3, 5, 7
#endif
    };
    vrng_u32 c0, c1 = VRNG_OP(set1_epi32)((int)(uint32_t)(first >> 32));
    vrng_u32 c2 = VRNG_OP(set1_epi32)((int)(uint32_t)r.hi);
    vrng_u32 c3 = VRNG_OP(set1_epi32)((int)(uint32_t)(r.hi >> 32));
    vrng_u32 m0 = VRNG_SET64(0xD2511F53), m1 = VRNG_SET64(0xCD9E8D57);
    __builtin_memcpy(&c0, offset, sizeof c0);
    c0 = VRNG_OP(add_epi32)(c0, VRNG_OP(set1_epi32)((int)(uint32_t)first));
    if ((uint32_t)first > UINT32_MAX - VRNG_LANES) { /* the low word of some block wraps */
        uint32_t hi[VRNG_LANES];
        for (int lane = 0; lane < VRNG_LANES; lane++)
            hi[lane] = (uint32_t)((first + offset[lane]) >> 32);
        __builtin_memcpy(&c1, hi, sizeof c1);
    }
    uint32_t k0 = (uint32_t)r.key, k1 = (uint32_t)(r.key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        vrng_u32 ah, al, bh, bl;
        vrng_mul(c0, m0, &ah, &al);
        vrng_mul(c2, m1, &bh, &bl);
        c0 = bh ^ c1 ^ VRNG_OP(set1_epi32)((int)k0);
        c2 = ah ^ c3 ^ VRNG_OP(set1_epi32)((int)k1);
        c1 = bl;
        c3 = al;
    }
    vrng_u32 p = VRNG_OP(unpacklo_epi32)(c0, c1), q = VRNG_OP(unpacklo_epi32)(c2, c3);
    vrng_u32 s = VRNG_OP(unpackhi_epi32)(c0, c1), t = VRNG_OP(unpackhi_epi32)(c2, c3);
    v[0] = VRNG_OP(unpacklo_epi64)(p, q);
    v[1] = VRNG_OP(unpackhi_epi64)(p, q);
    v[2] = VRNG_OP(unpacklo_epi64)(s, t);
    v[3] = VRNG_OP(unpackhi_epi64)(s, t);
}

/* The same into memory. */
static inline void lm_philox_draws(lm_rng r, uint64_t first, uint32_t out[VRNG_DRAWS])
{
    vrng_u32 v[4];
    lm_philox_vectors(r, first, v);
    __builtin_memcpy(out, v, sizeof v);
}

#endif
