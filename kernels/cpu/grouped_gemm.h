/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_gemm.h -- grouped linear layers as one matrix product after the other; included by the
 * file of each level, which only names the level and its table.
 *
 * Scratch is planned before the sizes of the groups are known, and the need of a product does not
 * simply grow with its rows.  So a group is processed in pieces of at most PIECE rows, and the plan
 * is the largest need of any number of rows up to that. */
#ifndef LM_KERNELS_CPU_GROUPED_GEMM_H
#define LM_KERNELS_CPU_GROUPED_GEMM_H

#include <string.h>

#include "kernels/grouped.h"
#include "kernels/linear.h"
#include "numeric/code_rows.h"

typedef enum { GROUPED_Y, GROUPED_DX, GROUPED_DW } grouped_form;

/* Of y and dx, and of dw (whose rows are the depth of its products). */
enum { PIECE = 512, PIECE_DW = 4096, PIECE_STEP = 64 };

/* The matrix of group g as rows of codes that begin with its first: earlier ones have numbers below 0. */
static inline lm_code_rows grouped_codes(const lm_tensor *w, int64_t rows, int64_t g)
{
    lm_code_rows c = *w->codes;
    for (int i = 0; i < c.n; i++)
        c.run[i].row -= g * rows;
    return c;
}

/* The product of `rows` rows from `row` on, of group g. */
static inline lm_gemm grouped_piece(const lm_call *c, grouped_form form, int64_t g, int64_t row,
                                    int64_t rows)
{
    const lm_tensor *a = &c->in[0], *b = &c->in[1], *out = &c->out[0];
    int64_t k = a->dim[1], n = out->dim[out->ndim - 1];
    size_t size = lm_dtype_size(a->dtype), out_size = lm_dtype_size(out->dtype);
    lm_gemm p = { .ab = a->dtype, .cd = out->dtype, .work = c->work };

    p.lda = k, p.ldc = n;
    p.a = a->data ? (const char *)a->data + (size_t)(row * k) * size : NULL;
    if (form == GROUPED_DW) {
        p.m = k, p.n = n, p.k = rows;
        p.ta = true;
        p.b = b->data ? (const char *)b->data + (size_t)(row * n) * size : NULL;
        p.ldb = n;
        p.c = out->data ? (char *)out->data + (size_t)(g * k * n) * out_size : NULL;
        return p;
    }
    p.m = rows, p.n = n, p.k = k;
    p.tb = form == GROUPED_Y;
    p.ldb = p.tb ? k : n;
    p.b = b->data && !b->codes ? (const char *)b->data + (size_t)(g * k * n) * size : NULL;
    p.b_codes = b->codes; /* of all groups: enough to plan with */
    p.c = out->data ? (char *)out->data + (size_t)(row * n) * out_size : NULL;
    return p;
}

/* Rows of the next piece when `left` are left: for dw a multiple of PIECE_STEP as long as possible,
 * so that few depths must be planned. */
static inline int64_t grouped_next(grouped_form form, int64_t left)
{
    if (form != GROUPED_DW)
        return left < PIECE ? left : PIECE;
    if (left < PIECE_STEP)
        return left;
    return left < PIECE_DW ? left / PIECE_STEP * PIECE_STEP : PIECE_DW;
}

static inline size_t grouped_work(const lm_call *c, grouped_form form, lm_cpu_level level,
                                  int threads)
{
    int64_t most = grouped_next(form, c->in[0].dim[0]);
    size_t need = 0;

    for (int64_t rows = 1; rows <= most; rows++) {
        lm_gemm p = grouped_piece(c, form, 0, 0, rows);
        size_t bytes = grouped_next(form, rows) == rows ? lm_gemm_work(&p, level, threads) : 0;
        need = bytes > need ? bytes : need;
    }
    return need;
}

/* Rows of no group, behind those of the last one. */
static void grouped_clear(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_tensor *out = &c->out[0];
    const int32_t *offsets = c->in[2].data;
    size_t row = (size_t)out->dim[1] * lm_dtype_size(out->dtype);
    (void)worker;
    memset((char *)out->data + (size_t)(offsets[c->in[2].dim[0] - 1] + begin) * row, 0,
           (size_t)(end - begin) * row);
}

static inline void grouped_run(const lm_call *c, grouped_form form, lm_cpu_level level)
{
    const lm_grouped_attr *attr = c->attr;
    const int32_t *offsets = c->in[2].data;
    bool add = attr->acc == LM_ACC_ADD || c->step->more;

    for (int64_t g = 0; g + 1 < c->in[2].dim[0]; g++) {
        lm_gemm whole = grouped_piece(c, form, g, 0, 1);
        lm_code_rows codes = { 0 };
        if (whole.b_codes)
            codes = grouped_codes(&c->in[1], attr->rows, g);
        if (form == GROUPED_DW && !add && offsets[g] == offsets[g + 1])
            memset(whole.c, 0, (size_t)(whole.m * whole.n) * sizeof(float));
        for (int64_t row = offsets[g], rows; row < offsets[g + 1]; row += rows) {
            rows = grouped_next(form, offsets[g + 1] - row);
            lm_gemm p = grouped_piece(c, form, g, row, rows);
            p.b_codes = whole.b_codes ? &codes : NULL;
            p.accumulate = form == GROUPED_DW && (add || row > offsets[g]);
            lm_gemm_run(&p, level, c->par);
        }
    }
    if (form != GROUPED_DW)
        lm_par_for(c->par, c->in[0].dim[0] - offsets[c->in[2].dim[0] - 1], PIECE, grouped_clear,
                   (void *)c);
}

#define LM_GROUPED_KERNEL(NAME, FORM, LEVEL)                 \
    static void NAME(const lm_call *c)                       \
    {                                                        \
        grouped_run(c, FORM, LEVEL);                         \
    }                                                        \
    static size_t NAME##_work(const lm_call *c, int threads) \
    {                                                        \
        return grouped_work(c, FORM, LEVEL, threads);        \
    }

#define LM_GROUPED_KERNELS(LEVEL)                           \
    LM_GROUPED_KERNEL(grouped_linear, GROUPED_Y, LEVEL)     \
    LM_GROUPED_KERNEL(grouped_linear_dx, GROUPED_DX, LEVEL) \
    LM_GROUPED_KERNEL(grouped_linear_dw, GROUPED_DW, LEVEL)

#define LM_GROUPED_ROWS(ACT, LEVEL)                                                     \
    { "grouped_linear", ACT, LEVEL, grouped_linear, grouped_linear_work },              \
        { "grouped_linear_dx", ACT, LEVEL, grouped_linear_dx, grouped_linear_dx_work }, \
    {                                                                                   \
        "grouped_linear_dw", ACT, LEVEL, grouped_linear_dw, grouped_linear_dw_work      \
    }

#endif
