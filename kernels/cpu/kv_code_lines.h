/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_lines.h -- the codes of 16 tokens: as lines of tiles (numeric/kv_format.h), as rows of
 * bytes of tokens or of channels, and as the bits of rows (numeric/kv_rows.h).
 *
 * Lines of keys are those of a tile, for each four channels; of values four for each 16
 * channels.  `ld` is the head's width up to a multiple of 16. */
#ifndef LM_KERNELS_CPU_KV_CODE_LINES_H
#define LM_KERNELS_CPU_KV_CODE_LINES_H

#include <string.h>

#include "kernels/cpu/simd.h"
#include "numeric/kv_format.h"

enum { KV_LD = LM_KV_MAX_DIM, KV_PATCH = LM_KV_TILE * KV_LD /* bytes of 16 tokens */ };

/* ---- rows and lines ---- */

LM_INLINE __m128i load_16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

LM_INLINE void store_four(uint8_t *to, int64_t step, const __m128i v[4])
{
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128((__m128i *)(void *)(to + i * step), v[i]);
}

/* Word j of v[i] to word i of v[j]. */
LM_INLINE void turn_four(__m128i v[4])
{
    __m128i a = _mm_unpacklo_epi32(v[0], v[1]), b = _mm_unpacklo_epi32(v[2], v[3]);
    __m128i c = _mm_unpackhi_epi32(v[0], v[1]), d = _mm_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm_unpacklo_epi64(a, b);
    v[1] = _mm_unpackhi_epi64(a, b);
    v[2] = _mm_unpacklo_epi64(c, d);
    v[3] = _mm_unpackhi_epi64(c, d);
}

/* Four rows of four words, turned. */
LM_INLINE void turn_words(const uint8_t *from, int64_t step, uint8_t *to, int64_t step_to)
{
    __m128i v[4];
    for (int i = 0; i < 4; i++)
        v[i] = load_16(from + i * step);
    turn_four(v);
    store_four(to, step_to, v);
}

/* Byte j of word i of a vector to byte i of word j. */
LM_INLINE __m128i turn_bytes(__m128i v)
{
    return _mm_shuffle_epi8(v, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

/* Byte j of word i of a line to byte i of row j. */
LM_INLINE void rows_of_line(const uint8_t *line, uint8_t *to, int64_t step)
{
    __m128i v[4];
    for (int i = 0; i < 4; i++)
        v[i] = turn_bytes(load_16(line + 16 * i));
    turn_four(v);
    store_four(to, step, v);
}

LM_INLINE void line_of_rows(const uint8_t *row, int64_t step, uint8_t *line)
{
    __m128i v[4];
    for (int i = 0; i < 4; i++)
        v[i] = load_16(row + i * step);
    turn_four(v);
    for (int i = 0; i < 4; i++)
        v[i] = turn_bytes(v[i]);
    store_four(line, 16, v);
}

/* Lines to rows [16][ld] of tokens; and back. */
LM_INLINE void tokens_of_lines(bool values, int64_t ld, const uint8_t *line, uint8_t *code)
{
    for (int64_t d = 0; d < ld; d += 16, line += 4 * LM_KV_LINE)
        for (int64_t i = 0; i < 4; i++) {
            if (values)
                rows_of_line(line + i * LM_KV_LINE, code + 4 * i * ld + d, ld);
            else
                turn_words(line + 16 * i, LM_KV_LINE, code + 4 * i * ld + d, ld);
        }
}

LM_INLINE void lines_of_tokens(bool values, int64_t ld, const uint8_t *code, uint8_t *line)
{
    for (int64_t d = 0; d < ld; d += 16, line += 4 * LM_KV_LINE)
        for (int64_t i = 0; i < 4; i++) {
            if (values)
                line_of_rows(code + 4 * i * ld + d, ld, line + i * LM_KV_LINE);
            else
                turn_words(code + 4 * i * ld + d, ld, line + 16 * i, LM_KV_LINE);
        }
}

/* Lines to rows [ld][16] of channels; and back. */
LM_INLINE void channels_of_lines(bool values, int64_t ld, const uint8_t *line, uint8_t *code)
{
    for (int64_t d = 0; d < ld; d += 16, line += 4 * LM_KV_LINE)
        for (int64_t i = 0; i < 4; i++) {
            if (values)
                turn_words(line + 16 * i, LM_KV_LINE, code + (d + 4 * i) * 16, 16);
            else
                rows_of_line(line + i * LM_KV_LINE, code + (d + 4 * i) * 16, 16);
        }
}

LM_INLINE void lines_of_channels(bool values, int64_t ld, const uint8_t *code, uint8_t *line)
{
    for (int64_t d = 0; d < ld; d += 16, line += 4 * LM_KV_LINE)
        for (int64_t i = 0; i < 4; i++) {
            if (values)
                turn_words(code + (d + 4 * i) * 16, 16, line + 16 * i, LM_KV_LINE);
            else
                line_of_rows(code + (d + 4 * i) * 16, 16, line + i * LM_KV_LINE);
        }
}

/* ---- planes ---- */

/* Line `at` of a plane of `bits` bits, shifted up by `up`: to `line`, or added to it. */
LM_INLINE void take_line(const uint8_t *plane, int64_t at, int bits, int up, uint8_t *line)
{
    const uint8_t *unit = plane + at * bits / 8 * LM_KV_LINE;
    const __m128i down = _mm_cvtsi32_si128(bits * (int)(at % (8 / bits)));
    const __m128i high = _mm_cvtsi32_si128(up);
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
    for (int b = 0; b < LM_KV_LINE; b += 32) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(unit + b));
        __m256i *to = (__m256i *)(void *)(line + b);
        x = _mm256_sll_epi16(_mm256_and_si256(_mm256_srl_epi16(x, down), mask), high);
        _mm256_storeu_si256(to, up ? _mm256_or_si256(_mm256_loadu_si256(to), x) : x);
    }
}

