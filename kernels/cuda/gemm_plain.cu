/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_plain.cu -- matrix products in plain CUDA, one or a batch, three ways by shape:
 *
 *  rows   (m <= 8, A as it is, B transposed: a token being decoded) one warp for some columns of
 *         C; lanes read 16 bytes of B's rows at a time, each byte of B once.
 *  tiles  a block of 256 threads makes 128x128 (or 64x64) of C (gemm_tile.cuh).
 *  parts  few tiles and a long k (weight gradients of small layers): k is cut, each piece makes its
 *         own F32 product in scratch, and a second kernel adds the pieces in order.
 *
 * Which of them, and how k is cut, follows from the shape alone, and within each the order of the
 * sums is fixed: so are the bits, on any card.  Alignment only changes how memory is read.  A sum
 * into F32 over more than `flush` steps is folded into C every so often, which keeps its error
 * from growing with k as one long F32 sum's does. */
#include "kernels/cuda/gemm_plain.cuh"

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/rows.cuh"

/* The product of the batch for this block. */
__device__ inline int64_t batch_index(const tiling &t)
{
    return t.batch0 + blockIdx.z;
}

/* Epilogues of kernels: a function of the sums, or sums of A.  Separate kernels, so that the others
 * keep their registers. */
enum beside { NOTHING, SHAPED, SUMMED };

/* T: type of A and B; SIDE x SIDE of C a block.  blockIdx.y: which part of k. */
template <class T, bool TA, bool TB, int SIDE, beside AND>
__global__ void __launch_bounds__(256, SIDE == 128 ? 2 : 3)
    tiles_kernel(const T *a, const T *b, void *c, tiling t)
{
    __shared__ room<SIDE> room_a, room_b;
    int64_t part_begin = (int64_t)blockIdx.y * t.part_k;
    int64_t part_end = part_begin + t.part_k < t.k ? part_begin + t.part_k : t.k;
    int64_t stretch = t.wide_c ? flush : t.part_k;
    int64_t c_at = (int64_t)blockIdx.y * t.part_size + batch_index(t) * t.stride_c;

    a += batch_index(t) * t.stride_a;
    b += batch_index(t) * t.stride_b;
    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t row, col;
        tile_at(t, i, &row, &col);
        row *= SIDE, col *= SIDE;
        for (int64_t k0 = part_begin; k0 < part_end; k0 += stretch) {
            int64_t k1 = k0 + stretch < part_end ? k0 + stretch : part_end;
            float sum[SIDE / 16][SIDE / 16] = {}, row_sum = 0;

            sum_tile<T, T, TA, TB, SIDE, AND == SUMMED>(sum, &room_a, &room_b, a, b, t, row, t.m,
                                                        col, k0, k1, &row_sum);
            const float *bias = k0 == part_begin ? t.bias : nullptr;
            bool accumulate = t.accumulate || k0 > part_begin;
            if (AND == SHAPED && k1 == part_end)
                put_shaped<T, SIDE>((T *)c, sum, t, row, col, bias, k0 > part_begin);
            else if (sizeof(T) == 4 || t.wide_c)
                put_tile<float, SIDE>((float *)c + c_at, sum, t, row, t.m, col, bias, accumulate);
            else
                put_tile<T, SIDE>((T *)c + c_at, sum, t, row, t.m, col, bias, accumulate);
            if (AND == SUMMED && col == 0 && threadIdx.x < SIDE && row + threadIdx.x < t.m) {
                float *to = t.a_sum + blockIdx.y * t.m + row + threadIdx.x;
                *to = (accumulate ? *to : 0.0f) + row_sum;
            }
        }
    }
}

/* ---- parts of k, added ---- */

