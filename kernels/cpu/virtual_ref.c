/* SPDX-License-Identifier: Apache-2.0 */
/* virtual_ref.c -- the definition of the rows of virtual tokens (kernels/virtual.h). */
#include "kernels/virtual.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void copy_rows(const lm_tensor *from, lm_tensor *to)
{
    for (int64_t i = 0; from->data != to->data && i < lm_tensor_count(to); i++)
        set(to, i, get(from, i));
}

static void virtual_rows(const lm_call *c)
{
    const lm_virtual_attr *a = c->attr;
    const lm_tensor *x = &c->in[0], *tok = &c->in[1], *table = &c->in[2];
    int64_t wide = x->dim[1], d = table->dim[1];
    copy_rows(x, &c->out[0]);
    for (int64_t n = 0; n < x->dim[0]; n++) {
        int64_t row = (int64_t)get(tok, n) - a->first;
        for (int64_t j = 0; row >= 0 && j < d; j++) {
            int64_t at = n * wide + a->at + j;
            set(&c->out[0], at, get(table, row * d + j) + (a->add ? get(&c->out[0], at) : 0));
        }
    }
}

static void virtual_rows_dx(const lm_call *c)
{
    const lm_virtual_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *tok = &c->in[1];
    copy_rows(dy, &c->out[0]);
    for (int64_t n = 0; n < dy->dim[0]; n++)
        for (int64_t j = 0; !a->add && (int64_t)get(tok, n) >= a->first && j < a->width; j++)
            set(&c->out[0], n * dy->dim[1] + a->at + j, 0);
}

static void virtual_rows_dw(const lm_call *c)
{
    const lm_virtual_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *tok = &c->in[1];
    int64_t rows = c->out[0].dim[0], d = c->out[0].dim[1];
    for (int64_t p = 0; p < rows; p++)
        for (int64_t j = 0; j < d; j++) {
            double s = 0;
            for (int64_t n = 0; n < dy->dim[0]; n++)
                if ((int64_t)get(tok, n) == a->first + p)
                    s += get(dy, n * dy->dim[1] + a->at + j);
            if (a->fresh)
                set(&c->out[0], p * d + j, s);
            else
                accumulate(c, a->acc, &c->out[0], p * d + j, s);
        }
}

const lm_kernel lm_virtual_ref_kernels[] = {
    { "virtual_rows", LM_DTYPE_NONE, LM_CPU_REF, virtual_rows, NULL },
    { "virtual_rows_dx", LM_DTYPE_NONE, LM_CPU_REF, virtual_rows_dx, NULL },
    { "virtual_rows_dw", LM_DTYPE_NONE, LM_CPU_REF, virtual_rows_dw, NULL },
    { .op = NULL },
};
