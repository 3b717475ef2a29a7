/* SPDX-License-Identifier: Apache-2.0 */
/* torch_rng.c -- MT19937 as PyTorch uses it. */
#include "tune/torch_rng.h"

#include <math.h>

#include "base/mem.h"

enum { N = 624, M = 397 };

void lm_torch_rng_seed(lm_torch_rng *g, uint64_t seed)
{
    g->state[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < N; i++)
        g->state[i] = 1812433253u * (g->state[i - 1] ^ (g->state[i - 1] >> 30)) + i;
    g->left = 0;
}

static void renew(lm_torch_rng *g)
{
    for (int i = 0; i < N; i++) {
        uint32_t y = (g->state[i] & 0x80000000u) | (g->state[(i + 1) % N] & 0x7fffffffu);

        g->state[i] = g->state[(i + M) % N] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    g->left = N;
}

uint32_t lm_torch_rng_u32(lm_torch_rng *g)
{
    uint32_t y;

    if (!g->left)
        renew(g);
    y = g->state[N - g->left--];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

void lm_torch_uniform(lm_torch_rng *g, double bound, int64_t n, double *out)
{
    float from = (float)-bound, to = (float)bound;

    for (int64_t i = 0; i < n; i++) {
        double x = (lm_torch_rng_u32(g) & 0xffffffu) * 0x1p-24;

        out[i] = (float)(x * (double)(to - from) + (double)from);
    }
}

/* Two normal numbers of every two uniform ones, 8 places apart (Box and Muller). */
static void turn_normal(double *x)
{
    for (int j = 0; j < 8; j++) {
        double radius = sqrt(-2 * log(1 - x[j])), angle = 2 * 3.14159265358979323846 * x[j + 8];

        x[j] = radius * cos(angle);
        x[j + 8] = radius * sin(angle);
    }
}

void lm_torch_normal(lm_torch_rng *g, int64_t n, double *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = (lm_torch_rng_u32(g) & 0xffffffu) * 0x1p-24;
    for (int64_t i = 0; i + 16 <= n; i += 16)
        turn_normal(out + i);
    if (n % 16 && n > 16) { /* the last 16 once more */
        for (int64_t i = n - 16; i < n; i++)
            out[i] = (lm_torch_rng_u32(g) & 0xffffffu) * 0x1p-24;
        turn_normal(out + n - 16);
    }
}

lm_code lm_torch_choose(uint64_t seed, int64_t all, int64_t n, int64_t *out, lm_err *e)
{
    int64_t *order = NULL;
    lm_torch_rng g;
    lm_code rc;

    if (all >= LM_TORCH_MOST)
        return lm_fail(e, LM_EUSAGE, "a matrix", "use the program that made the adapter",
                       "places among %lld are drawn in another way, which is not reproduced",
                       (long long)all);
    rc = lm_alloc_n(&order, (size_t)all, sizeof *order, "a permutation", e);

    if (rc)
        return rc;
    lm_torch_rng_seed(&g, seed);
    for (int64_t i = 0; i < all; i++)
        order[i] = i;
    for (int64_t i = 0; i < n && i < all; i++) {
        int64_t kept = order[i], k;

        if (i == all - 1) { /* the last has no choice, and no number is drawn */
            out[i] = order[i];
            break;
        }
        k = lm_torch_rng_u32(&g) % (all - i);
        order[i] = order[i + k];
        order[i + k] = kept;
        out[i] = order[i];
    }
    lm_free(order);
    return LM_OK;
}
