/* SPDX-License-Identifier: Apache-2.0 */
/* kv_attention.cu -- attention over coded caches (kernels/kv.h), for every format.
 *
 * A block has up to Q queries of one key/value head and goes over tiles of tokens, which it decodes into shared memory as
 * floats: keys, then values; the softmax is online.  Prompts: 16 rows of a query head, all tokens.  New tokens: the
 * query heads of a row, and a part of PART tokens; another kernel joins the parts in their order.
 * Tiles begin at multiples of their length, so that bits do not depend on where a prompt is cut into calls.
 *
 * Shared memory decides the blocks of a multiprocessor: (Q + KEYS) rows of D + 4 floats, 25 KiB for 16 queries of 128
 * numbers, 82 KiB for 4 queries of 1024.  Grids depend on shapes only.
 *
 * With LM_CUDA=tensor prompts go to kv_attention_tensor.cu, new tokens over whole codes to kv_attention_integer.cu. */
#include "kernels/cuda/kv_attention.cuh"

enum { FEW_ROWS = 4 };

/* Results of a thread: of query threadIdx / (THREADS / Q), the columns 4 (lane + lanes x) .. + 3. */
template <int D, int Q> struct kv_result {
    enum { LANES = THREADS / Q, COLUMNS = D / 4 > LANES ? D / 4 / LANES : 1 };
    four sum[COLUMNS];
    float max, all;
};

/* Shared memory of a block, in floats: queries, a tile, weights, tables.  EACH: keys of a tile for a thread. */
template <int D, int Q, int KEYS> struct kv_shared {
    enum {
        LANES = THREADS / Q,
        EACH = KEYS > LANES ? KEYS / LANES : 1,
        LD = D + 4,
        QUERY = 0,
        SIDE = Q * LD,
        WEIGHT = SIDE + KEYS * LD,
        TABLE = (WEIGHT + Q * (KEYS + 1) + 3) / 4 * 4
    };
};

/* Products of the thread's query with its keys of a tile. */
template <int D, int Q, int KEYS>
static __device__ inline void tile_scores(const float *query, const float *side, int dim4, float *s)
{
    const int LD = kv_shared<D, Q, KEYS>::LD, LANES = kv_result<D, Q>::LANES,
              EACH = kv_shared<D, Q, KEYS>::EACH, lane = (int)threadIdx.x % LANES;
#pragma unroll
    for (int k = 0; k < EACH; k++)
        s[k] = 0;
#pragma unroll 2
    for (int d = 0; d < dim4; d++) {
        const four v = *(const four *)(query + 4 * d);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (lane + LANES * k < KEYS)
                s[k] = dot(v, *(const four *)(side + (lane + LANES * k) * LD + 4 * d), s[k]);
    }
}

