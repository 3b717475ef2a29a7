/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise.cu -- activations and other maps: one read and one write of memory each. */
#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/grid2d.cuh"
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/sigmoid.cuh"

extern "C" {
#include "kernels/elementwise.h"
}

static const int threads = 256;

/* ---- flat arrays ---- */

enum map_op { GELU_TANH, GELU_ERF, GELU_TANH_DX, GELU_ERF_DX, ADD };

/* b is set for operators with two operands. */
template <int OP, class T> __device__ inline float mapped(float a, float b)
{
    switch (OP) {
    case GELU_TANH:
        return gelu_tanh<T>(a);
    case GELU_ERF:
        return gelu_erf<T>(a);
    case GELU_TANH_DX:
        return a * gelu_tanh_slope<T>(b);
    case GELU_ERF_DX:
        return a * gelu_erf_slope<T>(b);
    default:
        return a + b;
    }
}

template <int U> struct times {
};

/* A map over `count` elements in packs of N is a job: at(times<U>(), j, i) does the packs i, i +
 * threads, ... (U of them), and reads all before it writes any.  A block takes U of its threads'
 * packs at a time: addresses differ by constants, and no load waits for a comparison.  Elements
 * behind the last pack, fewer than a block has threads, are processed one by one. */
template <int U, int N, class J, class J1>
__device__ inline void over_flat(const J &j, const J1 &single, int64_t count)
{
    const int chunk = U * threads;
    int64_t packed = count / N;
#pragma unroll 1
    for (int64_t first = (int64_t)blockIdx.x * chunk; first < packed;
         first += (int64_t)gridDim.x * chunk) {
        int64_t i = first + threadIdx.x;
        if (first + chunk <= packed) {
            at(times<U>(), j, i);
        } else {
#pragma unroll 1
            for (; i < packed; i += threads)
                at(times<1>(), j, i);
        }
    }
    if (N > 1 && blockIdx.x == 0 && packed * N + threadIdx.x < count)
        at(times<1>(), single, packed * N + threadIdx.x);
}

/* Packs of a thread that are in flight at once. */
static const int flight = 2;

static unsigned flat_grid(const lm_call *c, int n)
{
    return grid_for(lm_tensor_count(&c->in[0]), flight * n * threads, c->stream);
}

/* y may be a or b: each element is read and written by one thread. */
template <int OP, class T, int N> struct map_job {
    const T *a, *b;
    T *y;
};

template <int U, int OP, class T, int N>
__device__ inline void at(times<U>, const map_job<OP, T, N> &job, int64_t i)
{
    typedef pack<T, N> part;
    const bool two = OP >= GELU_TANH_DX;
    const part *a = (const part *)job.a + i, *b = (const part *)job.b + i;
    part *y = (part *)job.y + i, u[U], v[U];
#pragma unroll
    for (int k = 0; k < U; k++) {
        u[k] = a[k * threads];
        v[k] = two ? b[k * threads] : u[k];
    }
#pragma unroll
    for (int k = 0; k < U; k++) {
#pragma unroll
        for (int j = 0; j < N; j++)
            u[k].v[j] = from_float<T>(mapped<OP, T>(to_float(u[k].v[j]), to_float(v[k].v[j])));
        y[k * threads] = u[k];
    }
}

template <int OP, class T, int N>
__global__ void __launch_bounds__(threads) map(int64_t count, const T *a, const T *b, T *y)
{
    over_flat<flight, N>(map_job<OP, T, N>{ a, b, y }, map_job<OP, T, 1>{ a, b, y }, count);
}

template <int OP, class T> static void run_map(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t count = lm_tensor_count(&c->in[0]);
    const T *a = in_ptr<const T>(c, 0), *b = in_ptr<const T>(c, 1);
    T *y = out_ptr<T>(c, 0);
    if (packs<T>(n, n, a, b, y))
        LM_LAUNCH((map<OP, T, n>), flat_grid(c, n), threads, 0, c->stream, count, a, b, y);
    else
        LM_LAUNCH((map<OP, T, 1>), flat_grid(c, 1), threads, 0, c->stream, count, a, b, y);
}

