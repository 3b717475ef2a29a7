/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention.cu -- linear attention by chunks (kernels/linear_attention.h).  Of whole sequences all chunks run at
 * once: one launch sums what each adds to the state, a second passes the sums from chunk to chunk, so that each has the state
 * before it, and a third makes the results; in the backward, the same from the end for the gradient of the state.  Of rows
 * behind a state a block has a key head of a sequence.  The algebra of the backward is that of
 * kernels/cpu/linear_attention_dx_simd.c. */
#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/state_rows.cuh"

extern "C" {
#include "kernels/linear_attention.h"
}

enum { BLOCK = 256 };
static const int C = LM_LINEAR_CHUNK;

template <class T> struct la_args {
    lm_linear_attention_attr a;
    const T *qkv, *dout, *given; /* given: o of the forward */
    const int32_t *lo;
    T *o, *dqkv;
    float *states, *dstates; /* of chunks [B][K][M][R][D]; cached: states has those of slots */
    float *by, *c;           /* backward: weights of rows, and c, [B*T][H] */
    state_view rows;         /* cached */
    float *work;
    int64_t floats; /* of a block's scratch, */
    bool shared;    /* which is in shared memory, not in `work` */
};

/* A chunk of one key head, in shared memory. */
struct span {
    float power[C + 1]; /* a^n */
    float e[C], d[C], by[C], c[C];
    int from[C], n;
    int64_t row;
};

/* Arrays of a chunk: [C][D]; M and A [C][C]. */
struct chunk {
    float *q, *k, *v, *o, *M; /* o: results, or their gradients */
    float *dq, *dk, *dv, *A;  /* of the backward alone */
};

static int64_t forward_floats(const lm_linear_attention_attr &a)
{
    return C * (4 * a.head_dim + C);
}

static int64_t backward_floats(const lm_linear_attention_attr &a)
{
    return C * (7 * a.head_dim + 2 * C);
}

template <class T> __device__ inline chunk chunk_of(const la_args<T> &x, float *shared)
{
    float *at = x.shared ? shared : x.work + blockIdx.x * x.floats;
    const int64_t n = C * x.a.head_dim;
    chunk w;
    float **forward[] = { &w.q, &w.k, &w.v, &w.o, &w.M },
          **backward[] = { &w.dq, &w.dk, &w.dv, &w.A };
    for (int i = 0; i < 5; i++)
        *forward[i] = at + i * n;
    for (int i = 0; i < 4; i++)
        *backward[i] = w.M + C * C + i * n;
    return w;
}

template <class T> __device__ inline int64_t pitch_of(const la_args<T> &x)
{
    return (x.a.heads + 2 * x.a.kv_heads) * x.a.head_dim;
}

template <class T> __device__ inline bool divides(const la_args<T> &x)
{
    return x.a.feature == LM_FEATURE_ELU;
}

template <class T> __device__ inline int64_t state_size(const la_args<T> &x)
{
    return x.a.state_rows * x.a.head_dim;
}

/* Chunk m of a sequence of `rows` rows from `row` on, of key head j. */
template <class T>
__device__ void span_at(const la_args<T> &x, int64_t row, int64_t rows, int64_t m, int64_t j,
                        span *y)
{
    const int64_t t0 = m * C, left = rows - t0;
    const double decay = lm_linear_log_decay(x.a.decay, j);
    if (threadIdx.x == 0) {
        y->n = (int)(left < C ? left : C);
        y->row = row + t0;
    }
    for (int i = threadIdx.x; i <= C; i += blockDim.x)
        y->power[i] = x.a.decay ? (float)exp(i * decay) : 1;
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        bool there = i < y->n;
        int64_t start = there && x.lo ? x.lo[y->row + i] : 0;
        y->from[i] = start > t0 ? (int)(start - t0) : 0;
        y->e[i] = there && start <= t0 - (t0 > 0) ? y->power[i + 1] : 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        y->d[i] = i < y->n && i >= y->from[y->n - 1] ? y->power[y->n - 1 - i] : 0;
    __syncthreads();
}

