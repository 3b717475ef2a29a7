/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_iq4.c -- GGUF's blocks whose four-bit codes stand for 16 unevenly spaced numbers.
 *
 *   iq4_nl  32 numbers: f16 d; 16 bytes of codes                        x = d values[q]
 *   iq4_xs  256 numbers in 8 groups of 32: f16 d; u16 upper bit pairs of the scales; 4 bytes of their
 *           low halves; 128 of codes                                    x = d (sc - 32) values[q]
 *
 * A group's scale is the best, by weighted least squares, of those for the codes of 16 step sizes
 * near the one that puts the number of largest magnitude on the first value. */
#include "numeric/ggml_blocks.h"
#include "numeric/ggml_search.h"

enum { N = 32, SUPER = 256, TRIES = 7 };

static const float values[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113 };

/* The value nearest to each lane, and its code; ties go up. */
ALWAYS void nearest_value(const lane *f, lane *out)
{
    *out = (lane){ 0 } + values[0];
    for (int k = 0; k < 15; k++) {
        mask above = ~ABOVE(values[k + 1] - *f, *f - values[k]);
        *out = PICK(above, (lane){ 0 } + values[k + 1], *out);
    }
}

static uint8_t nearest_code(float f)
{
    uint8_t q = 0;

    for (int k = 0; k < 15; k++)
        q += !(f - values[k] < values[k + 1] - f);
    return q;
}

/* Scales of 16 groups x weighted by w. */
WIDE static void search(const lane x[N], const lane w[N], lane *scale)
{
    lane most = { 0 }, best = { 0 };

    for (int i = 0; i < N; i++)
        most = PICK(MAGNITUDE(x[i]) > MAGNITUDE(most), x[i], most);
    mask alive = MAGNITUDE(most) >= LM_GGML_TINY;
    lane safe = PICK(alive, most, (lane){ 0 } + 1.0f);
    for (int k = -1; k <= 2 * TRIES; k++) { /* the plain step, then the others in their order */
        lane inv = k < 0 ? 1.0f / (-safe / values[0]) : ((float)(k - TRIES) + values[0]) / safe;
        lane xq = { 0 }, q2 = { 0 };
        for (int i = 0; i < N; i++) {
            lane f = inv * x[i], q;
            nearest_value(&f, &q);
            xq += w[i] * q * x[i];
            q2 += w[i] * q * q;
        }
        mask some = ABOVE(q2, ZERO);
        mask better = k < 0 ? alive | ~alive : some & ABOVE(xq * xq, best * q2);
        *scale = PICK(better, PICK(some, xq / q2, (lane){ 0 }), *scale);
        best = PICK(better, *scale * xq, best);
    }
    *scale = PICK(alive, *scale, (lane){ 0 });
}

/* Weights of `n` numbers that share one mean square; importance NULL: their squares. */
static void weigh(const float *v, const float *importance, int n, float *out)
{
    float sum = 0.0f;

    for (int i = 0; i < n; i++)
        sum += v[i] * v[i];
    sum *= 2.0f / (float)n;
    for (int i = 0; i < n; i++)
        out[i] = importance ? importance[i] * sqrtf(sum + v[i] * v[i]) : v[i] * v[i];
}

/* The scales of up to 16 groups of 32; groups of `share` numbers have one mean square. */
static void scales_of(const float *x, const float *importance, int groups, int share, float *v,
                      lane *scale)
{
    float w[LANES * N];
    lane by_lane[N], weight[N];

    lm_take_finite(x, groups * N, v);
    for (int i = 0; i < groups * N; i += share)
        weigh(v + i, importance ? importance + i : NULL, share, w + i);
    lm_to_lanes(v, groups, N, by_lane);
    lm_to_lanes(w, groups, N, weight);
    search(by_lane, weight, scale);
}

/* Codes of 32 numbers for a scale. */
static void put_codes(const float *v, float d, uint8_t *p)
{
    float inv = d != 0.0f ? 1.0f / d : 0.0f;
    uint8_t q[N];

    for (int i = 0; i < N; i++)
        q[i] = nearest_code(inv * v[i]);
    lm_pack4(q, p);
}

static void nl_encode(const float *x, const float *importance, int64_t n, uint8_t *p)
{
    float v[LANES * N];
    lane scale = { 0 };

    for (int64_t i = 0; i < n; i += LANES * N) {
        int groups = n - i < LANES * N ? (int)((n - i) / N) : LANES;
        scales_of(x + i, importance ? importance + i : NULL, groups, N, v, &scale);
        for (int b = 0; b < groups; b++, p += 18) {
            lm_put_f16(p, scale[b]);
            put_codes(v + b * N, scale[b], p + 2);
        }
    }
}

/* One super-block from its numbers and the scales of its groups. */
static void put_xs(const float *v, const float scale[8], uint8_t *p)
{
    float most = 0.0f;
    uint16_t high = 0;

    for (int j = 0; j < 8; j++)
        most = fabsf(scale[j]) > fabsf(most) ? scale[j] : most;
    float d = -most / 32.0f, inv = d != 0.0f ? 1.0f / d : 0.0f;
    lm_put_f16(p, d);
    memset(p + 4, 0, 4);
    for (int j = 0; j < 8; j++) {
        int sc = lm_nearest_code(inv * scale[j], -32, 31);
        put_codes(v + j * N, d * (float)sc, p + 8 + j * 16);
        sc += 32;
        p[4 + j / 2] |= (uint8_t)((sc & 15) << j % 2 * 4);
        high |= (uint16_t)(sc >> 4 << 2 * j);
    }
    memcpy(p + 2, &high, 2);
}

static void xs_encode(const float *x, const float *importance, int64_t n, uint8_t *p)
{
    float v[LANES * N], one[LANES];
    lane scale = { 0 };

    for (int64_t i = 0; i < n; i += 2 * SUPER) {
        int blocks = n - i > SUPER ? 2 : 1;
        scales_of(x + i, importance ? importance + i : NULL, blocks * 8, SUPER, v, &scale);
        memcpy(one, &scale, sizeof one);
        for (int b = 0; b < blocks; b++, p += 136)
            put_xs(v + b * SUPER, one + b * 8, p);
    }
}

void lm_iq4_nl_encode(const float *x, int64_t n, void *dst)
{
    nl_encode(x, NULL, n, dst);
}

void lm_iq4_nl_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    nl_encode(x, w, n, dst);
}

void lm_iq4_xs_encode(const float *x, int64_t n, void *dst)
{
    xs_encode(x, NULL, n, dst);
}

void lm_iq4_xs_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    xs_encode(x, w, n, dst);
}

void lm_iq4_nl_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[N];

    for (int64_t i = 0; i < n; i += N, p += 18) {
        float d = lm_get_f16(p);
        lm_unpack4(p + 2, q);
        for (int k = 0; k < N; k++)
            y[i + k] = d * values[q[k]];
    }
}

void lm_iq4_xs_decode(const void *src, int64_t n, float *y)
{
    const uint8_t *p = src;
    uint8_t q[N];

    for (int64_t i = 0; i < n; i += SUPER, p += 136) {
        float d = lm_get_f16(p);
        for (int j = 0; j < 8; j++) {
            int low = p[4 + j / 2] >> j % 2 * 4 & 15, high = p[2 + j / 4] >> j % 4 * 2 & 3;
            float dl = d * (float)((low | high << 4) - 32);
            lm_unpack4(p + 8 + j * 16, q);
            for (int k = 0; k < N; k++)
                y[i + j * N + k] = dl * values[q[k]];
        }
    }
}
