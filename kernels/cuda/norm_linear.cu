/* SPDX-License-Identifier: Apache-2.0 */
/* norm_linear.cu -- norm and linear layer of a few rows in one kernel (kernels/linear.h).
 *
 * Every block computes the norm of all rows itself, from a few kilobytes that the L2 cache serves,
 * and keeps it in shared memory; then its warps process columns like other products of few rows
 * (rows.cuh).  A warp prefetches its next reads to the cache, so that memory does not idle while
 * the norm is computed and between columns.  There is one block to a multiprocessor, which limits
 * the number of norms.
 *
 * A thread has the same columns of every row, so a row's bits depend neither on the rows beside it
 * nor on the number of blocks. */
#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/prefetch.cuh"
#include "kernels/cuda/rows.cuh"

enum { BLOCK = 512, WARPS = BLOCK / 32 };

/* Shared memory beside the rows: sums and statistics. */
static const size_t beside = 2048;

template <class T> struct norm_linear_args {
    const T *x, *r, *w;
    const float *nw, *nb, *b;
    void *y;
    T *s;
    int64_t rows, c, n; /* n: rows of w */
    float eps;
    lm_activation act;
    bool layer, plus_one, once, pack_norm, pack_w; /* rows can be read 16 bytes at a time */
    bool wide_y;                                   /* y is F32 */
};

/* ---- norm ---- */

struct row_stat {
    float mean, off, rstd; /* off: the rounding error of the mean */
};

/* In shared memory beside the rows: two sums of each row by warp, and the results. */
template <int M> struct norm_room {
    float part[M][2][WARPS];
    row_stat stat[M];
};

/* Rows that a thread works on at once, as registers allow. */
template <int M> struct norm_step {
    static const int n = M < 4 ? M : 4;
};

/* Store a warp's part of two sums of the rows from row0 on. */
template <int M, int R>
__device__ inline void put_sums(norm_room<M> *room, int row0, const float (&a)[R],
                                const float (&b)[R])
{
#pragma unroll
    for (int m = 0; m < R; m++) {
        float x = warp_sum(a[m]), y = warp_sum(b[m]);
        if (threadIdx.x % 32 == 0) {
            room->part[row0 + m][0][threadIdx.x / 32] = x;
            room->part[row0 + m][1][threadIdx.x / 32] = y;
        }
    }
}

/* Add the parts, a warp for each row; its first lane passes them to then(stat, first, second).  All
 * threads call it. */
template <int M, class F>
__device__ inline void add_sums(norm_room<M> *room, int64_t rows, const F &then)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    __syncthreads();
    if (warp < rows) {
        float x = warp_sum(lane < WARPS ? room->part[warp][0][lane] : 0);
        float y = warp_sum(lane < WARPS ? room->part[warp][1][lane] : 0);
        if (lane == 0)
            then(&room->stat[warp], x, y);
    }
    __syncthreads();
}

/* Store x + r of R rows from row0 on in h, and in the first block also in s; sums of it.  N:
 * elements read at a time. */
template <class T, int N, int R>
__device__ inline void take_rows(T *h, const norm_linear_args<T> &a, int row0, float (&sum)[R])
{
    typedef pack<T, N> part;
#pragma unroll 1
    for (int64_t i = (int64_t)threadIdx.x * N; i < a.c; i += BLOCK * N) {
        part v[R], r[R];
#pragma unroll
        for (int m = 0; m < R; m++) {
            int64_t at = (row0 + m) * a.c + i;
            bool inside = row0 + m < a.rows;
            v[m] = inside ? *(const part *)(a.x + at) : part{};
            r[m] = inside && a.r ? *(const part *)(a.r + at) : part{};
        }
#pragma unroll
        for (int m = 0; m < R; m++) {
            int64_t at = (row0 + m) * a.c + i;
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (a.r)
                    v[m].v[j] = from_float<T>(to_float(v[m].v[j]) + to_float(r[m].v[j]));
                sum[m] += to_float(v[m].v[j]);
            }
            if (row0 + m < a.rows)
                *(part *)(h + at) = v[m];
            if (row0 + m < a.rows && a.r && blockIdx.x == 0)
                *(part *)(a.s + at) = v[m];
        }
    }
}

/* Sums of the distances of a row from its mean, and of their squares. */
template <class T, int N>
__device__ inline void spread_of(const T *row, int64_t c, float mean, float *off, float *sq)
{
    for (int64_t i = (int64_t)threadIdx.x * N; i < c; i += BLOCK * N) {
        pack<T, N> v = *(const pack<T, N> *)(row + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float d = to_float(v.v[j]) - mean;
            *off += d;
            *sq += d * d;
        }
    }
}

