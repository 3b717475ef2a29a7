/* SPDX-License-Identifier: Apache-2.0 */
/* delta.cu -- the delta rule by chunks (kernels/delta.h): a block a value head of a sequence, in the backward a key head
 * with its value heads, whose gradients of queries and keys add up.  The order of steps, and the algebra of the
 * backward, are those of kernels/cpu/delta_dx_simd.c. */
#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/state_rows.cuh"

extern "C" {
#include "kernels/delta.h"
}

enum {
    BLOCK = 256,
    FORGETS = 128 /* exp(-FORGETS) is 0 in F32, so a decay by more, as by -inf, is one by as much */
};
static const int C = LM_DELTA_CHUNK;

template <class T> struct delta_args {
    lm_delta_attr a;
    const T *qkv, *dout;
    const float *g, *beta, *given; /* given: states of the forward */
    const int32_t *lo;
    T *o, *dqkv;
    float *states, *dg, *dbeta, *work;
    state_view rows; /* delta_cached: states has those of slots */
    int64_t floats;  /* of a block's scratch */
};

/* Decays of a chunk of one head, in shared memory. */
struct decays {
    float gamma[C], rest[C], e[C], d[C], beta[C];
    double dgamma[C];
    float dbeta[C], along[C];
    int from[C], n;
    int64_t row;
};

/* Arrays of a chunk: [C][D], [C][E], [C][C]; S and dS [D][E]. */
struct chunk {
    float *q, *k, *dq, *dk, *t, *rq, *rk;
    float *v, *X, *V, *QS, *dout, *dV;
    float *G, *P, *KK, *M, *less, *dM, *N;
    float *S, *dS;
};

__device__ __host__ inline int64_t floats_of(const lm_delta_attr &a)
{
    int64_t D = a.key_dim, E = a.value_dim;
    return C * (5 * D + 2 + 6 * E + 7 * C) + (1 + a.heads / a.key_heads) * D * E;
}

__device__ inline chunk chunk_at(const lm_delta_attr &a, float *at)
{
    chunk w;
    float **keys[] = { &w.q, &w.k, &w.dq, &w.dk, &w.t };
    float **values[] = { &w.v, &w.X, &w.V, &w.QS, &w.dout, &w.dV };
    float **squares[] = { &w.G, &w.P, &w.KK, &w.M, &w.less, &w.dM, &w.N };
    for (int i = 0; i < 5; i++, at += C * a.key_dim)
        *keys[i] = at;
    for (int i = 0; i < 6; i++, at += C * a.value_dim)
        *values[i] = at;
    for (int i = 0; i < 7; i++, at += C * C)
        *squares[i] = at;
    w.rq = at;
    w.rk = at + C;
    w.S = at + 2 * C;
    w.dS = w.S + a.key_dim * a.value_dim;
    return w;
}

/* along[i] = <x_i, y_i> of rows [C][n]. */
__device__ inline void dot_rows(decays *y, const float *x, const float *z, int64_t n)
{
    for (int64_t i = threadIdx.x / 32; i < C; i += blockDim.x / 32) {
        float sum = warp_dot(x + i * n, z + i * n, n);
        if (threadIdx.x % 32 == 0)
            y->along[i] = sum;
    }
    __syncthreads();
}