/* Scores to weights of the thread's query, with `top` at least the largest score of the thread; sums so far shrink. */
template <int D, int Q, int KEYS>
static __device__ inline void tile_weights(const float *s, float top, float *weight,
                                           kv_result<D, Q> &y)
{
    const int LANES = kv_result<D, Q>::LANES, lane = (int)threadIdx.x % LANES;
#pragma unroll
    for (int o = 1; o < LANES; o *= 2)
        top = fmaxf(top, __shfl_xor_sync(every_lane, top, o));
    const float shrink = expf(y.max - base_of(top));
    float fresh = 0;
#pragma unroll
    for (int k = 0; k < kv_shared<D, Q, KEYS>::EACH; k++) {
        const float p = expf(s[k] - base_of(top));
        fresh += p;
        if (lane + LANES * k < KEYS)
            weight[lane + LANES * k] = p;
    }
#pragma unroll
    for (int o = 1; o < LANES; o *= 2)
        fresh += __shfl_xor_sync(every_lane, fresh, o);
    y.max = top;
    y.all = fmaf(y.all, shrink, fresh);
#pragma unroll
    for (int c = 0; c < kv_result<D, Q>::COLUMNS; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            y.sum[c].v[e] *= shrink;
}

/* Add the thread's columns of `there` values with the weights of its query. */
template <int D, int Q, int KEYS>
static __device__ inline void tile_values(const float *weight, const float *side, int dim4,
                                          int there, kv_result<D, Q> &y)
{
    const int LD = kv_shared<D, Q, KEYS>::LD, LANES = kv_result<D, Q>::LANES,
              lane = (int)threadIdx.x % LANES;
#pragma unroll 4
    for (int k = 0; k < there; k++) {
        const float w = weight[k];
#pragma unroll
        for (int c = 0; c < kv_result<D, Q>::COLUMNS; c++)
            if (lane + LANES * c < dim4) {
                const four v = *(const four *)(side + k * LD + 4 * (lane + LANES * c));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    y.sum[c].v[e] = fmaf(w, v.v[e], y.sum[c].v[e]);
            }
    }
}

/* The queries of tokens [lo, hi). */
template <class T, int D, int Q, int KEYS>
static __device__ inline kv_result<D, Q> attend(const kv_attending &a, const T *qkv,
                                                const kv_queries &x, int64_t lo, int64_t hi,
                                                float *shared)
{
    typedef kv_shared<D, Q, KEYS> at;
    const int LD = at::LD, LANES = kv_result<D, Q>::LANES;
    const kv_rows &r = a.r;
    const int q = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
    float *query = shared + at::QUERY, *side = shared + at::SIDE,
          *weight = shared + at::WEIGHT + q * (KEYS + 1);
    float *table[2] = { shared + at::TABLE, shared + at::TABLE + a.tables[0] };
    const int64_t kv = x.h / r.group;
    __syncthreads(); /* shared memory may still be read for other queries */
    for (int s = 0; s < 2; s++)
        kv_fill_tables(a.side[s], kv, table[s]);
    kv_load_queries<T, THREADS>(r, qkv, x.row, x.h, x.heads, 0, x.n, Q, query, LD);
    __syncthreads();
    const kv_reading<T> keys = kv_reading_of(r, a.side[0], qkv, x.b, kv, 0, table[0]);
    const kv_reading<T> values = kv_reading_of(r, a.side[1], qkv, x.b, kv, 1, table[1]);
    span seen = { 0, 0 };
    if (q < x.n)
        seen = keys_of(r, x.b, x.i0 + q / x.heads);
    const span first = keys_of(r, x.b, x.i0), last = keys_of(r, x.b, x.i0 + (x.n - 1) / x.heads);
    const int end = (int)(last.end < hi ? last.end : hi);
    int start = (int)(first.start > lo ? first.start : lo);
    start -= start % KEYS;
    kv_result<D, Q> y = {};
    y.max = -INFINITY;
#pragma unroll 1
    for (int j0 = start; x.n > 0 && j0 < end; j0 += KEYS) {
        const int there = end - j0 < KEYS ? end - j0 : KEYS;
        float s[at::EACH], top = y.max;
        __syncthreads();
        kv_load_tile<T, float, THREADS>(r, a.side[0], keys, j0, KEYS, side, LD, a.packed);
        __syncthreads();
        if (r.latent) { /* behind the first part of the keys, which may have cleared what is there */
            kv_load_tile<T, float, THREADS>(r, a.side[1], values, j0, KEYS, side + r.vdim, LD,
                                            a.packed);
            __syncthreads();
        }
        if (a.rope) {
            rotate_keys(a, x.b, j0, KEYS, side, LD);
            __syncthreads();
        }
        tile_scores<D, Q, KEYS>(query + q * LD, side, (r.dim + 3) / 4, s);
#pragma unroll
        for (int k = 0; k < at::EACH; k++) {
            const int i = lane + LANES * k, j = j0 + i;
            const bool seen_here = i < there && j >= seen.start && j < seen.end && j >= lo;
            s[k] = seen_here
                       ? capped(r, s[k] * r.scale, x.b, x.i0 + q / x.heads, x.h + q % x.heads, j)
                       : -INFINITY;
            top = fmaxf(top, s[k]);
        }
        tile_weights<D, Q, KEYS>(s, top, weight, y);
        __syncthreads();
        if (!r.latent) {
            kv_load_tile<T, float, THREADS>(r, a.side[1], values, j0, KEYS, side, LD, a.packed);
            __syncthreads();
        }
        tile_values<D, Q, KEYS>(weight, side, (r.vdim + 3) / 4, there, y);
    }
    return y;
}

/* ---- prompts ---- */

template <class T, int D, int Q, int KEYS>
static __global__ void __launch_bounds__(THREADS)
    kv_attend_tiles(const __grid_constant__ kv_attending a, const T *qkv, T *o)
{
    LM_DYNAMIC_SHARED(float, shared);
    const kv_rows &r = a.r;
    const int64_t tiles = tiles_of_rows(r, Q), items = r.heads * tiles;
    const int q = (int)threadIdx.x / (THREADS / Q), lane = (int)threadIdx.x % (THREADS / Q);
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t h = item / tiles;
        tile_walk w = walk_tile(r, item % tiles, Q);
#pragma unroll 1
        while (next_piece(r, w)) {
            const kv_queries x = { w.b, h, first_of<true>(r, w.b) + w.i0, (int)w.i0, w.rows, 1 };
            kv_result<D, Q> y = attend<T, D, Q, KEYS>(a, qkv, x, 0, INT32_MAX, shared);
            if (q >= w.all)
                continue;
            const int64_t at = (x.row + q) * r.heads + h;
            const float fade = add_sink(r.sinks, h, y.max, y.all);
            const float by = row_factor(r.undivided, fade, y.max, y.all);
            if (r.lse && lane == 0)
                r.lse[at] = q < w.rows ? row_lse(r.undivided, y.max, y.all) : -INFINITY;
#pragma unroll
            for (int c = 0; c < kv_result<D, Q>::COLUMNS; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int d = 4 * (lane + THREADS / Q * c) + e;
                    if (d < r.vdim)
                        o[at * r.vdim + d] = from_float<T>(q < w.rows ? y.sum[c].v[e] * by : 0.0f);
                }
        }
    }
}

