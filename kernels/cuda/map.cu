/* SPDX-License-Identifier: Apache-2.0 */
/* map.cu -- formulas over the elements of tensors: every thread runs the program for four elements,
 * whose registers are in shared memory, at places that no other thread uses; sums and maxima of
 * parts in a fixed order. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/map.h"
}

/* ---- map ---- */

static const int map_threads = 128, EACH = 4; /* elements of a thread at a time */

/* Which element of an operand belongs to an element of y. */
enum spread { FLAT, ONE, DOWN, ACROSS };

struct map_operand {
    const void *data;
    lm_dtype type;
    enum spread spread;
};

struct map_job {
    lm_map_program program;
    map_operand x[LM_MAP_X];
    void *y[LM_MAP_Y];
    bool low[LM_MAP_Y];
    const void *gate;
    lm_dtype gate_type;
    const double *numbers;
    int64_t count, cols;
};

__device__ inline float element(const map_operand *x, int64_t i)
{
    return x->type == LM_DTYPE_BF16 ? to_float(((const bf16 *)x->data)[i])
                                    : ((const float *)x->data)[i];
}

__device__ inline double single_of(const map_operand *x)
{
    return x->type == LM_DTYPE_F64 ? *(const double *)x->data : (double)element(x, 0);
}

template <class F> __device__ inline F step_value(int code, F a, F b, F c)
{
    switch (code) {
    case LM_MAP_NEG:
        return -a;
    case LM_MAP_ABS:
        return fabs(a);
    case LM_MAP_SQRT:
        return sqrt(a);
    case LM_MAP_ROUND:
        return rint(a);
    case LM_MAP_ADD:
        return a + b;
    case LM_MAP_SUB:
        return a - b;
    case LM_MAP_MUL:
        return a * b;
    case LM_MAP_DIV:
        return a / b;
    case LM_MAP_MIN:
        return a < b ? a : b;
    case LM_MAP_MAX:
        return a > b ? a : b;
    case LM_MAP_LESS:
        return a < b ? F(1) : F(0);
    case LM_MAP_WHERE:
        return fabs(a) > 0 ? b : c;
    case LM_MAP_EXP:
        return exp(a);
    case LM_MAP_LOG:
        return log(a);
    case LM_MAP_SIN:
        return sin(a);
    case LM_MAP_COS:
        return cos(a);
    case LM_MAP_TANH:
        return tanh(a);
    case LM_MAP_ERF:
        return erf(a);
    default:
        return a;
    }
}

__device__ inline bool is_closed(const map_job *j)
{
    if (!j->gate)
        return false;
    return j->gate_type == LM_DTYPE_F64 ? isnan(*(const double *)j->gate)
                                        : isnan(*(const float *)j->gate);
}

/* By one thread: the single numbers, after their steps in double. */
__device__ inline void fill_singles(const map_job *j, float *single)
{
    const lm_map_program *p = &j->program;
    double s[LM_MAP_SINGLES];
#pragma unroll 1
    for (int i = 0; i < p->n_constants; i++)
        s[i] = p->constant[i];
#pragma unroll 1
    for (int i = 0; i < p->n_fetched; i++) {
        lm_map_fetch f = p->fetch[i];
        s[f.to] = f.origin == LM_MAP_NUMBER ? j->numbers[f.at] : single_of(&j->x[f.at]);
    }
#pragma unroll 1
    for (int i = 0; i < p->n_single; i++) {
        lm_map_step t = p->step[i];
        const int mask = LM_MAP_SINGLE - 1;
        s[t.to & mask] = step_value<double>(t.code, s[t.a & mask], s[t.b & mask], s[t.c & mask]);
    }
#pragma unroll 1
    for (int i = 0; i < p->n_constants + p->n_fetched; i++)
        single[i] = (float)s[i];
#pragma unroll 1
    for (int i = 0; i < p->n_single; i++)
        single[p->step[i].to & (LM_MAP_SINGLE - 1)] = (float)s[p->step[i].to & (LM_MAP_SINGLE - 1)];
}

__device__ inline float loaded(const map_operand *x, int64_t cols, int64_t i)
{
    if (x->spread == FLAT)
        return element(x, i);
    return element(x, x->spread == ONE ? 0 : x->spread == DOWN ? i % cols : i / cols);
}

/* The place of element k of this thread in register `which`. */
__device__ inline int place_of(int which, int k)
{
    return (which * EACH + k) * map_threads + (int)threadIdx.x;
}

__device__ inline float operand(const float *single, const float *tile, int which, int k)
{
    return which & LM_MAP_SINGLE ? single[which & (LM_MAP_SINGLE - 1)] : tile[place_of(which, k)];
}

