/* SPDX-License-Identifier: Apache-2.0 */
/* lora.cu -- the low-rank paths beside a linear layer: a product for each block, by gemm.cuh. */
#include "kernels/cuda/gemm.cuh"

extern "C" {
#include "kernels/lora.h"
}

static const lm_lora_attr *attr_of(const lm_call *c)
{
    return (const lm_lora_attr *)c->attr;
}

/* Element i of an operand; while scratch is planned there is no data. */
static void *cell(const lm_tensor *t, int64_t i)
{
    return t->data ? (char *)t->data + (size_t)i * lm_dtype_size(t->dtype) : nullptr;
}

/* ---- h times the scales of its blocks ---- */

struct scales {
    float of[LM_LORA_BLOCKS];
};

/* to may be from. */
template <class T>
__global__ void scale_kernel(int64_t count, int64_t wide, int64_t rank, scales s, const T *from,
                             T *to)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads())
        to[i] = from_float<T>(s.of[i % wide / rank] * to_float(from[i]));
}

template <class T> static void scale(const lm_call *c, const lm_tensor *h, void *to)
{
    const lm_lora_attr *a = attr_of(c);
    int64_t count = lm_tensor_count(h), wide = h->dim[1];
    scales s = {};
    for (int64_t i = 0; i < a->blocks; i++)
        s.of[i] = (float)a->block[i].scale;
    LM_LAUNCH((scale_kernel<T>), grid_for(count, 256, c->stream), 256, 0, c->stream, count, wide,
              wide / a->blocks, s, (const T *)h->data, (T *)to);
}

/* Bytes in front of the products' scratch for a scaled copy of h. */
static size_t copy_bytes(const lm_call *c, const lm_tensor *h)
{
    size_t bytes = (size_t)lm_tensor_count(h) * lm_dtype_size(h->dtype);
    return lm_lora_scales(attr_of(c)) ? (bytes + 255) / 256 * 256 : 0;
}

static void *behind(const lm_call *c, size_t bytes)
{
    return c->work ? (char *)c->work + bytes : nullptr;
}

/* ---- products ---- */

static gemm_call down(const lm_call *c)
{
    const lm_tensor *x = &c->in[0], *a = &c->in[1];
    gemm_call g = {};

    g.m = x->dim[0], g.n = a->dim[0], g.k = a->dim[1];
    g.ab = g.cd = x->dtype;
    g.tb = true;
    g.a = x->data, g.b = a->data, g.c = c->out[0].data;
    g.lda = g.ldb = g.k, g.ldc = g.n;
    g.work = c->work;
    return g;
}

static gemm_call down_dx(const lm_call *c)
{
    const lm_tensor *dh = &c->in[0], *a = &c->in[1];
    gemm_call g = {};

    g.m = dh->dim[0], g.n = a->dim[1], g.k = a->dim[0];
    g.ab = g.cd = dh->dtype;
    g.accumulate = c->n_in > 2 && c->in[2].ndim > 0;
    g.a = dh->data, g.b = a->data, g.c = c->out[0].data;
    g.lda = g.k, g.ldb = g.ldc = g.n;
    g.work = c->work;
    return g;
}

/* Block i, whose rows of b begin at `row`. */
static gemm_call up(const lm_call *c, int64_t i, int64_t row)
{
    const lm_tensor *b = &c->in[2], *z = &c->out[0];
    size_t copy = copy_bytes(c, &c->in[1]);
    lm_tensor h = c->in[1];
    gemm_call g = {};

    if (copy)
        h.data = c->work;
    g.m = z->dim[0], g.n = attr_of(c)->block[i].rows, g.k = b->dim[1];
    g.ab = g.cd = z->dtype;
    g.tb = g.accumulate = true;
    g.a = cell(&h, i * g.k), g.b = cell(b, row * g.k), g.c = cell(z, attr_of(c)->block[i].at);
    g.lda = h.dim[1], g.ldb = g.k, g.ldc = z->dim[1];
    g.work = behind(c, copy);
    return g;
}

static gemm_call up_dx(const lm_call *c, int64_t i, int64_t row)
{
    const lm_tensor *dz = &c->in[0], *b = &c->in[1], *dh = &c->out[0];
    gemm_call g = {};

    g.m = dz->dim[0], g.n = b->dim[1], g.k = attr_of(c)->block[i].rows;
    g.ab = g.cd = dz->dtype;
    g.a = cell(dz, attr_of(c)->block[i].at), g.b = cell(b, row * g.n), g.c = cell(dh, i * g.n);
    g.lda = dz->dim[1], g.ldb = g.n, g.ldc = dh->dim[1];
    g.work = c->work;
    return g;
}

