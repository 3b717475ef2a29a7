/* elementwise.cu -- activations and other maps: one read and one write of memory each. */
#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/plane.cuh"

extern "C" {
#include "kernels/elementwise.h"
}

static const int threads = 256;

/* ---- maps over flat arrays ---- */

enum map_op { GELU_TANH, GELU_ERF, GELU_TANH_DX, GELU_ERF_DX, ADD };

/* b is there for operators of two operands. */
template <int OP, class T> __device__ inline float mapped(float a, float b)
{
    switch (OP) {
    case GELU_TANH:
        return gelu_tanh<T>(a);
    case GELU_ERF:
        return gelu_erf(a);
    case GELU_TANH_DX:
        return a * gelu_tanh_slope<T>(b);
    case GELU_ERF_DX:
        return a * gelu_erf_slope<T>(b);
    default:
        return a + b;
    }
}

/* y may be a or b: a thread writes what it alone has read.  Several packs are in flight at once. */
template <int OP, class T, int N> __global__ void map(int64_t count, const T *a, const T *b, T *y)
{
    typedef pack<T, N> part;
    const bool two = OP >= GELU_TANH_DX;
    const int U = two ? 2 : 4;
    int64_t packed = count / N, step = global_threads();
#pragma unroll 1
    for (int64_t i = global_thread(); i < packed; i += U * step) {
        part u[U] = {}, v[U] = {};
#pragma unroll
        for (int k = 0; k < U; k++) {
            if (i + k * step < packed) {
                u[k] = ((const part *)a)[i + k * step];
                if (two)
                    v[k] = ((const part *)b)[i + k * step];
            }
        }
#pragma unroll
        for (int k = 0; k < U; k++) {
#pragma unroll
            for (int j = 0; j < N; j++)
                u[k].v[j] = from_float<T>(mapped<OP, T>(to_float(u[k].v[j]), to_float(v[k].v[j])));
            if (i + k * step < packed)
                ((part *)y)[i + k * step] = u[k];
        }
    }
#pragma unroll 1
    for (int64_t i = packed * N + global_thread(); i < count; i += step)
        y[i] = from_float<T>(mapped<OP, T>(to_float(a[i]), two ? to_float(b[i]) : 0.0f));
}

template <int OP, class T> static void run_map(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t count = lm_tensor_count(&c->in[0]);
    const T *a = in_ptr<const T>(c, 0), *b = in_ptr<const T>(c, 1);
    T *y = out_ptr<T>(c, 0);
    if (packs<T>(n, n, a, b, y))
        LM_LAUNCH((map<OP, T, n>), grid_for(count, 4 * n * threads, c->stream), threads, 0,
                  c->stream, count, a, b, y);
    else
        LM_LAUNCH((map<OP, T, 1>), grid_for(count, 4 * threads, c->stream), threads, 0, c->stream,
                  count, a, b, y);
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

/* ---- swiglu ---- */

template <class T, int N>
__global__ void swiglu_kernel(int64_t rows, int64_t width, const T *gu, T *h)
{
    typedef pack<T, N> part;
#pragma unroll 1
    for (int64_t r = plane_row(); r < rows; r += plane_rows()) {
#pragma unroll 1
        for (int64_t i = plane_col() * N; i < width; i += plane_cols() * N) {
            part g = *(const part *)(gu + 2 * r * width + i);
            part u = *(const part *)(gu + (2 * r + 1) * width + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = to_float(g.v[j]);
                g.v[j] = from_float<T>(over<T>(x, 1 + exp_for<T>(-x)) * to_float(u.v[j]));
            }
            *(part *)(h + r * width + i) = g;
        }
    }
}

template <class T, int N>
__global__ void swiglu_dx_kernel(int64_t rows, int64_t width, const T *dh, const T *gu, T *dgu)
{
    typedef pack<T, N> part;
#pragma unroll 1
    for (int64_t r = plane_row(); r < rows; r += plane_rows()) {
#pragma unroll 1
        for (int64_t i = plane_col() * N; i < width; i += plane_cols() * N) {
            int64_t gate = 2 * r * width + i, up = gate + width;
            part d = *(const part *)(dh + r * width + i);
            part g = *(const part *)(gu + gate), u = *(const part *)(gu + up);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = to_float(g.v[j]), y = to_float(u.v[j]), dy = to_float(d.v[j]);
                float s = sigmoid<T>(x);
                g.v[j] = from_float<T>(dy * y * s * fmaf(x, 1 - s, 1));
                u.v[j] = from_float<T>(dy * x * s);
            }
            *(part *)(dgu + gate) = g;
            *(part *)(dgu + up) = u;
        }
    }
}

