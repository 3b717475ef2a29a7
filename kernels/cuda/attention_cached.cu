/* attention_cached.cu -- attention over key/value caches (kernels/attention.h).
 *
 * One row a sequence (decoding): the cache is cut into parts of fixed length; a block has one part
 * of one key/value head and all query heads that share it, so that keys and values are read once.
 * What the parts of a row add up to is put together in their order.
 * More rows (prompts): tiles of queries walk over tiles of keys with an online softmax; by tensor
 * cores in attention_cached_tensor.cu.
 * Grids depend on shapes only, never on how full the caches are. */
#include "kernels/cuda/attention_cached.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, PART = 128, TILE = 16 };

template <class T, int N> static __device__ inline pack<T, N> load(const T *p)
{
    return *reinterpret_cast<const pack<T, N> *>(p);
}

template <class T, int N> static __device__ inline void store(T *p, const pack<T, N> &v)
{
    *reinterpret_cast<pack<T, N> *>(p) = v;
}

/* A softmax whose scores so far are all -inf counts from 0: exp gives zeros, not NaN. */
static __device__ inline float base_of(float max)
{
    return max == -INFINITY ? 0.0f : max;
}

/* ---- appending: fresh keys and values behind those that the cache holds ---- */

template <class T, int N> static __global__ void append(cached c, const T *qkv, T *keys, T *values)
{
    const int64_t packs = c.dim / N, pitch = qkv_pitch(c);
    const int64_t all = c.batch * c.seq * 2 * c.kv_heads * packs;
#pragma unroll 1
    for (int64_t t = global_thread(); t < all; t += global_threads()) {
        int64_t at = t / packs, p = t % packs * N;
        int64_t x = at % (2 * c.kv_heads), row = at / (2 * c.kv_heads);
        int64_t b = row / c.seq, i = row % c.seq, head = x % c.kv_heads;
        if (i >= c.fresh[b])
            continue;
        T *to = (x < c.kv_heads ? keys : values) +
                ((b * c.kv_heads + head) * c.room + c.used[b] + i) * c.dim + p;
        store<T, N>(to, load<T, N>(qkv + row * pitch + (c.heads + x) * c.dim + p));
    }
}

/* ---- one query row of a group of heads against one part of the cache ---- */

/* Of each (row, head) and part: sums over v [dim], the largest score, the sum of exponentials. */
struct partial {
    float *out, *max, *sum;
};

static partial partial_of(const cached &c, int64_t parts, void *work)
{
    int64_t n = c.batch * c.seq * c.heads * parts;
    partial p = { (float *)work, nullptr, nullptr };
    p.max = p.out + n * c.dim;
    p.sum = p.max + n;
    return p;
}

/* Lanes that share a key: enough for its packs, a power of two. */
static __device__ inline int lanes_for(int packs)
{
    int lanes = 1;
    while (lanes < packs && lanes < 32)
        lanes *= 2;
    return lanes;
}

/* score[g*PART + j] = scale * q_g . key_j for n heads and m keys.  A lane keeps its pack of the
 * queries in registers; a key and the lanes that add it up stay together in further packs.  U keys
 * are on their way at once. */
template <class T, int N, int G>
static __device__ inline void part_scores(const cached &c, const T *q, const T *keys, int n, int m,
                                          float *score)
{
    const int U = G == 1 ? 4 : 2;
    const int packs = c.dim / N, lanes = lanes_for(packs), side = 32 / lanes;
    const int lane = (int)threadIdx.x % 32, mine = lane % lanes;
    const int first = (int)threadIdx.x / 32 * side + lane / lanes;
#pragma unroll 1
    for (int p0 = 0; p0 < packs; p0 += lanes) {
        const int p = p0 + mine;
        float x[G][N];
#pragma unroll
        for (int g = 0; g < G; g++) {
            pack<T, N> v = {};
            if (g < n && p < packs)
                v = load<T, N>(q + g * c.dim + p * N);
#pragma unroll
            for (int e = 0; e < N; e++)
                x[g][e] = to_float(v.v[e]);
        }
#pragma unroll 1
        for (int j0 = 0; j0 < m; j0 += U * WARPS * side) {
            pack<T, N> k[U] = {};
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int j = j0 + u * WARPS * side + first;
                if (j < m && p < packs)
                    k[u] = load<T, N>(keys + (int64_t)j * c.dim + p * N);
            }
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int j = j0 + u * WARPS * side + first;
                float sum[G] = {};
#pragma unroll
                for (int e = 0; e < N; e++) {
                    float y = to_float(k[u].v[e]);
#pragma unroll
                    for (int g = 0; g < G; g++)
                        sum[g] = fmaf(x[g][e], y, sum[g]);
                }
                for (int o = lanes / 2; o > 0; o /= 2) {
#pragma unroll
                    for (int g = 0; g < G; g++)
                        sum[g] += __shfl_xor_sync(0xffffffffu, sum[g], o);
                }
#pragma unroll
                for (int g = 0; g < G; g++)
                    if (g < n && mine == 0 && j < m)
                        score[g * PART + j] =
                            fmaf(sum[g], c.scale, p0 ? score[g * PART + j] : 0.0f);
            }
        }
    }
}

