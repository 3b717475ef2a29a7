/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_super.c -- GGUF's super-blocks of 256 numbers ("K-quants"): groups whose scales are
 * themselves quantised against one F16 scale.
 *
 *   q2_k  16 bytes of scales; 64 of codes; f16 d, dmin                   x = d sc q - dmin mn
 *   q4_k  f16 d, dmin; 12 bytes of scales; 128 of codes                  the same
 *   q5_k  f16 d, dmin; 12 bytes of scales; 32 of fifth bits; 128         the same
 *   q3_k  32 bytes of third bits; 64 of codes; 12 of scales; f16 d       x = d (sc - 32) (q - 4)
 *   q6_k  128 bytes low halves; 64 of upper bit pairs; 16 i8 scales; f16 d   x = d sc (q - 32)
 *
 * With an importance matrix the searches (ggml_search.h) weight errors by it, and the scales are
 * searched in the same way instead of being rounded. */
#include "numeric/ggml_blocks.h"
#include "numeric/ggml_search.h"

enum { SUPER = 256, MOST_GROUPS = 16, SIX = 16, SIXES = 16 };

/* ---- q2_k, q4_k and q5_k: scale and offset for groups of 16 or 32 ---- */

/* A block before packing: a scale and an offset per group, a code per number. */
typedef struct {
    float d, dmin; /* rounded to F16 */
    uint8_t sc[MOST_GROUPS], mn[MOST_GROUPS];
    uint8_t q[SUPER];
} affine_block;

typedef struct {
    lm_affine_plan plain, weighted;
    int scale_top; /* scales and offsets are 0..scale_top */
    size_t bytes;
    bool rms; /* plain weights: |x| and the group's root mean square, or |x| alone */
    float sigma;
    void (*put)(const affine_block *b, uint8_t *p);
} affine_kind;

/* Weights without importance matrix. */
static void plain_weights(const lane *x, int n, bool rms, lane *w)
{
    lane sum = { 0 };

    for (int i = 0; rms && i < n; i++)
        sum += x[i] * x[i];
    for (int l = 0; l < LANES; l++)
        sum[l] = sqrtf(sum[l] / (float)n);
    for (int i = 0; i < n; i++)
        w[i] = sum + MAGNITUDE(x[i]);
}

/* Weights of one super-block's numbers v: importance and their size beside sigma times the mean square. */
static void importance_weights(const float *v, const float *importance, float sigma, float *out)
{
    float sum = 0.0f;

    for (int i = 0; i < SUPER; i++)
        sum += v[i] * v[i];
    float mean = sigma * sum / SUPER;
    for (int i = 0; i < SUPER; i++)
        out[i] = importance[i] * sqrtf(mean + v[i] * v[i]);
}

static float as_f16(float f)
{
    uint8_t h[2];

    lm_put_f16(h, f);
    return lm_get_f16(h);
}

/* Scales and offsets of groups rounded against the largest. */
static void round_scales(const affine_kind *k, const float *scale, const float *offset, int groups,
                         affine_block *b)
{
    float top = (float)k->scale_top, most_scale = 0.0f, most_offset = 0.0f;

    for (int j = 0; j < groups; j++) {
        most_scale = scale[j] > most_scale ? scale[j] : most_scale;
        most_offset = offset[j] > most_offset ? offset[j] : most_offset;
    }
    float to_scale = most_scale > 0.0f ? top / most_scale : 0.0f;
    float to_offset = most_offset > 0.0f ? top / most_offset : 0.0f;
    for (int j = 0; j < groups; j++) {
        b->sc[j] = (uint8_t)lm_nearest_code(to_scale * scale[j], 0, k->scale_top);
        b->mn[j] = (uint8_t)lm_nearest_code(to_offset * offset[j], 0, k->scale_top);
    }
    b->d = as_f16(most_scale / top);
    b->dmin = as_f16(most_offset / top);
}

/* The same by search; the weight of a group is the sum of w over its numbers. */
static void search_scales(const affine_kind *k, const float *scale, const float *offset,
                          const float *w, int groups, affine_block *b)
{
    float sum[MOST_GROUPS] = { 0 };
    int n = SUPER / groups;

    for (int i = 0; i < SUPER; i++)
        sum[i / n] += w[i];
    b->d = as_f16(lm_positive_search(scale, sum, groups, k->scale_top, b->sc));
    b->dmin = as_f16(lm_positive_search(offset, sum, groups, k->scale_top, b->mn));
}

