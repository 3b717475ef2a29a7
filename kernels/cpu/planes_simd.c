/* SPDX-License-Identifier: Apache-2.0 */
/* planes_simd.c -- byte planes with vectors: elements are transformed in their own width, packed to
 * bytes inside 128-bit lanes, and one permutation puts the lanes' pieces in order.
 *
 * Packing halves the width: of two vectors of wide units, one keeps all low halves, one all high
 * ones.  After log2(size) halvings, lane L of a plane's vector holds the elements of lane L of
 * vector 0, of vector 1, ...; the permutation exchanges the two indices.  Joining is the
 * inverse. */
#include <immintrin.h>
#include <string.h>

#include "kernels/planes.h"

#define INLINE       static inline __attribute__((always_inline))
#define UNROLL       _Pragma("GCC unroll 8")
#define PASTE(level) lm_planes_##level
#define NAME(level)  PASTE(level)

#ifdef __AVX512F__
enum { V = 64 };
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
INLINE vec low_bytes(vec a, vec b) /* of 16-bit units */
{
    vec m = _mm512_set1_epi16(0xff);
    return _mm512_packus_epi16(_mm512_and_si512(a, m), _mm512_and_si512(b, m));
}
INLINE vec low_words(vec a, vec b)
{
    vec m = _mm512_set1_epi32(0xffff);
    return _mm512_packus_epi32(_mm512_and_si512(a, m), _mm512_and_si512(b, m));
}
INLINE vec pick_dwords(vec a, vec b, int high)
{
    __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_castps_si512(high ? _mm512_shuffle_ps(x, y, 0xdd)
                                    : _mm512_shuffle_ps(x, y, 0x88));
}
/* Lane L, piece p of 16 / count bytes -> place 4 p + L; and back. */
INLINE vec to_order(vec v, int count)
{
    if (count == 2)
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
    if (count == 4)
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5,
                                                     28, 20, 12, 4, 27, 19, 11, 3, 26, 18, 10, 2,
                                                     25, 17, 9, 1, 24, 16, 8, 0),
                                    v);
}
INLINE vec from_order(vec v, int count)
{
    if (count == 2)
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v);
    if (count == 4)
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18,
                                                     14, 10, 6, 2, 29, 25, 21, 17, 13, 9, 5, 1, 28,
                                                     24, 20, 16, 12, 8, 4, 0),
                                    v);
}
#else
enum { V = 32 };
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
INLINE vec low_bytes(vec a, vec b)
{
    vec m = _mm256_set1_epi16(0xff);
    return _mm256_packus_epi16(_mm256_and_si256(a, m), _mm256_and_si256(b, m));
}
INLINE vec low_words(vec a, vec b)
{
    vec m = _mm256_set1_epi32(0xffff);
    return _mm256_packus_epi32(_mm256_and_si256(a, m), _mm256_and_si256(b, m));
}
INLINE vec pick_dwords(vec a, vec b, int high)
{
    __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return _mm256_castps_si256(high ? _mm256_shuffle_ps(x, y, 0xdd)
                                    : _mm256_shuffle_ps(x, y, 0x88));
}
/* Lane L, piece p of 16 / count bytes -> place 2 p + L; and back. */
INLINE vec to_order(vec v, int count)
{
    if (count == 2)
        return _mm256_permute4x64_epi64(v, 0xd8);
    if (count == 4)
        return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    vec other = _mm256_permute2x128_si256(v, v, 1);
    return _mm256_permute2x128_si256(_mm256_unpacklo_epi16(v, other),
                                     _mm256_unpackhi_epi16(v, other), 0x20);
}
INLINE vec from_order(vec v, int count)
{
    if (count == 2)
        return _mm256_permute4x64_epi64(v, 0xd8);
    if (count == 4)
        return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    const vec halves = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1,
                                        4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, halves), 0xd8);
}
#endif

INLINE vec high_bytes(vec a, vec b)
{
    return OP(packus_epi16)(OP(srli_epi16)(a, 8), OP(srli_epi16)(b, 8));
}
INLINE vec high_words(vec a, vec b)
{
    return OP(packus_epi32)(OP(srli_epi32)(a, 16), OP(srli_epi32)(b, 16));
}

/* ---- The transformation of an element, in vectors of its own width ---- */

typedef enum { COPY, ROTATE, XOR, XOR_ROTATE, DIFF, FOLD_DIFF, CHANGES } change_kind;

