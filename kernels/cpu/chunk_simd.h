/* SPDX-License-Identifier: Apache-2.0 */
/* chunk_simd.h -- rows of a chunk in padded F32, for kernels that pass a state from chunk to chunk (the delta rule, linear
 * attention). */
#ifndef LM_KERNELS_CPU_CHUNK_SIMD_H
#define LM_KERNELS_CPU_CHUNK_SIMD_H

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

/* to [cols][ld] = the transpose of x [rows][ldx]; the rest of its rows zeros. */
static inline void chunk_turn(float *to, int64_t ld, const float *x, int64_t rows, int64_t ldx,
                              int64_t cols)
{
    for (int64_t j = 0; j < cols; j++) {
        for (int64_t i = 0; i < rows; i++)
            to[j * ld + i] = x[i * ldx + j];
        for (int64_t i = rows; i < ld; i++)
            to[j * ld + i] = 0;
    }
}

#endif
