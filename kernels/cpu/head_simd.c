/* SPDX-License-Identifier: Apache-2.0 */
/* head_simd.c -- vocabulary head and cross-entropy.  For each chunk of rows: logits = x w^T (F32),
 * softmax, loss and the gradient of the logits in place over them, rounded to act, then dx =
 * dlogits w and dw (+)= dlogits^T x.
 *
 * dw is read and written once per chunk (154 MB for 50257 x 768) and the logits once per pass, so
 * chunks are as large as the contract allows; one row of logits fits the second-level cache, so of
 * the three passes over a row only the first waits for memory. */
#include "kernels/head.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/linear.h"

typedef struct {
    const int32_t *target;
    const float *scale;
    float *loss, *z; /* z: rows of logits, `pitch` floats apart */
    int64_t pitch, vocab;
    bool grad;
} softmax_job;

static int64_t chunk_of(const lm_call *c)
{
    const lm_head_attr *a = c->attr;
    int64_t n_rows = row_count(&c->in[0]), quarter = (n_rows + 3) / 4;
    int64_t chunk = quarter > 512 ? quarter : 512;
    if (a->chunk_rows > 0 && a->chunk_rows < chunk)
        chunk = a->chunk_rows;
    if (chunk >= n_rows)
        return n_rows;
    int64_t parts = (n_rows + chunk - 1) / chunk; /* equal chunks, whole tiles of 16 rows */
    int64_t even = ((n_rows + parts - 1) / parts + 15) / 16 * 16;
    return even < chunk ? even : chunk;
}

/* Row pitch in floats: whole lines, and an odd number of them so that a column does not fall on few
 * sets. */
static int64_t pitch_of(int64_t vocab)
{
    return ((vocab + 15) / 16 | 1) * 16;
}

/* exp(d) for d <= 0.  Below -64 it is 0: such a term is lost in the sum of a row a billion times
 * over, and the products made from it would be denormal, which costs a hundred times a normal one.
 */
LM_INLINE vf exp_below(vf d)
{
    vf least = vf_set(-64);
    return vf_if_lt(d, least, vf_zero(), vf_exp(vf_max(least, d)));
}

/* Largest logit and sum of exp(logit - top); NaN anywhere makes the sum NaN. */
LM_INLINE float exp_row(float *z, int64_t vocab, float *top)
{
    vf t0 = vf_set(-INFINITY), t1 = t0;
    int64_t i = 0;
    for (; i + 2 * VF_LANES <= vocab; i += 2 * VF_LANES) {
        t0 = vf_max(vf_load(z + i), t0);
        t1 = vf_max(vf_load(z + i + VF_LANES), t1);
    }
    *top = vf_top(vf_max(t0, t1));
    for (; i < vocab; i++)
        *top = z[i] > *top ? z[i] : *top;
    vf m = vf_set(*top), s0 = vf_zero(), s1 = s0;
    for (i = 0; i + 2 * VF_LANES <= vocab; i += 2 * VF_LANES) {
        vf e0 = exp_below(vf_load(z + i) - m), e1 = exp_below(vf_load(z + i + VF_LANES) - m);
        vf_store(z + i, e0);
        vf_store(z + i + VF_LANES, e1);
        s0 += e0;
        s1 += e1;
    }
    int64_t from = i;
    VF_FOR(k, n, vocab - from, {
        vf e = exp_below(vf_get_any(LM_DTYPE_F32, z, from + k, n) - m);
        if (n < VF_LANES)
            e = vf_keep_n(e, n, vf_zero());
        vf_put_any(LM_DTYPE_F32, z, from + k, e, n);
        s0 += e;
    });
    return vf_sum(s0 + s1);
}

/* Logits of a row -> its loss, and scale (softmax - onehot) in place as `t`. */
LM_INLINE void softmax_row(lm_dtype t, const softmax_job *j, int64_t row)
{
    float *z = j->z + row * j->pitch;
    int64_t target = j->target[row];
    if (target < 0) {
        j->loss[row] = 0;
        if (j->grad)
            memset(z, 0, (size_t)j->vocab * lm_dtype_size(t));
        return;
    }
    float top, picked = z[target], sum = exp_row(z, j->vocab, &top);
    j->loss[row] = (float)((double)top + log((double)sum) - (double)picked);
    if (!j->grad)
        return;
    /* onehot inside the float: e/sum - 1, so that a confident row keeps its small gradient */
    float at_target = j->scale[row] * ((z[target] - sum) / sum);
    vf factor = vf_set(j->scale[row] / sum);
    VF_FOR(i, n, j->vocab, { /* in place: BF16 element i is never ahead of float i */
                             vf e = vf_get_any(LM_DTYPE_F32, z, i, n);
                             vf_put_any(t, z, i, e * factor, n);
    });
    lm_set(t, z, target, at_target);
}

LM_INLINE void softmax_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        softmax_row(t, ctx, row);
}
VF_TYPED(softmax_rows)

/* The three products over rows [first, first + m) of a call. */
typedef struct {
    lm_gemm logits, dx, dw;
} products;

