/* SPDX-License-Identifier: Apache-2.0 */
/* arrange_simd.c -- numbers moved by their size alone, in pieces that stay in the first cache, and the few sums of the
 * family. */
#include "kernels/arrange.h"

#include "kernels/cpu/code_rows.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

#ifdef __AVX512F__
#define CODER lm_code_rows_avx512
#else
#define CODER lm_code_rows_avx2
#endif

enum { GRAIN = 16384, TILE = 16 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Element `from` of x to element `to` of y. */
LM_INLINE void move(int size, void *y, int64_t to, const void *x, int64_t from)
{
    if (size == 2)
        ((uint16_t *)y)[to] = ((const uint16_t *)x)[from];
    else
        ((uint32_t *)y)[to] = ((const uint32_t *)x)[from];
}

static int size_of(const lm_tensor *t)
{
    return (int)lm_dtype_size(t->dtype);
}

/* ---- permute ---- */

typedef struct {
    const lm_call *call;
    lm_permute_plan p;
    int64_t to[LM_PERMUTE_DIMS]; /* elements of y from one to the next along each dimension */
    int q;                       /* the dimension along which x has no gaps; the last: runs */
    int64_t tiles;               /* of dimension q */
} permute_job;

/* Where item i of the dimensions but the last (and but q) begins in x and in y. */
static void begin_of(const permute_job *j, int64_t i, int64_t *x, int64_t *y)
{
    *x = *y = 0;
    for (int d = j->p.n - 2; d >= 0; d--) {
        if (d == j->q)
            continue;
        int64_t at = i % j->p.dim[d];
        i /= j->p.dim[d];
        *x += at * j->p.pitch[d];
        *y += at * j->to[d];
    }
}

/* `bytes` bytes; heads are a few lines, for which a call of memcpy takes longer than the copying. */
static inline void copy_run(char *to, const char *from, int64_t bytes)
{
    if (bytes % 64 || bytes > 512) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += 64)
        memcpy(to + i, from + i, 64);
}

/* Runs lie in y behind each other along the last dimension but one, a constant step apart in x. */
static void permute_runs(void *ctx, int64_t begin, int64_t end, int worker)
{
    const permute_job *j = ctx;
    int size = size_of(&j->call->in[0]), inner = j->p.n - 2;
    int64_t run = j->p.dim[j->p.n - 1] * size, row = j->p.dim[inner];
    (void)worker;
    for (int64_t i = begin, next; i < end; i = next) {
        int64_t x, y;
        begin_of(j, i, &x, &y);
        next = least(end, i - i % row + row);
        const char *from = (const char *)j->call->in[0].data + x * size;
        char *to = (char *)j->call->out[0].data + y * size;
        for (int64_t k = i; k < next; k++, to += run, from += j->p.pitch[inner] * size)
            copy_run(to, from, run);
    }
}

LM_INLINE void permute_tile(const permute_job *j, int size, int64_t item)
{
    int last = j->p.n - 1;
    int64_t x, y, first = item % j->tiles * TILE, n = least(TILE, j->p.dim[j->q] - first);
    begin_of(j, item / j->tiles, &x, &y);
    x += first;
    y += first * j->to[j->q];
    for (int64_t col = 0; col < j->p.dim[last]; col += TILE) {
        int64_t cols = least(TILE, j->p.dim[last] - col);
        for (int64_t r = 0; r < n; r++)
            for (int64_t k = col; k < col + cols; k++)
                move(size, j->call->out[0].data, y + r * j->to[j->q] + k, j->call->in[0].data,
                     x + r + k * j->p.pitch[last]);
    }
}

static void permute_tiles(void *ctx, int64_t begin, int64_t end, int worker)
{
    const permute_job *j = ctx;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        if (size_of(&j->call->in[0]) == 2)
            permute_tile(j, 2, i);
        else
            permute_tile(j, 4, i);
}

static void copy_bytes(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int size = size_of(&c->in[0]);
    (void)worker;
    memcpy((char *)c->out[0].data + begin * size, (const char *)c->in[0].data + begin * size,
           (size_t)((end - begin) * size));
}

static void copy(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, copy_bytes, (void *)c);
}

