/* SPDX-License-Identifier: Apache-2.0 */
/* joint_body.h -- the loops of joint.h with vectors of bytes, for the target processor; included by
 * joint_simd.c and joint_amx.c.
 *
 * With VBMI a permutation looks up the 64 entries of a map.  Without it they are four tables of
 * sixteen: a sum with saturation leaves only the indexes of the table at hand below 128, and a
 * shuffle gives zero for the others. */
#include <immintrin.h>

#include "kernels/joint.h"

#define INLINE       static inline __attribute__((always_inline))
#define UNROLL       _Pragma("GCC unroll 4")
#define PASTE(level) lm_joint_##level
#define NAME(level)  PASTE(level)

#ifdef __AVX512BW__
enum { V = 64 }; /* bytes in a vector */
typedef __m512i vec;
#define OP(name)   _mm512_##name
#define BITS(name) _mm512_##name##_si512
/* v where e is not 0, else 0 */
INLINE vec where(vec e, vec v)
{
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(e, e), v);
}
INLINE vec lanes(const uint8_t *p)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
}
/* Restore the order of bytes after packus and unpack, which interleave lanes; and the inverse. */
INLINE vec to_order(vec v)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
}
INLINE vec from_order(vec v)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v);
}
/* The low bytes of v; and bytes to 16 bits. */
INLINE void store_bytes(uint8_t *p, vec v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8(v));
}
INLINE vec load_bytes(const uint8_t *p)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
/* A mask of the bytes of x in the set of s0 and s1, its lowest first; bit: 1 << i in byte i of each
 * lane, i < 8. */
INLINE uint64_t members(vec s0, vec s1, vec bit, vec x)
{
    vec nibble = _mm512_and_si512(x, _mm512_set1_epi8(15));
    vec high = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(7));
    vec rows = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(s0, nibble), _mm512_movepi8_mask(x), s1,
                                        nibble);
    return _mm512_test_epi8_mask(rows, _mm512_shuffle_epi8(bit, high));
}
/* A mask of the 16-bit units equal to v. */
INLINE uint32_t equal_words(vec x, int v)
{
    return _mm512_cmpeq_epi16_mask(x, _mm512_set1_epi16((short)v));
}
#else
enum { V = 32 };
typedef __m256i vec;
#define OP(name)   _mm256_##name
#define BITS(name) _mm256_##name##_si256
INLINE vec where(vec e, vec v)
{
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(e, _mm256_setzero_si256()), v);
}
INLINE vec lanes(const uint8_t *p)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec to_order(vec v)
{
    return _mm256_permute4x64_epi64(v, 0xd8);
}
INLINE vec from_order(vec v)
{
    return _mm256_permute4x64_epi64(v, 0xd8);
}
INLINE void store_bytes(uint8_t *p, vec v)
{
    vec packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(v, v), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
INLINE vec load_bytes(const uint8_t *p)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}
INLINE uint64_t members(vec s0, vec s1, vec bit, vec x)
{
    vec nibble = _mm256_and_si256(x, _mm256_set1_epi8(15));
    vec high = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(7));
    vec rows =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(s0, nibble), _mm256_shuffle_epi8(s1, nibble), x);
    vec none = _mm256_cmpeq_epi8(_mm256_and_si256(rows, _mm256_shuffle_epi8(bit, high)),
                                 _mm256_setzero_si256());
    return ~(uint32_t)_mm256_movemask_epi8(none);
}
INLINE uint32_t equal_words(vec x, int v)
{
    vec equal = _mm256_cmpeq_epi16(x, _mm256_set1_epi16((short)v));
    __m128i packed =
        _mm_packs_epi16(_mm256_castsi256_si128(equal), _mm256_extracti128_si256(equal, 1));
    return (uint32_t)_mm_movemask_epi8(packed);
}
#endif

INLINE vec load(const void *p)
{
    return BITS(loadu)(p);
}

INLINE void store(void *p, vec v)
{
    BITS(storeu)(p, v);
}

INLINE vec both(vec a, vec b)
{
    return BITS(and)(a, b);
}

INLINE vec either(vec a, vec b)
{
    return BITS(or)(a, b);
}

INLINE vec words(int v)
{
    return OP(set1_epi16)((short)v);
}

INLINE vec bytes(int v)
{
    return OP(set1_epi8)((char)v);
}

/* table[i] of each byte i of the indexes, which are below 64. */
typedef struct {
#ifdef __AVX512VBMI__
    vec all;
#else
    vec part[4];
#endif
} table;

INLINE table table_of(const uint8_t entry[LM_JOINT_RANKS])
{
    table t;
#ifdef __AVX512VBMI__
    t.all = load(entry);
#else
    UNROLL for (int i = 0; i < 4; i++) t.part[i] = lanes(entry + 16 * i);
#endif
    return t;
}

