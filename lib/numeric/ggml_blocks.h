/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_blocks.h -- the encoders and decoders behind ggml.h; private to lib/numeric. */
#ifndef LM_NUMERIC_GGML_BLOCKS_H
#define LM_NUMERIC_GGML_BLOCKS_H

#include <math.h>
#include <string.h>

#include "numeric/dtype.h"

/* Blocks of 32 with one scale (ggml_simple.c). */
void lm_q4_0_encode(const float *x, int64_t n, void *dst);
void lm_q4_0_decode(const void *src, int64_t n, float *y);
void lm_q4_1_encode(const float *x, int64_t n, void *dst);
void lm_q4_1_decode(const void *src, int64_t n, float *y);
void lm_q5_0_encode(const float *x, int64_t n, void *dst);
void lm_q5_0_decode(const void *src, int64_t n, float *y);
void lm_q5_1_encode(const float *x, int64_t n, void *dst);
void lm_q5_1_decode(const void *src, int64_t n, float *y);
void lm_q8_0_encode(const float *x, int64_t n, void *dst);
void lm_q8_0_decode(const void *src, int64_t n, float *y);

/* Super-blocks of 256 (ggml_super.c). */
void lm_q4_k_encode(const float *x, int64_t n, void *dst);
void lm_q4_k_decode(const void *src, int64_t n, float *y);
void lm_q5_k_encode(const float *x, int64_t n, void *dst);
void lm_q5_k_decode(const void *src, int64_t n, float *y);
void lm_q6_k_encode(const float *x, int64_t n, void *dst);
void lm_q6_k_decode(const void *src, int64_t n, float *y);

/* A scale: never infinite, so that a block always decodes to numbers. */
static inline void lm_put_f16(uint8_t *p, float f)
{
    uint16_t h = lm_f32_to_f16(f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f);
    memcpy(p, &h, 2);
}

static inline float lm_get_f16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return lm_f16_to_f32(h);
}

/* `n` numbers as they are to be coded. */
static inline void lm_take_finite(const float *x, int n, float *v)
{
    for (int i = 0; i < n; i++)
        v[i] = isfinite(x[i]) ? x[i] : 0.0f;
}

/* The fraction cut off, held to [lo, hi]; NaN gives lo. */
static inline int lm_cut(float f, int lo, int hi)
{
    return f > (float)lo ? (f < (float)hi ? (int)f : hi) : lo;
}

#endif