/* Of chunk m of a sequence of `rows` rows from `row` on. */
template <class T>
__device__ void read_decays(const delta_args<T> &x, int64_t row, int64_t rows, int64_t m, int64_t h,
                            decays *y)
{
    const int64_t t0 = m * C, left = rows - t0;
    if (threadIdx.x == 0) {
        double sum = 0;
        y->n = (int)(left < C ? left : C);
        y->row = row + t0;
        for (int i = 0; i < C; i++) {
            bool there = i < y->n;
            int64_t cell = (y->row + i) * x.a.heads + h;
            int64_t start = there && x.lo ? x.lo[y->row + i] : 0;
            float g = there ? x.g[cell] : 0;
            sum += g < -FORGETS ? -FORGETS : g;
            y->gamma[i] = (float)sum;
            y->rest[i] = (float)(sum - y->gamma[i]);
            y->beta[i] = there ? x.beta[cell] : 0;
            y->from[i] = start > t0 ? (int)(start - t0) : 0;
            y->e[i] = there && start <= t0 - (t0 > 0) ? expf((float)sum) : 0;
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < C; j += blockDim.x) {
        int last = y->n - 1;
        float since = y->gamma[last] - y->gamma[j] + (y->rest[last] - y->rest[j]);
        y->d[j] = j <= last && j >= y->from[last] ? expf(since) : 0;
    }
    __syncthreads();
}

__device__ inline void between(const decays *y, float *G)
{
    for (int at = threadIdx.x; at < C * C; at += blockDim.x) {
        int i = at / C, j = at % C;
        float since = y->gamma[i] - y->gamma[j] + (y->rest[i] - y->rest[j]);
        G[at] = i < y->n && j <= i && j >= y->from[i] ? expf(since) : 0;
    }
    __syncthreads();
}

/* to = sign by[i] x y, without the diagonal if strict; by NULL: 1. */
__device__ inline void times(float *to, const float *x, const float *y, const float *by, float sign,
                             bool strict)
{
    for (int at = threadIdx.x; at < C * C; at += blockDim.x) {
        int i = at / C;
        to[at] = strict && i == at % C ? 0 : x[at] * y[at] * (by ? by[i] * sign : sign);
    }
    __syncthreads();
}

/* Columns of R [C][n] become those of (I + L)^-1 R, or of its transpose; less = -L.  A thread a column. */
__device__ inline void solve(const float *less, bool transposed, float *R, int64_t n)
{
    for (int64_t e = threadIdx.x; e < n; e += blockDim.x)
        for (int s = 1; s < C; s++) {
            int i = transposed ? C - 1 - s : s;
            float sum = R[i * n + e];
            for (int q = 0; q < s; q++) {
                int j = transposed ? C - 1 - q : q;
                sum = fmaf(transposed ? less[j * C + i] : less[i * C + j], R[j * n + e], sum);
            }
            R[i * n + e] = sum;
        }
    __syncthreads();
}

template <class T> __device__ inline int64_t pitch_of(const delta_args<T> &x)
{
    return 2 * x.a.key_heads * x.a.key_dim + x.a.heads * x.a.value_dim;
}

/* Queries (part 0) or keys (1) divided by their lengths, times scale; r: the reciprocals. */
template <class T>
__device__ void directions(const delta_args<T> &x, int64_t row, int64_t n, int64_t head, int part,
                           float scale, float *to, float *r)
{
    int64_t D = x.a.key_dim, pitch = pitch_of(x);
    read_rows(to, C, x.qkv + row * pitch + (part * x.a.key_heads + head) * D, pitch, n, D);
    for (int64_t i = threadIdx.x / 32; i < C; i += blockDim.x / 32) {
        float by = 1 / sqrtf(warp_dot(to + i * D, to + i * D, D) + (float)x.a.eps);
        for (int64_t d = threadIdx.x % 32; d < D; d += 32)
            to[i * D + d] *= by * scale;
        if (threadIdx.x % 32 == 0)
            r[i] = by;
    }
    __syncthreads();
}

/* The corrections V' of head h, X = K S and what they are made from; queries, keys and S are there. */
template <class T>
__device__ void correct(const delta_args<T> &x, const decays *y, const chunk &w, int64_t h,
                        float *V)
{
    int64_t D = x.a.key_dim, E = x.a.value_dim, pitch = pitch_of(x);
    read_rows(w.v, C, x.qkv + y->row * pitch + 2 * x.a.key_heads * D + h * E, pitch, y->n, E);
    between(y, w.G);
    times(w.M, w.P, w.G, nullptr, 1, false);
    times(w.less, w.KK, w.G, y->beta, -1, true);
    multiply(C, E, D, rows_of_matrix(w.k, D), rows_of_matrix(w.S, E), w.X, false);
    multiply(C, E, D, rows_of_matrix(w.q, D), rows_of_matrix(w.S, E), w.QS, false);
    for (int64_t i = threadIdx.x; i < C * E; i += blockDim.x)
        V[i] = y->beta[i / E] * fmaf(-y->e[i / E], w.X[i], w.v[i]);
    __syncthreads();
    solve(w.less, false, V, E);
}

/* Queries and keys of chunk m of key head `head`, and their products. */
template <class T>
__device__ void read_keys(const delta_args<T> &x, const chunk &w, int64_t row, int64_t rows,
                          int64_t m, int64_t head)
{
    int64_t D = x.a.key_dim, n = rows - m * C;
    row += m * C;
    n = n < C ? n : C;
    directions(x, row, n, head, 0, (float)x.a.scale, w.q, w.rq);
    directions(x, row, n, head, 1, 1.0f, w.k, w.rk);
    multiply(C, C, D, rows_of_matrix(w.q, D), turned(w.k, D), w.P, false);
    multiply(C, C, D, rows_of_matrix(w.k, D), turned(w.k, D), w.KK, false);
}

/* The results of chunk m of a sequence of `rows` rows from `row` on, and w.S behind it. */
template <class T>
__device__ void run_chunk(const delta_args<T> &x, decays *y, const chunk &w, int64_t row,
                          int64_t rows, int64_t m, int64_t h)
{
    const int64_t D = x.a.key_dim, E = x.a.value_dim, H = x.a.heads;
    read_decays(x, row, rows, m, h, y);
    read_keys(x, w, row, rows, m, h / (H / x.a.key_heads));
    correct(x, y, w, h, w.V);
    scale_rows(w.dV, w.QS, C, E, y->e);
    multiply(C, E, C, rows_of_matrix(w.M, C), rows_of_matrix(w.V, E), w.dV, true);
    for (int64_t i = threadIdx.x; i < y->n * E; i += blockDim.x)
        x.o[((y->row + i / E) * H + h) * E + i % E] = from_float<T>(w.dV[i]);
    scale_rows(w.t, w.k, C, D, y->d);
    scale_all(w.S, D * E, y->e[y->n - 1]);
    multiply(D, E, C, turned(w.t, D), rows_of_matrix(w.V, E), w.S, true);
}

template <class T> static __global__ void __launch_bounds__(BLOCK) delta_kernel(delta_args<T> x)
{
    __shared__ decays y;
    const int64_t D = x.a.key_dim, E = x.a.value_dim, H = x.a.heads;
    const chunk w = chunk_at(x.a, x.work + blockIdx.x * x.floats);
    for (int64_t it = blockIdx.x; it < x.a.batch * H; it += gridDim.x) {
        int64_t b = it / H, h = it % H;
        for (int64_t i = threadIdx.x; i < D * E; i += blockDim.x)
            w.S[i] = 0;
        __syncthreads();
        for (int64_t m = 0; m < x.a.chunks; m++) {
            for (int64_t i = threadIdx.x; x.states && i < D * E; i += blockDim.x)
                x.states[((b * x.a.chunks + m) * H + h) * D * E + i] = w.S[i];
            run_chunk(x, &y, w, b * x.a.seq, x.a.seq, m, h);
        }
    }
}

/* ---- delta_cached ---- */

/* One step of the recurrence on the state in memory: a thread a column of it. */
template <class T>
__device__ void run_token(const delta_args<T> &x, const chunk &w, const state_rows &r, int64_t h,
                          float *S)
{
    const int64_t D = x.a.key_dim, E = x.a.value_dim, cell = r.row * x.a.heads + h;
    const int64_t head = h / (x.a.heads / x.a.key_heads), pitch = pitch_of(x);
    const T *v = x.qkv + r.row * pitch + 2 * x.a.key_heads * D + h * E;
    const float decay = r.used ? expf(x.g[cell]) : 0, beta = x.beta[cell];
    directions(x, r.row, 1, head, 0, (float)x.a.scale, w.q, w.rq);
    directions(x, r.row, 1, head, 1, 1.0f, w.k, w.rk);
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
        float seen = 0, o = 0;
        for (int64_t d = 0; r.used && d < D; d++)
            seen = fmaf(w.k[d], S[d * E + e], seen);
        float fix = beta * fmaf(-decay, seen, to_float(v[e]));
        for (int64_t d = 0; d < D; d++) {
            float now = fmaf(w.k[d], fix, r.used ? decay * S[d * E + e] : 0);
            S[d * E + e] = now;
            o = fmaf(w.q[d], now, o);
        }
        x.o[cell * E + e] = from_float<T>(o);
    }
    __syncthreads();
}

