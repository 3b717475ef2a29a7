/* SPDX-License-Identifier: Apache-2.0 */
/* cachegen_rows.c -- the quantiser: loops that the compiler vectorises, with the same bits at every
 * width. */
#include <float.h>
#include <math.h>

#include "kv/cachegen_impl.h"

enum { INFINITE = 0x7f80 }; /* BF16's bits */

/* 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even, in the lowest bits. */
#define ROUND     12582912.0f
#define ROUND_INT 0x4b400000

static int32_t bits_of(float x)
{
    int32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* The largest |x| as bits: absolute values sort as integers, and NaN is above infinity. */
static int32_t peak(const float *x, int64_t n)
{
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t u = bits_of(x[i]) & 0x7fffffff;
        most = u > most ? u : most;
    }
    return most;
}

/* The scale of numbers up to `most`, rounded up; false if BF16 has none. */
static bool scale_of(int32_t most, uint16_t *scale)
{
    *scale = (uint16_t)(((uint32_t)most + 0xffff) >> 16);
    if (most < bits_of(0x1p-100f))
        *scale = 0;
    return *scale < INFINITE;
}

static void code_row(const float *x, int64_t n, int half, uint16_t scale, uint8_t *code)
{
    float factor = scale ? (float)half / lm_bf16_to_f32(scale) : 0;
    for (int64_t i = 0; i < n; i++)
        code[i] = (uint8_t)(bits_of(x[i] * factor + ROUND) - (ROUND_INT - half));
}

static void decode_row(const uint8_t *code, int64_t n, int half, uint16_t scale, float *y)
{
    float step = lm_bf16_to_f32(scale) / (float)half;
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)((int)code[i] - half) * step;
}

static void subtract(float *x, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] -= y[i];
}

static void add(float *x, const float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += y[i];
}

/* A difference may lead beyond the numbers of the type. */
static void clamp(float *x, int64_t n, float most)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = x[i] > most ? most : x[i];
        x[i] = x[i] < -most ? -most : x[i];
    }
}

static float largest(lm_dtype d)
{
    return d == LM_DTYPE_F16 ? 65504.0f : d == LM_DTYPE_BF16 ? lm_bf16_to_f32(0x7f7f) : FLT_MAX;
}

int64_t cachegen_code_rows(cachegen_work *w, const lm_cachegen_part *p,
                           const lm_cachegen_rows *rows, const void *data, int64_t first, int64_t n)
{
    int64_t channels = cachegen_channels(p);
    size_t size = lm_dtype_size(rows->dtype);
    for (int64_t t = 0; t < n; t++) {
        bool anchor = cachegen_is_anchor(t);
        int half = anchor ? CACHEGEN_MIDDLE : p->bins / 2 - 1;
        uint8_t *code = w->code + t * channels;
        for (int64_t h = 0; h < p->heads; h++) {
            size_t at = (size_t)((h * rows->tokens + first + t) * p->width) * size;
            lm_convert(rows->dtype, (const char *)data + at, LM_DTYPE_F32, w->x + h * p->width,
                       p->width);
        }
        if (!anchor)
            subtract(w->x, w->anchor, channels);
        if (!scale_of(peak(w->x, channels), &w->scale[t]))
            return first + t;
        code_row(w->x, channels, half, w->scale[t], code);
        if (anchor)
            decode_row(code, channels, half, w->scale[t], w->anchor);
        w->kind[t] = !anchor;
    }
    return -1;
}

void cachegen_decode_rows(cachegen_work *w, const lm_cachegen_part *p, const lm_cachegen_rows *rows,
                          void *data, int64_t first, int64_t n)
{
    int64_t channels = cachegen_channels(p);
    size_t size = lm_dtype_size(rows->dtype);
    for (int64_t t = 0; t < n; t++) {
        bool anchor = cachegen_is_anchor(t);
        float *y = anchor ? w->anchor : w->x;
        decode_row(w->code + t * channels, channels, anchor ? CACHEGEN_MIDDLE : p->bins / 2 - 1,
                   w->scale[t], y);
        if (!anchor)
            add(y, w->anchor, channels);
        else /* the anchor itself stays as it is for its differences */
            memcpy(w->x, y, (size_t)channels * sizeof *y);
        clamp(w->x, channels, largest(rows->dtype));
        for (int64_t h = 0; h < p->heads; h++) {
            size_t at = (size_t)((h * rows->tokens + first + t) * p->width) * size;
            lm_convert(LM_DTYPE_F32, w->x + h * p->width, rows->dtype, (char *)data + at, p->width);
        }
    }
}