template <class T> static void gelu(const lm_call *c)
{
    if (((const lm_gelu_attr *)c->attr)->exact)
        run_map<GELU_ERF, T>(c);
    else
        run_map<GELU_TANH, T>(c);
}

template <class T> static void gelu_dx(const lm_call *c)
{
    if (((const lm_gelu_attr *)c->attr)->exact)
        run_map<GELU_ERF_DX, T>(c);
    else
        run_map<GELU_TANH_DX, T>(c);
}

template <class T> static void add(const lm_call *c)
{
    run_map<ADD, T>(c);
}

/* ---- swiglu, geglu ---- */

template <class T, int N, bool GELU>
__global__ void pair_kernel(int64_t rows, int64_t width, const T *gu, T *h)
{
    typedef pack<T, N> part;
#pragma unroll 1
    for (int64_t r = grid2d_row(); r < rows; r += grid2d_rows()) {
#pragma unroll 1
        for (int64_t i = grid2d_col() * N; i < width; i += grid2d_cols() * N) {
            part g = *(const part *)(gu + 2 * r * width + i);
            part u = *(const part *)(gu + (2 * r + 1) * width + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = to_float(g.v[j]);
                g.v[j] = from_float<T>((GELU ? gelu_tanh<T>(x) : silu<T>(x)) * to_float(u.v[j]));
            }
            *(part *)(h + r * width + i) = g;
        }
    }
}

template <class T, int N, bool GELU>
__global__ void pair_dx_kernel(int64_t rows, int64_t width, const T *dh, const T *gu, T *dgu)
{
    typedef pack<T, N> part;
#pragma unroll 1
    for (int64_t r = grid2d_row(); r < rows; r += grid2d_rows()) {
#pragma unroll 1
        for (int64_t i = grid2d_col() * N; i < width; i += grid2d_cols() * N) {
            int64_t gate = 2 * r * width + i, up = gate + width;
            part d = *(const part *)(dh + r * width + i);
            part g = *(const part *)(gu + gate), u = *(const part *)(gu + up);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = to_float(g.v[j]), y = to_float(u.v[j]), dy = to_float(d.v[j]);
                if (GELU) {
                    g.v[j] = from_float<T>(dy * y * gelu_tanh_slope<T>(x));
                    u.v[j] = from_float<T>(dy * gelu_tanh<T>(x));
                } else {
                    float s = sigmoid<T>(x);
                    g.v[j] = from_float<T>(dy * y * silu_slope(x, s));
                    u.v[j] = from_float<T>(dy * x * s);
                }
            }
            *(part *)(dgu + gate) = g;
            *(part *)(dgu + up) = u;
        }
    }
}

template <class T, bool GELU> static void run_pairs(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t rows = rows_of(&c->out[0]), width = width_of(&c->out[0]);
    const T *gu = in_ptr<const T>(c, 0);
    T *h = out_ptr<T>(c, 0);
    bool wide_rows = packs<T>(n, width, gu, h);
    grid2d over = grid2d_for(rows, wide_rows ? width / n : width, c->stream);
    if (wide_rows)
        LM_LAUNCH((pair_kernel<T, n, GELU>), over.grid, over.block, 0, c->stream, rows, width, gu,
                  h);
    else
        LM_LAUNCH((pair_kernel<T, 1, GELU>), over.grid, over.block, 0, c->stream, rows, width, gu,
                  h);
}

