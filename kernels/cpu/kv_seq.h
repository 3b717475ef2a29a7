/* SPDX-License-Identifier: Apache-2.0 */
/* kv_seq.h -- one key/value head of one sequence of kv_attention (kernels/kv.h): where its keys and values are. */
#ifndef LM_KERNELS_CPU_KV_SEQ_H
#define LM_KERNELS_CPU_KV_SEQ_H

#include "kernels/cpu/attention_pages.h"
#include "kernels/kv.h"

/* Operands of kv_attention. */
enum {
    KV_QKV,
    KV_USED,
    KV_FRESH,
    KV_FIRST,
    KV_KIND,
    KV_TABLE,
    KV_KEYS,
    KV_VALUES,
    KV_SLOT,
    KV_KTAIL,
    KV_VTAIL,
    KV_ROPE,
    KV_PLACE,
    KV_SINKS,
    KV_BIAS
};

/* Keys or values. */
typedef struct {
    const lm_kv_format *f; /* NULL: pages hold plain rows */
    lm_kv_sections at;
    const char *pages;    /* of this head, of page 0 */
    size_t step;          /* bytes from page to page */
    int64_t sinks, coded; /* tokens [sinks, coded) are; none of a plain side */
    int64_t residual;
    const char *tail;   /* row 0 of the slot */
    const char *fresh;  /* row 0 of the new ones, in qkv */
    size_t fresh_pitch; /* bytes */
} kv_side;

typedef struct {
    int64_t b, kv, row, used, fresh; /* row: the first in qkv */
    int64_t T, D;
    size_t row_bytes;             /* of a plain row */
    const int32_t *table, *place; /* place: NULL: the rows of rope are those of tokens */
    attn_mask mask;
    kv_side k, v;
} kv_seq;

static inline int64_t kv_first(const lm_call *c, int64_t b)
{
    const lm_kv_attr *a = c->attr;
    const int32_t *first = attn_i32(c, KV_FIRST);
    return first ? first[b] : b * a->attention.seq;
}

/* Tokens that the rows of the sequence may see: those of the cache, and the new ones. */
static inline int64_t kv_held(const lm_call *c, int64_t b)
{
    const lm_kv_attr *a = c->attr;
    return attn_i32(c, KV_USED)[b] + (a->attention.reads ? 0 : attn_i32(c, KV_FRESH)[b]);
}

/* The rows of the sequence are those of a prompt. */
static inline bool kv_is_prompt(const lm_call *c, int64_t b)
{
    const lm_kv_attr *a = c->attr;
    const int32_t *kind = attn_i32(c, KV_KIND);
    return kind ? kind[b] == LM_ROWS_PROMPT : a->attention.seq > ATTN_FEW_ROWS;
}

static inline kv_side kv_side_of(const lm_call *c, const kv_seq *s, bool values)
{
    const lm_kv_attr *a = c->attr;
    const lm_tensor *t = &c->in[values ? KV_VALUES : KV_KEYS], *qkv = &c->in[KV_QKV];
    int64_t K = a->attention.kv_heads, D = lm_kv_side_dim(a, values);
    size_t size = lm_dtype_size(qkv->dtype), row_bytes = (size_t)D * size;
    kv_side x = { .f = t->kv, .sinks = a->sinks[values], .residual = a->residual[values] };
    int64_t R = x.sinks + x.residual;
    x.at.all = (size_t)s->T * row_bytes;
    if (x.f) {
        x.coded = lm_kv_coded(x.f, s->T, x.residual, s->used);
        lm_kv_page(x.f, s->T, D, &x.at, NULL);
    }
    x.step = (size_t)K * x.at.all;
    x.pages = (const char *)t->data + (size_t)s->kv * x.at.all;
    if (R > 0) {
        int64_t slot = attn_i32(c, KV_SLOT)[s->b];
        x.tail = (const char *)c->in[values ? KV_VTAIL : KV_KTAIL].data +
                 (size_t)((slot * K + s->kv) * R) * row_bytes;
    }
    x.fresh_pitch = (size_t)lm_kv_row_heads(a) * size;
    x.fresh = (const char *)qkv->data + (size_t)s->row * x.fresh_pitch +
              (size_t)lm_kv_side_at(a, values, s->kv) * size;
    return x;
}

static inline kv_seq kv_seq_of(const lm_call *c, int64_t b, int64_t kv)
{
    const lm_kv_attr *a = c->attr;
    kv_seq s = { .b = b,
                 .kv = kv,
                 .row = kv_first(c, b),
                 .used = attn_i32(c, KV_USED)[b],
                 .fresh = attn_i32(c, KV_FRESH)[b],
                 .T = c->in[KV_KEYS].dim[2],
                 .D = a->attention.head_dim,
                 .table = attn_i32(c, KV_TABLE) + b * c->in[KV_TABLE].dim[1] };
    s.row_bytes = (size_t)s.D * lm_dtype_size(c->in[KV_QKV].dtype);
    if (attn_i32(c, KV_PLACE))
        s.place = attn_i32(c, KV_PLACE) + b * c->in[KV_PLACE].dim[1];
    s.mask = attn_cached_mask(&a->attention, s.used, s.fresh);
    s.k = kv_side_of(c, &s, false);
    s.v = kv_side_of(c, &s, true);
    return s;
}

/* Of latents: the sequence as if one of its two sides were keys [0] or [1], which they are all of. */
static inline kv_seq kv_part_of(const lm_call *c, const kv_seq *s, int side)
{
    const lm_kv_attr *a = c->attr;
    kv_seq part = *s;
    part.D = lm_kv_side_dim(a, side);
    part.row_bytes = (size_t)part.D * lm_dtype_size(c->in[KV_QKV].dtype);
    if (side)
        part.k = s->v;
    return part;
}

/* The page of token j of the side's pages. */
static inline const char *kv_page(const kv_seq *s, const kv_side *x, int64_t j)
{
    return x->pages + (size_t)s->table[j / s->T] * x->step;
}

/* The D numbers of token j if they are plain; NULL if they are coded. */
static inline const void *kv_plain(const kv_seq *s, const kv_side *x, int64_t j)
{
    if (j >= s->used)
        return x->fresh + (size_t)(j - s->used) * x->fresh_pitch;
    if (!x->f)
        return kv_page(s, x, j) + (size_t)(j % s->T) * s->row_bytes;
    if (j < x->sinks)
        return x->tail + (size_t)j * s->row_bytes;
    if (j >= x->coded)
        return x->tail + (size_t)(x->sinks + j % x->residual) * s->row_bytes;
    return NULL;
}

/* Cached keys are to be rotated. */
static inline bool kv_has_rope(const lm_call *c)
{
    return c->n_in > KV_ROPE && c->in[KV_ROPE].ndim > 0;
}

/* Rows that are not fresh: zeros, and lse -inf. */
void lm_kv_clear_rows(const lm_call *c);

#endif
