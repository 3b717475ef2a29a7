/* SPDX-License-Identifier: Apache-2.0 */
/* rans_simd.c -- the coder's loops for vectors.
 *
 * Decoding.  The symbol of a slot is found by comparing a whole table with it, so that no table of
 * 2^LM_RANS_BITS slots is built for each column; the eight states are independent until they read
 * words, which needs one addition each.
 * Encoding.  The eight states are one vector; the quotient by a frequency is computed in F64, which
 * is exact: a quotient of 32 bits by 14 that is no integer differs from the next one by 2^-46 of its
 * value or more. */
#include <immintrin.h>
#include <string.h>

#include "kernels/rans.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

#define PASTE(level) lm_rans_##level
#define NAME(level)  PASTE(level)

enum { BITS = LM_RANS_BITS, SLOTS = 1 << BITS, STATES = LM_RANS_STATES };

INLINE uint32_t load32(const void *p)
{
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}

INLINE uint32_t load16(const void *p)
{
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}

/* ---- Decoding ---- */

/* How many of 16, 32 or 64 entries are above the slot. */
#ifdef __AVX512BW__
INLINE unsigned above16(const uint16_t *t, uint32_t slot)
{
    __m256i v = _mm256_set1_epi16((short)slot);
    return (unsigned)__builtin_popcount(
        _mm256_cmpgt_epi16_mask(_mm256_loadu_si256((const __m256i *)t), v));
}

INLINE unsigned above32(const uint16_t *t, uint32_t slot)
{
    __m512i v = _mm512_set1_epi16((short)slot);
    return (unsigned)__builtin_popcount(_mm512_cmpgt_epi16_mask(_mm512_loadu_si512(t), v));
}

INLINE unsigned above64(const uint16_t *t, uint32_t slot)
{
    return above32(t, slot) + above32(t + 32, slot);
}
#else
INLINE __m256i greater(const uint16_t *t, __m256i v)
{
    return _mm256_cmpgt_epi16(_mm256_loadu_si256((const __m256i *)t), v);
}

INLINE unsigned above16(const uint16_t *t, uint32_t slot)
{
    __m256i v = _mm256_set1_epi16((short)slot);
    return (unsigned)__builtin_popcount((unsigned)_mm256_movemask_epi8(greater(t, v))) / 2;
}

INLINE unsigned above32(const uint16_t *t, uint32_t slot)
{
    __m256i v = _mm256_set1_epi16((short)slot);
    __m256i both = _mm256_packs_epi16(greater(t, v), greater(t + 16, v));
    return (unsigned)__builtin_popcount((unsigned)_mm256_movemask_epi8(both));
}

INLINE unsigned above64(const uint16_t *t, uint32_t slot)
{
    return above32(t, slot) + above32(t + 32, slot);
}
#endif

INLINE unsigned find(const uint16_t *t, int width, uint32_t slot)
{
    if (width == 16)
        return 15 - above16(t, slot);
    if (width == 32)
        return 31 - above32(t, slot);
    if (width == 64)
        return 63 - above64(t, slot);
    unsigned begin = t[128] <= slot ? 128 : 0;
    begin += t[begin + 64] <= slot ? 64 : 0;
    return begin + 63 - above64(t + begin, slot);
}

/* One symbol; *more: the state needs a word. */
INLINE uint32_t step(const uint16_t *t, int width, uint32_t x, uint8_t *symbol, bool *more)
{
    uint32_t slot = x & (SLOTS - 1), s = find(t, width, slot), pair = load32(t + s);
    uint32_t first = pair & 0xffff, freq = (pair >> 16) - first;
    *symbol = (uint8_t)s;
    x = freq * (x >> BITS) + slot - first;
    *more = x < LM_RANS_LEAST;
    return x;
}

/* `cols` symbols of a row; false: the words end. */
INLINE bool get_row(const lm_rans_set *set, int width, int64_t cols, uint32_t *states,
                    const uint8_t **src, const uint8_t *end, uint8_t *symbols)
{
    const uint16_t *start = set->start;
    const uint32_t *at = set->at;
    uint32_t x[STATES];
    const uint8_t *p = *src;
    int64_t c = 0;
    bool more;
    memcpy(x, states, sizeof x);
    for (; c + STATES <= cols && end - p >= 2 * STATES + 2; c += STATES) {
        UNROLL for (int i = 0; i < STATES; i++)
        {
            x[i] = step(start + at[c + i], width, x[i], symbols + c + i, &more);
            uint32_t with = x[i] << 16 | load16(p);
            __asm__("" : "+r"(with)); /* a branch would be unpredictable */
            x[i] = more ? with : x[i];
            p += 2 * (size_t)more;
        }
    }
    memcpy(states, x, sizeof x);
    for (; c < cols; c++) {
        uint32_t *s = &states[c % STATES];
        *s = step(start + at[c], width, *s, symbols + c, &more);
        if (!more)
            continue;
        if (end - p < 2)
            return false;
        *s = *s << 16 | load16(p);
        p += 2;
    }
    *src = p;
    return true;
}

static bool get(const lm_rans_shape *f, const uint8_t *src, size_t len, uint8_t *symbols)
{
    const uint8_t *end = src + len;
    uint32_t x[STATES];
    bool good = len >= sizeof x;
    if (!good)
        return false;
    memcpy(x, src, sizeof x);
    src += sizeof x;
    for (int i = 0; i < STATES; i++)
        good = good && x[i] >= LM_RANS_LEAST;
    for (int64_t r = 0; r < f->rows && good; r++, symbols += f->cols) {
        const lm_rans_set *set = &f->set[f->kind[r]];
        if (set->width == 16)
            good = get_row(set, 16, f->cols, x, &src, end, symbols);
        else if (set->width == 32)
            good = get_row(set, 32, f->cols, x, &src, end, symbols);
        else if (set->width == 64)
            good = get_row(set, 64, f->cols, x, &src, end, symbols);
        else
            good = get_row(set, 256, f->cols, x, &src, end, symbols);
    }
    for (int i = 0; i < STATES && good; i++)
        good = x[i] == LM_RANS_LEAST;
    return good && src == end;
}

