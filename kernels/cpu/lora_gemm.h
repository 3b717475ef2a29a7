/* SPDX-License-Identifier: Apache-2.0 */
/* lora_gemm.h -- the low-rank paths as matrix products, one for each block; included by the file of each level, which
 * only names the level and its table. */
#ifndef LM_KERNELS_CPU_LORA_GEMM_H
#define LM_KERNELS_CPU_LORA_GEMM_H

#include <string.h>

#include "kernels/linear.h"
#include "kernels/lora.h"

static inline char *lora_cell(const lm_tensor *t, int64_t i)
{
    return t->data ? (char *)t->data + (size_t)i * lm_dtype_size(t->dtype) : NULL;
}

/* ---- h times the scales of its blocks ---- */

typedef struct {
    const lm_lora_attr *attr;
    lm_dtype type;
    int64_t wide, rank;
    const char *from;
    char *to; /* may be from */
} lora_scaling;

static inline void lora_scale_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lora_scaling *s = ctx;
    (void)worker;
    for (int64_t n = begin; n < end; n++)
        for (int64_t b = 0; b < s->attr->blocks; b++) {
            float scale = (float)s->attr->block[b].scale;
            int64_t at = n * s->wide + b * s->rank;
            if (s->type == LM_DTYPE_F32)
                for (int64_t i = at; i < at + s->rank; i++)
                    ((float *)s->to)[i] = scale * ((const float *)s->from)[i];
            else
                for (int64_t i = at; i < at + s->rank; i++)
                    ((uint16_t *)s->to)[i] =
                        lm_f32_to_bf16(scale * lm_bf16_to_f32(((const uint16_t *)s->from)[i]));
        }
}

static inline void lora_scale(const lm_call *c, const lm_tensor *h, void *to)
{
    const lm_lora_attr *attr = c->attr;
    lora_scaling s = { attr, h->dtype, h->dim[1], h->dim[1] / attr->blocks, h->data, to };
    lm_par_for(c->par, h->dim[0], 64, lora_scale_rows, &s);
}

/* Bytes in front of the products' scratch for a scaled copy of h. */
static inline size_t lora_copy_bytes(const lm_call *c, const lm_tensor *h)
{
    size_t bytes = (size_t)lm_tensor_count(h) * lm_dtype_size(h->dtype);
    return lm_lora_scales(c->attr) ? (bytes + 63) / 64 * 64 : 0;
}

/* ---- products ---- */

static inline lm_gemm lora_down_gemm(const lm_call *c)
{
    const lm_tensor *x = &c->in[0], *a = &c->in[1], *h = &c->out[0];
    return (lm_gemm){ .m = x->dim[0],
                      .n = a->dim[0],
                      .k = a->dim[1],
                      .ab = x->dtype,
                      .cd = h->dtype,
                      .tb = true,
                      .a = x->data,
                      .b = a->data,
                      .c = h->data,
                      .lda = a->dim[1],
                      .ldb = a->dim[1],
                      .ldc = a->dim[0],
                      .work = c->work };
}

static inline lm_gemm lora_down_dx_gemm(const lm_call *c)
{
    const lm_tensor *dh = &c->in[0], *a = &c->in[1], *dx = &c->out[0];
    return (lm_gemm){ .m = dh->dim[0],
                      .n = a->dim[1],
                      .k = a->dim[0],
                      .ab = dh->dtype,
                      .cd = dx->dtype,
                      .a = dh->data,
                      .b = a->data,
                      .c = dx->data,
                      .accumulate = c->n_in > 2 && c->in[2].ndim > 0,
                      .lda = a->dim[0],
                      .ldb = a->dim[1],
                      .ldc = a->dim[1],
                      .work = c->work };
}

/* Block i, whose rows of b begin at `row`; h: the scaled copy of h, or h. */
static inline lm_gemm lora_up_gemm(const lm_call *c, int64_t i, int64_t row)
{
    const lm_lora_attr *attr = c->attr;
    const lm_tensor *h = &c->in[1], *b = &c->in[2], *z = &c->out[0];
    size_t copy = lora_copy_bytes(c, h);
    lm_tensor from = *h;
    if (copy)
        from.data = c->work;
    return (lm_gemm){ .m = z->dim[0],
                      .n = attr->block[i].rows,
                      .k = b->dim[1],
                      .ab = z->dtype,
                      .cd = z->dtype,
                      .tb = true,
                      .a = lora_cell(&from, i * b->dim[1]),
                      .b = lora_cell(b, row * b->dim[1]),
                      .c = lora_cell(z, attr->block[i].at),
                      .accumulate = true,
                      .lda = h->dim[1],
                      .ldb = b->dim[1],
                      .ldc = z->dim[1],
                      .work = c->work ? (char *)c->work + copy : NULL };
}

static inline lm_gemm lora_up_dx_gemm(const lm_call *c, int64_t i, int64_t row)
{
    const lm_lora_attr *attr = c->attr;
    const lm_tensor *dz = &c->in[0], *b = &c->in[1], *dh = &c->out[0];
    return (lm_gemm){ .m = dz->dim[0],
                      .n = b->dim[1],
                      .k = attr->block[i].rows,
                      .ab = dz->dtype,
                      .cd = dh->dtype,
                      .a = lora_cell(dz, attr->block[i].at),
                      .b = lora_cell(b, row * b->dim[1]),
                      .c = lora_cell(dh, i * b->dim[1]),
                      .lda = dz->dim[1],
                      .ldb = b->dim[1],
                      .ldc = dh->dim[1],
                      .work = c->work };
}