/* n rows become their features. */
template <class T> __device__ inline void features(const la_args<T> &x, int64_t n, float *q)
{
    for (int64_t i = threadIdx.x; divides(x) && i < n * x.a.head_dim; i += blockDim.x)
        q[i] = q[i] > 0 ? q[i] + 1 : expf(q[i]);
    __syncthreads();
}

template <class T>
__device__ inline void read_queries(const la_args<T> &x, const span *y, int64_t h, float *q)
{
    read_rows(q, C, x.qkv + y->row * pitch_of(x) + h * x.a.head_dim, pitch_of(x), y->n,
              x.a.head_dim);
    features(x, y->n, q);
}

template <class T>
__device__ inline void read_keys(const la_args<T> &x, const span *y, int64_t j, const chunk &w)
{
    const int64_t D = x.a.head_dim, pitch = pitch_of(x);
    const T *at = x.qkv + y->row * pitch + (x.a.heads + j) * D;
    read_rows(w.k, C, at, pitch, y->n, D);
    read_rows(w.v, C, at + x.a.kv_heads * D, pitch, y->n, D);
    features(x, y->n, w.k);
}

/* M = (q y^T + more) W by element; more NULL: 0. */
template <class T>
__device__ void pairs(const la_args<T> &x, const span *s, const float *q, const float *y,
                      const float *more, float *M)
{
    const int64_t D = x.a.head_dim;
    multiply(C, C, D, rows_of_matrix(q, D), turned(y, D), M, false);
    for (int at = threadIdx.x; at < C * C; at += blockDim.x) {
        int i = at / C, j = at % C;
        bool seen = i < s->n && j <= i && j >= s->from[i];
        M[at] = seen ? (M[at] + (more ? more[i] : 0)) * s->power[i - j] : 0;
    }
    __syncthreads();
}

/* What weighs the results of rows: scale, or scale / denominator. */
template <class T>
__device__ void weigh(const la_args<T> &x, span *y, const float *q, const float *M, const float *z)
{
    const int64_t D = x.a.head_dim;
    for (int i = threadIdx.x / 32; i < C; i += blockDim.x / 32) {
        float by = (float)x.a.scale;
        if (divides(x) && i < y->n) {
            float sum = 0, before = warp_dot(q + i * D, z, D);
            for (int j = threadIdx.x % 32; j < C; j += 32)
                sum += M[i * C + j];
            by /= fmaf(y->e[i], y->e[i] > 0 ? before : 0, warp_sum(sum)) + (float)x.a.eps;
        }
        if (threadIdx.x % 32 == 0)
            y->by[i] = by;
    }
    __syncthreads();
}

/* to [D] (+)= sum of by[i] times row i of y, from row `from` on. */
__device__ inline void sum_rows(const float *y, const float *by, int from, int64_t D, float *to,
                                bool add)
{
    for (int64_t d = threadIdx.x; d < D; d += blockDim.x) {
        float sum = add ? to[d] : 0;
        for (int i = from; i < C; i++)
            sum = fmaf(by[i], y[i * D + d], sum);
        to[d] = sum;
    }
    __syncthreads();
}

/* What a chunk adds to the state: to (+)= (d K)^T (V, 1); q is scratch. */
template <class T>
__device__ void add_to_state(const la_args<T> &x, const span *y, const chunk &w, float *to,
                             bool add)
{
    const int64_t D = x.a.head_dim;
    const int from = y->from[y->n - 1]; /* earlier documents add nothing */
    scale_rows(w.q, w.k, C, D, y->d);
    multiply(D, D, C - from, turned(w.q + from * D, D), rows_of_matrix(w.v + from * D, D), to, add);
    if (divides(x))
        sum_rows(w.k, y->d, from, D, to + D * D, add);
}

