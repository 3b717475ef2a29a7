/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write_ref.c -- the definition of writes into coded caches (kernels/kv.h). */
#include <string.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "kernels/kv.h"

enum { QKV, USED, FRESH, FIRST, TABLE, SLOT };
enum { KEYS, VALUES, KTAIL, VTAIL };

/* Keys or values of one head of one sequence. */
typedef struct {
    const lm_kv_format *f;
    lm_kv_sections at;
    lm_dtype act;
    int64_t T, D, kv, sinks, residual;
    int64_t used, end; /* tokens before and after */
    const int32_t *table;
    char *pages;             /* of this head, of page 0 */
    size_t step;             /* bytes from page to page */
    char *tail;              /* row 0 of the slot */
    const char *fresh;       /* row 0 of the new ones, in qkv */
    size_t fresh_pitch, row; /* bytes: from row to row of qkv, of a row of the head */
} side;

static int64_t int_at(const lm_call *c, int in, int64_t i)
{
    return ((const int32_t *)c->in[in].data)[i];
}

static side side_of(const lm_call *c, int64_t b, int64_t kv, bool values)
{
    const lm_kv_attr *a = c->attr;
    const lm_tensor *t = &c->out[values ? VALUES : KEYS], *qkv = &c->in[QKV];
    int64_t H = a->attention.heads, K = a->attention.kv_heads, R = a->sinks + a->residual;
    int64_t first = c->in[FIRST].data ? int_at(c, FIRST, b) : b * a->attention.seq;
    side s = { .f = t->kv, .act = qkv->dtype, .T = t->dim[2], .D = t->dim[3], .kv = kv };
    s.sinks = a->sinks;
    s.residual = a->residual;
    s.used = int_at(c, USED, b);
    s.end = s.used + int_at(c, FRESH, b);
    s.table = (const int32_t *)c->in[TABLE].data + b * c->in[TABLE].dim[1];
    lm_kv_page(t->kv, s.T, s.D, &s.at, NULL);
    s.step = (size_t)K * s.at.all;
    s.pages = (char *)t->data + (size_t)kv * s.at.all;
    s.row = (size_t)s.D * lm_dtype_size(s.act);
    if (R > 0)
        s.tail = (char *)c->out[values ? VTAIL : KTAIL].data +
                 (size_t)((int_at(c, SLOT, b) * K + kv) * R) * s.row;
    s.fresh_pitch = (size_t)(H + 2 * K) * s.row;
    s.fresh = (const char *)qkv->data + (size_t)first * s.fresh_pitch +
              (size_t)(H + (values ? K : 0) + kv) * s.row;
    return s;
}

static char *tail_row(const side *s, int64_t j)
{
    return s->tail + (size_t)(j < s->sinks ? j : s->sinks + j % s->residual) * s->row;
}

/* The numbers of a token that was not coded before. */
static const void *plain_row(const side *s, int64_t j)
{
    return j < s->used ? tail_row(s, j) : s->fresh + (size_t)(j - s->used) * s->fresh_pitch;
}

/* The tokens of [0, n) that are coded, without the sinks, end here. */
static int64_t coded_end(const side *s, int64_t n)
{
    int64_t end = lm_kv_coded(s->f, s->T, s->residual, n);
    return end > s->sinks ? end : s->sinks;
}

/* Encode tokens [from, to) of one page; x: room for them. */
static void encode(const side *s, int64_t from, int64_t to, float *x)
{
    char *page = s->pages + (size_t)s->table[from / s->T] * s->step;
    int64_t begin = from / s->T * s->T;
    if (s->f->outliers && from == (begin > s->sinks ? begin : s->sinks))
        memset(page + s->at.outliers, 0, sizeof(uint16_t)); /* their count */
    for (int64_t j = from; j < to; j++)
        for (int64_t d = 0; d < s->D; d++)
            x[(j - from) * s->D + d] = (float)lm_get(s->act, plain_row(s, j), d);
    lm_kv_encode(s->f, s->T, s->D, s->kv, x, s->D, from - begin, to - from, NULL, page);
}

static void write_side(const side *s, float *x)
{
    for (int64_t j = coded_end(s, s->used), to, end = coded_end(s, s->end); j < end; j = to) {
        to = (j / s->T + 1) * s->T;
        to = to < end ? to : end;
        encode(s, j, to, x);
    }
    for (int64_t j = s->used; j < s->end; j++)
        if (j < s->sinks || j >= s->end - s->residual)
            memcpy(tail_row(s, j), plain_row(s, j), s->row);
}

static void kv_write(const lm_call *c)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)c->attr)->attention;
    for (int64_t bk = 0; bk < a->batch * a->kv_heads; bk++)
        for (int values = 0; values < 2; values++) {
            side s = side_of(c, bk / a->kv_heads, bk % a->kv_heads, values);
            write_side(&s, c->work);
        }
}

/* A page of one head. */
static size_t kv_write_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)(c->out[KEYS].dim[2] * c->out[KEYS].dim[3]) * sizeof(float);
}

const lm_kernel lm_kv_write_ref_kernels[] = {
    { "kv_write", LM_DTYPE_NONE, LM_CPU_REF, kv_write, kv_write_work },
    { 0 },
};