static void permute(const lm_call *c)
{
    permute_job j = { .call = c, .p = lm_permute_plan_of(c->attr) };
    int last = j.p.n - 1;
    int64_t step = 1, count = lm_tensor_count(&c->in[0]);
    for (int d = last; d >= 0; d--) {
        j.to[d] = step;
        step *= j.p.dim[d];
        j.q = j.p.pitch[d] == 1 ? d : j.q;
    }
    if (j.p.n == 1) {
        copy(c);
        return;
    }
    if (j.q == last) {
        lm_par_for(c->par, count / j.p.dim[last], grain_rows(j.p.dim[last]), permute_runs, &j);
        return;
    }
    j.tiles = (j.p.dim[j.q] + TILE - 1) / TILE;
    lm_par_for(c->par, count / j.p.dim[last] / j.p.dim[j.q] * j.tiles,
               grain_rows(j.p.dim[last] * TILE), permute_tiles, &j);
}

/* ---- window, join ---- */

static void window_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_window_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    int size = size_of(x);
    int64_t rows = x->dim[0], cols = x->dim[1];
    /* Columns [from, to) of y are in x. */
    int64_t from = a->col < 0 ? least(-a->col, a->cols) : 0;
    int64_t to = cols - a->col < a->cols ? cols - a->col : a->cols;
    (void)worker;
    to = to > from ? to : from;
    for (int64_t i = begin; i < end; i++) {
        char *y = (char *)c->out[0].data + i * a->cols * size;
        int64_t row = a->row + i;
        bool inside = row >= 0 && row < rows && to > from;
        if (!inside) {
            memset(y, 0, (size_t)(a->cols * size));
            continue;
        }
        memset(y, 0, (size_t)(from * size));
        memcpy(y + from * size, (const char *)x->data + (row * cols + a->col + from) * size,
               (size_t)((to - from) * size));
        memset(y + to * size, 0, (size_t)((a->cols - to) * size));
    }
}

static void window(const lm_call *c)
{
    lm_par_for(c->par, c->out[0].dim[0], grain_rows(c->out[0].dim[1]), window_rows, (void *)c);
}

static void join_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int size = size_of(&c->out[0]);
    int64_t at = 0, pitch = c->out[0].dim[1] * size;
    (void)worker;
    for (int k = 0; k < c->n_in; k++) {
        const lm_tensor *x = &c->in[k];
        if (!x->data)
            continue;
        int64_t width = x->dim[1] * size;
        for (int64_t i = begin; i < end; i++)
            memcpy((char *)c->out[0].data + i * pitch + at, (const char *)x->data + i * width,
                   (size_t)width);
        at += width;
    }
}

static void join(const lm_call *c)
{
    char *y = c->out[0].data;
    if (!((const lm_join_attr *)c->attr)->rows) {
        lm_par_for(c->par, c->out[0].dim[0], grain_rows(c->out[0].dim[1]), join_rows, (void *)c);
        return;
    }
    for (int k = 0; k < c->n_in; k++) { /* one behind the other */
        lm_tensor part = c->in[k], *to = &part;
        lm_call one = { .in = &c->in[k], .n_in = 1, .out = to, .n_out = 1, .par = c->par };
        if (!c->in[k].data)
            continue;
        part.data = y;
        copy(&one);
        y += lm_tensor_count(&part) * size_of(&part);
    }
}

/* ---- gather, scatter ---- */

LM_INLINE void gather_as(int size, const lm_call *c, int64_t begin, int64_t end)
{
    const int32_t *id = c->in[1].data;
    const uint32_t zero = 0;
    for (int64_t i = begin; i < end; i++)
        if (id[i] < 0)
            move(size, c->out[0].data, i, &zero, 0);
        else
            move(size, c->out[0].data, i, c->in[0].data, id[i]);
}

static void gather_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    (void)worker;
    if (size_of(&c->in[0]) == 2)
        gather_as(2, c, begin, end);
    else
        gather_as(4, c, begin, end);
}

static void gather(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->out[0]), GRAIN, gather_span, (void *)c);
}

static void clear_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int size = size_of(&c->out[0]);
    (void)worker;
    memset((char *)c->out[0].data + begin * size, 0, (size_t)((end - begin) * size));
}

/* Terms [begin, end), none of which shares its place with another. */
static void place_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int32_t *id = c->in[1].data;
    int size = size_of(&c->in[0]);
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        if (id[i] < 0)
            continue;
        if (size == 2)
            move(2, c->out[0].data, id[i], c->in[0].data, i);
        else
            move(4, c->out[0].data, id[i], c->in[0].data, i);
    }
}