/* The results of query head h from the state S before the chunk; keys are there. */
template <class T>
__device__ void run_head(const la_args<T> &x, span *y, const chunk &w, int64_t h, const float *S)
{
    const int64_t D = x.a.head_dim;
    read_queries(x, y, h, w.q);
    pairs(x, y, w.q, w.k, nullptr, w.M);
    weigh(x, y, w.q, w.M, S + D * D);
    multiply(C, D, D, rows_of_matrix(w.q, D), rows_of_matrix(S, D), w.o, false);
    scale_rows(w.o, w.o, C, D, y->e);
    multiply(C, D, C, rows_of_matrix(w.M, C), rows_of_matrix(w.v, D), w.o, true);
    for (int64_t i = threadIdx.x; i < y->n * D; i += blockDim.x)
        x.o[((y->row + i / D) * x.a.heads + h) * D + i % D] = from_float<T>(w.o[i] * y->by[i / D]);
    __syncthreads();
}

/* ---- whole sequences ---- */

/* Piece `it` of [B][heads][M]. */
struct place {
    int64_t b, h, m;
};

__device__ inline place place_of(int64_t it, int64_t heads, int64_t chunks)
{
    return place{ it / chunks / heads, it / chunks % heads, it % chunks };
}

template <class T>
__device__ inline float *state_of(const la_args<T> &x, float *states, const place &p, int64_t j)
{
    return states + ((p.b * x.a.kv_heads + j) * lm_linear_chunks(x.a.seq) + p.m) * state_size(x);
}

template <class T> static __global__ void __launch_bounds__(BLOCK) sums_kernel(la_args<T> x)
{
    __shared__ span y;
    LM_DYNAMIC_SHARED(float, shared);
    const chunk w = chunk_of(x, shared);
    const int64_t chunks = lm_linear_chunks(x.a.seq);
    for (int64_t it = blockIdx.x; it < x.a.batch * x.a.kv_heads * chunks; it += gridDim.x) {
        const place p = place_of(it, x.a.kv_heads, chunks);
        span_at(x, p.b * x.a.seq, x.a.seq, p.m, p.h, &y);
        read_keys(x, &y, p.h, w);
        add_to_state(x, &y, w, state_of(x, x.states, p, p.h), false);
    }
}

