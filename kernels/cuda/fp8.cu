/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.cu -- FP8: encoding, and products in plain CUDA or by cuBLASLt.
 *
 * Codes are computed tile by tile, 128 x 128 in the registers of a block, so that the scales of
 * blocks and rows are known before anything is written, and x is read once; transposed codes pass
 * through shared memory.  A product is tiles of 64 x 64 (gemm_tile.cuh) whose sums over 128 steps
 * of k meet their scales in F32.  Every maximum is exact, so the result does not depend on the
 * order of blocks. */
#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/grid2d.cuh"

extern "C" {
#include "kernels/cuda/blaslt.h"
}

/* ---- codes ---- */

struct e4m3 {
    uint8_t bits;
};
struct e5m2 {
    uint8_t bits;
};

/* Its bits, read as those of a float, have an exponent that is too small by 120; exact. */
__device__ inline float to_float(e4m3 x)
{
    uint32_t mag = x.bits & 0x7fu;
    float f = mag == 0x7f ? NAN : __uint_as_float(mag << 20) * 0x1p120f;
    return x.bits & 0x80 ? -f : f;
}
/* The upper half of an F16. */
__device__ inline float to_float(e5m2 x)
{
    return to_float(f16{ (uint16_t)(x.bits << 8) });
}

#include "kernels/cuda/gemm_tile.cuh"

/* The parameters of encoding. */
struct fp8_format {
    int drop;             /* bits of a float's mantissa that a code lacks */
    uint32_t lowest;      /* as a float, the smallest number that is not subnormal */
    uint32_t nan, nan_of; /* NaN's code, and which bits of the code's own mantissa stay in it */
    float most;           /* the largest number */
};

static fp8_format format_of(lm_dtype d)
{
    bool four = d == LM_DTYPE_F8E4M3;
    fp8_format f = {};

    f.drop = four ? 20 : 21;
    f.lowest = (uint32_t)(four ? 127 - 6 : 127 - 14) << 23;
    f.nan = four ? 0x7f : 0x7e; /* E4M3 has one NaN; of E5M2's, a quiet one */
    f.nan_of = four ? 0 : 1;    /* with the top of the payload */
    f.most = four ? 448 : 57344;
    return f;
}

/* Rounded to nearest, ties to even; numbers beyond the largest, infinities too, become the largest.
 * Adding a power of two whose last place is that of the code rounds, and the difference of the sum
 * to that power is the mantissa.  All cases take one path, because the lanes of a warp would
 * diverge. */
__device__ inline uint32_t encode(float x, const fp8_format &f)
{
    uint32_t u = __float_as_uint(x);
    float mag = fminf(fabsf(x), f.most);
    uint32_t exponent = __float_as_uint(mag) & 0x7f800000u;
    exponent = exponent > f.lowest ? exponent : f.lowest;
    uint32_t large = exponent + ((uint32_t)f.drop << 23);
    uint32_t code = __float_as_uint(mag + __uint_as_float(large)) - large;

    code += (exponent - f.lowest) >> f.drop;
    code = isnan(x) ? f.nan | (u >> f.drop & f.nan_of) : code;
    return (u >> 24 & 0x80u) | code;
}

__device__ inline float scale_for(float most, const fp8_format &f, bool power_of_two)
{
    float s = fmaxf(most / f.most, 0x1p-126f);
    return power_of_two ? __uint_as_float((__float_as_uint(s) + 0x7fffffu) & 0xff800000u) : s;
}

/* ---- encoding ---- */

static const int tile = LM_FP8_SIDE;
static const int warps = block_threads / 32, warp_rows = tile / warps;
static const int64_t most_parts = 2048; /* of the maximum of a tensor */

struct quantizing {
    int64_t rows, cols, ldx, ld;
    uint8_t *codes;
    float *scale;
    lm_fp8_steps steps;
    lm_fp8_scaling scaling;
    fp8_format format;
    bool power_of_two;
    bool pack_x, pack_codes; /* four at a time */
};

/* Four neighbours of a row; zeros for what is outside. */
template <class T> __device__ inline pack<T, 4> load4(const T *at, int64_t left, bool packed)
{
    pack<T, 4> x = {};
    if (packed && left >= 4)
        return *(const pack<T, 4> *)at;
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < left)
            x.v[e] = at[e];
    return x;
}