/* part: t.parts times the sums of m x n, for each product of a batch; a_part: those of a_sum. */
template <class C, beside AND>
__global__ void add_parts_kernel(const float *part, const float *a_part, C *c, tiling t)
{
    part += batch_index(t) * t.parts * t.part_size;
    c += batch_index(t) * t.stride_c;
    for (int64_t i = global_thread(); i < t.part_size; i += global_threads()) {
        float s = part[i];
        for (int64_t p = 1; p < t.parts; p++)
            s += part[p * t.part_size + i];
        int64_t row = i / t.n, col = i % t.n, at = row * t.ldc + col;
        s += t.bias ? t.bias[col] : 0.0f;
        if (AND == SHAPED)
            s = shaped<C>(t, s, at);
        else
            s += t.accumulate ? to_float(c[at]) : 0.0f;
        c[at] = from_float<C>(s);
    }
    for (int64_t i = global_thread(); AND == SUMMED && i < t.m; i += global_threads()) {
        float s = a_part[i];
        for (int64_t p = 1; p < t.parts; p++)
            s += a_part[p * t.m + i];
        t.a_sum[i] = (t.accumulate ? t.a_sum[i] : 0.0f) + s;
    }
}

/* ---- few rows ---- */

/* C [m,n] = A [m,k] B^T, m <= M: a warp makes COLS columns (rows.cuh).  With fewer rows there are
 * registers for more blocks, and so more reads in flight. */
template <class T, int M, int COLS, beside AND>
__global__ void __launch_bounds__(256, M == 1   ? 4
                                       : M == 2 ? 3
                                                : 2)
    rows_kernel(const T *a, const T *b, void *c, tiling t)
{
    const int U = COLS > 1 ? 1 : M > 4 ? 2 : 4;
    const int EACH = 32 / (M * COLS); /* lanes that get the same sum */
    int lane = (int)threadIdx.x % 32;
    bool whole = t.pack_a && t.pack_b && t.k % wide<T>::n == 0;
    int64_t groups = (t.n + COLS - 1) / COLS, warps = global_threads() / 32;

    for (int64_t group = global_thread() / 32; group < groups; group += warps) {
        int64_t col0 = group * COLS;
        few_factors<T, COLS> f = { a, {}, t.lda, t.m, t.k };
        float sum[M][COLS] = {};

#pragma unroll
        for (int j = 0; j < COLS; j++)
            f.b[j] = b + (col0 + j < t.n ? col0 + j : t.n - 1) * t.ldb;
        few_sums<T, M, COLS, U>(sum, f, whole);
        float mine = shared_sums<M * COLS>(&sum[0][0]);
        int64_t row = lane / EACH / COLS, col = col0 + lane / EACH % COLS, at = row * t.ldc + col;
        if (lane % EACH == 0 && row < t.m && col < t.n) {
            mine += t.bias ? t.bias[col] : 0.0f;
            if (AND == SHAPED)
                ((T *)c)[at] = from_float<T>(shaped<T>(t, mine, at));
            else if (sizeof(T) == 4 || t.wide_c)
                ((float *)c)[at] = mine + (t.accumulate ? ((float *)c)[at] : 0.0f);
            else
                ((T *)c)[at] = from_float<T>(mine + (t.accumulate ? to_float(((T *)c)[at]) : 0.0f));
        }
    }
}

/* ---- launches ---- */

static bool few_rows(const gemm_call *g)
{
    return g->m <= most_few_rows && !g->ta && g->tb;
}

/* Tiles that should be in flight: more than fill the largest card.  A constant, so that the bits
 * of a product do not depend on the card. */
static const int64_t enough_tiles = 256;

static int64_t batch_of(const gemm_call *g)
{
    return g->batch > 1 ? g->batch : 1;
}
static int64_t count_tiles(const gemm_call *g, int64_t side)
{
    return ceil_div(g->m, side) * ceil_div(g->n, side) * batch_of(g);
}
/* No operator needs both factors transposed: small tiles are enough. */
static int side_for(const gemm_call *g)
{
    bool both = g->ta && g->tb;
    return !both && count_tiles(g, 128) >= enough_tiles / 2 ? 128 : 64;
}
/* Steps of k that one part sums. */
static int64_t part_steps(const gemm_call *g)
{
    int64_t tiles = count_tiles(g, side_for(g));
    int64_t parts = ceil_div(enough_tiles, tiles), most = g->k / 256;

    if (few_rows(g) || tiles * 2 > enough_tiles || most < 2)
        return g->k;
    parts = parts < most ? parts : most;
    parts = parts < 32 ? parts : 32;
    return ceil_div(ceil_div(g->k, parts), depth) * depth;
}