/* Scores to probabilities times their sum, rounded to T, by a warp a head; max and sum of each. */
template <class T>
static __device__ inline void part_softmax(int n, int m, float *score, float *max, float *sum)
{
    const int lane = (int)threadIdx.x % 32;
    for (int g = (int)threadIdx.x / 32; g < n; g += WARPS) {
        float *s = score + g * PART, top = -INFINITY, all = 0;
        for (int j = lane; j < m; j += 32)
            top = fmaxf(top, s[j]);
        top = warp_max(top);
        for (int j = lane; j < m; j += 32) {
            float e = expf(s[j] - base_of(top));
            all += e;
            s[j] = rounded<T>(e);
        }
        all = warp_sum(all);
        if (lane == 0) {
            max[g] = top;
            sum[g] = all;
        }
    }
}

/* out[(warp*G + g)*dim + d]: what each warp's keys add to head g. */
template <class T, int N, int G>
static __device__ inline void part_values(const cached &c, const T *values, int n, int m,
                                          const float *score, float *out)
{
    const int packs = c.dim / N, lanes = lanes_for(packs), side = 32 / lanes;
    const int lane = (int)threadIdx.x % 32, mine = lane % lanes, warp = (int)threadIdx.x / 32;
#pragma unroll 1
    for (int p0 = 0; p0 < packs; p0 += lanes) {
        const int p = p0 + mine;
        float x[G][N] = {};
#pragma unroll(G == 1 ? 4 : 2)
        for (int j = warp * side + lane / lanes; j < m && p < packs; j += WARPS * side) {
            pack<T, N> v = load<T, N>(values + (int64_t)j * c.dim + p * N);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float w = g < n ? score[g * PART + j] : 0.0f;
#pragma unroll
                for (int e = 0; e < N; e++)
                    x[g][e] = fmaf(w, to_float(v.v[e]), x[g][e]);
            }
        }
        for (int o = lanes; o < 32; o *= 2) {
#pragma unroll
            for (int i = 0; i < G * N; i++)
                x[i / N][i % N] += __shfl_xor_sync(0xffffffffu, x[i / N][i % N], o);
        }
#pragma unroll
        for (int i = 0; i < G * N; i++)
            if (i / N < n && lane < lanes && p < packs)
                out[(warp * G + i / N) * c.dim + p * N + i % N] = x[i / N][i % N];
    }
}

template <class T, int N>
static __device__ inline void append_one(const cached &c, const T *qkv, int64_t kv, T *key,
                                         T *value)
{
    const int packs = c.dim / N;
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < 2 * packs; t += THREADS) {
        int p = t % packs * N;
        int64_t x = c.heads + kv + (t < packs ? 0 : c.kv_heads);
        store<T, N>((t < packs ? key : value) + p, load<T, N>(qkv + x * c.dim + p));
    }
}

/* Shared memory: scores [G][PART], sums over values [WARPS][G][dim].  With one row a sequence the
 * block that has its part appends the fresh key; with more rows that is done. */
