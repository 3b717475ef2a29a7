/* SPDX-License-Identifier: Apache-2.0 */
/* code_few_kernel.cuh -- the kernels of code_few.cuh, one for each format and number of rows; code_few*.cu have those of one
 * type each.
 *
 * A warp makes one column of y: its lanes read pairs of eights of w's row, 32 pairs apart, two of them before the first is
 * used, and multiply their numbers, rounded to act, with some rows of x.  A lane sums its pairs in order, and a butterfly
 * adds the lanes (rows.cuh): the bits of a sum depend on k and the format alone. */
#ifndef LM_KERNELS_CUDA_CODE_FEW_KERNEL_CUH
#define LM_KERNELS_CUDA_CODE_FEW_KERNEL_CUH

#include "kernels/cuda/code_few.cuh"

#include "kernels/cuda/rows.cuh"

extern "C" {
#include "kernels/linear.h"
}

static const int few_threads = 256, few_warps = few_threads / 32;

template <class T> struct few_args {
    code_stretch w;
    const T *x;
    void *y;
    int64_t m, n, k, ldx, ldy;
    int64_t from, to; /* columns of y whose rows of w can be in the stretch */
    bool wide_y, packed;
    const float *bias;
    const int32_t *offsets;
    int64_t groups;
};

/* One pair of eights of a row. */
struct code_pair {
    code_words w[2];
    int64_t eight; /* the first */
};
template <int KIND> __device__ inline code_pair load_pair(const uint8_t *row, int64_t p)
{
    typedef coder<KIND> C;
    const int pairs = C::block / 16;
    const int first = C::first((int)(p % pairs));
    const uint8_t *block = row + p / pairs * C::bytes;
    code_pair x;
    x.w[0] = C::load(block, first);
    x.w[1] = C::load(block, first + C::apart);
    x.eight = p / pairs * (C::block / 8) + first;
    return x;
}

template <int KIND, class T, int M>
__device__ inline void add_pair(float *sum, const few_args<T> &a, const T *x, int64_t m,
                                const code_pair &p)
{
    typedef coder<KIND> C;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t eight = p.eight + h * C::apart;
        float v[8];
        C::numbers(p.w[h], (int)(eight % (C::block / 8)), v);
#pragma unroll
        for (int e = 0; e < 8; e++)
            v[e] = rounded<T>(v[e]);
#pragma unroll
        for (int i = 0; i < M; i++) {
            T z[8];
            get_eight(x + (i < m ? i : m - 1) * a.ldx + eight * 8, a.packed, z);
#pragma unroll
            for (int e = 0; e < 8; e++)
                sum[i] = fmaf(to_float(z[e]), v[e], sum[i]);
        }
    }
}

/* A row of w with m rows of x, at most M, to column `col` of y. */
template <int KIND, class T, int M>
__device__ inline void few_column(const few_args<T> &a, const uint8_t *w, const T *x, void *y,
                                  int64_t m, int64_t col)
{
    const int lane = (int)threadIdx.x % 32, each = 32 / M; /* lanes that get the same sum */
    const int64_t pairs = a.k / 16;
    float sum[M] = {};

#pragma unroll 1
    for (int64_t p = lane; p < pairs; p += 64) {
        const bool two = p + 32 < pairs;
        code_pair first = load_pair<KIND>(w, p), second = first;
        if (two)
            second = load_pair<KIND>(w, p + 32);
        add_pair<KIND, T, M>(sum, a, x, m, first);
        if (two)
            add_pair<KIND, T, M>(sum, a, x, m, second);
    }
    float mine = shared_sums<M>(sum);
    const int64_t row = lane / each, at = row * a.ldy + col;
    if (lane % each || row >= m)
        return;
    mine += a.bias ? a.bias[col] : 0.0f;
    if (sizeof(T) == 4 || a.wide_y)
        ((float *)y)[at] = mine;
    else
        ((T *)y)[at] = from_float<T>(mine);
}

