/* gemm.cpp -- products as kernels call for them (gemm.cuh), for tests: also those that no operator
 * asks for. */
#include "kernels/cuda/gemm.cuh"

#include "emu.h"

extern "C" {
#include "kernels/linear.h"
}

static gemm_call call_of(const lm_gemm *g)
{
    gemm_call c = {};
    c.m = g->m, c.n = g->n, c.k = g->k;
    c.ab = g->ab, c.cd = g->cd;
    c.ta = g->ta, c.tb = g->tb, c.accumulate = g->accumulate;
    c.a = g->a, c.b = g->b, c.c = g->c;
    c.lda = g->lda, c.ldb = g->ldb, c.ldc = g->ldc;
    c.bias = g->bias;
    c.work = g->work;
    return c;
}

/* Pointers are of the device; g->work has lm_emu_gemm_work bytes. */
extern "C" LM_EMU_PUBLIC size_t lm_emu_gemm_work(const lm_gemm *g, const lm_stream *s);
extern "C" LM_EMU_PUBLIC void lm_emu_gemm(const lm_gemm *g, lm_stream *s);

size_t lm_emu_gemm_work(const lm_gemm *g, const lm_stream *s)
{
    gemm_call c = call_of(g);
    return gemm_work(&c, s);
}

void lm_emu_gemm(const lm_gemm *g, lm_stream *s)
{
    gemm_call c = call_of(g);
    gemm_run(&c, s);
}
