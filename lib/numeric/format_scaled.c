/* SPDX-License-Identifier: Apache-2.0 */
/* format_scaled.c -- see format_scaled.h. */
#include "numeric/format_scaled.h"

#include <string.h>

#include "numeric/dtype.h"

void lm_scaled_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *at = src;
    for (int64_t i = 0; i < n; i += LM_SCALED_BLOCK, at += LM_SCALED_BYTES) {
        float s;
        memcpy(&s, at, sizeof s);
        lm_convert(LM_DTYPE_F8E4M3, at + sizeof s, LM_DTYPE_F32, y + i, LM_SCALED_BLOCK);
        for (int k = 0; k < LM_SCALED_BLOCK; k++)
            y[i + k] *= s;
    }
}
