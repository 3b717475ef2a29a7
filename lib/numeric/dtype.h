/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.h -- the element types that tensors are made of, and exact conversions between them.
 *
 * F16 is IEEE binary16, BF16 the upper half of binary32, F8E4M3 the "fn" form (no infinities,
 * S.1111.111 is NaN, maximum 448) and F8E5M2 the IEEE-like form (maximum 57344) of OCP FP8
 * (arXiv:2209.05433). Encoding rounds to nearest, ties to even; overflow of F8E4M3 gives NaN unless
 * saturating. */
#ifndef LM_NUMERIC_DTYPE_H
#define LM_NUMERIC_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum {
    LM_DTYPE_F64 = 0,
    LM_DTYPE_F32,
    LM_DTYPE_F16,
    LM_DTYPE_BF16,
    LM_DTYPE_F8E4M3,
    LM_DTYPE_F8E5M2,
    LM_DTYPE_I64,
    LM_DTYPE_I32,
    LM_DTYPE_I16,
    LM_DTYPE_I8,
    LM_DTYPE_U64,
    LM_DTYPE_U32,
    LM_DTYPE_U16,
    LM_DTYPE_U8,
    LM_DTYPE_BOOL,
    LM_DTYPE_COUNT,
    LM_DTYPE_NONE = -1,
} lm_dtype;

size_t lm_dtype_size(lm_dtype d);         /* bytes per element */
const char *lm_dtype_name(lm_dtype d);    /* "f32", "bf16": the spelling of our options and JSON */
const char *lm_dtype_st_name(lm_dtype d); /* "F32", "BF16", "F8_E4M3": safetensors' spelling */
lm_dtype
lm_dtype_parse(const char *name); /* either spelling, torch's too ("float32"); NONE if unknown */
bool lm_dtype_is_float(lm_dtype d);

/* Single numbers; inline because the reference kernels call them for each element. */
static inline float lm_bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t lm_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u); /* quiet NaN, sign and upper payload bits kept */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float lm_f16_to_f32(uint16_t h);
uint16_t lm_f32_to_f16(float f);
/* saturate: what is too large becomes the largest finite number, as kernels/fp8.h requires; otherwise
 * infinity or NaN, as lm_set and lm_convert give. */
float lm_f8e4m3_to_f32(uint8_t b);
uint8_t lm_f32_to_f8e4m3(float f, bool saturate);
float lm_f8e5m2_to_f32(uint8_t b);
uint8_t lm_f32_to_f8e5m2(float f, bool saturate);
/* Rounding of a double straight to the type (no double rounding through f32). */
uint16_t lm_f64_to_bf16(double d);
uint16_t lm_f64_to_f16(double d);

/* Element i of an array of any dtype as a double, and back (round to nearest; integers are
 * clamped). */
double lm_get(lm_dtype d, const void *p, int64_t i);
void lm_set(lm_dtype d, void *p, int64_t i, double v);

/* n elements from one type to another; same type copies.  Vectorised for f32<->bf16 and f32<->f16
 * by the kernels ("cast"); this is the plain form that file formats use. src and dst may not
 * overlap. */
void lm_convert(lm_dtype from, const void *src, lm_dtype to, void *dst, int64_t n);

/* Stochastic rounding to F16, BF16, F8E4M3 or F8E5M2: up with a probability equal to the discarded
 * fraction, by the 32 random bits of r.  Unbiased: E[result] = d (arXiv:2010.06192 sec. 2).  The code is
 * in the low bits.  Finite numbers between the largest code and the next step above it go to the
 * largest; beyond that, and infinities, overflow as in rounding to nearest (saturate: to the
 * largest). */
uint16_t lm_f64_round_sr(lm_dtype to, double d, uint32_t r, bool saturate);

#endif