__device__ inline void store4(uint8_t *to, uint32_t codes, int64_t left, bool packed)
{
    if (packed && left >= 4) {
        *(uint32_t *)to = codes;
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < left)
            to[e] = (uint8_t)(codes >> 8 * e);
}

__device__ inline float most4(const float *v)
{
    return fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
}

/* The largest magnitude of each of this lane's four columns, over all warps. */
__device__ inline void column_most(float (*v)[4], float *most)
{
    __shared__ pack<float, 4> part[warps][32];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    pack<float, 4> m = {};

#pragma unroll
    for (int i = 0; i < warp_rows; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            m.v[e] = fmaxf(m.v[e], fabsf(v[i][e]));
    part[warp][lane] = m;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < warps; w++) {
        pack<float, 4> other = part[w][lane];
#pragma unroll
        for (int e = 0; e < 4; e++)
            m.v[e] = fmaxf(m.v[e], other.v[e]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        most[e] = m.v[e];
}

/* The place of word c of row r of a turned tile, 32 words a row: neither the words of a row nor
 * those that a warp writes to every fourth row share a bank. */
__device__ inline int turned_at(int r, int c)
{
    return r * (tile / 4) + (c ^ r / 4);
}

/* Write the scale of block (ob, kb) of the codes, and zeros after the last block of a row. */
__device__ inline void put_block_scale(const quantizing &q, int64_t ob, int64_t kb, int64_t k,
                                       float s)
{
    if (threadIdx.x != 0)
        return;
    float *row = q.scale + ob * q.steps.row_step;
    row[kb] = s;
    for (int64_t z = kb + 1; z * tile >= k && z < q.steps.row_step; z++)
        row[z] = 0;
}

/* A block has a tile of x in registers: a warp 16 of its rows, a lane 4 neighbours of each.
 * TURN: codes are those of the transpose. */
template <class T, bool TURN>
__global__ void __launch_bounds__(256, 2) fp8_quantize_kernel(const T *x, quantizing q)
{
    __shared__ uint32_t turned[TURN ? tile * tile / 4 : 1];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t across = (q.cols + tile - 1) / tile, down = (q.rows + tile - 1) / tile;

    for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x) {
        int64_t tr = t / across, tc = t % across;
        int64_t row0 = tr * tile + warp * warp_rows, col = tc * tile + lane * 4;
        int64_t ob = TURN ? tc : tr, kb = TURN ? tr : tc;
        float v[warp_rows][4], inverse[4], most[4];

        pack<T, 4> raw[warp_rows];
        const T *from = x + row0 * q.ldx + col;
        if (q.pack_x && (tr + 1) * tile <= q.rows && (tc + 1) * tile <= q.cols) {
#pragma unroll
            for (int i = 0; i < warp_rows; i++) /* all are in flight before one is used */
                raw[i] = *(const pack<T, 4> *)(from + i * q.ldx);
        } else {
#pragma unroll
            for (int i = 0; i < warp_rows; i++)
                raw[i] = load4(from + i * q.ldx, row0 + i < q.rows ? q.cols - col : 0, q.pack_x);
        }
#pragma unroll
        for (int i = 0; i < warp_rows; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                v[i][e] = to_float(raw[i].v[e]);

        if (q.scaling == LM_FP8_TENSOR) {
            most[0] = *q.scale;
            inverse[0] = inverse[1] = inverse[2] = inverse[3] = 1 / most[0];
        } else if (q.scaling == LM_FP8_BLOCK) {
            float m = 0;
#pragma unroll
            for (int i = 0; i < warp_rows; i++)
                m = fmaxf(m, most4(v[i]));
            float s = scale_for(block_max(m), q.format, q.power_of_two);
            put_block_scale(q, ob, kb, TURN ? q.rows : q.cols, s);
            inverse[0] = inverse[1] = inverse[2] = inverse[3] = 1 / s;
        } else if (TURN) {
            column_most(v, most);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float s = scale_for(most[e], q.format, q.power_of_two);
                inverse[e] = 1 / s;
                if (warp == 0 && col + e < q.cols)
                    q.scale[kb * q.steps.k_step + col + e] = s;
            }
        }

        uint32_t codes[4] = {};
#pragma unroll
        for (int i = 0; i < warp_rows; i++) {
            if (!TURN && q.scaling == LM_FP8_ROW) {
                float s = scale_for(warp_max(most4(v[i])), q.format, q.power_of_two);
                inverse[0] = inverse[1] = inverse[2] = inverse[3] = 1 / s;
                if (lane == 0 && row0 + i < q.rows)
                    q.scale[kb * q.steps.k_step + row0 + i] = s;
            }
            uint32_t four = 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t code = encode(v[i][e] * inverse[e], q.format);
                four |= code << 8 * e;
                codes[e] |= code << i % 4 * 8;
            }
            if (!TURN) {
                if (row0 + i < q.rows)
                    store4(q.codes + (row0 + i) * q.ld + col, four, q.cols - col, q.pack_codes);
            } else if (i % 4 == 3) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    turned[turned_at(lane * 4 + e, (warp * warp_rows + i) / 4)] = codes[e];
                    codes[e] = 0;
                }
            }
        }
        if (TURN) {
            __syncthreads();
            for (int i = 0; i < warp_rows; i++) {
                int r = warp * warp_rows + i;
                int64_t to_row = tc * tile + r, to_col = tr * tile + lane * 4;
                if (to_row < q.cols)
                    store4(q.codes + to_row * q.ld + to_col, turned[turned_at(r, lane)],
                           q.rows - to_col, q.pack_codes);
            }
            __syncthreads(); /* the next tile overwrites it */
        }
    }
}

