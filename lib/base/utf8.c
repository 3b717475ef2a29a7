/* SPDX-License-Identifier: Apache-2.0 */
/* utf8.c -- UTF-8 as RFC 3629 defines it. */
#include <string.h>

#include "base/text.h"

/* Length of the valid sequence at s, or 0. */
static size_t sequence(const unsigned char *s, size_t len)
{
    size_t n;
    unsigned char low = 0x80, high = 0xBF;

    if (s[0] < 0x80)
        return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4) /* continuation, overlong C0 C1, above U+10FFFF */
        return 0;
    n = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    if (len < n)
        return 0;
    if (s[0] == 0xE0)
        low = 0xA0;
    else if (s[0] == 0xED)
        high = 0x9F; /* surrogates */
    else if (s[0] == 0xF0)
        low = 0x90;
    else if (s[0] == 0xF4)
        high = 0x8F;
    if (s[1] < low || s[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    }
    return n;
}

size_t lm_utf8_valid(const char *s, size_t len)
{
    size_t at = 0, n;
    uint64_t eight;

    while (at < len) {
        if (len - at >= 8) { /* a run of ASCII */
            memcpy(&eight, s + at, 8);
            if (!(eight & UINT64_C(0x8080808080808080))) {
                at += 8;
                continue;
            }
        }
        n = sequence((const unsigned char *)s + at, len - at);
        if (!n)
            break;
        at += n;
    }
    return at;
}

uint32_t lm_utf8_get(const char *s, size_t len, size_t *n)
{
    const unsigned char *u = (const unsigned char *)s;
    uint32_t cp;

    *n = sequence(u, len);
    switch (*n) {
    case 0: /* not valid: a replacement character for one byte, so that loops make progress */
        *n = 1;
        return 0xFFFD;
    case 1:
        return u[0];
    case 2:
        cp = u[0] & 0x1F;
        break;
    case 3:
        cp = u[0] & 0x0F;
        break;
    default:
        cp = u[0] & 0x07;
        break;
    }
    for (size_t i = 1; i < *n; i++)
        cp = cp << 6 | (u[i] & 0x3F);
    return cp;
}

size_t lm_utf8_put(uint32_t cp, char out[4])
{
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000))
        cp = 0xFFFD;
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}
