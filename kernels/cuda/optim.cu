/* SPDX-License-Identifier: Apache-2.0 */
/* optim.cu -- optimiser steps in one pass over memory, and sums in a fixed order. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/optim.h"
}

static const int threads = 256;

/* ---- steps ---- */

struct clip_rule {
    const double *sumsq, *watch; /* null: not given */
    double norm;
    float bound;
};

static clip_rule clip_of(const lm_call *c, double norm, double value)
{
    return clip_rule{ in_ptr<const double>(c, 1), in_ptr<const double>(c, 2), norm,
                      value > 0 ? (float)value : INFINITY };
}

/* The factor for gradients; NAN: nothing may be written. */
__device__ inline double exact_scale(const clip_rule *r)
{
    double norm = r->sumsq ? sqrt(*r->sumsq) : 0, watch = r->watch ? *r->watch : 0;
    if (!isfinite(norm) || !isfinite(watch))
        return NAN;
    return r->norm > 0 && r->sumsq ? fmin(1.0, r->norm / (norm + 1e-6)) : 1;
}

__device__ inline float clip_scale(const clip_rule *r)
{
    return (float)exact_scale(r);
}

__global__ void clip_kernel(clip_rule r, double *out)
{
    *out = exact_scale(&r);
}

static void clip(const lm_call *c)
{
    clip_rule r = { in_ptr<const double>(c, 0), in_ptr<const double>(c, 1),
                    ((const lm_clip_attr *)c->attr)->clip_norm, 0 };
    LM_LAUNCH(clip_kernel, 1, 1, 0, c->stream, r, out_ptr<double>(c, 0));
}

/* A NaN is kept. */
__device__ inline float clipped(float g, float scale, float bound)
{
    g *= scale;
    return g > bound ? bound : g < -bound ? -bound : g;
}

struct adamw_job {
    const float *g;
    float *p, *m, *v;
    bf16 *copy;
    float beta1, beta2, one_beta1, one_beta2; /* one_beta = 1 - beta, made in double */
    float eps;
    double lr, bc1, bc2, weight_decay;
    const double *now; /* lr, bc1, bc2; null: the above */
};

/* What follows from the numbers of a step. */
struct adamw_rates {
    float scale, step, decay, inv_bc2; /* step = lr / bc1, decay = lr * weight decay */
};

__device__ inline adamw_rates rates_of(const adamw_job *j)
{
    double lr = j->now ? j->now[0] : j->lr, bc1 = j->now ? j->now[1] : j->bc1;
    double bc2 = j->now ? j->now[2] : j->bc2;
    adamw_rates r = {};
    r.step = (float)(lr / bc1);
    r.decay = (float)(lr * j->weight_decay);
    r.inv_bc2 = (float)(1 / bc2);
    return r;
}

struct sgd_job {
    const float *g;
    float *p, *m;
    bf16 *copy;
    float decay, momentum, fresh; /* buf = momentum buf + fresh d */
    bool nesterov, first;
    double lr;
    const double *now; /* lr, first; null: the above */
};

struct sgd_rates {
    float scale, lr;
    bool first;
};

__device__ inline sgd_rates rates_of(const sgd_job *j)
{
    sgd_rates r = {};
    r.lr = (float)(j->now ? j->now[0] : j->lr);
    r.first = j->now ? j->now[1] != 0 : j->first;
    return r;
}

template <int N> __device__ inline void put_copy(bf16 *copy, int64_t i, const pack<float, N> *p)
{
    pack<bf16, N> low;
#pragma unroll
    for (int k = 0; k < N; k++)
        low.v[k] = from_float<bf16>(p->v[k]);
    *(pack<bf16, N> *)(copy + i) = low;
}

template <int N>
__device__ inline void step_at(const adamw_job *j, const adamw_rates *r, int64_t i, float bound)
{
    typedef pack<float, N> part;
    part g = *(const part *)(j->g + i), p = *(part *)(j->p + i);
    part m = *(part *)(j->m + i), v = *(part *)(j->v + i);
#pragma unroll
    for (int k = 0; k < N; k++) {
        float x = clipped(g.v[k], r->scale, bound);
        m.v[k] = fmaf(j->one_beta1, x, j->beta1 * m.v[k]);
        v.v[k] = fmaf(j->one_beta2 * x, x, j->beta2 * v.v[k]);
        float move = r->step * m.v[k] / (sqrtf(v.v[k] * r->inv_bc2) + j->eps);
        p.v[k] -= fmaf(r->decay, p.v[k], move);
    }
    *(part *)(j->m + i) = m;
    *(part *)(j->v + i) = v;
    *(part *)(j->p + i) = p;
    if (j->copy)
        put_copy<N>(j->copy, i, &p);
}