template <class T> static void swiglu(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t rows = rows_of(&c->out[0]), width = width_of(&c->out[0]);
    const T *gu = in_ptr<const T>(c, 0);
    T *h = out_ptr<T>(c, 0);
    bool wide_rows = packs<T>(n, width, gu, h);
    plane p = plane_for(rows, wide_rows ? width / n : width, c->stream);
    if (wide_rows)
        LM_LAUNCH((swiglu_kernel<T, n>), p.grid, p.block, 0, c->stream, rows, width, gu, h);
    else
        LM_LAUNCH((swiglu_kernel<T, 1>), p.grid, p.block, 0, c->stream, rows, width, gu, h);
}

template <class T> static void swiglu_dx(const lm_call *c)
{
    const int n = wide<T>::n;
    int64_t rows = rows_of(&c->in[0]), width = width_of(&c->in[0]);
    const T *dh = in_ptr<const T>(c, 0), *gu = in_ptr<const T>(c, 1);
    T *dgu = out_ptr<T>(c, 0);
    bool wide_rows = packs<T>(n, width, dh, gu, dgu);
    plane p = plane_for(rows, wide_rows ? width / n : width, c->stream);
    if (wide_rows)
        LM_LAUNCH((swiglu_dx_kernel<T, n>), p.grid, p.block, 0, c->stream, rows, width, dh, gu,
                  dgu);
    else
        LM_LAUNCH((swiglu_dx_kernel<T, 1>), p.grid, p.block, 0, c->stream, rows, width, dh, gu,
                  dgu);
}

/* ---- dropout ---- */

template <class T> __device__ inline T kept(T x, uint32_t draw, uint64_t threshold, float scale)
{
    return from_float<T>(draw >= threshold ? to_float(x) * scale : 0.0f);
}

/* A thread takes the four elements of one block of draws; the first block may begin before the
 * mask, and the last go on behind it. */