template <class T, bool GELU> static void run_pairs_dx(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t rows = rows_of(&c->in[0]), width = width_of(&c->in[0]);
    const T *dh = in_ptr<const T>(c, 0), *gu = in_ptr<const T>(c, 1);
    T *dgu = out_ptr<T>(c, 0);
    bool wide_rows = packs<T>(n, width, dh, gu, dgu);
    grid2d over = grid2d_for(rows, wide_rows ? width / n : width, c->stream);
    if (wide_rows)
        LM_LAUNCH((pair_dx_kernel<T, n, GELU>), over.grid, over.block, 0, c->stream, rows, width,
                  dh, gu, dgu);
    else
        LM_LAUNCH((pair_dx_kernel<T, 1, GELU>), over.grid, over.block, 0, c->stream, rows, width,
                  dh, gu, dgu);
}

template <class T> static void swiglu(const lm_call *c)
{
    run_pairs<T, false>(c);
}

template <class T> static void swiglu_dx(const lm_call *c)
{
    run_pairs_dx<T, false>(c);
}

template <class T> static void geglu(const lm_call *c)
{
    run_pairs<T, true>(c);
}

template <class T> static void geglu_dx(const lm_call *c)
{
    run_pairs_dx<T, true>(c);
}

/* ---- soft_cap: y may be x, dx dy ---- */

template <class T> __global__ void soft_cap_kernel(int64_t count, float cap, const T *x, T *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        y[i] = from_float<T>(cap * tanhf(to_float(x[i]) / cap));
}

template <class T>
__global__ void soft_cap_dx_kernel(int64_t count, float cap, const T *dy, const T *x, T *dx)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        float t = tanhf(to_float(x[i]) / cap);
        dx[i] = from_float<T>(to_float(dy[i]) * fmaf(-t, t, 1.0f));
    }
}

template <class T> static void soft_cap(const lm_call *c)
{
    int64_t count = lm_tensor_count(&c->in[0]);
    float cap = (float)((const lm_soft_cap_attr *)c->attr)->cap;
    LM_LAUNCH((soft_cap_kernel<T>), grid_for(count, threads, c->stream), threads, 0, c->stream,
              count, cap, in_ptr<const T>(c, 0), out_ptr<T>(c, 0));
}

template <class T> static void soft_cap_dx(const lm_call *c)
{
    int64_t count = lm_tensor_count(&c->in[0]);
    float cap = (float)((const lm_soft_cap_attr *)c->attr)->cap;
    LM_LAUNCH((soft_cap_dx_kernel<T>), grid_for(count, threads, c->stream), threads, 0, c->stream,
              count, cap, in_ptr<const T>(c, 0), in_ptr<const T>(c, 1), out_ptr<T>(c, 0));
}

/* ---- dropout ---- */

template <class T> __device__ inline T kept(T x, uint32_t draw, uint32_t threshold, float scale)
{
    return from_float<T>(draw >= threshold ? to_float(x) * scale : 0.0f);
}

/* A thread takes the four elements of one block of draws; the first block of draws may begin before
 * the mask, and the last may end after it. */
template <class T>
__global__ void dropout_any(int64_t count, uint64_t hi, uint32_t threshold, float scale,
                            const lm_step *run, const T *x, T *y)
{
    uint64_t base = dropout_base(run, (uint64_t)count, &hi), key = run->seed;
    int64_t skip = (int64_t)(base % 4);
#pragma unroll 1
    for (int64_t b = global_thread(); 4 * b - skip < count; b += global_threads()) {
        draws4 d = philox(base / 4 + (uint64_t)b, hi, key);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int64_t i = 4 * b - skip + j;
            if (i >= 0 && i < count)
                y[i] = kept(x[i], d.v[j], threshold, scale);
        }
    }
}

template <class T>
__global__ void dropout_part(int64_t count, lm_origin origin, uint64_t hi, uint32_t threshold,
                             float scale, const lm_step *run, const T *x, T *y)
{
    over_part(count, origin, hi, run,
              [=](int64_t i, uint32_t draw) { y[i] = kept(x[i], draw, threshold, scale); });
}

