/* SPDX-License-Identifier: Apache-2.0 */
/* lora_ref.c -- the definition of the low-rank paths (kernels/lora.h). */
#include "kernels/lora.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void lora_down(const lm_call *c)
{
    const lm_tensor *x = &c->in[0], *a = &c->in[1];
    int64_t h = a->dim[0], k = a->dim[1];
    for (int64_t n = 0; n < x->dim[0]; n++)
        for (int64_t i = 0; i < h; i++) {
            double s = 0;
            for (int64_t q = 0; q < k; q++)
                s += get(x, n * k + q) * get(a, i * k + q);
            set(&c->out[0], n * h + i, s);
        }
}

static void lora_down_dx(const lm_call *c)
{
    const lm_tensor *dh = &c->in[0], *a = &c->in[1], *dres = opt_in(c, 2);
    int64_t h = a->dim[0], k = a->dim[1];
    for (int64_t n = 0; n < dh->dim[0]; n++)
        for (int64_t q = 0; q < k; q++) {
            double s = dres ? get(dres, n * k + q) : 0;
            for (int64_t i = 0; i < h; i++)
                s += get(dh, n * h + i) * get(a, i * k + q);
            set(&c->out[0], n * k + q, s);
        }
}

static void lora_up(const lm_call *c)
{
    const lm_lora_attr *attr = c->attr;
    const lm_tensor *y = &c->in[0], *h = &c->in[1], *b = &c->in[2];
    int64_t m = y->dim[1], wide = h->dim[1], rank = b->dim[1], row = 0;
    for (int64_t i = 0; c->out[0].data != y->data && i < lm_tensor_count(y); i++)
        set(&c->out[0], i, get(y, i));
    for (int64_t i = 0; i < attr->blocks; row += attr->block[i++].rows) {
        const lm_lora_block *block = &attr->block[i];
        for (int64_t n = 0; n < y->dim[0]; n++)
            for (int64_t j = 0; j < block->rows; j++) {
                double s = 0;
                for (int64_t r = 0; r < rank; r++)
                    s += get(h, n * wide + i * rank + r) * get(b, (row + j) * rank + r);
                int64_t to = n * m + block->at + j;
                set(&c->out[0], to, get(y, to) + block->scale * s);
            }
    }
}

static void lora_up_dx(const lm_call *c)
{
    const lm_lora_attr *attr = c->attr;
    const lm_tensor *dz = &c->in[0], *b = &c->in[1];
    int64_t m = dz->dim[1], rank = b->dim[1], wide = attr->blocks * rank, row = 0;
    for (int64_t i = 0; i < attr->blocks; row += attr->block[i++].rows) {
        const lm_lora_block *block = &attr->block[i];
        for (int64_t n = 0; n < dz->dim[0]; n++)
            for (int64_t r = 0; r < rank; r++) {
                double s = 0;
                for (int64_t j = 0; j < block->rows; j++)
                    s += get(dz, n * m + block->at + j) * get(b, (row + j) * rank + r);
                set(&c->out[0], n * wide + i * rank + r, block->scale * s);
            }
    }
}

static void lora_up_dw(const lm_call *c)
{
    const lm_lora_attr *attr = c->attr;
    const lm_tensor *dz = &c->in[0], *h = &c->in[1];
    int64_t m = dz->dim[1], wide = h->dim[1], rank = wide / attr->blocks, row = 0;
    for (int64_t i = 0; i < attr->blocks; row += attr->block[i++].rows) {
        const lm_lora_block *block = &attr->block[i];
        for (int64_t j = 0; j < block->rows; j++)
            for (int64_t r = 0; r < rank; r++) {
                double s = 0;
                for (int64_t n = 0; n < dz->dim[0]; n++)
                    s += get(dz, n * m + block->at + j) * get(h, n * wide + i * rank + r);
                accumulate(c, attr->acc, &c->out[0], (row + j) * rank + r, block->scale * s);
            }
    }
}

const lm_kernel lm_lora_ref_kernels[] = {
    { "lora_down", LM_DTYPE_NONE, LM_CPU_REF, lora_down, NULL },
    { "lora_down_dx", LM_DTYPE_NONE, LM_CPU_REF, lora_down_dx, NULL },
    { "lora_up", LM_DTYPE_NONE, LM_CPU_REF, lora_up, NULL },
    { "lora_up_dx", LM_DTYPE_NONE, LM_CPU_REF, lora_up_dx, NULL },
    { "lora_up_dw", LM_DTYPE_NONE, LM_CPU_REF, lora_up_dw, NULL },
    { .op = NULL },
};