/* Elements [begin, end) of y: every thread reads all indices, and adds in their order. */
static void sum_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_tensor *x = &c->in[0];
    const int32_t *id = c->in[1].data;
    double *sum = c->work;
    int64_t n = lm_tensor_count(x);
    (void)worker;
    memset(sum + begin, 0, (size_t)(end - begin) * sizeof *sum);
    for (int64_t i = 0; i < n; i++)
        if (id[i] >= begin && id[i] < end)
            sum[id[i]] += lm_get(x->dtype, x->data, i);
    for (int64_t i = begin; i < end; i++)
        lm_set(x->dtype, c->out[0].data, i, sum[i]);
}

static void scatter(const lm_call *c)
{
    int64_t count = lm_tensor_count(&c->out[0]);
    if (((const lm_scatter_attr *)c->attr)->unique) {
        lm_par_for(c->par, count, GRAIN, clear_span, (void *)c);
        lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, place_span, (void *)c);
        return;
    }
    int64_t share = (count + lm_par_threads(c->par) - 1) / lm_par_threads(c->par);
    lm_par_for(c->par, count, share > 1024 ? share : 1024, sum_span, (void *)c);
}

static size_t scatter_work(const lm_call *c, int threads)
{
    (void)threads;
    return ((const lm_scatter_attr *)c->attr)->unique
               ? 0
               : (size_t)lm_tensor_count(&c->out[0]) * sizeof(double);
}

/* ---- widen, accumulate ---- */

LM_INLINE void add_or_copy(lm_dtype t, bool add, const void *x, float *y, int64_t begin,
                           int64_t end)
{
    x = (const char *)x + begin * (int64_t)lm_dtype_size(t);
    y += begin;
    VF_FOR(i, n, end - begin, {
        vf v = vf_get_any(t, x, i, n);
        if (add)
            v = v + vf_get_any(LM_DTYPE_F32, y, i, n);
        vf_put_any(LM_DTYPE_F32, y, i, v, n);
    });
}

static void widen_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    (void)worker;
    add_or_copy(LM_DTYPE_BF16, false, c->in[0].data, c->out[0].data, begin, end);
}

typedef struct {
    const lm_call *call;
    size_t scratch; /* of a worker */
} codes_job;

static void widen_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const codes_job *j = ctx;
    const lm_tensor *w = &j->call->in[0];
    lm_code_rows_numbers(w->codes, begin, end - begin, w->dim[1], LM_DTYPE_F32, &CODER,
                         (float *)j->call->out[0].data + begin * w->dim[1],
                         (char *)j->call->work + (size_t)worker * j->scratch);
}

static size_t row_scratch(const lm_call *c)
{
    return (lm_code_rows_scratch(LM_DTYPE_F32, c->in[0].dim[1]) + 63) / 64 * 64;
}

static void widen(const lm_call *c)
{
    const lm_tensor *w = &c->in[0];
    codes_job j = { c, row_scratch(c) };
    if (w->codes)
        lm_par_for(c->par, w->dim[0], grain_rows(w->dim[1]), widen_rows, &j);
    else if (w->dtype == LM_DTYPE_BF16)
        lm_par_for(c->par, lm_tensor_count(w), GRAIN, widen_span, (void *)c);
    else
        copy(c);
}

static size_t widen_work(const lm_call *c, int threads)
{
    return c->in[0].codes ? (size_t)threads * row_scratch(c) : 0;
}

static void accumulate_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_accumulate_attr *a = c->attr;
    bool add = lm_acc_adds(a->acc, c->step);
    const lm_tensor *d = &c->in[0];
    float *dw = c->out[0].data;
    (void)worker;
    if (d->dtype == LM_DTYPE_BF16)
        add_or_copy(LM_DTYPE_BF16, add, d->data, dw, begin, end);
    else if (d->dtype == LM_DTYPE_F32)
        add_or_copy(LM_DTYPE_F32, add, d->data, dw, begin, end);
    else
        for (int64_t i = begin; i < end; i++)
            dw[i] = (add ? dw[i] : 0) + (float)lm_get(d->dtype, d->data, i);
}

static void accumulate(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->in[0]), GRAIN, accumulate_span, (void *)c);
}

const lm_kernel LM_TABLE_NAME(arrange, LM_SIMD)[] = {
    VF_KERNEL("permute", permute, NULL),
    VF_KERNEL("window", window, NULL),
    VF_KERNEL("join", join, NULL),
    VF_KERNEL("gather", gather, NULL),
    VF_KERNEL("scatter", scatter, scatter_work),
    VF_KERNEL("widen", widen, widen_work),
    VF_KERNEL("stop", copy, NULL),
    VF_KERNEL_F32("accumulate", accumulate, NULL),
    VF_KERNEL_END,
};