/* `base`: the block of the first draw, `key` and `hi`: its stream. */
template <class T, int N> struct dropout_job {
    uint64_t base, hi;
    const philox_keys *key;
    uint32_t threshold;
    float scale;
    const T *x;
    T *y;
};

template <int U, class T, int N>
__device__ inline void at(times<U>, const dropout_job<T, N> &job, int64_t i)
{
    typedef pack<T, N> part;
    const part *x = (const part *)job.x + i;
    part *y = (part *)job.y + i, v[U];
    uint64_t block = job.base + (uint64_t)i * (N / 4);
#pragma unroll
    for (int k = 0; k < U; k++)
        v[k] = x[k * threads];
#pragma unroll
    for (int k = 0; k < U; k++) {
#pragma unroll
        for (int m = 0; m < N; m += 4) {
            draws4 d = philox(block + (uint64_t)(k * threads * (N / 4) + m / 4), job.hi, *job.key);
#pragma unroll
            for (int j = 0; j < 4; j++)
                v[k].v[m + j] = kept(v[k].v[m + j], d.v[j], job.threshold, job.scale);
        }
        y[k * threads] = v[k];
    }
}

/* count is a multiple of N, and with it the mask's first index. */
template <class T, int N>
__global__ void __launch_bounds__(threads)
    dropout_packed(int64_t count, uint64_t hi, uint32_t threshold, float scale, const lm_step *run,
                   const T *x, T *y)
{
    __shared__ philox_keys key;
    if (threadIdx.x < PHILOX_ROUNDS)
        philox_key(&key, (int)threadIdx.x, run->seed);
    __syncthreads();
    uint64_t base = dropout_base(run, (uint64_t)count, &hi);
    dropout_job<T, N> job = { base / 4, hi, &key, threshold, scale, x, y };
    over_flat<flight, N>(job, job, count);
}

template <class T> static void dropout(const lm_call *c)
{
    const int n = wide<T>::n;
    const lm_dropout_attr *a = (const lm_dropout_attr *)c->attr;
    int64_t count = lm_tensor_count(&c->in[0]);
    uint64_t hi = rng_hi("dropout", (uint64_t)a->site);
    uint32_t threshold = (uint32_t)dropout_threshold(a->p); /* p < 1 */
    float scale = (float)(1 / (1 - a->p));
    const T *x = in_ptr<const T>(c, 0);
    T *y = out_ptr<T>(c, 0);
    const lm_stream *s = c->stream;
    if (a->origin.count)
        LM_LAUNCH((dropout_part<T>), grid_for(count, 4 * threads, s), threads, 0, s, count,
                  a->origin, hi, threshold, scale, s->step, x, y);
    else if (packs<T>(n, count, x, y))
        LM_LAUNCH((dropout_packed<T, n>), flat_grid(c, n), threads, 0, s, count, hi, threshold,
                  scale, s->step, x, y);
    else
        LM_LAUNCH((dropout_any<T>), grid_for(count, 4 * threads, s), threads, 0, s, count, hi,
                  threshold, scale, s->step, x, y);
}

/* ---- cast ---- */

template <class F, class T> __device__ inline T cast_to(F x)
{
    return from_float<T>(to_float(x));
}

template <class F, class T, int N> struct cast_job {
    const F *x;
    T *y;
};

template <int U, class F, class T, int N>
__device__ inline void at(times<U>, const cast_job<F, T, N> &job, int64_t i)
{
    const pack<F, N> *x = (const pack<F, N> *)job.x + i;
    pack<T, N> *y = (pack<T, N> *)job.y + i, v;
    pack<F, N> u[U];
#pragma unroll
    for (int k = 0; k < U; k++)
        u[k] = x[k * threads];
#pragma unroll
    for (int k = 0; k < U; k++) {
#pragma unroll
        for (int j = 0; j < N; j++)
            v.v[j] = cast_to<F, T>(u[k].v[j]);
        y[k * threads] = v;
    }
}

