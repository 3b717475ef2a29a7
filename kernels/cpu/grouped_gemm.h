/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_gemm.h -- grouped linear layers as matrix products, each by all threads or, where there are many more groups than
 * threads, by one; included by the file of each level, which only names the level and its table.
 *
 * Scratch is planned before the sizes of the groups are known, and the need of a product does not
 * simply grow with its rows.  So a group is processed in pieces of at most PIECE rows, and the plan
 * is the largest need of any number of rows up to that. */
#ifndef LM_KERNELS_CPU_GROUPED_GEMM_H
#define LM_KERNELS_CPU_GROUPED_GEMM_H

#include <string.h>

#include "kernels/grouped.h"
#include "kernels/linear.h"
#include "kernels/panels.h"
#include "numeric/code_rows.h"

typedef enum { GROUPED_Y, GROUPED_DX, GROUPED_DW } grouped_form;

/* Of y and dx, and of dw (whose rows are the depth of its products). */
enum { PIECE = 512, PIECE_DW = 4096, PIECE_STEP = 64 };

/* The matrix of group g as rows of codes that begin with its first. */
static inline lm_code_rows grouped_codes(const lm_tensor *w, int64_t rows, int64_t g)
{
    return lm_code_rows_part(w->codes, g * rows, rows);
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
    const char *w = b->data ? (const char *)b->data + (size_t)(g * k * n) * size : NULL;
    if (b->panels) {
        /* While scratch is being planned there is no data: any address, as only its presence counts. */
        const void *panels = w ? (const void *)w : b;
        p.b_packed = p.tb ? panels : NULL;
        p.b_turned = p.tb ? NULL : panels;
    } else if (!b->codes) {
        p.b = w;
    }
    p.b_codes = b->codes; /* of all groups: enough to plan with */
    p.c = out->data ? (char *)out->data + (size_t)(row * n) * out_size : NULL;
    return p;
}

/* Rows of the next piece when `left` are left.  The rows of dw are the depth of its products: where that is padded to a
 * multiple of LM_PANEL, few depths must be planned; elsewhere pieces are multiples of PIECE_STEP as long as possible, for the
 * same reason. */
static inline int64_t grouped_next(grouped_form form, bool padded, int64_t left)
{
    int64_t most = form == GROUPED_DW ? PIECE_DW : PIECE;

    if (left >= most)
        return most;
    return form != GROUPED_DW || padded || left < PIECE_STEP ? left
                                                             : left / PIECE_STEP * PIECE_STEP;
}

static inline bool grouped_padded(const lm_call *c, lm_cpu_level level)
{
    return level >= LM_CPU_BF16 && c->in[0].dtype == LM_DTYPE_BF16;
}

/* True if there are enough groups that each can be one thread's: products of few rows gain by that, for no thread waits for
 * another behind each of them. */
static inline bool grouped_apart(const lm_call *c, int threads)
{
    return threads > 1 && c->in[2].dim[0] - 1 >= 4 * threads;
}

/* Scratch of a product that so many threads share. */
static inline size_t grouped_need(const lm_call *c, grouped_form form, lm_cpu_level level,
                                  int threads)
{
    bool padded = grouped_padded(c, level);
    int64_t most = grouped_next(form, padded, c->in[0].dim[0]);
    int64_t step = form == GROUPED_DW && padded ? LM_PANEL : 1;
    size_t need = 0;

    for (int64_t rows = step; rows < most + step; rows += step) {
        lm_gemm p = grouped_piece(c, form, 0, 0, rows);
        bool used = step > 1 || grouped_next(form, padded, rows) == rows;
        size_t bytes = used ? lm_gemm_work(&p, level, threads) : 0;
        need = bytes > need ? bytes : need;
    }
    return need;
}

static inline size_t grouped_alone(const lm_call *c, grouped_form form, lm_cpu_level level)
{
    return (grouped_need(c, form, level, 1) + 63) / 64 * 64;
}

