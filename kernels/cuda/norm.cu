/* norm.cu -- RMSNorm and LayerNorm (kernels/norm.h).
 *
 * A row belongs to a warp or to a block, which keeps it in registers in its own type, so that it is
 * read once; rows too wide for that are read again, by the threads that read them first.  Sums of a
 * row go over fixed lanes.  The variance is taken about the rounded mean and then corrected for that
 * rounding, so that a mean far larger than the deviation costs no digits.
 *
 * Weight gradients: rows in chunks, whose number follows from the shape alone; a block adds up a
 * stripe of columns of a chunk, then the chunks are added in order. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/norm.h"
}

enum { BLOCK = 256, WARPS = BLOCK / 32 };

/* N numbers of a row that packs allow to read at once. */
template <class T, int N> static __device__ inline pack<T, N> load(const T *p)
{
    return *reinterpret_cast<const pack<T, N> *>(p);
}

template <class T, int N> static __device__ inline void store(T *p, const pack<T, N> &v)
{
    *reinterpret_cast<pack<T, N> *>(p) = v;
}

/* The same of F32 weights, in packs of 4 where N allows. */
template <int N> static __device__ inline void load_weights(float (&out)[N], const float *w)
{
    const int M = N % 4 ? 1 : 4;
    for (int j = 0; j < N; j += M) {
        pack<float, M> p = load<float, M>(w + j);
        for (int k = 0; k < M; k++)
            out[j + k] = p.v[k];
    }
}

/* Over the G threads of a row: a warp, or the block. */
template <int G> static __device__ inline float row_sum(float x)
{
    return G == 32 ? warp_sum(x) : block_sum(x);
}

/* Two sums at the price of one. */
template <int G> static __device__ inline void row_sums(float *a, float *b)
{
    __shared__ float part[2][32];
    float x = warp_sum(*a), y = warp_sum(*b);
    if (G > 32) {
        unsigned t = threadIdx.x;
        __syncthreads(); /* part may still be read */
        if (t % 32 == 0) {
            part[0][t / 32] = x;
            part[1][t / 32] = y;
        }
        __syncthreads();
        x = warp_sum(t % 32 < G / 32 ? part[0][t % 32] : 0);
        y = warp_sum(t % 32 < G / 32 ? part[1][t % 32] : 0);
    }
    *a = x;
    *b = y;
}

/* ---- norm ---- */

template <class T> struct norm_args {
    const T *x, *r;
    const float *w, *b;
    T *y, *s;
    float *stat;
    int64_t rows, c;
    float eps;
    bool layer;
};

