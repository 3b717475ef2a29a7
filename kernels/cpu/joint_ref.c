/* SPDX-License-Identifier: Apache-2.0 */
/* joint_ref.c -- symbols and rests of BF16, element by element: the definition. */
#include <string.h>

#include "kernels/joint.h"

static bool split(const void *x, size_t n, uint8_t low, uint8_t *symbol, uint8_t *rest)
{
    const uint8_t *from = x;
    bool escaped = false;
    memset(rest, 0, lm_joint_rest(n));
    for (size_t i = 0; i < n; i++) {
        unsigned v = from[2 * i] | (unsigned)from[2 * i + 1] << 8, e = v >> 7 & 255;
        unsigned d = e - low, index = !e ? 0 : d < LM_JOINT_EXPONENTS ? d + 1 : 63;
        unsigned r = (v & 31) | (v >> 15) << 5, at = i % 4 * 6;
        symbol[i] = (uint8_t)(index << 2 | (v >> 5 & 3));
        escaped |= symbol[i] >= LM_JOINT_ESCAPE;
        uint8_t *to = rest + i / 4 * 3 + at / 8;
        to[0] |= (uint8_t)(r << at % 8);
        if (at % 8 > 2)
            to[1] |= (uint8_t)(r >> (8 - at % 8));
    }
    return escaped;
}

static bool join(const uint8_t *symbol, const uint8_t *rest, size_t n, uint8_t low, void *x)
{
    uint8_t *out = x;
    bool escaped = false;
    for (size_t i = 0; i < n; i++) {
        unsigned index = symbol[i] >> 2, e = index ? index - 1 + low : 0, at = i % 4 * 6;
        const uint8_t *from = rest + i / 4 * 3 + at / 8;
        unsigned r = (unsigned)from[0] >> at % 8;
        if (at % 8 > 2)
            r |= (unsigned)from[1] << (8 - at % 8);
        unsigned v = (r & 31) | (symbol[i] & 3u) << 5 | e << 7 | (r >> 5 & 1) << 15;
        out[2 * i] = (uint8_t)v;
        out[2 * i + 1] = (uint8_t)(v >> 8);
        escaped |= symbol[i] >= LM_JOINT_ESCAPE;
    }
    return escaped;
}

static size_t escape(const uint8_t *symbol, size_t at, size_t n)
{
    while (at < n && symbol[at] < LM_JOINT_ESCAPE)
        at++;
    return at;
}

const lm_joint_kernels lm_joint_ref = { split, join, escape };
