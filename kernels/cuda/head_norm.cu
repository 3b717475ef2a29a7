/* SPDX-License-Identifier: Apache-2.0 */
/* head_norm.cu -- the norm of queries and keys, head by head (kernels/norm.h).
 *
 * A head belongs to 8, 16 or 32 neighbouring lanes, a pack a lane; several heads are in flight at
 * once.  Heads of more than 32 packs, and heads without packed access, are read twice. */
#include "kernels/cuda/norm.cuh"

enum { BLOCK = 256, HEADS = 4 /* in flight at once */ };

template <class T> struct head_args {
    const T *x, *dy;
    const float *wq, *wk;
    T *out;
    float *stat;
    int64_t rows, heads, kv, d; /* rows of (heads + 2 kv) heads of d */
    float eps;
    bool plus_one;
};

/* A head: the i-th of all, head `head` of row n. */
struct head_at {
    int64_t i, n, head;
};

/* Iterates over heads, `all` in a row, from the i-th in steps of `by`; divides only at its
 * beginning. */
struct head_walk {
    head_at at;
    int64_t all, by, by_rows, by_heads;
};

static __device__ inline head_walk walk_heads(int64_t i, int64_t by, int64_t all)
{
    return head_walk{ { i, i / all, i % all }, all, by, by / all, by % all };
}

static __device__ inline head_at next_head(head_walk *w)
{
    head_at was = w->at;
    w->at.i += w->by;
    w->at.n += w->by_rows;
    w->at.head += w->by_heads;
    if (w->at.head >= w->all) {
        w->at.head -= w->all;
        w->at.n++;
    }
    return was;
}