template <class T, int N, int G>
static __global__ void __launch_bounds__(THREADS)
    attend_parts(cached c, const T *qkv, T *o, T *keys, T *values, partial r, int64_t parts)
{
    LM_DYNAMIC_SHARED(float, score);
    __shared__ float max[G], sum[G];
    float *sums = score + G * PART;
    const int64_t items = c.batch * c.seq * c.kv_heads * parts;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t k = item % parts, at = item / parts, kv = at % c.kv_heads, row = at / c.kv_heads;
        int64_t b = row / c.seq, used = c.used[b];
        span s = keys_of(c, b, row % c.seq);
        int64_t lo = s.start > k * PART ? s.start : k * PART;
        int64_t hi = s.end < (k + 1) * PART ? s.end : (k + 1) * PART;
        const T *q = qkv + row * qkv_pitch(c);
        T *key = keys + (b * c.kv_heads + kv) * c.room * c.dim;
        T *value = values + (b * c.kv_heads + kv) * c.room * c.dim;
        if (c.seq == 1 && lo <= used && used < hi) {
            append_one<T, N>(c, q, kv, key + used * c.dim, value + used * c.dim);
            __syncthreads();
        }
#pragma unroll 1
        for (int h0 = 0; h0 < c.group; h0 += G) {
            int n = c.group - h0 < G ? c.group - h0 : G, m = lo < hi ? (int)(hi - lo) : 0;
            int64_t head = row * c.heads + kv * c.group + h0; /* of all rows */
            if (m) {
                part_scores<T, N, G>(c, q + (kv * c.group + h0) * c.dim, key + lo * c.dim, n, m,
                                     score);
                __syncthreads();
                part_softmax<T>(n, m, score, max, sum);
                __syncthreads();
                part_values<T, N, G>(c, value + lo * c.dim, n, m, score, sums);
                __syncthreads();
            }
#pragma unroll 1
            for (int t = (int)threadIdx.x; t < n * c.dim; t += THREADS) {
                int g = t / c.dim, d = t % c.dim;
                float x = 0;
                for (int w = 0; m && w < WARPS; w++)
                    x += sums[(w * G + g) * c.dim + d];
                if (parts == 1)
                    o[(head + g) * c.dim + d] = from_float<T>(m ? x / sum[g] : 0.0f);
                else if (m)
                    r.out[((head + g) * parts + k) * c.dim + d] = x;
            }
            if (parts > 1 && m && (int)threadIdx.x < n) {
                r.max[(head + threadIdx.x) * parts + k] = max[threadIdx.x];
                r.sum[(head + threadIdx.x) * parts + k] = sum[threadIdx.x];
            }
            __syncthreads(); /* all of shared memory is used again */
        }
    }
}

/* The parts of each row and head, in order; those that hold no visible key were not written. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    join_parts(cached c, T *o, partial r, int64_t parts)
{
    const int64_t rows = c.batch * c.seq * c.heads;
#pragma unroll 1
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int64_t i = row / c.heads;
        span s = keys_of(c, i / c.seq, i % c.seq);
        int64_t first = s.start / PART, end = (s.end + PART - 1) / PART;
        const float *max = r.max + row * parts, *sum = r.sum + row * parts;
        float top = -INFINITY, all = 0;
        for (int64_t k = first; k < end; k++)
            top = fmaxf(top, max[k]);
        for (int64_t k = first; k < end; k++)
            all = fmaf(expf(max[k] - base_of(top)), sum[k], all);
        for (int d = (int)threadIdx.x; d < c.dim; d += THREADS) {
            float x = 0;
            for (int64_t k = first; k < end; k++)
                x = fmaf(expf(max[k] - base_of(top)), r.out[(row * parts + k) * c.dim + d], x);
            o[row * c.dim + d] = from_float<T>(first < end ? x / all : 0.0f);
        }
    }
}

/* ---- tiles of queries and keys ---- */

/* Rows of `pitch` elements as floats, zeros behind the last and behind their width. */
template <class T, int D>
static __device__ inline void load_tile(float *to, const T *from, int64_t pitch, int rows, int most,
                                        int dim, bool packed)
{
    const int N = wide<T>::n, ld = D + 4;
    if (packed) {
#pragma unroll 1
        for (int t = (int)threadIdx.x; t < most * (D / N); t += THREADS) {
            int r = t / (D / N), d = t % (D / N) * N;
            pack<T, N> v = {};
            if (r < rows && d < dim)
                v = load<T, N>(from + r * pitch + d);
#pragma unroll
            for (int e = 0; e < N; e++)
                to[r * ld + d + e] = to_float(v.v[e]);
        }
        return;
    }
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < most * D; t += THREADS) {
        int r = t / D, d = t % D;
        to[r * ld + d] = r < rows && d < dim ? to_float(from[r * pitch + d]) : 0.0f;
    }
}

typedef pack<float, 4> four;

static __device__ inline float dot(four a, four b, float sum)
{
#pragma unroll
    for (int e = 0; e < 4; e++)
        sum = fmaf(a.v[e], b.v[e], sum);
    return sum;
}

