/* SPDX-License-Identifier: Apache-2.0 */
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

/* 16 groups are searched side by side, one in each lane of a vector (GCC's, lowered to whatever the
 * processor has), so that the sums of a group keep their order whatever the width: the same bytes
 * on every processor.  A lane that is to change is chosen by masks of all ones. */
enum { LANES = 16 };
typedef float lane __attribute__((vector_size(64)));
typedef int32_t mask __attribute__((vector_size(64)));

#define WIDE          __attribute__((target_clones("avx512f", "avx2", "default")))
#define ALWAYS        static inline __attribute__((always_inline))
#define PICK(m, a, b) ((lane)(((m) & (mask)(a)) | (~(m) & (mask)(b))))
#define LOWER(a, b)   PICK((a) < (b), a, b)
#define HIGHER(a, b)  PICK((a) > (b), a, b)
#define MAGNITUDE(a)  ((lane)((mask)(a)&0x7fffffff))
#define TO_NEAREST    12582912.0f /* 1.5 * 2^23: adding it rounds |f| < 2^22 to even */
#define CODES(f, lo, hi) \
    HIGHER(LOWER(((f) + TO_NEAREST) - TO_NEAREST, (lane){ 0 } + (hi)), (lane){ 0 } + (lo))

/* To even, held to [lo, hi]; NaN gives lo. */
static int nearest(float f, int lo, int hi)
{
    return f > (float)lo ? (f < (float)hi ? (int)rintf(f) : hi) : lo;
}

/* ---- q4_k and q5_k: scale and offset for groups of 32 ---- */

/* x = scale * q - offset, offset >= 0; codes as whole floats. */
typedef struct {
    lane scale, offset;
    lane q[GROUP];
} affine;

/* What is known of the groups before any step is tried. */
typedef struct {
    lane w[GROUP], lo, hi, sum_w, sum_x;
} affine_facts;

ALWAYS void affine_look(const lane x[GROUP], affine_facts *f)
{
    lane rms = { 0 };

    for (int i = 0; i < GROUP; i++)
        rms += x[i] * x[i];
    for (int l = 0; l < LANES; l++)
        rms[l] = sqrtf(rms[l] / GROUP);
    f->lo = f->hi = x[0];
    f->sum_w = f->sum_x = (lane){ 0 };
    for (int i = 0; i < GROUP; i++) {
        f->w[i] = rms + MAGNITUDE(x[i]);
        f->lo = LOWER(x[i], f->lo);
        f->hi = HIGHER(x[i], f->hi);
        f->sum_w += f->w[i];
        f->sum_x += f->w[i] * x[i];
    }
    f->lo = LOWER(f->lo, (lane){ 0 });
}

/* Best scale and minimum for codes q in the sense of least squares, the minimum never above zero.
 * Leaves Inf or NaN where the codes have no such solution; *ok tells. */
ALWAYS void affine_fit(const lane x[GROUP], const affine_facts *f, const lane q[GROUP], lane *scale,
                       lane *min, mask *ok)
{
    lane l1 = { 0 }, l2 = { 0 }, xl = { 0 };

    for (int i = 0; i < GROUP; i++) {
        lane wq = f->w[i] * q[i];
        l1 += wq;
        l2 += wq * q[i];
        xl += wq * x[i];
    }
    lane det = f->sum_w * l2 - l1 * l1;
    *ok = det > 0.0f;
    *min = (l2 * f->sum_x - l1 * xl) / det;
    *scale = PICK(*min > 0.0f, xl / l2, (f->sum_w * xl - f->sum_x * l1) / det);
    *min = LOWER(*min, (lane){ 0 });
}

ALWAYS void affine_error(const lane x[GROUP], const affine_facts *f, const lane q[GROUP],
                         const lane *scale, const lane *min, lane *error)
{
    *error = (lane){ 0 };
    for (int i = 0; i < GROUP; i++) {
        lane d = *scale * q[i] + *min - x[i];
        *error += f->w[i] * (d * d);
    }
}

