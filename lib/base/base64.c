/* SPDX-License-Identifier: Apache-2.0 */
/* base64.c -- three bytes as four characters. */
#include "base/base64.h"

#include <stdint.h>
#include <string.h>

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

lm_code lm_base64_encode(const void *data, size_t len, lm_buf *out, lm_err *e)
{
    const uint8_t *p = data;
    lm_code rc = lm_buf_room(out, len / 3 * 4 + 4, e);

    for (size_t i = 0; !rc && i < len; i += 3) {
        size_t n = len - i < 3 ? len - i : 3;
        uint32_t v =
            (uint32_t)p[i] << 16 | (n > 1 ? (uint32_t)p[i + 1] << 8 : 0) | (n > 2 ? p[i + 2] : 0);
        char c[4] = { digits[v >> 18], digits[v >> 12 & 63], n > 1 ? digits[v >> 6 & 63] : '=',
                      n > 2 ? digits[v & 63] : '=' };
        rc = lm_buf_add(out, c, 4, e);
    }
    return rc;
}

lm_code lm_base64_decode(const char *text, size_t len, const char *where, lm_buf *out, lm_err *e)
{
    lm_code rc = lm_buf_room(out, len / 4 * 3, e);

    for (size_t i = 0; !rc && i < len; i += 4) {
        size_t n = 3;
        uint32_t v = 0;
        uint8_t b[3];
        if (len - i >= 4 && i + 4 == len && text[i + 3] == '=')
            n = text[i + 2] == '=' ? 1 : 2;
        for (size_t k = 0; k < 4; k++) {
            const char *d = i + k < len && text[i + k] ? strchr(digits, text[i + k]) : NULL;
            if (k > n)
                d = digits;
            if (!d)
                return lm_fail(e, LM_EFORMAT, where, NULL, "byte %zu is not base 64", i + k);
            v = v << 6 | (uint32_t)(d - digits);
        }
        b[0] = (uint8_t)(v >> 16);
        b[1] = (uint8_t)(v >> 8);
        b[2] = (uint8_t)v;
        rc = lm_buf_add(out, b, n, e);
    }
    return rc;
}
