/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_joint.h -- a chunk of BF16 whose exponents are coded together with the leading bits of their
 * mantissas (kernels/joint.h); private to lib/format.
 *
 * Layout, n elements:
 *   1. u8 4 (LMZ_JOINT), the head of a chunk (lmz_chunk.c)
 *   2. u8 low, 1 to 193
 *   3. u24 m: escapes;  u24 c: bytes of the coded symbols
 *   4. rests: ceil(6 n / 8) bytes
 *   5. c bytes: the n symbols in the exponent coder's layout (kernels/expcode.h), of at most 12 bits
 *   6. m bytes: the exponents of the escapes, in the order of their elements */
#ifndef LM_FORMAT_LMZ_JOINT_H
#define LM_FORMAT_LMZ_JOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/expcode.h"
#include "kernels/joint.h"

enum { LMZ_JOINT = 4, LMZ_JOINT_HEAD = 8 };

/* What a chunk is coded with and where; `symbol` has n bytes. */
typedef struct {
    const lm_joint_kernels *joint;
    const lm_exp_kernels *exp;
    lm_exp_work *work;
    uint8_t *symbol;
} lmz_joint;

/* From m sampled elements, of which some exponents are rare: which is the least that shall have a
 * symbol, and how many bits an element will take, about (INFINITY: not to be coded so). */
double lmz_joint_guess(const uint8_t *sample, size_t m, uint8_t *low);
/* Split n elements: symbols to j->symbol, rests to their place in dst, which has room for 2 n bytes.
 * Then plan: about the bytes of the whole, 0 if symbols cannot be coded; and write what was planned:
 * its bytes, 0 if they are more than 2 n. */
void lmz_joint_split(const lmz_joint *j, const void *src, size_t n, uint8_t low, uint8_t *dst);
size_t lmz_joint_plan(const lmz_joint *j, size_t n);
size_t lmz_joint_write(const lmz_joint *j, const void *src, size_t n, uint8_t *dst);

/* The parts of a chunk of n elements; false unless its lengths are right. */
typedef struct {
    uint8_t low;
    size_t escapes, coded; /* bytes of both */
    const uint8_t *rest, *symbols, *escape;
} lmz_joint_parts;
bool lmz_joint_parse(const uint8_t *src, size_t len, size_t n, lmz_joint_parts *p);
bool lmz_joint_decode(const lmz_joint *j, const lmz_joint_parts *p, size_t n, void *dst);

#endif
