/* SPDX-License-Identifier: Apache-2.0 */
/* peak_table.c -- the loop for each processor, and its timing. */
#include "base/clock.h"
#include "base/rng.h"
#include "kernels/peak.h"

typedef struct {
    double (*loop)(int64_t rounds, const uint16_t *data);
    int64_t rounds;
    const uint16_t *data;
    double flops[256]; /* by worker */
} job;

static void run(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    (void)begin, (void)end;
    j->flops[worker & 255] = j->loop(j->rounds, j->data);
}

double lm_cpu_peak(lm_dtype act, lm_cpu_level level, lm_par *par)
{
    _Alignas(64) uint16_t data[LM_PEAK_DATA];
    job j = { .rounds = 40000, .data = data };
    lm_rng r = lm_rng_make(1, "peak", 0);
    double best = 0;
    for (uint64_t i = 0; i < LM_PEAK_DATA; i++)
        data[i] = lm_f32_to_bf16((float)lm_rng_normal(r, i));
    if (level >= LM_CPU_AMX && act == LM_DTYPE_BF16) {
        j.loop = lm_peak_amx;
    } else if (level >= LM_CPU_AVX2) {
        bool pairs = level >= LM_CPU_BF16 && act == LM_DTYPE_BF16;
        j.loop = pairs                    ? lm_peak_bf16
                 : level >= LM_CPU_AVX512 ? lm_peak_fma_avx512
                                          : lm_peak_fma_avx2;
        j.rounds = 1000000;
    } else {
        return 0;
    }
    for (int k = 0; k < 5; k++) {
        double t = lm_now(), sum = 0;
        lm_par_each(par, run, &j);
        t = lm_now() - t;
        for (int i = 0; i < lm_par_threads(par) && i < 256; i++)
            sum += j.flops[i];
        best = sum / t > best ? sum / t : best;
    }
    return best;
}