static inline size_t grouped_work(const lm_call *c, grouped_form form, lm_cpu_level level,
                                  int threads)
{
    size_t need = grouped_need(c, form, level, threads);
    size_t apart = grouped_apart(c, threads) ? (size_t)threads * grouped_alone(c, form, level) : 0;

    return apart > need ? apart : need;
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

typedef struct {
    const lm_call *c;
    grouped_form form;
    lm_cpu_level level;
    bool padded, add;
    size_t stride; /* bytes of scratch of a thread, where each has groups of its own */
} grouped_job;

/* All products of group g. */
static inline void grouped_one(const grouped_job *j, int64_t g, void *work, lm_par *par)
{
    const lm_call *c = j->c;
    const lm_grouped_attr *attr = c->attr;
    const int32_t *offsets = c->in[2].data;
    lm_gemm whole = grouped_piece(c, j->form, g, 0, 1);
    lm_code_rows codes = { 0 };

    if (whole.b_codes)
        codes = grouped_codes(&c->in[1], attr->rows, g);
    if (j->form == GROUPED_DW && !j->add && offsets[g] == offsets[g + 1])
        memset(whole.c, 0, (size_t)(whole.m * whole.n) * sizeof(float));
    for (int64_t row = offsets[g], rows; row < offsets[g + 1]; row += rows) {
        rows = grouped_next(j->form, j->padded, offsets[g + 1] - row);
        lm_gemm p = grouped_piece(c, j->form, g, row, rows);
        p.b_codes = whole.b_codes ? &codes : NULL;
        p.accumulate = j->form == GROUPED_DW && (j->add || row > offsets[g]);
        p.work = work;
        lm_gemm_run(&p, j->level, par);
    }
}

static void grouped_some(void *ctx, int64_t begin, int64_t end, int worker)
{
    const grouped_job *j = ctx;

    for (int64_t g = begin; g < end; g++)
        grouped_one(j, g, (char *)j->c->work + (size_t)worker * j->stride, NULL);
}

/* True if no group is so large that the other threads would wait for its one. */
static inline bool grouped_even(const lm_call *c, int threads)
{
    const int32_t *offsets = c->in[2].data;
    int64_t groups = c->in[2].dim[0] - 1, most = 0;

    for (int64_t g = 0; g < groups; g++)
        most = offsets[g + 1] - offsets[g] > most ? offsets[g + 1] - offsets[g] : most;
    return 2 * threads * most <= offsets[groups];
}

/* Scratch of the largest product of one thread, as grouped_work planned it or less. */
static inline size_t grouped_stride(const grouped_job *j)
{
    const lm_call *c = j->c;
    const int32_t *offsets = c->in[2].data;
    size_t need = 0;

    for (int64_t g = 0; g + 1 < c->in[2].dim[0]; g++)
        for (int64_t row = offsets[g], rows; row < offsets[g + 1]; row += rows) {
            rows = grouped_next(j->form, j->padded, offsets[g + 1] - row);
            lm_gemm p = grouped_piece(c, j->form, g, row, rows);
            size_t bytes = lm_gemm_work(&p, j->level, 1);
            need = bytes > need ? bytes : need;
        }
    return (need + 63) / 64 * 64;
}

static inline void grouped_run(const lm_call *c, grouped_form form, lm_cpu_level level)
{
    const lm_grouped_attr *attr = c->attr;
    const int32_t *offsets = c->in[2].data;
    int64_t groups = c->in[2].dim[0] - 1;
    int threads = lm_par_threads(c->par);
    grouped_job j = { .c = c, .form = form, .level = level, .padded = grouped_padded(c, level) };

    j.add = lm_acc_adds(attr->acc, c->step);
    if (grouped_apart(c, threads) && grouped_even(c, threads)) {
        j.stride = grouped_stride(&j);
        lm_par_for(c->par, groups, 1, grouped_some, &j);
    } else {
        for (int64_t g = 0; g < groups; g++)
            grouped_one(&j, g, c->work, c->par);
    }
    if (form != GROUPED_DW)
        lm_par_for(c->par, c->in[0].dim[0] - offsets[groups], PIECE, grouped_clear, (void *)c);
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
