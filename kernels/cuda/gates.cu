/* SPDX-License-Identifier: Apache-2.0 */
/* gates.cu -- gates of attention and of the delta rule (kernels/gates.h): a thread a number; gradients of weights by
 * parts of PART rows, which are then added in order. */
#include "kernels/cuda/sigmoid.cuh"

extern "C" {
#include "kernels/gates.h"
}

enum { BLOCK = 256, PART = 256 };

/* ---- gate_split, gate_join ---- */

/* A thread a number of x, the array that holds both. */
template <class T>
static __global__ void __launch_bounds__(BLOCK)
    move_kernel(lm_gate_split_attr a, int64_t rows, T *x, T *qkv, T *gate, bool split)
{
    const int64_t D = a.head_dim, queries = a.heads * D, rest = 2 * a.kv_heads * D;
    const int64_t width = 2 * queries + rest;
    for (int64_t i = global_thread(); i < rows * width; i += global_threads()) {
        int64_t row = i / width, at = i % width;
        T *part = qkv + row * (queries + rest) + at - queries;
        if (at < 2 * queries)
            part = (at / D % 2 ? gate + row * queries : qkv + row * (queries + rest)) +
                   at / (2 * D) * D + at % D;
        if (split)
            *part = x[i];
        else
            x[i] = *part;
    }
}

template <class T> static void move(const lm_call *c, T *x, T *qkv, T *gate, bool split)
{
    const lm_gate_split_attr *a = (const lm_gate_split_attr *)c->attr;
    int64_t rows = c->in[0].dim[0], width = (2 * a->heads + 2 * a->kv_heads) * a->head_dim;
    LM_LAUNCH((move_kernel<T>), grid_for(rows * width, BLOCK, c->stream), BLOCK, 0, c->stream, *a,
              rows, x, qkv, gate, split);
}

template <class T> static void gate_split(const lm_call *c)
{
    move(c, (T *)in_ptr<T>(c, 0), out_ptr<T>(c, 0), out_ptr<T>(c, 1), true);
}

template <class T> static void gate_join(const lm_call *c)
{
    move(c, out_ptr<T>(c, 0), (T *)in_ptr<T>(c, 0), (T *)in_ptr<T>(c, 1), false);
}

/* ---- delta_gates ---- */

template <class T> struct gates_args {
    lm_delta_gates_attr a;
    int64_t rows;
    const T *ba;
    const float *a_log, *dt, *dg, *dbeta;
    T *dba;
    float *g, *beta, *part;
};

/* Where b of head h stands in a row of ba. */
__device__ inline int64_t place_of(const lm_delta_gates_attr &a, int64_t h)
{
    int64_t group = a.heads / a.key_heads;
    return h / group * 2 * group + h % group;
}