/* Floats of the sums of all parts; those of a_sum lie behind them. */
static int64_t part_floats(const gemm_call *g, int64_t parts)
{
    return batch_of(g) * parts * g->m * g->n;
}

size_t gemm_plain_work(const gemm_call *g)
{
    int64_t parts = ceil_div(g->k, part_steps(g)), sums = g->a_sum ? parts * g->m : 0;
    return parts > 1 ? (size_t)(part_floats(g, parts) + sums) * sizeof(float) : 0;
}

/* Blocks in the grid's third dimension: the part of the batch from batch0 on that one launch
 * covers. */
static const int64_t batch_most = 1024;

static unsigned batch_blocks(const gemm_call *g, const tiling &t)
{
    int64_t left = batch_of(g) - t.batch0;
    return (unsigned)(left < batch_most ? left : batch_most);
}

template <class T, int SIDE>
static void launch_tiles(const gemm_call *g, const lm_stream *s, const tiling &t, void *c)
{
    const T *a = (const T *)g->a, *b = (const T *)g->b;
    int64_t tiles = t.tiles_m * t.tiles_n, most = INT32_MAX;
    dim3 grid((unsigned)(tiles < most ? tiles : most), (unsigned)t.parts, batch_blocks(g, t));
    bool act = t.act != LM_ACT_NONE;

    if (g->ta && g->tb)
        LM_LAUNCH((tiles_kernel<T, true, true, 64, NOTHING>), grid, block_threads, 0, s, a, b, c,
                  t);
    else if (g->ta && t.a_sum)
        LM_LAUNCH((tiles_kernel<T, true, false, SIDE, SUMMED>), grid, block_threads, 0, s, a, b, c,
                  t);
    else if (g->ta)
        LM_LAUNCH((tiles_kernel<T, true, false, SIDE, NOTHING>), grid, block_threads, 0, s, a, b, c,
                  t);
    else if (g->tb && act)
        LM_LAUNCH((tiles_kernel<T, false, true, SIDE, SHAPED>), grid, block_threads, 0, s, a, b, c,
                  t);
    else if (g->tb)
        LM_LAUNCH((tiles_kernel<T, false, true, SIDE, NOTHING>), grid, block_threads, 0, s, a, b, c,
                  t);
    else if (act)
        LM_LAUNCH((tiles_kernel<T, false, false, SIDE, SHAPED>), grid, block_threads, 0, s, a, b, c,
                  t);
    else
        LM_LAUNCH((tiles_kernel<T, false, false, SIDE, NOTHING>), grid, block_threads, 0, s, a, b,
                  c, t);
}

template <class C>
static void add_parts(const gemm_call *g, const lm_stream *s, const tiling &t, const float *part,
                      const float *a_part)
{
    const beside SUMS = sizeof(C) == 4 ? SUMMED : NOTHING; /* sums are only made with a C of F32 */
    dim3 grid(grid_for(t.part_size, block_threads, s), 1, batch_blocks(g, t));
    C *c = (C *)g->c;

    if (t.act != LM_ACT_NONE)
        LM_LAUNCH((add_parts_kernel<C, SHAPED>), grid, block_threads, 0, s, part, a_part, c, t);
    else if (t.a_sum)
        LM_LAUNCH((add_parts_kernel<C, SUMS>), grid, block_threads, 0, s, part, a_part, c, t);
    else
        LM_LAUNCH((add_parts_kernel<C, NOTHING>), grid, block_threads, 0, s, part, a_part, c, t);
}

template <class T> static void run_tiles(const gemm_call *g, const lm_stream *s, tiling t)
{
    int side = side_for(g);

    t.tiles_m = ceil_div(g->m, side);
    t.tiles_n = ceil_div(g->n, side);
    t.part_k = part_steps(g);
    t.parts = ceil_div(g->k, t.part_k);
    t.part_size = t.parts > 1 ? g->m * g->n : 0;
    tiling part = t; /* the product of one part */
    void *c = g->c;
    if (t.parts > 1) {
        c = g->work;
        part.ldc = g->n;
        part.stride_c = t.parts * t.part_size;
        part.bias = nullptr;
        part.accumulate = false;
        part.act = LM_ACT_NONE;
        part.wide_c = true;
        part.pack_c = packs<float>(4, g->n, c);
        part.a_sum = g->a_sum ? (float *)c + part_floats(g, t.parts) : nullptr;
    }
    if (side == 128)
        launch_tiles<T, 128>(g, s, part, c);
    else
        launch_tiles<T, 64>(g, s, part, c);
    if (t.parts > 1 && t.wide_c)
        add_parts<float>(g, s, t, (const float *)c, part.a_sum);
    else if (t.parts > 1)
        add_parts<T>(g, s, t, (const float *)c, part.a_sum);
}

