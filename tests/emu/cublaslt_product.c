/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_product.c -- cuBLASLt's matrix product as documented, in plain F32 on the host: D =
 * epilogue(alpha op(A) op(B) + beta C), column-major.  Sums go over k in order. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cublaslt_impl.h"
#include "numeric/dtype.h"

#pragma GCC optimize("O3")

static float load(const char *base, int type, int64_t i)
{
    if (type == CUDA_R_32F)
        return ((const float *)base)[i];
    if (is_fp8(type))
        return (type == CUDA_R_8F_E4M3 ? lm_f8e4m3_to_f32
                                       : lm_f8e5m2_to_f32)(((const uint8_t *)base)[i]);
    uint16_t h = ((const uint16_t *)base)[i];
    return type == CUDA_R_16F ? lm_f16_to_f32(h) : lm_bf16_to_f32(h);
}
static void store(char *base, int type, int64_t i, float x)
{
    if (type == CUDA_R_32F)
        ((float *)base)[i] = x;
    else
        ((uint16_t *)base)[i] = type == CUDA_R_16F ? lm_f32_to_f16(x) : lm_f32_to_bf16(x);
}

/* 10 bits of mantissa, to nearest, ties to even. */
static float to_tf32(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7f800000u) != 0x7f800000u)
        u = (u + 0xfffu + (u >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &u, 4);
    return x;
}

static float *zeros(int64_t n)
{
    float *x = calloc((size_t)n, sizeof *x);
    if (!x)
        abort();
    return x;
}

/* op(X) [outer, k] as [k][outer] when `by_k`, else as [outer][k]. */
static float *factor(const char *at, const lt_layout *l, bool swap, bool by_k, int64_t outer,
                     int64_t k, bool tf32)
{
    float *x = malloc((size_t)outer * (size_t)k * sizeof *x);
    if (!x)
        abort();
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < k; i++) {
            float v = load(at, l->type, swap ? place(l, i, o) : place(l, o, i));
            x[by_k ? i * outer + o : o * k + i] = tf32 ? to_tf32(v) : v;
        }
    return x;
}

/* As a GPU's approximate instruction: 11 bits. */
static float tanh_of(float x)
{
    int e;
    float m = frexpf(tanhf(x), &e);
    return ldexpf(roundf(m * 2048) / 2048, e);
}

static float gelu(float x)
{
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1 + tanh_of(u));
}
static float gelu_slope(float x)
{
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x), t = tanh_of(u);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608028654f * (1 + 0.134145f * x * x);
}

/* One element through the epilogue. */
static float finish(const lt_product *p, const lt_layout *d, int64_t i, int64_t j, const char *bias,
                    char *aux, float x)
{
    uint32_t e = p->epilogue;
    int64_t at = j * p->aux_ld + i;
    if (e & CUBLASLT_EPILOGUE_BIAS)
        x += load(bias, p->bias_type >= 0 ? p->bias_type : d->type, i);
    if (e & CUBLASLT_EPILOGUE_RELU)
        x = x > 0 || x != x ? x : 0;
    if (e & CUBLASLT_EPILOGUE_GELU) {
        if (wants_aux(e))
            store(aux, d->type, at, x);
        x = gelu(x);
    }
    if (e & BIT_DGELU)
        x *= gelu_slope(load(aux, d->type, at));
    return x;
}

static void sums_of_factor(const float *x, bool by_k, int64_t outer, int64_t k, char *bias,
                           int type)
{
    for (int64_t o = 0; o < outer; o++) {
        float sum = 0;
        for (int64_t i = 0; i < k; i++)
            sum += x[by_k ? i * outer + o : o * k + i];
        store(bias, type, o, sum);
    }
}

/* The scale of an operand's row `outer` in block `block` of k; outers, blocks: their numbers. */
static float scale_of(const float *scale, int mode, int64_t outer, int64_t outers, int64_t block,
                      int64_t blocks)
{
    if (!scale)
        return 1;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F)
        return scale[block * outers + outer];
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F)
        return scale[outer / SCALE_SIDE * ((blocks + 3) / 4 * 4) + block];
    return *scale;
}

