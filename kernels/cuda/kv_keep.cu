/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep.cu -- masses of cached tokens, and rows of those that stay (kernels/kv_keep.h).
 *
 * kv_mass: a block has a tile of tokens of a key/value head, decoded once into shared memory, and goes over the queries,
 * Q at a time; a thread adds up some tokens of a query of each Q, and the threads of a token are added in a fixed order.
 * Shared memory: (Q + KEYS) rows of the head, 25 KiB for 128 numbers. */
#include "kernels/cuda/kv_tile.cuh"

extern "C" {
#include "kernels/kv_keep.h"
}

enum { THREADS = 128 };

struct kv_weighing {
    kv_rows r;
    kv_side side;
    const float *lse;
    const int32_t *from; /* the first position whose row counts */
    float *mass;
    int64_t room; /* tokens of a mass */
    bool packed;
};

/* Add the sums of a tile from token j0 on, a thread's EACH tokens of a query, to the masses of tokens below `end`. */
template <int Q, int KEYS>
static __device__ inline void add_mass(const kv_weighing &a, int64_t bk, int j0, int end,
                                       const float *sum, float *weight)
{
    const int LANES = THREADS / Q, q = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
#pragma unroll
    for (int k = 0; k < (KEYS > LANES ? KEYS / LANES : 1); k++)
        if (lane + LANES * k < KEYS)
            weight[q * (KEYS + 1) + lane + LANES * k] = sum[k];
    __syncthreads();
    if (threadIdx.x >= KEYS || j0 + (int)threadIdx.x >= end)
        return;
    float all = 0;
    for (int k = 0; k < Q; k++)
        all += weight[k * (KEYS + 1) + threadIdx.x];
    const int64_t b = bk / a.r.kv_heads, kv = bk % a.r.kv_heads;
    a.mass[(a.r.slot[b] * a.r.kv_heads + kv) * a.room + j0 + threadIdx.x] += all;
}

template <class T, int Q, int KEYS>
static __global__ void __launch_bounds__(THREADS)
    kv_mass_kernel(const __grid_constant__ kv_weighing a, const T *qkv)
{
    enum { LANES = THREADS / Q, EACH = KEYS > LANES ? KEYS / LANES : 1 };
    LM_DYNAMIC_SHARED(float, shared);
    const kv_rows &r = a.r;
    const int dim4 = (r.dim + 3) / 4, ld = 4 * dim4 + 4, q = (int)threadIdx.x / LANES,
              lane = (int)threadIdx.x % LANES;
    float *query = shared, *keys = query + Q * ld, *weight = keys + KEYS * ld,
          *table = weight + Q * (KEYS + 1);
    const int64_t tiles = (a.room + KEYS - 1) / KEYS;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < r.batch * r.kv_heads * tiles; item += gridDim.x) {
        const int64_t bk = item / tiles, b = bk / r.kv_heads, kv = bk % r.kv_heads,
                      row = first_of<true>(r, b);
        const int j0 = (int)(item % tiles) * KEYS, used = r.used[b], fresh = r.fresh[b];
        const int seen = a.from[b] > used ? a.from[b] - used : 0, n = (fresh - seen) * r.group;
        if (n <= 0 || j0 >= used + fresh)
            continue;
        float sum[EACH] = {};
        __syncthreads();
        kv_fill_tables(a.side, kv, table);
        __syncthreads();
        kv_load_tile<T, float, THREADS>(r, a.side, kv_reading_of(r, a.side, qkv, b, kv, 0, table),
                                        j0, KEYS, keys, ld, a.packed);
#pragma unroll 1
        for (int q0 = 0; q0 < n; q0 += Q) {
            __syncthreads();
            kv_load_queries<T, THREADS>(r, qkv, row + seen, kv * r.group, r.group, q0, n, Q, query,
                                        ld);
            __syncthreads();
            const int x = q0 + q, i = seen + x / r.group;
            span of = { 0, 0 };
            float lse = 0;
            if (x < n) {
                of = keys_of(r, b, i);
                lse = a.lse[(row + i) * r.heads + kv * r.group + x % r.group];
            }
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int at = lane + LANES * k, j = j0 + at;
                if (at >= KEYS || j < of.start || j >= of.end)
                    continue;
                float s = 0;
#pragma unroll 4
                for (int d = 0; d < dim4; d++)
                    s = dot(*(const four *)(query + q * ld + 4 * d),
                            *(const four *)(keys + at * ld + 4 * d), s);
                sum[k] += expf(capped(r, s * r.scale, b, i, kv * r.group + x % r.group, j) - lse);
            }
        }
        add_mass<Q, KEYS>(a, bk, j0, used + fresh, sum, weight);
    }
}

enum { QKV, LSE, USED, FRESH, FROM, FIRST, TABLE, KEYS_IN, SLOT, KTAIL };