static inline lm_gemm lora_up_dw_gemm(const lm_call *c, int64_t i, int64_t row)
{
    const lm_lora_attr *attr = c->attr;
    const lm_tensor *dz = &c->in[0], *h = &c->in[1], *db = &c->out[0];
    size_t copy = lora_copy_bytes(c, h);
    int64_t rank = db->dim[1];
    lm_tensor from = *h;
    if (copy)
        from.data = c->work;
    return (lm_gemm){ .m = attr->block[i].rows,
                      .n = rank,
                      .k = dz->dim[0],
                      .ab = dz->dtype,
                      .cd = db->dtype,
                      .ta = true,
                      .accumulate = lm_acc_adds(attr->acc, c->step),
                      .a = lora_cell(dz, attr->block[i].at),
                      .b = lora_cell(&from, i * rank),
                      .c = lora_cell(db, row * rank),
                      .lda = dz->dim[1],
                      .ldb = h->dim[1],
                      .ldc = rank,
                      .work = c->work ? (char *)c->work + copy : NULL };
}

typedef lm_gemm (*lora_block_gemm)(const lm_call *c, int64_t i, int64_t row);

static inline void lora_run(const lm_call *c, lora_block_gemm product, lm_cpu_level level)
{
    const lm_lora_attr *attr = c->attr;
    int64_t row = 0;
    for (int64_t i = 0; i < attr->blocks; row += attr->block[i++].rows) {
        lm_gemm g = product(c, i, row);
        lm_gemm_run(&g, level, c->par);
    }
}

static inline size_t lora_need(const lm_call *c, lora_block_gemm product, lm_cpu_level level,
                               int threads)
{
    const lm_lora_attr *attr = c->attr;
    size_t most = 0;
    for (int64_t i = 0; i < attr->blocks; i++) {
        lm_gemm g = product(c, i, 0);
        size_t need = lm_gemm_work(&g, level, threads);
        most = need > most ? need : most;
    }
    return most;
}

static inline void lora_copy(const lm_tensor *from, lm_tensor *to)
{
    if (from->data != to->data)
        memcpy(to->data, from->data, (size_t)lm_tensor_count(to) * lm_dtype_size(to->dtype));
}

#define LM_LORA_KERNELS(LEVEL)                                                                \
    static void lora_down(const lm_call *c)                                                   \
    {                                                                                         \
        lm_gemm g = lora_down_gemm(c);                                                        \
        lm_gemm_run(&g, LEVEL, c->par);                                                       \
    }                                                                                         \
    static void lora_down_dx(const lm_call *c)                                                \
    {                                                                                         \
        lm_gemm g = lora_down_dx_gemm(c);                                                     \
        if (g.accumulate)                                                                     \
            lora_copy(&c->in[2], &c->out[0]);                                                 \
        lm_gemm_run(&g, LEVEL, c->par);                                                       \
    }                                                                                         \
    static void lora_up(const lm_call *c)                                                     \
    {                                                                                         \
        lora_copy(&c->in[0], &c->out[0]);                                                     \
        if (lm_lora_scales(c->attr))                                                          \
            lora_scale(c, &c->in[1], c->work);                                                \
        lora_run(c, lora_up_gemm, LEVEL);                                                     \
    }                                                                                         \
    static void lora_up_dx(const lm_call *c)                                                  \
    {                                                                                         \
        lora_run(c, lora_up_dx_gemm, LEVEL);                                                  \
        if (lm_lora_scales(c->attr))                                                          \
            lora_scale(c, &c->out[0], c->out[0].data);                                        \
    }                                                                                         \
    static void lora_up_dw(const lm_call *c)                                                  \
    {                                                                                         \
        if (lm_lora_scales(c->attr))                                                          \
            lora_scale(c, &c->in[1], c->work);                                                \
        lora_run(c, lora_up_dw_gemm, LEVEL);                                                  \
    }                                                                                         \
    static size_t lora_down_work(const lm_call *c, int threads)                               \
    {                                                                                         \
        lm_gemm g = lora_down_gemm(c);                                                        \
        return lm_gemm_work(&g, LEVEL, threads);                                              \
    }                                                                                         \
    static size_t lora_down_dx_work(const lm_call *c, int threads)                            \
    {                                                                                         \
        lm_gemm g = lora_down_dx_gemm(c);                                                     \
        return lm_gemm_work(&g, LEVEL, threads);                                              \
    }                                                                                         \
    static size_t lora_up_work(const lm_call *c, int threads)                                 \
    {                                                                                         \
        return lora_copy_bytes(c, &c->in[1]) + lora_need(c, lora_up_gemm, LEVEL, threads);    \
    }                                                                                         \
    static size_t lora_up_dx_work(const lm_call *c, int threads)                              \
    {                                                                                         \
        return lora_need(c, lora_up_dx_gemm, LEVEL, threads);                                 \
    }                                                                                         \
    static size_t lora_up_dw_work(const lm_call *c, int threads)                              \
    {                                                                                         \
        return lora_copy_bytes(c, &c->in[1]) + lora_need(c, lora_up_dw_gemm, LEVEL, threads); \
    }

#define LM_LORA_ROWS(ACT, LEVEL)                                         \
    { "lora_down", ACT, LEVEL, lora_down, lora_down_work },              \
        { "lora_down_dx", ACT, LEVEL, lora_down_dx, lora_down_dx_work }, \
        { "lora_up", ACT, LEVEL, lora_up, lora_up_work },                \
        { "lora_up_dx", ACT, LEVEL, lora_up_dx, lora_up_dx_work },       \
    {                                                                    \
        "lora_up_dw", ACT, LEVEL, lora_up_dw, lora_up_dw_work            \
    }

#endif
