/* SPDX-License-Identifier: Apache-2.0 */
/* divergence.cu -- the divergence of two heads: a chunk of rows at a time, logits of both by products; one block a row
 * turns them into the loss or, behind both, into the gradient of the student's logits. */
#include <float.h>

#include "kernels/cuda/gemm.cuh"

extern "C" {
#include "kernels/divergence.h"
}

static const int threads = 256;

/* Rows begin at 128 bytes. */
static int64_t pitch_of(const lm_call *c)
{
    return (((const lm_divergence_attr *)c->attr)->vocab + 31) / 32 * 32;
}

struct row_args {
    float *s, *t; /* logits */
    int64_t pitch, vocab, rows;
    const int32_t *target;
    const float *scale;                      /* of the gradient */
    float *loss;                             /* null: the gradient is made */
    float beta, cold, soft_cap, teacher_cap; /* cold: 1 / temperature */
};

/* Logits to capped and divided ones in place; returns the log of the sum of their exponentials, and *top. */
static __device__ inline float log_sum(float *z, int64_t vocab, float cap, float cold, float *top)
{
    float most = -FLT_MAX, sum = 0, bad = 0;
    for (int64_t v = threadIdx.x; v < vocab; v += threads) {
        float x = (cap > 0 ? cap * tanhf(z[v] / cap) : z[v]) * cold;
        bad += x - x;
        most = fmaxf(most, x);
        z[v] = x;
    }
    *top = most = block_max(most);
    for (int64_t v = threadIdx.x; v < vocab; v += threads)
        sum += expf(z[v] - most);
    sum = block_sum(sum);
    return block_sum(bad) == 0 ? logf(sum) : NAN;
}

/* A word's part of the loss, and g of the gradient; of logs of both shares. */
static __device__ inline float part_of(float beta, float ls, float lt, float *g)
{
    float p = expf(ls), q = expf(lt);
    if (beta <= 0) {
        *g = -q;
        return q > 0 ? q * (lt - ls) : q;
    }
    if (beta >= 1) {
        *g = p > 0 ? ls - lt : p;
        return p * *g;
    }
    float m = logf(fmaxf((1 - beta) * p + beta * q, FLT_MIN));
    *g = p > 0 ? (1 - beta) * (ls - m) : p;
    return p * *g + (q > 0 ? beta * q * (lt - m) : q);
}

template <class T>
static __global__ void __launch_bounds__(threads) rows_kernel(row_args a, T *grad)
{
    for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x) {
        float *s = a.s + n * a.pitch, *t = a.t + n * a.pitch, top_s, top_t, loss = 0, mean = 0;
        const bool counts = a.target[n] >= 0;
        if (!counts) {
            if (a.loss && threadIdx.x == 0)
                a.loss[n] = 0;
            for (int64_t v = threadIdx.x; !a.loss && v < a.vocab; v += threads)
                grad[n * a.pitch + v] = from_float<T>(0);
            continue;
        }
        float lse_s = log_sum(s, a.vocab, a.soft_cap, a.cold, &top_s);
        float lse_t = log_sum(t, a.vocab, a.teacher_cap, a.cold, &top_t);
        for (int64_t v = threadIdx.x; v < a.vocab; v += threads) {
            float ls = s[v] - top_s - lse_s, g;
            loss += part_of(a.beta, ls, t[v] - top_t - lse_t, &g);
            mean += expf(ls) * g;
            t[v] = g;
        }
        loss = block_sum(loss);
        mean = block_sum(mean);
        if (a.loss && threadIdx.x == 0)
            a.loss[n] = loss;
        for (int64_t v = threadIdx.x; !a.loss && v < a.vocab; v += threads) {
            float p = expf(s[v] - top_s - lse_s);
            float u = a.soft_cap > 0 ? s[v] / a.cold / a.soft_cap : 0;
            float d = a.beta <= 0 ? p + t[v] : p * (t[v] - mean);
            grad[n * a.pitch + v] = from_float<T>(a.scale[n] * a.cold * d * fmaf(-u, u, 1.0f));
        }
    }
}

/* ---- chunks ---- */

struct room {
    int64_t chunk;
    size_t t, grad, products; /* bytes before them; the student's logits come first */
};

static size_t align_up(size_t n)
{
    return (n + 255) & ~(size_t)255;
}

static room room_of(const lm_call *c)
{
    room r;
    int64_t pitch = pitch_of(c);
    r.chunk = lm_divergence_chunk(c->in[0].dim[0], pitch);
    r.t = align_up((size_t)(r.chunk * pitch) * sizeof(float));
    r.grad = 2 * r.t;
    r.products = r.grad + align_up((size_t)(r.chunk * pitch) * lm_dtype_size(c->in[0].dtype));
    return r;
}

static gemm_call logits_of(const lm_call *c, int in, int64_t first, int64_t m, void *z, void *work)
{
    const lm_tensor *x = &c->in[in];
    gemm_call g = {};
    int64_t cols = x->dim[1];
    g.m = m, g.n = ((const lm_divergence_attr *)c->attr)->vocab, g.k = cols;
    g.ab = x->dtype, g.cd = LM_DTYPE_F32, g.tb = true;
    g.a = x->data ? (const char *)x->data + first * cols * (int64_t)lm_dtype_size(x->dtype) : NULL;
    g.b = c->in[in + 1].data, g.b_codes = c->in[in + 1].codes;
    g.lda = g.ldb = cols;
    g.c = z, g.ldc = pitch_of(c), g.work = work;
    return g;
}

