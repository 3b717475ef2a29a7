/* SPDX-License-Identifier: Apache-2.0 */
/* arrange.cu -- numbers moved by their size alone: an element a thread; transposes by tiles in shared memory, so that reads
 * and writes are both of neighbours; sums at indices as whole numbers, which have no order. */
#include "kernels/cuda/code_rows.cuh"

extern "C" {
#include "kernels/arrange.h"
}

static const int threads = 256;
enum { TILE = 32, TILE_ROWS = 8 };

/* An element of the size of T. */
template <class T> struct bits_of {
    typedef uint16_t type;
};
template <> struct bits_of<float> {
    typedef uint32_t type;
};

/* ---- permute ---- */

/* p: the permutation; to: elements of y along each dimension; outer: items of the dimensions but the last and q. */
struct permute_job {
    lm_permute_plan p;
    int64_t to[LM_PERMUTE_DIMS], count, tiles_q, tiles_last, outer;
    int q;
};

template <class B>
__global__ void __launch_bounds__(threads) permute_elements(permute_job j, const B *x, B *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < j.count; i += global_threads()) {
        int64_t left = i, from = 0;
#pragma unroll 1
        for (int d = j.p.n - 1; d >= 0; d--) {
            from += left % j.p.dim[d] * j.p.pitch[d];
            left /= j.p.dim[d];
        }
        y[i] = x[from];
    }
}

/* Tiles of dimension q, along which x has no gaps, and the last, along which y has none. */
template <class B>
__global__ void __launch_bounds__(threads) permute_tiles(permute_job j, const B *x, B *y)
{
    __shared__ B tile[TILE][TILE + 1];
    int last = j.p.n - 1, lane = (int)threadIdx.x % TILE, row = (int)threadIdx.x / TILE;
    int64_t tiles = j.tiles_q * j.tiles_last;
#pragma unroll 1
    for (int64_t t = blockIdx.x; t < j.outer * tiles; t += gridDim.x) {
        int64_t left = t / tiles, from = 0, to = 0;
        int64_t q0 = t % tiles / j.tiles_last * TILE, l0 = t % j.tiles_last * TILE;
#pragma unroll 1
        for (int d = last - 1; d >= 0; d--) {
            if (d == j.q)
                continue;
            from += left % j.p.dim[d] * j.p.pitch[d];
            to += left % j.p.dim[d] * j.to[d];
            left /= j.p.dim[d];
        }
        __syncthreads(); /* the tile before has been written */
        for (int r = row; r < TILE; r += TILE_ROWS)
            if (l0 + r < j.p.dim[last] && q0 + lane < j.p.dim[j.q])
                tile[r][lane] = x[from + q0 + lane + (l0 + r) * j.p.pitch[last]];
        __syncthreads();
        for (int r = row; r < TILE; r += TILE_ROWS)
            if (q0 + r < j.p.dim[j.q] && l0 + lane < j.p.dim[last])
                y[to + (q0 + r) * j.to[j.q] + l0 + lane] = tile[lane][r];
    }
}

template <class T> static void permute(const lm_call *c)
{
    typedef typename bits_of<T>::type B;
    permute_job j = {};
    j.p = lm_permute_plan_of((const lm_permute_attr *)c->attr);
    j.count = lm_tensor_count(&c->out[0]);
    int last = j.p.n - 1;
    int64_t step = 1;
    for (int d = last; d >= 0; d--) {
        j.to[d] = step;
        step *= j.p.dim[d];
        j.q = j.p.pitch[d] == 1 ? d : j.q;
    }
    const B *x = in_ptr<const B>(c, 0);
    B *y = out_ptr<B>(c, 0);
    if (j.q == last) {
        LM_LAUNCH((permute_elements<B>), grid_for(j.count, threads, c->stream), threads, 0,
                  c->stream, j, x, y);
        return;
    }
    j.tiles_q = (j.p.dim[j.q] + TILE - 1) / TILE;
    j.tiles_last = (j.p.dim[last] + TILE - 1) / TILE;
    j.outer = j.count / j.p.dim[last] / j.p.dim[j.q];
    LM_LAUNCH((permute_tiles<B>), grid_for(j.outer * j.tiles_q * j.tiles_last, 1, c->stream),
              threads, 0, c->stream, j, x, y);
}

/* ---- window, join ---- */

template <class B>
__global__ void __launch_bounds__(threads)
    window_kernel(lm_window_attr a, const B *x, int64_t rows, int64_t cols, B *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < a.rows * a.cols; i += global_threads()) {
        int64_t row = a.row + i / a.cols, col = a.col + i % a.cols;
        bool inside = row >= 0 && row < rows && col >= 0 && col < cols;
        y[i] = inside ? x[row * cols + col] : B(0);
    }
}

