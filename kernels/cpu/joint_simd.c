/* SPDX-License-Identifier: Apache-2.0 */
/* joint_simd.c -- symbols and rests of BF16 with vectors of 16-bit elements.
 *
 * Four rests become three bytes by a multiplication that joins pairs of them and a shift that joins
 * the pairs, and come back as Base64's encoders do: each 16-bit element gets the two bytes that its
 * six bits lie in, and a multiplication brings these to its top. */
#include <immintrin.h>

#include "kernels/joint.h"

#define INLINE       static inline __attribute__((always_inline))
#define PASTE(level) lm_joint_##level
#define NAME(level)  PASTE(level)

#ifdef __AVX512BW__
enum { W = 32 }; /* elements in a vector */
typedef __m512i vec;
#define OP(name) _mm512_##name
INLINE vec load(const void *p)
{
    return _mm512_loadu_si512(p);
}
INLINE void store(void *p, vec v)
{
    _mm512_storeu_si512(p, v);
}
INLINE vec both(vec a, vec b)
{
    return _mm512_and_si512(a, b);
}
INLINE vec either(vec a, vec b)
{
    return _mm512_or_si512(a, b);
}
/* v where e is not 0, else 0 */
INLINE vec where(vec e, vec v)
{
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(e, e), v);
}
INLINE vec add_where(vec e, vec a, vec b)
{
    return _mm512_mask_add_epi16(a, _mm512_test_epi16_mask(e, e), a, b);
}
/* a | (b & mask) */
INLINE vec with(vec a, vec b, vec mask)
{
    return _mm512_ternarylogic_epi32(a, b, mask, 0xf8);
}
INLINE bool any_from(vec v, int least)
{
    return _mm512_cmpge_epu16_mask(v, _mm512_set1_epi16((short)least)) != 0;
}
/* Which of the bytes at p are escapes, the first lowest. */
INLINE uint64_t escapes(const uint8_t *p)
{
    return _mm512_cmpge_epu8_mask(load(p), _mm512_set1_epi8((char)LM_JOINT_ESCAPE));
}
/* The low bytes of a, then of b. */
INLINE void store_bytes(uint8_t *p, vec a, vec b)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8(a));
    _mm256_storeu_si256((__m256i *)(p + 32), _mm512_cvtepi16_epi8(b));
}
INLINE vec load_bytes(const uint8_t *p)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec lanes(__m128i v)
{
    return _mm512_broadcast_i32x4(v);
}
/* Six bytes of each lane to p, in order; eight bytes more are written. */
INLINE void store_sixes(uint8_t *p, vec v)
{
    const __m512i words = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                           0, 26, 25, 24, 18, 17, 16, 10, 9, 8, 2, 1, 0);
    __m512i together = _mm512_permutexvar_epi16(words, v);
    _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(together));
}
/* And back: 24 bytes at p, of which 32 are read. */
INLINE vec load_sixes(const uint8_t *p)
{
    const __m512i words = _mm512_set_epi16(0, 0, 0, 0, 0, 11, 10, 9, 0, 0, 0, 0, 0, 8, 7, 6, 0, 0,
                                           0, 0, 0, 5, 4, 3, 0, 0, 0, 0, 0, 2, 1, 0);
    __m256i v = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_permutexvar_epi16(words, _mm512_castsi256_si512(v));
}
#else
enum { W = 16 };
typedef __m256i vec;
#define OP(name) _mm256_##name
INLINE vec load(const void *p)
{
    return _mm256_loadu_si256(p);
}
INLINE void store(void *p, vec v)
{
    _mm256_storeu_si256(p, v);
}
INLINE vec both(vec a, vec b)
{
    return _mm256_and_si256(a, b);
}
INLINE vec either(vec a, vec b)
{
    return _mm256_or_si256(a, b);
}
INLINE vec where(vec e, vec v)
{
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(e, _mm256_setzero_si256()), v);
}
INLINE vec add_where(vec e, vec a, vec b)
{
    return _mm256_add_epi16(a, where(e, b));
}
INLINE vec with(vec a, vec b, vec mask)
{
    return either(a, both(b, mask));
}
INLINE uint64_t escapes(const uint8_t *p)
{
    vec v = load(p), least = _mm256_set1_epi8((char)LM_JOINT_ESCAPE);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(v, least), v));
}
INLINE bool any_from(vec v, int least)
{
    vec m = _mm256_max_epu16(v, _mm256_set1_epi16((short)least));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi16(m, v)) != 0;
}
INLINE void store_bytes(uint8_t *p, vec a, vec b)
{
    store(p, _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
}
INLINE vec load_bytes(const uint8_t *p)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec lanes(__m128i v)
{
    return _mm256_broadcastsi128_si256(v);
}
INLINE void store_sixes(uint8_t *p, vec v)
{
    _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(v));
    _mm_storel_epi64((__m128i *)(p + 6), _mm256_extracti128_si256(v, 1));
}
INLINE vec load_sixes(const uint8_t *p)
{
    __m128i low = _mm_loadl_epi64((const __m128i *)p),
            high = _mm_loadl_epi64((const __m128i *)(p + 6));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
#endif

INLINE vec all(int v)
{
    return OP(set1_epi16)((short)v);
}

/* Symbols of a vector of elements, one in each 16 bits. */
INLINE vec symbols(vec x, vec low)
{
    vec e = both(OP(srli_epi16)(x, 7), all(255));
    vec index = OP(min_epu16)(OP(sub_epi16)(e, low), all(LM_JOINT_EXPONENTS));
    index = where(e, OP(add_epi16)(index, all(1)));
    return either(OP(slli_epi16)(index, 2), both(OP(srli_epi16)(x, 5), all(3)));
}

INLINE void put_rest(uint8_t *p, vec x)
{
    const __m128i three = _mm_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    vec r = either(both(x, all(31)), both(OP(srli_epi16)(x, 10), all(32)));
    vec pairs = OP(madd_epi16)(r, OP(set1_epi32)(64 << 16 | 1));
    vec fours = either(pairs, OP(srli_epi64)(pairs, 20));
    store_sixes(p, OP(shuffle_epi8)(fours, lanes(three)));
}

/* x with the five lowest bits and the sign that lie in the rest at p. */
INLINE vec with_rest(vec x, const uint8_t *p)
{
    const __m128i pick = _mm_setr_epi8(0, 1, 0, 1, 1, 2, 2, -1, 3, 4, 3, 4, 4, 5, 5, -1);
    const __m128i up =
        _mm_setr_epi16(1 << 10, 1 << 4, 1 << 6, 1 << 8, 1 << 10, 1 << 4, 1 << 6, 1 << 8);
    vec r = OP(mullo_epi16)(OP(shuffle_epi8)(load_sixes(p), lanes(pick)), lanes(up));
    return with(with(x, r, all(0x8000)), OP(srli_epi16)(r, 10), all(31));
}

static bool split(const void *x, size_t n, uint8_t low, uint8_t *symbol, uint8_t *rest)
{
    const uint8_t *from = x;
    vec most = all(0), base = all(low);
    size_t i = 0;
    for (; i + 3 * W <= n; i += 2 * W) { /* what is written too much is within the rest */
        vec a = load(from + 2 * i), b = load(from + 2 * i + 2 * W);
        vec sa = symbols(a, base), sb = symbols(b, base);
        most = OP(max_epu16)(most, OP(max_epu16)(sa, sb));
        store_bytes(symbol + i, sa, sb);
        put_rest(rest + i / 4 * 3, a);
        put_rest(rest + i / 4 * 3 + W / 4 * 3, b);
    }
    bool tail = lm_joint_ref.split(from + 2 * i, n - i, low, symbol + i, rest + i / 4 * 3);
    return any_from(most, LM_JOINT_ESCAPE) || tail;
}

static bool join(const uint8_t *symbol, const uint8_t *rest, size_t n, uint8_t low, void *x)
{
    uint8_t *out = x;
    vec most = all(0), base = all((low - 1) << 7);
    size_t i = 0;
    for (; i + 2 * W <= n; i += W) { /* what is read too much is within the rest */
        vec s = load_bytes(symbol + i);
        vec high = add_where(both(s, all(0xfc)), OP(slli_epi16)(s, 5), base);
        most = OP(max_epu16)(most, s);
        store(out + 2 * i, with_rest(high, rest + i / 4 * 3));
    }
    bool tail = lm_joint_ref.join(symbol + i, rest + i / 4 * 3, n - i, low, out + 2 * i);
    return any_from(most, LM_JOINT_ESCAPE) || tail;
}

static size_t escape(const uint8_t *symbol, size_t at, size_t n)
{
    for (; at + 2 * W <= n; at += 2 * W) {
        uint64_t found = escapes(symbol + at);
        if (found)
            return at + (size_t)__builtin_ctzll(found);
    }
    return lm_joint_ref.escape(symbol, at, n);
}

const lm_joint_kernels NAME(LM_SIMD) = { split, join, escape };