__global__ void __launch_bounds__(map_threads) map_kernel(map_job j)
{
    __shared__ float single[LM_MAP_SINGLES];
    LM_DYNAMIC_SHARED(float, tile);
    const lm_map_program *p = &j.program;
    if (is_closed(&j))
        return;
    if (threadIdx.x == 0)
        fill_singles(&j, single);
    __syncthreads();
    const int64_t pitch = (int64_t)map_threads * EACH;
#pragma unroll 1
    for (int64_t at = blockIdx.x * pitch + threadIdx.x; at < j.count; at += gridDim.x * pitch) {
#pragma unroll 1
        for (int n = p->n_single; n < p->n_steps; n++) {
            lm_map_step s = p->step[n];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                int64_t i = at + (int64_t)k * map_threads;
                float v = 0;
                if (s.code != LM_MAP_LOAD)
                    v = step_value<float>(s.code, operand(single, tile, s.a, k),
                                          operand(single, tile, s.b, k),
                                          operand(single, tile, s.c, k));
                else if (i < j.count)
                    v = loaded(&j.x[s.a], j.cols, i);
                tile[place_of(s.to, k)] = v;
            }
        }
#pragma unroll 1
        for (int y = 0; y < LM_MAP_Y; y++) {
            if (!j.y[y])
                continue;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                int64_t i = at + (int64_t)k * map_threads;
                float v = operand(single, tile, p->from[y], k);
                if (i < j.count && j.low[y])
                    ((bf16 *)j.y[y])[i] = from_float<bf16>(v);
                else if (i < j.count)
                    ((float *)j.y[y])[i] = v;
            }
        }
    }
}

static void map(const lm_call *c)
{
    const lm_tensor *y = &c->out[0];
    map_job j = {};
    j.program = ((const lm_map_attr *)c->attr)->program;
    j.count = lm_tensor_count(y);
    j.cols = width_of(y);
    for (int i = 0; i < LM_MAP_X; i++) {
        const lm_tensor *x = &c->in[LM_MAP_FIRST_X + i];
        if (!in_ptr<void>(c, LM_MAP_FIRST_X + i))
            continue;
        int64_t have = lm_tensor_count(x);
        j.x[i].data = x->data;
        j.x[i].type = x->dtype;
        j.x[i].spread = have == j.count ? FLAT : have == 1 ? ONE : x->dim[0] == 1 ? DOWN : ACROSS;
    }
    for (int i = 0; i < LM_MAP_Y; i++) {
        j.y[i] = out_ptr<void>(c, i);
        j.low[i] = j.y[i] && c->out[i].dtype == LM_DTYPE_BF16;
    }
    j.gate = in_ptr<void>(c, 0);
    j.gate_type = c->in[0].dtype;
    j.numbers = in_ptr<const double>(c, 1);
    size_t bytes = (size_t)j.program.n_tiles * EACH * map_threads * sizeof(float);
    LM_LAUNCH(map_kernel, grid_for(j.count, map_threads * EACH, c->stream), map_threads, bytes,
              c->stream, j);
}

/* ---- reduce ---- */

static const int threads = 256;
enum { PIECE = 65536, PIECE_ROWS = 256 };

__device__ inline double start(lm_reduce_kind kind)
{
    return kind == LM_REDUCE_MAX ? -INFINITY : 0;
}

__device__ inline double join(lm_reduce_kind kind, double a, double b)
{
    if (kind == LM_REDUCE_SUM || kind == LM_REDUCE_SQUARES)
        return a + b;
    return isnan(a) || b <= a ? a : b;
}

__device__ inline double with(lm_reduce_kind kind, double so_far, float x)
{
    if (kind == LM_REDUCE_SUM)
        return so_far + x;
    if (kind == LM_REDUCE_SQUARES)
        return so_far + (double)x * x;
    return join(kind, so_far, !isfinite(x) ? NAN : kind == LM_REDUCE_ABS_MAX ? fabsf(x) : x);
}

/* Over the block, by halves; thread 0 has the result. */
__device__ inline double block_join(lm_reduce_kind kind, double x)
{
    __shared__ double part[threads];
    int t = (int)threadIdx.x;
    __syncthreads();
    part[t] = x;
    __syncthreads();
#pragma unroll 1
    for (int half = threads / 2; half > 0; half /= 2) {
        if (t < half)
            part[t] = join(kind, part[t], part[t + half]);
        __syncthreads();
    }
    return part[0];
}