static kv_weighing weighing_of(const lm_call *call)
{
    const lm_kv_mass_attr *attr = (const lm_kv_mass_attr *)call->attr;
    kv_weighing a = {};
    a.r = kv_rows_of(call, &attr->attention, attr->latent, &call->in[KEYS_IN], FIRST, -1, TABLE,
                     SLOT);
    a.r.used = in_ptr<const int32_t>(call, USED);
    a.r.fresh = in_ptr<const int32_t>(call, FRESH);
    a.side = kv_side_of(&call->in[KEYS_IN], call->n_in > KTAIL ? &call->in[KTAIL] : nullptr,
                        attr->residual, attr->sinks);
    a.lse = in_ptr<const float>(call, LSE);
    a.from = in_ptr<const int32_t>(call, FROM);
    a.mass = out_ptr<float>(call, 0);
    a.room = call->out[0].dim[2];
    return a;
}

template <class T, int Q, int KEYS> static void run_mass(const lm_call *call, const kv_weighing &a)
{
    lm_stream *s = call->stream;
    const int ld = (a.r.dim + 3) / 4 * 4 + 4;
    const size_t bytes =
        (size_t)((Q + KEYS) * ld + Q * (KEYS + 1) + kv_table_numbers(a.side)) * sizeof(float);
    const int64_t items = a.r.batch * a.r.kv_heads * ((a.room + KEYS - 1) / KEYS);
    LM_ALLOW_SHARED((kv_mass_kernel<T, Q, KEYS>), (int)s->shared_max);
    LM_LAUNCH((kv_mass_kernel<T, Q, KEYS>), grid_for(items, 1, s), THREADS, bytes, s, a,
              in_ptr<const T>(call, QKV));
}

template <class T> static void kv_mass(const lm_call *call)
{
    const int n = wide<T>::n;
    kv_weighing a = weighing_of(call);
    a.packed = packs<T>(n, a.r.dim, call->in[QKV].data, a.side.tail, a.side.pages);
    if (a.r.dim > 256)
        run_mass<T, 4, 16>(call, a);
    else
        run_mass<T, 16, 32>(call, a);
}

/* ---- rows of tokens that stay ---- */

struct kv_gathering {
    int64_t rows, each, heads, kv_heads, dim,
        room; /* rows: of y; each: of a sequence; room: of a cache */
    const int32_t *at, *count, *run;
    const float *weight;
};

template <class T>
static __global__ void kv_gather_kernel(kv_gathering g, const T *keys, const T *values, T *y)
{
    const int64_t width = (g.heads + 2 * g.kv_heads) * g.dim;
#pragma unroll 1
    for (int64_t i = global_thread(); i < g.rows * width; i += global_threads()) {
        const int64_t d = i % g.dim, head = i % width / g.dim - g.heads, row = i / width;
        const int64_t b = row / g.each, place = row % g.each,
                      bk = b * g.kv_heads + head % g.kv_heads;
        if (head < 0 || place >= g.count[b]) {
            y[i] = T{};
            continue;
        }
        const int64_t from = g.at[bk * g.each + place];
        const T *x = (head < g.kv_heads ? keys : values) + bk * g.room * g.dim + d;
        if (!g.run) {
            y[i] = x[from * g.dim];
            continue;
        }
        float sum = 0;
        for (int64_t j = from; j < from + g.run[bk * g.each + place]; j++)
            sum = fmaf(to_float(x[j * g.dim]), g.weight[bk * g.room + j], sum);
        y[i] = from_float<T>(sum);
    }
}

template <class T> static void kv_gather(const lm_call *call)
{
    const lm_kv_gather_attr *a = (const lm_kv_gather_attr *)call->attr;
    kv_gathering g = {};
    g.rows = call->out[0].dim[0];
    g.each = a->rows;
    g.heads = a->heads;
    g.kv_heads = a->kv_heads;
    g.dim = a->head_dim;
    g.room = call->in[0].dim[2];
    g.at = in_ptr<const int32_t>(call, 2);
    g.count = in_ptr<const int32_t>(call, 3);
    g.run = in_ptr<const int32_t>(call, 4);
    g.weight = in_ptr<const float>(call, 5);
    LM_LAUNCH((kv_gather_kernel<T>), grid_for(lm_tensor_count(&call->out[0]), 256, call->stream),
              256, 0, call->stream, g, in_ptr<const T>(call, 0), in_ptr<const T>(call, 1),
              out_ptr<T>(call, 0));
}

extern "C" const lm_kernel lm_kv_keep_cuda_kernels[] = {
    LM_CUDA_ROWS("kv_mass", kv_mass, nullptr), LM_CUDA_ROWS("kv_gather", kv_gather, nullptr),
    LM_CUDA_END
};