template <class T, int COLS>
static void launch_rows(const gemm_call *g, const lm_stream *s, const tiling &t)
{
    const T *a = (const T *)g->a, *b = (const T *)g->b;
    unsigned grid = grid_for(ceil_div(g->n, COLS), block_threads / 32, s);

    if (g->act != LM_ACT_NONE) /* rare in graphs: one kernel is enough */
        LM_LAUNCH((rows_kernel<T, 8, COLS, SHAPED>), grid, block_threads, 0, s, a, b, g->c, t);
    else if (g->m == 1)
        LM_LAUNCH((rows_kernel<T, 1, COLS, NOTHING>), grid, block_threads, 0, s, a, b, g->c, t);
    else if (g->m == 2)
        LM_LAUNCH((rows_kernel<T, 2, COLS, NOTHING>), grid, block_threads, 0, s, a, b, g->c, t);
    else if (g->m <= 4)
        LM_LAUNCH((rows_kernel<T, 4, COLS, NOTHING>), grid, block_threads, 0, s, a, b, g->c, t);
    else
        LM_LAUNCH((rows_kernel<T, 8, COLS, NOTHING>), grid, block_threads, 0, s, a, b, g->c, t);
}

/* The z-th product of a batch. */
static gemm_call one_of(const gemm_call *g, int64_t z)
{
    gemm_call one = *g;
    int64_t in = (int64_t)lm_dtype_size(g->ab), out = (int64_t)lm_dtype_size(g->cd);

    one.a = (const char *)g->a + z * g->stride_a * in;
    one.b = (const char *)g->b + z * g->stride_b * in;
    one.c = (char *)g->c + z * g->stride_c * out;
    return one;
}

template <class T> static void run_as(const gemm_call *g, const lm_stream *s)
{
    tiling t = {};

    t.m = g->m, t.n = g->n, t.k = g->k;
    t.lda = g->lda, t.ldb = g->ldb, t.ldc = g->ldc;
    t.bias = g->bias;
    t.accumulate = g->accumulate;
    t.wide_c = g->cd == LM_DTYPE_F32;
    t.act = g->act, t.slope = g->slope, t.z = g->z;
    t.a_sum = g->a_sum;
    if (batch_of(g) > 1)
        t.stride_a = g->stride_a, t.stride_b = g->stride_b, t.stride_c = g->stride_c;
    t.pack_a = packs<T>(wide<T>::n, g->lda, g->a) && t.stride_a % wide<T>::n == 0;
    t.pack_b = packs<T>(wide<T>::n, g->ldb, g->b) && t.stride_b % wide<T>::n == 0;
    t.pack_c = (t.wide_c ? packs<float>(4, g->ldc, g->c, g->z) : packs<T>(4, g->ldc, g->c, g->z)) &&
               packs<float>(4, 0, g->bias) && t.stride_c % 4 == 0;
    for (; t.batch0 < batch_of(g) && !few_rows(g); t.batch0 += batch_most)
        run_tiles<T>(g, s, t);
    for (int64_t z = t.batch0; z < batch_of(g); z++) { /* a launch each */
        gemm_call one = one_of(g, z);
        if (g->n >= 4096) /* enough columns to fill the card with four to a warp */
            launch_rows<T, 4>(&one, s, t);
        else
            launch_rows<T, 1>(&one, s, t);
    }
}

void gemm_plain_run(const gemm_call *g, const lm_stream *s)
{
    if (g->ab == LM_DTYPE_F32)
        run_as<float>(g, s);
    else if (g->ab == LM_DTYPE_BF16)
        run_as<bf16>(g, s);
    else
        run_as<f16>(g, s);
}
