/* SPDX-License-Identifier: Apache-2.0 */
/* joint.h -- BF16 as two planes: exponents with the two leading bits of the mantissa, of two elements
 * in a byte, and a byte of the rest of each element.
 *
 * Within a power of two the weights of a model are not spread evenly: near the ends of their
 * distribution the small ones are more frequent.  Given the exponent, the leading bits of the
 * mantissa predict that; both together are called the head of an element.  A code of heads would
 * have long symbols, hence heads of about equal frequency form groups of four: the group is coded,
 * and two bits of the rest, which cost nothing to decode, choose in it.  Groups are coded in pairs,
 * which halves what a code loses to whole bits, and halves the symbols.
 *
 * A map gives each head its rank.  With e the exponent (bits 7..14) and k the leading bits (5 and 6)
 * of an element x, low and m of the map,
 *   index  i = 0 if e is 0; e - low + 1 if low <= e < low + m - 1; else m, an escape: the exponent
 *          stands elsewhere
 *   rank   rank[4 i + k]: a permutation of 0..4 m - 1 for i < m; 60 + k for an escape
 *   group  rank >> 2
 *   pair   group of an element of even number | group of the next << 4; behind the last element 0
 *   rest   x & 31 | (rank & 3) << 5 | sign << 7
 * Elements are little-endian in memory, at any alignment.  Every bit pattern is restored. */
#ifndef LM_KERNELS_JOINT_H
#define LM_KERNELS_JOINT_H

#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum {
    LM_JOINT_INDEXES = 15, /* largest m */
    LM_JOINT_LOW = 242,    /* largest low: the greatest exponent, low + m - 2, is a byte */
    LM_JOINT_RANKS = 64,
    LM_JOINT_ESCAPE = 15, /* the group of escapes */
    LM_JOINT_RARE = 240,  /* marks a pair that is stored elsewhere */
};

/* Entries of an index over n elements: one for each 32 elements, and one behind the last that
 * kernels may overwrite. */
#define LM_JOINT_ROOM(n) ((n) / 32 + 2)

typedef struct {
    uint8_t low, m;               /* 1..LM_JOINT_LOW, 1..LM_JOINT_INDEXES */
    uint8_t rank[LM_JOINT_RANKS]; /* see above; behind 4 m + 3 zeros */
    /* The inverse, of ranks below 4 m; zeros behind: the high byte of an element without its sign,
     * the low byte without its five lowest bits. */
    uint8_t high[LM_JOINT_RANKS], below[LM_JOINT_RANKS];
} lm_joint_map;

/* A subset of 32 pairs: number `from` + i if bit i is set. */
typedef struct {
    uint32_t from, bits;
} lm_joint_places;

typedef struct {
    /* n elements -> pair[(n + 1) / 2], rest[n]. */
    void (*split)(const lm_joint_map *map, const void *x, size_t n, uint8_t *pair, uint8_t *rest);
    /* The inverse, by map->high and below.  The value of elements in LM_JOINT_RARE pairs and of
     * escapes is undefined.  The indexes of LM_JOINT_RARE pairs are written to `rare`, which has
     * room for LM_JOINT_ROOM(n) entries; returns how many. */
    size_t (*join)(const lm_joint_map *map, const uint8_t *pair, const uint8_t *rest, size_t n,
                   void *x, lm_joint_places *rare);
    /* The indexes of the members of a set among the pairs of n elements, in the same form.  b is a
     * member if bit (b >> 4 & 7) of set[b >> 7][b & 15] is set. */
    size_t (*find)(const uint8_t set[2][16], const uint8_t *pair, size_t n, lm_joint_places *found);
} lm_joint_kernels;

/* The kernels of the highest level <= max; every level gives the same bytes. */
const lm_joint_kernels *lm_joint_at(lm_cpu_level max);
extern const lm_joint_kernels lm_joint_ref, lm_joint_avx2, lm_joint_avx512, lm_joint_amx;

#endif