template <class T> static void window(const lm_call *c)
{
    typedef typename bits_of<T>::type B;
    const lm_window_attr *a = (const lm_window_attr *)c->attr;
    LM_LAUNCH((window_kernel<B>), grid_for(a->rows * a->cols, threads, c->stream), threads, 0,
              c->stream, *a, in_ptr<const B>(c, 0), c->in[0].dim[0], c->in[0].dim[1],
              out_ptr<B>(c, 0));
}

/* x [rows,cols] to the rows of y, which are `pitch` elements apart. */
template <class B>
__global__ void __launch_bounds__(threads)
    place_kernel(const B *x, int64_t count, int64_t cols, B *y, int64_t pitch)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        y[i / cols * pitch + i % cols] = x[i];
}

template <class T> static void join(const lm_call *c)
{
    typedef typename bits_of<T>::type B;
    bool rows = ((const lm_join_attr *)c->attr)->rows;
    B *y = out_ptr<B>(c, 0);
    for (int k = 0; k < LM_JOIN_PARTS; k++) {
        const B *x = in_ptr<const B>(c, k);
        if (!x)
            continue;
        int64_t cols = c->in[k].dim[1], count = lm_tensor_count(&c->in[k]);
        LM_LAUNCH((place_kernel<B>), grid_for(count, threads, c->stream), threads, 0, c->stream, x,
                  count, cols, y, c->out[0].dim[1]);
        y += rows ? count : cols;
    }
}

/* ---- gather, scatter ---- */

template <class B>
__global__ void __launch_bounds__(threads)
    gather_kernel(const B *x, const int32_t *id, int64_t count, B *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        y[i] = id[i] < 0 ? B(0) : x[id[i]];
}

template <class T> static void gather(const lm_call *c)
{
    typedef typename bits_of<T>::type B;
    int64_t count = lm_tensor_count(&c->out[0]);
    LM_LAUNCH((gather_kernel<B>), grid_for(count, threads, c->stream), threads, 0, c->stream,
              in_ptr<const B>(c, 0), in_ptr<const int32_t>(c, 1), count, out_ptr<B>(c, 0));
}

template <class B> __global__ void __launch_bounds__(threads) clear_kernel(B *y, int64_t count)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        y[i] = B(0);
}

template <class B>
__global__ void __launch_bounds__(threads)
    scatter_unique(const B *x, const int32_t *id, int64_t count, B *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        if (id[i] >= 0)
            y[id[i]] = x[i];
}

/* The bits of the largest magnitude; those of infinity and NaN are above those of numbers. */
template <class T>
__global__ void __launch_bounds__(threads)
    scatter_largest(const T *x, const int32_t *id, int64_t count, unsigned *largest)
{
    unsigned most = 0;
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        union {
            float f;
            unsigned u;
        } v;
        v.f = fabsf(to_float(x[i]));
        most = id[i] >= 0 && v.u > most ? v.u : most;
    }
    if (most)
        atomicMax(largest, most);
}

/* The exponent of a bound of `terms` terms' sum; finite: whether there is one. */
__device__ inline int exponent_of(unsigned largest, int64_t terms, bool *finite)
{
    union {
        unsigned u;
        float f;
    } v;
    int e;
    v.u = largest;
    *finite = largest < 0x7f800000u;
    frexp(*finite ? (double)v.f * (double)terms : 1.0, &e);
    return e;
}

template <class T>
__global__ void __launch_bounds__(threads)
    scatter_add(const T *x, const int32_t *id, int64_t count, const unsigned *largest,
                unsigned long long *sum)
{
    bool finite;
    int e = exponent_of(*largest, count, &finite);
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        if (id[i] >= 0 && finite)
            atomicAdd(&sum[id[i]],
                      (unsigned long long)(long long)rint(ldexp((double)to_float(x[i]), 61 - e)));
}

template <class T>
__global__ void __launch_bounds__(threads)
    scatter_store(const unsigned long long *sum, int64_t count, int64_t terms,
                  const unsigned *largest, T *y)
{
    bool finite;
    int e = exponent_of(*largest, terms, &finite);
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        y[i] = from_float<T>(finite ? (float)ldexp((double)(long long)sum[i], e - 61) : NAN);
}

enum { SUMS_AT = 64 }; /* bytes of scratch before the sums */