__device__ inline float softplus_at(float x)
{
    return (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
}

template <class T> static __global__ void __launch_bounds__(BLOCK) gates_kernel(gates_args<T> x)
{
    const int64_t H = x.a.heads, group = H / x.a.key_heads;
    for (int64_t i = global_thread(); i < x.rows * H; i += global_threads()) {
        int64_t h = i % H, b = i / H * 2 * H + place_of(x.a, h);
        x.g[i] = -expf(x.a_log[h]) * softplus_at(to_float(x.ba[b + group]) + x.dt[h]);
        x.beta[i] = sigmoid_of(to_float(x.ba[b]));
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dx_kernel(gates_args<T> x)
{
    const int64_t H = x.a.heads, group = H / x.a.key_heads;
    for (int64_t i = global_thread(); i < x.rows * H; i += global_threads()) {
        int64_t h = i % H, b = i / H * 2 * H + place_of(x.a, h);
        float p = sigmoid_of(to_float(x.ba[b]));
        float s = -expf(x.a_log[h]) * sigmoid_of(to_float(x.ba[b + group]) + x.dt[h]);
        x.dba[b] = from_float<T>(x.dbeta ? x.dbeta[i] * p * (1 - p) : 0);
        x.dba[b + group] = from_float<T>(x.dg ? x.dg[i] * s : 0);
    }
}

/* A thread a part and head: [parts][2][H]. */
template <class T> static __global__ void __launch_bounds__(BLOCK) part_kernel(gates_args<T> x)
{
    const int64_t H = x.a.heads, group = H / x.a.key_heads, parts = (x.rows + PART - 1) / PART;
    for (int64_t i = global_thread(); i < parts * H; i += global_threads()) {
        int64_t k = i / H, h = i % H;
        float by_log = 0, by_dt = 0, rate = -expf(x.a_log[h]);
        for (int64_t row = k * PART; row < (k + 1) * PART && row < x.rows; row++) {
            int64_t at = row * 2 * H + place_of(x.a, h) + group;
            float v = to_float(x.ba[at]) + x.dt[h], d = x.dg[row * H + h];
            by_log = fmaf(d, softplus_at(v), by_log);
            by_dt = fmaf(d, sigmoid_of(v), by_dt);
        }
        x.part[2 * k * H + h] = rate * by_log;
        x.part[(2 * k + 1) * H + h] = rate * by_dt;
    }
}

static __global__ void __launch_bounds__(BLOCK)
    dw_kernel(const float *part, int64_t parts, int64_t heads, int64_t which, bool fresh, float *dw)
{
    for (int64_t h = global_thread(); h < heads; h += global_threads()) {
        float sum = fresh ? 0 : dw[h];
        for (int64_t k = 0; k < parts; k++)
            sum += part[(2 * k + which) * heads + h];
        dw[h] = sum;
    }
}

/* With operand ba at `at`, behind which are a_log and dt. */
template <class T> static gates_args<T> args_of(const lm_call *c, int at)
{
    gates_args<T> x = {};
    x.a = *(const lm_delta_gates_attr *)c->attr;
    x.ba = in_ptr<T>(c, at);
    x.a_log = in_ptr<float>(c, at + 1);
    x.dt = in_ptr<float>(c, at + 2);
    x.rows = c->in[at].dim[0];
    return x;
}

template <class T> static void delta_gates(const lm_call *c)
{
    gates_args<T> x = args_of<T>(c, 0);
    x.g = out_ptr<float>(c, 0);
    x.beta = out_ptr<float>(c, 1);
    LM_LAUNCH((gates_kernel<T>), grid_for(x.rows * x.a.heads, BLOCK, c->stream), BLOCK, 0,
              c->stream, x);
}

template <class T> static void delta_gates_dx(const lm_call *c)
{
    gates_args<T> x = args_of<T>(c, 2);
    x.dg = in_ptr<float>(c, 0);
    x.dbeta = in_ptr<float>(c, 1);
    x.dba = out_ptr<T>(c, 0);
    LM_LAUNCH((dx_kernel<T>), grid_for(x.rows * x.a.heads, BLOCK, c->stream), BLOCK, 0, c->stream,
              x);
}

template <class T> static void delta_gates_dw(const lm_call *c)
{
    gates_args<T> x = args_of<T>(c, 1);
    int64_t H = x.a.heads, parts = (x.rows + PART - 1) / PART;
    x.dg = in_ptr<float>(c, 0);
    x.part = (float *)c->work;
    LM_LAUNCH((part_kernel<T>), grid_for(parts * H, BLOCK, c->stream), BLOCK, 0, c->stream, x);
    for (int o = 0; o < 2; o++)
        if (out_ptr<float>(c, o))
            LM_LAUNCH((dw_kernel), grid_for(H, BLOCK, c->stream), BLOCK, 0, c->stream, x.part,
                      parts, H, (int64_t)o, overwrites(c, x.a.acc), out_ptr<float>(c, o));
}

static size_t dw_work(const lm_call *c, int)
{
    const lm_delta_gates_attr *a = (const lm_delta_gates_attr *)c->attr;
    return (size_t)(2 * ((c->in[1].dim[0] + PART - 1) / PART) * a->heads) * sizeof(float);
}

extern "C" const lm_kernel lm_gates_cuda_kernels[] = {
    LM_CUDA_ROWS("gate_split", gate_split, nullptr),
    LM_CUDA_ROWS("gate_join", gate_join, nullptr),
    LM_CUDA_ROWS("delta_gates", delta_gates, nullptr),
    LM_CUDA_ROWS("delta_gates_dx", delta_gates_dx, nullptr),
    LM_CUDA_ROWS("delta_gates_dw", delta_gates_dw, dw_work),
    LM_CUDA_END,
};
