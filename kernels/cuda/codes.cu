/* SPDX-License-Identifier: Apache-2.0 */
/* codes.cu -- codes with scales: a block of threads for each block of 256 numbers. */
#include "kernels/cuda/philox.cuh"

extern "C" {
#include "kernels/codes.h"
#include "numeric/format_dynamic.h"
}

static const int threads = LM_CODES_BLOCK;

/* A table passed with the launch: entries, or midpoints between them; unsigned, then signed. */
struct dynamic_table {
    float v[2][256];
    int zero[2];
};

static dynamic_table table_of(bool middles)
{
    dynamic_table t = {};
    for (int s = 0; s < 2; s++) {
        const lm_dynamic_map *m = &lm_dynamic_maps()[s];
        t.zero[s] = m->zero;
        for (int i = 0; i < 256; i++)
            t.v[s][i] = middles ? m->mid[i] : m->value[i];
    }
    return t;
}

struct codes_job {
    const void *gate;
    bool wide; /* the gate is of F64 */
    const float *x;
    float *y;
    uint8_t *code;
    float *scale, *zero;
    int64_t count, blocks;
    float most; /* the largest affine code */
    bool half, stochastic;
    uint64_t hi;
    const lm_step *step;
};

struct range {
    float least, largest;
    bool finite;
};

/* The range of the numbers of a block of threads; all threads get it. */
__device__ inline range range_of(float x)
{
    __shared__ float low[threads], high[threads];
    __shared__ int bad[threads];
    int t = (int)threadIdx.x;
    __syncthreads();
    low[t] = high[t] = x;
    bad[t] = !isfinite(x);
    __syncthreads();
#pragma unroll 1
    for (int half = threads / 2; half > 0; half /= 2) {
        if (t < half) {
            low[t] = low[t + half] < low[t] ? low[t + half] : low[t];
            high[t] = high[t + half] > high[t] ? high[t + half] : high[t];
            bad[t] |= bad[t + half];
        }
        __syncthreads();
    }
    return range{ low[0], high[0], !bad[0] };
}

/* Number i of block b, or its first one beyond the end. */
__device__ inline float number_at(const codes_job *j, int64_t b)
{
    int64_t i = b * threads + threadIdx.x;
    return j->x[i < j->count ? i : b * threads];
}

__device__ inline bool is_closed(const codes_job *j)
{
    return j->gate && (j->wide ? isnan(*(const double *)j->gate) : isnan(*(const float *)j->gate));
}

__global__ void __launch_bounds__(threads) encode_dynamic(codes_job j, dynamic_table middles)
{
    __shared__ float mid[256];
    int t = (int)threadIdx.x;
    if (is_closed(&j))
        return;
#pragma unroll 1
    for (int64_t b = blockIdx.x; b < j.blocks; b += gridDim.x) {
        int64_t i = b * threads + t;
        float x = number_at(&j, b);
        range r = range_of(x);
        float most = fmaxf(-r.least, r.largest);
        bool is_signed = r.finite && r.least < 0, none = !r.finite || !(most > 0);
        __syncthreads();
        mid[t] = middles.v[is_signed][t];
        __syncthreads();
        int code = middles.zero[is_signed];
        if (!none) {
            float v = x / most;
            int k = 0; /* the first with v <= mid */
#pragma unroll
            for (int span = 128; span > 0; span /= 2)
                if (v > mid[k + span - 1])
                    k += span;
            code = k + (!is_signed && k == code && x > 0);
        }
        if (i < j.count)
            j.code[i] = (uint8_t)code;
        if (t == 0)
            j.scale[b] = !r.finite ? NAN : none ? 0 : is_signed ? -most : most;
    }
}

__device__ inline float draw_at(const codes_job *j, int64_t b)
{
    uint64_t hi = j->hi, run = (uint64_t)j->step->step, count = (uint64_t)j->blocks * threads;
    hi ^= mixed(product_high(run, count));
    uint64_t i = run * count + (uint64_t)b * threads + threadIdx.x;
    draws4 d = philox(i / 4, hi, j->step->seed);
    return (float)(d.v[i % 4] >> 8) * 0x1p-24f;
}

