/* SPDX-License-Identifier: Apache-2.0 */
/* rng.c -- Philox 4x32-10 and what is drawn from it.
 *
 * John K. Salmon, Mark A. Moraes, Ron O. Dror, David E. Shaw: Parallel random numbers: as easy as
 * 1, 2, 3 (SC'11), section 4.2: ten rounds of two 32x32 -> 64 bit products with a Weyl key. */
#include "base/rng.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"

lm_u32x4 lm_philox(uint64_t ctr_lo, uint64_t ctr_hi, uint64_t key)
{
    uint32_t c0 = (uint32_t)ctr_lo, c1 = (uint32_t)(ctr_lo >> 32);
    uint32_t c2 = (uint32_t)ctr_hi, c3 = (uint32_t)(ctr_hi >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);

    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;

        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u; /* golden ratio     */
        k1 += 0xBB67AE85u; /* square root of 3 */
    }
    return (lm_u32x4){ { c0, c1, c2, c3 } };
}

lm_rng lm_rng_make(uint64_t seed, const char *purpose, uint64_t sub)
{
    return (lm_rng){ .key = seed, .hi = lm_hash64(purpose, strlen(purpose), sub) };
}

/* SplitMix64's finaliser (G. L. Steele et al., OOPSLA 2014; Stafford's mix 13): a bijection whose
 * neighbouring inputs give unrelated outputs, so keys of two seeds do not meet in nearby steps. */
uint64_t lm_rng_key(uint64_t seed, uint64_t step, uint64_t micro)
{
    uint64_t x = step << 24 ^ micro;

    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return seed ^ x ^ x >> 31;
}

uint64_t lm_rng_first(lm_rng *r, uint64_t run, uint64_t count)
{
    unsigned __int128 first = (unsigned __int128)run * count;

    r->hi ^= lm_rng_key(0, 0, (uint64_t)(first >> 64));
    return (uint64_t)first;
}

uint32_t lm_rng_u32(lm_rng r, uint64_t index)
{
    return lm_philox(index / 4, r.hi, r.key).v[index % 4];
}

static uint64_t half(lm_u32x4 x, int i)
{
    return x.v[2 * i] | (uint64_t)x.v[2 * i + 1] << 32;
}

uint64_t lm_rng_u64(lm_rng r, uint64_t index)
{
    return half(lm_philox(index / 2, r.hi, r.key), (int)(index % 2));
}

double lm_rng_uniform(lm_rng r, uint64_t index)
{
    return (double)(lm_rng_u64(r, index) >> 11) * 0x1p-53;
}

double lm_rng_normal(lm_rng r, uint64_t index)
{
    lm_u32x4 x = lm_philox(index / 2, r.hi, r.key);
    double u = (double)((half(x, 0) >> 11) + 1) * 0x1p-53; /* (0,1]: the logarithm is finite */
    double angle = 2 * M_PI * ((double)(half(x, 1) >> 11) * 0x1p-53);

    return sqrt(-2 * log(u)) * (index % 2 ? sin(angle) : cos(angle));
}

uint64_t lm_rng_below(lm_rng r, uint64_t index, uint64_t n)
{
    return (uint64_t)((unsigned __int128)lm_rng_u64(r, index) * n >> 64);
}

uint64_t lm_rng_permute(lm_rng r, uint64_t i, uint64_t n)
{
    int bits, low;
    uint64_t low_mask, high_mask;

    if (n < 2)
        return 0;
    bits = 64 - __builtin_clzll(n - 1);
    bits = bits < 2 ? 2 : bits; /* both halves need a bit */
    low = bits / 2;
    low_mask = (UINT64_C(1) << low) - 1;
    high_mask = (UINT64_C(1) << (bits - low)) - 1;
    do { /* out of range: continue along the cycle; fewer than two steps on average */
        uint64_t a = i >> low, b = i & low_mask;

        for (uint64_t round = 0; round < 6; round += 2) {
            a ^= half(lm_philox(b, r.hi ^ round, r.key), 0) & high_mask;
            b ^= half(lm_philox(a, r.hi ^ (round + 1), r.key), 0) & low_mask;
        }
        i = a << low | b;
    } while (i >= n);
    return i;
}
