/* SPDX-License-Identifier: Apache-2.0 */
/* chunk_simd.h -- rows of a chunk in padded F32, for kernels that pass a state from chunk to chunk (the delta rule, linear
 * attention). */
#ifndef LM_KERNELS_CPU_CHUNK_SIMD_H
#define LM_KERNELS_CPU_CHUNK_SIMD_H

#include "kernels/cpu/gemm_transpose.h"
#include "kernels/cpu/tile_simd.h"

static inline float chunk_dot(const float *x, const float *y, int64_t n)
{
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += VF_LANES)
        sum = vf_fma(vf_load(x + i), vf_load(y + i), sum);
    return vf_sum(sum);
}

static inline float chunk_sum(const float *x, int64_t n)
{
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += VF_LANES)
        sum += vf_load(x + i);
    return vf_sum(sum);
}

/* Row i of to [rows][ld] = by[i] times that of x; by 0 zeros, whatever x holds. */
static inline void chunk_scale(float *to, const float *x, int64_t rows, int64_t ld, const float *by)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < ld; j += VF_LANES) {
            vf v = vf_load(x + i * ld + j) * vf_set(by[i]);
            if (by[i] == 0)
                v = vf_zero();
            vf_store(to + i * ld + j, v);
        }
}

#ifdef __AVX512F__
typedef __m512i chunk_lines; /* a row of a square that is transposed in registers */
#define chunk_turn_square transpose_16x16
#else
typedef __m256 chunk_lines;
#define chunk_turn_square transpose_8x8
#endif

/* The first VF_LANES numbers of `cols` rows of the transpose: of the first rows of x, and zeros if x has fewer. */
static inline void chunk_turn_rows(float *to, int64_t ld, const float *x, int64_t rows, int64_t ldx,
                                   int64_t cols)
{
    for (int64_t j = 0; j < cols; j += VF_LANES) {
        chunk_lines v[VF_LANES];
        for (int64_t i = 0; i < VF_LANES; i++)
            v[i] = i < rows ? (chunk_lines)vf_load(x + i * ldx + j) : (chunk_lines)vf_zero();
        chunk_turn_square(v);
        for (int64_t i = 0; i < VF_LANES && j + i < cols; i++)
            vf_store(to + (j + i) * ld, (vf)v[i]);
    }
}

/* to [cols][ld] = the transpose of x [rows][ldx]; the rest of its rows zeros.  ld and ldx are whole vectors. */
static inline void chunk_turn(float *to, int64_t ld, const float *x, int64_t rows, int64_t ldx,
                              int64_t cols)
{
    for (int64_t i = 0; i < ld; i += VF_LANES)
        chunk_turn_rows(to + i, ld, x + i * ldx, rows - i, ldx, cols);
}

#endif
