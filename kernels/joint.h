/* SPDX-License-Identifier: Apache-2.0 */
/* joint.h -- BF16 as two parts: a symbol of the exponent and the two leading bits of the mantissa,
 * which depend on it, and the rest, which is noise.
 *
 * Within a power of two the weights of a model are not spread evenly: near the ends of their
 * distribution the small ones are more frequent.  The leading bits of the mantissa tell that, given
 * the exponent, and one code for both gains 0.1 bit of 16 (and loses less to whole bits, as its
 * likeliest symbol is less likely).
 *
 * With e the exponent (bits 7..14) of an element x,
 * and 1 <= low <= LM_JOINT_LOW,
 *   symbol  4 i + (x >> 5 & 3), with i = 0 if e is 0; e - low + 1 if low <= e < low + 62; else 63, an
 *           escape: the exponent stands in a list of its own
 *   rest    x & 31 | sign << 5: 6 bits, of which four elements fill three bytes: the first lowest,
 *           little-endian; behind the last element zeros up to a whole byte
 * Elements are little-endian in memory, at any alignment.  Every bit pattern comes back. */
#ifndef LM_KERNELS_JOINT_H
#define LM_KERNELS_JOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum {
    LM_JOINT_EXPONENTS = 62, /* that have a symbol, beside 0 */
    LM_JOINT_LOW = 193,      /* `low` at most: no sum with an index has more than 8 bits */
    LM_JOINT_ESCAPE = 0xfc,  /* symbols from this on */
};

typedef struct {
    /* n elements -> symbol[n], rest[lm_joint_rest(n)]; true if any symbol is an escape. */
    bool (*split)(const void *x, size_t n, uint8_t low, uint8_t *symbol, uint8_t *rest);
    /* The inverse; the exponent of an escape comes out as any.  True if there is one. */
    bool (*join)(const uint8_t *symbol, const uint8_t *rest, size_t n, uint8_t low, void *x);
    /* The first escape of symbol[at..n); n: none. */
    size_t (*escape)(const uint8_t *symbol, size_t at, size_t n);
} lm_joint_kernels;

/* The kernels of the highest level <= max; every level gives the same bytes. */
const lm_joint_kernels *lm_joint_at(lm_cpu_level max);
extern const lm_joint_kernels lm_joint_ref, lm_joint_avx2, lm_joint_avx512;

static inline size_t lm_joint_rest(size_t n)
{
    return (6 * n + 7) / 8;
}

#endif
