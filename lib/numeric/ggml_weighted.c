/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_weighted.c -- GGUF's blocks of 32 with an importance matrix: scales are searched as in
 * super-blocks, where ggml_simple.c uses the scale that spans the block. */
#include "numeric/ggml_blocks.h"
#include "numeric/ggml_search.h"

enum { N = 32 };

/* Importance times sqrt(mean square of the row + square of the number). */
static void weigh(const float *v, const float *importance, float mean, int n, float *out)
{
    for (int i = 0; i < n; i++)
        out[i] = importance[i] * sqrtf(mean + v[i] * v[i]);
}

static float mean_square(const float *x, int64_t n)
{
    float sum = 0.0f, v;

    for (int64_t i = 0; i < n; i++) {
        lm_take_finite(x + i, 1, &v);
        sum += v * v;
    }
    return sum / (float)n;
}

/* One block: its scale, its negated offset (0 in formats without), its codes. */
typedef void put_block(float d, float m, const uint8_t q[N], uint8_t *p);

/* Up to 16 blocks of a row at a time; `top`: codes are -top..top - 1, stored from 0. */
static void signed_row(const float *x, const float *w, int64_t n, int top, put_block *put,
                       size_t bytes, uint8_t *p)
{
    float mean = mean_square(x, n), v[LANES * N], weight[LANES * N];
    lane by_lane[N], by_lane_w[N], q[N], scale = { 0 };
    uint8_t code[N];

    for (int64_t i = 0; i < n; i += LANES * N) {
        int blocks = n - i < LANES * N ? (int)((n - i) / N) : LANES;
        lm_take_finite(x + i, blocks * N, v);
        weigh(v, w + i, mean, blocks * N, weight);
        lm_to_lanes(v, blocks, N, by_lane);
        lm_to_lanes(weight, blocks, N, by_lane_w);
        lm_signed_search(by_lane, by_lane_w, N, top, &scale, q);
        for (int b = 0; b < blocks; b++, p += bytes) {
            for (int k = 0; k < N; k++)
                code[k] = (uint8_t)(q[k][b] + (float)top);
            put(scale[b], 0.0f, code, p);
        }
    }
}

static void affine_row(const float *x, const float *w, int64_t n, int top, put_block *put,
                       size_t bytes, uint8_t *p)
{
    const lm_affine_plan plan = { N, top, -0.9f, 0.05f, 36, false };
    float mean = mean_square(x, n), v[LANES * N], weight[LANES * N];
    lane by_lane[N], by_lane_w[N];
    lm_affine g;
    uint8_t code[N];

    for (int64_t i = 0; i < n; i += LANES * N) {
        int blocks = n - i < LANES * N ? (int)((n - i) / N) : LANES;
        lm_take_finite(x + i, blocks * N, v);
        weigh(v, w + i, mean, blocks * N, weight);
        lm_to_lanes(v, blocks, N, by_lane);
        lm_to_lanes(weight, blocks, N, by_lane_w);
        lm_affine_search(by_lane, by_lane_w, &plan, &g);
        for (int b = 0; b < blocks; b++, p += bytes) {
            for (int k = 0; k < N; k++)
                code[k] = (uint8_t)g.q[k][b];
            put(g.scale[b], -g.offset[b], code, p);
        }
    }
}

static void put_q4_0(float d, float m, const uint8_t q[N], uint8_t *p)
{
    (void)m;
    lm_put_f16(p, d);
    lm_pack4(q, p + 2);
}

static void put_q4_1(float d, float m, const uint8_t q[N], uint8_t *p)
{
    lm_put_f16(p, d);
    lm_put_f16(p + 2, m);
    lm_pack4(q, p + 4);
}

static void put_q5_0(float d, float m, const uint8_t q[N], uint8_t *p)
{
    (void)m;
    lm_put_f16(p, d);
    lm_pack5(q, p + 2, p + 6);
}

static void put_q5_1(float d, float m, const uint8_t q[N], uint8_t *p)
{
    lm_put_f16(p, d);
    lm_put_f16(p + 2, m);
    lm_pack5(q, p + 4, p + 8);
}

void lm_q4_0_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    signed_row(x, w, n, 8, put_q4_0, 18, dst);
}

void lm_q4_1_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    affine_row(x, w, n, 15, put_q4_1, 20, dst);
}

void lm_q5_0_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    signed_row(x, w, n, 16, put_q5_0, 22, dst);
}

void lm_q5_1_weigh(const float *x, const float *w, int64_t n, void *dst)
{
    affine_row(x, w, n, 31, put_q5_1, 24, dst);
}
