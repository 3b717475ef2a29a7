/* SPDX-License-Identifier: Apache-2.0 */
/* torch_rng.h -- the numbers that PyTorch draws on the CPU from a seed, bit for bit: parts of some
 * adapters are not in their files but drawn again (VeRA's matrices, the places of FourierFT's
 * coefficients).
 *
 * torch.Generator().manual_seed(s) is the Mersenne Twister MT19937 with init_genrand(s mod 2^32).
 * uniform_ of F32 takes 24 bits of each number; randperm(n) exchanges element i with element i + z
 * mod (n - i), z one number. Larger n, and normal distributions are not here: their bits depend on
 * the machine's vector width. Source: pytorch/pytorch ATen/core/MT19937RNGEngine.h,
 * native/cpu/DistributionTemplates.h.
 * Private to lib/tune. */
#ifndef LM_TUNE_TORCH_RNG_H
#define LM_TUNE_TORCH_RNG_H

#include <stdint.h>

#include "base/err.h"

enum { LM_TORCH_MOST = UINT32_MAX / 20 }; /* numbers of a permutation */

typedef struct {
    uint32_t state[624];
    int left; /* numbers until the state is made anew */
} lm_torch_rng;

void lm_torch_rng_seed(lm_torch_rng *g, uint64_t seed);
uint32_t lm_torch_rng_u32(lm_torch_rng *g);
/* tensor.uniform_(-bound, bound) of n numbers in F32. */
void lm_torch_uniform(lm_torch_rng *g, double bound, int64_t n, double *out);
/* torch.randn of n numbers in F32, to their last bits, which depend on the machine; n >= 16. */
void lm_torch_normal(lm_torch_rng *g, int64_t n, double *out);
/* randperm(all, generator=manual_seed(seed))[:n].  Fails: LM_EUSAGE for LM_TORCH_MOST and more;
 * for memory, 8 bytes times `all`. */
lm_code lm_torch_choose(uint64_t seed, int64_t all, int64_t n, int64_t *out, lm_err *e);

#endif