/* Sum over G neighbouring lanes of a warp; all its lanes call it. */
template <int G> static __device__ inline float lanes_sum(float x)
{
    for (int o = G / 2; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

template <class T> static __device__ inline float head_rstd(const head_args<T> &a, float sq)
{
    return 1 / sqrtf(sq / (float)a.d + a.eps);
}

/* The contribution of a lane to the sum of its head. */
template <class T, int N>
static __device__ inline float add_up(const held<T, N> &x, const held<T, N> &dy, bool dx,
                                      const float (&w)[N])
{
    float sum = 0;
    for (int j = 0; j < N; j++)
        sum = fmaf(dx ? nth(dy, j) * w[j] : nth(x, j), nth(x, j), sum);
    return sum;
}

/* Forward: y = w round(x rstd), not rounded with plus_one.  DX: rstd (dy w - x rstd g2), g2 being the
 * mean of dy w x rstd. */
template <class T, int N, bool DX>
static __device__ inline held<T, N> normed(const held<T, N> &x, const held<T, N> &dy, float rstd,
                                           float g2, const float (&w)[N], bool plus_one)
{
    held<T, N> out;
    float v[N];
    if (DX) {
        for (int j = 0; j < N; j++)
            v[j] = rstd * fmaf(-nth(x, j) * rstd, g2, nth(dy, j) * w[j]);
    } else {
        for (int j = 0; j < N; j++)
            v[j] = nth(x, j) * rstd;
        if (!plus_one) {
            hold(&out, v);
            for (int j = 0; j < N; j++)
                v[j] = nth(out, j);
        }
        for (int j = 0; j < N; j++)
            v[j] *= w[j];
    }
    hold(&out, v);
    return out;
}

/* Threads: G lanes of a head in x, heads in y.  Values are copied. */
template <class T, int N, int G, bool DX>
static __global__ void __launch_bounds__(BLOCK) head_rows(head_args<T> a)
{
    const int64_t normed_heads = a.heads + a.kv, all = normed_heads + a.kv, total = a.rows * all;
    const int64_t col = (int64_t)threadIdx.x * N, first = (int64_t)blockIdx.x * blockDim.y;
    head_walk walk = walk_heads(first + threadIdx.y, (int64_t)gridDim.x * blockDim.y, all);
    const bool mine = col < a.d;
    float wq[N] = {}, wk[N] = {};
    if (mine) {
        load_weights<N>(wq, a.wq + col, a.plus_one);
        load_weights<N>(wk, a.wk + col, a.plus_one);
    }
    for (int64_t base = first; base < total; base += HEADS * walk.by) {
        head_at at[HEADS];
        held<T, N> x[HEADS] = {}, dy[HEADS] = {};
        float rstd[HEADS] = {};
        for (int u = 0; u < HEADS; u++) {
            at[u] = next_head(&walk);
            bool live = at[u].i < total, norm = live && at[u].head < normed_heads;
            if (mine && (DX ? norm : live))
                x[u] = load<T, N>(a.x + at[u].i * a.d + col);
            if (DX && mine && live)
                dy[u] = load<T, N>(a.dy + at[u].i * a.d + col);
            if (DX && norm)
                rstd[u] = a.stat[at[u].n * normed_heads + at[u].head];
        }
        for (int u = 0; u < HEADS; u++) {
            bool live = at[u].i < total, norm = live && at[u].head < normed_heads;
            float w[N];
            for (int j = 0; j < N; j++)
                w[j] = at[u].head < a.heads ? wq[j] : wk[j];
            float sum = lanes_sum<G>(add_up<T, N>(x[u], dy[u], DX, w));
            if (!DX)
                rstd[u] = head_rstd(a, sum);
            if (!DX && norm && threadIdx.x == 0)
                a.stat[at[u].n * normed_heads + at[u].head] = rstd[u];
            held<T, N> out = DX ? dy[u] : x[u];
            if (norm)
                out = normed<T, N, DX>(x[u], dy[u], rstd[u], sum * rstd[u] / (float)a.d, w,
                                       a.plus_one);
            if (mine && live)
                store<T, N>(a.out + at[u].i * a.d + col, out);
        }
    }
}

template <class T, int N, bool DX>
static __global__ void __launch_bounds__(BLOCK, 1) head_wide(head_args<T> a)
{
    const int64_t normed_heads = a.heads + a.kv, all = normed_heads + a.kv, total = a.rows * all;
    const int64_t first = (int64_t)blockIdx.x * blockDim.y, col = (int64_t)threadIdx.x * N;
    head_walk walk = walk_heads(first + threadIdx.y, (int64_t)gridDim.x * blockDim.y, all);
    for (int64_t base = first; base < total; base += walk.by) {
        head_at at = next_head(&walk);
        bool live = at.i < total, norm = live && at.head < normed_heads;
        const float *weights = at.head < a.heads ? a.wq : a.wk;
        int64_t head = at.i * a.d;
        held<T, N> x = {}, dy = {};
        float sum = 0, rstd = 0, w[N];
        for (int64_t k = col; norm && k < a.d; k += 32 * N) {
            x = load<T, N>(a.x + head + k);
            if (DX)
                dy = load<T, N>(a.dy + head + k);
            load_weights<N>(w, weights + k, a.plus_one);
            sum += add_up<T, N>(x, dy, DX, w);
        }
        sum = warp_sum(sum);
        if (norm)
            rstd = DX ? a.stat[at.n * normed_heads + at.head] : head_rstd(a, sum);
        if (!DX && norm && threadIdx.x == 0)
            a.stat[at.n * normed_heads + at.head] = rstd;
        for (int64_t k = col; live && k < a.d; k += 32 * N) {
            x = load<T, N>((DX && !norm ? a.dy : a.x) + head + k);
            if (DX)
                dy = load<T, N>(a.dy + head + k);
            load_weights<N>(w, weights + k, a.plus_one);
            if (norm)
                x = normed<T, N, DX>(x, dy, rstd, sum * rstd / (float)a.d, w, a.plus_one);
            store<T, N>(a.out + head + k, x);
        }
    }
}

template <class T, int N, int G, bool DX>
static void launch_heads(const head_args<T> &a, const lm_stream *s)
{
    int64_t total = a.rows * (a.heads + 2 * a.kv);
    dim3 block(G, BLOCK / G);
    LM_LAUNCH((head_rows<T, N, G, DX>), grid_for(total, HEADS * BLOCK / G, s), block, 0, s, a);
}

template <class T, bool DX> static void run_heads(const head_args<T> &a, const lm_stream *s)
{
    const int N = wide<T>::n;
    int64_t total = a.rows * (a.heads + 2 * a.kv), units = a.d / N;
    unsigned blocks = grid_for(total, BLOCK / 32, s);
    dim3 block(32, BLOCK / 32);
    if (!packs<T>(N, a.d, a.x, a.dy, a.out) || !packs<float>(4, a.d, a.wq, a.wk))
        LM_LAUNCH((head_wide<T, 1, DX>), blocks, block, 0, s, a);
    else if (units <= 8)
        launch_heads<T, N, 8, DX>(a, s);
    else if (units <= 16)
        launch_heads<T, N, 16, DX>(a, s);
    else if (units <= 32)
        launch_heads<T, N, 32, DX>(a, s);
    else
        LM_LAUNCH((head_wide<T, N, DX>), blocks, block, 0, s, a);
}

template <class T> static head_args<T> heads_of(const lm_call *c, int x, int w, float *stat)
{
    const lm_head_norm_attr *at = (const lm_head_norm_attr *)c->attr;
    return head_args<T>{ in_ptr<T>(c, x),     in_ptr<T>(c, 0),
                         in_ptr<float>(c, w), in_ptr<float>(c, w + 1),
                         out_ptr<T>(c, 0),    stat,
                         rows_of(&c->in[x]),  at->heads,
                         at->kv_heads,        at->head_dim,
                         (float)at->eps,      at->plus_one };
}

template <class T> static void head_norm(const lm_call *c)
{
    run_heads<T, false>(heads_of<T>(c, 0, 1, out_ptr<float>(c, 1)), c->stream);
}

template <class T> static void head_norm_dx(const lm_call *c)
{
    run_heads<T, true>(heads_of<T>(c, 1, 2, in_ptr<float>(c, 4)), c->stream);
}

/* ---- the weights' gradients ---- */

template <class T> struct head_dw_args {
    const T *dy, *x;
    const float *stat;
    float *part; /* [chunks][2][d] */
    int64_t rows, heads, kv, d, chunk;
    bool plus_one;
};

/* The sums of a block: the heads of the rows of chunk blockIdx.y, columns of tile blockIdx.x.
 * Threads: G in x over packs of N columns, BLOCK / G in y over heads. */
template <int N, int G>
static __device__ inline void write_parts(const float (&q)[N], const float (&k)[N], float *part,
                                          int64_t d)
{
    const int LINES = BLOCK / G, COLS = G * N;
    __shared__ __align__(16) float sum[2][LINES][COLS];
    store_floats<N>(sum[0][threadIdx.y] + threadIdx.x * N, q);
    store_floats<N>(sum[1][threadIdx.y] + threadIdx.x * N, k);
    __syncthreads();
    float *out = part + (int64_t)blockIdx.y * 2 * d;
    for (int i = threadIdx.y * G + threadIdx.x; i < 2 * COLS; i += BLOCK) {
        int which = i / COLS, at = i % COLS;
        int64_t col = (int64_t)blockIdx.x * COLS + at;
        float x = 0;
        for (int r = 0; col < d && r < LINES; r++)
            x += sum[which][r][at];
        if (col < d)
            out[which * d + col] = x;
    }
}

template <class T, int N, int G>
static __global__ void __launch_bounds__(BLOCK) head_norm_dw_parts(head_dw_args<T> a)
{
    const int64_t normed_heads = a.heads + a.kv, all = normed_heads + a.kv;
    const int64_t col = ((int64_t)blockIdx.x * G + threadIdx.x) * N;
    const int64_t from = (int64_t)blockIdx.y * a.chunk;
    const int64_t to = (from + a.chunk < a.rows ? from + a.chunk : a.rows) * normed_heads;
    head_walk walk = walk_heads(from * normed_heads + threadIdx.y, BLOCK / G, normed_heads);
    float q[N] = {}, k[N] = {};
    while (col < a.d && walk.at.i < to) {
        held<T, N> dy[HEADS], x[HEADS];
        float rstd[HEADS];
        head_at at[HEADS];
        for (int u = 0; u < HEADS; u++) {
            at[u] = next_head(&walk);
            int64_t i = (at[u].n * all + at[u].head) * a.d + col;
            if (at[u].i >= to)
                continue;
            dy[u] = load<T, N>(a.dy + i);
            x[u] = load<T, N>(a.x + i);
            rstd[u] = a.stat[at[u].i];
        }
        for (int u = 0; u < HEADS; u++) {
            held<T, N> h;
            float v[N];
            if (at[u].i >= to)
                continue;
            for (int j = 0; j < N; j++)
                v[j] = nth(x[u], j) * rstd[u];
            hold(&h, v);
            for (int j = 0; j < N; j++)
                v[j] = nth(dy[u], j) * (a.plus_one ? v[j] : nth(h, j));
            for (int j = 0; j < N; j++)
                q[j] += at[u].head < a.heads ? v[j] : 0;
            for (int j = 0; j < N; j++)
                k[j] += at[u].head < a.heads ? 0 : v[j];
        }
    }
    write_parts<N, G>(q, k, a.part, a.d);
}

/* Rows of a chunk: few enough to fill a device, many enough to be worth a sum. */
static int64_t chunk_of(int64_t rows)
{
    enum { LEAST = 8, CHUNKS = 512 };
    int64_t per = (rows + CHUNKS - 1) / CHUNKS;
    return per < LEAST ? (int64_t)LEAST : per;
}

template <class T> static void head_norm_dw(const lm_call *c)
{
    const lm_head_norm_attr *at = (const lm_head_norm_attr *)c->attr;
    const int N = wide<T>::n;
    int64_t rows = rows_of(&c->in[1]), d = at->head_dim;
    int64_t chunk = chunk_of(rows), chunks = (rows + chunk - 1) / chunk;
    head_dw_args<T> a = { in_ptr<T>(c, 0),
                          in_ptr<T>(c, 1),
                          in_ptr<float>(c, 2),
                          (float *)c->work,
                          rows,
                          at->heads,
                          at->kv_heads,
                          d,
                          chunk,
                          at->plus_one };
    if (chunks && packs<T>(N, d, a.dy, a.x)) {
        dim3 grid((unsigned)((d + 16 * N - 1) / (16 * N)), (unsigned)chunks);
        LM_LAUNCH((head_norm_dw_parts<T, N, 16>), grid, dim3(16, BLOCK / 16), 0, c->stream, a);
    } else if (chunks) {
        dim3 grid((unsigned)((d + 31) / 32), (unsigned)chunks);
        LM_LAUNCH((head_norm_dw_parts<T, 1, 32>), grid, dim3(32, BLOCK / 32), 0, c->stream, a);
    }
    lm_cuda_fold(c, chunks, d, out_ptr<float>(c, 0), out_ptr<float>(c, 1), at->acc);
}

static size_t head_norm_dw_work(const lm_call *c, int threads)
{
    const lm_head_norm_attr *at = (const lm_head_norm_attr *)c->attr;
    int64_t rows = rows_of(&c->in[1]), chunk = chunk_of(rows);
    (void)threads;
    return (size_t)((rows + chunk - 1) / chunk) * (size_t)at->head_dim * 2 * sizeof(float);
}

extern "C" const lm_kernel lm_head_norm_cuda_kernels[] = {
    LM_CUDA_ROWS("head_norm", head_norm, nullptr),
    LM_CUDA_ROWS("head_norm_dx", head_norm_dx, nullptr),
    LM_CUDA_ROWS("head_norm_dw", head_norm_dw, head_norm_dw_work), LM_CUDA_END
};
