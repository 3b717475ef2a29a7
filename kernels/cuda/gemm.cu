/* gemm.cu -- which way a product goes.
 *
 * On the plain path, by gemm_plain.cu.  On the others by cuBLASLt, but for two kinds of shapes: up
 * to lt_few_rows of a decoder, which are bound by reading B once, as the plain kernel does; and
 * those that cuBLASLt has no algorithm for, which it counts (lm_cuda_lt_counts). */
#include "kernels/cuda/gemm.cuh"

#include "kernels/cuda/gemm_plain.cuh"
#include "kernels/cuda/rows.cuh"

extern "C" {
#include "kernels/cuda/blaslt.h"
}

/* A bias as cuBLASLt takes it: of the output's type. */
static size_t bias_bytes(const gemm_call *g)
{
    return g->cd == LM_DTYPE_F32 ? 0 : (size_t)g->n * lm_dtype_size(g->cd);
}

/* The same on every path, with or without a bias: a graph is planned before its operands have
 * memory. */
size_t gemm_work(const gemm_call *g, const lm_stream *s)
{
    size_t plain = gemm_plain_work(g), bias = bias_bytes(g);
    (void)s;
    return plain > bias ? plain : bias;
}

template <class T> __global__ void narrow_bias_kernel(const float *bias, int64_t n, T *out)
{
    for (int64_t i = global_thread(); i < n; i += global_threads())
        out[i] = from_float<T>(bias[i]);
}

static const void *bias_as_output(const gemm_call *g, const lm_stream *s)
{
    unsigned grid = grid_for(g->n, 256, s);

    if (!g->bias || g->cd == LM_DTYPE_F32)
        return g->bias;
    if (g->cd == LM_DTYPE_BF16)
        LM_LAUNCH((narrow_bias_kernel<bf16>), grid, 256, 0, s, g->bias, g->n, (bf16 *)g->work);
    else
        LM_LAUNCH((narrow_bias_kernel<f16>), grid, 256, 0, s, g->bias, g->n, (f16 *)g->work);
    return g->work;
}

static bool run_by_lt(const gemm_call *g, const lm_stream *s)
{
    lm_lt_gemm lt = {};

    if (s->level == LM_CUDA_PLAIN || !s->lt || (g->m <= lt_few_rows && !g->ta && g->tb))
        return false;
    lt.m = g->m, lt.n = g->n, lt.k = g->k;
    lt.a_type = g->ab, lt.b_type = g->ab, lt.cd = g->cd;
    lt.ta = g->ta, lt.tb = g->tb;
    lt.accumulate = g->accumulate;
    lt.tf32 = s->level == LM_CUDA_TF32;
    lt.a = g->a, lt.b = g->b, lt.c = g->c;
    lt.lda = g->lda, lt.ldb = g->ldb, lt.ldc = g->ldc;
    lt.batch = g->batch;
    lt.stride_a = g->stride_a, lt.stride_b = g->stride_b, lt.stride_c = g->stride_c;
    lt.bias = bias_as_output(g, s);
    return lm_cuda_lt_gemm(s->lt, &lt, s->handle);
}

void gemm_run(const gemm_call *g, lm_stream *s)
{
    if (!run_by_lt(g, s))
        gemm_plain_run(g, s);
}