/* Sums of chunks become the states before them, or from the end the gradients of those behind them: a thread an element. */
template <class T>
static __global__ void __launch_bounds__(BLOCK) scan_kernel(la_args<T> x, float *states, bool back)
{
    const int64_t size = state_size(x), chunks = lm_linear_chunks(x.a.seq), T_ = x.a.seq;
    for (int64_t i = global_thread(); i < x.a.batch * x.a.kv_heads * size; i += global_threads()) {
        const int64_t piece = i / size, row = piece / x.a.kv_heads * T_;
        const float whole = (float)exp(C * lm_linear_log_decay(x.a.decay, piece % x.a.kv_heads));
        float *at = states + piece * chunks * size + i % size, now = 0;
        for (int64_t k = 0; k < chunks; k++) {
            const int64_t m = back ? chunks - 1 - k : k, t0 = m * C;
            const int64_t last = t0 + C < T_ ? t0 + C - 1 : T_ - 1;
            const int64_t start = x.lo ? x.lo[row + last] : 0;
            const float sum = at[m * size];
            at[m * size] = now; /* the last chunk, which may be short, passes nothing on */
            /* of another document it is left behind, whatever it holds */
            now = start <= t0 - (t0 > 0) ? fmaf(whole, now, sum) : sum;
        }
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) results_kernel(la_args<T> x)
{
    __shared__ span y;
    LM_DYNAMIC_SHARED(float, shared);
    const chunk w = chunk_of(x, shared);
    const int64_t chunks = lm_linear_chunks(x.a.seq), group = x.a.heads / x.a.kv_heads;
    for (int64_t it = blockIdx.x; it < x.a.batch * x.a.heads * chunks; it += gridDim.x) {
        const place p = place_of(it, x.a.heads, chunks);
        span_at(x, p.b * x.a.seq, x.a.seq, p.m, p.h / group, &y);
        read_keys(x, &y, p.h / group, w);
        run_head(x, &y, w, p.h, state_of(x, x.states, p, p.h / group));
    }
}

/* ---- rows behind a state ---- */

/* One step of the recurrence on the state in memory. */
template <class T>
__device__ void run_token(const la_args<T> &x, span *y, const chunk &w, const state_rows &r,
                          int64_t j, float *S)
{
    const int64_t D = x.a.head_dim, group = x.a.heads / x.a.kv_heads;
    const float decay = (float)exp(lm_linear_log_decay(x.a.decay, j));
    const T *q = x.qkv + r.row * pitch_of(x) + j * group * D;
    const T *k = x.qkv + r.row * pitch_of(x) + (x.a.heads + j) * D;
    read_rows(w.k, 1, k, D, 1, D);
    read_rows(w.v, 1, k + x.a.kv_heads * D, D, 1, D);
    features(x, 1, w.k);
    for (int64_t i = threadIdx.x; i < state_size(x); i += blockDim.x)
        S[i] = fmaf(w.k[i < D * D ? i / D : i % D], i < D * D ? w.v[i % D] : 1,
                    r.used ? decay * S[i] : 0);
    __syncthreads();
    for (int64_t g = 0; g < group; g += C) {
        const int64_t n = group - g < C ? group - g : C;
        read_rows(w.q, n, q + g * D, D, n, D);
        features(x, n, w.q);
        for (int64_t i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
            float sum = divides(x) ? warp_dot(w.q + i * D, S + D * D, D) + (float)x.a.eps : 1;
            if (threadIdx.x % 32 == 0)
                y->by[i] = (float)x.a.scale / sum;
        }
        __syncthreads();
        for (int64_t i = threadIdx.x; i < n * D; i += blockDim.x) {
            float sum = 0;
            for (int64_t d = 0; d < D; d++)
                sum = fmaf(w.q[i / D * D + d], S[d * D + i % D], sum);
            x.o[(r.row * x.a.heads + j * group + g) * D + i] = from_float<T>(sum * y->by[i / D]);
        }
        __syncthreads();
    }
}

template <class T>
__device__ void run_prompt(const la_args<T> &x, span *y, const chunk &w, const state_rows &r,
                           int64_t j, float *S)
{
    const int64_t group = x.a.heads / x.a.kv_heads;
    for (int64_t i = threadIdx.x; !r.used && i < state_size(x); i += blockDim.x)
        S[i] = 0;
    __syncthreads();
    for (int64_t m = 0; m * C < r.fresh; m++) {
        span_at(x, r.row, r.fresh, m, j, y);
        read_keys(x, y, j, w);
        for (int64_t h = j * group; h < (j + 1) * group; h++)
            run_head(x, y, w, h, S);
        scale_all(S, state_size(x), y->e[y->n - 1]);
        add_to_state(x, y, w, S, true);
    }
}

/* A block a key head of a sequence; o is zeros before. */
template <class T> static __global__ void __launch_bounds__(BLOCK) cached_kernel(la_args<T> x)
{
    __shared__ span y;
    LM_DYNAMIC_SHARED(float, shared);
    const chunk w = chunk_of(x, shared);
    const int64_t K = x.a.kv_heads;
    for (int64_t it = blockIdx.x; it < x.a.batch * K; it += gridDim.x) {
        const state_rows r = state_rows_of(x.rows, it / K);
        float *S = x.states + (r.slot * K + it % K) * state_size(x);
        if (r.fresh && r.token)
            run_token(x, &y, w, r, it % K, S);
        else if (r.fresh)
            run_prompt(x, &y, w, r, it % K, S);
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) zero_kernel(T *o, int64_t n)
{
    for (int64_t i = global_thread(); i < n; i += global_threads())
        o[i] = from_float<T>(0);
}

/* ---- backward ---- */

/* N in w.o of query head h. */
template <class T>
__device__ void read_results(const la_args<T> &x, const span *y, const chunk &w, int64_t h)
{
    const int64_t D = x.a.head_dim, wide = x.a.heads * D;
    read_rows(w.o, C, x.dout + y->row * wide + h * D, wide, y->n, D);
    scale_rows(w.o, w.o, C, D, y->by);
}

/* c of its rows, from N. */
template <class T>
__device__ void read_sums(const la_args<T> &x, span *y, const chunk &w, int64_t h)
{
    const int64_t D = x.a.head_dim;
    for (int i = threadIdx.x / 32; i < C; i += blockDim.x / 32) {
        const T *o = x.given + ((y->row + i) * x.a.heads + h) * D;
        float sum = 0;
        for (int64_t d = threadIdx.x % 32; divides(x) && i < y->n && d < D; d += 32)
            sum = fmaf(w.o[i * D + d], to_float(o[d]), sum);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0)
            y->c[i] = -sum / (float)x.a.scale;
    }
    __syncthreads();
}

/* What each chunk adds to the gradient of the state that enters it; weights of rows and c are kept. */
template <class T> static __global__ void __launch_bounds__(BLOCK) back_sums_kernel(la_args<T> x)
{
    __shared__ span y;
    LM_DYNAMIC_SHARED(float, shared);
    const chunk w = chunk_of(x, shared);
    const int64_t D = x.a.head_dim, H = x.a.heads, K = x.a.kv_heads, group = H / K;
    const int64_t chunks = lm_linear_chunks(x.a.seq);
    for (int64_t it = blockIdx.x; it < x.a.batch * K * chunks; it += gridDim.x) {
        const place p = place_of(it, K, chunks);
        const float *S = state_of(x, x.states, p, p.h);
        float *to = state_of(x, x.dstates, p, p.h);
        span_at(x, p.b * x.a.seq, x.a.seq, p.m, p.h, &y);
        read_keys(x, &y, p.h, w);
        for (int64_t h = p.h * group; h < (p.h + 1) * group; h++) {
            read_queries(x, &y, h, w.q);
            if (divides(x))
                pairs(x, &y, w.q, w.k, nullptr, w.M);
            weigh(x, &y, w.q, w.M, S + D * D);
            read_results(x, &y, w, h);
            read_sums(x, &y, w, h);
            for (int i = threadIdx.x; i < y.n; i += blockDim.x) {
                x.by[(y.row + i) * H + h] = y.by[i];
                x.c[(y.row + i) * H + h] = y.c[i];
            }
            scale_rows(w.q, w.q, C, D, y.e);
            multiply(D, D, C, turned(w.q, D), rows_of_matrix(w.o, D), to, h > p.h * group);
            if (divides(x))
                sum_rows(w.q, y.c, 0, D, to + D * D, h > p.h * group);
        }
    }
}

/* Rows of gradients of features become those of the numbers, and are stored from column `at` on. */
template <class T>
__device__ void put_features(const la_args<T> &x, const span *y, int64_t at, const float *q,
                             const float *dq)
{
    const int64_t D = x.a.head_dim;
    for (int64_t i = threadIdx.x; i < y->n * D; i += blockDim.x)
        x.dqkv[(y->row + i / D) * pitch_of(x) + at + i % D] =
            from_float<T>(divides(x) && q[i] < 1 ? dq[i] * q[i] : dq[i]);
    __syncthreads();
}

template <class T>
__device__ void back_head(const la_args<T> &x, span *y, const chunk &w, int64_t h, const float *S)
{
    const int64_t D = x.a.head_dim;
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        const int64_t cell = (y->row + i) * x.a.heads + h;
        y->by[i] = i < y->n ? x.by[cell] : 0;
        y->c[i] = i < y->n ? x.c[cell] : 0;
    }
    read_queries(x, y, h, w.q);
    read_results(x, y, w, h);
    pairs(x, y, w.q, w.k, nullptr, w.M);
    pairs(x, y, w.o, w.v, y->c, w.A);
    multiply(C, D, D, rows_of_matrix(w.o, D), turned(S, D), w.dq, false);
    for (int64_t i = threadIdx.x; i < C * D; i += blockDim.x)
        w.dq[i] =
            y->e[i / D] * (divides(x) ? fmaf(y->c[i / D], S[D * D + i % D], w.dq[i]) : w.dq[i]);
    __syncthreads();
    multiply(C, D, C, rows_of_matrix(w.A, C), rows_of_matrix(w.k, D), w.dq, true);
    multiply(C, D, C, turned(w.A, C), rows_of_matrix(w.q, D), w.dk, true);
    multiply(C, D, C, turned(w.M, C), rows_of_matrix(w.o, D), w.dv, true);
    put_features(x, y, h * D, w.q, w.dq);
}