template <class T>
__device__ void run_prompt(const delta_args<T> &x, decays *y, const chunk &w, const state_rows &r,
                           int64_t h, float *S)
{
    const int64_t size = x.a.key_dim * x.a.value_dim;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
        w.S[i] = r.used ? S[i] : 0;
    __syncthreads();
    for (int64_t m = 0; m * C < r.fresh; m++)
        run_chunk(x, y, w, r.row, r.fresh, m, h);
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x)
        S[i] = w.S[i];
    __syncthreads();
}

/* A block a value head of a sequence; o is zeros before. */
template <class T> static __global__ void __launch_bounds__(BLOCK) cached_kernel(delta_args<T> x)
{
    __shared__ decays y;
    const int64_t H = x.a.heads;
    const chunk w = chunk_at(x.a, x.work + blockIdx.x * x.floats);
    for (int64_t it = blockIdx.x; it < x.a.batch * H; it += gridDim.x) {
        const state_rows r = state_rows_of(x.rows, it / H);
        const int64_t h = it % H;
        float *S = x.states + (r.slot * H + h) * x.a.key_dim * x.a.value_dim;
        if (r.fresh && r.token)
            run_token(x, w, r, h, S);
        else if (r.fresh)
            run_prompt(x, &y, w, r, h, S);
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) zero_kernel(T *o, int64_t n)
{
    for (int64_t i = global_thread(); i < n; i += global_threads())
        o[i] = from_float<T>(0);
}

/* ---- backward ---- */

/* dgamma from gradients A of numbers that have a factor G_ij, times these: a thread a row. */
__device__ inline void add_between(decays *y, const float *A)
{
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        for (int j = 0; j < C; j++)
            if (j != i)
                y->dgamma[i] += j < i ? (double)A[i * C + j] : -(double)A[j * C + i];
    __syncthreads();
}

/* Gradients through o and through the state that leaves. */
__device__ inline void from_results(const lm_delta_attr &a, decays *y, const chunk &w, float *dS)
{
    int64_t D = a.key_dim, E = a.value_dim;
    int last = y->n - 1;
    scale_rows(w.t, w.k, C, D, y->d);
    multiply(C, E, C, turned(w.M, C), rows_of_matrix(w.dout, E), w.dV, false);
    multiply(C, E, D, rows_of_matrix(w.t, D), rows_of_matrix(dS, E), w.dV, true);
    multiply(C, C, E, rows_of_matrix(w.dout, E), turned(w.V, E), w.dM, false);
    times(w.N, w.dM, w.M, nullptr, 1, false);
    add_between(y, w.N);
    times(w.dM, w.dM, w.G, nullptr, 1, false);
    multiply(C, D, C, rows_of_matrix(w.dM, C), rows_of_matrix(w.k, D), w.dq, true);
    multiply(C, D, C, turned(w.dM, C), rows_of_matrix(w.q, D), w.dk, true);
    dot_rows(y, w.QS, w.dout, E);
    for (int i = threadIdx.x; i < y->n; i += blockDim.x)
        y->dgamma[i] += y->e[i] * y->along[i];
    multiply(C, D, E, rows_of_matrix(w.V, E), turned(dS, E), w.t, false);
    dot_rows(y, w.k, w.t, D);
    float kept = 0;
    for (int64_t i = threadIdx.x; i < D * E; i += blockDim.x)
        kept = fmaf(w.S[i], dS[i], kept);
    kept = block_sum(kept);
    if (threadIdx.x == 0) {
        for (int j = 0; j < y->n; j++) {
            y->dgamma[last] += y->d[j] * y->along[j];
            y->dgamma[j] -= y->d[j] * y->along[j];
        }
        y->dgamma[last] += y->e[last] * kept;
    }
    for (int64_t i = threadIdx.x; i < C * D; i += blockDim.x)
        w.dk[i] = fmaf(w.t[i], y->d[i / D], w.dk[i]);
    __syncthreads();
}

/* Gradients through the corrections, and of the state that entered; dV' becomes dv. */
__device__ inline void from_corrections(const lm_delta_attr &a, decays *y, const chunk &w,
                                        float *dS)
{
    int64_t D = a.key_dim, E = a.value_dim;
    solve(w.less, true, w.dV, E);
    multiply(C, C, E, rows_of_matrix(w.dV, E), turned(w.V, E), w.N, false);
    times(w.dM, w.N, w.less, nullptr, 1, true); /* (-dL) (-L) */
    add_between(y, w.dM);
    times(w.N, w.N, w.G, nullptr, -1, true);
    dot_rows(y, w.dV, w.X, E);
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        y->dbeta[i] = -y->e[i] * y->along[i];
        y->dgamma[i] += y->beta[i] * y->dbeta[i];
    }
    __syncthreads(); /* along is made anew */
    dot_rows(y, w.N, w.KK, C);
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        y->dbeta[i] += y->along[i];
    __syncthreads();
    dot_rows(y, w.dV, w.v, E);
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        y->dbeta[i] += y->along[i];
    scale_rows(w.N, w.N, C, C, y->beta);
    multiply(C, D, C, rows_of_matrix(w.N, C), rows_of_matrix(w.k, D), w.dk, true);
    multiply(C, D, C, turned(w.N, C), rows_of_matrix(w.k, D), w.dk, true);
    scale_rows(w.X, w.dout, C, E, y->e);
    multiply(C, D, E, rows_of_matrix(w.X, E), turned(w.S, E), w.dq, true);
    scale_all(dS, D * E, y->e[y->n - 1]);
    multiply(D, E, C, turned(w.q, D), rows_of_matrix(w.X, E), dS, true);
    scale_rows(w.dV, w.dV, C, E, y->beta);
    scale_rows(w.X, w.dV, C, E, y->e, -1);
    multiply(C, D, E, rows_of_matrix(w.X, E), turned(w.S, E), w.dk, true);
    multiply(D, E, C, turned(w.k, D), rows_of_matrix(w.X, E), dS, true);
}

