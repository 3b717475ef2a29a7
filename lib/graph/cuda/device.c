/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- what cards can do: dense FLOP/s of matrix products, as their makers publish them.
 *
 * The figures are NVIDIA's (data sheets and architecture white papers of each card), without
 * sparsity, at the boost clock that the sheet assumes; BF16 and FP16 with sums in F32.  A card that is
 * not here, or whose sheet does not say, has 0: unknown. */
#include <stddef.h>
#include <string.h>

#include "graph/cuda/cuda.h"

typedef struct {
    const char *name; /* as the driver says it, or how that begins */
    int sms;          /* its multiprocessors: a part of a card, or a laptop's, has fewer; 0: any */
    double fp32, tf32, half; /* TFLOP/s */
} card;

/* The first that fits counts: longer names come before their beginnings. */
static const card cards[] = {
    /* Blackwell: HGX and GB200 data sheets (half of what they print with sparsity) */
    { "NVIDIA GB200", 0, 80, 1250, 2500 },
    { "NVIDIA B200", 148, 75, 1100, 2250 },
    /* Hopper: data sheets of H100, H200, GH200, H20; white paper "H100 Tensor Core GPU" */
    { "NVIDIA H200 NVL", 132, 60, 417.5, 835.5 },
    { "NVIDIA H200", 132, 66.9, 494.7, 989.4 },
    { "NVIDIA GH200", 132, 66.9, 494.7, 989.4 },
    { "NVIDIA H100 NVL", 132, 60, 417.5, 835.5 },
    { "NVIDIA H100 PCIe", 114, 51, 378, 756 },
    { "NVIDIA H100", 132, 66.9, 494.7, 989.4 },
    { "NVIDIA H800 PCIe", 114, 51, 378, 756 },
    { "NVIDIA H800", 132, 66.9, 494.7, 989.4 },
    { "NVIDIA H20", 78, 44, 74, 148 },
    /* Ampere: data sheets of A100, A30, A10, A40; white papers "A100" and "GA102" */
    { "NVIDIA A100", 108, 19.5, 156, 312 },
    { "NVIDIA A800", 108, 19.5, 156, 312 },
    { "NVIDIA A30", 56, 10.3, 82, 165 },
    { "NVIDIA A10", 72, 31.2, 62.5, 125 },
    { "NVIDIA A40", 84, 37.4, 74.8, 149.7 },
    { "NVIDIA RTX A6000", 84, 38.7, 77.4, 154.8 },
    { "NVIDIA GeForce RTX 3090 Ti", 84, 40, 40, 80 },
    { "NVIDIA GeForce RTX 3090", 82, 35.6, 35.6, 71 },
    /* Ada: data sheets of L4, L40, L40S; white paper "Ada GPU Architecture" */
    { "NVIDIA L40S", 142, 91.6, 183, 362.1 },
    { "NVIDIA L40", 142, 90.5, 90.5, 181.1 },
    { "NVIDIA L4", 58, 30.3, 60, 121 },
    { "NVIDIA RTX 6000 Ada", 142, 91.1, 182.1, 364.2 },
    { "NVIDIA GeForce RTX 4090", 128, 82.6, 82.6, 165.2 },
    /* Blackwell for desks: white paper "RTX Blackwell GPU Architecture" */
    { "NVIDIA GeForce RTX 5090", 170, 104.8, 104.8, 209.5 },
};

double cuda_peak(const char *name, int sms, lm_dtype act, bool tf32)
{
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        size_t n = strlen(cards[i].name);

        if (strncmp(name, cards[i].name, n) || (name[n] && name[n] != ' ' && name[n] != '-') ||
            (cards[i].sms && cards[i].sms != sms))
            continue;
        switch (act) {
        case LM_DTYPE_F32:
            return (tf32 ? cards[i].tf32 : cards[i].fp32) * 1e12;
        case LM_DTYPE_BF16:
        case LM_DTYPE_F16:
            return cards[i].half * 1e12;
        default:
            return 0;
        }
    }
    return 0;
}
