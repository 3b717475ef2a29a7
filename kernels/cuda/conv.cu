/* SPDX-License-Identifier: Apache-2.0 */
/* conv.cu -- short causal convolutions (kernels/conv.h): a thread a number of the result, neighbouring threads neighbouring
 * channels; gradients of taps by parts of PART rows, which are then added in order. */
#include "kernels/cuda/sigmoid.cuh"
#include "kernels/cuda/state_rows.cuh"

extern "C" {
#include "kernels/conv.h"
}

enum { BLOCK = 256, PART = 256 };

template <class T> struct conv_args {
    lm_conv_attr a;
    int64_t rows;
    const T *x, *dy, *dz;
    const float *w;
    const int32_t *lo;
    T *y, *z, *dx;
    float *dw, *part;
    bool fresh;
};

/* The column of a channel, and the channel of a column, or -1 - its place in z. */
__device__ inline int64_t column_of(const lm_conv_attr &a, int64_t c)
{
    int64_t D = a.key_dim, keys = a.key_heads * D;
    if (!a.packed)
        return c;
    int64_t wide = a.heads / a.key_heads * a.value_dim, each = 2 * (D + wide);
    if (c < 2 * keys)
        return c % keys / D * each + (c < keys ? 0 : D) + c % D;
    return (c - 2 * keys) / wide * each + 2 * D + (c - 2 * keys) % wide;
}

__device__ inline int64_t channel_of(const lm_conv_attr &a, int64_t column)
{
    int64_t D = a.key_dim, keys = a.key_heads * D;
    if (!a.packed)
        return column;
    int64_t wide = a.heads / a.key_heads * a.value_dim, each = 2 * (D + wide);
    int64_t head = column / each, at = column % each;
    if (at < 2 * D)
        return (at < D ? 0 : keys) + head * D + at % D;
    at -= 2 * D;
    return at < wide ? 2 * keys + head * wide + at : -1 - (head * wide + at - wide);
}

/* The first tap of a row that reads a row of its document. */
template <class T> __device__ inline int64_t first_tap(const conv_args<T> &c, int64_t row)
{
    int64_t first = (c.lo ? c.lo[row] : 0) - (row % c.a.seq - c.a.taps + 1);
    return first > 0 ? first : 0;
}

template <class T>
__device__ inline float sum_at(const conv_args<T> &c, int64_t row, int64_t channel, int64_t column)
{
    float sum = 0;
    for (int64_t q = first_tap(c, row); q < c.a.taps; q++)
        sum = fmaf(c.w[channel * c.a.taps + q],
                   to_float(c.x[(row - c.a.taps + 1 + q) * c.a.columns + column]), sum);
    return sum;
}

/* The gradient of that sum. */
template <class T>
__device__ inline float slope_at(const conv_args<T> &c, int64_t row, int64_t channel,
                                 int64_t column)
{
    float s = sum_at(c, row, channel, column), p = sigmoid_of(s);
    return to_float(c.dy[row * c.a.channels + channel]) * silu_slope(s, p);
}

