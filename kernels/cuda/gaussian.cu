/* SPDX-License-Identifier: Apache-2.0 */
/* gaussian.cu -- the rows of Gaussian attention (kernels/gaussian.h): some lanes of a warp have a head each, in packs of N
 * numbers, and add up its squares by shuffles. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/gaussian.h"
}

enum { BLOCK = 256 };

template <class T> struct gaussian_args {
    lm_gaussian_attr a;
    int64_t rows, lines; /* lines: heads of queries, keys and values of all rows */
    int lanes;           /* of a head, a power of two */
    const T *x, *dy;     /* x: qkv, or y in the backward */
    T *y;
};

/* Line `line` of all rows: the head of its row, and where it begins in short and in long rows. */
struct head_place {
    int64_t head, at, longer;
};

__device__ inline head_place place_of(const lm_gaussian_attr &a, int64_t line)
{
    const int64_t D = a.head_dim, heads = a.heads + a.kv_heads, each = heads + a.kv_heads;
    const int64_t row = line / each, h = line % each, before = h < heads ? h : heads;
    head_place p = { h, line * D, 0 };
    p.longer = row * (each * D + heads * LM_GAUSSIAN_MORE) + h * D + before * LM_GAUSSIAN_MORE;
    return p;
}

/* Column i behind a head with n = |x|^2 / 2. */
template <class T>
__device__ inline float column_of(const lm_gaussian_attr &a, bool key, float n, int i)
{
    const int own = lm_gaussian_own(&a, key), units = lm_gaussian_units(&a, key);
    const float unit = LM_GAUSSIAN_UNIT, first = rounded<T>(-n / unit), left = -n - unit * first;
    const bool finite = first - first == 0;
    if (own >= 0 && i == own)
        return first;
    if (own >= 0 && i == own + 1)
        return finite ? rounded<T>(left) : 0.0f;
    if (own >= 0 && i == own + 2)
        return finite ? left - rounded<T>(left) : 0.0f;
    if (units >= 0 && i >= units && i < units + 3)
        return i == units ? unit : 1.0f;
    return 0;
}

template <class T, int N>
static __global__ void __launch_bounds__(BLOCK) longer_kernel(gaussian_args<T> s)
{
    typedef pack<T, N> P;
    const int packs = (int)(s.a.head_dim / N), side = 32 / s.lanes, lane = (int)threadIdx.x % 32;
    const int mine = lane % s.lanes;
    const int64_t heads = s.a.heads + s.a.kv_heads, warps = global_threads() / 32;
#pragma unroll 1
    for (int64_t base = global_thread() / 32 * side; base < s.lines; base += warps * side) {
        const int64_t line = base + lane / s.lanes;
        const head_place p = place_of(s.a, line);
        const int end = line < s.lines ? packs : 0;
        float sum = 0;
#pragma unroll 1
        for (int i = mine; i < end; i += s.lanes) {
            P v = *reinterpret_cast<const P *>(s.x + p.at + i * N);
#pragma unroll
            for (int e = 0; e < N; e++)
                sum = fmaf(to_float(v.v[e]), to_float(v.v[e]), sum);
            *reinterpret_cast<P *>(s.y + p.longer + i * N) = v;
        }
        for (int o = s.lanes / 2; o > 0; o /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, o);
#pragma unroll 1
        for (int i = mine; end && p.head < heads && i < LM_GAUSSIAN_MORE; i += s.lanes)
            s.y[p.longer + s.a.head_dim + i] =
                from_float<T>(column_of<T>(s.a, p.head >= s.a.heads, 0.5f * sum, i));
    }
}

template <class T, int N>
static __global__ void __launch_bounds__(BLOCK) shorter_kernel(gaussian_args<T> s)
{
    typedef pack<T, N> P;
    const int64_t packs = s.a.head_dim / N, heads = s.a.heads + s.a.kv_heads;
#pragma unroll 1
    for (int64_t t = global_thread(); t < s.lines * packs; t += global_threads()) {
        const head_place p = place_of(s.a, t / packs);
        const int64_t i = t % packs * N;
        const int own = p.head < heads ? lm_gaussian_own(&s.a, p.head >= s.a.heads) : -1;
        P g = *reinterpret_cast<const P *>(s.dy + p.longer + i);
        if (own >= 0) {
            P x = *reinterpret_cast<const P *>(s.x + p.longer + i);
            const float by = to_float(s.dy[p.longer + s.a.head_dim + own]) / LM_GAUSSIAN_UNIT;
#pragma unroll
            for (int e = 0; e < N; e++)
                g.v[e] = from_float<T>(fmaf(-by, to_float(x.v[e]), to_float(g.v[e])));
        }
        *reinterpret_cast<P *>(s.y + p.at + i) = g;
    }
}

template <class T> static gaussian_args<T> args_of(const lm_call *c, const lm_tensor *shorter)
{
    gaussian_args<T> s = {};
    s.a = *(const lm_gaussian_attr *)c->attr;
    s.rows = shorter->dim[0];
    s.lines = s.rows * (s.a.heads + 2 * s.a.kv_heads);
    s.y = out_ptr<T>(c, 0);
    return s;
}

template <class T, int N> static void run_longer(const lm_call *c, gaussian_args<T> s)
{
    s.lanes = 1;
    while (s.lanes < s.a.head_dim / N && s.lanes < 32)
        s.lanes *= 2;
    LM_LAUNCH((longer_kernel<T, N>), grid_for(s.lines * s.lanes, BLOCK, c->stream), BLOCK, 0,
              c->stream, s);
}

template <class T> static void gaussian_rows(const lm_call *c)
{
    const int N = wide<T>::n;
    gaussian_args<T> s = args_of<T>(c, &c->in[0]);
    s.x = in_ptr<const T>(c, 0);
    if (packs<T>(N, s.a.head_dim, s.x, s.y))
        run_longer<T, N>(c, s);
    else
        run_longer<T, 1>(c, s);
}

template <class T> static void gaussian_rows_dx(const lm_call *c)
{
    const int N = wide<T>::n;
    gaussian_args<T> s = args_of<T>(c, &c->out[0]);
    s.dy = in_ptr<const T>(c, 0);
    s.x = in_ptr<const T>(c, 1);
    const int64_t all = s.lines * s.a.head_dim;
    if (packs<T>(N, s.a.head_dim, s.x, s.dy, s.y))
        LM_LAUNCH((shorter_kernel<T, N>), grid_for(all / N, BLOCK, c->stream), BLOCK, 0, c->stream,
                  s);
    else
        LM_LAUNCH((shorter_kernel<T, 1>), grid_for(all, BLOCK, c->stream), BLOCK, 0, c->stream, s);
}

extern "C" const lm_kernel lm_gaussian_cuda_kernels[] = {
    LM_CUDA_ROWS("gaussian_rows", gaussian_rows, nullptr),
    LM_CUDA_ROWS("gaussian_rows_dx", gaussian_rows_dx, nullptr),
    LM_CUDA_END,
};