template <class T> static __global__ void __launch_bounds__(BLOCK) dx_kernel(la_args<T> x)
{
    __shared__ span y;
    LM_DYNAMIC_SHARED(float, shared);
    const chunk w = chunk_of(x, shared);
    const int64_t D = x.a.head_dim, K = x.a.kv_heads, group = x.a.heads / K;
    const int64_t chunks = lm_linear_chunks(x.a.seq);
    for (int64_t it = blockIdx.x; it < x.a.batch * K * chunks; it += gridDim.x) {
        const place p = place_of(it, K, chunks);
        const float *S = state_of(x, x.states, p, p.h), *dS = state_of(x, x.dstates, p, p.h);
        const int64_t key = (x.a.heads + p.h) * D;
        span_at(x, p.b * x.a.seq, x.a.seq, p.m, p.h, &y);
        read_keys(x, &y, p.h, w);
        multiply(C, D, D, rows_of_matrix(w.v, D), turned(dS, D), w.dk, false);
        multiply(C, D, D, rows_of_matrix(w.k, D), rows_of_matrix(dS, D), w.dv, false);
        for (int64_t i = threadIdx.x; divides(x) && i < C * D; i += blockDim.x)
            w.dk[i] += dS[D * D + i % D];
        __syncthreads();
        scale_rows(w.dk, w.dk, C, D, y.d);
        scale_rows(w.dv, w.dv, C, D, y.d);
        for (int64_t h = p.h * group; h < (p.h + 1) * group; h++)
            back_head(x, &y, w, h, S);
        put_features(x, &y, key, w.k, w.dk);
        for (int64_t i = threadIdx.x; i < y.n * D; i += blockDim.x)
            x.dqkv[(y.row + i / D) * pitch_of(x) + key + K * D + i % D] = from_float<T>(w.dv[i]);
        __syncthreads();
    }
}

