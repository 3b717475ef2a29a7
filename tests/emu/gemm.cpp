/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.cpp -- the product functions of kernels (gemm.cuh), for tests: also products that no
 * operator uses. */
#include "kernels/cuda/gemm.cuh"

#include "emu.h"

extern "C" {
#include "kernels/linear.h"
}

/* stride: of A, B and C. */
static gemm_call call_of(const lm_gemm *g, lm_activation act, bool slope, void *z, int64_t batch,
                         const int64_t *stride)
{
    gemm_call c = {};
    c.m = g->m, c.n = g->n, c.k = g->k;
    c.ab = g->ab, c.cd = g->cd;
    c.ta = g->ta, c.tb = g->tb, c.accumulate = g->accumulate;
    c.a = g->a, c.b = g->b, c.c = g->c;
    c.lda = g->lda, c.ldb = g->ldb, c.ldc = g->ldc;
    c.bias = g->bias;
    c.work = g->work;
    c.batch = batch;
    c.act = act, c.slope = slope, c.z = z;
    c.a_sum = g->a_sum;
    c.stride_a = stride[0], c.stride_b = stride[1], c.stride_c = stride[2];
    return c;
}

/* Pointers are device pointers; work has the size that the preceding function returns. */
extern "C" {
LM_EMU_PUBLIC size_t lm_emu_gemm_work(const lm_gemm *g, int64_t batch, const int64_t *stride,
                                      const lm_stream *s);
LM_EMU_PUBLIC void lm_emu_gemm(const lm_gemm *g, lm_activation act, bool slope, void *z,
                               int64_t batch, const int64_t *stride, lm_stream *s);
}

size_t lm_emu_gemm_work(const lm_gemm *g, int64_t batch, const int64_t *stride, const lm_stream *s)
{
    gemm_call c = call_of(g, LM_ACT_NONE, false, nullptr, batch, stride);
    return gemm_work(&c, s);
}

void lm_emu_gemm(const lm_gemm *g, lm_activation act, bool slope, void *z, int64_t batch,
                 const int64_t *stride, lm_stream *s)
{
    gemm_call c = call_of(g, act, slope, z, batch, stride);
    gemm_run(&c, s);
}
