/* SPDX-License-Identifier: Apache-2.0 */
/* ggml.h -- the quantised blocks of GGUF files: so many numbers in so many bytes, scales among them.
 *
 * Unlike a codec (codec.h), whose codes and scales lie apart, a block holds its scales itself; a row
 * is a sequence of whole blocks.  The layouts are those of ggml, so that llama.cpp reads what we
 * write; the searches for good scales are ggml's too, with and without importance matrix, so that
 * the numbers come out the same but for the last bit of a sum.
 *
 *   q4_0 q5_0 q8_0   32 numbers, x = d * q                          (d: F16)
 *   q4_1 q5_1        32 numbers, x = d * q + m                      (d, m: F16)
 *   q4_k q5_k        256 numbers in 8 groups of 32, x = d * sc * q - dmin * mn
 *                    (d, dmin: F16; sc, mn: 6 bits)
 *   q2_k             256 numbers in 16 groups of 16, the same       (sc, mn: 4 bits)
 *   q3_k             256 numbers in 16 groups of 16, x = d * sc * (q - 4)
 *                    (d: F16; sc: 6 bits)
 *   q6_k             256 numbers in 16 groups of 16, x = d * sc * (q - 32)
 *                    (d: F16; sc: 8 bits)
 *   iq4_nl           32 numbers, x = d * one of 16 values           (d: F16)
 *   iq4_xs           256 numbers in 8 groups of 32, the same times sc (6 bits)
 *
 * Read only: mxfp4, nvfp4 (E2M1 with scales in E8M0 and E4M3), q1_0 (signs), q2_0 (-1 to 2). */
#ifndef LM_NUMERIC_GGML_H
#define LM_NUMERIC_GGML_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct lm_ggml_type {
    const char *name;   /* "q4_k": what options say; messages, too */
    uint32_t ggml_type; /* its number in a GGUF file */
    int block;          /* numbers in a block */
    size_t bytes;       /* of a block */
    /* n numbers, a multiple of `block`: one row, or many one after another.  Any alignment of
     * bytes.  Numbers that are not finite are taken as 0.  encode NULL: the type is read only. */
    void (*encode)(const float *x, int64_t n, void *dst);
    /* One row of n numbers whose errors count as `weight` says (finite, not negative, one for each
     * number): an importance matrix.  NULL: the type has no use for it. */
    void (*encode_weighted)(const float *x, const float *weight, int64_t n, void *dst);
    void (*decode)(const void *src, int64_t n, float *y);
} lm_ggml_type;

/* The i-th type, in a fixed order; NULL past the end. */
const lm_ggml_type *lm_ggml_at(int i);
/* By name, upper or lower case.  Fails: LM_EUSAGE with the names there are. */
lm_code lm_ggml_find(const char *name, const lm_ggml_type **out, lm_err *e);
/* By number; NULL if it is none of ours. */
const lm_ggml_type *lm_ggml_of(uint32_t ggml_type);

#endif
