/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bias.cu -- gradients of biases by distance (kernels/attention.h), and their tables (kernels/distance.h).
 *
 * attention_dbias: the sums of do * o of each row; then a thread for each distance of a head of a sequence, which goes over
 * the queries in their order and computes the two products of each pair; then a thread for each column, which adds up
 * its distances and the sequences.  So the bits depend on the shapes alone. */
#include "kernels/cuda/attention_tile.cuh"

extern "C" {
#include "kernels/distance.h"
}

enum { THREADS = 128 };

template <class T> struct dbias_args {
    const T *dout, *qkv, *o;
    const float *lse;
    float *delta, *sums; /* [B,H,T]; [B,H,2T-1], the first of distance -(T - 1) */
};

template <class T>
static __global__ void __launch_bounds__(THREADS) row_sums(attn_shape s, dbias_args<T> x)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (int64_t row = global_thread() / 32; row < s.batch * s.seq * s.heads;
         row += global_threads() / 32) {
        float sum = 0;
        for (int d = lane; d < s.vdim; d += 32)
            sum = fmaf(to_float(x.dout[row * s.vdim + d]), to_float(x.o[row * s.vdim + d]), sum);
        sum = warp_sum(sum);
        const int64_t n = row / s.heads, h = row % s.heads;
        if (lane == 0)
            x.delta[(n / s.seq * s.heads + h) * s.seq + n % s.seq] = s.undivided ? 0.0f : sum;
    }
}

/* The gradient of the score of query i and key j of (b, h), before its soft cap. */
template <class T>
static __device__ inline float pair_gradient(const attn_shape &s, const dbias_args<T> &x,
                                             const attn_draws &draws, int64_t b, int64_t h, int i,
                                             int j)
{
    const int64_t pitch = qkv_pitch(s), kv = h / (s.heads / s.kv_heads), bh = b * s.heads + h;
    const T *q = x.qkv + (b * s.seq + i) * pitch + h * s.dim;
    const T *key = x.qkv + (b * s.seq + j) * pitch + (s.heads + kv) * s.dim;
    const T *value = x.qkv + (b * s.seq + j) * pitch + (s.heads + s.kv_heads) * s.dim + kv * s.vdim;
    const T *dout = x.dout + (b * s.seq + i) * o_pitch(s) + h * s.vdim;
    float score = 0, dp = 0, slope = 1;
#pragma unroll 4
    for (int d = 0; d < s.dim; d++)
        score = fmaf(to_float(q[d]), to_float(key[d]), score);
#pragma unroll 4
    for (int d = 0; d < s.vdim; d++)
        dp = fmaf(to_float(dout[d]), to_float(value[d]), dp);
    score = fmaf(bias_at(s.bias, h, j - i), s.bias_by, score);
    if (s.cap_by != 0) {
        score = tanhf(score * s.cap_by);
        slope = cap_slope(s, score);
    }
    if (s.drop) {
        const uint64_t at = draws.first + (uint64_t)i * (uint64_t)s.origin.seq + (uint64_t)j;
        dp = philox(at / 4, s.draw_hi, draws.key).v[at % 4] >= s.threshold ? dp * s.keep : 0.0f;
    }
    const float p = exp2f(fmaf(score, s.scale_log2, -x.lse[bh * s.seq + i] * 1.44269504f));
    return p * (dp - x.delta[bh * s.seq + i]) * slope;
}

template <class T>
static __global__ void __launch_bounds__(THREADS) distance_sums(attn_shape s, dbias_args<T> x)
{
    const int seq = (int)s.seq, all = 2 * seq - 1;
    const int64_t parts = (all + THREADS - 1) / THREADS;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < s.batch * s.heads * parts; item += gridDim.x) {
        const int64_t bh = item / parts, b = bh / s.heads, h = bh % s.heads;
        const int at = (int)(item % parts) * THREADS + (int)threadIdx.x, distance = at - (seq - 1);
        const attn_draws draws = draws_of(s, bh);
        if (at >= all)
            continue;
        float sum = 0;
#pragma unroll 1
        for (int i = distance < 0 ? -distance : 0; i < seq && i + distance < seq; i++) {
            const int j = i + distance;
            if (j >= first_key(s, b, i) && j < end_key(s, b, i))
                sum += pair_gradient(s, x, draws, b, h, i, j);
        }
        x.sums[bh * all + at] = sum;
    }
}

