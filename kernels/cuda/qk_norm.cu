/* SPDX-License-Identifier: Apache-2.0 */
/* qk_norm.cu -- the norm of all queries of a row, and of all its keys (kernels/norm.h).
 *
 * A block takes the queries, the keys or the values of a row, and reads what it norms twice, the second time from the
 * cache. */
#include "kernels/cuda/norm.cuh"

enum { BLOCK = 256, LINES = 8 };

template <class T> struct qk_args {
    const T *x, *dy;
    const float *wq, *wk;
    T *out;
    float *stat;
    int64_t rows, q, kv; /* numbers of the queries, of the keys, of the values of a row */
    float eps;
};

/* The contribution of a thread to the sum of its part of a row. */
template <class T, int N, bool DX>
static __device__ inline float qk_sum(const held<T, N> &x, const held<T, N> &dy,
                                      const float (&w)[N])
{
    float sum = 0;
    for (int j = 0; j < N; j++)
        sum = fmaf(DX ? nth(dy, j) * w[j] : nth(x, j), nth(x, j), sum);
    return sum;
}

/* y = w x rstd; DX: rstd (dy w - x rstd g2), g2 being the mean of dy w x rstd. */
template <class T, int N, bool DX>
static __device__ inline held<T, N> qk_put(const held<T, N> &x, const held<T, N> &dy,
                                           const float (&w)[N], float rstd, float g2)
{
    held<T, N> out;
    float v[N];
    for (int j = 0; j < N; j++)
        v[j] =
            DX ? rstd * fmaf(-nth(x, j) * rstd, g2, nth(dy, j) * w[j]) : w[j] * (nth(x, j) * rstd);
    hold(&out, v);
    return out;
}

template <class T, int N, bool DX>
static __global__ void __launch_bounds__(BLOCK) qk_rows(qk_args<T> a)
{
    const int64_t all = a.q + 2 * a.kv, step = (int64_t)BLOCK * N;
    for (int64_t i = blockIdx.x; i < 3 * a.rows; i += gridDim.x) {
        const int64_t n = i / 3;
        const int part = (int)(i % 3);
        const int64_t at = n * all + (part > 0 ? a.q : 0) + (part > 1 ? a.kv : 0);
        const int64_t width = part ? a.kv : a.q, first = (int64_t)threadIdx.x * N;
        if (part == 2) {
            for (int64_t k = first; k < width; k += step)
                store<T, N>(a.out + at + k, load<T, N>((DX ? a.dy : a.x) + at + k));
            continue;
        }
        const float *weights = part ? a.wk : a.wq;
        held<T, N> x = {}, dy = {};
        float sum = 0, w[N];
        for (int64_t k = first; k < width; k += step) {
            x = load<T, N>(a.x + at + k);
            if (DX)
                dy = load<T, N>(a.dy + at + k);
            load_floats<N>(w, weights + k);
            sum += qk_sum<T, N, DX>(x, dy, w);
        }
        sum = block_sum(sum);
        float rstd = DX ? a.stat[2 * n + part] : 1 / sqrtf(sum / (float)width + a.eps);
        if (!DX && threadIdx.x == 0)
            a.stat[2 * n + part] = rstd;
        for (int64_t k = first; k < width; k += step) {
            x = load<T, N>(a.x + at + k);
            if (DX)
                dy = load<T, N>(a.dy + at + k);
            load_floats<N>(w, weights + k);
            store<T, N>(a.out + at + k,
                        qk_put<T, N, DX>(x, dy, w, rstd, sum * rstd / (float)width));
        }
    }
}

template <class T> static qk_args<T> qk_of(const lm_call *c, int x, int w, float *stat)
{
    const lm_qk_norm_attr *at = (const lm_qk_norm_attr *)c->attr;
    return qk_args<T>{
        in_ptr<T>(c, x),         in_ptr<T>(c, 0),          in_ptr<float>(c, w),
        in_ptr<float>(c, w + 1), out_ptr<T>(c, 0),         stat,
        rows_of(&c->in[x]),      at->heads * at->head_dim, at->kv_heads * at->head_dim,
        (float)at->eps
    };
}