/* Threads: x within the row, y over rows.  P: packs of N that a thread keeps; 0: none, read again. */
template <class T, int N, int G, int P>
static __global__ void __launch_bounds__(G == 32 ? BLOCK : G, 1) norm_rows(norm_args<T> a)
{
    const int64_t per = (int64_t)G * N, c = a.c;
    const int steps = P ? P : (int)((c + per - 1) / per);
    pack<T, N> kept[P ? P : 1] = {};
    for (int64_t n = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; n < a.rows;
         n += (int64_t)gridDim.x * blockDim.y) {
        const int64_t first = (int64_t)threadIdx.x * N, row = n * c;
        const T *src = (a.r ? a.s : a.x) + row;
        float sum = 0, off = 0, sq = 0;
        for (int k = 0; k < steps; k++) {
            int64_t i = first + k * per;
            if (i >= c)
                break;
            pack<T, N> v = load<T, N>(a.x + row + i);
            if (a.r) {
                pack<T, N> r = load<T, N>(a.r + row + i);
                for (int j = 0; j < N; j++)
                    v.v[j] = from_float<T>(to_float(v.v[j]) + to_float(r.v[j]));
                store<T, N>(a.s + row + i, v);
            }
            for (int j = 0; j < N; j++)
                sum += a.layer ? to_float(v.v[j]) : 0;
            if (P)
                kept[P ? k : 0] = v;
        }
        float mean = a.layer ? row_sum<G>(sum) / (float)c : 0;
        for (int k = 0; k < steps; k++) {
            int64_t i = first + k * per;
            if (i >= c)
                break;
            pack<T, N> v = P ? kept[P ? k : 0] : load<T, N>(src + i);
            for (int j = 0; j < N; j++) {
                float d = to_float(v.v[j]) - mean;
                off += d;
                sq += d * d;
            }
        }
        row_sums<G>(&off, &sq);
        off = a.layer ? off / (float)c : 0; /* what rounding left of the mean */
        float var = sq / (float)c - off * off;
        float rstd = 1 / sqrtf((var < 0 ? 0 : var) + a.eps);
        if (threadIdx.x == 0) {
            a.stat[2 * n] = mean + off;
            a.stat[2 * n + 1] = rstd;
        }
        for (int k = 0; k < steps; k++) {
            int64_t i = first + k * per;
            if (i >= c)
                break;
            pack<T, N> v = P ? kept[P ? k : 0] : load<T, N>(src + i);
            float w[N], b[N];
            load_weights<N>(w, a.w + i);
            if (a.b)
                load_weights<N>(b, a.b + i);
            for (int j = 0; j < N; j++) {
                float h = (to_float(v.v[j]) - mean - off) * rstd;
                v.v[j] = from_float<T>(fmaf(w[j], a.layer ? h : rounded<T>(h), a.b ? b[j] : 0));
            }
            store<T, N>(a.y + row + i, v);
        }
    }
}

/* By how many packs a row has.  A thread of a block keeps 16 numbers: of more, registers run out.
 * Rows that come number by number (N 1) are rare: for them there are only two of the forms, a warp
 * that keeps 4 a lane and a block that reads again. */
#define LAUNCH_ROWS(kernel, T, N, a, s)                                                     \
    do {                                                                                    \
        enum {                                                                              \
            one_ = (N) > 1 ? 1 : 4,                                                         \
            block_one_ = (N) > 1 ? 1 : 0,                                                   \
            some_ = (N) > 1 ? 16 / (N) : 0,                                                 \
            broad_ = (N) > 1 ? 1024 : BLOCK                                                 \
        };                                                                                  \
        int64_t units_ = ((a).c + (N)-1) / (N);                                             \
        dim3 few_(32, WARPS);                                                               \
        unsigned warps_ = grid_for((a).rows, WARPS, s), blocks_ = grid_for((a).rows, 1, s); \
        if (units_ <= 32)                                                                   \
            LM_LAUNCH((kernel<T, N, 32, one_>), warps_, few_, 0, s, a);                     \
        else if (units_ <= 128)                                                             \
            LM_LAUNCH((kernel<T, N, 32, 4>), warps_, few_, 0, s, a);                        \
        else if (units_ <= BLOCK)                                                           \
            LM_LAUNCH((kernel<T, N, BLOCK, block_one_>), blocks_, dim3(BLOCK), 0, s, a);    \
        else if (units_ <= some_ * BLOCK)                                                   \
            LM_LAUNCH((kernel<T, N, BLOCK, some_>), blocks_, dim3(BLOCK), 0, s, a);         \
        else if (units_ <= some_ * 1024)                                                    \
            LM_LAUNCH((kernel<T, N, broad_, some_>), blocks_, dim3(broad_), 0, s, a);       \
        else                                                                                \
            LM_LAUNCH((kernel<T, N, BLOCK, 0>), blocks_, dim3(BLOCK), 0, s, a);             \
    } while (0)

template <class T> static void norm(const lm_call *c)
{
    const lm_norm_attr *at = (const lm_norm_attr *)c->attr;
    const int N = wide<T>::n;
    norm_args<T> a = { in_ptr<T>(c, 0),      in_ptr<T>(c, 3),          in_ptr<float>(c, 1),
                       in_ptr<float>(c, 2),  out_ptr<T>(c, 0),         out_ptr<T>(c, 2),
                       out_ptr<float>(c, 1), rows_of(&c->in[0]),       width_of(&c->in[0]),
                       (float)at->eps,       at->kind == LM_NORM_LAYER };
    if (packs<T>(N, a.c, a.x, a.r, a.y, a.s) && packs<float>(4, a.c, a.w, a.b))
        LAUNCH_ROWS(norm_rows, T, N, a, c->stream);
    else
        LAUNCH_ROWS(norm_rows, T, 1, a, c->stream);
}

