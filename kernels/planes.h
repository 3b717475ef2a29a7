/* SPDX-License-Identifier: Apache-2.0 */
/* planes.h -- elements of 1, 2, 4 or 8 bytes to byte planes and back, exactly.
 *
 * Plane i holds byte i (0 = least significant) of every element, after each element was transformed
 * so that few planes hold most of its entropy.  With w the width in bits, x the element, b the
 * base's, all arithmetic modulo 2^w:
 *
 *   delta NONE  field: rotl(x, 1)       the sign goes to bit 0, the exponent fills the top byte
 *               else:  x
 *   delta XOR   field: rotl(x ^ b, 1)
 *               else:  x ^ b
 *   delta SUB   field: zig(fold(x) - fold(b))
 *               else:  zig(x - b)
 *   fold(x) = x ^ (x has its top bit ? all ones : top bit only), which sorts floats as integers;
 *   zig(d) = 2d ^ (d has its top bit ? all ones : 0), so that small differences of either sign have
 *   small values.
 *
 * Every bit pattern is restored: -0, NaN payloads, subnormals.  Elements are little-endian in
 * memory at any alignment.  A split or join of 2-byte elements is bound by memory. */
#ifndef LM_KERNELS_PLANES_H
#define LM_KERNELS_PLANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum { LM_PLANES_MAX = 8 };
typedef enum { LM_PLANES_NONE = 0, LM_PLANES_XOR = 1, LM_PLANES_SUB = 2 } lm_planes_delta;

typedef struct {
    int size;              /* bytes of an element: 1, 2, 4, 8; also the number of planes */
    bool field;            /* sign, exponent, mantissa; sizes 2, 4, 8 (size 1: read by SUB only) */
    lm_planes_delta delta; /* NONE: base is not read */
} lm_planes_form;

typedef struct {
    /* n elements x (and base) -> plane[0..size-1], n bytes each. */
    void (*split)(lm_planes_form f, const void *x, const void *base, size_t n,
                  uint8_t *const plane[LM_PLANES_MAX]);
    /* The inverse. */
    void (*join)(lm_planes_form f, const uint8_t *const plane[LM_PLANES_MAX], const void *base,
                 size_t n, void *x);
} lm_planes_kernels;

/* The kernels of the highest level <= max; every level gives the same bytes. */
const lm_planes_kernels *lm_planes_at(lm_cpu_level max);

extern const lm_planes_kernels lm_planes_ref, lm_planes_avx2, lm_planes_avx512;

#endif
