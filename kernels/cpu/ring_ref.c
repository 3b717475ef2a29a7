/* SPDX-License-Identifier: Apache-2.0 */
/* ring_ref.c -- blocks of keys and values around the ring of kernels/ring.h, on the host. */
#include "kernels/cpu/ring.h"

#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* Rows of a call for several threads; what is not F32 passes through scratch of each. */
typedef struct {
    const lm_call *c;
    float *room; /* three rows of `cols` for each worker */
    int64_t cols;
} job;

enum { GRAIN = 1 << 15 }; /* numbers */

static void for_rows(const lm_call *c, int64_t rows, int64_t cols, lm_par_fn fn)
{
    job j = { c, c->work, cols };
    lm_par_for(c->par, rows, 1 + GRAIN / (cols + 1), fn, &j);
}

static size_t room_of(int64_t cols, int threads)
{
    return (size_t)(3 * cols * threads) * sizeof(float);
}

static char *at(const lm_tensor *t, int64_t i)
{
    return (char *)t->data + (size_t)i * lm_dtype_size(t->dtype);
}

/* Columns [from, from + n) of x, one row behind another; `to` may be where they are. */
static void pack_columns(const lm_tensor *x, int64_t from, int64_t n, char *to)
{
    const size_t bytes = (size_t)n * lm_dtype_size(x->dtype);
    for (int64_t i = 0; i < x->dim[0]; i++, to += bytes)
        memcpy(to, at(x, i * x->dim[1] + from), bytes);
}

/* ---- ring_pass ---- */

/* Bytes of what a call sends or gets, and those in whole units of 64, behind which the sizes of messages are. */
static size_t message(const lm_call *c)
{
    const lm_tensor *t = c->in[0].ndim ? &c->in[0] : &c->out[0];
    return (size_t)(t->dim[0] * ((const lm_ring_attr *)c->attr)->columns) * lm_dtype_size(t->dtype);
}

static size_t packed_room(const lm_call *c)
{
    return (message(c) + 63) / 64 * 64;
}

static size_t pass_work(const lm_call *c, int threads)
{
    const lm_ring_attr *a = c->attr;
    (void)threads;
    return packed_room(c) + (size_t)a->ranks * 2 * sizeof(size_t);
}

/* To a rank further on, in one message. */
static void jump(const lm_call *c, lm_links *l, const char *packed)
{
    const lm_ring_attr *a = c->attr;
    size_t *give = (size_t *)(void *)((char *)c->work + packed_room(c)), *take = give + a->ranks;
    memset(give, 0, 2 * (size_t)a->ranks * sizeof *give);
    give[(a->rank + a->hops) % a->ranks] = message(c);
    take[(a->rank + a->ranks - a->hops) % a->ranks] = message(c);
    l->all_to_all(l, packed, give, c->out[0].data, take);
}

static void ring_pass(const lm_call *c)
{
    const lm_ring_attr *a = c->attr;
    const lm_tensor *x = opt_in(c, 0);
    lm_tensor *y = opt_out(c, 0);
    lm_links *l = ring_links(c);
    const bool alone = !l || a->ranks == 1;
    char *packed = NULL;
    if (x) {
        ring_wait(c, 0);
        packed = alone ? y->data : a->columns < x->dim[1] ? c->work : x->data;
        if (packed != x->data)
            pack_columns(x, x->dim[1] - a->columns, a->columns, packed);
    }
    if (!alone && a->hops == 1)
        l->pass(l, packed, y ? y->data : NULL, message(c));
    else if (!alone)
        jump(c, l, packed);
}

/* ---- ring_rows, ring_add ---- */

/* n numbers of x from `from` on, as the type of y, to y from `to` on. */
static void convert(const lm_tensor *x, int64_t from, int64_t n, const lm_tensor *y, int64_t to)
{
    if (x->dtype == y->dtype)
        memcpy(at(y, to), at(x, from), (size_t)n * lm_dtype_size(x->dtype));
    else
        lm_convert(x->dtype, at(x, from), y->dtype, at(y, to), n);
}

static void some_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ((const job *)ctx)->c;
    const lm_tensor *q = &c->in[0], *kv = &c->in[1], *y = &c->out[0];
    const int64_t own = y->dim[1] - kv->dim[1];
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        convert(q, i * q->dim[1], own, y, i * y->dim[1]);
        convert(kv, i * kv->dim[1], kv->dim[1], y, i * y->dim[1] + own);
    }
}

static void ring_rows(const lm_call *c)
{
    ring_wait(c, 0);
    ring_wait(c, 1);
    for_rows(c, c->out[0].dim[0], c->out[0].dim[1], some_rows);
}

static size_t add_work(const lm_call *c, int threads)
{
    return room_of(c->out[0].dim[1], threads);
}