template <class T> static void scatter(const lm_call *c)
{
    typedef typename bits_of<T>::type B;
    const int32_t *id = in_ptr<const int32_t>(c, 1);
    int64_t terms = lm_tensor_count(&c->in[0]), count = lm_tensor_count(&c->out[0]);
    unsigned over_y = grid_for(count, threads, c->stream);
    unsigned over_x = grid_for(terms, threads, c->stream);
    if (((const lm_scatter_attr *)c->attr)->unique) {
        LM_LAUNCH((clear_kernel<B>), over_y, threads, 0, c->stream, out_ptr<B>(c, 0), count);
        LM_LAUNCH((scatter_unique<B>), over_x, threads, 0, c->stream, in_ptr<const B>(c, 0), id,
                  terms, out_ptr<B>(c, 0));
        return;
    }
    unsigned *largest = (unsigned *)c->work;
    unsigned long long *sum = (unsigned long long *)((char *)c->work + SUMS_AT);
    const T *x = in_ptr<const T>(c, 0);
    LM_LAUNCH((clear_kernel<unsigned>), 1, threads, 0, c->stream, largest, (int64_t)1);
    LM_LAUNCH((clear_kernel<unsigned long long>), over_y, threads, 0, c->stream, sum, count);
    LM_LAUNCH((scatter_largest<T>), over_x, threads, 0, c->stream, x, id, terms, largest);
    LM_LAUNCH((scatter_add<T>), over_x, threads, 0, c->stream, x, id, terms,
              (const unsigned *)largest, sum);
    LM_LAUNCH((scatter_store<T>), over_y, threads, 0, c->stream, (const unsigned long long *)sum,
              count, terms, (const unsigned *)largest, out_ptr<T>(c, 0));
}

static size_t scatter_work(const lm_call *c, int)
{
    if (((const lm_scatter_attr *)c->attr)->unique)
        return 0;
    return SUMS_AT + (size_t)lm_tensor_count(&c->out[0]) * sizeof(unsigned long long);
}

/* ---- widen, stop, accumulate ---- */

template <class T, class Y>
__global__ void __launch_bounds__(threads) copy_kernel(const T *x, int64_t count, bool add, Y *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        float v = to_float(x[i]);
        y[i] = from_float<Y>(add ? to_float(y[i]) + v : v);
    }
}

template <class T, class Y> static void copy(const lm_call *c, bool add)
{
    int64_t count = lm_tensor_count(&c->out[0]);
    LM_LAUNCH((copy_kernel<T, Y>), grid_for(count, threads, c->stream), threads, 0, c->stream,
              in_ptr<const T>(c, 0), count, add, out_ptr<Y>(c, 0));
}

template <class T> static void widen(const lm_call *c)
{
    const lm_tensor *w = &c->in[0];
    if (w->codes)
        code_numbers<T, float>(w->codes, w->dim[1], 0, w->dim[0], 0, w->dim[1],
                               out_ptr<float>(c, 0), c->stream);
    else
        copy<T, float>(c, false);
}

template <class T> static void stop(const lm_call *c)
{
    copy<T, T>(c, false);
}

static void accumulate(const lm_call *c)
{
    bool add = !overwrites(c, ((const lm_accumulate_attr *)c->attr)->acc);
    if (c->in[0].dtype == LM_DTYPE_BF16)
        copy<bf16, float>(c, add);
    else if (c->in[0].dtype == LM_DTYPE_F16)
        copy<f16, float>(c, add);
    else
        copy<float, float>(c, add);
}

/* Into a parameter of F64, of a gradient in F32; and sums of losses. */
template <class X>
__global__ void __launch_bounds__(threads)
    add_to_doubles(const X *d, int64_t count, bool add, double *dw)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        dw[i] = (add ? dw[i] : 0) + (double)d[i];
}

template <class X> static void add_doubles(const lm_call *c)
{
    int64_t count = lm_tensor_count(&c->out[0]);
    LM_LAUNCH((add_to_doubles<X>), grid_for(count, threads, c->stream), threads, 0, c->stream,
              in_ptr<const X>(c, 0), count,
              !overwrites(c, ((const lm_accumulate_attr *)c->attr)->acc), out_ptr<double>(c, 0));
}

static void accumulate_doubles(const lm_call *c)
{
    (c->in[0].dtype == LM_DTYPE_F64 ? add_doubles<double> : add_doubles<float>)(c);
}

/* Doubles are added to from floats and doubles alone. */
static size_t doubles_work(const lm_call *c, int)
{
    return c->in[0].dtype == LM_DTYPE_F32 || c->in[0].dtype == LM_DTYPE_F64 ? 0 : SIZE_MAX;
}

extern "C" const lm_kernel lm_arrange_cuda_kernels[] = {
    LM_CUDA_ROWS("permute", permute, nullptr),
    LM_CUDA_ROWS("window", window, nullptr),
    LM_CUDA_ROWS("join", join, nullptr),
    LM_CUDA_ROWS("gather", gather, nullptr),
    LM_CUDA_ROWS("scatter", scatter, scatter_work),
    LM_CUDA_ROWS("widen", widen, nullptr),
    LM_CUDA_ROWS("stop", stop, nullptr),
    { "accumulate", LM_DTYPE_F32, LM_CUDA_PLAIN, accumulate, nullptr },
    { "accumulate", LM_DTYPE_F64, LM_CUDA_PLAIN, accumulate_doubles, doubles_work },
    LM_CUDA_END,
};