template <class T>
__device__ void back_head(const delta_args<T> &x, decays *y, const chunk &w, int64_t b, int64_t m,
                          int64_t h)
{
    const int64_t D = x.a.key_dim, E = x.a.value_dim, H = x.a.heads, pitch = pitch_of(x);
    float *dS = w.dS + h % (H / x.a.key_heads) * D * E;
    const float *state = x.given + ((b * x.a.chunks + m) * H + h) * D * E;
    read_decays(x, b * x.a.seq, x.a.seq, m, h, y);
    for (int64_t i = threadIdx.x; i < D * E; i += blockDim.x)
        w.S[i] = state[i];
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        y->dgamma[i] = 0;
    read_rows(w.dout, C, x.dout + (y->row * H + h) * E, H * E, y->n, E);
    correct(x, y, w, h, w.V);
    from_results(x.a, y, w, dS);
    from_corrections(x.a, y, w, dS);
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int i = y->n - 1; i >= 0; i--) {
            int64_t cell = (y->row + i) * H + h, start = x.lo ? x.lo[y->row + i] : 0;
            sum += y->dgamma[i];
            x.dg[cell] = start == m * C + i ? 0 : (float)sum;
            x.dbeta[cell] = y->dbeta[i];
        }
    }
    for (int64_t i = threadIdx.x; i < y->n * E; i += blockDim.x)
        x.dqkv[(y->row + i / E) * pitch + 2 * x.a.key_heads * D + h * E + i % E] =
            from_float<T>(w.dV[i]);
    __syncthreads();
}