/* Pieces of `terms` numbers that lie end to end, a block of threads for each: to y, or in double to part. */
template <class T>
__global__ void __launch_bounds__(threads)
    reduce_pieces(lm_reduce_kind kind, const T *x, int64_t count, int64_t terms, double divisor,
                  double *part, float *y)
{
    int64_t pieces = (count + terms - 1) / terms;
#pragma unroll 1
    for (int64_t p = blockIdx.x; p < pieces; p += gridDim.x) {
        int64_t end = (p + 1) * terms < count ? (p + 1) * terms : count;
        double r = start(kind);
#pragma unroll 4
        for (int64_t i = p * terms + threadIdx.x; i < end; i += threads)
            r = with(kind, r, to_float(x[i]));
        r = block_join(kind, r);
        if (threadIdx.x == 0 && part)
            part[p] = r;
        else if (threadIdx.x == 0)
            y[p] = (float)(r / divisor);
    }
}

/* part [pieces,cols]: columns of PIECE_ROWS rows each. */
template <class T>
__global__ void __launch_bounds__(threads)
    reduce_columns(lm_reduce_kind kind, const T *x, int64_t rows, int64_t cols, double *part)
{
    int64_t pieces = (rows + PIECE_ROWS - 1) / PIECE_ROWS;
#pragma unroll 1
    for (int64_t k = global_thread(); k < pieces * cols; k += global_threads()) {
        int64_t first = k / cols * PIECE_ROWS, col = k % cols;
        int64_t end = first + PIECE_ROWS < rows ? first + PIECE_ROWS : rows;
        double r = start(kind);
#pragma unroll 4
        for (int64_t i = first; i < end; i++)
            r = with(kind, r, to_float(x[i * cols + col]));
        part[k] = r;
    }
}

/* y[i] = part[0][i], part[1][i], ... in order. */
__global__ void __launch_bounds__(threads)
    reduce_parts(lm_reduce_kind kind, const double *part, int64_t pieces, int64_t n, double divisor,
                 float *y)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < n; i += global_threads()) {
        double r = part[i];
#pragma unroll 4
        for (int64_t p = 1; p < pieces; p++)
            r = join(kind, r, part[p * n + i]);
        y[i] = (float)(r / divisor);
    }
}

static int64_t pieces_of(const lm_reduce_attr *a, lm_reduce_sizes n)
{
    return a->over == LM_OVER_COLUMN ? (n.rows + PIECE_ROWS - 1) / PIECE_ROWS
                                     : (n.terms + PIECE - 1) / PIECE;
}

template <class T> static void reduce_of(const lm_call *c)
{
    const lm_reduce_attr *a = (const lm_reduce_attr *)c->attr;
    lm_reduce_sizes n = lm_reduce_sizes_of(a, &c->in[0]);
    const T *x = in_ptr<const T>(c, 0);
    double *part = (double *)c->work, divisor = a->mean ? (double)n.terms : 1;
    float *y = out_ptr<float>(c, 0);
    int64_t pieces = pieces_of(a, n), count = n.rows * n.cols;
    if (a->over == LM_OVER_ROW || a->over == LM_OVER_BLOCK) {
        LM_LAUNCH((reduce_pieces<T>), grid_for(n.parts, 1, c->stream), threads, 0, c->stream,
                  a->kind, x, count, n.terms, divisor, (double *)nullptr, y);
        return;
    }
    if (a->over == LM_OVER_ALL)
        LM_LAUNCH((reduce_pieces<T>), grid_for(pieces, 1, c->stream), threads, 0, c->stream,
                  a->kind, x, count, (int64_t)PIECE, 1.0, part, (float *)nullptr);
    else
        LM_LAUNCH((reduce_columns<T>), grid_for(pieces * n.cols, threads, c->stream), threads, 0,
                  c->stream, a->kind, x, n.rows, n.cols, part);
    LM_LAUNCH(reduce_parts, grid_for(n.parts, threads, c->stream), threads, 0, c->stream, a->kind,
              (const double *)part, pieces, n.parts, divisor, y);
}

static void reduce(const lm_call *c)
{
    if (c->in[0].dtype == LM_DTYPE_BF16)
        reduce_of<bf16>(c);
    else
        reduce_of<float>(c);
}

static size_t reduce_work(const lm_call *c, int)
{
    const lm_reduce_attr *a = (const lm_reduce_attr *)c->attr;
    lm_reduce_sizes n = lm_reduce_sizes_of(a, &c->in[0]);
    if (a->over == LM_OVER_ROW || a->over == LM_OVER_BLOCK)
        return 0;
    return (size_t)(pieces_of(a, n) * n.parts) * sizeof(double);
}

extern "C" const lm_kernel lm_map_cuda_kernels[] = {
    { "map", LM_DTYPE_F32, LM_CUDA_PLAIN, map, nullptr },
    { "map", LM_DTYPE_BF16, LM_CUDA_PLAIN, map, nullptr },
    { "reduce", LM_DTYPE_F32, LM_CUDA_PLAIN, reduce, reduce_work },
    LM_CUDA_END
};
