/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_ref.c -- codes of caches by their definition (kernels/kv_code.h). */
#include <math.h>

#include "kernels/kv_code.h"

static void rotate(int64_t D, float *x)
{
    int64_t block = D & -D;
    float scale = (float)(1 / sqrt((double)block));
    for (int64_t from = 0; from < D; from += block) {
        float *b = x + from;
        for (int64_t half = 1; half < block; half *= 2)
            for (int64_t i = 0; i < block; i += 2 * half)
                for (int64_t j = i; j < i + half; j++) {
                    float low = b[j], high = b[j + half];
                    b[j] = low + high;
                    b[j + half] = low - high;
                }
        for (int64_t i = 0; i < block; i++)
            b[i] *= scale;
    }
}

static void load(lm_dtype act, bool turned, int64_t D, const void *x, int64_t n, float *y)
{
    uint32_t row[LM_KV_MAX_DIM];
    lm_convert(act, x, LM_DTYPE_F32, y, n * D);
    for (int64_t i = 0; i < n && turned; i++) {
        rotate(D, y + i * D);
        lm_convert(LM_DTYPE_F32, y + i * D, act, row, D);
        lm_convert(act, row, LM_DTYPE_F32, y + i * D, D);
    }
}

static void store(lm_dtype act, bool turned, int64_t D, const float *x, int64_t n, void *y)
{
    float row[LM_KV_MAX_DIM];
    for (int64_t i = 0; i < n; i++) {
        memcpy(row, x + i * D, (size_t)D * sizeof *row);
        if (turned)
            rotate(D, row);
        lm_convert(LM_DTYPE_F32, row, act, (char *)y + (size_t)(i * D) * lm_dtype_size(act), D);
    }
}

const lm_kv_code_kernels lm_kv_code_ref = { lm_kv_encode,   lm_kv_decode, lm_kv_rows_get,
                                            lm_kv_rows_put, load,         store };