/* ---- new tokens ---- */

template <class T, int D, int Q, int KEYS>
static __global__ void __launch_bounds__(THREADS)
    kv_attend_parts(const __grid_constant__ kv_attending a, const T *qkv)
{
    LM_DYNAMIC_SHARED(float, shared);
    const kv_rows &r = a.r;
    const int64_t chunks = (r.group + Q - 1) / Q,
                  items = r.batch * a.seq * r.kv_heads * chunks * a.parts;
    const int q = (int)threadIdx.x / (THREADS / Q), lane = (int)threadIdx.x % (THREADS / Q);
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t part = item % a.parts, chunk = item / a.parts % chunks,
                      at = item / a.parts / chunks;
        const int64_t kv = at % r.kv_heads, i = at / r.kv_heads;
        const kv_token t = token_at(a, i);
        const span seen = keys_of(r, t.b, t.i);
        if (!t.real || part * PART >= seen.end || (part + 1) * PART <= seen.start)
            continue;
        const int left = r.group - (int)chunk * Q, n = left < Q ? left : Q;
        const kv_queries x = { t.b, kv * r.group + chunk * Q, t.row, (int)t.i, n, n };
        const kv_result<D, Q> y =
            attend<T, D, Q, KEYS>(a, qkv, x, part * PART, (part + 1) * PART, shared);
        const int64_t to = (i * r.heads + x.h + q) * a.parts + part;
        if (q >= n)
            continue;
        if (lane == 0) {
            a.max[to] = y.max;
            a.sum[to] = y.all;
        }
#pragma unroll
        for (int c = 0; c < kv_result<D, Q>::COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int d = 4 * (lane + THREADS / Q * c) + e;
                if (d < r.vdim)
                    a.out[to * r.vdim + d] = y.sum[c].v[e];
            }
    }
}