/* ---- Encoding ---- */

/* x / freq of eight states, rounded down; the quotients have 18 bits. */
INLINE __m256i quotients(__m256i x, __m256i freq)
{
#ifdef __AVX512BW__
    return _mm512_cvttpd_epi32(_mm512_div_pd(_mm512_cvtepu32_pd(x), _mm512_cvtepi32_pd(freq)));
#else
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    const __m256d half = _mm256_set1_pd(2147483648.0);
    __m256i y = _mm256_xor_si256(x, sign); /* x - 2^31, signed */
    __m256d low = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(y)), half);
    __m256d high = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(y, 1)), half);
    low = _mm256_div_pd(low, _mm256_cvtepi32_pd(_mm256_castsi256_si128(freq)));
    high = _mm256_div_pd(high, _mm256_cvtepi32_pd(_mm256_extracti128_si256(freq, 1)));
    return _mm256_set_m128i(_mm256_cvttpd_epi32(high), _mm256_cvttpd_epi32(low));
#endif
}

#ifdef __AVX512BW__
/* The low words of the states in `out`, in order, before p. */
INLINE uint8_t *emit(__m256i x, unsigned out, uint8_t *p)
{
    unsigned n = (unsigned)__builtin_popcount(out);
    __m256i some = _mm256_maskz_compress_epi32((__mmask8)out, x);
    p -= 2 * n;
    _mm_mask_storeu_epi16(p, (__mmask8)((1u << n) - 1), _mm256_cvtepi32_epi16(some));
    return p;
}
#else
INLINE uint8_t *emit(__m256i x, unsigned out, uint8_t *p)
{
    uint32_t word[STATES];
    _mm256_storeu_si256((__m256i *)word, x);
    /* each is stored, and stays if the next one does not have its place */
    UNROLL for (int i = STATES - 1; i >= 0; i--)
    {
        uint16_t low = (uint16_t)word[i];
        memcpy(p - 2, &low, 2);
        p -= out >> i & 1 ? 2 : 0;
    }
    return p;
}
#endif

/* Eight columns; *zero collects frequencies 0. */
INLINE __m256i put_eight(const lm_rans_set *set, int64_t c, const uint8_t *symbols, __m256i x,
                         uint8_t **p, __m256i *zero)
{
    __m256i at = _mm256_loadu_si256((const __m256i *)(set->at + c));
    at = _mm256_add_epi32(at, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)symbols)));
    __m256i pair = _mm256_i32gather_epi32((const int *)set->start, at, 2);
    __m256i first = _mm256_and_si256(pair, _mm256_set1_epi32(0xffff));
    __m256i freq = _mm256_sub_epi32(_mm256_srli_epi32(pair, 16), first);
    *zero = _mm256_or_si256(*zero, _mm256_cmpeq_epi32(freq, _mm256_setzero_si256()));
    __m256i stay = _mm256_cmpgt_epi32(freq, _mm256_srli_epi32(x, 32 - BITS));
    unsigned out = ~(unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(stay)) & 255;
    *p = emit(x, out, *p);
    x = _mm256_blendv_epi8(_mm256_srli_epi32(x, 16), x, stay);
    __m256i rest = _mm256_sub_epi32(_mm256_set1_epi32(SLOTS), freq);
    rest = _mm256_mullo_epi32(quotients(x, freq), rest);
    return _mm256_add_epi32(_mm256_add_epi32(x, first), rest);
}

/* The columns behind the last eight of a row. */
static bool put_rest(const lm_rans_set *set, int64_t from, int64_t to, const uint8_t *symbols,
                     uint32_t *x, uint8_t **p)
{
    for (int64_t c = to - 1; c >= from; c--) {
        const uint16_t *t = set->start + set->at[c] + symbols[c];
        uint32_t *s = &x[c % STATES], freq = (uint32_t)t[1] - t[0];
        if (!freq)
            return false;
        if (*s >> (32 - BITS) >= freq) {
            uint16_t low = (uint16_t)*s;
            *p -= 2;
            memcpy(*p, &low, 2);
            *s >>= 16;
        }
        *s = *s / freq * SLOTS + *s % freq + t[0];
    }
    return true;
}

static size_t put(const lm_rans_shape *f, const uint8_t *symbols, uint8_t *out)
{
    uint8_t *end = out + lm_rans_room(f->rows, f->cols), *p = end;
    int64_t whole = f->cols / STATES * STATES;
    uint32_t x[STATES];
    __m256i zero = _mm256_setzero_si256();
    for (int i = 0; i < STATES; i++)
        x[i] = LM_RANS_LEAST;
    for (int64_t r = f->rows - 1; r >= 0; r--) {
        const lm_rans_set *set = &f->set[f->kind[r]];
        const uint8_t *row = symbols + r * f->cols;
        if (!put_rest(set, whole, f->cols, row, x, &p))
            return 0;
        __m256i v = _mm256_loadu_si256((const __m256i *)x);
        for (int64_t c = whole - STATES; c >= 0; c -= STATES)
            v = put_eight(set, c, row + c, v, &p, &zero);
        _mm256_storeu_si256((__m256i *)x, v);
        if (!_mm256_testz_si256(zero, zero))
            return 0;
    }
    p -= sizeof x;
    memcpy(p, x, sizeof x);
    return (size_t)(end - p);
}

const lm_rans_kernels NAME(LM_SIMD) = { put, get };
