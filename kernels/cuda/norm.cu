/* SPDX-License-Identifier: Apache-2.0 */
/* norm.cu -- RMSNorm and LayerNorm (kernels/norm.h).
 *
 * A row is kept in registers and read once; rows too wide for that are read again, by the threads
 * that read them first.  The variance is taken about the rounded mean and then corrected for that
 * rounding, so that a mean far larger than the deviation costs no digits. */
#include "kernels/cuda/norm.cuh"

template <class T> struct norm_args {
    const T *x, *r;
    const float *w, *b;
    T *y, *s;
    float *stat;
    int64_t rows, c;
    float eps;
    bool layer, plus_one, once; /* once: x*rstd is not rounded */
};

template <class T, int N> struct norm_pack {
    held<T, N> x, r;
};

template <class T, int N>
static __device__ inline void fetch(const norm_args<T> &a, int64_t at, norm_pack<T, N> *p)
{
    p->x = load<T, N>(a.x + at);
    if (a.r)
        p->r = load<T, N>(a.r + at);
}

/* Replace x by s, which is stored if the operator has that output; returns its contribution to the
 * sum of the row. */
template <class T, int N>
static __device__ inline float join(const norm_args<T> &a, int64_t at, norm_pack<T, N> *p)
{
    float s[N], sum = 0;
    if (a.r) {
        for (int j = 0; j < N; j++)
            s[j] = nth(p->x, j) + nth(p->r, j);
        hold(&p->x, s);
        store<T, N>(a.s + at, p->x);
    }
    for (int j = 0; a.layer && j < N; j++)
        sum += nth(p->x, j);
    return sum;
}

template <class T, int N>
static __device__ inline void deviate(const held<T, N> &s, float mean, float *off, float *sq)
{
    for (int j = 0; j < N; j++) {
        float d = nth(s, j) - mean;
        *off += d;
        *sq = fmaf(d, d, *sq);
    }
}

struct moments {
    float mean, off, rstd; /* off: the rounding error of the mean */
};

/* From the sums over the row of d and of d^2, d being the distance to `mean`. */
template <class T>
static __device__ inline moments measure(const norm_args<T> &a, float mean, float off, float sq)
{
    off = a.layer ? off / (float)a.c : 0;
    float var = sq / (float)a.c - off * off;
    return moments{ mean, off, 1 / sqrtf((var < 0 ? 0 : var) + a.eps) };
}

template <class T>
static __device__ inline void put_stat(const norm_args<T> &a, int64_t n, const moments &m)
{
    if (threadIdx.x == 0) {
        a.stat[2 * n] = m.mean + m.off;
        a.stat[2 * n + 1] = m.rstd;
    }
}

template <class T, int N>
static __device__ inline void put(const norm_args<T> &a, int64_t at, const held<T, N> &s,
                                  const moments &m, const float (&w)[N], const float (&b)[N])
{
    held<T, N> out;
    float h[N];
    for (int j = 0; j < N; j++)
        h[j] = (nth(s, j) - m.mean - m.off) * m.rstd;
    if (!a.once) {
        hold(&out, h);
        for (int j = 0; j < N; j++)
            h[j] = nth(out, j);
    }
    for (int j = 0; j < N; j++)
        h[j] = fmaf(w[j], h[j], b[j]);
    hold(&out, h);
    store<T, N>(a.y + at, out);
}

/* ---- rows in registers ---- */

template <class T, int N>
static __global__ void __launch_bounds__(GROUP, 1) norm_rows(norm_args<T> a)
{
    const int64_t per = (int64_t)blockDim.x * N, step = (int64_t)gridDim.x * blockDim.y;
    const int64_t first = (int64_t)threadIdx.x * N;
    norm_pack<T, N> r[PACKS], next[PACKS] = {};
    float w[PACKS][N] = {}, b[PACKS][N] = {};
    int turn = 0;
    bool mine[PACKS];
    for (int k = 0; k < PACKS; k++) {
        mine[k] = first + k * per < a.c;
        if (mine[k])
            load_weights<N>(w[k], a.w + first + k * per, a.plus_one);
        if (mine[k] && a.b)
            load_floats<N>(b[k], a.b + first + k * per);
    }
    int64_t base = (int64_t)blockIdx.x * blockDim.y, n = base + threadIdx.y;
    for (int k = 0; k < PACKS; k++)
        if (n < a.rows && mine[k])
            fetch<T, N>(a, n * a.c + first + k * per, &next[k]);
    for (; base < a.rows; base += step, n += step) {
        const int64_t at = n * a.c + first;
        const bool live = n < a.rows;
        float mean = 0, off = 0, sq = 0;
        for (int k = 0; k < PACKS; k++) {
            r[k] = next[k];
            if (n + step < a.rows && mine[k])
                fetch<T, N>(a, at + step * a.c + k * per, &next[k]);
        }
        for (int k = 0; k < PACKS; k++)
            if (live && mine[k])
                mean += join<T, N>(a, at + k * per, &r[k]);
        if (a.layer) {
            row_sums(&mean, &off, false, &turn);
            mean /= (float)a.c;
        }
        for (int k = 0; k < PACKS; k++)
            if (live && mine[k])
                deviate<T, N>(r[k].x, mean, &off, &sq);
        row_sums(&sq, &off, a.layer, &turn);
        moments m = measure(a, mean, off, sq);
        if (live)
            put_stat(a, n, m);
        for (int k = 0; k < PACKS; k++)
            if (live && mine[k])
                put<T, N>(a, at + k * per, r[k].x, m, w[k], b[k]);
    }
}