template <int N>
__device__ inline void step_at(const sgd_job *j, const sgd_rates *r, int64_t i, float bound)
{
    typedef pack<float, N> part;
    part g = *(const part *)(j->g + i), p = *(part *)(j->p + i), b = {};
    if (j->m && !r->first)
        b = *(part *)(j->m + i);
#pragma unroll
    for (int k = 0; k < N; k++) {
        float d = fmaf(j->decay, p.v[k], clipped(g.v[k], r->scale, bound));
        if (j->m) {
            b.v[k] = r->first ? d : fmaf(j->fresh, d, j->momentum * b.v[k]);
            d = j->nesterov ? fmaf(j->momentum, b.v[k], d) : b.v[k];
        }
        p.v[k] = fmaf(-r->lr, d, p.v[k]);
    }
    if (j->m)
        *(part *)(j->m + i) = b;
    *(part *)(j->p + i) = p;
    if (j->copy)
        put_copy<N>(j->copy, i, &p);
}

/* One thread of a block does the arithmetic in double, which some GPUs are slow at. */
template <class J, class R, int N>
__global__ void __launch_bounds__(threads) step_kernel(J job, clip_rule rule, int64_t count)
{
    __shared__ R of_step;
    int64_t packed = count / N;
    if (threadIdx.x == 0) {
        R r = rates_of(&job);
        r.scale = clip_scale(&rule);
        of_step = r;
    }
    __syncthreads();
    R rates = of_step;
    if (isnan(rates.scale))
        return;
#pragma unroll 1
    for (int64_t i = global_thread(); i < packed; i += global_threads())
        step_at<N>(&job, &rates, i * N, rule.bound);
#pragma unroll 1
    for (int64_t i = packed * N + global_thread(); i < count; i += global_threads())
        step_at<1>(&job, &rates, i, rule.bound);
}

template <class J, class R>
static void run_step(const lm_call *c, const J *j, const float *other, const clip_rule *r)
{
    int64_t count = lm_tensor_count(&c->in[0]);
    if (packs<float>(4, 4, j->g, j->p, j->m, other) && packs<bf16>(4, 4, j->copy))
        LM_LAUNCH((step_kernel<J, R, 4>), grid_for(count, 4 * threads, c->stream), threads, 0,
                  c->stream, *j, *r, count);
    else
        LM_LAUNCH((step_kernel<J, R, 1>), grid_for(count, threads, c->stream), threads, 0,
                  c->stream, *j, *r, count);
}

static void adamw(const lm_call *c)
{
    const lm_adamw_attr *a = (const lm_adamw_attr *)c->attr;
    adamw_job j = {};
    j.g = in_ptr<const float>(c, 0);
    j.p = out_ptr<float>(c, 0);
    j.m = out_ptr<float>(c, 1);
    j.v = out_ptr<float>(c, 2);
    j.copy = out_ptr<bf16>(c, 3);
    j.beta1 = (float)a->beta1;
    j.beta2 = (float)a->beta2;
    j.one_beta1 = (float)(1 - a->beta1);
    j.one_beta2 = (float)(1 - a->beta2);
    j.eps = (float)a->eps;
    j.lr = a->lr;
    j.bc1 = a->bc1;
    j.bc2 = a->bc2;
    j.weight_decay = a->weight_decay;
    j.now = in_ptr<const double>(c, 3);
    clip_rule r = clip_of(c, a->clip_norm, a->clip_value);
    run_step<adamw_job, adamw_rates>(c, &j, j.v, &r);
}

static void sgd(const lm_call *c)
{
    const lm_sgd_attr *a = (const lm_sgd_attr *)c->attr;
    sgd_job j = {};
    j.g = in_ptr<const float>(c, 0);
    j.p = out_ptr<float>(c, 0);
    j.m = out_ptr<float>(c, 1);
    j.copy = out_ptr<bf16>(c, 2);
    j.lr = a->lr;
    j.now = in_ptr<const double>(c, 3);
    j.decay = (float)a->weight_decay;
    j.momentum = (float)a->momentum;
    j.fresh = (float)(1 - a->dampening);
    j.nesterov = a->nesterov;
    j.first = a->first;
    clip_rule r = clip_of(c, a->clip_norm, a->clip_value);
    run_step<sgd_job, sgd_rates>(c, &j, nullptr, &r);
}

/* ---- sums in double ---- */

/* One block of threads for each block of elements; sums of everything then add these in one block of threads. */

template <bool SQUARE> __device__ inline double term(float x)
{
    return SQUARE ? (double)x * x : (double)x;
}

template <bool SQUARE, int N> __device__ inline double sum_of(const float *from, int n)
{
    typedef pack<float, N> piece;
    const int U = 4, pitch = threads * N;
    int i = (int)threadIdx.x * N;
    double sum[N] = {};
#pragma unroll 1
    for (; i + N <= n; i += U * pitch) {
        piece v[U] = {};
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u * pitch + N <= n)
                v[u] = *(const piece *)(from + i + u * pitch);
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int k = 0; k < N; k++)
                sum[k] += term<SQUARE>(v[u].v[k]);
    }
    int rest = n / N * N + (int)threadIdx.x; /* fewer than N elements */
    if (rest < n)
        sum[0] += term<SQUARE>(from[rest]);
    for (int k = 1; k < N; k++)
        sum[0] += sum[k];
    return block_sum(sum[0]);
}

