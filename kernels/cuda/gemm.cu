/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.cu -- chooses how a product is computed.
 *
 * On the plain path by gemm_plain.cu, on the others by cuBLASLt, except for two kinds of shapes: up
 * to lt_few_rows rows of a decoder, whose time is that of reading B once, as the plain kernel does;
 * and those for which cuBLASLt has no algorithm, which are counted (lm_cuda_lt_counts).
 *
 * An epilogue never changes which of them computes the product: a function or sums that cuBLASLt
 * does not join with it are computed by a kernel of this file afterwards. */
#include "kernels/cuda/gemm.cuh"

#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/gemm_plain.cuh"
#include "kernels/cuda/grid2d.cuh"
#include "kernels/cuda/rows.cuh"

extern "C" {
#include "kernels/cuda/blaslt.h"
}

/* ---- column sums, in two passes ---- */

static const int column_threads = 32, row_threads = 8;

/* Rows that one block sums: so many that a column has at most 128 partial sums.  Chosen from the
 * shape alone, because the bits depend on it. */
static int64_t rows_each(int64_t rows)
{
    int64_t each = (rows + 127) / 128;
    return each < 64 ? 64 : each;
}
static int64_t row_parts(int64_t rows)
{
    return (rows + rows_each(rows) - 1) / rows_each(rows);
}

/* part[y][col] = the sum of rows y * each and after.  A block is 32 packs of columns wide and 8
 * rows high. */
template <class T>
__global__ void column_parts_kernel(const T *x, int64_t rows, int64_t cols, int64_t pitch,
                                    int64_t each, bool packed, float *part)
{
    const int P = wide<T>::n;
    __shared__ float sums[row_threads][column_threads * P];
    int64_t begin = (int64_t)blockIdx.y * each, end = begin + each < rows ? begin + each : rows;
    int lane = (int)threadIdx.x % column_threads, high = (int)threadIdx.x / column_threads;

    for (int64_t col0 = (int64_t)blockIdx.x * column_threads * P; col0 < cols;
         col0 += (int64_t)gridDim.x * column_threads * P) {
        int64_t col = col0 + lane * P;
        float s[P] = {};

        for (int64_t r = begin + high; r < end; r += row_threads) {
            const T *at = x + r * pitch + col;
            if (packed && col + P <= cols) {
                pack<T, P> v = *(const pack<T, P> *)at;
                for (int e = 0; e < P; e++)
                    s[e] += to_float(v.v[e]);
            } else {
                for (int e = 0; e < P; e++)
                    s[e] += col + e < cols ? to_float(at[e]) : 0.0f;
            }
        }
        for (int e = 0; e < P; e++)
            sums[high][lane * P + e] = s[e];
        __syncthreads();
        for (int i = (int)threadIdx.x; i < column_threads * P && col0 + i < cols;
             i += column_threads * row_threads) {
            float total = 0;
            for (int h = 0; h < row_threads; h++)
                total += sums[h][i];
            part[blockIdx.y * cols + col0 + i] = total;
        }
        __syncthreads();
    }
}

static __global__ void add_rows_kernel(const float *part, int64_t parts, int64_t cols, float *sum,
                                       bool add)
{
    for (int64_t i = global_thread(); i < cols; i += global_threads()) {
        float s = 0;
        for (int64_t p = 0; p < parts; p++)
            s += part[p * cols + i];
        sum[i] = add ? sum[i] + s : s;
    }
}

/* g->a_sum from the rows of `part` in scratch. */
static void add_rows(const gemm_call *g, int64_t parts, const lm_stream *s)
{
    LM_LAUNCH(add_rows_kernel, grid_for(g->m, 256, s), 256, 0, s, (const float *)g->work, parts,
              g->m, g->a_sum, g->accumulate);
}

template <class T> static void column_sums(const gemm_call *g, const lm_stream *s)
{
    const int threads = column_threads * row_threads;
    const T *x = (const T *)g->a;
    int64_t across = (g->m + column_threads * wide<T>::n - 1) / (column_threads * wide<T>::n);
    dim3 grid((unsigned)(across < 65535 ? across : 65535), (unsigned)row_parts(g->k));

    LM_LAUNCH((column_parts_kernel<T>), grid, threads, 0, s, x, g->k, g->m, g->lda, rows_each(g->k),
              packs<T>(wide<T>::n, g->lda, x), (float *)g->work);
    add_rows(g, row_parts(g->k), s);
}

/* ---- functions after a product ---- */

/* c = f(z), or with slope c *= f'(z); z may be c. */
template <class T, int N>
__global__ void shape_kernel(int64_t rows, int64_t cols, int64_t pitch, lm_activation act,
                             bool slope, const T *z, T *c)
{
    typedef pack<T, N> part;
#pragma unroll 1
    for (int64_t r = grid2d_row(); r < rows; r += grid2d_rows()) {
#pragma unroll 1
        for (int64_t i = grid2d_col() * N; i < cols; i += grid2d_cols() * N) {
            part x = *(const part *)(z + r * pitch + i), y = {};
            if (slope)
                y = *(const part *)(c + r * pitch + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float v = to_float(x.v[j]);
                v = slope ? to_float(y.v[j]) * gelu_slope_of<T>(act, v) : gelu_of<T>(act, v);
                y.v[j] = from_float<T>(v);
            }
            *(part *)(c + r * pitch + i) = y;
        }
    }
}

