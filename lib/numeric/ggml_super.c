/* ggml_super.c -- GGUF's super-blocks of 256 numbers ("K-quants"): groups whose scales are
 * themselves quantised against one F16 scale.
 *
 *   q4_k  f16 d, dmin; 12 bytes of scales; 128 of codes                  x = d sc q - dmin mn
 *   q5_k  f16 d, dmin; 12 bytes of scales; 32 of fifth bits; 128         the same
 *   q6_k  128 bytes low halves; 64 of upper bit pairs; 16 i8 scales; f16 d   x = d sc (q - 32)
 *
 * The scale of a group is searched: a few step sizes near the one that spans the group are tried;
 * for each the codes are fixed by rounding, the best scale (and offset) for those codes follows
 * from weighted least squares, and the smallest weighted error wins. */
#include "numeric/ggml_blocks.h"

enum { SUPER = 256, GROUP = 32, GROUPS = 8, SIX = 16, SIXES = 16 };

#define TINY 1e-15f /* groups below this are zero */

static int nearest(float f)
{
    return (int)rintf(f);
}

/* ---- q4_k and q5_k: scale and offset for groups of 32 ---- */

typedef struct {
    float scale, offset; /* x = scale * q - offset, offset >= 0 */
    uint8_t q[GROUP];
} affine;

static float affine_error(const float *x, const float *w, const uint8_t *q, float scale, float min)
{
    float sum = 0.0f;
    for (int i = 0; i < GROUP; i++) {
        float d = scale * q[i] + min - x[i];
        sum += w[i] * d * d;
    }
    return sum;
}

/* Best scale and minimum for codes q in the sense of least squares; the minimum is never above
 * zero. */
static bool affine_fit(const float *x, const float *w, const uint8_t *q, float sum_w, float sum_x,
                       float *scale, float *min)
{
    float l = 0.0f, l2 = 0.0f, xl = 0.0f;
    for (int i = 0; i < GROUP; i++) {
        l += w[i] * q[i];
        l2 += w[i] * q[i] * q[i];
        xl += w[i] * q[i] * x[i];
    }
    float det = sum_w * l2 - l * l;
    if (!(det > 0.0f))
        return false;
    *scale = (sum_w * xl - sum_x * l) / det;
    *min = (l2 * sum_x - l * xl) / det;
    if (*min > 0.0f) {
        *min = 0.0f;
        *scale = xl / l2;
    }
    return true;
}

/* Codes 0..top.  Step sizes (top + from + 0.1 k) / span for k = 0..steps are tried after the plain
 * one. */