template <int N>
__global__ void __launch_bounds__(threads) total_parts(int64_t count, const float *x, double *part)
{
    int64_t blocks = (count + LM_SUM_BLOCK - 1) / LM_SUM_BLOCK;
#pragma unroll 1
    for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
        int64_t left = count - b * LM_SUM_BLOCK;
        double all = sum_of<false, N>(x + b * LM_SUM_BLOCK,
                                      left < LM_SUM_BLOCK ? (int)left : (int)LM_SUM_BLOCK);
        if (threadIdx.x == 0)
            part[b] = all;
    }
}

/* A block that does not begin at a multiple of four elements is read one by one. */
__global__ void __launch_bounds__(threads)
    sumsq_parts(int64_t blocks, const float *x, const lm_sum_block *block, double *s)
{
#pragma unroll 1
    for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
        const float *from = x + (int64_t)block[b].page * LM_SUM_BLOCK + block[b].first;
        double all = (uintptr_t)from % 16 ? sum_of<true, 1>(from, block[b].count)
                                          : sum_of<true, 4>(from, block[b].count);
        if (threadIdx.x == 0 && block[b].count)
            s[block[b].place] = all;
    }
}

/* A thread adds its parts in order, several in flight at once. */
__global__ void __launch_bounds__(threads)
    sum_all(int64_t parts, const double *part, const double *more, double *out)
{
    const int U = 8;
    double sum = 0;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < parts; i += U * threads) {
        double v[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            v[u] = i + u * threads < parts ? part[i + u * threads] : 0;
#pragma unroll
        for (int u = 0; u < U; u++)
            sum += v[u];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *out = more ? *more + sum : sum;
}

static int64_t sum_blocks(const lm_call *c)
{
    return (lm_tensor_count(&c->in[0]) + LM_SUM_BLOCK - 1) / LM_SUM_BLOCK;
}

static size_t sum_work(const lm_call *c, int)
{
    return (size_t)sum_blocks(c) * sizeof(double);
}

static void add_parts(const lm_call *c, int64_t n, const double *part)
{
    double *out = out_ptr<double>(c, 0);
    LM_LAUNCH(sum_all, 1, threads, 0, c->stream, n, part, c->step->more ? out : nullptr, out);
}

static void total(const lm_call *c)
{
    int64_t count = lm_tensor_count(&c->in[0]), blocks = sum_blocks(c);
    if (c->in[0].dtype == LM_DTYPE_F64) { /* few: sums of blocks */
        add_parts(c, count, in_ptr<const double>(c, 0));
        return;
    }
    const float *x = in_ptr<const float>(c, 0);
    double *part = (double *)c->work;
    unsigned grid = grid_for(blocks, 1, c->stream);
    if (packs<float>(4, 4, x))
        LM_LAUNCH(total_parts<4>, grid, threads, 0, c->stream, count, x, part);
    else
        LM_LAUNCH(total_parts<1>, grid, threads, 0, c->stream, count, x, part);
    add_parts(c, blocks, part);
}

static void sumsq(const lm_call *c)
{
    int64_t blocks = c->in[1].dim[0];
    cudaMemsetAsync(c->out[0].data, 0, (size_t)lm_tensor_count(&c->out[0]) * sizeof(double),
                    c->stream->handle);
    LM_LAUNCH(sumsq_parts, grid_for(blocks, 1, c->stream), threads, 0, c->stream, blocks,
              in_ptr<const float>(c, 0), in_ptr<const lm_sum_block>(c, 1), out_ptr<double>(c, 0));
}

/* ---- strided ---- */

__global__ void strided_kernel(int64_t count, int64_t stride, const float *x, float *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        y[i] = x[i * stride];
}

static void strided(const lm_call *c)
{
    int64_t count = lm_tensor_count(&c->out[0]);
    LM_LAUNCH(strided_kernel, grid_for(count, threads, c->stream), threads, 0, c->stream, count,
              ((const lm_strided_attr *)c->attr)->stride, in_ptr<const float>(c, 0),
              out_ptr<float>(c, 0));
}

#define ROW(op, fn, work)                         \
    {                                             \
        op, LM_DTYPE_F32, LM_CUDA_PLAIN, fn, work \
    }
extern "C" const lm_kernel lm_optim_cuda_kernels[] = { ROW("adamw", adamw, nullptr),
                                                       ROW("sgd", sgd, nullptr),
                                                       ROW("sumsq", sumsq, nullptr),
                                                       ROW("total", total, sum_work),
                                                       ROW("strided", strided, nullptr),
                                                       ROW("clip", clip, nullptr),
                                                       LM_CUDA_END };
