/* SPDX-License-Identifier: Apache-2.0 */
/* virtual.cu -- rows of virtual tokens. */
#include "kernels/cuda/grid2d.cuh"

extern "C" {
#include "kernels/virtual.h"
}

static void copy_over(const lm_call *c)
{
    const lm_tensor *from = &c->in[0], *to = &c->out[0];
    if (from->data != to->data)
        cudaMemcpyAsync(to->data, from->data,
                        (size_t)lm_tensor_count(to) * lm_dtype_size(to->dtype),
                        cudaMemcpyDeviceToDevice, c->stream->handle);
}

/* table null: zeros. */
template <class T>
__global__ void put_kernel(int64_t rows, int64_t wide, int64_t first, int64_t at, int64_t d,
                           bool add, const int32_t *tok, const float *table, T *y)
{
#pragma unroll 1
    for (int64_t r = grid2d_row(); r < rows; r += grid2d_rows()) {
        int64_t row = tok[r] - first;
        if (row < 0)
            continue;
#pragma unroll 1
        for (int64_t j = grid2d_col(); j < d; j += grid2d_cols()) {
            T *to = y + r * wide + at + j;
            float v = table ? table[row * d + j] : 0.0f;
            *to = from_float<T>(v + (add ? to_float(*to) : 0.0f));
        }
    }
}

template <class T> static void put(const lm_call *c, int64_t d, bool add, const float *table)
{
    const lm_virtual_attr *a = (const lm_virtual_attr *)c->attr;
    int64_t rows = c->in[0].dim[0], wide = c->in[0].dim[1];
    grid2d over = grid2d_for(rows, d, c->stream);
    copy_over(c);
    LM_LAUNCH((put_kernel<T>), over.grid, over.block, 0, c->stream, rows, wide, a->first, a->at, d,
              add, in_ptr<const int32_t>(c, 1), table, out_ptr<T>(c, 0));
}

template <class T> static void virtual_rows(const lm_call *c)
{
    const lm_virtual_attr *a = (const lm_virtual_attr *)c->attr;
    put<T>(c, c->in[2].dim[1], a->add, in_ptr<const float>(c, 2));
}

template <class T> static void virtual_rows_dx(const lm_call *c)
{
    const lm_virtual_attr *a = (const lm_virtual_attr *)c->attr;
    if (a->add)
        copy_over(c);
    else
        put<T>(c, a->width, false, nullptr);
}

/* A thread for each number of the table, which goes over the rows of dy in order. */
template <class T>
__global__ void sum_kernel(int64_t rows, int64_t wide, int64_t first, int64_t at, int64_t table,
                           int64_t d, bool replace, const int32_t *tok, const T *dy, float *dw)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < table * d; i += global_threads()) {
        int64_t id = first + i / d, from = at + i % d;
        float s = replace ? 0.0f : dw[i];
#pragma unroll 1
        for (int64_t r = 0; r < rows; r++)
            if (tok[r] == id)
                s += to_float(dy[r * wide + from]);
        dw[i] = s;
    }
}

template <class T> static void virtual_rows_dw(const lm_call *c)
{
    const lm_virtual_attr *a = (const lm_virtual_attr *)c->attr;
    const lm_tensor *dy = &c->in[0], *dw = &c->out[0];
    LM_LAUNCH((sum_kernel<T>), grid_for(lm_tensor_count(dw), 256, c->stream), 256, 0, c->stream,
              dy->dim[0], dy->dim[1], a->first, a->at, dw->dim[0], dw->dim[1],
              a->fresh || overwrites(c, a->acc), in_ptr<const int32_t>(c, 1), in_ptr<const T>(c, 0),
              out_ptr<float>(c, 0));
}

extern "C" const lm_kernel lm_virtual_cuda_kernels[] = {
    LM_CUDA_ROWS("virtual_rows", virtual_rows, nullptr),
    LM_CUDA_ROWS("virtual_rows_dx", virtual_rows_dx, nullptr),
    LM_CUDA_ROWS("virtual_rows_dw", virtual_rows_dw, nullptr),
    LM_CUDA_END,
};