template <class F, class T, int N>
__global__ void __launch_bounds__(threads) cast_kernel(int64_t count, const F *x, T *y)
{
    over_flat<2 * flight, N>(cast_job<F, T, N>{ x, y }, cast_job<F, T, 1>{ x, y }, count);
}

template <class F, class T> static void run_cast(const lm_call *c)
{
    const int n = wide<F>::n < wide<T>::n ? wide<F>::n : wide<T>::n;
    int64_t count = lm_tensor_count(&c->in[0]);
    const F *x = in_ptr<const F>(c, 0);
    T *y = out_ptr<T>(c, 0);
    if (packs<F>(n, n, x) && packs<T>(n, n, y))
        LM_LAUNCH((cast_kernel<F, T, n>), flat_grid(c, 2 * n), threads, 0, c->stream, count, x, y);
    else
        LM_LAUNCH((cast_kernel<F, T, 1>), flat_grid(c, 2), threads, 0, c->stream, count, x, y);
}

template <class F> static void cast(const lm_call *c)
{
    if (c->out[0].dtype == LM_DTYPE_F32)
        run_cast<F, float>(c);
    else if (c->out[0].dtype == LM_DTYPE_BF16)
        run_cast<F, bf16>(c);
    else
        run_cast<F, f16>(c);
}

/* ---- rows ---- */

template <class T, int N>
__global__ void rows_kernel(int64_t n_rows, int64_t width, const T *x, const int32_t *idx, T *y)
{
    typedef pack<T, N> part;
    int64_t r = grid2d_row(), at = r < n_rows ? idx[r] : 0;
#pragma unroll 1
    for (; r < n_rows; r += grid2d_rows()) {
        const T *from = x + at * width;
        if (r + grid2d_rows() < n_rows) /* read ahead for the next row */
            at = idx[r + grid2d_rows()];
#pragma unroll 1
        for (int64_t i = grid2d_col() * N; i < width; i += grid2d_cols() * N)
            *(part *)(y + r * width + i) = *(const part *)(from + i);
    }
}

template <class T> static void rows(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t n_rows = rows_of(&c->out[0]), width = width_of(&c->out[0]);
    const T *x = in_ptr<const T>(c, 0);
    const int32_t *idx = in_ptr<const int32_t>(c, 1);
    T *y = out_ptr<T>(c, 0);
    bool wide_rows = packs<T>(n, width, x, y);
    grid2d over = grid2d_for(n_rows, wide_rows ? width / n : width, c->stream);
    if (wide_rows)
        LM_LAUNCH((rows_kernel<T, n>), over.grid, over.block, 0, c->stream, n_rows, width, x, idx,
                  y);
    else
        LM_LAUNCH((rows_kernel<T, 1>), over.grid, over.block, 0, c->stream, n_rows, width, x, idx,
                  y);
}

extern "C" const lm_kernel lm_elementwise_cuda_kernels[] = {
    LM_CUDA_ROWS("gelu", gelu, nullptr),
    LM_CUDA_ROWS("gelu_dx", gelu_dx, nullptr),
    LM_CUDA_ROWS("swiglu", swiglu, nullptr),
    LM_CUDA_ROWS("swiglu_dx", swiglu_dx, nullptr),
    LM_CUDA_ROWS("geglu", geglu, nullptr),
    LM_CUDA_ROWS("geglu_dx", geglu_dx, nullptr),
    LM_CUDA_ROWS("soft_cap", soft_cap, nullptr),
    LM_CUDA_ROWS("soft_cap_dx", soft_cap_dx, nullptr),
    LM_CUDA_ROWS("add", add, nullptr),
    LM_CUDA_ROWS("dropout", dropout, nullptr),
    LM_CUDA_ROWS("cast", cast, nullptr),
    LM_CUDA_ROWS("rows", rows, nullptr),
    LM_CUDA_END
};