/* ---- norm_dx ---- */

template <class T> struct norm_dx_args {
    const T *dy, *s, *dres;
    const float *w, *stat;
    T *ds;
    int64_t rows, c;
    bool layer;
};

template <class T, int N, int G, int P>
static __global__ void __launch_bounds__(G == 32 ? BLOCK : G, 1) norm_dx_rows(norm_dx_args<T> a)
{
    const int64_t per = (int64_t)G * N, c = a.c;
    const int steps = P ? P : (int)((c + per - 1) / per);
    pack<T, N> kept[P ? P : 1] = {}, kept_s[P ? P : 1] = {};
    for (int64_t n = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; n < a.rows;
         n += (int64_t)gridDim.x * blockDim.y) {
        const int64_t first = (int64_t)threadIdx.x * N, row = n * c;
        const float mean = a.stat[2 * n], rstd = a.stat[2 * n + 1];
        float g1 = 0, g2 = 0, w[N];
        for (int k = 0; k < steps; k++) {
            int64_t i = first + k * per;
            if (i >= c)
                break;
            pack<T, N> dy = load<T, N>(a.dy + row + i), s = load<T, N>(a.s + row + i);
            load_weights<N>(w, a.w + i);
            for (int j = 0; j < N; j++) {
                float g = to_float(dy.v[j]) * w[j];
                g1 += g;
                g2 += g * (to_float(s.v[j]) - mean) * rstd;
            }
            if (P) {
                kept[P ? k : 0] = dy;
                kept_s[P ? k : 0] = s;
            }
        }
        row_sums<G>(&g1, &g2);
        g1 = a.layer ? g1 / (float)c : 0;
        g2 /= (float)c;
        for (int k = 0; k < steps; k++) {
            int64_t i = first + k * per;
            if (i >= c)
                break;
            pack<T, N> dy = P ? kept[P ? k : 0] : load<T, N>(a.dy + row + i), res;
            pack<T, N> s = P ? kept_s[P ? k : 0] : load<T, N>(a.s + row + i);
            if (a.dres)
                res = load<T, N>(a.dres + row + i);
            load_weights<N>(w, a.w + i);
            for (int j = 0; j < N; j++) {
                float g = to_float(dy.v[j]) * w[j], h = (to_float(s.v[j]) - mean) * rstd;
                float d = rstd * (g - g1 - h * g2);
                dy.v[j] = from_float<T>(a.dres ? d + to_float(res.v[j]) : d);
            }
            store<T, N>(a.ds + row + i, dy);
        }
    }
}

template <class T> static void norm_dx(const lm_call *c)
{
    const lm_norm_attr *at = (const lm_norm_attr *)c->attr;
    const int N = wide<T>::n;
    norm_dx_args<T> a = { in_ptr<T>(c, 0),     in_ptr<T>(c, 1),     in_ptr<T>(c, 4),
                          in_ptr<float>(c, 2), in_ptr<float>(c, 3), out_ptr<T>(c, 0),
                          rows_of(&c->in[1]),  width_of(&c->in[1]), at->kind == LM_NORM_LAYER };
    if (packs<T>(N, a.c, a.dy, a.s, a.dres, a.ds) && packs<float>(4, a.c, a.w))
        LAUNCH_ROWS(norm_dx_rows, T, N, a, c->stream);
    else
        LAUNCH_ROWS(norm_dx_rows, T, 1, a, c->stream);
}

/* ---- sums over rows: parts by chunk, then the chunks in order ---- */

