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

#ifdef __AVX512F__
/* One round of the blocks in the even lanes of c; the odd lanes hold remains, which the
 * multiplication ignores. */
static inline __attribute__((always_inline)) void vrng_round(__m512i c[4], const uint32_t key[2])
{
    __m512i a = _mm512_mul_epu32(c[0], _mm512_set1_epi64(0xD2511F53));
    __m512i b = _mm512_mul_epu32(c[2], _mm512_set1_epi64(0xCD9E8D57));
    __m512i k0 = _mm512_set1_epi32((int)key[0]), k1 = _mm512_set1_epi32((int)key[1]);
    c[0] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(b, 32), c[1], k0, 0x96 /* a ^ b ^ c */);
    c[2] = _mm512_ternarylogic_epi32(_mm512_shuffle_epi32(a, 0xf5), c[3], k1, 0x96);
    c[1] = b;
    c[3] = a;
}

/* Rounds 1 and 2 of eight blocks whose low counter words are in c0; the other words of the counter
 * are the same in all of them, so half of these rounds is made once, on scalars. */
static inline __attribute__((always_inline)) void
vrng_first_rounds(__m512i c[4], __m512i c0, uint32_t c1, uint64_t hi, const uint32_t key[4])
{
    uint64_t b = (hi & UINT32_MAX) * UINT64_C(0xCD9E8D57);
    uint64_t a = (uint64_t)((uint32_t)(b >> 32) ^ c1 ^ key[0]) * UINT64_C(0xD2511F53);
    __m512i x = _mm512_mul_epu32(c0, _mm512_set1_epi64(0xD2511F53));
    __m512i y = _mm512_xor_si512(_mm512_srli_epi64(x, 32),
                                 _mm512_set1_epi32((int)((uint32_t)(hi >> 32) ^ key[1])));
    y = _mm512_mul_epu32(y, _mm512_set1_epi64(0xCD9E8D57));
    c[0] =
        _mm512_xor_si512(_mm512_srli_epi64(y, 32), _mm512_set1_epi32((int)((uint32_t)b ^ key[2])));
    c[1] = y;
    c[2] = _mm512_xor_si512(x, _mm512_set1_epi32((int)((uint32_t)(a >> 32) ^ key[3])));
    c[3] = _mm512_set1_epi32((int)(uint32_t)a);
}

/* Round 10 of blocks 0 4 1 5 2 6 3 7 in the even lanes: bit i, i < 32: number i of them is at least
 * `least`.  The products hold two words of the result side by side: one shift less for each. */
static inline __attribute__((always_inline)) uint32_t
vrng_last_round(const __m512i c[4], const uint32_t key[2], uint32_t least)
{
    const __m512i bound = _mm512_set1_epi32((int)least);
    const __m512i k0 = _mm512_set1_epi64((int64_t)((uint64_t)key[0] << 32));
    const __m512i k1 = _mm512_set1_epi64((int64_t)((uint64_t)key[1] << 32));
    __m512i a = _mm512_mul_epu32(c[0], _mm512_set1_epi64(0xD2511F53));
    __m512i b = _mm512_mul_epu32(c[2], _mm512_set1_epi64(0xCD9E8D57));
    b = _mm512_ternarylogic_epi32(b, _mm512_slli_epi64(c[1], 32), k0, 0x96); /* words 1, 0 */
    a = _mm512_ternarylogic_epi32(a, _mm512_slli_epi64(c[3], 32), k1, 0x96); /* words 3, 2 */
    uint32_t lo = _mm512_cmpge_epu32_mask(_mm512_unpacklo_epi64(b, a), bound);
    uint32_t up = _mm512_cmpge_epu32_mask(_mm512_unpackhi_epi64(b, a), bound);
    uint32_t bits = lo | up << 16;
    return (bits & 0x55555555) << 1 | (bits >> 1 & 0x55555555);
}

/* Bit i, i < 64, of bits[n]: number i of blocks first[n] .. first[n] + 15 is at least `least`.  The
 * low word of `first` is at most 2^32 - 16; key: those of the ten rounds.  A round is a chain of
 * some 7 cycles: four of them side by side keep the multipliers busy. */
static inline __attribute__((always_inline)) void
lm_philox_at_least(uint64_t hi, const uint64_t first[2], const uint32_t key[20], uint32_t least,
                   uint64_t bits[2])
{
    __m512i c[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i at = _mm512_set1_epi64((int64_t)(first[i / 2] + 8 * (uint64_t)(i % 2)));
        at = _mm512_add_epi64(at, _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
        vrng_first_rounds(c[i], at, (uint32_t)(first[i / 2] >> 32), hi, key);
    }
#pragma GCC unroll 7
    for (int round = 2; round < 9; round++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            vrng_round(c[i], key + 2 * round);
    uint64_t part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        part[i] = vrng_last_round(c[i], key + 18, least);
    bits[0] = part[0] | part[1] << 32;
    bits[1] = part[2] | part[3] << 32;
}
#endif

/* lm_philox_vectors into memory. */
static inline void lm_philox_draws(lm_rng r, uint64_t first, uint32_t out[VRNG_DRAWS])
{
    vrng_u32 v[4];
    lm_philox_vectors(r, first, v);
    __builtin_memcpy(out, v, sizeof v);
}

#endif
