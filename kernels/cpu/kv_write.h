/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write.h -- keys or values of one head of one sequence of kv_write (kernels/kv.h): where they come from, and where they
 * go. */
#ifndef LM_KERNELS_CPU_KV_WRITE_H
#define LM_KERNELS_CPU_KV_WRITE_H

#include <string.h>

#include "kernels/kv.h"

/* Operands of kv_write. */
enum { KVW_QKV, KVW_USED, KVW_FRESH, KVW_FIRST, KVW_TABLE, KVW_SLOT, KVW_ROW };
enum { KVW_KEYS, KVW_VALUES, KVW_KTAIL, KVW_VTAIL };

/* Keys or values of one head of one sequence. */
typedef struct {
    const lm_kv_format *f; /* NULL: pages take plain rows */
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
    const float *range;      /* [tokens][2] from token `ranges` on; NULL: each group has its own */
    int64_t ranges, first;   /* first: the row of qkv that is row 0 of the new ones */
} kvw_side;

static inline int64_t kvw_int(const lm_call *c, int in, int64_t i)
{
    return ((const int32_t *)c->in[in].data)[i];
}

static inline int64_t kvw_first(const lm_call *c, int64_t b)
{
    const lm_kv_attr *a = c->attr;
    return c->in[KVW_FIRST].data ? kvw_int(c, KVW_FIRST, b) : b * a->attention.seq;
}

static inline kvw_side kvw_side_of(const lm_call *c, int64_t b, int64_t kv, bool values)
{
    const lm_kv_attr *a = c->attr;
    const lm_tensor *t = &c->out[values ? KVW_VALUES : KVW_KEYS], *qkv = &c->in[KVW_QKV];
    int64_t K = a->attention.kv_heads, R = a->sinks[values] + a->residual[values];
    int64_t first = kvw_first(c, b), size = (int64_t)lm_dtype_size(qkv->dtype);
    kvw_side s = { .f = t->kv, .act = qkv->dtype, .T = t->dim[2], .D = t->dim[3], .kv = kv };
    s.first = first;
    s.sinks = a->sinks[values];
    s.residual = a->residual[values];
    s.used = kvw_int(c, KVW_USED, b);
    s.end = s.used + kvw_int(c, KVW_FRESH, b);
    s.table = (const int32_t *)c->in[KVW_TABLE].data + b * c->in[KVW_TABLE].dim[1];
    s.row = (size_t)(s.D * size);
    s.at.all = (size_t)s.T * s.row;
    if (s.f)
        lm_kv_page(s.f, s.T, s.D, &s.at, NULL);
    s.step = (size_t)K * s.at.all;
    s.pages = (char *)t->data + (size_t)kv * s.at.all;
    if (R > 0)
        s.tail = (char *)c->out[values ? KVW_VTAIL : KVW_KTAIL].data +
                 (size_t)((kvw_int(c, KVW_SLOT, b) * K + kv) * R) * s.row;
    s.fresh_pitch = (size_t)(lm_kv_row_heads(a) * size);
    s.fresh = (const char *)qkv->data + (size_t)first * s.fresh_pitch +
              (size_t)(lm_kv_side_at(a, values, kv) * size);
    return s;
}

static inline char *kvw_tail_row(const kvw_side *s, int64_t j)
{
    return s->tail + (size_t)(j < s->sinks ? j : s->sinks + j % s->residual) * s->row;
}

/* Numbers of the wider side of a head. */
static inline int64_t kvw_widest(const lm_call *c)
{
    int64_t k = c->out[KVW_KEYS].dim[3], v = c->out[KVW_VALUES].dim[3];
    return k > v ? k : v;
}

/* The numbers of a token that was not coded before. */
static inline const void *kvw_plain_row(const kvw_side *s, int64_t j)
{
    return j < s->used ? kvw_tail_row(s, j) : s->fresh + (size_t)(j - s->used) * s->fresh_pitch;
}

/* The tokens of [0, n) that are coded, without the sinks, end here. */
static inline int64_t kvw_coded_end(const kvw_side *s, int64_t n)
{
    int64_t end = lm_kv_coded(s->f, s->T, s->residual, n);
    return end > s->sinks ? end : s->sinks;
}