/* One super-block v, whose groups are lanes `first` and on; w NULL: no importance. */
static void affine_finish(const affine_kind *k, const float *v, const float *w, const lm_affine *g,
                          int first, affine_block *b)
{
    int n = k->plain.group, groups = SUPER / n;
    float scale[MOST_GROUPS], offset[MOST_GROUPS];

    for (int j = 0; j < groups; j++) {
        scale[j] = g->scale[first + j];
        offset[j] = g->offset[first + j];
    }
    if (w)
        search_scales(k, scale, offset, w, groups, b);
    else
        round_scales(k, scale, offset, groups, b);
    for (int j = 0; j < groups; j++) { /* codes again, for the scales as stored */
        float d = b->d * b->sc[j], m = b->dmin * b->mn[j];
        for (int i = 0; i < n; i++) {
            int again = (int)g->q[i][first + j];
            if (d != 0.0f)
                again = lm_nearest_code((v[j * n + i] + m) / d, 0, k->plain.top);
            b->q[j * n + i] = (uint8_t)again;
        }
    }
}

/* As many super-blocks at a time as fill the lanes: two of groups of 32, one of groups of 16. */
static void affine_encode(const affine_kind *k, const float *x, const float *importance, int64_t n,
                          uint8_t *p)
{
    int group = k->plain.group, at_once = LANES * group / SUPER;
    float v[2 * SUPER], w[2 * SUPER];
    lane by_lane[MOST_GROUP], weight[MOST_GROUP];
    lm_affine g;
    affine_block b;

    for (int64_t i = 0; i < n; i += at_once * SUPER) {
        int blocks = n - i > SUPER ? at_once : 1;
        lm_take_finite(x + i, blocks * SUPER, v);
        lm_to_lanes(v, blocks * SUPER / group, group, by_lane);
        for (int j = 0; importance && j < blocks; j++)
            importance_weights(v + j * SUPER, importance + i + j * SUPER, k->sigma, w + j * SUPER);
        if (importance)
            lm_to_lanes(w, blocks * SUPER / group, group, weight);
        else
            plain_weights(by_lane, group, k->rms, weight);
        lm_affine_search(by_lane, weight, importance ? &k->weighted : &k->plain, &g);
        for (int j = 0; j < blocks; j++, p += k->bytes) {
            affine_finish(k, v + j * SUPER, importance ? w + j * SUPER : NULL, &g,
                          j * SUPER / group, &b);
            k->put(&b, p);
        }
    }
}

/* Six bits of scale and of offset for each of 8 groups in 12 bytes: groups 0-3 in the low six bits
 * of bytes 0-3 (scales) and 4-7 (offsets), groups 4-7 by halves: low four bits in bytes 8-11, upper
 * two in the top of bytes 0-7. */
static void pack6(const uint8_t sc[8], const uint8_t mn[8], uint8_t p[12])
{
    for (int j = 0; j < 4; j++) {
        p[j] = (uint8_t)(sc[j] | sc[j + 4] >> 4 << 6);
        p[j + 4] = (uint8_t)(mn[j] | mn[j + 4] >> 4 << 6);
        p[j + 8] = (uint8_t)((sc[j + 4] & 15) | (mn[j + 4] & 15) << 4);
    }
}