/* What a block adds up: rows of chunk blockIdx.y, columns of tile blockIdx.x.  Threads: G in x over
 * packs of N columns, BLOCK / G in y over rows.  The two sums of a column go to part[chunk][0][c]
 * and part[chunk][1][c]; `both` false: only the first, part[chunk][c]. */
template <int N, int G>
static __device__ inline void write_parts(const float (&a)[N], const float (&b)[N], bool both,
                                          float *part, int64_t c)
{
    const int ROWS = BLOCK / G, COLS = G * N;
    __shared__ float sum[2][ROWS][COLS];
    for (int j = 0; j < N; j++) {
        sum[0][threadIdx.y][threadIdx.x * N + j] = a[j];
        sum[1][threadIdx.y][threadIdx.x * N + j] = b[j];
    }
    __syncthreads();
    float *out = part + (int64_t)blockIdx.y * (both ? 2 : 1) * c;
    for (int i = threadIdx.y * G + threadIdx.x; i < COLS; i += BLOCK) {
        int64_t col = (int64_t)blockIdx.x * COLS + i;
        for (int which = 0; col < c && which < (both ? 2 : 1); which++) {
            float x = 0;
            for (int r = 0; r < ROWS; r++)
                x += sum[which][r][i];
            out[which * c + col] = x;
        }
    }
}