static __global__ void column_sums(attn_shape s, const float *sums, bool add, float *out)
{
    const int seq = (int)s.seq, all = 2 * seq - 1, Z = s.bias.columns, zero = s.bias.zero;
#pragma unroll 1
    for (int64_t t = global_thread(); t < s.heads * Z; t += global_threads()) {
        const int64_t h = t / Z;
        const int z = (int)(t % Z);
        /* Distances of the column: one, and at the ends those beyond, too. */
        int from = z == 0 ? 0 : z - zero + seq - 1, end = z == Z - 1 ? all : z - zero + seq;
        from = from < 0 ? 0 : from;
        end = end > all ? all : end;
        double sum = add ? (double)out[t] : 0;
#pragma unroll 1
        for (int64_t b = 0; b < s.batch; b++)
            for (int x = from; x < end; x++)
                sum += (double)sums[(b * s.heads + h) * all + x];
        out[t] = (float)sum;
    }
}

template <class T> static void attention_dbias(const lm_call *c)
{
    const lm_attention_dbias_attr *a = (const lm_attention_dbias_attr *)c->attr;
    const attn_shape s = attn_shape_of(c, 4, 6);
    const int64_t rows = s.batch * s.heads * s.seq, all = 2 * s.seq - 1;
    float *delta = static_cast<float *>(c->work);
    const dbias_args<T> x = { in_ptr<const T>(c, 0),
                              in_ptr<const T>(c, 1),
                              in_ptr<const T>(c, 2),
                              in_ptr<const float>(c, 3),
                              delta,
                              delta + rows };
    LM_LAUNCH((row_sums<T>), grid_for(rows, THREADS / 32, c->stream), THREADS, 0, c->stream, s, x);
    LM_LAUNCH((distance_sums<T>),
              grid_for(s.batch * s.heads * ((all + THREADS - 1) / THREADS), 1, c->stream), THREADS,
              0, c->stream, s, x);
    LM_LAUNCH(column_sums, grid_for(s.heads * s.bias.columns, 256, c->stream), 256, 0, c->stream, s,
              x.sums, !overwrites(c, a->acc), out_ptr<float>(c, 0));
}

static size_t dbias_work(const lm_call *c, int)
{
    const lm_attention_attr *a = (const lm_attention_attr *)c->attr;
    return (size_t)(a->batch * a->heads * (3 * a->seq - 1)) * sizeof(float);
}

/* ---- tables ---- */

static __global__ void spread(int64_t heads, int64_t columns, const float *table,
                              const int32_t *bucket, float *out)
{
#pragma unroll 1
    for (int64_t t = global_thread(); t < heads * columns; t += global_threads())
        out[t] = table[bucket[t % columns] * heads + t / columns];
}

static __global__ void gather(int64_t buckets, int64_t heads, int64_t columns, const float *dbias,
                              const int32_t *bucket, bool add, float *out)
{
#pragma unroll 1
    for (int64_t t = global_thread(); t < buckets * heads; t += global_threads()) {
        double sum = add ? (double)out[t] : 0;
#pragma unroll 1
        for (int64_t z = 0; z < columns; z++)
            if (bucket[z] == t / heads)
                sum += (double)dbias[t % heads * columns + z];
        out[t] = (float)sum;
    }
}

static void distance_bias(const lm_call *c)
{
    const int64_t heads = c->out[0].dim[0], columns = c->out[0].dim[1];
    LM_LAUNCH(spread, grid_for(heads * columns, 256, c->stream), 256, 0, c->stream, heads, columns,
              in_ptr<const float>(c, 0), in_ptr<const int32_t>(c, 1), out_ptr<float>(c, 0));
}

static void distance_bias_dtable(const lm_call *c)
{
    const lm_distance_bias_attr *a = (const lm_distance_bias_attr *)c->attr;
    const int64_t buckets = c->out[0].dim[0], heads = c->out[0].dim[1];
    LM_LAUNCH(gather, grid_for(buckets * heads, 256, c->stream), 256, 0, c->stream, buckets, heads,
              c->in[0].dim[1], in_ptr<const float>(c, 0), in_ptr<const int32_t>(c, 1),
              !overwrites(c, a->acc), out_ptr<float>(c, 0));
}

extern "C" const lm_kernel lm_attention_bias_cuda_kernels[] = {
    LM_CUDA_ROWS("attention_dbias", attention_dbias, dbias_work),
    { "distance_bias", LM_DTYPE_F32, LM_CUDA_PLAIN, distance_bias, nullptr },
    { "distance_bias_dtable", LM_DTYPE_F32, LM_CUDA_PLAIN, distance_bias_dtable, nullptr },
    LM_CUDA_END,
};
