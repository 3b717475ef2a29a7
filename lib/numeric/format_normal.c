/* SPDX-License-Identifier: Apache-2.0 */
/* format_normal.c -- NF4, with scales in F32 or in 8 bits; a row at a time, in groups of 256 blocks. */
#include "numeric/format_normal.h"

#include <math.h>
#include <string.h>

#include "numeric/format_dynamic.h"

const float lm_normal_values[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

enum { ZERO = 7 }; /* its code */

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t blocks_of(int64_t cols)
{
    return (cols + LM_NORMAL_BLOCK - 1) / LM_NORMAL_BLOCK;
}

/* ---- codes ---- */

static float middle(int k)
{
    return (lm_normal_values[k] + lm_normal_values[k + 1]) / 2;
}

/* The nearest value to v in [-1, 1], by halves. */
static int nearest(float v)
{
    int k = v > middle(ZERO) ? ZERO + 1 : 0;
    for (int step = 4; step > 0; step /= 2)
        k += v > middle(k + step - 1) ? step : 0;
    return k;
}

/* One of the two values around v, drawn so that the mean is v. */
static int drawn(float v, uint32_t r)
{
    int k = nearest(v);
    k -= v < lm_normal_values[k] && k > 0;
    if (k == 15 || v <= lm_normal_values[k])
        return k;
    double gap = (double)lm_normal_values[k + 1] - lm_normal_values[k];
    return k + (r * 0x1p-32 < ((double)v - lm_normal_values[k]) / gap);
}

static float scale_of(const float *x, int64_t n)
{
    float most = 0;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        finite &= fabsf(x[i]) <= 0x1.fffffep127f;
    }
    return finite ? most : NAN;
}

/* Codes of a block; index: of its first number in the stream of random ones. */
static void encode_block(const float *x, int64_t n, float scale, uint8_t *code,
                         const lm_encode_mode *mode, uint64_t index)
{
    for (int64_t i = 0; i < n; i++) {
        float v = scale > 0 ? x[i] / scale : 0;
        int k = mode && mode->rounding == LM_ROUND_STOCHASTIC
                    ? drawn(v, lm_rng_u32(mode->rng, index + (uint64_t)i))
                    : nearest(v);
        code[i / 2] = (uint8_t)(i % 2 ? code[i / 2] | k << 4 : k);
    }
}

/* ---- scales ---- */

/* Up to 256 scales as 8 bits, and as these are decoded; mean is not finite if one of them is not. */
static void code_scales(float *scale, int64_t n, uint8_t *code, uint8_t *second, uint8_t *mean)
{
    float apart[LM_NORMAL_SCALES];
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += scale[i];
    float m = (float)(sum / (double)n);
    for (int64_t i = 0; i < n; i++)
        apart[i] = scale[i] - m;
    lm_dynamic_encode(NULL, apart, 1, n, n, (void *[]){ code, second }, NULL);
    memcpy(mean, &m, sizeof m);
    lm_normal_scales(code, second, mean, n, scale);
}

void lm_normal_scales(const uint8_t *code, const uint8_t *second, const uint8_t *mean,
                      int64_t blocks, float *scale)
{
    lm_dynamic_decode(NULL, (const void *const[]){ code, second }, 1, blocks, scale, blocks);
    for (int64_t i = 0; i < blocks; i++) {
        float m;
        memcpy(&m, mean + i / LM_NORMAL_SCALES * (int64_t)sizeof m, sizeof m);
        scale[i] += m;
        scale[i] = scale[i] < 0 ? 0 : scale[i];
    }
}

/* ---- rows ---- */

/* The planes of one row from column `at`, the beginning of a group, on. */
typedef struct {
    uint8_t *code, *scale, *second, *mean;
} spot;

static spot spot_of(const lm_format *f, void *const *plane, int64_t row, int64_t cols, int64_t at)
{
    int64_t groups = (cols + LM_NORMAL_GROUP - 1) / LM_NORMAL_GROUP, g = at / LM_NORMAL_GROUP;
    int64_t size = f->plane[1].bits / 8, four = (int64_t)sizeof(float);
    spot s = { .code = (uint8_t *)plane[0] + row * ((cols + 1) / 2) + at / 2,
               .scale =
                   (uint8_t *)plane[1] + (row * blocks_of(cols) + at / LM_NORMAL_BLOCK) * size };
    if (f->n_planes > 2) {
        s.second = (uint8_t *)plane[2] + (row * groups + g) * four;
        s.mean = (uint8_t *)plane[3] + (row * groups + g) * four;
    }
    return s;
}

static void encode_group(const float *x, int64_t n, const spot *s, const lm_encode_mode *mode,
                         uint64_t index)
{
    float scale[LM_NORMAL_SCALES];
    int64_t blocks = blocks_of(n);
    for (int64_t b = 0; b < blocks; b++)
        scale[b] =
            scale_of(x + b * LM_NORMAL_BLOCK, least(LM_NORMAL_BLOCK, n - b * LM_NORMAL_BLOCK));
    if (s->second)
        code_scales(scale, blocks, s->scale, s->second, s->mean);
    else
        memcpy(s->scale, scale, (size_t)blocks * sizeof *scale);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t i = b * LM_NORMAL_BLOCK;
        encode_block(x + i, least(LM_NORMAL_BLOCK, n - i), scale[b], s->code + i / 2, mode,
                     index + (uint64_t)i);
    }
}

void lm_normal_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                      void *const *plane, const lm_encode_mode *mode)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < cols; at += LM_NORMAL_GROUP) {
            spot s = spot_of(f, plane, r, cols, at);
            encode_group(x + r * pitch + at, least(LM_NORMAL_GROUP, cols - at), &s, mode,
                         (mode ? mode->index : 0) + (uint64_t)(r * cols + at));
        }
}

static void decode_group(const spot *s, int64_t n, float *y)
{
    float scale[LM_NORMAL_SCALES];
    int64_t blocks = blocks_of(n);
    if (s->second)
        lm_normal_scales(s->scale, s->second, s->mean, blocks, scale);
    else
        memcpy(scale, s->scale, (size_t)blocks * sizeof *scale);
    for (int64_t i = 0; i < n; i++)
        y[i] = lm_normal_values[s->code[i / 2] >> i % 2 * 4 & 15] * scale[i / LM_NORMAL_BLOCK];
}

void lm_normal_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                      float *y, int64_t pitch)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < cols; at += LM_NORMAL_GROUP) {
            spot s = spot_of(f, (void *const *)plane, r, cols, at);
            decode_group(&s, least(LM_NORMAL_GROUP, cols - at), y + r * pitch + at);
        }
}
