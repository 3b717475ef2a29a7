/* SPDX-License-Identifier: Apache-2.0 */
/* matmul_simd.c -- products of matrices by lm_gemm_run, batches of them on as many threads, and small ones by loops of
 * their own, since packing would take longer; inverses, a matrix by a thread. */
#include "kernels/matmul.h"

#include "kernels/cpu/invert.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/linear.h"

enum { SMALL_COLS = 128, SMALL_FLOPS = 64 * 64 * 64, SHARE = 32768 };

typedef struct {
    const lm_call *call;
    lm_matmul_sizes s;
    bool turn_a, turn_b;
    lm_gemm gemm;   /* of the first matrices */
    size_t scratch; /* of a worker */
} matmul_job;

static matmul_job job_of(const lm_call *c)
{
    const lm_matmul_attr *attr = c->attr;
    const lm_tensor *a = &c->in[0], *b = &c->in[1];
    matmul_job j = { .call = c, .turn_a = attr->turn_a, .turn_b = attr->turn_b };
    j.s = lm_matmul_sizes_of(attr, a, b);
    if (!j.s.stride_b && j.s.stride_a && !j.turn_a) { /* rows of all matrices with one b */
        j.s.m *= j.s.batch;
        j.s.batch = 1;
    }
    j.gemm = (lm_gemm){
        .m = j.s.m,
        .n = j.s.n,
        .k = j.s.k,
        .ab = a->dtype,
        .cd = c->out[0].dtype,
        .ta = j.turn_a,
        .tb = j.turn_b,
        .a = a->data,
        .b = b->data,
        .c = c->out[0].data,
        .lda = j.turn_a ? j.s.m : j.s.k,
        .ldb = j.turn_b ? j.s.k : j.s.n,
        .ldc = j.s.n,
        .work = c->work,
    };
    j.scratch = (lm_gemm_work(&j.gemm, LM_SIMD_LEVEL, 1) + 63) / 64 * 64;
    return j;
}

static bool is_small(const matmul_job *j)
{
    return j->gemm.ab == LM_DTYPE_F32 && j->s.n <= SMALL_COLS &&
           j->s.m * j->s.n * j->s.k <= SMALL_FLOPS;
}

/* A row of C at a time, kept in registers and the first cache. */
static void multiply_small(const matmul_job *j, const float *a, const float *b, float *c)
{
    int64_t n = j->s.n, b_row = j->turn_b ? 1 : n, b_col = j->turn_b ? j->s.k : 1;
    for (int64_t i = 0; i < j->s.m; i++) {
        float sum[SMALL_COLS] = { 0 };
        for (int64_t k = 0; k < j->s.k; k++) {
            float x = j->turn_a ? a[k * j->s.m + i] : a[i * j->s.k + k];
            const float *row = b + k * b_row;
            if (b_col == 1)
                for (int64_t col = 0; col < n; col++)
                    sum[col] += x * row[col];
            else
                for (int64_t col = 0; col < n; col++)
                    sum[col] += x * row[col * b_col];
        }
        memcpy(c + i * n, sum, (size_t)n * sizeof *c);
    }
}

static lm_gemm matrix_of(const matmul_job *j, int64_t i)
{
    int64_t size = (int64_t)lm_dtype_size(j->gemm.ab);
    lm_gemm g = j->gemm;
    g.a = (const char *)g.a + i * j->s.stride_a * size;
    g.b = (const char *)g.b + i * j->s.stride_b * size;
    g.c = (char *)g.c + i * j->s.m * j->s.n * (int64_t)lm_dtype_size(g.cd);
    return g;
}

static void multiply_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const matmul_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        lm_gemm g = matrix_of(j, i);
        g.work = (char *)j->call->work + (size_t)worker * j->scratch;
        if (is_small(j))
            multiply_small(j, g.a, g.b, g.c);
        else
            lm_gemm_run(&g, LM_SIMD_LEVEL, NULL);
    }
}

static void matmul(const lm_call *c)
{
    matmul_job j = job_of(c);
    int64_t flops = j.s.m * j.s.n * j.s.k, share = SHARE / (flops > 0 ? flops : 1);
    if (is_small(&j) || j.s.batch >= lm_par_threads(c->par)) {
        lm_par_for(c->par, j.s.batch, share > 0 ? share : 1, multiply_span, &j);
        return;
    }
    for (int64_t i = 0; i < j.s.batch; i++) {
        lm_gemm g = matrix_of(&j, i);
        lm_gemm_run(&g, LM_SIMD_LEVEL, c->par);
    }
}

static size_t matmul_work(const lm_call *c, int threads)
{
    matmul_job j = job_of(c);
    size_t together = lm_gemm_work(&j.gemm, LM_SIMD_LEVEL, threads);
    size_t apart = (size_t)threads * j.scratch;
    return together > apart ? together : apart;
}

/* ---- inverse ---- */

typedef struct {
    const lm_call *call;
    int64_t n;
} inverse_job;

static void invert_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const inverse_job *j = ctx;
    const lm_tensor *x = &j->call->in[0];
    int64_t count = j->n * j->n;
    double *from = (double *)j->call->work + 2 * count * worker, *to = from + count;
    for (int64_t at = begin * count; at < end * count; at += count) {
        for (int64_t i = 0; i < count; i++)
            from[i] = lm_get(x->dtype, x->data, at + i);
        lm_invert(from, to, j->n);
        for (int64_t i = 0; i < count; i++)
            lm_set(x->dtype, j->call->out[0].data, at + i, to[i]);
    }
}

static void inverse(const lm_call *c)
{
    inverse_job j = { c, c->in[0].dim[c->in[0].ndim - 1] };
    int64_t count = j.n * j.n;
    lm_par_for(c->par, lm_tensor_count(&c->in[0]) / count, grain_rows(count * j.n), invert_span,
               &j);
}

static size_t inverse_work(const lm_call *c, int threads)
{
    int64_t n = c->in[0].dim[c->in[0].ndim - 1];
    return (size_t)(2 * n * n * threads) * sizeof(double);
}

const lm_kernel LM_TABLE_NAME(matmul, LM_SIMD)[] = {
    VF_KERNEL("matmul", matmul, matmul_work),
    VF_KERNEL("inverse", inverse, inverse_work),
    VF_KERNEL_END,
};