/* ---- launches ---- */

/* Blocks whose scratch is in memory: at most two for each multiprocessor. */
static int64_t blocks_of(int64_t pieces, int64_t sms)
{
    return pieces < 2 * sms ? pieces : 2 * sms;
}

static int64_t states_floats(const lm_linear_attention_attr &a)
{
    return a.batch * a.kv_heads * lm_linear_chunks(a.seq) * a.state_rows * a.head_dim;
}

/* Arguments with operand qkv at `at`, and a block's scratch of `floats`. */
template <class T> static la_args<T> args_of(const lm_call *c, int at)
{
    la_args<T> x = {};
    x.a = *(const lm_linear_attention_attr *)c->attr;
    x.qkv = in_ptr<T>(c, at);
    return x;
}

/* Bytes of shared memory for a block's scratch; 0, where it is in memory. */
template <class T> static size_t scratch(const lm_call *c, int64_t floats, la_args<T> *x)
{
    size_t bytes = (size_t)floats * sizeof(float);
    x->floats = floats;
    x->shared = bytes + sizeof(span) <= c->stream->shared_max;
    return x->shared ? bytes : 0;
}

/* A launch of a block for each of n pieces. */
#define LAUNCH(kernel, n, bytes, c, x)                                   \
    do {                                                                 \
        if (bytes)                                                       \
            LM_ALLOW_SHARED((kernel), (int)(bytes));                     \
        LM_LAUNCH((kernel),                                              \
                  (x).shared ? grid_for(n, 1, (c)->stream)               \
                             : (unsigned)blocks_of(n, (c)->stream->sms), \
                  BLOCK, bytes, (c)->stream, x);                         \
    } while (0)

template <class T> static void scan(const lm_call *c, const la_args<T> &x, float *states, bool back)
{
    const int64_t n = x.a.batch * x.a.kv_heads * x.a.state_rows * x.a.head_dim;
    LM_LAUNCH((scan_kernel<T>), grid_for(n, BLOCK, c->stream), BLOCK, 0, c->stream, x, states,
              back);
}