/* cols and ldx are multiples of N. */
template <class T, int N>
__global__ void __launch_bounds__(block_threads)
    fp8_most_kernel(const T *x, int64_t rows, int64_t cols, int64_t ldx, float *part)
{
    typedef pack<T, N> piece;
    const int U = 4;
    int64_t step = grid2d_cols() * N;
    float most = 0;

#pragma unroll 1
    for (int64_t r = grid2d_row(); r < rows; r += grid2d_rows()) {
        const T *from = x + r * ldx;
#pragma unroll 1
        for (int64_t i = grid2d_col() * N; i < cols; i += U * step) {
            piece v[U] = {};
#pragma unroll
            for (int u = 0; u < U; u++)
                if (i + u * step < cols)
                    v[u] = *(const piece *)(from + i + u * step);
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    most = fmaxf(most, fabsf(to_float(v[u].v[j])));
        }
    }
    most = block_max(most);
    if (threadIdx.x + threadIdx.y == 0)
        part[blockIdx.y * gridDim.x + blockIdx.x] = most;
}

static __global__ void fp8_scale_kernel(const float *part, int64_t parts, fp8_format f,
                                        bool power_of_two, float *scale)
{
    float most = 0;
    for (int64_t i = threadIdx.x; i < parts; i += blockDim.x)
        most = fmaxf(most, part[i]);
    most = block_max(most);
    if (threadIdx.x == 0)
        *scale = scale_for(most, f, power_of_two);
}

size_t lm_cuda_fp8_quantize_work(const lm_fp8_quantize *q)
{
    return q->scaling == LM_FP8_TENSOR && !q->given ? (size_t)most_parts * sizeof(float) : 0;
}

/* Write the largest magnitudes of parts of x; returns the number of parts. */
template <class T> static int64_t run_most(const lm_fp8_quantize *q, const lm_stream *s)
{
    const int n = wide<T>::n;
    const T *x = (const T *)q->x;
    bool flat = q->ldx == q->cols;
    int64_t rows = flat ? 1 : q->rows, cols = flat ? q->rows * q->cols : q->cols;
    bool wide_rows = packs<T>(n, flat ? cols : cols | q->ldx, x);
    grid2d over = grid2d_for(rows, ceil_div(cols, wide_rows ? 4 * n : 4), s);
    over.grid.x = over.grid.x < most_parts ? over.grid.x : (unsigned)most_parts;
    over.grid.y =
        over.grid.x * over.grid.y <= most_parts ? over.grid.y : (unsigned)most_parts / over.grid.x;
    if (wide_rows)
        LM_LAUNCH((fp8_most_kernel<T, n>), over.grid, over.block, 0, s, x, rows, cols, q->ldx,
                  (float *)q->work);
    else
        LM_LAUNCH((fp8_most_kernel<T, 1>), over.grid, over.block, 0, s, x, rows, cols, q->ldx,
                  (float *)q->work);
    return (int64_t)over.grid.x * over.grid.y;
}