/* The bits from `up` on of a line to line `at` of a plane. */
LM_INLINE void put_line(uint8_t *plane, int64_t at, int bits, int up, const uint8_t *line)
{
    uint8_t *unit = plane + at * bits / 8 * LM_KV_LINE;
    const __m128i high = _mm_cvtsi32_si128(bits * (int)(at % (8 / bits)));
    const __m128i down = _mm_cvtsi32_si128(up);
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
    const __m256i there = _mm256_sll_epi16(mask, high);
    for (int b = 0; b < LM_KV_LINE; b += 32) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(line + b));
        __m256i *to = (__m256i *)(void *)(unit + b);
        x = _mm256_sll_epi16(_mm256_and_si256(_mm256_srl_epi16(x, down), mask), high);
        _mm256_storeu_si256(to,
                            _mm256_or_si256(x, _mm256_andnot_si256(there, _mm256_loadu_si256(to))));
    }
}

/* Where the codes of 16 tokens of a page lie. */
typedef struct {
    bool values;
    int bits, low; /* low: those of the first plane */
    int64_t lines, step,
        from; /* lines of the tile; of values from 16 channels to the next, the first of these tokens */
    size_t high; /* bytes from the first plane to the second */
    uint8_t *tile;
} kv_patch;

/* The 16 tokens from t on, a multiple of 16. */
LM_INLINE kv_patch patch_of(const lm_kv_format *f, int64_t T, int64_t D, const char *page,
                            int64_t t)
{
    int64_t tile = lm_kv_tile_tokens(f->values, T);
    kv_patch p = { .values = f->values, .bits = f->bits, .low = lm_kv_low_bits(f->bits) };
    p.lines = lm_kv_tile_lines(f->values, T, D);
    p.step = tile / 4;
    p.from = t % tile / 4;
    p.high = lm_kv_plane_bytes(p.low, p.lines);
    p.tile = (uint8_t *)(uintptr_t)page + (size_t)(t / tile) * lm_kv_tile_bytes(f, T, D);
    return p;
}

