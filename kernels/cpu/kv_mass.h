/* SPDX-License-Identifier: Apache-2.0 */
/* kv_mass.h -- one key head of one sequence of kv_mass (kernels/kv_keep.h). */
#ifndef LM_KERNELS_CPU_KV_MASS_H
#define LM_KERNELS_CPU_KV_MASS_H

#include "kernels/cpu/attention_pages.h"
#include "kernels/kv_keep.h"

/* Operands of kv_mass. */
enum {
    MASS_QKV,
    MASS_LSE,
    MASS_USED,
    MASS_FRESH,
    MASS_FROM,
    MASS_FIRST,
    MASS_TABLE,
    MASS_KEYS,
    MASS_SLOT,
    MASS_KTAIL
};

typedef struct {
    const lm_call *c;
    const lm_kv_mass_attr *a;
    int64_t kv, used, fresh;
    int64_t row, seen;    /* the first in qkv; new rows before the first that counts */
    int64_t page, coded;  /* tokens of a page; tokens [sinks, coded) are coded */
    const int32_t *pages; /* NULL: the cache of a sequence is one page, number `b` */
    int64_t b, slot;
    attn_mask mask;
    float *mass; /* [M] */
} mass_seq;

static inline mass_seq mass_seq_of(const lm_call *c, int64_t b, int64_t kv)
{
    const lm_kv_mass_attr *a = c->attr;
    const lm_tensor *keys = &c->in[MASS_KEYS], *mass = &c->out[0];
    const int32_t *first = attn_i32(c, MASS_FIRST), *table = attn_i32(c, MASS_TABLE);
    mass_seq s = { .c = c,
                   .a = a,
                   .b = b,
                   .kv = kv,
                   .row = first ? first[b] : b * a->attention.seq,
                   .used = attn_i32(c, MASS_USED)[b],
                   .fresh = attn_i32(c, MASS_FRESH)[b],
                   .page = keys->dim[2],
                   .pages = table ? table + b * c->in[MASS_TABLE].dim[1] : NULL,
                   .slot = attn_i32(c, MASS_SLOT)[b] };
    int64_t from = attn_i32(c, MASS_FROM)[b];
    s.seen = from > s.used ? from - s.used : 0;
    s.coded = keys->kv ? lm_kv_coded(keys->kv, s.page, a->residual, s.used) : 0;
    s.mask = attn_cached_mask(&a->attention, s.used, s.fresh);
    s.mass = (float *)mass->data + (s.slot * mass->dim[1] + kv) * mass->dim[2];
    return s;
}

/* The key of token j if it is plain; NULL if it is coded. */
static inline const void *mass_plain(const mass_seq *s, int64_t j)
{
    const lm_tensor *keys = &s->c->in[MASS_KEYS], *qkv = &s->c->in[MASS_QKV];
    const lm_attention_attr *a = &s->a->attention;
    int64_t D = a->head_dim, K = a->kv_heads, at;
    const lm_tensor *t = keys;
    if (j >= s->used) {
        t = qkv;
        at = (s->row + j - s->used) * lm_kv_mass_row(s->a) + a->heads + s->kv;
    } else if (!keys->kv) {
        int64_t page = s->pages ? s->pages[j / s->page] : s->b;
        at = (page * K + s->kv) * s->page + j % s->page;
    } else if (j < s->a->sinks || j >= s->coded) {
        int64_t place = j < s->a->sinks ? j : s->a->sinks + j % s->a->residual;
        t = &s->c->in[MASS_KTAIL];
        at = (s->slot * K + s->kv) * t->dim[2] + place;
    } else {
        return NULL;
    }
    return (const char *)t->data + (size_t)(at * D) * lm_dtype_size(qkv->dtype);
}

/* Decode key j, which is coded. */
static inline void mass_coded(const mass_seq *s, int64_t j, int64_t n, float *y)
{
    const lm_tensor *keys = &s->c->in[MASS_KEYS];
    int64_t D = s->a->attention.head_dim, K = s->a->attention.kv_heads;
    size_t bytes = lm_kv_page_bytes(keys->kv, s->page, D);
    const char *page =
        (const char *)keys->data + (size_t)(s->pages[j / s->page] * K + s->kv) * bytes;
    lm_kv_decode(keys->kv, s->page, D, s->kv, page, j % s->page, n, y, D);
}

#endif