template <class T, bool DX> static void run_rows(const qk_args<T> &a, const lm_stream *s)
{
    const int N = wide<T>::n;
    unsigned blocks = grid_for(3 * a.rows, 1, s);
    bool packed = packs<T>(N, a.q, a.x, a.dy, a.out) && packs<T>(N, a.kv, a.x) &&
                  packs<float>(4, a.q, a.wq) && packs<float>(4, a.kv, a.wk);
    if (packed)
        LM_LAUNCH((qk_rows<T, N, DX>), blocks, dim3(BLOCK), 0, s, a);
    else
        LM_LAUNCH((qk_rows<T, 1, DX>), blocks, dim3(BLOCK), 0, s, a);
}

template <class T> static void qk_norm(const lm_call *c)
{
    run_rows<T, false>(qk_of<T>(c, 0, 1, out_ptr<float>(c, 1)), c->stream);
}

template <class T> static void qk_norm_dx(const lm_call *c)
{
    run_rows<T, true>(qk_of<T>(c, 1, 2, in_ptr<float>(c, 4)), c->stream);
}

/* ---- the weights' gradients ---- */

/* Block: 32 columns of queries and keys in x, LINES in y over the rows of chunk blockIdx.y. */
template <class T>
static __global__ void __launch_bounds__(32 * LINES)
    qk_parts(const T *dy, const T *x, const float *stat, float *part, int64_t rows, int64_t q,
             int64_t kv, int64_t chunk)
{
    __shared__ float sum[LINES][32];
    const int64_t col = (int64_t)blockIdx.x * 32 + threadIdx.x, all = q + 2 * kv;
    const int64_t from = (int64_t)blockIdx.y * chunk,
                  to = from + chunk < rows ? from + chunk : rows;
    float g = 0;
    for (int64_t n = from + threadIdx.y; col < q + kv && n < to; n += LINES)
        g = fmaf(to_float(dy[n * all + col]), to_float(x[n * all + col]) * stat[2 * n + (col >= q)],
                 g);
    sum[threadIdx.y][threadIdx.x] = g;
    __syncthreads();
    if (threadIdx.y != 0 || col >= q + kv)
        return;
    for (int k = 1; k < LINES; k++)
        g += sum[k][threadIdx.x];
    part[(int64_t)blockIdx.y * (q + kv) + col] = g;
}

/* Rows of a chunk: few enough to fill a device, many enough to be worth a sum. */
static int64_t chunk_of(int64_t rows)
{
    enum { LEAST = 64, CHUNKS = 64 };
    int64_t per = (rows + CHUNKS - 1) / CHUNKS;
    return per < LEAST ? (int64_t)LEAST : per;
}

template <class T> static void qk_norm_dw(const lm_call *c)
{
    const lm_qk_norm_attr *at = (const lm_qk_norm_attr *)c->attr;
    int64_t rows = rows_of(&c->in[1]), q = at->heads * at->head_dim,
            kv = at->kv_heads * at->head_dim;
    int64_t chunk = chunk_of(rows), chunks = (rows + chunk - 1) / chunk;
    dim3 grid((unsigned)((q + kv + 31) / 32), (unsigned)chunks);
    if (chunks)
        LM_LAUNCH((qk_parts<T>), grid, dim3(32, LINES), 0, c->stream, in_ptr<T>(c, 0),
                  in_ptr<T>(c, 1), in_ptr<float>(c, 2), (float *)c->work, rows, q, kv, chunk);
    lm_cuda_fold_unlike(c, chunks, q, kv, out_ptr<float>(c, 0), out_ptr<float>(c, 1), at->acc);
}

static size_t qk_norm_dw_work(const lm_call *c, int threads)
{
    const lm_qk_norm_attr *at = (const lm_qk_norm_attr *)c->attr;
    int64_t rows = rows_of(&c->in[1]), chunk = chunk_of(rows);
    (void)threads;
    return (size_t)((rows + chunk - 1) / chunk) *
           (size_t)((at->heads + at->kv_heads) * at->head_dim) * sizeof(float);
}

extern "C" const lm_kernel lm_qk_norm_cuda_kernels[] = {
    LM_CUDA_ROWS("qk_norm", qk_norm, nullptr), LM_CUDA_ROWS("qk_norm_dx", qk_norm_dx, nullptr),
    LM_CUDA_ROWS("qk_norm_dw", qk_norm_dw, qk_norm_dw_work), LM_CUDA_END
};
