/* SPDX-License-Identifier: Apache-2.0 */
/* attention_pages.h -- the sequences of one call of attention over caches (kernels/attention.h): which rows are theirs,
 * and in which pages their positions are.
 *
 * Without a table a cache is one page for each sequence, as long as its room; without `first` every sequence has
 * T rows.  So one form of address serves all. */
#ifndef LM_KERNELS_CPU_ATTENTION_PAGES_H
#define LM_KERNELS_CPU_ATTENTION_PAGES_H

#include "kernels/attention.h"
#include "kernels/cpu/attention_plan.h"

/* Up to this many rows of a sequence are new tokens where nothing says what they are. */
enum { ATTN_FEW_ROWS = 4 };

typedef struct {
    int64_t batch, seq, rows; /* sequences; rows of each, 0: ragged; rows of qkv */
    int64_t page, width;      /* positions of a page; most pages of a sequence */
    const int32_t *used, *fresh;
    const int32_t *first, *kind, *table; /* NULL: absent */
    int64_t pitch;                       /* numbers of a row of qkv */
    bool ragged, paged;                  /* known from the shapes, before there are data */
    bool values;                         /* there is a vcache; otherwise keys hold the values */
} attn_seqs;

static inline attn_seqs attn_seqs_of(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    attn_seqs s = { .batch = a->batch,
                    .seq = a->seq,
                    .rows = c->in[0].dim[0],
                    .page = c->out[1].dim[2],
                    .width = 1,
                    .used = attn_i32(c, 1),
                    .fresh = attn_i32(c, 2),
                    .first = attn_i32(c, 3),
                    .kind = attn_i32(c, 4),
                    .table = attn_i32(c, 5) };
    s.ragged = c->n_in > 3 && c->in[3].ndim > 0;
    s.paged = c->n_in > 5 && c->in[5].ndim > 0;
    if (s.paged)
        s.width = c->in[5].dim[1];
    s.values = c->out[2].ndim > 0;
    s.pitch = lm_attention_row(a, s.values);
    return s;
}

/* The positions that a sequence has room for. */
static inline int64_t attn_room(const attn_seqs *s)
{
    return s->page * s->width;
}

/* Rows [attn_first(b), attn_first(b + 1)) of qkv and of o are those of sequence b. */
static inline int64_t attn_first(const attn_seqs *s, int64_t b)
{
    return s->first ? s->first[b] : b * s->seq;
}

/* The rows of sequence b are those of a prompt. */
static inline bool attn_is_prompt(const attn_seqs *s, int64_t b)
{
    return s->kind ? s->kind[b] == LM_ROWS_PROMPT : s->seq > ATTN_FEW_ROWS;
}

/* The number of sequences with rows of a prompt. */
static inline int64_t attn_prompts(const attn_seqs *s)
{
    int64_t n = 0;
    for (int64_t b = 0; b < s->batch; b++)
        n += attn_is_prompt(s, b) && (s->fresh[b] > 0 || !s->ragged);
    return n;
}

/* The k-th of them. */
static inline int64_t attn_nth_prompt(const attn_seqs *s, int64_t k)
{
    int64_t b = 0;
    for (; s->ragged && b < s->batch; b++)
        if (attn_is_prompt(s, b) && s->fresh[b] > 0 && k-- == 0)
            break;
    return s->ragged ? b : k;
}

/* The row of a cache [G,K,S,D] that has position j of sequence b for key/value head kv of K, and in *run (NULL: not
 * wanted) how many positions from j on follow each other there. */
static inline int64_t attn_cache_row(const attn_seqs *s, int64_t K, int64_t kv, int64_t b,
                                     int64_t j, int64_t *run)
{
    int64_t page = b, at = j;
    if (s->table) {
        page = s->table[b * s->width + j / s->page];
        at = j % s->page;
    }
    if (run)
        *run = s->page - at;
    return (page * K + kv) * s->page + at;
}

#endif