/* A column of op(A) op(B): each block of k is summed, then multiplied by its scales. */
static void sum_column(const lt_product *p, const float *a, const float *b, int64_t m, int64_t n,
                       int64_t k, int64_t j, float *part, float *sum)
{
    bool scaled = p->scale_a || p->scale_b;
    int64_t step = by_blocks(p) ? SCALE_SIDE : k, blocks = (k + step - 1) / step;

    memset(sum, 0, (size_t)m * sizeof *sum);
    for (int64_t q = 0; q < blocks; q++) {
        int64_t end = (q + 1) * step < k ? (q + 1) * step : k;
        float *to = scaled ? part : sum;
        if (scaled)
            memset(part, 0, (size_t)m * sizeof *part);
        for (int64_t l = q * step; l < end; l++) {
            const float *column = a + l * m;
            float y = b[j * k + l];
            for (int64_t i = 0; i < m; i++)
                to[i] += column[i] * y;
        }
        float right = scale_of(p->scale_b, p->mode_b, j, n, q, blocks);
        for (int64_t i = 0; scaled && i < m; i++)
            sum[i] += part[i] * (scale_of(p->scale_a, p->mode_a, i, m, q, blocks) * right);
    }
}

static void run_one(const lt_task *t, int64_t batch, float alpha, float beta)
{
    const lt_product *p = &t->p;
    int64_t m = (int64_t)t->d.rows, n = (int64_t)t->d.cols;
    int64_t k = (int64_t)(p->ta ? t->a.rows : t->a.cols);
    bool tf32 = p->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    size_t out = type_size(t->d.type);
    int64_t a_at = (int64_t)type_size(t->a.type) * batch * t->a.batch_stride;
    int64_t b_at = (int64_t)type_size(t->b.type) * batch * t->b.batch_stride;
    float *a = factor(t->at_a + a_at, &t->a, p->ta, true, m, k, tf32);
    float *b = factor(t->at_b + b_at, &t->b, !p->tb, false, n, k, tf32);
    const char *c = t->at_c ? t->at_c + (int64_t)out * batch * t->c.batch_stride : NULL;
    char *d = t->at_d + (int64_t)out * batch * t->d.batch_stride;
    char *bias = p->bias ? p->bias + (int64_t)out * batch * p->bias_stride : NULL;
    char *aux = p->aux ? p->aux + (int64_t)out * batch * p->aux_stride : NULL;
    float *sum = zeros(m), *rows = zeros(m);
    float *part = zeros(m);
    for (int64_t j = 0; j < n; j++) {
        sum_column(p, a, b, m, n, k, j, part, sum);
        for (int64_t i = 0; i < m; i++) {
            float x = alpha * sum[i];
            if (beta != 0)
                x += beta * load(c, t->c.type, place(&t->c, i, j));
            x = finish(p, &t->d, i, j, bias, aux, x);
            rows[i] += x;
            store(d, t->d.type, place(&t->d, i, j), x);
        }
    }
    if (p->epilogue & CUBLASLT_EPILOGUE_BGRADA)
        sums_of_factor(a, true, m, k, bias, t->d.type);
    if (p->epilogue & CUBLASLT_EPILOGUE_BGRADB)
        sums_of_factor(b, false, n, k, bias, t->d.type);
    if (p->epilogue & BIT_BGRAD)
        for (int64_t i = 0; i < m; i++)
            store(bias, t->d.type, i, rows[i]);
    free(a);
    free(b);
    free(sum);
    free(rows);
    free(part);
}

void emu_lt_run(void *data)
{
    const lt_task *t = data;
    if (!emu_kernel_begins("cublasLtMatmul"))
        return;
    float alpha = t->alpha_at ? *t->alpha_at : t->alpha;
    float beta = t->beta_at ? *t->beta_at : t->beta;
    if (t->chosen.workspace) /* used by this call only */
        memset(t->workspace, 0xff, t->chosen.workspace);
    for (int64_t i = 0; i < t->d.batch; i++)
        run_one(t, i, alpha, beta);
    emu_memory_check("cublasLtMatmul");
}