static gemm_call up_dw(const lm_call *c, int64_t i, int64_t row)
{
    const lm_tensor *dz = &c->in[0], *db = &c->out[0];
    size_t copy = copy_bytes(c, &c->in[1]);
    lm_tensor h = c->in[1];
    gemm_call g = {};

    if (copy)
        h.data = c->work;
    g.m = attr_of(c)->block[i].rows, g.n = db->dim[1], g.k = dz->dim[0];
    g.ab = dz->dtype, g.cd = LM_DTYPE_F32;
    g.ta = true;
    /* Without a step scratch is planned, whose size does not depend on it. */
    g.accumulate = !c->step || !overwrites(c, attr_of(c)->acc);
    g.a = cell(dz, attr_of(c)->block[i].at), g.b = cell(&h, i * g.n), g.c = cell(db, row * g.n);
    g.lda = dz->dim[1], g.ldb = h.dim[1], g.ldc = g.n;
    g.work = behind(c, copy);
    return g;
}

typedef gemm_call (*block_product)(const lm_call *c, int64_t i, int64_t row);

static void run_blocks(const lm_call *c, block_product product)
{
    const lm_lora_attr *a = attr_of(c);
    int64_t row = 0;

    for (int64_t i = 0; i < a->blocks; row += a->block[i++].rows) {
        gemm_call g = product(c, i, row);
        gemm_run(&g, c->stream);
    }
}

static size_t need_of_blocks(const lm_call *c, block_product product)
{
    size_t most = 0;

    for (int64_t i = 0; i < attr_of(c)->blocks; i++) {
        gemm_call g = product(c, i, 0);
        size_t need = gemm_work(&g, c->stream);
        most = need > most ? need : most;
    }
    return most;
}

static void copy_over(const lm_call *c, const lm_tensor *from, const lm_tensor *to)
{
    if (from->data != to->data)
        cudaMemcpyAsync(to->data, from->data,
                        (size_t)lm_tensor_count(to) * lm_dtype_size(to->dtype),
                        cudaMemcpyDeviceToDevice, c->stream->handle);
}

/* ---- the family ---- */

template <class T> static void lora_down(const lm_call *c)
{
    gemm_call g = down(c);
    gemm_run(&g, c->stream);
}
static size_t lora_down_work(const lm_call *c, int)
{
    gemm_call g = down(c);
    return gemm_work(&g, c->stream);
}

template <class T> static void lora_down_dx(const lm_call *c)
{
    gemm_call g = down_dx(c);
    if (g.accumulate)
        copy_over(c, &c->in[2], &c->out[0]);
    gemm_run(&g, c->stream);
}
static size_t lora_down_dx_work(const lm_call *c, int)
{
    gemm_call g = down_dx(c);
    return gemm_work(&g, c->stream);
}

template <class T> static void lora_up(const lm_call *c)
{
    copy_over(c, &c->in[0], &c->out[0]);
    if (lm_lora_scales(attr_of(c)))
        scale<T>(c, &c->in[1], c->work);
    run_blocks(c, up);
}
static size_t lora_up_work(const lm_call *c, int)
{
    return copy_bytes(c, &c->in[1]) + need_of_blocks(c, up);
}

template <class T> static void lora_up_dx(const lm_call *c)
{
    run_blocks(c, up_dx);
    if (lm_lora_scales(attr_of(c)))
        scale<T>(c, &c->out[0], c->out[0].data);
}
static size_t lora_up_dx_work(const lm_call *c, int)
{
    return need_of_blocks(c, up_dx);
}

template <class T> static void lora_up_dw(const lm_call *c)
{
    if (lm_lora_scales(attr_of(c)))
        scale<T>(c, &c->in[1], c->work);
    run_blocks(c, up_dw);
}
static size_t lora_up_dw_work(const lm_call *c, int)
{
    return copy_bytes(c, &c->in[1]) + need_of_blocks(c, up_dw);
}

extern "C" const lm_kernel lm_lora_cuda_kernels[] = {
    LM_CUDA_ROWS("lora_down", lora_down, lora_down_work),
    LM_CUDA_ROWS("lora_down_dx", lora_down_dx, lora_down_dx_work),
    LM_CUDA_ROWS("lora_up", lora_up, lora_up_work),
    LM_CUDA_ROWS("lora_up_dx", lora_up_dx, lora_up_dx_work),
    LM_CUDA_ROWS("lora_up_dw", lora_up_dw, lora_up_dw_work),
    LM_CUDA_END,
};