/* A block for each head of each row of new tokens adds up its parts in their order. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    kv_join_parts(const __grid_constant__ kv_attending a, T *o)
{
    enum { MOST = LM_KV_MAX_DIM / THREADS };
    __shared__ float weight[THREADS];
    const kv_rows &r = a.r;
    const int tid = (int)threadIdx.x;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < r.batch * a.seq * r.heads; item += gridDim.x) {
        const kv_token t = token_at(a, item / r.heads);
        const int64_t to = t.row * r.heads + item % r.heads, from = item * a.parts;
        const span seen = keys_of(r, t.b, t.i);
        const int64_t first = seen.start / PART, end = (seen.end + PART - 1) / PART;
        if (!t.real && r.first)
            continue;
        float top = -INFINITY, all = 0, y[MOST] = {};
        for (int64_t k = first + tid; t.real && k < end; k += THREADS)
            top = fmaxf(top, a.max[from + k]);
        top = block_max(top);
#pragma unroll 1
        for (int64_t k0 = first; t.real && k0 < end; k0 += THREADS) {
            const int n = end - k0 < THREADS ? (int)(end - k0) : THREADS;
            float w = tid < n ? expf(a.max[from + k0 + tid] - base_of(top)) : 0;
            weight[tid] = w;
            all += block_sum(tid < n ? w * a.sum[from + k0 + tid] : 0);
#pragma unroll
            for (int c = 0; c < MOST; c++) {
                const int d = tid + c * THREADS;
#pragma unroll 8
                for (int k = 0; d < r.vdim && k < n; k++)
                    y[c] = fmaf(weight[k], a.out[(from + k0 + k) * r.vdim + d], y[c]);
            }
            __syncthreads();
        }
        const float fade = add_sink(r.sinks, item % r.heads, top, all);
#pragma unroll
        for (int c = 0; c < MOST; c++)
            if (tid + c * THREADS < r.vdim)
                o[to * r.vdim + tid + c * THREADS] =
                    from_float<T>(t.real && all > 0 ? y[c] * fade / all : 0.0f);
        if (r.lse && tid == 0)
            r.lse[to] = t.real ? top + logf(all) : -INFINITY;
    }
}

/* Ragged rows that are not real become zeros, and their lse -inf. */
template <class T>
static __global__ void kv_clear_rows(const __grid_constant__ kv_attending a, T *o)
{
    const kv_rows &r = a.r;
    const int64_t width = r.heads * r.vdim, all = r.rows * width;
#pragma unroll 1
    for (int64_t i = global_thread(); i < all; i += global_threads()) {
        const int64_t row = i / width, b = sequence_of<true>(r, row);
        if (b < r.batch && row - first_of<true>(r, b) < r.fresh[b])
            continue;
        o[i] = T{};
        if (r.lse && i % r.vdim == 0)
            r.lse[i / r.vdim] = -INFINITY;
    }
}

/* ---- launchers ---- */

static bool has_tokens(const kv_attending &a)
{
    return a.r.seq <= FEW_ROWS;
}
static bool has_prompts(const kv_attending &a)
{
    return a.r.seq == 0 || a.r.seq > FEW_ROWS;
}

static kv_attending attending_of(const lm_call *call)
{
    const lm_kv_attr *attr = (const lm_kv_attr *)call->attr;
    kv_attending a = {};
    a.r =
        kv_rows_of(call, &attr->attention, attr->latent, &call->in[KEYS], FIRST, KIND, TABLE, SLOT);
    a.r.lse = out_ptr<float>(call, 1);
    a.r.sinks = in_ptr<const float>(call, SINKS);
    a.r.bias = bias_of(call, BIAS, &attr->attention);
    for (int x = 0; x < 2; x++) {
        a.side[x] =
            kv_side_of(&call->in[KEYS + x], call->n_in > KTAIL + x ? &call->in[KTAIL + x] : nullptr,
                       attr->residual[x], attr->sinks[x]);
        a.tables[x] = kv_table_numbers(a.side[x]);
    }
    a.rope = in_ptr<const float>(call, ROPE);
    a.place = in_ptr<const int32_t>(call, PLACE);
    a.rotary = a.rope ? (int)call->in[ROPE].dim[1] : 0;
    a.places = a.place ? (int)call->in[PLACE].dim[1] : 0;
    a.seq = a.r.seq > 0 ? a.r.seq : 1;
    a.parts = (a.r.room + a.r.most_rows + PART - 1) / PART;
    const int64_t n = has_tokens(a) ? a.r.batch * a.seq * a.r.heads * a.parts : 0;
    a.out = (float *)call->work;
    a.max = a.out + n * a.r.vdim;
    a.sum = a.max + n;
    return a;
}

static size_t work(const lm_call *call, int)
{
    const kv_attending a = attending_of(call);
    return has_tokens(a)
               ? (size_t)(a.r.batch * a.seq * a.r.heads * a.parts * (a.r.vdim + 2)) * sizeof(float)
               : 0;
}

template <class T, int D, int Q, int KEYS, bool PROMPTS>
static void run(const lm_call *call, const kv_attending &a)
{
    lm_stream *s = call->stream;
    const size_t bytes =
        (size_t)(kv_shared<D, Q, KEYS>::TABLE + a.tables[0] + a.tables[1]) * sizeof(float);
    const T *qkv = in_ptr<const T>(call, QKV);
    T *o = out_ptr<T>(call, 0);
    if constexpr (PROMPTS) {
        const int64_t items = a.r.heads * tiles_of_rows(a.r, Q);
        LM_ALLOW_SHARED((kv_attend_tiles<T, D, Q, KEYS>), (int)s->shared_max);
        LM_LAUNCH((kv_attend_tiles<T, D, Q, KEYS>), grid_for(items, 1, s), THREADS, bytes, s, a,
                  qkv, o);
    } else {
        const int64_t items =
            a.r.batch * a.seq * a.r.kv_heads * ((a.r.group + Q - 1) / Q) * a.parts;
        LM_ALLOW_SHARED((kv_attend_parts<T, D, Q, KEYS>), (int)s->shared_max);
        LM_LAUNCH((kv_attend_parts<T, D, Q, KEYS>), grid_for(items, 1, s), THREADS, bytes, s, a,
                  qkv);
    }
}