static void add_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_call *c = j->c;
    const int64_t w = j->cols, first = ((const lm_ring_attr *)c->attr)->first;
    const lm_tensor *a = opt_in(c, 0), *b = &c->in[1];
    lm_tensor *y = &c->out[0];
    float *room = j->room + 3 * w * worker;
    for (int64_t i = begin; i < end; i++) {
        const int64_t from = i * b->dim[1] + first;
        if (!a) {
            convert(b, from, w, y, i * w);
        } else if (y->dtype == LM_DTYPE_F64) {
            for (int64_t k = 0; k < w; k++)
                set(y, i * w + k, get(a, i * w + k) + get(b, from + k));
        } else {
            const float *p = as_f32(a->dtype, a->data, i * w, w, room),
                        *q = as_f32(b->dtype, b->data, from, w, room + w);
            float *sum = y->dtype == LM_DTYPE_F32 ? (float *)y->data + i * w : room + 2 * w;
            for (int64_t k = 0; k < w; k++)
                sum[k] = p[k] + q[k];
            if (y->dtype != LM_DTYPE_F32)
                lm_convert(LM_DTYPE_F32, sum, y->dtype, at(y, i * w), w);
        }
    }
}

static void ring_add(const lm_call *c)
{
    if (opt_in(c, 0))
        ring_wait(c, 0);
    for_rows(c, c->out[0].dim[0], c->out[0].dim[1], add_rows);
}

/* ---- ring_mask ---- */

/* The keys of rank `from` at positions below p. */
static int32_t keys_below(const lm_ring_mask_attr *a, int64_t p)
{
    const int64_t runs = lm_ring_runs(&a->block), each = a->seq / runs;
    int64_t n = 0;
    for (int64_t k = 0; k < runs; k++) {
        const int64_t x = p - lm_ring_first(&a->block, a->seq, a->block.from, k);
        n += x < 0 ? 0 : x < each ? x : each;
    }
    return (int32_t)n;
}

static void ring_mask(const lm_call *c)
{
    const lm_ring_mask_attr *a = c->attr;
    const lm_ring_block *b = &a->block;
    const int32_t *lo = opt_in(c, 0) ? c->in[0].data : NULL,
                  *hi = opt_in(c, 1) ? c->in[1].data : NULL;
    int32_t *from = c->out[0].data, *to = c->out[1].data;
    const int64_t each = a->seq / lm_ring_runs(b), all = b->ranks * a->seq;
    for (int64_t row = 0; row < a->batch * a->seq; row++) {
        const int64_t i = row % a->seq, p = lm_ring_first(b, a->seq, b->rank, i / each) + i % each;
        int64_t start = lo ? lo[row] : 0, end = hi ? hi[row] : all;
        if (b->window > 0 && p - b->window + 1 > start)
            start = p - b->window + 1;
        if (b->causal && p + 1 < end)
            end = p + 1;
        else if (!b->causal && b->window > 0 && p + b->window < end)
            end = p + b->window;
        from[row] = keys_below(a, start);
        to[row] = keys_below(a, end);
    }
}

/* ---- ring_merge ---- */

static size_t merge_work(const lm_call *c, int threads)
{
    return room_of(c->out[0].dim[1], threads);
}

/* Numbers [at, at + n) of the head of a row. */
static void merge_head(const lm_call *c, int64_t from, int64_t n, const double by[2], float *room)
{
    const lm_tensor *a = &c->in[0], *b = &c->in[2];
    lm_tensor *o = &c->out[0];
    if (o->dtype == LM_DTYPE_F64) {
        for (int64_t k = from; k < from + n; k++)
            set(o, k, by[0] * get(a, k) + by[1] * get(b, k));
        return;
    }
    const float *p = as_f32(a->dtype, a->data, from, n, room),
                *q = as_f32(b->dtype, b->data, from, n, room + n), x = (float)by[0],
                y = (float)by[1];
    float *sum = o->dtype == LM_DTYPE_F32 ? (float *)o->data + from : room + 2 * n;
    for (int64_t k = 0; k < n; k++)
        sum[k] = x * p[k] + y * q[k];
    if (o->dtype != LM_DTYPE_F32)
        lm_convert(LM_DTYPE_F32, sum, o->dtype, at(o, from), n);
}

static void merge_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_call *c = j->c;
    const lm_ring_merge_attr *a = c->attr;
    const int64_t n = j->cols / a->heads;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < a->heads; h++) {
            const int64_t k = ring_merge_place(a, i, h);
            double by[2];
            set(&c->out[1], k,
                ring_merge_lse(a->undivided, get(&c->in[1], k), get(&c->in[3], k), by));
            merge_head(c, i * j->cols + h * n, n, by, j->room + 3 * j->cols * worker);
        }
}

static void ring_merge(const lm_call *c)
{
    for_rows(c, c->out[0].dim[0], c->out[0].dim[1], merge_rows);
}

const lm_kernel lm_ring_ref_kernels[] = {
    { "ring_pass", LM_DTYPE_NONE, LM_CPU_REF, ring_pass, pass_work },
    { "ring_rows", LM_DTYPE_NONE, LM_CPU_REF, ring_rows, NULL },
    { "ring_add", LM_DTYPE_NONE, LM_CPU_REF, ring_add, add_work },
    { "ring_mask", LM_DTYPE_NONE, LM_CPU_REF, ring_mask, NULL },
    { "ring_merge", LM_DTYPE_NONE, LM_CPU_REF, ring_merge, merge_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
