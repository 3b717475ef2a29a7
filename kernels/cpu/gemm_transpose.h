/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_transpose.h -- square blocks of 32-bit elements transposed in registers, for packing. */
#ifndef LM_KERNELS_CPU_GEMM_TRANSPOSE_H
#define LM_KERNELS_CPU_GEMM_TRANSPOSE_H

#include <immintrin.h>

#ifdef __AVX512F__
/* 16 x 16: pairs, then quads within 128-bit lanes, then the lanes themselves. */
static inline void transpose_16x16(__m512i r[16])
{
    __m512i t[16];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    /* r[4g+c] lane l now holds rows 4g..4g+3 of column 4l+c. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        __m512i b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, b, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}
#endif

#ifdef __AVX2__
static inline void transpose_8x8(__m256 r[8])
{
    __m256 t[8];

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        r[i] = t[i];
}
#endif

#endif
