/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_blocks.h -- parts of GGUF's blocks for the row decoders of each width (code_rows_512.h,
 * code_rows_256.h).  Layouts: numeric/format.h. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_BLOCKS_H
#define LM_KERNELS_CPU_CODE_ROWS_BLOCKS_H

#include <pthread.h>

#include "kernels/cpu/simd.h"
#include "numeric/format.h"

enum { BLOCK = 32, SUPER = 256 };

typedef void (*row_fn)(const uint8_t *p, int64_t n, void *y);

/* Sums of the products of a row's numbers with rows of x (lm_code_rows_sums): sum [m]. */
typedef void (*sums_fn)(const uint8_t *p, int64_t n, const float *x, float *sum);

/* How rows of a format are decoded. */
typedef struct {
    int gguf;           /* its number in GGUF */
    row_fn f32, bf16;   /* NULL: by way of F32 */
    sums_fn sums[2][3]; /* [of BF16][of 1, 2, 4 rows of x]; NULL: decoded first */
} row_coder;

/* The formats that have one: X(number of their GGUF kind, name). */
/* clang-format off */
#define ROW_FORMATS(X)                                                      \
    X(8, q8_0)    X(2, q4_0)    X(3, q4_1)    X(12, q4_k)   X(13, q5_k)     \
    X(14, q6_k)   X(6, q5_0)    X(7, q5_1)    X(20, iq4_nl) X(23, iq4_xs)   \
    X(10, q2_k)   X(11, q3_k)   X(39, mxfp4)  X(40, nvfp4)  X(41, q1_0)     \
    X(42, q2_0)   X(1, f16)     X(30, bf16)
/* clang-format on */

LM_INLINE float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return _cvtsh_ss(h);
}

/* Half of MXFP4's scale, which twice the values of E2M1 are multiplied by: 2^(e - 128) is a number for
 * all e, and the product is exact unless it is too large. */
LM_INLINE float half_power(uint8_t e)
{
    uint32_t bits = e > 1 ? (uint32_t)(e - 1) << 23 : (uint32_t)(e + 1) << 21;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Half of each of NVFP4's scales, by its code. */
static float scale_of_nvfp4[256];
static pthread_once_t nvfp4_made = PTHREAD_ONCE_INIT;

static void make_nvfp4(void)
{
    const lm_format *f = lm_format_of_gguf(40);
    uint8_t block[36] = { 0 };
    float y[64];
    memset(block + 4, 1, 8); /* E2M1's 0.5 */
    for (int s = 0; s < 256; s++) {
        block[0] = (uint8_t)s;
        f->decode(f, (const void *const[]){ block }, 1, 64, y, 64);
        scale_of_nvfp4[s] = y[0];
    }
}

static const float *nvfp4_scales(void)
{
    pthread_once(&nvfp4_made, make_nvfp4);
    return scale_of_nvfp4;
}

/* ---- parts of blocks ---- */

LM_INLINE __m128i bytes16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

LM_INLINE __m128i low4(__m128i q)
{
    return _mm_and_si128(q, _mm_set1_epi8(15));
}
LM_INLINE __m128i high4(__m128i q)
{
    return low4(_mm_srli_epi16(q, 4));
}

LM_INLINE uint32_t word_at(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
}

/* Pair j of the bits of each byte. */
LM_INLINE __m128i pair(__m128i q, int j)
{
    return _mm_and_si128(_mm_srl_epi16(q, _mm_cvtsi32_si128(2 * j)), _mm_set1_epi8(3));
}

/* Bit j of each byte as 4. */
LM_INLINE __m128i third(__m128i bits, int j)
{
    return _mm_and_si128(_mm_slli_epi16(_mm_srl_epi16(bits, _mm_cvtsi32_si128(j)), 2),
                         _mm_set1_epi8(4));
}

/* Scale j of 16, six bits each in 12 bytes. */
LM_INLINE int three_scale(const uint8_t *p, int j)
{
    return ((p[j % 8] >> j / 8 * 4 & 15) | (p[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
}

/* Values of IQ4's codes. */
LM_INLINE __m128i uneven_values(void)
{
    return _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
}
LM_INLINE __m128i uneven(__m128i q)
{
    return _mm_shuffle_epi8(uneven_values(), q);
}

/* Scale of group j of a block of IQ4_XS. */
LM_INLINE int iq4_scale(const uint8_t *p, int j)
{
    int low = p[4 + j / 2] >> j % 2 * 4 & 15, high = p[2 + j / 4] >> j % 4 * 2 & 3;
    return (low | high << 4) - 32;
}

#endif
