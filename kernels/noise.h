/* SPDX-License-Identifier: Apache-2.0 */
/* noise.h -- counted random noise on activations: what makes routers of experts explore.
 *
 * noise  in x act   out y act, of the same shape (may alias x)
 *          added    y = x + amount n, n normal with deviation 1: the noise of a router's logits (noisy top-k,
 *                   arXiv:1701.06538, with the fixed deviation of V-MoE, arXiv:2106.05974, section 3.1)
 *          scaled   y = x (1 + amount (2 u - 1)): the jitter of a router's input (Switch, arXiv:2101.03961, section
 *                   2.2).  The gradient is itself
 *          weighed  y = amount n x: noise whose deviations are x, as routers learn them (arXiv:1701.06538, equation 4).
 *                   The gradient is itself
 *        u = (floor(draw / 2^8) + 1/2) / 2^24 of the draw from Philox (seed, "noise", site) at index (step*2^16 + micro)*count
 *        + i, as in dropout (elementwise.h), also in a part of a whole (kernels/origin.h); n is the normal quantile of u.  |n| is at most 5.5.
 *
 * Tolerance: relative L2 2e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_NOISE_H
#define LM_KERNELS_NOISE_H

#include "kernels/kernel.h"
#include "kernels/origin.h"

typedef enum { LM_NOISE_ADDED, LM_NOISE_SCALED, LM_NOISE_WEIGHED } lm_noise_kind;

typedef struct {
    double amount; /* at least 0 */
    lm_noise_kind kind;
    int64_t site;
    lm_origin origin;
} lm_noise_attr;

/* The normal quantile of u = 1/2 + x/2 is sqrt(2) x P(w), w = -log((1-x)(1+x)) = -log(4 u (1-u)): P of w - 5/2 below 5, of
 * sqrt(w) - 3 from there on (M. Giles, Approximating the erfinv function, 2010, single precision; the factor sqrt(2) is
 * apart).  Relative error 3e-7.  Coefficients from the highest power down. */
enum { LM_NOISE_TERMS = 9 };
#define LM_NOISE_CENTRE                                                                      \
    {                                                                                        \
        2.81022636e-08f, 3.43273939e-07f, -3.5233877e-06f, -4.39150654e-06f, 0.00021858087f, \
            -0.00125372503f, -0.00417768164f, 0.246640727f, 1.50140941f                      \
    }
#define LM_NOISE_TAIL                                                                       \
    {                                                                                       \
        -0.000200214257f, 0.000100950558f, 0.00134934322f, -0.00367342844f, 0.00573950773f, \
            -0.0076224613f, 0.00943887047f, 1.00167406f, 2.83297682f                        \
    }

#endif