/* The rows in h normed. */
template <class T, int M, int N>
__device__ inline void norm_rows(T *h, const norm_linear_args<T> &a, const row_stat *stat)
{
    const int F = N % 4 ? 1 : 4;
    typedef pack<float, F> floats;
#pragma unroll 1
    for (int64_t i = (int64_t)threadIdx.x * N; i < a.c; i += BLOCK * N) {
        floats w[N / F], b[N / F];
#pragma unroll
        for (int j = 0; j < N / F; j++) {
            w[j] = *(const floats *)(a.nw + i + j * F);
            b[j] = a.nb ? *(const floats *)(a.nb + i + j * F) : floats{};
        }
#pragma unroll 1
        for (int m = 0; m < a.rows; m++) {
            pack<T, N> v = *(const pack<T, N> *)(h + m * a.c + i);
            row_stat st = stat[m];
#pragma unroll
            for (int j = 0; j < N; j++) {
                float e = (to_float(v.v[j]) - st.mean - st.off) * st.rstd;
                e = a.once ? e : rounded<T>(e);
                float by = w[j / F].v[j % F] + (a.plus_one ? 1.0f : 0.0f);
                v.v[j] = from_float<T>(fmaf(by, e, b[j / F].v[j % F]));
            }
            *(pack<T, N> *)(h + m * a.c + i) = v;
        }
    }
}

/* Compute h [rows][c], and s.  Until the end a thread reads from h only what it stored itself. */
template <class T, int M, int N>
__device__ inline void make_norm(T *h, norm_room<M> *room, const norm_linear_args<T> &a)
{
    const int R = norm_step<M>::n;
    const float c = (float)a.c;
#pragma unroll 1
    for (int row0 = 0; row0 < a.rows; row0 += R) {
        float sum[R] = {};
        take_rows<T, N, R>(h, a, row0, sum);
        if (a.layer)
            put_sums<M, R>(room, row0, sum, sum);
    }
    if (a.layer)
        add_sums<M>(room, a.rows, [=](row_stat *st, float x, float) { st->mean = x / c; });
#pragma unroll 1
    for (int row0 = 0; row0 < a.rows; row0 += R) {
        float off[R] = {}, sq[R] = {};
#pragma unroll
        for (int m = 0; m < R; m++) {
            int row = row0 + m;
            if (row < a.rows)
                spread_of<T, N>(h + row * a.c, a.c, a.layer ? room->stat[row].mean : 0, &off[m],
                                &sq[m]);
        }
        put_sums<M, R>(room, row0, off, sq);
    }
    add_sums<M>(room, a.rows, [=](row_stat *st, float x, float y) {
        float left = a.layer ? x / c : 0, var = y / c - left * left;
        st->mean = a.layer ? st->mean : 0;
        st->off = left;
        st->rstd = 1 / sqrtf((var < 0 ? 0 : var) + a.eps);
    });
    norm_rows<T, M, N>(h, a, room->stat);
    __syncthreads();
}

/* ---- product ---- */

/* The j-th row of w from col0 on; with pairs, rows of gate and up alternate. */
template <class T>
__device__ inline int64_t row_at(const norm_linear_args<T> &a, int64_t col0, int j)
{
    int64_t col = col0 + j;
    col = col < a.n ? col : a.n - 1;
    return a.act >= LM_ACT_SWIGLU ? col % 2 * (a.n / 2) + col / 2 : col;
}

/* Prefetch the beginning of the rows of w from col0 on to the L2 cache: a warp's share of what a
 * block prefetches. */
template <class T, int COLS>
static __device__ inline void ask_for(const norm_linear_args<T> &a, int64_t col0)
{
    const int LINE = CACHE_LINE / (int)sizeof(T), LINES = most_ahead / WARPS / CACHE_LINE;
    for (int e = (int)threadIdx.x % 32; e < LINES; e += 32) {
        int64_t k = e / COLS * LINE;
        if (k < a.c)
            ask_line(a.w + row_at(a, col0, e % COLS) * a.c + k);
    }
}

/* M: rows at most, COLS: columns a warp makes at once, U: packs of each that a lane reads at once.
 * Successive columns belong to different blocks, so that all blocks have equally many. */