/* The tokens [from, to) of one page of a plain side: new rows. */
static inline void kvw_copy(const kvw_side *s, int64_t from, int64_t to)
{
    char *page = s->pages + (size_t)s->table[from / s->T] * s->step;
    for (int64_t j = from; j < to; j++)
        memcpy(page + (size_t)(j % s->T) * s->row, kvw_plain_row(s, j), s->row);
}

/* The page of token `from`, whose next token it is; its outliers are cleared with its first one. */
static inline char *kvw_page(const kvw_side *s, int64_t from)
{
    char *page = s->pages + (size_t)s->table[from / s->T] * s->step;
    int64_t begin = from / s->T * s->T;
    if (s->f->outliers && from == (begin > s->sinks ? begin : s->sinks))
        memset(page + s->at.outliers, 0, sizeof(uint16_t)); /* their count */
    return page;
}

/* The ranges of values are those of all heads. */
static inline bool kvw_has_ranges(const lm_call *c)
{
    return ((const lm_kv_attr *)c->attr)->token_range && c->out[KVW_VALUES].kv;
}

/* The range of token j of values, which was not coded before; s: of head 0, x: room for 2 K D numbers. */
static inline void kvw_token_range(const lm_call *c, const kvw_side *s, int64_t j, float *x,
                                   float *range)
{
    const lm_kv_attr *a = c->attr;
    int64_t K = a->attention.kv_heads, R = a->sinks[1] + a->residual[1];
    size_t step = j < s->used ? (size_t)R * s->row : s->row;
    const char *from = kvw_plain_row(s, j);
    for (int64_t kv = 0; kv < K; kv++)
        for (int64_t d = 0; d < s->D; d++)
            x[kv * s->D + d] = (float)lm_get(s->act, from + (size_t)kv * step, d);
    lm_kv_token_range(a->outliers, x, K * s->D, range, x + K * s->D);
}

/* As many values are encoded as there are new rows, or fewer; the range of the i-th of a sequence lies at the number
 * of its row i in qkv.  Find that of qkv's row n: range[n][2]. */
static inline void kvw_range_at(const lm_call *c, int64_t n, float *x, float *range)
{
    const lm_kv_attr *a = c->attr;
    for (int64_t b = 0; b < a->attention.batch; b++) {
        int64_t i = n - kvw_first(c, b);
        if (i < 0 || i >= kvw_int(c, KVW_FRESH, b))
            continue;
        kvw_side s = kvw_side_of(c, b, 0, true);
        int64_t j = kvw_coded_end(&s, s.used) + i;
        if (j < kvw_coded_end(&s, s.end))
            kvw_token_range(c, &s, j, x, range + 2 * n);
    }
}

/* Take the ranges of all rows of qkv. */
static inline void kvw_use_ranges(kvw_side *s, const float *range)
{
    s->range = range + 2 * s->first;
    s->ranges = kvw_coded_end(s, s->used);
}

static inline bool kvw_has_rows(const lm_call *c)
{
    return c->n_in > KVW_ROW && c->in[KVW_ROW].ndim > 0;
}

/* New row i alone, to be put in the place of a token: kv_write's `row`. */
static inline kvw_side kvw_one_row(const lm_call *c, const kvw_side *s, int64_t i)
{
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    kvw_side one = *s;
    one.used = kvw_int(c, KVW_ROW, (s->first + i) * K + s->kv);
    one.end = one.used + 1;
    one.fresh += (size_t)i * s->fresh_pitch;
    one.range = s->range ? s->range + 2 * i : NULL;
    one.ranges = one.used;
    return one;
}

/* Encode tokens [from, to) of one page by the definition; x: room for them. */
static inline void kvw_encode(const kvw_side *s, int64_t from, int64_t to, float *x)
{
    char *page = kvw_page(s, from);
    for (int64_t j = from; j < to; j++)
        for (int64_t d = 0; d < s->D; d++)
            x[(j - from) * s->D + d] = (float)lm_get(s->act, kvw_plain_row(s, j), d);
    lm_kv_encode(s->f, s->T, s->D, s->kv, x, s->D, from % s->T, to - from,
                 s->range ? s->range + 2 * (from - s->ranges) : NULL, page);
}

/* The new rows that are plain. */
static inline void kvw_keep_tail(const kvw_side *s)
{
    for (int64_t j = s->used; j < s->end; j++)
        if (j < s->sinks || j >= s->end - s->residual)
            memcpy(kvw_tail_row(s, j), kvw_plain_row(s, j), s->row);
}

#endif