LM_INLINE void walk_lines(const kv_patch *p, int bits, bool put, uint8_t *plane, int up,
                          uint8_t *line)
{
    for (int64_t i = 0; !p->values && i < p->lines; i++, line += LM_KV_LINE) {
        if (put)
            put_line(plane, i, bits, up, line);
        else
            take_line(plane, i, bits, up, line);
    }
    for (int64_t at = p->from; p->values && at < p->lines; at += p->step)
        for (int64_t i = 0; i < 4; i++, line += LM_KV_LINE) {
            if (put)
                put_line(plane, at + i, bits, up, line);
            else
                take_line(plane, at + i, bits, up, line);
        }
}

LM_INLINE void walk_plane(const kv_patch *p, int bits, bool put, uint8_t *plane, int up,
                          uint8_t *line)
{
    switch (bits) {
    case 1:
        walk_lines(p, 1, put, plane, up, line);
        break;
    case 2:
        walk_lines(p, 2, put, plane, up, line);
        break;
    case 4:
        walk_lines(p, 4, put, plane, up, line);
        break;
    default:
        walk_lines(p, 8, put, plane, up, line);
    }
}

/* The codes of the patch as lines of bytes; and back. */
static inline void take_patch(const kv_patch *p, uint8_t *line)
{
    walk_plane(p, p->low, false, p->tile, 0, line);
    if (p->bits > p->low)
        walk_plane(p, p->bits - p->low, false, p->tile + p->high, p->low, line);
}

static inline void put_patch(const kv_patch *p, uint8_t *line)
{
    walk_plane(p, p->low, true, p->tile, 0, line);
    if (p->bits > p->low)
        walk_plane(p, p->bits - p->low, true, p->tile + p->high, p->low, line);
}

/* ---- bits ---- */

/* n codes one behind another, of `bits` bits, a constant, the lowest first; bits behind them are
 * 0. */
LM_INLINE void pack_of(int bits, const uint8_t *code, int64_t n, uint8_t *to)
{
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, to += bits) {
        uint64_t eight;
        memcpy(&eight, code + i, 8);
        eight = _pext_u64(eight, mask);
        memcpy(to, &eight, (size_t)bits);
    }
    if (i < n) {
        uint64_t rest = 0;
        memcpy(&rest, code + i, (size_t)(n - i));
        rest = _pext_u64(rest, mask);
        memcpy(to, &rest, (size_t)((n - i) * bits + 7) / 8);
    }
}

LM_INLINE void unpack_of(int bits, const uint8_t *from, int64_t n, uint8_t *code)
{
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, from += bits) {
        uint64_t eight = 0;
        memcpy(&eight, from, (size_t)bits);
        eight = _pdep_u64(eight, mask);
        memcpy(code + i, &eight, 8);
    }
    if (i < n) {
        uint64_t rest = 0;
        memcpy(&rest, from, (size_t)((n - i) * bits + 7) / 8);
        rest = _pdep_u64(rest, mask);
        memcpy(code + i, &rest, (size_t)(n - i));
    }
}

LM_INLINE void move_bits(int bits, bool pack, uint8_t *code, int64_t n, uint8_t *row)
{
    if (pack)
        pack_of(bits, code, n, row);
    else
        unpack_of(bits, row, n, code);
}

/* Codes to the bits of a row, or back. */
static inline void move_codes(int bits, bool pack, uint8_t *code, int64_t n, uint8_t *row)
{
    switch (bits) {
    case 1:
        move_bits(1, pack, code, n, row);
        break;
    case 2:
        move_bits(2, pack, code, n, row);
        break;
    case 3:
        move_bits(3, pack, code, n, row);
        break;
    case 4:
        move_bits(4, pack, code, n, row);
        break;
    case 5:
        move_bits(5, pack, code, n, row);
        break;
    case 6:
        move_bits(6, pack, code, n, row);
        break;
    default:
        memcpy(pack ? row : code, pack ? code : row, (size_t)n);
    }
}

#endif
