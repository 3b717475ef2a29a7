/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_ref.c -- the definition of the matrix product: sums in double, one rounding at the store. */
#include "kernels/cpu/gemm.h"

typedef struct {
    const lm_gemm *g;
} job;

static double at(lm_dtype d, const void *p, int64_t ld, bool t, int64_t r, int64_t c)
{
    return lm_get(d, p, t ? c * ld + r : r * ld + c);
}

static void rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_gemm *g = ((const job *)ctx)->g;

    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < g->n; j++) {
            double s = g->accumulate ? lm_get(g->cd, g->c, i * g->ldc + j) : 0;
            for (int64_t k = 0; k < g->k; k++)
                s += at(g->ab, g->a, g->lda, g->ta, i, k) * at(g->ab, g->b, g->ldb, g->tb, k, j);
            lm_set(g->cd, g->c, i * g->ldc + j, g->bias ? s + (double)g->bias[j] : s);
        }
        if (g->a_sum) {
            double s = g->a_sum_add ? (double)g->a_sum[i] : 0;
            for (int64_t k = 0; k < g->k; k++)
                s += at(g->ab, g->a, g->lda, g->ta, i, k);
            g->a_sum[i] = (float)s;
        }
    }
}

void lm_gemm_ref(const lm_gemm *g, lm_par *par)
{
    job j = { g };

    lm_par_for(par, g->m, 1, rows, &j);
}
