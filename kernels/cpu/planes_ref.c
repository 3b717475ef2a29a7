/* SPDX-License-Identifier: Apache-2.0 */
/* planes_ref.c -- byte planes, element by element: the definition. */
#include <string.h>

#include "kernels/planes.h"

static uint64_t mask_of(int size)
{
    return UINT64_MAX >> (64 - 8 * size);
}

static uint64_t top_of(int size)
{
    return (uint64_t)1 << (8 * size - 1);
}

static uint64_t fold(int size, uint64_t x)
{
    return x ^ (x & top_of(size) ? mask_of(size) : top_of(size));
}

static uint64_t unfold(int size, uint64_t x)
{
    return x ^ (x & top_of(size) ? top_of(size) : mask_of(size));
}

static uint64_t change(lm_planes_form f, uint64_t x, uint64_t b)
{
    uint64_t mask = mask_of(f.size);
    if (f.delta == LM_PLANES_SUB) {
        uint64_t d = f.field ? fold(f.size, x) - fold(f.size, b) : x - b;
        return ((d << 1) ^ (d & top_of(f.size) ? mask : 0)) & mask;
    }
    if (f.delta == LM_PLANES_XOR)
        x ^= b;
    return f.field && f.size > 1 ? (x << 1 & mask) | x >> (8 * f.size - 1) : x;
}

static uint64_t restore(lm_planes_form f, uint64_t y, uint64_t b)
{
    uint64_t mask = mask_of(f.size);
    if (f.delta == LM_PLANES_SUB) {
        uint64_t d = y >> 1 ^ (y & 1 ? mask : 0);
        return f.field ? unfold(f.size, (fold(f.size, b) + d) & mask) : (b + d) & mask;
    }
    if (f.field && f.size > 1)
        y = y >> 1 | (y << (8 * f.size - 1) & mask);
    return f.delta == LM_PLANES_XOR ? y ^ b : y;
}

static uint64_t load(const void *p, size_t i, int size)
{
    const uint8_t *at = (const uint8_t *)p + i * (size_t)size;
    uint64_t x = 0;
    for (int k = 0; k < size; k++)
        x |= (uint64_t)at[k] << 8 * k;
    return x;
}

static void split(lm_planes_form f, const void *x, const void *base, size_t n,
                  uint8_t *const plane[LM_PLANES_MAX])
{
    for (size_t i = 0; i < n; i++) {
        uint64_t y = change(f, load(x, i, f.size), f.delta ? load(base, i, f.size) : 0);
        for (int k = 0; k < f.size; k++)
            plane[k][i] = (uint8_t)(y >> 8 * k);
    }
}

static void join(lm_planes_form f, const uint8_t *const plane[LM_PLANES_MAX], const void *base,
                 size_t n, void *x)
{
    uint8_t *out = x;
    for (size_t i = 0; i < n; i++) {
        uint64_t y = 0;
        for (int k = 0; k < f.size; k++)
            y |= (uint64_t)plane[k][i] << 8 * k;
        y = restore(f, y, f.delta ? load(base, i, f.size) : 0);
        for (int k = 0; k < f.size; k++)
            out[i * (size_t)f.size + (size_t)k] = (uint8_t)(y >> 8 * k);
    }
}

const lm_planes_kernels lm_planes_ref = { split, join };
