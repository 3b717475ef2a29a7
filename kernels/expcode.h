/* SPDX-License-Identifier: Apache-2.0 */
/* expcode.h -- entropy coder of byte planes with few likely values, such as the exponents of
 * weights: a canonical Huffman code of at most 11 bits, in eight independent streams.
 *
 * It searches no matches: exponents are independent draws, so a match occurs by chance only and
 * costs more than its literals.  Eight streams keep a core busy.  11 bits make a table that fits
 * the first-level cache and whose entries hold as many symbols as the bits determine (about four of
 * a normal distribution's 2.6-bit exponents).
 *
 * Layout of n coded bytes:
 *   1. which symbols have a length in 2, in the form that the caller chooses (lm_exp_form):
 *      SPAN: u8 first, u8 last: first..last, the least and the greatest with a code; first < last
 *      ROWS: u4 [16], the low half of a byte first: of row r, 16 r..16 r + 14, as many as the number
 *      says, of which the last has a code.  No symbol 16 r + 15 has one
 *   2. their code lengths in ascending order, 4 bits each, the low half of a byte first: 0 (no code)
 *      or 1..11; a half left over is 0.  The lengths fill the code exactly: the sum of 2^-length is 1
 *   3. n >= 4096 only: the bytes of streams 0..6, little-endian, u24 each with SPAN, u16 with ROWS
 *   4. the streams: eight of them, stream i holding symbols [i q, min((i+1) q, n)) with
 *      q = ceil(n / 8); for n < 4096 a single one
 * Codes are canonical: numbered in the order of (length, symbol), each the one before plus one,
 * shifted left by the growth in length.  In a stream the first bit of a code (its most significant)
 * takes the lowest free bit of the current byte; the last byte is filled up with zero bits. */
#ifndef LM_KERNELS_EXPCODE_H
#define LM_KERNELS_EXPCODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum {
    LM_EXP_BITS = 11,
    LM_EXP_STREAMS = 8,
    LM_EXP_SPLIT = 4096,       /* from this many symbols on there are eight streams */
    LM_EXP_SAMPLE = 65536,     /* from this many on a sample chooses the code, see lm_exp_kernels */
    LM_EXP_MAX = 1 << 20,      /* most symbols in a plane, */
    LM_EXP_ROWS_MAX = 1 << 18, /* and with a ROWS table */
    LM_EXP_OUT = LM_EXP_MAX / 8 * LM_EXP_BITS + 64 * LM_EXP_STREAMS,
};

/* Exponents are consecutive: a SPAN.  Among pairs of small numbers, 16 r + i, those with large
 * numbers are rare, so the others are the beginnings of ROWS. */
typedef enum { LM_EXP_SPAN, LM_EXP_ROWS } lm_exp_form;

/* Scratch of one thread, about 1.7 MiB; its content on entry does not matter. */
typedef struct {
    uint32_t weight[256]; /* weight of each symbol; 0 if and only if it does not occur */
    uint16_t code[256];   /* first bit lowest */
    uint8_t length[256];  /* 0: no code */
    uint8_t used[256];    /* symbols with a code, ascending */
    int n_used;
    lm_exp_form form;
    uint32_t bytes[LM_EXP_STREAMS]; /* of each stream */
    uint32_t count[8][256];         /* of the vector kernels: counts, */
    uint32_t pair[65536];           /* codes of two symbols: length | code << 8, */
    uint8_t out[LM_EXP_OUT];        /* streams, see lm_exp_room */
} lm_exp_work;

/* The inner loops, by level; the same results from each. */
typedef struct {
    /* w->weight: n < LM_EXP_SAMPLE: how often each symbol occurs.  Otherwise 4 for each occurrence
     * among the first 256 of every 1024 symbols, and 1 for symbols that occur elsewhere only. */
    void (*count)(lm_exp_work *w, const uint8_t *src, size_t n);
    /* Write stream i at w->out + i * lm_exp_room(n), its size to w->bytes[i]. */
    void (*put)(lm_exp_work *w, const uint8_t *src, size_t n);
    /* Decode n symbols from streams of w->bytes bytes, one after another at src; false: the bytes
     * are not the output of a writer.  Reads only the streams, writes only dst[0..n). */
    bool (*get)(lm_exp_work *w, const uint8_t *src, uint8_t *dst, size_t n);
} lm_exp_kernels;

const lm_exp_kernels *lm_exp_at(lm_cpu_level max);
extern const lm_exp_kernels lm_exp_ref, lm_exp_avx2, lm_exp_avx512;

/* Choose the code for src[0..n), n <= LM_EXP_MAX, in a SPAN: about the number of bytes that
 * lm_exp_write will write.  0: not applicable (fewer than two different symbols). */
size_t lm_exp_plan(const lm_exp_kernels *k, lm_exp_work *w, const uint8_t *src, size_t n);
/* The same from w->weight, for callers that count and change the weights, with a table in either
 * form. */
size_t lm_exp_fit(lm_exp_work *w, lm_exp_form form, size_t n);
/* Write src with the planned code; returns the number of bytes, 0 if they exceed cap (dst is then
 * not changed). */
size_t lm_exp_write(const lm_exp_kernels *k, lm_exp_work *w, const uint8_t *src, size_t n,
                    uint8_t *dst, size_t cap);
/* Decode exactly n symbols from exactly len bytes of any content; false when they do not encode
 * that.  On success w->used lists the symbols that have a code. */
bool lm_exp_read(const lm_exp_kernels *k, lm_exp_work *w, lm_exp_form form, const uint8_t *src,
                 size_t len, uint8_t *dst, size_t n);

/* For the kernels: number of streams for n symbols, and symbols in each stream except the last. */
static inline int lm_exp_streams(size_t n)
{
    return n < LM_EXP_SPLIT ? 1 : LM_EXP_STREAMS;
}
static inline size_t lm_exp_share(size_t n)
{
    return n < LM_EXP_SPLIT ? n : (n + LM_EXP_STREAMS - 1) / LM_EXP_STREAMS;
}
/* Room for a stream in w->out: all codes of maximal length, and eight bytes more for the last
 * store. */
static inline size_t lm_exp_room(size_t n)
{
    return lm_exp_share(n) * LM_EXP_BITS / 8 + 16;
}

#endif
