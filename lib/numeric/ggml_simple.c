/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_simple.c -- GGUF's blocks of 32 numbers with one scale, and an offset in the "_1" forms.
 *
 *   q4_0  f16 d; 16 bytes of codes       x = d (q - 8)
 *   q4_1  f16 d, m; 16 bytes             x = d q + m
 *   q5_0  f16 d; u32 fifth bits; 16      x = d (q - 16)
 *   q5_1  f16 d, m; u32 fifth bits; 16   x = d q + m
 *   q8_0  f16 d; 32 signed bytes         x = d q
 *
 * Byte j of the codes holds number j in its low half and number j + 16 in its high half; bit j of
 * the fifth bits belongs to number j.  The symmetric forms put the number of largest magnitude on
 * the code of the lowest value, which has one step more than the highest. */
#include "numeric/ggml_blocks.h"

enum { N = 32, HALF = 16 };

static float inverse(float d)
{
    return d != 0.0f ? 1.0f / d : 0.0f;
}

/* The first number of largest magnitude, sign included. */
static float extreme(const float v[N])
{
    float best = 0.0f;
    for (int i = 0; i < N; i++)
        if (fabsf(v[i]) > fabsf(best))
            best = v[i];
    return best;
}

static void span(const float v[N], float *lo, float *hi)
{
    *lo = *hi = v[0];
    for (int i = 1; i < N; i++) {
        *lo = v[i] < *lo ? v[i] : *lo;
        *hi = v[i] > *hi ? v[i] : *hi;
    }
}

/* Codes 0..top: (x - from) / d, rounded by adding `half` and truncating. */
static void codes(const float v[N], float from, float d, float half, int top, uint8_t q[N])
{
    float id = inverse(d);
    for (int i = 0; i < N; i++)
        q[i] = (uint8_t)lm_clamp_int((v[i] - from) * id + half, 0, top);
}

void lm_pack4(const uint8_t q[32], uint8_t *p)
{
    for (int j = 0; j < HALF; j++)
        p[j] = (uint8_t)((q[j] & 15) | (q[j + HALF] & 15) << 4);
}

void lm_unpack4(const uint8_t *p, uint8_t q[32])
{
    for (int j = 0; j < HALF; j++) {
        q[j] = p[j] & 15;
        q[j + HALF] = p[j] >> 4;
    }
}

void lm_pack5(const uint8_t q[32], uint8_t *high, uint8_t *p)
{
    uint32_t h = 0;
    for (int j = 0; j < N; j++)
        h |= (uint32_t)(q[j] >> 4 & 1) << j;
    memcpy(high, &h, 4);
    lm_pack4(q, p);
}

static void unpack5(const uint8_t *high, const uint8_t *p, uint8_t q[N])
{
    uint32_t h;
    memcpy(&h, high, 4);
    lm_unpack4(p, q);
    for (int j = 0; j < N; j++)
        q[j] |= (uint8_t)((h >> j & 1) << 4);
}

static void expand(const uint8_t q[N], float d, float m, int zero, float *y)
{
    for (int i = 0; i < N; i++)
        y[i] = (float)(q[i] - zero) * d + m;
}

void lm_q4_0_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, q[N];
    float v[N];
    for (int64_t i = 0; i < n; i += N, p += 18) {
        lm_take_finite(x + i, N, v);
        float d = extreme(v) / -8.0f;
        lm_put_f16(p, d);
        codes(v, 0.0f, d, 8.5f, 15, q);
        lm_pack4(q, p + 2);
    }
}

void lm_q4_0_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[N];
    for (int64_t i = 0; i < n; i += N, p += 18) {
        lm_unpack4(p + 2, q);
        expand(q, lm_get_f16(p), 0.0f, 8, y + i);
    }
}

void lm_q4_1_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, q[N];
    float v[N], lo, hi;
    for (int64_t i = 0; i < n; i += N, p += 20) {
        lm_take_finite(x + i, N, v);
        span(v, &lo, &hi);
        float d = (hi - lo) / 15.0f;
        lm_put_f16(p, d);
        lm_put_f16(p + 2, lo);
        codes(v, lo, d, 0.5f, 15, q);
        lm_pack4(q, p + 4);
    }
}

void lm_q4_1_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[N];
    for (int64_t i = 0; i < n; i += N, p += 20) {
        lm_unpack4(p + 4, q);
        expand(q, lm_get_f16(p), lm_get_f16(p + 2), 0, y + i);
    }
}

void lm_q5_0_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, q[N];
    float v[N];
    for (int64_t i = 0; i < n; i += N, p += 22) {
        lm_take_finite(x + i, N, v);
        float d = extreme(v) / -16.0f;
        lm_put_f16(p, d);
        codes(v, 0.0f, d, 16.5f, 31, q);
        lm_pack5(q, p + 2, p + 6);
    }
}

void lm_q5_0_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[N];
    for (int64_t i = 0; i < n; i += N, p += 22) {
        unpack5(p + 2, p + 6, q);
        expand(q, lm_get_f16(p), 0.0f, 16, y + i);
    }
}

void lm_q5_1_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, q[N];
    float v[N], lo, hi;
    for (int64_t i = 0; i < n; i += N, p += 24) {
        lm_take_finite(x + i, N, v);
        span(v, &lo, &hi);
        float d = (hi - lo) / 31.0f;
        lm_put_f16(p, d);
        lm_put_f16(p + 2, lo);
        codes(v, lo, d, 0.5f, 31, q);
        lm_pack5(q, p + 4, p + 8);
    }
}

void lm_q5_1_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[N];
    for (int64_t i = 0; i < n; i += N, p += 24) {
        unpack5(p + 4, p + 8, q);
        expand(q, lm_get_f16(p), lm_get_f16(p + 2), 0, y + i);
    }
}

void lm_q8_0_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst;
    float v[N];
    for (int64_t i = 0; i < n; i += N, p += 34) {
        lm_take_finite(x + i, N, v);
        float d = fabsf(extreme(v)) / 127.0f, id = inverse(d);
        lm_put_f16(p, d);
        for (int j = 0; j < N; j++) { /* halves away from zero, unlike the other forms */
            int8_t q = (int8_t)lm_clamp_int(roundf(v[j] * id), -127, 127);
            memcpy(p + 2 + j, &q, 1);
        }
    }
}

void lm_q8_0_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    for (int64_t i = 0; i < n; i += N, p += 34) {
        float d = lm_get_f16(p);
        for (int j = 0; j < N; j++) {
            int8_t q;
            memcpy(&q, p + 2 + j, 1);
            y[i + j] = (float)q * d;
        }
    }
}