/* Eight threads have a query: keys c, c + 8, ... of a tile's scores, columns 4c .. 4c+3 of every
 * 32. */
template <class T, int D, int KEYS>
static __global__ void __launch_bounds__(THREADS)
    attend_tiles(cached c, const T *qkv, T *o, const T *keys, const T *values, bool packed)
{
    const int ld = D + 4;
    __shared__ four query[TILE * ld / 4], side[KEYS * ld / 4]; /* keys, then values */
    __shared__ float weight[TILE][KEYS + 1];
    const int r = (int)threadIdx.x / 8, mine = (int)threadIdx.x % 8;
    const int64_t tiles = (c.seq + TILE - 1) / TILE, items = c.batch * c.heads * tiles;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t i0 = item % tiles * TILE, bh = item / tiles, h = bh % c.heads, b = bh / c.heads;
        int64_t first = (b * c.kv_heads + h / c.group) * c.room * c.dim, left = c.fresh[b] - i0;
        int rows = left < 0 ? 0 : left < TILE ? (int)left : TILE;
        span seen = keys_of(c, b, i0 + r);
        int64_t start = 0, end = 0;
        if (rows) { /* of the tile: the first row sees the first key, the last row the last */
            start = keys_of(c, b, i0).start;
            end = keys_of(c, b, i0 + rows - 1).end;
        }
        __syncthreads();
        load_tile<T, D>(&query[0].v[0], qkv + (b * c.seq + i0) * qkv_pitch(c) + h * c.dim,
                        qkv_pitch(c), rows, TILE, c.dim, packed);
        four sum[D / 32] = {};
        float max = -INFINITY, all = 0;
#pragma unroll 1
        for (int64_t j0 = start; j0 < end; j0 += KEYS) {
            int there = end - j0 < KEYS ? (int)(end - j0) : KEYS;
            float s[KEYS / 8], top = max;
            __syncthreads();
            load_tile<T, D>(&side[0].v[0], keys + first + j0 * c.dim, c.dim, there, KEYS, c.dim,
                            packed);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < KEYS / 8; k++)
                s[k] = 0;
#pragma unroll 2
            for (int d = 0; d < (c.dim + 3) / 4; d++) {
                four q = query[r * ld / 4 + d];
#pragma unroll
                for (int k = 0; k < KEYS / 8; k++)
                    s[k] = dot(q, side[(mine + 8 * k) * ld / 4 + d], s[k]);
            }
#pragma unroll
            for (int k = 0; k < KEYS / 8; k++) {
                int64_t j = j0 + mine + 8 * k;
                s[k] = j >= seen.start && j < seen.end ? s[k] * c.scale : -INFINITY;
                top = fmaxf(top, s[k]);
            }
            for (int x = 1; x < 8; x *= 2)
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
            float shrink = expf(max - base_of(top)), fresh = 0;
#pragma unroll
            for (int k = 0; k < KEYS / 8; k++) {
                float p = expf(s[k] - base_of(top));
                fresh += p;
                weight[r][mine + 8 * k] = rounded<T>(p);
            }
            for (int x = 1; x < 8; x *= 2)
                fresh += __shfl_xor_sync(0xffffffffu, fresh, x);
            max = top;
            all = fmaf(all, shrink, fresh);
#pragma unroll
            for (int x = 0; x < D / 32; x++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[x].v[e] *= shrink;
            __syncthreads();
            load_tile<T, D>(&side[0].v[0], values + first + j0 * c.dim, c.dim, there, KEYS, c.dim,
                            packed);
            __syncthreads();
#pragma unroll 4
            for (int k = 0; k < there; k++) {
                float w = weight[r][k];
#pragma unroll
                for (int x = 0; x < D / 32; x++) {
                    four v = side[k * ld / 4 + mine + 8 * x];
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[x].v[e] = fmaf(w, v.v[e], sum[x].v[e]);
                }
            }
        }
        if (i0 + r >= c.seq)
            continue; /* __syncthreads: every thread comes to the same number of them */
        T *to = o + ((b * c.seq + i0 + r) * c.heads + h) * c.dim;
#pragma unroll
        for (int x = 0; x < D / 32; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int d = 4 * (mine + 8 * x) + e;
                if (d < c.dim)
                    to[d] = from_float<T>(r < rows ? sum[x].v[e] / all : 0.0f);
            }
    }
}

/* ---- launchers ---- */

static bool in_tiles(const cached &c)
{
    return c.seq > 1 && c.dim <= MOST_TILED;
}