template <class T> static void shape(const gemm_call *g, const lm_stream *s)
{
    const int n = wide<T>::n;
    const T *z = (const T *)(g->z ? g->z : g->c);
    T *c = (T *)g->c;
    bool packed = g->n % n == 0 && packs<T>(n, g->ldc, z, c);
    grid2d over = grid2d_for(g->m, packed ? g->n / n : g->n, s);

    if (packed)
        LM_LAUNCH((shape_kernel<T, n>), over.grid, over.block, 0, s, g->m, g->n, g->ldc, g->act,
                  g->slope, z, c);
    else
        LM_LAUNCH((shape_kernel<T, 1>), over.grid, over.block, 0, s, g->m, g->n, g->ldc, g->act,
                  g->slope, z, c);
}

/* ---- by cuBLASLt ---- */

/* A bias as cuBLASLt requires it: of the output's type. */
static size_t bias_bytes(const gemm_call *g)
{
    return g->cd == LM_DTYPE_F32 ? 0 : (size_t)g->n * lm_dtype_size(g->cd);
}
static size_t sums_bytes(const gemm_call *g)
{
    return g->a_sum ? (size_t)(row_parts(g->k) * g->m) * sizeof(float) : 0;
}

/* The same on every path, with or without a bias: a graph is planned before its operands have
 * memory. */
size_t gemm_work(const gemm_call *g, const lm_stream *s)
{
    if (g->b_codes)
        return gemm_codes_work(g, s);
    size_t plain = gemm_plain_work(g), bias = bias_bytes(g), sums = sums_bytes(g);
    size_t most = bias > sums ? bias : sums; /* no product has both */
    return plain > most ? plain : most;
}

template <class T> __global__ void narrow_bias_kernel(const float *bias, int64_t n, T *out)
{
    for (int64_t i = global_thread(); i < n; i += global_threads())
        out[i] = from_float<T>(bias[i]);
}

static const void *bias_as_output(const gemm_call *g, const lm_stream *s)
{
    unsigned grid = grid_for(g->n, 256, s);

    if (!g->bias || g->cd == LM_DTYPE_F32)
        return g->bias;
    if (g->cd == LM_DTYPE_BF16)
        LM_LAUNCH((narrow_bias_kernel<bf16>), grid, 256, 0, s, g->bias, g->n, (bf16 *)g->work);
    else
        LM_LAUNCH((narrow_bias_kernel<f16>), grid, 256, 0, s, g->bias, g->n, (f16 *)g->work);
    return g->work;
}

/* In one call, except for cases in which cuBLASLt is not accurate enough: the exact form of GELU,
 * which it does not have; the tanh form in F32, for which it takes the GPU's approximate tanh; and
 * sums of numbers that it rounds. */
static bool run_joined(const gemm_call *g, lm_lt_gemm lt, const lm_stream *s)
{
    bool f32 = g->ab == LM_DTYPE_F32;
    bool add = g->a_sum && g->accumulate; /* cuBLASLt overwrites sums, and never adds to them */

    if (g->act == LM_ACT_GELU_EXACT || (g->act == LM_ACT_GELU && f32 && !lt.tf32) ||
        (g->a_sum && f32 && lt.tf32))
        return false;
    lt.gelu = g->act == LM_ACT_GELU, lt.slope = g->slope, lt.z = g->z;
    lt.a_sum = add ? (float *)g->work : g->a_sum;
    if (!lm_cuda_lt_gemm(s->lt, &lt, s->handle))
        return false;
    if (add)
        add_rows(g, 1, s);
    return true;
}

/* In two steps; the argument of the function is stored where the caller needs it. */
template <class T> static bool run_bare(const gemm_call *g, lm_lt_gemm lt, const lm_stream *s)
{
    if (g->z && !g->slope)
        lt.c = g->z;
    if (!lm_cuda_lt_gemm(s->lt, &lt, s->handle))
        return false;
    if (g->act != LM_ACT_NONE)
        shape<T>(g, s);
    if (g->a_sum)
        column_sums<T>(g, s);
    return true;
}

static bool run_by_lt(const gemm_call *g, const lm_stream *s)
{
    lm_lt_gemm lt = {};

    if (s->level == LM_CUDA_PLAIN || !s->lt || (g->m <= lt_few_rows && !g->ta && g->tb))
        return false;
    lt.m = g->m, lt.n = g->n, lt.k = g->k;
    lt.a_type = g->ab, lt.b_type = g->ab, lt.cd = g->cd;
    lt.ta = g->ta, lt.tb = g->tb;
    lt.accumulate = g->accumulate;
    lt.tf32 = s->level == LM_CUDA_TF32;
    lt.a = g->a, lt.b = g->b, lt.c = g->c;
    lt.lda = g->lda, lt.ldb = g->ldb, lt.ldc = g->ldc;
    lt.batch = g->batch;
    lt.stride_a = g->stride_a, lt.stride_b = g->stride_b, lt.stride_c = g->stride_c;
    lt.bias = bias_as_output(g, s);
    if (g->act == LM_ACT_NONE && !g->a_sum)
        return lm_cuda_lt_gemm(s->lt, &lt, s->handle);
    return run_joined(g, lt, s) || (g->ab == LM_DTYPE_F32    ? run_bare<float>(g, lt, s)
                                    : g->ab == LM_DTYPE_BF16 ? run_bare<bf16>(g, lt, s)
                                                             : run_bare<f16>(g, lt, s));
}

void gemm_run(const gemm_call *g, lm_stream *s)
{
    if (g->b_codes)
        gemm_codes_run(g, s);
    else if (!run_by_lt(g, s))
        gemm_plain_run(g, s);
}