static void unpack6(const uint8_t p[12], uint8_t sc[8], uint8_t mn[8])
{
    for (int j = 0; j < 4; j++) {
        sc[j] = p[j] & 63;
        mn[j] = p[j + 4] & 63;
        sc[j + 4] = (uint8_t)((p[j + 8] & 15) | p[j] >> 6 << 4);
        mn[j + 4] = (uint8_t)(p[j + 8] >> 4 | p[j + 4] >> 6 << 4);
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
    uint8_t sc[8], mn[8];
    unpack6(head + 4, sc, mn);
    for (int j = 0; j < 8; j++) {
        float d = lm_get_f16(head) * sc[j], m = lm_get_f16(head + 2) * mn[j];
        for (int i = j * 32; i < (j + 1) * 32; i++)
            y[i] = d * q[i] - m;
    }
}

static void put_head(const affine_block *b, uint8_t head[16])
{
    lm_put_f16(head, b->d);
    lm_put_f16(head + 2, b->dmin);
    pack6(b->sc, b->mn, head + 4);
}

static void put_q4_k(const affine_block *b, uint8_t *p)
{
    put_head(b, p);
    pack_halves(b->q, p + 16);
}

/* The steps that ggml tries; q4_k and q5_k differ in the codes only. */
static const affine_kind q4_k = {
    .plain = { 32, 15, -1.0f, 0.1f, 20, false },
    .weighted = { 32, 15, -0.9f, 0.05f, 36, false },
    .scale_top = 63,
    .bytes = 144,
    .rms = true,
    .sigma = 2.0f,
    .put = put_q4_k,
};

void lm_q4_k_encode(const float *x, int64_t n, void *dst)
{
    affine_encode(&q4_k, x, NULL, n, dst);
}

void lm_q4_k_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    affine_encode(&q4_k, x, w, n, dst);
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
static void pack_fifths(const uint8_t q[SUPER], uint8_t *p)
{
    memset(p, 0, 32);
    for (int k = 0; k < SUPER; k++)
        p[k % 32] |= (uint8_t)((q[k] >> 4 & 1) << k / 32);
    pack_halves(q, p + 32);
}

static void put_q5_k(const affine_block *b, uint8_t *p)
{
    put_head(b, p);
    pack_fifths(b->q, p + 16);
}

static const affine_kind q5_k = {
    .plain = { 32, 31, -0.5f, 0.1f, 15, false },
    .weighted = { 32, 31, -0.9f, 0.05f, 36, false },
    .scale_top = 63,
    .bytes = 176,
    .rms = true,
    .sigma = 2.0f,
    .put = put_q5_k,
};

void lm_q5_k_encode(const float *x, int64_t n, void *dst)
{
    affine_encode(&q5_k, x, NULL, n, dst);
}

void lm_q5_k_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    affine_encode(&q5_k, x, w, n, dst);
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

/* Pairs of bits: each 128 numbers in 32 bytes, 32 numbers in each pair of bits, the first lowest. */
static void pack_pairs(const uint8_t q[SUPER], uint8_t *p)
{
    for (int g = 0; g < SUPER; g += 128, p += 32)
        for (int l = 0; l < 32; l++) {
            const uint8_t *a = q + g + l;
            p[l] = (uint8_t)((a[0] & 3) | (a[32] & 3) << 2 | (a[64] & 3) << 4 | (a[96] & 3) << 6);
        }
}

static void unpack_pairs(const uint8_t *p, uint8_t q[SUPER])
{
    for (int i = 0; i < SUPER; i++)
        q[i] = p[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

static void put_q2_k(const affine_block *b, uint8_t *p)
{
    for (int j = 0; j < 16; j++)
        p[j] = (uint8_t)(b->sc[j] | b->mn[j] << 4);
    pack_pairs(b->q, p + 16);
    lm_put_f16(p + 80, b->d);
    lm_put_f16(p + 82, b->dmin);
}

static const affine_kind q2_k = {
    .plain = { 16, 3, -0.5f, 0.1f, 15, true },
    .weighted = { 16, 3, -0.9f, 0.05f, 36, false },
    .scale_top = 15,
    .bytes = 84,
    .rms = false,
    .sigma = 1.0f,
    .put = put_q2_k,
};

void lm_q2_k_encode(const float *x, int64_t n, void *dst)
{
    affine_encode(&q2_k, x, NULL, n, dst);
}

void lm_q2_k_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    affine_encode(&q2_k, x, w, n, dst);
}

void lm_q2_k_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[SUPER];

    for (int64_t i = 0; i < n; i += SUPER, p += 84) {
        float d = lm_get_f16(p + 80), dmin = lm_get_f16(p + 82);
        unpack_pairs(p + 16, q);
        for (int k = 0; k < SUPER; k++)
            y[i + k] = d * (float)(p[k / 16] & 15) * (float)q[k] - dmin * (float)(p[k / 16] >> 4);
    }
}

/* ---- q3_k and q6_k: scale alone for groups of 16 ---- */

/* Weights of the groups of one super-block: importance, or squares, so that large numbers count
 * more. */
static void square_weights(const lane x[SIX], lane w[SIX])
{
    for (int i = 0; i < SIX; i++)
        w[i] = x[i] * x[i];
}

/* Six bits for each of 16 groups in 12 bytes: low four of group j in the low half of byte j (j < 8) or the
 * high half of byte j - 8, upper two in bits 2 (j / 4) of byte 8 + j % 4. */
static void pack_three(const uint8_t sc[16], const uint8_t q[SUPER], uint8_t *p)
{
    memset(p, 0, 108);
    for (int k = 0; k < SUPER; k++)
        p[k % 32] |= (uint8_t)((q[k] >> 2 & 1) << k / 32);
    pack_pairs(q, p + 32);
    for (int j = 0; j < 16; j++) {
        p[96 + j % 8] |= (uint8_t)((sc[j] & 15) << j / 8 * 4);
        p[104 + j % 4] |= (uint8_t)(sc[j] >> 4 << j / 4 * 2);
    }
}

static int three_scale(const uint8_t s[12], int j)
{
    return ((s[j % 8] >> j / 8 * 4 & 15) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
}

/* The scales of the groups as codes of 6 bits; returns their common scale. */
static float three_scales(const lane *scale, const float *w, uint8_t sc[16])
{
    lane one[SIX], weight[SIX], q[SIX], common = { 0 };
    float v[16], sum[16] = { 0 }, most = 0.0f;

    for (int j = 0; j < 16; j++) {
        v[j] = (*scale)[j];
        most = fabsf(v[j]) > fabsf(most) ? v[j] : most;
    }
    if (!w) {
        float inv = most != 0.0f ? -32.0f / most : 0.0f;
        for (int j = 0; j < 16; j++)
            sc[j] = (uint8_t)(most != 0.0f ? lm_nearest_code(inv * v[j], -32, 31) + 32 : 0);
        return most != 0.0f ? 1.0f / inv : 0.0f;
    }
    for (int i = 0; i < SUPER; i++)
        sum[i / 16] += w[i];
    lm_to_lanes(v, 1, SIX, one);
    lm_to_lanes(sum, 1, SIX, weight);
    lm_signed_search(one, weight, SIX, 32, &common, q);
    for (int j = 0; j < 16; j++)
        sc[j] = (uint8_t)(q[j][0] + 32.0f);
    return common[0];
}

static void three_encode(const float *x, const float *importance, int64_t n, uint8_t *p)
{
    uint8_t code[SUPER], sc[16];
    float v[SUPER], w[SUPER];
    lane by_lane[SIX], weight[SIX], q[SIX], scale = { 0 };

    for (int64_t i = 0; i < n; i += SUPER, p += 110) {
        lm_take_finite(x + i, SUPER, v);
        lm_to_lanes(v, SIXES, SIX, by_lane);
        if (importance) {
            importance_weights(v, importance + i, 2.0f, w);
            lm_to_lanes(w, SIXES, SIX, weight);
            lm_signed_search(by_lane, weight, SIX, 4, &scale, q);
        } else {
            lm_signed_descent(by_lane, 4, &scale, q);
        }
        lm_put_f16(p + 108, three_scales(&scale, importance ? w : NULL, sc));
        for (int j = 0; j < SIXES; j++) {
            float d = lm_get_f16(p + 108) * (float)(sc[j] - 32);
            for (int k = 0; k < SIX; k++) {
                int again = (int)q[k][j];
                if (d != 0.0f)
                    again = lm_nearest_code(v[j * SIX + k] / d, -4, 3);
                code[j * SIX + k] = (uint8_t)(again + 4);
            }
        }
        pack_three(sc, code, p);
    }
}

void lm_q3_k_encode(const float *x, int64_t n, void *dst)
{
    three_encode(x, NULL, n, dst);
}

void lm_q3_k_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    three_encode(x, w, n, dst);
}

void lm_q3_k_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[SUPER];

    for (int64_t i = 0; i < n; i += SUPER, p += 110) {
        float d = lm_get_f16(p + 108);
        unpack_pairs(p + 32, q);
        for (int j = 0; j < SIXES; j++) {
            float scaled = d * (float)three_scale(p + 96, j);
            for (int k = j * SIX; k < (j + 1) * SIX; k++)
                y[i + k] = scaled * (float)(q[k] + (p[k % 32] >> k / 32 & 1) * 4 - 4);
        }
    }
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

static void six_encode(const float *x, const float *importance, int64_t n, uint8_t *p)
{
    uint8_t code[SUPER];
    float v[SUPER];
    lane by_lane[SIX], weight[SIX], q[SIX], scale = { 0 };
    int8_t sc[SIXES];

    for (int64_t i = 0; i < n; i += SUPER, p += 210) {
        float most = 0.0f;
        lm_take_finite(x + i, SUPER, v);
        lm_to_lanes(v, SIXES, SIX, by_lane);
        if (importance)
            lm_to_lanes(importance + i, SIXES, SIX, weight);
        else
            square_weights(by_lane, weight);
        lm_signed_search(by_lane, weight, SIX, 32, &scale, q);
        for (int j = 0; j < SIXES; j++)
            most = fabsf(scale[j]) > fabsf(most) ? scale[j] : most;
        if (fabsf(most) < LM_GGML_TINY) {
            memset(p, 0, 210);
            continue;
        }
        float inv = -128.0f / most;
        lm_put_f16(p + 208, 1.0f / inv);
        for (int j = 0; j < SIXES; j++) {
            sc[j] = (int8_t)lm_nearest_code(inv * scale[j], -128, 127);
            float d = lm_get_f16(p + 208) * sc[j];
            for (int k = 0; k < SIX; k++) {
                int again = (int)q[k][j];
                if (d != 0.0f)
                    again = lm_nearest_code(v[j * SIX + k] / d, -32, 31);
                code[j * SIX + k] = (uint8_t)(again + 32);
            }
        }
        six_pack(code, p, p + 128);
        memcpy(p + 192, sc, sizeof sc);
    }
}

void lm_q6_k_encode(const float *x, int64_t n, void *dst)
{
    six_encode(x, NULL, n, dst);
}

void lm_q6_k_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    six_encode(x, w, n, dst);
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
