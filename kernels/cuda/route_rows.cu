/* SPDX-License-Identifier: Apache-2.0 */
/* route_rows.cu -- the order of rows by expert, and rows there and back: a warp a row, in packs of
 * 16 bytes where rows allow. */
#include "kernels/cuda/route_sort.cuh"

extern "C" {
#include "kernels/route.h"
}

/* ---- plan ---- */

static route_sort sort_of(const lm_call *c)
{
    const lm_route_plan_attr *a = (const lm_route_plan_attr *)c->attr;
    return route_sort_of(in_ptr<int32_t>(c, 0), c->in[0].dim[0], c->in[0].dim[1], a->experts,
                         false);
}

static void route_plan(const lm_call *c)
{
    route_sort s = sort_of(c);
    s.at = (int32_t *)c->work;
    route_sort_run(c, s, ((const lm_route_plan_attr *)c->attr)->pad, c->out[1].dim[0],
                   out_ptr<int32_t>(c, 0), out_ptr<int32_t>(c, 1), out_ptr<int32_t>(c, 2));
}

static size_t route_plan_work(const lm_call *c, int)
{
    route_sort s = sort_of(c);
    return (size_t)(s.chunks * s.experts) * sizeof(int32_t);
}

/* ---- rows, sums, products ---- */

template <class T> struct move_args {
    const T *x, *y; /* y: of route_dot */
    T *out;
    float *d;                    /* of route_dot */
    const int32_t *from, *place; /* one of them */
    const float *weight;
    int64_t k, packs, rows; /* packs: of a row of C; rows: that are written, or tokens */
};

template <class T, int N> __global__ void __launch_bounds__(row_threads) rows_kernel(move_args<T> m)
{
    typedef pack<T, N> part;
    for (int64_t r = first_row(); r < m.rows; r += next_row()) {
        int64_t a = m.from[r];
        const part *x = (const part *)m.x + (a < 0 ? 0 : a / m.k) * m.packs;
        part *y = (part *)m.out + r * m.packs;
        float w = a >= 0 && m.weight ? m.weight[a] : 1;
        for (int64_t i = lane_of(); i < m.packs; i += 32) {
            part v = {};
            if (a >= 0)
                v = x[i];
            for (int j = 0; j < N && m.weight; j++)
                v.v[j] = a < 0 ? v.v[j] : from_float<T>(w * to_float(v.v[j]));
            y[i] = v;
        }
    }
}

template <class T, int N> __global__ void __launch_bounds__(row_threads) sum_kernel(move_args<T> m)
{
    typedef pack<T, N> part;
    for (int64_t t = first_row(); t < m.rows; t += next_row())
        for (int64_t i = lane_of(); i < m.packs; i += 32) {
            float sum[N] = {};
            for (int64_t a = t * m.k; a < (t + 1) * m.k; a++) {
                int64_t row = m.place[a];
                if (row < 0)
                    continue;
                part v = ((const part *)m.x)[row * m.packs + i];
                float w = m.weight ? m.weight[a] : 1;
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum[j] = fmaf(w, to_float(v.v[j]), sum[j]);
            }
            part v;
#pragma unroll
            for (int j = 0; j < N; j++)
                v.v[j] = from_float<T>(sum[j]);
            ((part *)m.out)[t * m.packs + i] = v;
        }
}

/* A warp an assignment. */
template <class T, int N> __global__ void __launch_bounds__(row_threads) dot_kernel(move_args<T> m)
{
    typedef pack<T, N> part;
    for (int64_t a = first_row(); a < m.rows * m.k; a += next_row()) {
        int64_t row = m.place[a];
        const part *x = (const part *)m.x + a / m.k * m.packs;
        const part *y = (const part *)m.y + (row < 0 ? 0 : row) * m.packs;
        float sum = 0;
        for (int64_t i = lane_of(); row >= 0 && i < m.packs; i += 32) {
            part u = x[i], v = y[i];
#pragma unroll
            for (int j = 0; j < N; j++)
                sum = fmaf(to_float(u.v[j]), to_float(v.v[j]), sum);
        }
        sum = warp_sum(sum);
        if (lane_of() == 0)
            m.d[a] = sum;
    }
}

/* The widest packs that rows of the operands allow. */
template <class T> static bool packed(const move_args<T> &m, int64_t cols)
{
    return packs<T>(wide<T>::n, cols, m.x, m.y, m.out);
}

#define ROUTE_MOVE(kernel, m, cols, rows_)                                           \
    do {                                                                             \
        unsigned grid_ = grid_for((rows_), row_warps, c->stream);                    \
        (m).packs = packed<T>(m, cols) ? (cols) / wide<T>::n : (cols);               \
        if (packed<T>(m, cols))                                                      \
            LM_LAUNCH((kernel<T, wide<T>::n>), grid_, row_threads, 0, c->stream, m); \
        else                                                                         \
            LM_LAUNCH((kernel<T, 1>), grid_, row_threads, 0, c->stream, m);          \
    } while (0)

template <class T> static void route_rows(const lm_call *c)
{
    move_args<T> m = { in_ptr<T>(c, 0),
                       nullptr,
                       out_ptr<T>(c, 0),
                       nullptr,
                       in_ptr<int32_t>(c, 1),
                       nullptr,
                       in_ptr<float>(c, 3),
                       c->in[2].dim[1],
                       0,
                       c->out[0].dim[0] };
    ROUTE_MOVE(rows_kernel, m, c->in[0].dim[1], m.rows);
}

template <class T> static void route_sum(const lm_call *c)
{
    move_args<T> m = { in_ptr<T>(c, 0),
                       nullptr,
                       out_ptr<T>(c, 0),
                       nullptr,
                       nullptr,
                       in_ptr<int32_t>(c, 2),
                       in_ptr<float>(c, 3),
                       c->in[2].dim[1],
                       0,
                       c->out[0].dim[0] };
    ROUTE_MOVE(sum_kernel, m, c->in[0].dim[1], m.rows);
}

template <class T> static void route_dot(const lm_call *c)
{
    move_args<T> m = { in_ptr<T>(c, 0),
                       in_ptr<T>(c, 1),
                       nullptr,
                       out_ptr<float>(c, 0),
                       nullptr,
                       in_ptr<int32_t>(c, 3),
                       nullptr,
                       c->in[3].dim[1],
                       0,
                       c->in[0].dim[0] };
    ROUTE_MOVE(dot_kernel, m, c->in[0].dim[1], m.rows * m.k);
}

extern "C" const lm_kernel lm_route_rows_cuda_kernels[] = {
    { "route_plan", LM_DTYPE_F32, LM_CUDA_PLAIN, route_plan, route_plan_work },
    LM_CUDA_ROWS("route_rows", route_rows, nullptr),
    LM_CUDA_ROWS("route_sum", route_sum, nullptr),
    LM_CUDA_ROWS("route_dot", route_dot, nullptr),
    LM_CUDA_END,
};