static gemm_call dx_of(const lm_call *c, int64_t first, int64_t m, const void *d, void *work)
{
    gemm_call g = {};
    int64_t cols = c->in[0].dim[1];
    char *dx = out_ptr<char>(c, 0);
    g.m = m, g.n = cols, g.k = ((const lm_divergence_attr *)c->attr)->vocab;
    g.ab = g.cd = c->in[0].dtype;
    g.a = d, g.lda = pitch_of(c);
    g.b = c->in[1].data, g.ldb = cols, g.b_codes = c->in[1].codes;
    g.c = dx ? dx + first * cols * (int64_t)lm_dtype_size(g.ab) : dx;
    g.ldc = cols, g.work = work;
    return g;
}

static gemm_call dw_of(const lm_call *c, int64_t first, int64_t m, const void *d, void *work)
{
    const lm_divergence_attr *a = (const lm_divergence_attr *)c->attr;
    const lm_tensor *x = &c->in[0];
    gemm_call g = {};
    int64_t cols = x->dim[1];
    g.m = a->vocab, g.n = cols, g.k = m;
    g.ab = x->dtype, g.cd = LM_DTYPE_F32, g.ta = true;
    g.accumulate = first > 0 || (c->step && !overwrites(c, a->acc));
    g.a = d, g.lda = pitch_of(c);
    g.b = x->data ? (const char *)x->data + first * cols * (int64_t)lm_dtype_size(x->dtype) : NULL;
    g.ldb = cols;
    g.c = out_ptr<void>(c, 1), g.ldc = cols, g.work = work;
    return g;
}

template <class T> static void run(const lm_call *c, bool grad)
{
    const lm_divergence_attr *a = (const lm_divergence_attr *)c->attr;
    int64_t rows = c->in[0].dim[0];
    room at = room_of(c);
    char *z = (char *)align_up((size_t)c->work), *work = z + at.products;
    for (int64_t first = 0; first < rows; first += at.chunk) {
        int64_t m = rows - first < at.chunk ? rows - first : at.chunk;
        gemm_call student = logits_of(c, 0, first, m, z, work);
        gemm_call teacher = logits_of(c, 2, first, m, z + at.t, work);
        row_args r = {};
        r.s = (float *)z, r.t = (float *)(z + at.t);
        r.pitch = pitch_of(c), r.vocab = a->vocab, r.rows = m;
        r.target = in_ptr<int32_t>(c, 4) + first;
        r.scale = grad ? in_ptr<float>(c, 5) + first : nullptr;
        r.loss = grad ? nullptr : out_ptr<float>(c, 0) + first;
        r.beta = (float)a->beta, r.cold = (float)(1 / a->temperature);
        r.soft_cap = (float)a->soft_cap, r.teacher_cap = (float)a->teacher_cap;
        gemm_run(&student, c->stream);
        gemm_run(&teacher, c->stream);
        LM_LAUNCH((rows_kernel<T>), grid_for(m, 1, c->stream), threads, 0, c->stream, r,
                  (T *)(z + at.grad));
        gemm_call dx = dx_of(c, first, m, z + at.grad, work);
        gemm_call dw = dw_of(c, first, m, z + at.grad, work);
        if (grad && out_ptr<void>(c, 0))
            gemm_run(&dx, c->stream);
        if (grad && out_ptr<void>(c, 1))
            gemm_run(&dw, c->stream);
    }
}

template <class T> static void divergence(const lm_call *c)
{
    run<T>(c, false);
}

template <class T> static void divergence_grad(const lm_call *c)
{
    const lm_divergence_attr *a = (const lm_divergence_attr *)c->attr;
    const lm_tensor *w = &c->in[1];
    float *dw = out_ptr<float>(c, 1);
    run<T>(c, true);
    if (dw && overwrites(c, a->acc) && w->dim[0] > a->vocab) /* rows of padding */
        cudaMemsetAsync(dw + a->vocab * w->dim[1], 0,
                        (size_t)((w->dim[0] - a->vocab) * w->dim[1]) * sizeof(float),
                        c->stream->handle);
}

static size_t larger(size_t most, gemm_call g, const lm_stream *s)
{
    size_t n = gemm_work(&g, s);
    return n > most ? n : most;
}

/* 256: scratch is aligned to 64 bytes. */
static size_t work_of(const lm_call *c, bool grad)
{
    room at = room_of(c);
    int64_t rows = c->in[0].dim[0], last = at.chunk ? rows % at.chunk : 0;
    size_t most = 0;
    for (int k = 0; k < 2; k++) { /* whole chunks, and the last one */
        int64_t m = k && last ? last : at.chunk;
        most = larger(most, logits_of(c, 0, 0, m, nullptr, nullptr), c->stream);
        most = larger(most, logits_of(c, 2, 0, m, nullptr, nullptr), c->stream);
        if (grad) {
            most = larger(most, dx_of(c, 0, m, nullptr, nullptr), c->stream);
            most = larger(most, dw_of(c, 0, m, nullptr, nullptr), c->stream);
        }
    }
    return 256 + at.products + most;
}

static size_t divergence_work(const lm_call *c, int)
{
    return work_of(c, false);
}

static size_t grad_work(const lm_call *c, int)
{
    return work_of(c, true);
}

extern "C" const lm_kernel lm_divergence_cuda_kernels[] = {
    LM_CUDA_ROWS("divergence", divergence, divergence_work),
    LM_CUDA_ROWS("divergence_grad", divergence_grad, grad_work),
    LM_CUDA_END,
};