static products plan(const lm_call *c, int64_t first, int64_t m)
{
    const lm_head_attr *a = c->attr;
    lm_dtype t = c->in[0].dtype;
    int64_t n_cols = last_dim(&c->in[0]), pitch = pitch_of(a->vocab);
    int64_t size = (int64_t)lm_dtype_size(t);
    const char *x = c->in[0].data;
    char *dx = opt_data(c->out, c->n_out, 1);
    float *z = c->work, *dw = opt_data(c->out, c->n_out, 2);
    products p = { 0 };
    x = x ? x + first * n_cols * size : NULL;
    p.logits = (lm_gemm){ .m = m,
                          .n = a->vocab,
                          .k = n_cols,
                          .ab = t,
                          .cd = LM_DTYPE_F32,
                          .tb = true,
                          .a = x,
                          .lda = n_cols,
                          .b = c->in[1].data,
                          .ldb = n_cols,
                          .c = z,
                          .ldc = pitch };
    p.dx = (lm_gemm){ .m = m,
                      .n = n_cols,
                      .k = a->vocab,
                      .ab = t,
                      .cd = t,
                      .a = z,
                      .lda = pitch * (t == LM_DTYPE_BF16 ? 2 : 1),
                      .b = c->in[1].data,
                      .ldb = n_cols,
                      .c = dx ? dx + first * n_cols * size : NULL,
                      .ldc = n_cols };
    p.dw = (lm_gemm){ .m = a->vocab,
                      .n = n_cols,
                      .k = m,
                      .ab = t,
                      .cd = LM_DTYPE_F32,
                      .ta = true,
                      .accumulate = first > 0 || !c->step || !overwrites(c, a->acc),
                      .a = z,
                      .lda = p.dx.lda,
                      .b = x,
                      .ldb = n_cols,
                      .c = dw,
                      .ldc = n_cols };
    return p;
}

static size_t logits_bytes(const lm_call *c)
{
    const lm_head_attr *a = c->attr;
    return (size_t)(chunk_of(c) * pitch_of(a->vocab)) * sizeof(float);
}

/* Bytes for w packed for dx, once for all chunks; 0 when that is larger than the logits (wide
 * models) or when there is no gradient to make. */
static size_t packed_bytes(const lm_call *c)
{
    products p = plan(c, 0, chunk_of(c));
    size_t bytes = lm_gemm_pack_size(&p.dx, LM_SIMD_LEVEL);
    bool wanted = c->n_out > 1 && c->out[1].ndim && bytes <= logits_bytes(c);
    return wanted ? (bytes + 63) / 64 * 64 : 0;
}

static size_t head_work(const lm_call *c, int threads)
{
    products p = plan(c, 0, chunk_of(c));
    size_t packed = packed_bytes(c);
    p.dx.b_packed = packed ? &p : NULL; /* any address: only its presence counts here */
    size_t most = lm_gemm_work(&p.logits, LM_SIMD_LEVEL, threads);
    size_t dx = lm_gemm_work(&p.dx, LM_SIMD_LEVEL, threads);
    size_t dw = lm_gemm_work(&p.dw, LM_SIMD_LEVEL, threads);
    most = dx > most ? dx : most;
    most = dw > most ? dw : most;
    return logits_bytes(c) + packed + most;
}

static void run_product(const lm_call *c, lm_gemm *g)
{
    if (!g->c)
        return;
    g->work = (char *)c->work + logits_bytes(c) + packed_bytes(c);
    lm_gemm_run(g, LM_SIMD_LEVEL, c->par);
}

static void head_loss(const lm_call *c)
{
    const lm_head_attr *a = c->attr;
    lm_dtype t = c->in[0].dtype;
    int64_t n_rows = row_count(&c->in[0]), chunk = chunk_of(c);
    bool grad = opt_data(c->out, c->n_out, 1) || opt_data(c->out, c->n_out, 2);
    void *packed = packed_bytes(c) ? (char *)c->work + logits_bytes(c) : NULL;
    if (packed) {
        products p = plan(c, 0, chunk);
        lm_gemm_pack(&p.dx, LM_SIMD_LEVEL, c->par, packed);
    }
    for (int64_t first = 0; first < n_rows; first += chunk) {
        int64_t m = n_rows - first < chunk ? n_rows - first : chunk;
        products p = plan(c, first, m);
        p.dx.b_packed = packed;
        run_product(c, &p.logits);
        softmax_job j = { (const int32_t *)c->in[2].data + first,
                          (const float *)c->in[3].data + first,
                          (float *)c->out[0].data + first,
                          c->work,
                          pitch_of(a->vocab),
                          a->vocab,
                          grad };
        lm_par_for(c->par, m, 4, VF_PICK(softmax_rows, t), &j);
        run_product(c, &p.dx);
        run_product(c, &p.dw);
    }
    const lm_tensor *w = &c->in[1];
    if (opt_data(c->out, c->n_out, 2) && a->vocab < row_count(w) && overwrites(c, a->acc))
        memset((float *)c->out[2].data + a->vocab * last_dim(w), 0,
               (size_t)((row_count(w) - a->vocab) * last_dim(w)) * sizeof(float));
}

const lm_kernel LM_TABLE_NAME(head, LM_SIMD)[] = {
    VF_KERNEL("head_loss", head_loss, head_work),
    VF_KERNEL_END,
};