/* Columns of part [chunks][n] to out0 (the first c of them) and out1. */
static __global__ void __launch_bounds__(BLOCK)
    fold_parts(const float *part, int64_t chunks, int64_t n, int64_t c, float *out0, float *out1,
               bool first)
{
    __shared__ float sum[WARPS][32];
    int64_t col = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float x = 0;
    for (int64_t k = threadIdx.y; col < n && k < chunks; k += WARPS)
        x += part[k * n + col];
    sum[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    if (threadIdx.y != 0 || col >= n)
        return;
    for (int k = 1; k < WARPS; k++)
        x += sum[k][threadIdx.x];
    float *out = col < c ? out0 + col : out1 + (col - c);
    *out = first ? x : *out + x;
}

static void fold(const lm_call *c, int64_t chunks, int64_t width, float *out0, float *out1,
                 lm_acc acc)
{
    int64_t n = out1 ? 2 * width : width;
    LM_LAUNCH(fold_parts, (unsigned)((n + 31) / 32), dim3(32, WARPS), 0, c->stream,
              (const float *)c->work, chunks, n, width, out0, out1, overwrites(c, acc));
}

/* Rows of a chunk: few enough to fill a device, many enough to be worth a sum. */
static int64_t chunk_of(int64_t rows, int64_t least, int64_t most_chunks)
{
    int64_t per = (rows + most_chunks - 1) / most_chunks;
    return per < least ? least : per;
}

template <class T> struct norm_dw_args {
    const T *dy, *s;
    const float *stat;
    float *part;
    int64_t rows, c, chunk;
    bool layer, both;
};

template <class T, int N>
static __global__ void __launch_bounds__(BLOCK) norm_dw_parts(norm_dw_args<T> a)
{
    int64_t i = ((int64_t)blockIdx.x * 32 + threadIdx.x) * N, n = (int64_t)blockIdx.y * a.chunk;
    int64_t past = n + a.chunk < a.rows ? n + a.chunk : a.rows;
    float w[N] = { 0 }, b[N] = { 0 };
    for (n += threadIdx.y; i < a.c && n < past; n += WARPS) {
        pack<T, N> dy = load<T, N>(a.dy + n * a.c + i), s = load<T, N>(a.s + n * a.c + i);
        float mean = a.stat[2 * n], rstd = a.stat[2 * n + 1];
        for (int j = 0; j < N; j++) {
            float g = to_float(dy.v[j]), h = (to_float(s.v[j]) - mean) * rstd;
            w[j] += g * (a.layer ? h : rounded<T>(h));
            b[j] += g;
        }
    }
    write_parts<N, 32>(w, b, a.both, a.part, a.c);
}

enum { DW_LEAST = 32, DW_CHUNKS = 128, HEAD_LEAST = 8, HEAD_CHUNKS = 512 };

template <class T> static void norm_dw(const lm_call *c)
{
    const lm_norm_attr *at = (const lm_norm_attr *)c->attr;
    const int N = wide<T>::n;
    int64_t rows = rows_of(&c->in[1]), width = width_of(&c->in[1]);
    int64_t chunk = chunk_of(rows, DW_LEAST, DW_CHUNKS), chunks = (rows + chunk - 1) / chunk;
    float *db = out_ptr<float>(c, 1);
    norm_dw_args<T> a = {
        in_ptr<T>(c, 0), in_ptr<T>(c, 1), in_ptr<float>(c, 2),       (float *)c->work, rows,
        width,           chunk,           at->kind == LM_NORM_LAYER, db != nullptr
    };
    dim3 block(32, WARPS);
    if (chunks && packs<T>(N, width, a.dy, a.s)) {
        dim3 grid((unsigned)((width + 32 * N - 1) / (32 * N)), (unsigned)chunks);
        LM_LAUNCH((norm_dw_parts<T, N>), grid, block, 0, c->stream, a);
    } else if (chunks) {
        dim3 grid((unsigned)((width + 31) / 32), (unsigned)chunks);
        LM_LAUNCH((norm_dw_parts<T, 1>), grid, block, 0, c->stream, a);
    }
    fold(c, chunks, width, out_ptr<float>(c, 0), db, at->acc);
}

static size_t norm_dw_work(const lm_call *c, int threads)
{
    int64_t rows = rows_of(&c->in[1]), chunk = chunk_of(rows, DW_LEAST, DW_CHUNKS);
    bool both = c->n_out > 1 && c->out[1].ndim;
    (void)threads;
    return (size_t)((rows + chunk - 1) / chunk) * (size_t)width_of(&c->in[1]) * (both ? 2 : 1) *
           sizeof(float);
}

/* ---- the norm of queries and keys ---- */

template <class T> struct head_args {
    const T *x, *dy;
    const float *wq, *wk;
    T *out;
    float *stat;
    int64_t rows, heads, kv, d; /* rows of (heads + 2 kv) heads of d */
    float eps;
};

/* Over G neighbouring lanes of a warp; all its lanes come here. */
template <int G> static __device__ inline float lanes_sum(float x)
{
    for (int o = G / 2; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

/* G lanes a head, which they read twice: the second time from the cache. */
template <class T, int N, int G>
static __global__ void __launch_bounds__(BLOCK) head_norm_rows(head_args<T> a)
{
    const int64_t normed = a.heads + a.kv, all = normed + a.kv, total = a.rows * all;
    for (int64_t base = (int64_t)blockIdx.x * blockDim.y; base < total;
         base += (int64_t)gridDim.x * blockDim.y) {
        int64_t i = base + threadIdx.y, n = i / all, head = i - n * all;
        bool live = i < total, norm = live && head < normed;
        const T *x = a.x + i * a.d;
        const float *w = head < a.heads ? a.wq : a.wk;
        float sq = 0;
        for (int64_t k = (int64_t)threadIdx.x * N; norm && k < a.d; k += G * N) {
            pack<T, N> v = load<T, N>(x + k);
            for (int j = 0; j < N; j++)
                sq += to_float(v.v[j]) * to_float(v.v[j]);
        }
        float rstd = 1 / sqrtf(lanes_sum<G>(sq) / (float)a.d + a.eps);
        if (norm && threadIdx.x == 0)
            a.stat[n * normed + head] = rstd;
        for (int64_t k = (int64_t)threadIdx.x * N; live && k < a.d; k += G * N) {
            pack<T, N> v = load<T, N>(x + k);
            for (int j = 0; norm && j < N; j++)
                v.v[j] = from_float<T>(w[k + j] * rounded<T>(to_float(v.v[j]) * rstd));
            store<T, N>(a.out + i * a.d + k, v);
        }
    }
}

template <class T, int N, int G>
static __global__ void __launch_bounds__(BLOCK) head_norm_dx_rows(head_args<T> a)
{
    const int64_t normed = a.heads + a.kv, all = normed + a.kv, total = a.rows * all;
    for (int64_t base = (int64_t)blockIdx.x * blockDim.y; base < total;
         base += (int64_t)gridDim.x * blockDim.y) {
        int64_t i = base + threadIdx.y, n = i / all, head = i - n * all;
        bool live = i < total, norm = live && head < normed;
        const T *x = a.x + i * a.d, *dy = a.dy + i * a.d;
        const float *w = head < a.heads ? a.wq : a.wk;
        const float rstd = norm ? a.stat[n * normed + head] : 0;
        float g2 = 0;
        for (int64_t k = (int64_t)threadIdx.x * N; norm && k < a.d; k += G * N) {
            pack<T, N> v = load<T, N>(x + k), g = load<T, N>(dy + k);
            for (int j = 0; j < N; j++)
                g2 += to_float(g.v[j]) * w[k + j] * to_float(v.v[j]) * rstd;
        }
        g2 = lanes_sum<G>(g2) / (float)a.d;
        for (int64_t k = (int64_t)threadIdx.x * N; live && k < a.d; k += G * N) {
            pack<T, N> g = load<T, N>(dy + k);
            if (norm) {
                pack<T, N> v = load<T, N>(x + k);
                for (int j = 0; j < N; j++)
                    g.v[j] = from_float<T>(
                        rstd * (to_float(g.v[j]) * w[k + j] - to_float(v.v[j]) * rstd * g2));
            }
            store<T, N>(a.out + i * a.d + k, g);
        }
    }
}

#define LAUNCH_HEADS(kernel, T, N, a, s)                                                        \
    do {                                                                                        \
        enum { eight_ = (N) > 1 ? 8 : 32, sixteen_ = (N) > 1 ? 16 : 32 };                       \
        int64_t units_ = (a).d / (N), rows_ = (a).rows * ((a).heads + 2 * (a).kv);              \
        if (units_ <= 8)                                                                        \
            LM_LAUNCH((kernel<T, N, eight_>), grid_for(rows_, BLOCK / eight_, s),               \
                      dim3(eight_, BLOCK / eight_), 0, s, a);                                   \
        else if (units_ <= 16)                                                                  \
            LM_LAUNCH((kernel<T, N, sixteen_>), grid_for(rows_, BLOCK / sixteen_, s),           \
                      dim3(sixteen_, BLOCK / sixteen_), 0, s, a);                               \
        else                                                                                    \
            LM_LAUNCH((kernel<T, N, 32>), grid_for(rows_, WARPS, s), dim3(32, WARPS), 0, s, a); \
    } while (0)

template <class T> static head_args<T> heads_of(const lm_call *c, int x, int w, float *stat)
{
    const lm_head_norm_attr *at = (const lm_head_norm_attr *)c->attr;
    return head_args<T>{ in_ptr<T>(c, x),     in_ptr<T>(c, 0),
                         in_ptr<float>(c, w), in_ptr<float>(c, w + 1),
                         out_ptr<T>(c, 0),    stat,
                         rows_of(&c->in[x]),  at->heads,
                         at->kv_heads,        at->head_dim,
                         (float)at->eps };
}

template <class T> static void head_norm(const lm_call *c)
{
    const int N = wide<T>::n;
    head_args<T> a = heads_of<T>(c, 0, 1, out_ptr<float>(c, 1));
    if (packs<T>(N, a.d, a.x, a.out))
        LAUNCH_HEADS(head_norm_rows, T, N, a, c->stream);
    else
        LAUNCH_HEADS(head_norm_rows, T, 1, a, c->stream);
}

template <class T> static void head_norm_dx(const lm_call *c)
{
    const int N = wide<T>::n;
    head_args<T> a = heads_of<T>(c, 1, 2, in_ptr<float>(c, 4));
    if (packs<T>(N, a.d, a.x, a.dy, a.out))
        LAUNCH_HEADS(head_norm_dx_rows, T, N, a, c->stream);
    else
        LAUNCH_HEADS(head_norm_dx_rows, T, 1, a, c->stream);
}

template <class T> struct head_dw_args {
    const T *dy, *x;
    const float *stat;
    float *part;
    int64_t rows, heads, kv, d, chunk;
};

/* As norm_dw_parts, over the heads of the rows: queries add up in one sum, keys in the other. */
template <class T, int N, int G>
static __global__ void __launch_bounds__(BLOCK) head_norm_dw_parts(head_dw_args<T> a)
{
    const int64_t normed = a.heads + a.kv, all = normed + a.kv;
    int64_t col = ((int64_t)blockIdx.x * G + threadIdx.x) * N, from = (int64_t)blockIdx.y * a.chunk;
    int64_t to = from + a.chunk < a.rows ? from + a.chunk : a.rows;
    float q[N] = { 0 }, k[N] = { 0 };
    for (int64_t i = from * normed + threadIdx.y; col < a.d && i < to * normed; i += BLOCK / G) {
        int64_t n = i / normed, head = i - n * normed, at = (n * all + head) * a.d + col;
        pack<T, N> dy = load<T, N>(a.dy + at), x = load<T, N>(a.x + at);
        float rstd = a.stat[i];
        for (int j = 0; j < N; j++) {
            float g = to_float(dy.v[j]) * rounded<T>(to_float(x.v[j]) * rstd);
            q[j] += head < a.heads ? g : 0;
            k[j] += head < a.heads ? 0 : g;
        }
    }
    write_parts<N, G>(q, k, true, a.part, a.d);
}

template <class T> static void head_norm_dw(const lm_call *c)
{
    const lm_head_norm_attr *at = (const lm_head_norm_attr *)c->attr;
    const int N = wide<T>::n;
    int64_t rows = rows_of(&c->in[1]), d = at->head_dim;
    int64_t chunk = chunk_of(rows, HEAD_LEAST, HEAD_CHUNKS), chunks = (rows + chunk - 1) / chunk;
    head_dw_args<T> a = { in_ptr<T>(c, 0),
                          in_ptr<T>(c, 1),
                          in_ptr<float>(c, 2),
                          (float *)c->work,
                          rows,
                          at->heads,
                          at->kv_heads,
                          d,
                          chunk };
    if (chunks && packs<T>(N, d, a.dy, a.x)) {
        dim3 grid((unsigned)((d + 16 * N - 1) / (16 * N)), (unsigned)chunks);
        LM_LAUNCH((head_norm_dw_parts<T, N, 16>), grid, dim3(16, BLOCK / 16), 0, c->stream, a);
    } else if (chunks) {
        dim3 grid((unsigned)((d + 31) / 32), (unsigned)chunks);
        LM_LAUNCH((head_norm_dw_parts<T, 1, 32>), grid, dim3(32, WARPS), 0, c->stream, a);
    }
    fold(c, chunks, d, out_ptr<float>(c, 0), out_ptr<float>(c, 1), at->acc);
}

static size_t head_norm_dw_work(const lm_call *c, int threads)
{
    const lm_head_norm_attr *at = (const lm_head_norm_attr *)c->attr;
    int64_t rows = rows_of(&c->in[1]), chunk = chunk_of(rows, HEAD_LEAST, HEAD_CHUNKS);
    (void)threads;
    return (size_t)((rows + chunk - 1) / chunk) * (size_t)at->head_dim * 2 * sizeof(float);
}

extern "C" const lm_kernel lm_norm_cuda_kernels[] = {
    LM_CUDA_ROWS("norm", norm, nullptr),
    LM_CUDA_ROWS("norm_dx", norm_dx, nullptr),
    LM_CUDA_ROWS("norm_dw", norm_dw, norm_dw_work),
    LM_CUDA_ROWS("head_norm", head_norm, nullptr),
    LM_CUDA_ROWS("head_norm_dx", head_norm_dx, nullptr),
    LM_CUDA_ROWS("head_norm_dw", head_norm_dw, head_norm_dw_work),
    LM_CUDA_END
};