/* The gradient of x from that of its direction y = x r: r (dy - y <y,dy>); y and dy hold scale times these. */
template <class T>
__device__ void put_directions(const delta_args<T> &x, const chunk &w, int64_t row, int64_t n,
                               int64_t head, int part, float scale)
{
    const float *y = part ? w.k : w.q, *dy = part ? w.dk : w.dq, *r = part ? w.rk : w.rq;
    const int64_t D = x.a.key_dim;
    for (int64_t i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
        float along = warp_dot(y + i * D, dy + i * D, D) / scale;
        for (int64_t d = threadIdx.x % 32; d < D; d += 32)
            x.dqkv[(row + i) * pitch_of(x) + (part * x.a.key_heads + head) * D + d] =
                from_float<T>(r[i] * fmaf(-y[i * D + d], along, dy[i * D + d] * scale));
    }
    __syncthreads();
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dx_kernel(delta_args<T> x)
{
    __shared__ decays y;
    const int64_t D = x.a.key_dim, E = x.a.value_dim, K = x.a.key_heads, group = x.a.heads / K;
    const chunk w = chunk_at(x.a, x.work + blockIdx.x * x.floats);
    for (int64_t it = blockIdx.x; it < x.a.batch * K; it += gridDim.x) {
        int64_t b = it / K, head = it % K;
        for (int64_t i = threadIdx.x; i < group * D * E; i += blockDim.x)
            w.dS[i] = 0;
        for (int64_t m = x.a.chunks - 1; m >= 0; m--) {
            int64_t row = b * x.a.seq + m * C, n = x.a.seq - m * C;
            n = n < C ? n : C;
            for (int64_t i = threadIdx.x; i < C * D; i += blockDim.x)
                w.dq[i] = w.dk[i] = 0;
            read_keys(x, w, b * x.a.seq, x.a.seq, m, head);
            for (int64_t h = head * group; h < (head + 1) * group; h++)
                back_head(x, &y, w, b, m, h);
            put_directions(x, w, row, n, head, 0, (float)x.a.scale);
            put_directions(x, w, row, n, head, 1, 1.0f);
        }
    }
}

/* ---- launches ---- */

/* Blocks: scratch is theirs, so at most two for each multiprocessor. */
static int64_t blocks_of(int64_t pieces, int64_t sms)
{
    return pieces < 2 * sms ? pieces : 2 * sms;
}

/* With operand qkv at `at`, behind which are g and beta. */
template <class T> static delta_args<T> args_of(const lm_call *c, int at)
{
    delta_args<T> x = {};
    x.a = *(const lm_delta_attr *)c->attr;
    x.qkv = in_ptr<T>(c, at);
    x.g = in_ptr<float>(c, at + 1);
    x.beta = in_ptr<float>(c, at + 2);
    x.work = (float *)c->work;
    x.floats = floats_of(x.a);
    return x;
}

template <class T> static void delta(const lm_call *c)
{
    delta_args<T> x = args_of<T>(c, 0);
    x.lo = in_ptr<int32_t>(c, 3);
    x.o = out_ptr<T>(c, 0);
    x.states = out_ptr<float>(c, 1);
    LM_LAUNCH((delta_kernel<T>), (unsigned)blocks_of(x.a.batch * x.a.heads, c->stream->sms), BLOCK,
              0, c->stream, x);
}

template <class T> static void delta_cached(const lm_call *c)
{
    delta_args<T> x = args_of<T>(c, 0);
    x.rows = state_view_of(c, 3, x.a.seq);
    x.o = out_ptr<T>(c, 0);
    x.states = out_ptr<float>(c, 1);
    const int64_t n = x.rows.n * x.a.heads * x.a.value_dim;
    LM_LAUNCH((zero_kernel<T>), grid_for(n, BLOCK, c->stream), BLOCK, 0, c->stream, x.o, n);
    LM_LAUNCH((cached_kernel<T>), (unsigned)blocks_of(x.a.batch * x.a.heads, c->stream->sms), BLOCK,
              0, c->stream, x);
}

template <class T> static void delta_dx(const lm_call *c)
{
    delta_args<T> x = args_of<T>(c, 1);
    x.dout = in_ptr<T>(c, 0);
    x.given = in_ptr<float>(c, 4);
    x.lo = in_ptr<int32_t>(c, 5);
    x.dqkv = out_ptr<T>(c, 0);
    x.dg = out_ptr<float>(c, 1);
    x.dbeta = out_ptr<float>(c, 2);
    LM_LAUNCH((dx_kernel<T>), (unsigned)blocks_of(x.a.batch * x.a.key_heads, c->stream->sms), BLOCK,
              0, c->stream, x);
}

static size_t work(const lm_call *c, int sms)
{
    const lm_delta_attr *a = (const lm_delta_attr *)c->attr;
    return (size_t)(blocks_of(a->batch * a->heads, sms) * floats_of(*a)) * sizeof(float);
}

extern "C" const lm_kernel lm_delta_cuda_kernels[] = {
    LM_CUDA_ROWS("delta", delta, work),
    LM_CUDA_ROWS("delta_dx", delta_dx, work),
    LM_CUDA_ROWS("delta_cached", delta_cached, work),
    LM_CUDA_END,
};