template <class T> static void quantize(const lm_fp8_quantize *q, const lm_stream *s)
{
    const T *x = (const T *)q->x;
    int64_t down = ceil_div(q->rows, tile), across = ceil_div(q->cols, tile);
    quantizing p = {};

    p.rows = q->rows, p.cols = q->cols, p.ldx = q->ldx, p.ld = q->ld;
    p.codes = (uint8_t *)q->codes;
    p.scale = q->scale;
    p.steps = lm_fp8_steps_of(q->scaling, q->transpose ? q->cols : q->rows,
                              q->transpose ? q->rows : q->cols);
    p.scaling = q->scaling;
    p.format = format_of(q->type);
    p.power_of_two = q->power_of_two;
    p.pack_x = packs<T>(4, q->ldx, x);
    p.pack_codes = packs<uint8_t>(4, q->ld, q->codes);
    if (q->scaling == LM_FP8_TENSOR && !q->given) {
        int64_t parts = run_most<T>(q, s);
        LM_LAUNCH(fp8_scale_kernel, 1, block_threads, 0, s, (const float *)q->work, parts, p.format,
                  q->power_of_two, q->scale);
    }
    if (q->transpose)
        LM_LAUNCH((fp8_quantize_kernel<T, true>), grid_for(down * across, 1, s), block_threads, 0,
                  s, x, p);
    else
        LM_LAUNCH((fp8_quantize_kernel<T, false>), grid_for(down * across, 1, s), block_threads, 0,
                  s, x, p);
}

void lm_cuda_fp8_quantize(const lm_fp8_quantize *q, const lm_stream *s)
{
    if (q->in == LM_DTYPE_F32)
        quantize<float>(q, s);
    else if (q->in == LM_DTYPE_BF16)
        quantize<bf16>(q, s);
    else
        quantize<f16>(q, s);
}

/* ---- products ---- */

static const int side = 64;

struct fp8_scales {
    const float *a, *b;
    lm_fp8_steps at_a, at_b;
};

__device__ inline float scale_at(const float *scale, const lm_fp8_steps &at, int64_t i,
                                 int64_t rows, int64_t block)
{
    i = i < rows ? i : rows - 1;
    return scale[(i >> at.shift) * at.row_step + block * at.k_step];
}

template <class X, class Y>
__global__ void __launch_bounds__(256, 2)
    fp8_tiles_kernel(const X *a, const Y *b, void *c, fp8_scales scales, tiling t)
{
    const int per = side / 16;
    __shared__ room<side> room_a, room_b;

    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t row, col;
        float total[per][per] = {};
        tile_at(t, i, &row, &col);
        row *= side, col *= side;
        for (int64_t q = 0; q * LM_FP8_SIDE < t.k; q++) {
            int64_t k0 = q * LM_FP8_SIDE, k1 = k0 + LM_FP8_SIDE < t.k ? k0 + LM_FP8_SIDE : t.k;
            float sum[per][per] = {}, right[per];

            sum_tile<X, Y, false, true, side>(sum, &room_a, &room_b, a, b, t, row, t.m, col, k0,
                                              k1);
#pragma unroll
            for (int j = 0; j < per; j++)
                right[j] = scale_at(scales.b, scales.at_b, col + first_col<side>() + j, t.n, q);
#pragma unroll
            for (int r = 0; r < per; r++) {
                float left = scale_at(scales.a, scales.at_a, row + first_row<side>() + r, t.m, q);
#pragma unroll
                for (int j = 0; j < per; j++)
                    total[r][j] = fmaf(sum[r][j], left * right[j], total[r][j]);
            }
        }
        if (t.wide_c)
            put_tile<float, side>((float *)c, total, t, row, t.m, col, t.bias, t.accumulate);
        else
            put_tile<bf16, side>((bf16 *)c, total, t, row, t.m, col, t.bias, t.accumulate);
    }
}

