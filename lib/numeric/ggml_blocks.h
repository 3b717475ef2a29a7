/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_blocks.h -- the encoders and decoders behind format.h; private to lib/numeric. */
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
/* The same with importance, w: [n] (ggml_weighted.c). */
void lm_q4_0_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q4_1_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q5_0_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q5_1_weigh(const float *x, const float *w, int64_t n, void *dst);

/* Super-blocks of 256 (ggml_super.c). */
void lm_q2_k_encode(const float *x, int64_t n, void *dst);
void lm_q2_k_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q2_k_decode(const void *src, int64_t n, float *y);
void lm_q3_k_encode(const float *x, int64_t n, void *dst);
void lm_q3_k_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q3_k_decode(const void *src, int64_t n, float *y);
void lm_q4_k_encode(const float *x, int64_t n, void *dst);
void lm_q4_k_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q4_k_decode(const void *src, int64_t n, float *y);
void lm_q5_k_encode(const float *x, int64_t n, void *dst);
void lm_q5_k_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q5_k_decode(const void *src, int64_t n, float *y);
void lm_q6_k_encode(const float *x, int64_t n, void *dst);
void lm_q6_k_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_q6_k_decode(const void *src, int64_t n, float *y);

/* Codes that stand for unevenly spaced numbers (ggml_iq4.c). */
void lm_iq4_nl_encode(const float *x, int64_t n, void *dst);
void lm_iq4_nl_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_iq4_nl_decode(const void *src, int64_t n, float *y);
void lm_iq4_xs_encode(const float *x, int64_t n, void *dst);
void lm_iq4_xs_weigh(const float *x, const float *w, int64_t n, void *dst);
void lm_iq4_xs_decode(const void *src, int64_t n, float *y);

/* Blocks that are read only (ggml_read.c). */
void lm_mxfp4_decode(const void *src, int64_t n, float *y);
void lm_nvfp4_decode(const void *src, int64_t n, float *y);
void lm_q1_0_decode(const void *src, int64_t n, float *y);
void lm_q2_0_decode(const void *src, int64_t n, float *y);

/* 32 codes of four bits in 16 bytes: byte j holds code j in its low half and code j + 16 in its high
 * half.  The same with fifth bits, bit j of `high` (4 bytes) being that of code j. */
void lm_pack4(const uint8_t q[32], uint8_t *p);
void lm_unpack4(const uint8_t *p, uint8_t q[32]);
void lm_pack5(const uint8_t q[32], uint8_t *high, uint8_t *p);

/* A scale: never infinite, NaN (of sums that overflowed) as 0, so that a block always decodes to
 * numbers. */
static inline void lm_put_f16(uint8_t *p, float f)
{
    uint16_t h = lm_f32_to_f16(isnan(f)        ? 0.0f
                               : f > 65504.0f  ? 65504.0f
                               : f < -65504.0f ? -65504.0f
                                               : f);
    memcpy(p, &h, 2);
}

static inline float lm_get_f16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return lm_f16_to_f32(h);
}

/* `n` numbers in the form in which they are coded. */
static inline void lm_take_finite(const float *x, int n, float *v)
{
    for (int i = 0; i < n; i++)
        v[i] = isfinite(x[i]) ? x[i] : 0.0f;
}

/* Truncated and limited to [lo, hi]; NaN gives lo. */
static inline int lm_clamp_int(float f, int lo, int hi)
{
    return f > (float)lo ? (f < (float)hi ? (int)f : hi) : lo;
}

#endif