template <class T> static void linear_attention(const lm_call *c)
{
    la_args<T> x = args_of<T>(c, 0);
    const int64_t chunks = x.a.batch * lm_linear_chunks(x.a.seq);
    const size_t bytes = scratch(c, forward_floats(x.a), &x);
    x.lo = in_ptr<int32_t>(c, 1);
    x.o = out_ptr<T>(c, 0);
    x.states = (float *)c->work;
    x.work = x.states + states_floats(x.a);
    LAUNCH((sums_kernel<T>), chunks * x.a.kv_heads, bytes, c, x);
    scan(c, x, x.states, false);
    LAUNCH((results_kernel<T>), chunks * x.a.heads, bytes, c, x);
}

static size_t forward_work(const lm_call *c, int sms)
{
    const lm_linear_attention_attr &a = *(const lm_linear_attention_attr *)c->attr;
    int64_t blocks = blocks_of(a.batch * a.heads * lm_linear_chunks(a.seq), sms);
    return (size_t)(states_floats(a) + blocks * forward_floats(a)) * sizeof(float);
}

template <class T> static void linear_attention_dx(const lm_call *c)
{
    la_args<T> x = args_of<T>(c, 1);
    const int64_t pieces = x.a.batch * lm_linear_chunks(x.a.seq) * x.a.kv_heads;
    const int64_t cells = x.a.batch * x.a.seq * x.a.heads;
    x.dout = in_ptr<T>(c, 0);
    x.given = in_ptr<T>(c, 2);
    x.lo = in_ptr<int32_t>(c, 3);
    x.dqkv = out_ptr<T>(c, 0);
    x.states = (float *)c->work;
    x.dstates = x.states + states_floats(x.a);
    x.by = x.dstates + states_floats(x.a);
    x.c = x.by + cells;
    x.work = x.c + cells;
    size_t bytes = scratch(c, forward_floats(x.a), &x);
    LAUNCH((sums_kernel<T>), pieces, bytes, c, x);
    scan(c, x, x.states, false);
    LAUNCH((back_sums_kernel<T>), pieces, bytes, c, x);
    scan(c, x, x.dstates, true);
    bytes = scratch(c, backward_floats(x.a), &x);
    LAUNCH((dx_kernel<T>), pieces, bytes, c, x);
}

static size_t backward_work(const lm_call *c, int sms)
{
    const lm_linear_attention_attr &a = *(const lm_linear_attention_attr *)c->attr;
    int64_t blocks = blocks_of(a.batch * a.kv_heads * lm_linear_chunks(a.seq), sms);
    return (size_t)(2 * states_floats(a) + 2 * a.batch * a.seq * a.heads +
                    blocks * backward_floats(a)) *
           sizeof(float);
}

template <class T> static void linear_attention_cached(const lm_call *c)
{
    la_args<T> x = args_of<T>(c, 0);
    const size_t bytes = scratch(c, forward_floats(x.a), &x);
    x.rows = state_view_of(c, 1, x.a.seq);
    x.o = out_ptr<T>(c, 0);
    x.states = out_ptr<float>(c, 1);
    x.work = (float *)c->work;
    const int64_t n = x.rows.n * x.a.heads * x.a.head_dim;
    LM_LAUNCH((zero_kernel<T>), grid_for(n, BLOCK, c->stream), BLOCK, 0, c->stream, x.o, n);
    LAUNCH((cached_kernel<T>), x.a.batch * x.a.kv_heads, bytes, c, x);
}

static size_t cached_work(const lm_call *c, int sms)
{
    const lm_linear_attention_attr &a = *(const lm_linear_attention_attr *)c->attr;
    return (size_t)(blocks_of(a.batch * a.kv_heads, sms) * forward_floats(a)) * sizeof(float);
}

extern "C" const lm_kernel lm_linear_attention_cuda_kernels[] = {
    LM_CUDA_ROWS("linear_attention", linear_attention, forward_work),
    LM_CUDA_ROWS("linear_attention_dx", linear_attention_dx, backward_work),
    LM_CUDA_ROWS("linear_attention_cached", linear_attention_cached, cached_work),
    LM_CUDA_END,
};
