/* SPDX-License-Identifier: Apache-2.0 */
/* rans.c -- frequencies from counts. */
#include "kernels/rans.h"

#include <math.h>

enum { ALL = 1 << LM_RANS_BITS };

/* About the change of the code length, without a logarithm, when a symbol's frequency f becomes
 * f + step. */
static double cost(uint32_t count, int f, int step)
{
    return -step * (double)count / (f + 0.5 * step);
}

/* Add `step` to the frequency, of those that occur, where this lengthens the code least. */
static void change_one(const uint32_t *count, int symbols, int *f, int step)
{
    double least = INFINITY;
    int best = 0;
    for (int s = 0; s < symbols; s++) {
        if (!count[s] || f[s] + step < 1)
            continue;
        double c = cost(count[s], f[s], step);
        if (c < least)
            least = c, best = s;
    }
    f[best] += step;
}

void lm_rans_fit(const uint32_t *count, int symbols, uint16_t *start)
{
    int f[LM_RANS_SYMBOLS] = { 0 }, sum = 0, width = lm_rans_width(symbols);
    uint64_t all = 0;
    for (int s = 0; s < symbols; s++)
        all += count[s];
    for (int s = 0; s < symbols && all; s++) {
        uint64_t share = ((uint64_t)count[s] * ALL + all / 2) / all;
        f[s] = count[s] && !share ? 1 : (int)share;
        sum += f[s];
    }
    if (!all)
        f[0] = sum = ALL;
    for (; sum < ALL; sum++)
        change_one(count, symbols, f, 1);
    for (; sum > ALL; sum--)
        change_one(count, symbols, f, -1);
    sum = 0;
    for (int s = 0; s < width; s++) {
        start[s] = (uint16_t)sum;
        sum += s < symbols ? f[s] : 0;
    }
}

double lm_rans_bits(const uint32_t *count, int symbols, const uint16_t *start)
{
    double bits = 0;
    for (int s = 0; s < symbols; s++)
        if (count[s])
            bits += count[s] * (LM_RANS_BITS - log2(start[s + 1] - start[s]));
    return bits;
}

bool lm_rans_table_ok(const uint16_t *start, int symbols)
{
    for (int s = 0; s < symbols; s++)
        if (start[s + 1] < start[s])
            return false;
    for (int s = symbols; s < lm_rans_width(symbols); s++)
        if (start[s] != ALL)
            return false;
    return start[0] == 0;
}