#define CHANGE(bits)                                                                  \
    typedef uint##bits##_t u##bits __attribute__((vector_size(V)));                   \
    typedef int##bits##_t s##bits __attribute__((vector_size(V)));                    \
    INLINE u##bits sign##bits(u##bits x) /* all ones where the top bit is set */      \
    {                                                                                 \
        return (u##bits)((s##bits)x < 0);                                             \
    }                                                                                 \
    INLINE vec change##bits(change_kind how, vec xv, vec bv)                          \
    {                                                                                 \
        const uint##bits##_t top = (uint##bits##_t)((uint##bits##_t)1 << (bits - 1)); \
        u##bits x = (u##bits)xv, b = (u##bits)bv;                                     \
        if (how == XOR || how == XOR_ROTATE)                                          \
            x ^= b;                                                                   \
        if (how == ROTATE || how == XOR_ROTATE)                                       \
            x = x << 1 | x >> (bits - 1);                                             \
        if (how == FOLD_DIFF)                                                         \
            x ^= sign##bits(x) | top, b ^= sign##bits(b) | top;                       \
        if (how == DIFF || how == FOLD_DIFF)                                          \
            x -= b, x = x << 1 ^ sign##bits(x);                                       \
        return (vec)x;                                                                \
    }                                                                                 \
    INLINE vec restore##bits(change_kind how, vec yv, vec bv)                         \
    {                                                                                 \
        const uint##bits##_t top = (uint##bits##_t)((uint##bits##_t)1 << (bits - 1)); \
        u##bits y = (u##bits)yv, b = (u##bits)bv;                                     \
        if (how == FOLD_DIFF)                                                         \
            b ^= sign##bits(b) | top;                                                 \
        if (how == DIFF || how == FOLD_DIFF)                                          \
            y = b + (y >> 1 ^ -(y & 1));                                              \
        if (how == FOLD_DIFF)                                                         \
            y ^= ~sign##bits(y) | top;                                                \
        if (how == ROTATE || how == XOR_ROTATE)                                       \
            y = y >> 1 | y << (bits - 1);                                             \
        if (how == XOR || how == XOR_ROTATE)                                          \
            y ^= b;                                                                   \
        return (vec)y;                                                                \
    }
CHANGE(8)
CHANGE(16)
CHANGE(32)
CHANGE(64)

INLINE vec changed(int size, change_kind how, const uint8_t *x, const uint8_t *b)
{
    vec xv = load(x), bv = how >= XOR ? load(b) : xv;
    return size == 1   ? change8(how, xv, bv)
           : size == 2 ? change16(how, xv, bv)
           : size == 4 ? change32(how, xv, bv)
                       : change64(how, xv, bv);
}

INLINE void restored(int size, change_kind how, vec y, const uint8_t *b, uint8_t *x)
{
    vec bv = how >= XOR ? load(b) : y;
    store(x, size == 1   ? restore8(how, y, bv)
             : size == 2 ? restore16(how, y, bv)
             : size == 4 ? restore32(how, y, bv)
                         : restore64(how, y, bv));
}

/* ---- V elements at a time ---- */

/* pieces: from how many vectors the words of a lane come. */
INLINE void split_bytes(vec a, vec b, int pieces, uint8_t *low, uint8_t *high)
{
    store(low, to_order(low_bytes(a, b), pieces));
    store(high, to_order(high_bytes(a, b), pieces));
}

INLINE void split_block(int size, const vec *x, uint8_t *const *plane, size_t i)
{
    if (size == 1) {
        store(plane[0] + i, x[0]);
    } else if (size == 2) {
        split_bytes(x[0], x[1], 2, plane[0] + i, plane[1] + i);
    } else {
        vec d[2][4]; /* low and high 32-bit halves of 8-byte elements, else x itself */
        UNROLL for (int k = 0; k < 4; k++)
        {
            d[0][k] = size == 4 ? x[k] : pick_dwords(x[2 * k], x[2 * k + 1], 0);
            d[1][k] = size == 4 ? x[k] : pick_dwords(x[2 * k], x[2 * k + 1], 1);
        }
        UNROLL for (int h = 0; h < size / 4; h++)
        {
            vec *w = d[h];
            uint8_t *const *p = plane + 4 * h;
            split_bytes(low_words(w[0], w[1]), low_words(w[2], w[3]), size, p[0] + i, p[1] + i);
            split_bytes(high_words(w[0], w[1]), high_words(w[2], w[3]), size, p[2] + i, p[3] + i);
        }
    }
}

INLINE vec plane_at(const uint8_t *plane, size_t i, int pieces)
{
    return from_order(load(plane + i), pieces);
}

/* Four vectors of 32-bit units from four planes. */
INLINE void join_dwords(int pieces, const uint8_t *const *plane, size_t i, vec out[4])
{
    vec p[4];
    UNROLL for (int k = 0; k < 4; k++) p[k] = plane_at(plane[k], i, pieces);
    vec low[2] = { OP(unpacklo_epi8)(p[0], p[1]), OP(unpackhi_epi8)(p[0], p[1]) };
    vec high[2] = { OP(unpacklo_epi8)(p[2], p[3]), OP(unpackhi_epi8)(p[2], p[3]) };
    UNROLL for (int k = 0; k < 2; k++)
    {
        out[2 * k] = OP(unpacklo_epi16)(low[k], high[k]);
        out[2 * k + 1] = OP(unpackhi_epi16)(low[k], high[k]);
    }
}

INLINE void join_block(int size, const uint8_t *const *plane, size_t i, vec *y)
{
    if (size == 1) {
        y[0] = load(plane[0] + i);
    } else if (size == 2) {
        vec low = plane_at(plane[0], i, 2), high = plane_at(plane[1], i, 2);
        y[0] = OP(unpacklo_epi8)(low, high);
        y[1] = OP(unpackhi_epi8)(low, high);
    } else if (size == 4) {
        join_dwords(4, plane, i, y);
    } else {
        vec low[4], high[4];
        join_dwords(8, plane, i, low);
        join_dwords(8, plane + 4, i, high);
        UNROLL for (int k = 0; k < 4; k++)
        {
            y[2 * k] = OP(unpacklo_epi32)(low[k], high[k]);
            y[2 * k + 1] = OP(unpackhi_epi32)(low[k], high[k]);
        }
    }
}

/* ---- Whole arrays ---- */

INLINE size_t split_all(int size, change_kind how, const uint8_t *x, const uint8_t *b, size_t n,
                        uint8_t *const *plane)
{
    size_t i = 0;
    for (; i + V <= n; i += V) {
        vec e[8];
        UNROLL for (int k = 0; k < size; k++)
        {
            size_t at = i * (size_t)size + (size_t)k * V;
            e[k] = changed(size, how, x + at, how >= XOR ? b + at : b);
        }
        split_block(size, e, plane, i);
    }
    return i;
}

INLINE size_t join_all(int size, change_kind how, const uint8_t *const *plane, const uint8_t *b,
                       size_t n, uint8_t *x)
{
    size_t i = 0;
    for (; i + V <= n; i += V) {
        vec e[8];
        join_block(size, plane, i, e);
        UNROLL for (int k = 0; k < size; k++)
        {
            size_t at = i * (size_t)size + (size_t)k * V;
            restored(size, how, e[k], how >= XOR ? b + at : b, x + at);
        }
    }
    return i;
}

static change_kind change_of(lm_planes_form f)
{
    if (f.delta == LM_PLANES_SUB)
        return f.field ? FOLD_DIFF : DIFF;
    bool rotate = f.field && f.size > 1;
    return f.delta == LM_PLANES_XOR ? (rotate ? XOR_ROTATE : XOR) : rotate ? ROTATE : COPY;
}

/* Call with constant size and change, so that each pair gets a separate loop. */
#define SIZES(call, how)          \
    (f.size == 1   ? call(1, how) \
     : f.size == 2 ? call(2, how) \
     : f.size == 4 ? call(4, how) \
                   : call(8, how))
#define EACH(call)                      \
    switch (change_of(f)) {             \
    case COPY:                          \
        done = SIZES(call, COPY);       \
        break;                          \
    case ROTATE:                        \
        done = SIZES(call, ROTATE);     \
        break;                          \
    case XOR:                           \
        done = SIZES(call, XOR);        \
        break;                          \
    case XOR_ROTATE:                    \
        done = SIZES(call, XOR_ROTATE); \
        break;                          \
    case DIFF:                          \
        done = SIZES(call, DIFF);       \
        break;                          \
    default:                            \
        done = SIZES(call, FOLD_DIFF);  \
        break;                          \
    }

static void split(lm_planes_form f, const void *x, const void *base, size_t n,
                  uint8_t *const plane[LM_PLANES_MAX])
{
    uint8_t *rest[LM_PLANES_MAX];
    size_t done;
#define SPLIT(size, how) split_all(size, how, x, base, n, plane)
    EACH(SPLIT)
    for (int k = 0; k < f.size; k++)
        rest[k] = plane[k] + done;
    done *= (size_t)f.size;
    lm_planes_ref.split(f, (const uint8_t *)x + done, f.delta ? (const uint8_t *)base + done : NULL,
                        n - done / (size_t)f.size, rest);
}

static void join(lm_planes_form f, const uint8_t *const plane[LM_PLANES_MAX], const void *base,
                 size_t n, void *x)
{
    const uint8_t *rest[LM_PLANES_MAX];
    size_t done;
#define JOIN(size, how) join_all(size, how, plane, base, n, x)
    EACH(JOIN)
    for (int k = 0; k < f.size; k++)
        rest[k] = plane[k] + done;
    done *= (size_t)f.size;
    lm_planes_ref.join(f, rest, f.delta ? (const uint8_t *)base + done : NULL,
                       n - done / (size_t)f.size, (uint8_t *)x + done);
}

const lm_planes_kernels NAME(LM_SIMD) = { split, join };
