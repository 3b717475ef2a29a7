/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_fp8.c -- products of FP8 matrices and their quantisation, for bench_cuda.  No operator uses
 * these functions, so they are looked up in the module by name and wrapped in kernels here. */
#include <stdio.h>
#include <string.h>

#include "kernels/fp8.h"
#include "tests/bench/cuda_bench.h"
#include "tests/bench/cuda_cases.h"

/* As declared in kernels/cuda/fp8.cuh. */
static struct {
    size_t (*gemm_work)(const lm_fp8_gemm *);
    void (*gemm)(const lm_fp8_gemm *, const lm_stream *);
    size_t (*quantize_work)(const lm_fp8_quantize *);
    void (*quantize)(const lm_fp8_quantize *, const lm_stream *);
} fp8;

typedef struct {
    lm_fp8_scaling a, b;
} product_attr;

typedef struct {
    lm_fp8_scaling scaling;
    bool transpose;
} codes_attr;

bool cuda_fp8_open(const char *modules)
{
    *(void **)&fp8.gemm_work = cuda_symbol(modules, "lm_cuda_fp8_gemm_work");
    *(void **)&fp8.gemm = cuda_symbol(modules, "lm_cuda_fp8_gemm");
    *(void **)&fp8.quantize_work = cuda_symbol(modules, "lm_cuda_fp8_quantize_work");
    *(void **)&fp8.quantize = cuda_symbol(modules, "lm_cuda_fp8_quantize");
    return fp8.gemm_work && fp8.gemm && fp8.quantize_work && fp8.quantize;
}

/* ---- kernels ---- */

static lm_fp8_matrix matrix_of(const lm_tensor *codes, const lm_tensor *scale, lm_fp8_scaling s)
{
    return (lm_fp8_matrix){ codes->dtype, s, codes->data, codes->dim[1], scale->data };
}

static lm_fp8_gemm product_of(const lm_call *c)
{
    const product_attr *at = c->attr;
    return (lm_fp8_gemm){ .m = c->in[0].dim[0],
                          .n = c->in[2].dim[0],
                          .k = c->in[0].dim[1],
                          .a = matrix_of(&c->in[0], &c->in[1], at->a),
                          .b = matrix_of(&c->in[2], &c->in[3], at->b),
                          .cd = c->out[0].dtype,
                          .c = c->out[0].data,
                          .ldc = c->out[0].dim[1],
                          .work = c->work };
}

static size_t product_work(const lm_call *c, int threads)
{
    lm_fp8_gemm g = product_of(c);
    (void)threads;
    return fp8.gemm_work(&g);
}
static void run_product(const lm_call *c)
{
    lm_fp8_gemm g = product_of(c);
    fp8.gemm(&g, c->stream);
}

static lm_fp8_quantize codes_of(const lm_call *c)
{
    const codes_attr *at = c->attr;
    return (lm_fp8_quantize){ .rows = c->in[0].dim[0],
                              .cols = c->in[0].dim[1],
                              .ldx = c->in[0].dim[1],
                              .in = c->in[0].dtype,
                              .x = c->in[0].data,
                              .transpose = at->transpose,
                              .type = c->out[0].dtype,
                              .scaling = at->scaling,
                              .codes = c->out[0].data,
                              .ld = c->out[0].dim[1],
                              .scale = c->out[1].data,
                              .work = c->work };
}

static size_t codes_work(const lm_call *c, int threads)
{
    lm_fp8_quantize q = codes_of(c);
    (void)threads;
    return fp8.quantize_work(&q);
}
static void run_codes(const lm_call *c)
{
    lm_fp8_quantize q = codes_of(c);
    fp8.quantize(&q, c->stream);
}

static const lm_kernel product_kernel = { .op = "fp8_gemm",
                                          .run = run_product,
                                          .work = product_work },
                       codes_kernel = { .op = "fp8_quantize",
                                        .run = run_codes,
                                        .work = codes_work };

/* ---- cases ---- */