static void affine_search(const float x[GROUP], int top, float from, int steps, affine *out)
{
    float w[GROUP], lo = x[0], hi = x[0], sum_w = 0.0f, sum_x = 0.0f, square = 0.0f;

    for (int i = 0; i < GROUP; i++)
        square += x[i] * x[i];
    float rms = sqrtf(square / GROUP);
    for (int i = 0; i < GROUP; i++) {
        w[i] = rms + fabsf(x[i]);
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    lo = lo > 0.0f ? 0.0f : lo;
    memset(out->q, 0, sizeof out->q);
    out->scale = 0.0f;
    out->offset = -lo;
    if (hi == lo)
        return;

    float best = INFINITY;
    for (int k = -1; k <= steps; k++) {
        float inv = (k < 0 ? (float)top : from + 0.1f * (float)k + (float)top) / (hi - lo);
        float scale = 1.0f / inv, min = lo;
        uint8_t q[GROUP];
        for (int i = 0; i < GROUP; i++)
            q[i] = (uint8_t)lm_clamp_int(nearest(inv * (x[i] - lo)), 0, top);
        if (k >= 0 && !affine_fit(x, w, q, sum_w, sum_x, &scale, &min))
            continue;
        float error = affine_error(x, w, q, scale, min);
        if (error < best) {
            best = error;
            out->scale = scale;
            out->offset = -min;
            memcpy(out->q, q, sizeof q);
        }
    }
}

/* Six bits of scale and of offset for each of 8 groups in 12 bytes: groups 0-3 in the low six bits
 * of bytes 0-3 (scales) and 4-7 (offsets), groups 4-7 by halves: low four bits in bytes 8-11, upper
 * two in the top of bytes 0-7. */
static void pack6(const uint8_t sc[GROUPS], const uint8_t mn[GROUPS], uint8_t p[12])
{
    for (int j = 0; j < 4; j++) {
        p[j] = (uint8_t)(sc[j] | sc[j + 4] >> 4 << 6);
        p[j + 4] = (uint8_t)(mn[j] | mn[j + 4] >> 4 << 6);
        p[j + 8] = (uint8_t)((sc[j + 4] & 15) | (mn[j + 4] & 15) << 4);
    }
}

static void unpack6(const uint8_t p[12], uint8_t sc[GROUPS], uint8_t mn[GROUPS])
{
    for (int j = 0; j < 4; j++) {
        sc[j] = p[j] & 63;
        mn[j] = p[j + 4] & 63;
        sc[j + 4] = (uint8_t)((p[j + 8] & 15) | p[j] >> 6 << 4);
        mn[j + 4] = (uint8_t)(p[j + 8] >> 4 | p[j + 4] >> 6 << 4);
    }
}

/* One super-block to codes q[256] and the 16 bytes of d, dmin and scales. */
static void affine_block(const float *x, int top, float from, int steps, uint8_t head[16],
                         uint8_t q[SUPER])
{
    affine g[GROUPS];
    float v[SUPER], most_scale = 0.0f, most_offset = 0.0f;
    uint8_t sc[GROUPS], mn[GROUPS];

    lm_take_finite(x, SUPER, v);
    for (int j = 0; j < GROUPS; j++) {
        affine_search(v + j * GROUP, top, from, steps, &g[j]);
        memcpy(q + j * GROUP, g[j].q, GROUP);
        most_scale = g[j].scale > most_scale ? g[j].scale : most_scale;
        most_offset = g[j].offset > most_offset ? g[j].offset : most_offset;
    }
    float to_scale = most_scale > 0.0f ? 63.0f / most_scale : 0.0f;
    float to_offset = most_offset > 0.0f ? 63.0f / most_offset : 0.0f;
    for (int j = 0; j < GROUPS; j++) {
        sc[j] = (uint8_t)lm_clamp_int(nearest(to_scale * g[j].scale), 0, 63);
        mn[j] = (uint8_t)lm_clamp_int(nearest(to_offset * g[j].offset), 0, 63);
    }
    lm_put_f16(head, most_scale / 63.0f);
    lm_put_f16(head + 2, most_offset / 63.0f);
    pack6(sc, mn, head + 4);

    for (int j = 0; j < GROUPS; j++) { /* codes once more, for the scales as they are stored */
        float d = lm_get_f16(head) * sc[j], m = lm_get_f16(head + 2) * mn[j];
        for (int i = j * GROUP; d != 0.0f && i < (j + 1) * GROUP; i++)
            q[i] = (uint8_t)lm_clamp_int(nearest((v[i] + m) / d), 0, top);
    }
}

/* Low halves: each 64 numbers in 32 bytes, the first 32 below, the next 32 above. */
static void pack_halves(const uint8_t q[SUPER], uint8_t *p)
{
    for (int g = 0; g < SUPER; g += 64, p += 32)
        for (int l = 0; l < 32; l++)
            p[l] = (uint8_t)((q[g + l] & 15) | (q[g + l + 32] & 15) << 4);
}

static void unpack_halves(const uint8_t *p, uint8_t q[SUPER])
{
    for (int g = 0; g < SUPER; g += 64, p += 32)
        for (int l = 0; l < 32; l++) {
            q[g + l] = p[l] & 15;
            q[g + l + 32] = p[l] >> 4;
        }
}

static void affine_expand(const uint8_t head[16], const uint8_t q[SUPER], float *y)
{
    uint8_t sc[GROUPS], mn[GROUPS];
    unpack6(head + 4, sc, mn);
    for (int j = 0; j < GROUPS; j++) {
        float d = lm_get_f16(head) * sc[j], m = lm_get_f16(head + 2) * mn[j];
        for (int i = j * GROUP; i < (j + 1) * GROUP; i++)
            y[i] = d * q[i] - m;
    }
}

void lm_q4_k_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, q[SUPER];
    for (int64_t i = 0; i < n; i += SUPER, p += 144) {
        affine_block(x + i, 15, -1.0f, 20, p, q);
        pack_halves(q, p + 16);
    }
}

void lm_q4_k_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[SUPER];
    for (int64_t i = 0; i < n; i += SUPER, p += 144) {
        unpack_halves(p + 16, q);
        affine_expand(p, q, y + i);
    }
}

/* Bit j of fifth-bit byte l belongs to number 32 j + l. */
void lm_q5_k_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, q[SUPER];
    for (int64_t i = 0; i < n; i += SUPER, p += 176) {
        affine_block(x + i, 31, -0.5f, 15, p, q);
        memset(p + 16, 0, 32);
        for (int k = 0; k < SUPER; k++)
            p[16 + k % 32] |= (uint8_t)((q[k] >> 4 & 1) << k / 32);
        pack_halves(q, p + 48);
    }
}