template <class T>
__global__ void dropout_any(int64_t count, uint64_t hi, uint64_t threshold, float scale,
                            const lm_step *run, const T *x, T *y)
{
    uint64_t base = dropout_base(run, (uint64_t)count), key = run->seed;
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

/* count is a multiple of N, and with it the mask's first index. */
template <class T, int N>
__global__ void dropout_packed(int64_t count, uint64_t hi, uint64_t threshold, float scale,
                               const lm_step *run, const T *x, T *y)
{
    typedef pack<T, N> part;
    uint64_t base = dropout_base(run, (uint64_t)count), key = run->seed;
#pragma unroll 1
    for (int64_t i = global_thread() * N; i < count; i += global_threads() * N) {
        part v = *(const part *)(x + i);
#pragma unroll
        for (int k = 0; k < N / 4; k++) {
            draws4 d = philox((base + (uint64_t)i) / 4 + (uint64_t)k, hi, key);
#pragma unroll
            for (int j = 0; j < 4; j++)
                v.v[4 * k + j] = kept(v.v[4 * k + j], d.v[j], threshold, scale);
        }
        *(part *)(y + i) = v;
    }
}

template <class T> static void dropout(const lm_call *c)
{
    const int n = wide<T>::n;
    const lm_dropout_attr *a = (const lm_dropout_attr *)c->attr;
    int64_t count = lm_tensor_count(&c->in[0]);
    uint64_t hi = rng_hi("dropout", (uint64_t)a->site), threshold = dropout_threshold(a->p);
    float scale = (float)(1 / (1 - a->p));
    const T *x = in_ptr<const T>(c, 0);
    T *y = out_ptr<T>(c, 0);
    const lm_stream *s = c->stream;
    if (packs<T>(n, count, x, y))
        LM_LAUNCH((dropout_packed<T, n>), grid_for(count, n * threads, s), threads, 0, s, count, hi,
                  threshold, scale, s->step, x, y);
    else
        LM_LAUNCH((dropout_any<T>), grid_for(count, 4 * threads, s), threads, 0, s, count, hi,
                  threshold, scale, s->step, x, y);
}

/* ---- cast ---- */

template <class F, class T> __device__ inline T cast_to(F x)
{
    return from_float<T>(to_float(x));
}

template <class F, class T, int N> __global__ void cast_kernel(int64_t count, const F *x, T *y)
{
    typedef pack<F, N> from;
    typedef pack<T, N> to;
    const int U = 4;
    int64_t packed = count / N, step = global_threads();
#pragma unroll 1
    for (int64_t i = global_thread(); i < packed; i += U * step) {
        from u[U] = {};
#pragma unroll
        for (int k = 0; k < U; k++)
            if (i + k * step < packed)
                u[k] = ((const from *)x)[i + k * step];
#pragma unroll
        for (int k = 0; k < U; k++) {
            to v;
#pragma unroll
            for (int j = 0; j < N; j++)
                v.v[j] = cast_to<F, T>(u[k].v[j]);
            if (i + k * step < packed)
                ((to *)y)[i + k * step] = v;
        }
    }
#pragma unroll 1
    for (int64_t i = packed * N + global_thread(); i < count; i += step)
        y[i] = cast_to<F, T>(x[i]);
}

template <class F, class T> static void run_cast(const lm_call *c)
{
    const int n = wide<F>::n < wide<T>::n ? wide<F>::n : wide<T>::n;
    int64_t count = lm_tensor_count(&c->in[0]);
    const F *x = in_ptr<const F>(c, 0);
    T *y = out_ptr<T>(c, 0);
    if (packs<F>(n, n, x) && packs<T>(n, n, y))
        LM_LAUNCH((cast_kernel<F, T, n>), grid_for(count, 4 * n * threads, c->stream), threads, 0,
                  c->stream, count, x, y);
    else
        LM_LAUNCH((cast_kernel<F, T, 1>), grid_for(count, 4 * threads, c->stream), threads, 0,
                  c->stream, count, x, y);
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
#pragma unroll 1
    for (int64_t r = plane_row(); r < n_rows; r += plane_rows()) {
        const T *from = x + (int64_t)idx[r] * width;
#pragma unroll 1
        for (int64_t i = plane_col() * N; i < width; i += plane_cols() * N)
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
    plane p = plane_for(n_rows, wide_rows ? width / n : width, c->stream);
    if (wide_rows)
        LM_LAUNCH((rows_kernel<T, n>), p.grid, p.block, 0, c->stream, n_rows, width, x, idx, y);
    else
        LM_LAUNCH((rows_kernel<T, 1>), p.grid, p.block, 0, c->stream, n_rows, width, x, idx, y);
}

extern "C" const lm_kernel lm_elementwise_cuda_kernels[] = {
    LM_CUDA_ROWS("gelu", gelu, nullptr),
    LM_CUDA_ROWS("gelu_dx", gelu_dx, nullptr),
    LM_CUDA_ROWS("swiglu", swiglu, nullptr),
    LM_CUDA_ROWS("swiglu_dx", swiglu_dx, nullptr),
    LM_CUDA_ROWS("add", add, nullptr),
    LM_CUDA_ROWS("dropout", dropout, nullptr),
    LM_CUDA_ROWS("cast", cast, nullptr),
    LM_CUDA_ROWS("rows", rows, nullptr),
    LM_CUDA_END
};
