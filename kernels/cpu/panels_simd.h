/* SPDX-License-Identifier: Apache-2.0 */
/* panels_simd.h -- panels of weights with vectors of 512 bits. */
#ifndef LM_KERNELS_CPU_PANELS_SIMD_H
#define LM_KERNELS_CPU_PANELS_SIMD_H

#include "kernels/cpu/gemm_transpose.h"
#include "kernels/cpu/simd.h"
#include "kernels/panels.h"

/* 32 numbers rounded to BF16; denormals are kept. */
static inline __m512i panel_round(const float *p)
{
    __m256i a = _mm512_cvtepi32_epi16(vf_bf16_bits(_mm512_loadu_ps(p)));
    __m256i b = _mm512_cvtepi32_epi16(vf_bf16_bits(_mm512_loadu_ps(p + 16)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

/* panel = the 32 rows [32,width] of `from` (F32 or BF16), written past the caches (the caller ends with
 * _mm_sfence); 64-byte aligned. */
LM_INLINE void panel_of(lm_dtype from, const void *rows, int64_t width, uint16_t *panel)
{
    for (int64_t k = 0; k < width; k += LM_PANEL)
        for (int64_t h = 0; h < 2; h++, panel += 512) {
            __m512i v[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                int64_t at = (16 * h + i) * width + k;
                v[i] = from == LM_DTYPE_F32 ? panel_round((const float *)rows + at)
                                            : _mm512_loadu_si512((const uint16_t *)rows + at);
            }
            transpose_16x16(v);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_stream_si512((__m512i *)(panel + 32 * i), v[i]);
        }
}

#endif