void lm_q5_k_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[SUPER];
    for (int64_t i = 0; i < n; i += SUPER, p += 176) {
        unpack_halves(p + 48, q);
        for (int k = 0; k < SUPER; k++)
            q[k] |= (uint8_t)((p[16 + k % 32] >> k / 32 & 1) << 4);
        affine_expand(p, q, y + i);
    }
}

/* ---- q6_k: scale alone for groups of 16 ---- */

/* Codes -32..31; weights x^2, so that large numbers count.  Returns the scale. */
static float six_search(const float x[SIX], int8_t out[SIX])
{
    float most = 0.0f, scale = 0.0f, best = 0.0f;

    for (int i = 0; i < SIX; i++)
        most = fabsf(x[i]) > fabsf(most) ? x[i] : most;
    memset(out, 0, SIX);
    if (fabsf(most) < TINY)
        return 0.0f;
    for (int k = 0; k <= 18; k++) { /* the plain step first, then the others from small to large */
        int is = k == 0 ? 0 : k <= 9 ? k - 10 : k - 9;
        float inv = -(32.0f + 0.1f * (float)is) / most, xl = 0.0f, l2 = 0.0f;
        int8_t q[SIX];
        for (int i = 0; i < SIX; i++) {
            int l = lm_clamp_int(nearest(inv * x[i]), -32, 31);
            float w = x[i] * x[i];
            xl += w * x[i] * (float)l;
            l2 += w * (float)l * (float)l;
            q[i] = (int8_t)l;
        }
        if (k == 0 || (l2 > 0.0f && xl * xl > best * l2)) {
            scale = l2 > 0.0f ? xl / l2 : 0.0f;
            best = scale * xl;
            memcpy(out, q, sizeof q);
        }
    }
    return scale;
}

static void six_pack(const uint8_t q[SUPER], uint8_t *low, uint8_t *high)
{
    for (int g = 0; g < SUPER; g += 128, low += 64, high += 32)
        for (int l = 0; l < 32; l++) {
            const uint8_t *a = q + g + l;
            low[l] = (uint8_t)((a[0] & 15) | (a[64] & 15) << 4);
            low[l + 32] = (uint8_t)((a[32] & 15) | (a[96] & 15) << 4);
            high[l] = (uint8_t)(a[0] >> 4 | a[32] >> 4 << 2 | a[64] >> 4 << 4 | a[96] >> 4 << 6);
        }
}

static void six_unpack(const uint8_t *low, const uint8_t *high, uint8_t q[SUPER])
{
    for (int g = 0; g < SUPER; g += 128, low += 64, high += 32)
        for (int l = 0; l < 32; l++) {
            uint8_t *a = q + g + l;
            a[0] = (uint8_t)((low[l] & 15) | (high[l] & 3) << 4);
            a[32] = (uint8_t)((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4);
            a[64] = (uint8_t)(low[l] >> 4 | (high[l] >> 4 & 3) << 4);
            a[96] = (uint8_t)(low[l + 32] >> 4 | high[l] >> 6 << 4);
        }
}

void lm_q6_k_encode(const float *x, int64_t n, void *dst)
{
    uint8_t *p = dst, code[SUPER];
    float v[SUPER], scale[SIXES];
    int8_t q[SUPER], sc[SIXES];

    for (int64_t i = 0; i < n; i += SUPER, p += 210) {
        float most = 0.0f;
        lm_take_finite(x + i, SUPER, v);
        for (int j = 0; j < SIXES; j++) {
            scale[j] = six_search(v + j * SIX, q + j * SIX);
            most = fabsf(scale[j]) > fabsf(most) ? scale[j] : most;
        }
        if (fabsf(most) < TINY) {
            memset(p, 0, 210);
            continue;
        }
        float inv = -128.0f / most;
        lm_put_f16(p + 208, 1.0f / inv);
        for (int j = 0; j < SIXES; j++) {
            sc[j] = (int8_t)lm_clamp_int(nearest(inv * scale[j]), -128, 127);
            float d = lm_get_f16(p + 208) * sc[j];
            for (int k = j * SIX; d != 0.0f && k < (j + 1) * SIX; k++)
                q[k] = (int8_t)lm_clamp_int(nearest(v[k] / d), -32, 31);
        }
        for (int k = 0; k < SUPER; k++)
            code[k] = (uint8_t)(q[k] + 32);
        six_pack(code, p, p + 128);
        memcpy(p + 192, sc, sizeof sc);
    }
}

void lm_q6_k_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[SUPER];
    int8_t sc[SIXES];
    for (int64_t i = 0; i < n; i += SUPER, p += 210) {
        six_unpack(p, p + 128, q);
        memcpy(sc, p + 192, sizeof sc);
        float d = lm_get_f16(p + 208);
        for (int k = 0; k < SUPER; k++)
            y[i + k] = d * sc[k / SIX] * (float)(q[k] - 32);
    }
}
