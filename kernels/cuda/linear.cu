/* linear.cu -- kernels of the linear family: products by gemm.cuh, and column sums of dy for db. */
#include "kernels/cuda/gemm.cuh"

extern "C" {
#include "kernels/linear.h"
}

static const int column_threads = 32, row_threads = 8;

/* ---- which products ---- */

static gemm_call forward(const lm_call *c)
{
    const lm_tensor *x = &c->in[0], *w = &c->in[1];
    gemm_call g = {};

    g.m = x->dim[0], g.n = w->dim[0], g.k = w->dim[1];
    g.ab = x->dtype, g.cd = c->out[0].dtype;
    g.tb = true;
    g.a = x->data, g.b = w->data, g.c = c->out[0].data;
    g.lda = g.k, g.ldb = g.k, g.ldc = g.n;
    g.bias = in_ptr<float>(c, 2);
    g.work = c->work;
    return g;
}

static gemm_call backward_x(const lm_call *c)
{
    const lm_tensor *dy = &c->in[0], *w = &c->in[1];
    gemm_call g = {};

    g.m = dy->dim[0], g.n = w->dim[1], g.k = w->dim[0];
    g.ab = dy->dtype, g.cd = c->out[0].dtype;
    g.a = dy->data, g.b = w->data, g.c = c->out[0].data;
    g.lda = g.k, g.ldb = g.n, g.ldc = g.n;
    g.work = c->work;
    return g;
}

static gemm_call backward_w(const lm_call *c)
{
    const lm_tensor *dy = &c->in[0], *x = &c->in[1];
    const lm_linear_attr *attr = (const lm_linear_attr *)c->attr;
    gemm_call g = {};

    g.m = dy->dim[1], g.n = x->dim[1], g.k = dy->dim[0];
    g.ab = dy->dtype, g.cd = LM_DTYPE_F32;
    g.ta = true;
    g.accumulate = !overwrites(c, attr->acc);
    g.a = dy->data, g.b = x->data, g.c = c->out[0].data;
    g.lda = g.m, g.ldb = g.n, g.ldc = g.n;
    g.work = c->work;
    return g;
}

/* ---- column sums, in two stages ---- */

/* Rows that one block sums: so many that there are at most 128 partial sums of a column.  From the
 * shape alone, as the bits follow from it. */
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
__global__ void column_parts_kernel(const T *dy, int64_t rows, int64_t cols, int64_t each,
                                    bool packed, float *part)
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
            const T *at = dy + r * cols + col;
            if (packed && col < cols) {
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

static __global__ void column_sums_kernel(const float *part, int64_t parts, int64_t cols, float *db,
                                          bool add)
{
    for (int64_t i = global_thread(); i < cols; i += global_threads()) {
        float s = 0;
        for (int64_t p = 0; p < parts; p++)
            s += part[p * cols + i];
        db[i] = add ? db[i] + s : s;
    }
}

template <class T>
static void column_sums(const lm_call *c, const T *dy, int64_t rows, int64_t cols, float *part,
                        float *db, bool add)
{
    const int threads = column_threads * row_threads;
    int64_t across = (cols + column_threads * wide<T>::n - 1) / (column_threads * wide<T>::n);
    dim3 grid((unsigned)(across < 65535 ? across : 65535), (unsigned)row_parts(rows));

    LM_LAUNCH((column_parts_kernel<T>), grid, threads, 0, c->stream, dy, rows, cols,
              rows_each(rows), packs<T>(wide<T>::n, cols, dy), part);
    LM_LAUNCH(column_sums_kernel, grid_for(cols, 256, c->stream), 256, 0, c->stream, part,
              row_parts(rows), cols, db, add);
}

/* ---- the family ---- */

template <class T> static void linear(const lm_call *c)
{
    gemm_call g = forward(c);
    gemm_run(&g, c->stream);
}
static size_t linear_work(const lm_call *c, int)
{
    gemm_call g = forward(c);
    return gemm_work(&g, c->stream);
}

template <class T> static void linear_dx(const lm_call *c)
{
    gemm_call g = backward_x(c);
    gemm_run(&g, c->stream);
}
static size_t linear_dx_work(const lm_call *c, int)
{
    gemm_call g = backward_x(c);
    return gemm_work(&g, c->stream);
}

/* Scratch of the product, then partial column sums. */
static size_t product_bytes(const gemm_call *g, const lm_stream *s)
{
    return (gemm_work(g, s) + 255) / 256 * 256;
}

template <class T> static void linear_dw(const lm_call *c)
{
    gemm_call g = backward_w(c);
    float *db = out_ptr<float>(c, 1);

    gemm_run(&g, c->stream);
    if (db)
        column_sums<T>(c, (const T *)g.a, g.k, g.m,
                       (float *)((char *)c->work + product_bytes(&g, c->stream)), db, g.accumulate);
}
static size_t linear_dw_work(const lm_call *c, int)
{
    gemm_call g = backward_w(c);
    bool db = c->n_out > 1 && c->out[1].ndim > 0;
    return product_bytes(&g, c->stream) + (db ? (size_t)(row_parts(g.k) * g.m) * sizeof(float) : 0);
}

extern "C" const lm_kernel lm_linear_cuda_kernels[] = {
    LM_CUDA_ROWS("linear", linear, linear_work),
    LM_CUDA_ROWS("linear_dx", linear_dx, linear_dx_work),
    LM_CUDA_ROWS("linear_dw", linear_dw, linear_dw_work),
    LM_CUDA_END,
};