/* Queries of a block: 16 rows of prompts, 4 or 8 heads of a row; large heads have room for 4. */
template <class T, bool PROMPTS> static void run_dim(const lm_call *call, const kv_attending &a)
{
    if (a.r.dim > 256)
        run<T, 1024, 4, 16, PROMPTS>(call, a);
    else if constexpr (PROMPTS)
        a.r.dim > 128 ? run<T, 256, 16, 16, true>(call, a) : run<T, 128, 16, 32, true>(call, a);
    else if (a.r.group <= 4)
        a.r.dim > 128 ? run<T, 256, 4, 32, false>(call, a) : run<T, 128, 4, 32, false>(call, a);
    else
        a.r.dim > 128 ? run<T, 256, 8, 16, false>(call, a) : run<T, 128, 8, 32, false>(call, a);
}

/* F32 has the plain kernels alone. */
template <class T> static bool integer_parts(const lm_call *call, const kv_attending &a)
{
    if constexpr (sizeof(T) == 2)
        return kv_integer_parts<T>(call, a);
    return false;
}
template <class T> static bool tensor_prompts(const lm_call *call, const kv_attending &a)
{
    if constexpr (sizeof(T) == 2)
        return kv_tensor_prompts<T>(call, a);
    return false;
}

template <class T, bool TENSOR> static void kv_attention(const lm_call *call)
{
    lm_stream *s = call->stream;
    kv_attending a = attending_of(call);
    T *o = out_ptr<T>(call, 0);
    const int n = wide<T>::n;
    a.packed = packs<T>(n, a.r.dim, call->in[QKV].data, a.side[0].tail, a.side[1].tail) &&
               packs<T>(n, a.r.vdim, a.side[0].pages, a.side[1].pages);
    if (a.r.first)
        LM_LAUNCH((kv_clear_rows<T>), grid_for(a.r.rows * a.r.heads * a.r.vdim, 256, s), 256, 0, s,
                  a, o);
    if (has_tokens(a)) {
        if (!TENSOR || !integer_parts<T>(call, a))
            run_dim<T, false>(call, a);
        LM_LAUNCH((kv_join_parts<T>), grid_for(a.r.batch * a.seq * a.r.heads, 1, s), THREADS, 0, s,
                  a, o);
    }
    if (has_prompts(a) && (!TENSOR || !tensor_prompts<T>(call, a)))
        run_dim<T, true>(call, a);
}

/* Caches of attention_cached are pages of plain numbers, without a tail. */
template <class T> void attend_wide_prompts(const lm_call *call, const cached &c, bool packed)
{
    static_assert((int)MOST_WIDE <= (int)LM_KV_MAX_DIM, "a tile has room for a row");
    kv_attending a = {};
    static_cast<cached &>(a.r) = c;
    for (int x = 0; x < 2; x++)
        a.side[x] = kv_side_of(&call->out[x && !c.shared ? 2 : 1], nullptr, 0, 0);
    a.packed = packed;
    run<T, 1024, 4, 16, true>(call, a);
}

template void attend_wide_prompts<float>(const lm_call *call, const cached &c, bool packed);
template void attend_wide_prompts<bf16>(const lm_call *call, const cached &c, bool packed);
template void attend_wide_prompts<f16>(const lm_call *call, const cached &c, bool packed);

#define ROW(type, dtype, level, tensor)                                \
    {                                                                  \
        "kv_attention", dtype, level, kv_attention<type, tensor>, work \
    }

extern "C" const lm_kernel lm_kv_attention_cuda_kernels[] = {
    ROW(float, LM_DTYPE_F32, LM_CUDA_PLAIN, false), ROW(bf16, LM_DTYPE_BF16, LM_CUDA_PLAIN, false),
    ROW(f16, LM_DTYPE_F16, LM_CUDA_PLAIN, false),   ROW(bf16, LM_DTYPE_BF16, LM_CUDA_TENSOR, true),
    ROW(f16, LM_DTYPE_F16, LM_CUDA_TENSOR, true),   LM_CUDA_END
};
