/* SPDX-License-Identifier: Apache-2.0 */
/* peak_bf16.c -- dot products of pairs on registers: twelve independent chains hide the latency. */
#include <immintrin.h>

#include "kernels/peak.h"

enum { CHAINS = 12 };

double lm_peak_bf16(int64_t rounds, const uint16_t *data)
{
    __m512bh a = (__m512bh)_mm512_load_si512(data), b = (__m512bh)_mm512_load_si512(data + 32);
    __m512 acc[CHAINS];
    volatile float keep = 0;

    for (int i = 0; i < CHAINS; i++)
        acc[i] = _mm512_set1_ps((float)i);
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++)
            acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
    for (int i = 0; i < CHAINS; i++)
        keep += _mm512_cvtss_f32(acc[i]);
    return 2.0 * 32 * CHAINS * (double)rounds;
}
