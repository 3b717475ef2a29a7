/* SPDX-License-Identifier: Apache-2.0 */
/* rans.h -- entropy coder of a matrix of small numbers where each column has its own distribution:
 * static rANS (arXiv:1311.2540; range variant, interleaved as in arXiv:1402.3392), for the codes of
 * key-value caches.
 *
 * A code of whole bits per symbol (expcode.h) loses too much where most symbols have less than two
 * bits; rANS is within 0.1 % of the entropy of its tables.  Rows belong to sets (anchors,
 * differences ...), a set has tables, and each column of a set chooses one of them.
 *
 * A table of m <= 255 symbols gives symbol s the frequency start[s + 1] - start[s] out of
 * 2^LM_RANS_BITS; start[m .. width - 1] is 2^LM_RANS_BITS, so that the number of entries <= a slot,
 * minus one, is the symbol of the slot.  Symbols that do not occur have frequency 0.
 *
 * Layout of a stream of rows x cols symbols:
 *   1. u32 [8]: the states of columns 0..7 modulo 8 at the beginning of decoding
 *   2. u16 words, all little-endian
 * Decoding takes rows in order, in a row columns in order.  Column c uses state x of c mod 8:
 *   slot = x mod 2^14; s: the symbol of slot; x = (start[s + 1] - start[s]) (x >> 14) + slot - start[s];
 *   if x < 2^16: x = 2^16 x + the next word
 * States are in 2^16 .. 2^32 - 1.  At the end all are 2^16 and no word is left: a stream with another
 * end is refused.  This finds most damage, not all: files have checksums. */
#ifndef LM_KERNELS_RANS_H
#define LM_KERNELS_RANS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum {
    LM_RANS_BITS = 14,
    LM_RANS_STATES = 8,
    LM_RANS_SYMBOLS = 255, /* most symbols of a table */
    LM_RANS_SETS = 4,
};
#define LM_RANS_LEAST ((uint32_t)1 << 16) /* the least state */

/* The tables of some rows. */
typedef struct {
    int width;             /* entries of a table: lm_rans_width */
    const uint16_t *start; /* [tables][width] */
    const uint32_t *at;    /* [cols]: where the table of a column begins: its number times width */
} lm_rans_set;

typedef struct {
    int64_t rows, cols;
    const uint8_t *kind; /* [rows]: the set of each row */
    lm_rans_set set[LM_RANS_SETS];
} lm_rans_shape;

/* The inner loops, by level; the same results from each. */
typedef struct {
    /* Code symbols [rows][cols], each below its table's number of symbols, to the last bytes of
     * out[0..lm_rans_room(rows, cols)): returns their number, 0 if a symbol has frequency 0. */
    size_t (*put)(const lm_rans_shape *f, const uint8_t *symbols, uint8_t *out);
    /* Decode exactly len bytes of any content; false when they are no output of put with the same
     * tables.  Reads src[0..len) only, writes symbols [rows][cols] only, each less than its table's
     * width. */
    bool (*get)(const lm_rans_shape *f, const uint8_t *src, size_t len, uint8_t *symbols);
} lm_rans_kernels;

const lm_rans_kernels *lm_rans_at(lm_cpu_level max);
extern const lm_rans_kernels lm_rans_ref, lm_rans_avx2, lm_rans_avx512;

/* Entries of a table of 1..LM_RANS_SYMBOLS symbols: 16, 32, 64 or 256, more than the symbols. */
static inline int lm_rans_width(int symbols)
{
    return symbols < 16 ? 16 : symbols < 32 ? 32 : symbols < 64 ? 64 : 256;
}
/* Most bytes of a stream: a word for each symbol. */
static inline size_t lm_rans_room(int64_t rows, int64_t cols)
{
    return 4 * LM_RANS_STATES + 2 * (size_t)(rows * cols);
}

/* The table for symbols that occur count[0..symbols) times: start[0..width).  Frequencies are
 * proportional to counts, at least 1 where a count is not 0; what rounding leaves goes where it
 * costs least.  All counts 0: symbol 0 has all slots. */
void lm_rans_fit(const uint32_t *count, int symbols, uint16_t *start);
/* Bits of count[0..symbols) coded with that table; infinite if one that occurs has frequency 0. */
double lm_rans_bits(const uint32_t *count, int symbols, const uint16_t *start);
/* True if start[0..lm_rans_width(symbols)) is a table: it rises from 0, and entries from `symbols`
 * on are 2^LM_RANS_BITS. */
bool lm_rans_table_ok(const uint16_t *start, int symbols);

#endif
