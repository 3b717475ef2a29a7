/* SPDX-License-Identifier: Apache-2.0 */
/* peak_simd.c -- fused multiply-adds on registers: twelve independent chains hide the latency. */
#include "kernels/cpu/simd.h"
#include "kernels/peak.h"

#define PASTE2(a, b) a##b
#define PASTE(a, b)  PASTE2(a, b)

enum { CHAINS = 12 };

double PASTE(lm_peak_fma_, LM_SIMD)(int64_t rounds, const uint16_t *data)
{
    vf acc[CHAINS], a = vf_set(0.9999f), b = vf_set(1.0e-4f);
    float seen[VF_LANES];
    volatile float keep = 0;
    (void)data;
    for (int i = 0; i < CHAINS; i++)
        acc[i] = vf_set(0.37f + 0.11f * (float)i);
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++)
            acc[i] = vf_fma(acc[i], a, b);
    for (int i = 0; i < CHAINS; i++) {
        vf_store(seen, acc[i]);
        keep += seen[0];
    }
    return 2.0 * VF_LANES * CHAINS * (double)rounds;
}
