/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_read.c -- GGUF's blocks that are read, not written.
 *
 *   mxfp4  32 numbers: e8m0 scale; 16 bytes of e2m1 codes                 x = 2^(e - 127) v
 *   nvfp4  64 numbers in 4 groups of 16: 4 e4m3 scales without sign; 4 x 8 bytes of e2m1 codes,
 *          number j of a group in the low half of byte j, number j + 8 in the high half   x = s v
 *   q1_0   128 numbers: f16 d; 16 bytes, lowest bit first                 x = d or -d
 *   q2_0   64 numbers: f16 d; 16 bytes, lowest pair of bits first         x = d (q - 1) */
#include "numeric/ggml_blocks.h"

static float e2m1(int code)
{
    static const float size[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };

    return code & 8 ? -size[code & 7] : size[code & 7];
}

void lm_mxfp4_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[32];

    for (int64_t i = 0; i < n; i += 32, p += 17) {
        double scale = ldexp(1.0, p[0] - 127); /* no subnormal is lost in the product with a code */
        lm_unpack4(p + 1, q);
        for (int k = 0; k < 32; k++)
            y[i + k] = (float)(scale * (double)e2m1(q[k]));
    }
}

/* E4M3 without sign and NaN: 0x7f is 0. */
static float e4m3(uint8_t s)
{
    return s == 0x7f ? 0.0f : (s & 0x7f) == 0x7f ? 480.0f : lm_f8e4m3_to_f32(s & 0x7f);
}

void lm_nvfp4_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;

    for (int64_t i = 0; i < n; i += 64, p += 36)
        for (int k = 0; k < 64; k++) {
            int group = k / 16, j = k % 16;
            uint8_t byte = p[4 + group * 8 + j % 8];
            y[i + k] = e4m3(p[group]) * e2m1(byte >> j / 8 * 4 & 15);
        }
}

void lm_q1_0_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;

    for (int64_t i = 0; i < n; i += 128, p += 18) {
        float d = lm_get_f16(p);
        for (int k = 0; k < 128; k++)
            y[i + k] = p[2 + k / 8] >> k % 8 & 1 ? d : -d;
    }
}

void lm_q2_0_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;

    for (int64_t i = 0; i < n; i += 64, p += 18) {
        float d = lm_get_f16(p);
        for (int k = 0; k < 64; k++)
            y[i + k] = d * (float)((p[2 + k / 4] >> k % 4 * 2 & 3) - 1);
    }
}