template <class T> static __global__ void __launch_bounds__(BLOCK) conv_kernel(conv_args<T> c)
{
    for (int64_t i = global_thread(); i < c.rows * c.a.columns; i += global_threads()) {
        int64_t row = i / c.a.columns, column = i % c.a.columns, channel = channel_of(c.a, column);
        if (channel < 0) {
            if (c.z)
                c.z[row * c.a.heads * c.a.value_dim - 1 - channel] = c.x[i];
            continue;
        }
        float s = sum_at(c, row, channel, column);
        c.y[row * c.a.channels + channel] = from_float<T>(s / (1 + expf(-s)));
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dx_kernel(conv_args<T> c)
{
    for (int64_t i = global_thread(); i < c.rows * c.a.columns; i += global_threads()) {
        int64_t row = i / c.a.columns, column = i % c.a.columns, channel = channel_of(c.a, column);
        float d = 0;
        if (channel < 0 && c.dz)
            d = to_float(c.dz[row * c.a.heads * c.a.value_dim - 1 - channel]);
        for (int64_t q = c.a.taps - 1; channel >= 0 && q >= 0; q--) {
            int64_t to = row + c.a.taps - 1 - q; /* tap q of that row reads this one */
            if (to / c.a.seq != row / c.a.seq || first_tap(c, to) > q)
                break;
            d = fmaf(c.w[channel * c.a.taps + q], slope_at(c, to, channel, column), d);
        }
        c.dx[i] = from_float<T>(d);
    }
}

/* A thread a channel and part. */
template <class T> static __global__ void __launch_bounds__(BLOCK) part_kernel(conv_args<T> c)
{
    int64_t parts = (c.rows + PART - 1) / PART;
    for (int64_t i = global_thread(); i < parts * c.a.channels; i += global_threads()) {
        int64_t k = i / c.a.channels, channel = i % c.a.channels, column = column_of(c.a, channel);
        float sum[LM_CONV_MOST] = {};
        for (int64_t row = k * PART; row < (k + 1) * PART && row < c.rows; row++) {
            float d = slope_at(c, row, channel, column);
            int64_t first = first_tap(c, row);
            for (int q = 0; q < LM_CONV_MOST; q++)
                if (q >= first && q < c.a.taps)
                    sum[q] = fmaf(d, to_float(c.x[(row - c.a.taps + 1 + q) * c.a.columns + column]),
                                  sum[q]);
        }
        for (int q = 0; q < LM_CONV_MOST; q++)
            if (q < c.a.taps)
                c.part[i * c.a.taps + q] = sum[q];
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dw_kernel(conv_args<T> c)
{
    int64_t size = c.a.channels * c.a.taps;
    for (int64_t i = global_thread(); i < size; i += global_threads()) {
        float sum = c.fresh ? 0 : c.dw[i];
        for (int64_t k = 0; k * PART < c.rows; k++)
            sum += c.part[k * size + i];
        c.dw[i] = sum;
    }
}

/* With operand x at `at`, behind which are w and lo. */
template <class T> static conv_args<T> args_of(const lm_call *c, int at)
{
    conv_args<T> x = {};
    x.a = *(const lm_conv_attr *)c->attr;
    x.rows = x.a.batch * x.a.seq;
    x.x = in_ptr<T>(c, at);
    x.w = in_ptr<float>(c, at + 1);
    x.lo = in_ptr<int32_t>(c, at + 2);
    x.dy = at ? in_ptr<T>(c, 0) : nullptr;
    x.fresh = overwrites(c, x.a.acc);
    return x;
}

template <class T> static void conv(const lm_call *c)
{
    conv_args<T> x = args_of<T>(c, 0);
    x.y = out_ptr<T>(c, 0);
    x.z = out_ptr<T>(c, 1);
    LM_LAUNCH((conv_kernel<T>), grid_for(x.rows * x.a.columns, BLOCK, c->stream), BLOCK, 0,
              c->stream, x);
}

template <class T> static void conv_dx(const lm_call *c)
{
    conv_args<T> x = args_of<T>(c, 1);
    x.dz = in_ptr<T>(c, 4);
    x.dx = out_ptr<T>(c, 0);
    LM_LAUNCH((dx_kernel<T>), grid_for(x.rows * x.a.columns, BLOCK, c->stream), BLOCK, 0, c->stream,
              x);
}

template <class T> static void conv_dw(const lm_call *c)
{
    conv_args<T> x = args_of<T>(c, 1);
    int64_t parts = (x.rows + PART - 1) / PART;
    x.dw = out_ptr<float>(c, 0);
    x.part = (float *)c->work;
    LM_LAUNCH((part_kernel<T>), grid_for(parts * x.a.channels, BLOCK, c->stream), BLOCK, 0,
              c->stream, x);
    LM_LAUNCH((dw_kernel<T>), grid_for(x.a.channels * x.a.taps, BLOCK, c->stream), BLOCK, 0,
              c->stream, x);
}

static size_t conv_dw_work(const lm_call *c, int)
{
    const lm_conv_attr *a = (const lm_conv_attr *)c->attr;
    int64_t parts = (a->batch * a->seq + PART - 1) / PART;
    return (size_t)(parts * a->channels * a->taps) * sizeof(float);
}

/* ---- conv_cached ---- */

template <class T> struct cached_args {
    lm_conv_attr a;
    state_view rows;
    const T *x;
    const float *w;
    T *y, *tail, *z;
};

/* What passes by, and zeros: a thread a column of a row. */
template <class T> static __global__ void __launch_bounds__(BLOCK) pass_kernel(cached_args<T> c)
{
    for (int64_t i = global_thread(); i < c.rows.n * c.a.columns; i += global_threads()) {
        int64_t row = i / c.a.columns, channel = channel_of(c.a, i % c.a.columns);
        if (channel >= 0)
            c.y[row * c.a.channels + channel] = from_float<T>(0);
        else if (c.z)
            c.z[row * c.a.heads * c.a.value_dim - 1 - channel] = c.x[i];
    }
}

/* A thread a channel of a sequence, row after row; the newest rows are in registers, the last one at the end. */
template <class T> static __global__ void __launch_bounds__(BLOCK) cached_kernel(cached_args<T> c)
{
    const int64_t Y = c.a.channels, W = c.a.taps;
    for (int64_t i = global_thread(); i < c.a.batch * Y; i += global_threads()) {
        const state_rows r = state_rows_of(c.rows, i / Y);
        const int64_t channel = i % Y, column = column_of(c.a, channel);
        T *tail = c.tail + r.slot * (W - 1) * Y + channel;
        float x[LM_CONV_MOST] = {};
        if (!r.fresh)
            continue;
        for (int q = 1; q < LM_CONV_MOST; q++) /* x[LM_CONV_MOST - 1 - k]: the row k before */
            if (q >= LM_CONV_MOST - W + 1 && r.used + q >= LM_CONV_MOST)
                x[q] = to_float(tail[(q - (LM_CONV_MOST - W + 1)) * Y]);
        for (int64_t t = 0; t < r.fresh; t++) {
            float sum = 0;
            for (int q = 0; q < LM_CONV_MOST - 1; q++)
                x[q] = x[q + 1];
            x[LM_CONV_MOST - 1] = to_float(c.x[(r.row + t) * c.a.columns + column]);
            for (int q = 0; q < LM_CONV_MOST; q++)
                if (q >= LM_CONV_MOST - W)
                    sum = fmaf(c.w[channel * W + q - (LM_CONV_MOST - W)], x[q], sum);
            c.y[(r.row + t) * Y + channel] = from_float<T>(sum / (1 + expf(-sum)));
        }
        for (int q = 1; q < LM_CONV_MOST; q++)
            if (q >= LM_CONV_MOST - W + 1)
                tail[(q - (LM_CONV_MOST - W + 1)) * Y] = from_float<T>(x[q]);
    }
}

template <class T> static void conv_cached(const lm_call *c)
{
    cached_args<T> x = {};
    x.a = *(const lm_conv_attr *)c->attr;
    x.rows = state_view_of(c, 2, x.a.seq);
    x.x = in_ptr<T>(c, 0);
    x.w = in_ptr<float>(c, 1);
    x.y = out_ptr<T>(c, 0);
    x.tail = out_ptr<T>(c, 1);
    x.z = out_ptr<T>(c, 2);
    LM_LAUNCH((pass_kernel<T>), grid_for(x.rows.n * x.a.columns, BLOCK, c->stream), BLOCK, 0,
              c->stream, x);
    LM_LAUNCH((cached_kernel<T>), grid_for(x.a.batch * x.a.channels, BLOCK, c->stream), BLOCK, 0,
              c->stream, x);
}

extern "C" const lm_kernel lm_conv_cuda_kernels[] = {
    LM_CUDA_ROWS("conv", conv, nullptr),
    LM_CUDA_ROWS("conv_dx", conv_dx, nullptr),
    LM_CUDA_ROWS("conv_dw", conv_dw, conv_dw_work),
    LM_CUDA_ROWS("conv_cached", conv_cached, nullptr),
    LM_CUDA_END,
};