INLINE vec look_up(const table *t, vec index)
{
#ifdef __AVX512VBMI__
    return _mm512_permutexvar_epi8(index, t->all);
#else
    vec found = bytes(0);
    UNROLL for (int i = 0; i < 4; i++)
    {
        vec at = OP(adds_epu8)(BITS(xor)(index, bytes(i << 4)), bytes(0x70));
        found = either(found, OP(shuffle_epi8)(t->part[i], at));
    }
    return found;
#endif
}

/* 4 i + k of a vector of elements, one in each 16 bits. */
INLINE vec indexes(vec x, vec low, vec most)
{
    vec e = both(OP(srli_epi16)(x, 7), words(255));
    vec i = where(e, OP(add_epi16)(OP(min_epu16)(OP(sub_epi16)(e, low), most), words(1)));
    return either(OP(slli_epi16)(i, 2), both(OP(srli_epi16)(x, 5), words(3)));
}

static void split(const lm_joint_map *map, const void *x, size_t n, uint8_t *pair, uint8_t *rest)
{
    const uint8_t *from = x;
    const table ranks = table_of(map->rank);
    vec low = words(map->low), most = words(map->m - 1);
    size_t i = 0;
    for (; i + V <= n; i += V) {
        vec a = load(from + 2 * i), b = load(from + 2 * i + V);
        vec index = OP(packus_epi16)(indexes(a, low, most), indexes(b, low, most));
        vec below = OP(packus_epi16)(both(a, words(31)), both(b, words(31)));
        vec high = OP(packus_epi16)(OP(srli_epi16)(a, 8), OP(srli_epi16)(b, 8));
        vec rank = look_up(&ranks, index);
        vec r = either(below, both(high, bytes(0x80)));
        store(rest + i, to_order(either(r, OP(slli_epi16)(both(rank, bytes(3)), 5))));
        vec group = to_order(both(OP(srli_epi16)(rank, 2), bytes(15)));
        store_bytes(pair + i / 2, OP(maddubs_epi16)(group, words(16 << 8 | 1)));
    }
    lm_joint_ref.split(map, from + 2 * i, n - i, pair + i / 2, rest + i);
}

/* Write an entry, and count it if it is not empty, without a branch, which would be
 * unpredictable. */
INLINE size_t put_places(lm_joint_places *at, size_t from, uint32_t bits)
{
    *at = (lm_joint_places){ (uint32_t)from, bits };
    return bits != 0;
}

/* Convert the indexes of the last elements, counted from pair `from`, to indexes among all. */
INLINE size_t move_places(lm_joint_places *at, size_t some, size_t from)
{
    for (size_t i = 0; i < some; i++)
        at[i].from += (uint32_t)from;
    return some;
}

static size_t join(const lm_joint_map *map, const uint8_t *pair, const uint8_t *rest, size_t n,
                   void *x, lm_joint_places *rare)
{
    uint8_t *out = x;
    const table lows = table_of(map->below), highs = table_of(map->high);
    size_t i = 0, some = 0;
    for (; i + V <= n; i += V) {
        vec p = load_bytes(pair + i / 2), r = load(rest + i);
        vec group = both(either(p, OP(slli_epi16)(p, 4)), bytes(15));
        vec rank = either(OP(slli_epi16)(group, 2), both(OP(srli_epi16)(r, 5), bytes(3)));
        vec below = either(look_up(&lows, rank), both(r, bytes(31)));
        vec high = either(look_up(&highs, rank), both(r, bytes(0x80)));
        below = from_order(below), high = from_order(high);
        store(out + 2 * i, OP(unpacklo_epi8)(below, high));
        store(out + 2 * i + V, OP(unpackhi_epi8)(below, high));
        some += put_places(rare + some, i / 2, equal_words(p, LM_JOINT_RARE));
    }
    size_t tail = lm_joint_ref.join(map, pair + i / 2, rest + i, n - i, out + 2 * i, rare + some);
    return some + move_places(rare + some, tail, i / 2);
}

static size_t find(const uint8_t set[2][16], const uint8_t *pair, size_t n, lm_joint_places *found)
{
    static const uint8_t bits[16] = { 1, 2, 4, 8, 16, 32, 64, 128 };
    vec s0 = lanes(set[0]), s1 = lanes(set[1]), bit = lanes(bits);
    size_t i = 0, some = 0;
    for (; i + 2 * V <= n; i += 2 * V) {
        uint64_t in = members(s0, s1, bit, load(pair + i / 2));
        some += put_places(found + some, i / 2, (uint32_t)in);
        if (V == 64)
            some += put_places(found + some, i / 2 + 32, (uint32_t)(in >> 32));
    }
    size_t tail = lm_joint_ref.find(set, pair + i / 2, n - i, found + some);
    return some + move_places(found + some, tail, i / 2);
}

const lm_joint_kernels NAME(LM_SIMD) = { split, join, find };