template <class X, class Y> static void run_plain(const lm_fp8_gemm *g, const lm_stream *s)
{
    const X *a = (const X *)g->a.codes;
    const Y *b = (const Y *)g->b.codes;
    fp8_scales scales = { g->a.scale, g->b.scale, lm_fp8_steps_of(g->a.scaling, g->m, g->k),
                          lm_fp8_steps_of(g->b.scaling, g->n, g->k) };
    tiling t = {};

    t.m = g->m, t.n = g->n, t.k = g->k;
    t.lda = g->a.ld, t.ldb = g->b.ld, t.ldc = g->ldc;
    t.tiles_m = ceil_div(g->m, side);
    t.tiles_n = ceil_div(g->n, side);
    t.bias = g->bias;
    t.accumulate = g->accumulate;
    t.wide_c = g->cd == LM_DTYPE_F32;
    t.pack_a = packs<X>(wide<X>::n, g->a.ld, a);
    t.pack_b = packs<Y>(wide<Y>::n, g->b.ld, b);
    t.pack_c = (t.wide_c ? packs<float>(4, g->ldc, g->c) : packs<bf16>(4, g->ldc, g->c)) &&
               packs<float>(4, 0, g->bias);
    int64_t tiles = t.tiles_m * t.tiles_n;
    LM_LAUNCH((fp8_tiles_kernel<X, Y>), (unsigned)(tiles < INT32_MAX ? tiles : INT32_MAX),
              block_threads, 0, s, a, b, g->c, scales, t);
}

static __global__ void fp8_bias_kernel(const float *bias, int64_t n, bf16 *out)
{
    for (int64_t i = global_thread(); i < n; i += global_threads())
        out[i] = from_float<bf16>(bias[i]);
}

bool fp8_block_scales(const lm_stream *s)
{
    return s->level == LM_CUDA_PLAIN || s->cc == 90;
}

/* Scalings that cuBLASLt knows on this card; with block scales, m and n are multiples of 4. */
static bool lt_knows(const lm_fp8_gemm *g, const lm_stream *s)
{
    bool a = g->a.scaling != LM_FP8_TENSOR, b = g->b.scaling != LM_FP8_TENSOR;
    bool both = g->a.scaling == LM_FP8_BLOCK && g->b.scaling == LM_FP8_BLOCK;

    if (!a && !b)
        return true;
    return a && b && !both && s->cc == 90 && g->m % 4 == 0 && g->n % 4 == 0 &&
           ((uintptr_t)g->a.scale | (uintptr_t)g->b.scale) % 16 == 0;
}

static bool run_by_lt(const lm_fp8_gemm *g, const lm_stream *s)
{
    lm_lt_gemm lt = {};

    if (s->level == LM_CUDA_PLAIN || !s->lt)
        return false;
    lt.formless = !lt_knows(g, s);
    if (g->bias && !lt.formless)
        LM_LAUNCH(fp8_bias_kernel, grid_for(g->n, 256, s), 256, 0, s, g->bias, g->n,
                  (bf16 *)g->work);
    lt.m = g->m, lt.n = g->n, lt.k = g->k;
    lt.a_type = g->a.type, lt.b_type = g->b.type, lt.cd = g->cd;
    lt.tb = true;
    lt.accumulate = g->accumulate;
    lt.a = g->a.codes, lt.b = g->b.codes, lt.c = g->c;
    lt.lda = g->a.ld, lt.ldb = g->b.ld, lt.ldc = g->ldc;
    lt.bias = g->bias ? g->work : nullptr;
    lt.a_scale = g->a.scale, lt.b_scale = g->b.scale;
    lt.a_scaling = g->a.scaling, lt.b_scaling = g->b.scaling;
    return lm_cuda_lt_gemm(s->lt, &lt, s->handle);
}

size_t lm_cuda_fp8_gemm_work(const lm_fp8_gemm *g)
{
    return g->cd == LM_DTYPE_BF16 ? (size_t)g->n * sizeof(bf16) : 0;
}

void lm_cuda_fp8_gemm(const lm_fp8_gemm *g, const lm_stream *s)
{
    if (run_by_lt(g, s))
        return;
    if (g->a.type == LM_DTYPE_F8E5M2)
        run_plain<e5m2, e4m3>(g, s);
    else if (g->b.type == LM_DTYPE_F8E5M2)
        run_plain<e4m3, e5m2>(g, s);
    else
        run_plain<e4m3, e4m3>(g, s);
}