template <class T, int M, int COLS, int U>
__global__ void __launch_bounds__(BLOCK, 1) norm_linear_kernel(norm_linear_args<T> a)
{
    LM_DYNAMIC_SHARED(T, h);
    __shared__ norm_room<M> room;
    const int EACH = 32 / (M * COLS); /* lanes that get the same sum */
    const int64_t groups = (a.n + COLS - 1) / COLS, step = (int64_t)WARPS * gridDim.x;
    const bool pairs = a.act >= LM_ACT_SWIGLU;
    const int64_t width = pairs ? a.n / 2 : a.n;
    int lane = (int)threadIdx.x % 32;
    int64_t group = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x;

    ask_for<T, COLS>(a, group * COLS);
    if (a.pack_norm)
        make_norm<T, M, wide<T>::n>(h, &room, a);
    else
        make_norm<T, M, 1>(h, &room, a);
    for (; group < groups; group += step) {
        few_factors<T, COLS> f = { h, {}, a.c, a.rows, a.c };
        float sum[M][COLS] = {};
        int64_t row = lane / EACH / COLS, col = group * COLS + lane / EACH % COLS;
        float bias = a.b ? a.b[row_at(a, col, 0)] : 0.0f;

        if (group + step < groups)
            ask_for<T, COLS>(a, (group + step) * COLS);
#pragma unroll
        for (int j = 0; j < COLS; j++)
            f.b[j] = a.w + row_at(a, group * COLS, j) * a.c;
        few_sums<T, M, COLS, U>(sum, f, a.pack_w);
        float mine = shared_sums<M * COLS>(&sum[0][0]) + bias;
        if (pairs) {
            float up = __shfl_xor_sync(0xffffffffu, mine, EACH);
            mine = (a.act == LM_ACT_SWIGLU ? silu<T>(mine) : gelu_tanh<T>(mine)) * up;
        } else if (a.act != LM_ACT_NONE) {
            mine = gelu_of<T>(a.act, mine);
        }
        if (lane % EACH || row >= a.rows || col >= a.n || (pairs && col % 2))
            continue;
        int64_t at = row * width + (pairs ? col / 2 : col);
        if (sizeof(T) == 4 || a.wide_y)
            ((float *)a.y)[at] = mine;
        else
            ((T *)a.y)[at] = from_float<T>(mine);
    }
}

/* ---- launches ---- */

static size_t row_bytes(const lm_call *c)
{
    return (size_t)lm_tensor_count(&c->in[0]) * lm_dtype_size(c->in[0].dtype);
}

static size_t norm_linear_work(const lm_call *c, int)
{
    bool lt = c->stream->level != LM_CUDA_PLAIN && c->stream->lt;
    bool few = rows_of(&c->in[0]) <= (lt ? lt_few_rows : most_few_rows);
    return few && !c->in[4].codes && row_bytes(c) + beside <= c->stream->shared_max ? 0 : SIZE_MAX;
}

template <class T, int M, int COLS, int U>
static void launch(const lm_call *c, const norm_linear_args<T> &a)
{
    int64_t groups = (a.n + COLS - 1) / COLS, sms = c->stream->sms;
    size_t bytes = row_bytes(c);

    /* the most at any time: a recording may hold this kernel with wider rows than these */
    LM_ALLOW_SHARED((norm_linear_kernel<T, M, COLS, U>), (int)(c->stream->shared_max - beside));
    LM_LAUNCH((norm_linear_kernel<T, M, COLS, U>), (unsigned)(groups < sms ? groups : sms), BLOCK,
              bytes, c->stream, a);
}

/* COLS x U is 8, so that 16 warps have 64 KiB in flight; 4 where registers do not suffice.  More
 * columns at once mean fewer reads of shared memory, and idle warps where columns are few. */
template <class T> static void norm_linear(const lm_call *c)
{
    const lm_norm_linear_attr *at = (const lm_norm_linear_attr *)c->attr;
    const int P = wide<T>::n;
    norm_linear_args<T> a = {};

    a.x = in_ptr<T>(c, 0), a.r = in_ptr<T>(c, 3), a.w = in_ptr<T>(c, 4);
    a.nw = in_ptr<float>(c, 1), a.nb = in_ptr<float>(c, 2), a.b = in_ptr<float>(c, 5);
    a.y = out_ptr<void>(c, 0), a.s = out_ptr<T>(c, 1);
    a.rows = rows_of(&c->in[0]), a.c = width_of(&c->in[0]), a.n = c->in[4].dim[0];
    a.eps = (float)at->eps;
    a.act = at->act;
    a.layer = at->kind == LM_NORM_LAYER;
    a.plus_one = at->plus_one;
    a.once = at->kind != LM_NORM_RMS || at->plus_one;
    a.pack_norm = packs<T>(P, a.c, a.x, a.r, a.s) && packs<float>(4, a.c, a.nw, a.nb);
    a.pack_w = packs<T>(P, a.c, a.w);
    a.wide_y = c->out[0].dtype == LM_DTYPE_F32;
    if (a.rows > 4 && a.n >= (int64_t)c->stream->sms * WARPS * 4)
        launch<T, 8, 4, 1>(c, a);
    else if (a.rows > 4)
        launch<T, 8, 2, 4>(c, a);
    else if (a.rows > 2)
        launch<T, 4, 2, 4>(c, a);
    else if (a.rows > 1)
        launch<T, 2, 2, 4>(c, a);
    else if (a.act >= LM_ACT_SWIGLU)
        launch<T, 1, 2, 4>(c, a);
    else
        launch<T, 1, 1, 8>(c, a);
}

extern "C" const lm_kernel lm_norm_linear_cuda_kernels[] = {
    LM_CUDA_ROWS("norm_linear", norm_linear, norm_linear_work), LM_CUDA_END
};