/* Codes 0..top.  Step sizes (top + from + 0.1 k) / span for k = 0..steps are tried after the plain
 * one (k = -1); each counts from the best minimum so far, as ggml's search does. */
WIDE static void affine_search(const lane x[GROUP], int top, float from, int steps, affine *out)
{
    affine_facts f;
    lane q[GROUP], scale, min, error, best = (lane){ 0 } + INFINITY;
    mask ok;

    affine_look(x, &f);
    *out = (affine){ .offset = -f.lo };
    for (int k = -1; k <= steps; k++) {
        float reach = k < 0 ? (float)top : from + 0.1f * (float)k + (float)top;
        mask alive = f.hi > f.lo;
        lane inv = PICK(alive, reach / (f.hi - f.lo), (lane){ 0 });
        for (int i = 0; i < GROUP; i++)
            q[i] = CODES(inv * (x[i] - f.lo), 0.0f, (float)top);
        if (k < 0) {
            scale = 1.0f / inv;
            min = f.lo;
            ok = alive;
        } else {
            affine_fit(x, &f, q, &scale, &min, &ok);
        }
        affine_error(x, &f, q, &scale, &min, &error);
        ok = ok & alive & (error < best);
        best = PICK(ok, error, best);
        f.lo = PICK(ok, min, f.lo);
        out->scale = PICK(ok, scale, out->scale);
        out->offset = PICK(ok, -min, out->offset);
        for (int i = 0; i < GROUP; i++)
            out->q[i] = PICK(ok, q[i], out->q[i]);
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

/* The groups of `blocks` super-blocks (1 or 2) as lanes; lanes without a group repeat the last. */
static void to_lanes(const float *v, int blocks, int group, lane *x)
{
    int groups = blocks * SUPER / group;
    for (int l = 0; l < LANES; l++) {
        const float *from = v + (l < groups ? l : groups - 1) * group;
        for (int i = 0; i < group; i++)
            x[i][l] = from[i];
    }
}

/* One super-block, whose groups are lanes `first` and on, to codes q[256] and the 16 bytes of d, dmin
 * and scales. */
static void affine_block(const float *v, const affine *g, int first, int top, uint8_t head[16],
                         uint8_t q[SUPER])
{
    float most_scale = 0.0f, most_offset = 0.0f;
    uint8_t sc[GROUPS], mn[GROUPS];

    for (int l = first; l < first + GROUPS; l++) {
        most_scale = g->scale[l] > most_scale ? g->scale[l] : most_scale;
        most_offset = g->offset[l] > most_offset ? g->offset[l] : most_offset;
    }
    float to_scale = most_scale > 0.0f ? 63.0f / most_scale : 0.0f;
    float to_offset = most_offset > 0.0f ? 63.0f / most_offset : 0.0f;
    for (int j = 0; j < GROUPS; j++) {
        sc[j] = (uint8_t)nearest(to_scale * g->scale[first + j], 0, 63);
        mn[j] = (uint8_t)nearest(to_offset * g->offset[first + j], 0, 63);
    }
    lm_put_f16(head, most_scale / 63.0f);
    lm_put_f16(head + 2, most_offset / 63.0f);
    pack6(sc, mn, head + 4);

    for (int j = 0; j < GROUPS; j++) { /* codes once more, for the scales as they are stored */
        float d = lm_get_f16(head) * sc[j], m = lm_get_f16(head + 2) * mn[j];
        for (int i = 0; i < GROUP; i++) {
            int again = (int)g->q[i][first + j];
            if (d != 0.0f)
                again = nearest((v[j * GROUP + i] + m) / d, 0, top);
            q[j * GROUP + i] = (uint8_t)again;
        }
    }
}

/* Pairs of super-blocks of `bytes` bytes: `put` lays out the codes behind the 16 bytes of the head. */
static void affine_encode(const float *x, int64_t n, int top, float from, int steps, uint8_t *p,
                          size_t bytes, void (*put)(const uint8_t q[SUPER], uint8_t *p))
{
    float v[2 * SUPER];
    lane by_lane[GROUP];
    affine g;
    uint8_t q[SUPER];

    for (int64_t i = 0; i < n; i += 2 * SUPER) {
        int blocks = n - i > SUPER ? 2 : 1;
        lm_take_finite(x + i, blocks * SUPER, v);
        to_lanes(v, blocks, GROUP, by_lane);
        affine_search(by_lane, top, from, steps, &g);
        for (int b = 0; b < blocks; b++, p += bytes) {
            affine_block(v + b * SUPER, &g, b * GROUPS, top, p, q);
            put(q, p + 16);
        }
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
    affine_encode(x, n, 15, -1.0f, 20, dst, 144, pack_halves);
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

void lm_q5_k_encode(const float *x, int64_t n, void *dst)
{
    affine_encode(x, n, 31, -0.5f, 15, dst, 176, pack_fifths);
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

/* Codes -32..31 of 16 groups; weights x^2, so that large numbers count. */
WIDE static void six_search(const lane x[SIX], lane *scale, lane out[SIX])
{
    lane most = { 0 }, best = { 0 }, q[SIX];

    for (int i = 0; i < SIX; i++)
        most = PICK(MAGNITUDE(x[i]) > MAGNITUDE(most), x[i], most);
    mask alive = MAGNITUDE(most) >= TINY;
    for (int k = 0; k <= 18; k++) { /* the plain step first, then the others from small to large */
        int is = k == 0 ? 0 : k <= 9 ? k - 10 : k - 9;
        lane inv = PICK(alive, -(32.0f + 0.1f * (float)is) / most, (lane){ 0 });
        lane xl = { 0 }, l2 = { 0 };
        for (int i = 0; i < SIX; i++) {
            q[i] = CODES(inv * x[i], -32.0f, 31.0f);
            xl += x[i] * x[i] * x[i] * q[i];
            l2 += x[i] * x[i] * q[i] * q[i];
        }
        mask some = l2 > 0.0f, better = some & (xl * xl > best * l2);
        if (k == 0)
            better = alive | ~alive;
        *scale = PICK(better, PICK(some, xl / l2, (lane){ 0 }), *scale);
        best = PICK(better, *scale * xl, best);
        for (int i = 0; i < SIX; i++)
            out[i] = PICK(better, q[i], out[i]);
    }
    for (int i = 0; i < SIX; i++) /* code 0 in the file, where the scale is 0 anyway */
        out[i] = PICK(alive, out[i], (lane){ 0 } - 32.0f);
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
    float v[SUPER];
    lane by_lane[SIX], q[SIX], scale = { 0 };
    int8_t sc[SIXES];

    for (int64_t i = 0; i < n; i += SUPER, p += 210) {
        float most = 0.0f;
        lm_take_finite(x + i, SUPER, v);
        to_lanes(v, 1, SIX, by_lane);
        six_search(by_lane, &scale, q);
        for (int j = 0; j < SIXES; j++)
            most = fabsf(scale[j]) > fabsf(most) ? scale[j] : most;
        if (fabsf(most) < TINY) {
            memset(p, 0, 210);
            continue;
        }
        float inv = -128.0f / most;
        lm_put_f16(p + 208, 1.0f / inv);
        for (int j = 0; j < SIXES; j++) {
            sc[j] = (int8_t)nearest(inv * scale[j], -128, 127);
            float d = lm_get_f16(p + 208) * sc[j];
            for (int k = 0; k < SIX; k++) {
                int again = (int)q[k][j];
                if (d != 0.0f)
                    again = nearest(v[j * SIX + k] / d, -32, 31);
                code[j * SIX + k] = (uint8_t)(again + 32);
            }
        }
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