static int64_t parts_of(const cached &c)
{
    return (c.room + PART - 1) / PART;
}

static size_t work(const lm_call *call, int)
{
    cached c = cached_of(call);
    int64_t parts = parts_of(c);
    if (in_tiles(c) || parts == 1)
        return 0;
    return (size_t)(c.batch * c.seq * c.heads * parts * (c.dim + 2)) * sizeof(float);
}

template <class T, int N, int G> static void run_parts(const lm_call *call, const cached &c)
{
    lm_stream *s = call->stream;
    const int64_t parts = parts_of(c);
    partial r = partial_of(c, parts, call->work);
    size_t shared = (size_t)(G * PART + WARPS * G * c.dim) * sizeof(float);
    LM_LAUNCH((attend_parts<T, N, G>), grid_for(c.batch * c.seq * c.kv_heads * parts, 1, s),
              THREADS, shared, s, c, in_ptr<const T>(call, 0), out_ptr<T>(call, 0),
              out_ptr<T>(call, 1), out_ptr<T>(call, 2), r, parts);
    if (parts > 1)
        LM_LAUNCH((join_parts<T>), grid_for(c.batch * c.seq * c.heads, 1, s), THREADS, 0, s, c,
                  out_ptr<T>(call, 0), r, parts);
}

template <class T, int D, int KEYS>
static void run_tiles(const lm_call *call, const cached &c, bool packed)
{
    lm_stream *s = call->stream;
    int64_t items = c.batch * c.heads * ((c.seq + TILE - 1) / TILE);
    LM_LAUNCH((attend_tiles<T, D, KEYS>), grid_for(items, 1, s), THREADS, 0, s, c,
              in_ptr<const T>(call, 0), out_ptr<T>(call, 0), out_ptr<const T>(call, 1),
              out_ptr<const T>(call, 2), packed);
}

template <class T, int N> static void run_append(const lm_call *call, const cached &c)
{
    lm_stream *s = call->stream;
    LM_LAUNCH((append<T, N>), grid_for(c.batch * c.seq * 2 * c.kv_heads * (c.dim / N), 256, s), 256,
              0, s, c, in_ptr<const T>(call, 0), out_ptr<T>(call, 1), out_ptr<T>(call, 2));
}

template <class T> static void plain_tiles(const lm_call *call, const cached &c, bool packed)
{
    if (c.dim <= 64)
        run_tiles<T, 64, 32>(call, c, packed);
    else if (c.dim <= 128)
        run_tiles<T, 128, 32>(call, c, packed);
    else
        run_tiles<T, 256, 16>(call, c, packed);
}

template <class T> static void parts(const lm_call *call, const cached &c, bool packed)
{
    const int N = wide<T>::n;
    if (!packed)
        run_parts<T, 1, 1>(call, c);
    else if (c.group == 1 || c.dim > MOST_TILED)
        run_parts<T, N, 1>(call, c);
    else if (c.group <= 4)
        run_parts<T, N, 4>(call, c);
    else
        run_parts<T, N, 8>(call, c);
}

template <class T, bool TENSOR> static void attention_cached(const lm_call *call)
{
    const int N = wide<T>::n;
    cached c = cached_of(call);
    bool packed = packs<T>(N, c.dim, call->in[0].data, call->out[0].data, call->out[1].data,
                           call->out[2].data);
    if (c.seq > 1 && packed)
        run_append<T, N>(call, c);
    else if (c.seq > 1)
        run_append<T, 1>(call, c);
    if (!in_tiles(c))
        parts<T>(call, c, packed);
    else if constexpr (TENSOR)
        tensor_tiles<T>(call, c, packed);
    else
        plain_tiles<T>(call, c, packed);
}

#define ROW(type, dtype, level, tensor)                                        \
    {                                                                          \
        "attention_cached", dtype, level, attention_cached<type, tensor>, work \
    }

extern "C" const lm_kernel lm_attention_cached_cuda_kernels[] = {
    ROW(float, LM_DTYPE_F32, LM_CUDA_PLAIN, false), ROW(bf16, LM_DTYPE_BF16, LM_CUDA_PLAIN, false),
    ROW(f16, LM_DTYPE_F16, LM_CUDA_PLAIN, false),   ROW(bf16, LM_DTYPE_BF16, LM_CUDA_TENSOR, true),
    ROW(f16, LM_DTYPE_F16, LM_CUDA_TENSOR, true),   LM_CUDA_END
};