/* The last group that begins at `row` or before it; `groups` if the row is in none.  All lanes of a warp call it. */
__device__ inline int64_t group_of_row(const int32_t *offsets, int64_t groups, int64_t row)
{
    int64_t count = 0;
    for (int64_t base = 0; base <= groups; base += 32) {
        const int64_t g = base + threadIdx.x % 32;
        count += __popc(__ballot_sync(0xffffffffu, g <= groups && offsets[g] <= row));
    }
    return count - 1;
}

/* blockIdx.y: a row of x, which begins a strip of at most M rows of its group, or is in that of a row before it. */
template <int KIND, class T, int M>
__global__ void __launch_bounds__(few_threads) code_few_kernel(few_args<T> a)
{
    const int64_t size = (int64_t)(sizeof(T) == 4 || a.wide_y ? 4 : 2);
    const int64_t row = blockIdx.y, warps = (int64_t)gridDim.x * few_warps;
    int64_t g = 0, m = a.m, first = 0; /* first: row of w */

    if (a.offsets) {
        g = group_of_row(a.offsets, a.groups, row);
        const int64_t begin = a.offsets[g], end = g < a.groups ? a.offsets[g + 1] : row + 1;
        if (g < a.groups && (row - begin) % M)
            return;
        m = end - row < M ? end - row : M;
        first = g < a.groups ? g * a.n : 0;
    }
    const T *x = a.x + row * a.ldx;
    char *y = (char *)a.y + row * a.ldy * size;
    for (int64_t col = a.from + global_thread() / 32; col < a.to; col += warps) {
        const int64_t at = first + col - a.w.row;
        if (at < 0 || at >= a.w.rows)
            continue;
        if (a.offsets && g == a.groups) {
            for (int64_t b = threadIdx.x % 32; b < size; b += 32)
                y[col * size + b] = 0;
        } else if (M == 4 && m == 1) { /* most experts have one row of a short batch */
            few_column<KIND, T, 1>(a, code_row(a.w, at), x, y, m, col);
        } else {
            few_column<KIND, T, M>(a, code_row(a.w, at), x, y, m, col);
        }
    }
}

/* ---- launches ---- */

template <int KIND, class T>
static void launch(const code_few *f, few_args<T> a, const lm_stream *s)
{
    const int64_t cols = a.to - a.from;
    dim3 grid(grid_for(cols, few_warps, s), f->offsets ? (unsigned)f->m : 1);

    if (f->m == 1)
        LM_LAUNCH((code_few_kernel<KIND, T, 1>), grid, few_threads, 0, s, a);
    else if (f->m <= 4 || f->offsets)
        LM_LAUNCH((code_few_kernel<KIND, T, 4>), grid, few_threads, 0, s, a);
    else
        LM_LAUNCH((code_few_kernel<KIND, T, 8>), grid, few_threads, 0, s, a);
}

template <class T> void code_few_as(const code_few *f, const lm_stream *s)
{
    few_args<T> a = {};
    a.x = (const T *)f->x, a.y = f->y;
    a.m = f->m, a.n = f->n, a.k = f->k;
    a.ldx = f->ldx, a.ldy = f->ldy;
    a.wide_y = f->wide_y;
    a.packed = packs<T>(wide<T>::n, f->ldx, f->x);
    a.bias = f->bias;
    a.offsets = f->offsets, a.groups = f->groups;
    for (int i = 0; code_next(f->w, f->k, &i, &a.w);) {
        const int64_t end = a.w.row + a.w.rows;
        a.from = f->offsets ? 0 : a.w.row;
        a.to = f->offsets || end > f->n ? f->n : end;
        if (a.from >= a.to)
            continue;
        switch (a.w.kind) {
#define LM_CASE(k)             \
    case k:                    \
        launch<k, T>(f, a, s); \
        break;
            LM_EACH_CODE(LM_CASE)
#undef LM_CASE
        default:
            break;
        }
    }
}

#endif
