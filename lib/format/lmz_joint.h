/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_joint.h -- a chunk of BF16 whose exponents are coded together with the leading bits of their
 * mantissas (kernels/joint.h); private to lib/format.
 *
 * Layout, n elements:
 *   1. u8 4 (LMZ_JOINT), the head of a chunk (lmz_chunk.c)
 *   2. u8 low, 1 to 242;  u8 m, 1 to 15
 *   3. u24 c: bytes of the coded pairs
 *   4. u4 [4 m]: the group of each 4 i + k; each of 0..m - 1 occurs four times.  The ranks of the four follow this order.
 *      The low half of a byte first
 *   5. n bytes: the rests
 *   6. c bytes: the (n + 1) / 2 pairs in the exponent coder's layout (kernels/expcode.h), with a head
 *      of rows.  No pair with a group of m or more has a code, except 240, which marks a rare pair
 *   7. for each 240 in order: u8, the pair; then for each of its groups that is 15, the even element's
 *      first: u8, the exponent */
#ifndef LM_FORMAT_LMZ_JOINT_H
#define LM_FORMAT_LMZ_JOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/expcode.h"
#include "kernels/joint.h"

enum { LMZ_JOINT = 4 };

/* Kernels, scratch and map of a chunk.  `pair` has room for (n + 1) / 2 bytes to decode, 2 n to
 * encode. */
typedef struct {
    const lm_joint_kernels *joint;
    const lm_exp_kernels *exp;
    lm_exp_work *work;
    uint8_t *pair;
    lm_joint_places *places; /* LM_JOINT_ROOM(n) */
    lm_joint_map map;
} lmz_joint;

/* Choose the map from a sample of the n elements.  Returns the estimated bits per element, INFINITY
 * when this code cannot be used. */
double lmz_joint_choose(lmz_joint *j, const void *src, size_t n);
/* Encoding takes three steps.
 * split: n elements to pairs in j->pair and to rests in dst, which has room for 2 n bytes.  Returns
 *   the rests; NULL when the head and the rests alone take 2 n bytes.
 * plan: returns an estimate of the bytes of the chunk, 0 when the pairs cannot be coded.
 * write: returns the bytes of the chunk in dst, 0 when they are more than 2 n. */
const uint8_t *lmz_joint_split(const lmz_joint *j, const void *src, size_t n, uint8_t *dst);
size_t lmz_joint_plan(const lmz_joint *j, size_t n);
size_t lmz_joint_write(const lmz_joint *j, const void *src, size_t n, uint8_t *dst);

/* The parts of a chunk of n elements. */
typedef struct {
    const uint8_t *map, *rest, *pairs, *rare;
    size_t coded, listed; /* bytes of pairs and rare ones */
} lmz_joint_parts;
/* False unless the lengths and the numbers in the head are valid. */
bool lmz_joint_parse(const uint8_t *src, size_t len, size_t n, lmz_joint_parts *p);
/* Decode to n elements; j->map is overwritten.  False for bytes that no writer produces. */
bool lmz_joint_decode(lmz_joint *j, const lmz_joint_parts *p, size_t n, void *dst);

#endif