static const char *const scaling_names[] = { "tensor", "1x128", "128x128" };

static operand scales(lm_fp8_scaling s, int64_t rows, int64_t k)
{
    return (operand){ LM_DTYPE_F32, 1, { lm_fp8_scales(s, rows, k) }, VALUE, 1 };
}

/* [m,k] of `type` times [n,k] of E4M3, transposed. */
static bench_case product_case(int64_t m, int64_t k, int64_t n, lm_dtype type, lm_fp8_scaling a,
                               lm_fp8_scaling b, lm_dtype cd)
{
    const product_attr attr = { a, b };
    bench_case c = { .op = "fp8_gemm", .act = type, .kernel = &product_kernel };
    cuda_set_attr(&c, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld -> %lld, %s", (long long)m, (long long)k,
             (long long)n, scaling_names[b]); /* 128x128: of A 1x128 */
    c.in[0] = cuda_matrix(type, m, k);
    c.in[1] = scales(a, m, k);
    c.in[2] = cuda_matrix(LM_DTYPE_F8E4M3, n, k);
    c.in[3] = scales(b, n, k);
    c.out[0] = cuda_matrix(cd, m, n);
    c.out[0].fill = NOTHING;
    c.flops = 2.0 * (double)m * (double)n * (double)k;
    c.bytes = (double)(m * k + n * k) + (double)(m * n) * (double)lm_dtype_size(cd) +
              4.0 * (double)(c.in[1].dim[0] + c.in[3].dim[0]);
    return c;
}

static void codes_case(int64_t rows, int64_t k, lm_fp8_scaling s, bool transpose,
                       cuda_measure *measure)
{
    const codes_attr attr = { s, transpose };
    bench_case c = { .op = "fp8_quantize", .act = LM_DTYPE_BF16, .kernel = &codes_kernel };
    cuda_set_attr(&c, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld, %s%s", (long long)rows, (long long)k,
             scaling_names[s], transpose ? ", turned" : "");
    c.in[0] = cuda_matrix(LM_DTYPE_BF16, rows, k);
    c.out[0] =
        transpose ? cuda_matrix(LM_DTYPE_F8E4M3, k, rows) : cuda_matrix(LM_DTYPE_F8E4M3, rows, k);
    c.out[1] = scales(s, c.out[0].dim[0], c.out[0].dim[1]);
    c.out[0].fill = c.out[1].fill = NOTHING;
    c.bytes = 3.0 * (double)(rows * k) + 4.0 * (double)c.out[1].dim[0];
    measure(&c);
}

bench_case cuda_fp8_square(int64_t n)
{
    return product_case(n, n, n, LM_DTYPE_F8E4M3, LM_FP8_TENSOR, LM_FP8_TENSOR, LM_DTYPE_BF16);
}

/* Forward, gradient of the input and of the weights of Llama 8B's largest product. */
void cuda_fp8_cases(bool toy, cuda_measure *measure)
{
    const int64_t rows = toy ? 32 : 8192, from = toy ? 144 : 4096, to = toy ? 160 : 28672;
    for (int blocks = 0; blocks < 2; blocks++) {
        const lm_fp8_scaling x = blocks ? LM_FP8_ROW : LM_FP8_TENSOR;
        const lm_fp8_scaling w = blocks ? LM_FP8_BLOCK : LM_FP8_TENSOR;
        bench_case c = product_case(rows, from, to, LM_DTYPE_F8E4M3, x, w, LM_DTYPE_BF16);
        measure(&c);
        c = product_case(rows, to, from, LM_DTYPE_F8E5M2, x, w, LM_DTYPE_BF16);
        measure(&c);
        c = product_case(to, rows, from, LM_DTYPE_F8E5M2, x, x, LM_DTYPE_F32);
        measure(&c);
        codes_case(rows, from, x, false, measure);
        codes_case(rows, from, x, true, measure);
        codes_case(to, from, w, false, measure);
    }
}