/* ---- rows that are read again ---- */

/* Read FLIGHT packs of the row at `row`, from column i on. */
template <class T, int N>
static __device__ inline void fetch_some(const T *row, int64_t i, int64_t c, held<T, N> *s)
{
    const int64_t per = (int64_t)blockDim.x * N;
    for (int k = 0; k < FLIGHT; k++)
        if (i + k * per < c)
            s[k] = load<T, N>(row + i + k * per);
}

template <class T, int N>
static __device__ inline float join_wide(const norm_args<T> &a, int64_t row)
{
    const int64_t per = (int64_t)blockDim.x * N;
    float sum = 0;
    for (int64_t i = (int64_t)threadIdx.x * N; i < a.c; i += FLIGHT * per) {
        norm_pack<T, N> p[FLIGHT];
        for (int k = 0; k < FLIGHT; k++)
            if (i + k * per < a.c)
                fetch<T, N>(a, row + i + k * per, &p[k]);
        for (int k = 0; k < FLIGHT; k++)
            if (i + k * per < a.c)
                sum += join<T, N>(a, row + i + k * per, &p[k]);
    }
    return sum;
}

template <class T, int N>
static __device__ inline void put_wide(const norm_args<T> &a, int64_t row, const T *s,
                                       const moments &m)
{
    const int64_t per = (int64_t)blockDim.x * N;
    for (int64_t i = (int64_t)threadIdx.x * N; i < a.c; i += FLIGHT * per) {
        held<T, N> p[FLIGHT];
        fetch_some<T, N>(s, i, a.c, p);
        for (int k = 0; k < FLIGHT; k++) {
            float w[N], b[N] = {};
            if (i + k * per >= a.c)
                break;
            load_weights<N>(w, a.w + i + k * per, a.plus_one);
            if (a.b)
                load_floats<N>(b, a.b + i + k * per);
            put<T, N>(a, row + i + k * per, p[k], m, w, b);
        }
    }
}

template <class T, int N>
static __global__ void __launch_bounds__(GROUP, 1) norm_wide(norm_args<T> a)
{
    const int64_t per = (int64_t)blockDim.x * N, step = (int64_t)gridDim.x * blockDim.y;
    int turn = 0;
    for (int64_t base = (int64_t)blockIdx.x * blockDim.y; base < a.rows; base += step) {
        const int64_t n = base + threadIdx.y, row = n * a.c;
        const bool live = n < a.rows;
        const T *s = (a.r ? a.s : a.x) + row;
        float mean = 0, off = 0, sq = 0;
        if (live && (a.r || a.layer))
            mean = join_wide<T, N>(a, row);
        if (a.layer) {
            row_sums(&mean, &off, false, &turn);
            mean /= (float)a.c;
        }
        for (int64_t i = (int64_t)threadIdx.x * N; live && i < a.c; i += FLIGHT * per) {
            held<T, N> p[FLIGHT];
            fetch_some<T, N>(s, i, a.c, p);
            for (int k = 0; k < FLIGHT; k++)
                if (i + k * per < a.c)
                    deviate<T, N>(p[k], mean, &off, &sq);
        }
        row_sums(&sq, &off, a.layer, &turn);
        moments m = measure(a, mean, off, sq);
        if (live) {
            put_stat(a, n, m);
            put_wide<T, N>(a, row, s, m);
        }
    }
}

template <class T> static void norm(const lm_call *c)
{
    const lm_norm_attr *at = (const lm_norm_attr *)c->attr;
    const int N = wide<T>::n;
    norm_args<T> a = { in_ptr<T>(c, 0),
                       in_ptr<T>(c, 3),
                       in_ptr<float>(c, 1),
                       in_ptr<float>(c, 2),
                       out_ptr<T>(c, 0),
                       out_ptr<T>(c, 2),
                       out_ptr<float>(c, 1),
                       rows_of(&c->in[0]),
                       width_of(&c->in[0]),
                       (float)at->eps,
                       at->kind == LM_NORM_LAYER,
                       at->plus_one,
                       at->kind != LM_NORM_RMS || at->plus_one };
    bool packed = packs<T>(N, a.c, a.x, a.r, a.y, a.s) && packs<float>(4, a.c, a.w, a.b);
    row_split l = lay_rows(packed ? a.c / N : a.c, packed);
    unsigned grid = rows_grid(&l, a.rows, c->stream);
    if (!packed)
        LM_LAUNCH((norm_wide<T, 1>), grid, l.block, 0, c->stream, a);
    else if (l.kept)
        LM_LAUNCH((norm_rows<T, N>), grid, l.block, 0, c->stream, a);
    else
        LM_LAUNCH((norm_wide<T, N>), grid, l.block, 0, c->stream, a);
}

extern "C" const lm_kernel lm_norm_cuda_kernels[] = { LM_CUDA_ROWS("norm", norm, nullptr),
                                                      LM_CUDA_END };