__global__ void __launch_bounds__(threads) encode_affine(codes_job j)
{
    __shared__ int codes[threads];
    int t = (int)threadIdx.x;
    if (is_closed(&j))
        return;
#pragma unroll 1
    for (int64_t b = blockIdx.x; b < j.blocks; b += gridDim.x) {
        int64_t i = b * threads + t;
        float x = number_at(&j, b);
        range r = range_of(x);
        float scale = fmaxf(r.largest - r.least, 1e-5f) / j.most;
        float zero = fminf(fmaxf(-rintf(r.least / scale), 0), j.most) + 0.0f;
        float v = x / scale, down = floorf(v);
        v = !j.stochastic ? rintf(v) : draw_at(&j, b) < v - down ? down + 1 : down;
        int code = r.finite ? (int)fminf(fmaxf(v + zero, 0), j.most) : 0;
        codes[t] = i < j.count ? code : 0;
        __syncthreads();
        if (!j.half && i < j.count)
            j.code[i] = (uint8_t)code;
        if (j.half && t % 2 == 0 && i < j.count)
            j.code[i / 2] = (uint8_t)(code | codes[t + 1] << 4);
        if (t == 0) {
            j.scale[b] = r.finite ? scale : NAN;
            j.zero[b] = r.finite ? zero : 0;
        }
    }
}

__global__ void __launch_bounds__(threads) decode_dynamic(codes_job j, dynamic_table values)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < j.count; i += global_threads()) {
        float scale = j.scale[i / threads];
        j.y[i] = values.v[scale < 0][j.code[i]] * fabsf(scale);
    }
}

__global__ void __launch_bounds__(threads) decode_affine(codes_job j)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < j.count; i += global_threads()) {
        int code = !j.half ? j.code[i] : i % 2 ? j.code[i / 2] >> 4 : j.code[i / 2] & 15;
        j.y[i] = j.scale[i / threads] * ((float)code - j.zero[i / threads]);
    }
}

static void encode(const lm_call *c)
{
    const lm_codes_attr *a = (const lm_codes_attr *)c->attr;
    codes_job j = {};
    j.gate = in_ptr<const void>(c, 0);
    j.wide = c->in[0].dtype == LM_DTYPE_F64;
    j.x = in_ptr<const float>(c, 1);
    j.code = out_ptr<uint8_t>(c, 0);
    j.scale = out_ptr<float>(c, 1);
    j.zero = out_ptr<float>(c, 2);
    j.count = lm_tensor_count(&c->in[1]);
    j.blocks = lm_codes_blocks(j.count);
    j.most = lm_codes_most(a->format);
    j.half = a->format == LM_CODES_AFFINE4;
    j.stochastic = a->stochastic;
    j.hi = rng_hi("codes", (uint64_t)a->stream);
    j.step = c->stream->step;
    unsigned grid = grid_for(j.blocks, 1, c->stream);
    if (a->format == LM_CODES_DYNAMIC8)
        LM_LAUNCH(encode_dynamic, grid, threads, 0, c->stream, j, table_of(true));
    else
        LM_LAUNCH(encode_affine, grid, threads, 0, c->stream, j);
}

static void decode(const lm_call *c)
{
    const lm_codes_attr *a = (const lm_codes_attr *)c->attr;
    codes_job j = {};
    j.code = in_ptr<uint8_t>(c, 0);
    j.scale = in_ptr<float>(c, 1);
    j.zero = in_ptr<float>(c, 2);
    j.y = out_ptr<float>(c, 0);
    j.count = lm_tensor_count(&c->out[0]);
    j.half = a->format == LM_CODES_AFFINE4;
    unsigned grid = grid_for(j.count, threads, c->stream);
    if (a->format == LM_CODES_DYNAMIC8)
        LM_LAUNCH(decode_dynamic, grid, threads, 0, c->stream, j, table_of(false));
    else
        LM_LAUNCH(decode_affine, grid, threads, 0, c->stream, j);
}

extern "C" const lm_kernel lm_codes_cuda_kernels[] = {
    { "encode", LM_DTYPE_F32, LM_CUDA_PLAIN, encode, nullptr },
    { "decode", LM_DTYPE_F32, LM_CUDA_PLAIN, decode, nullptr },
    LM_CUDA_END
};
