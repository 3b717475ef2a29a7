/* SPDX-License-Identifier: Apache-2.0 */
/* store_impl.h -- shared by the files of the store.  Private to lib/model. */
#ifndef LM_MODEL_STORE_IMPL_H
#define LM_MODEL_STORE_IMPL_H

#include <string.h>

#include "model/store.h"
#include "numeric/code_rows.h"

/* In optimizer.safetensors: a parameter of which another value is shown. */
#define STORE_OWN_NAME "param"
/* There too: its average (train/optim/average.c). */
#define STORE_AVERAGE_NAME "ema"
/* And a parameter of the training alone (lm_slice.of_training). */
#define STORE_HEAD_NAME "head"
enum { STORE_TILE = 64 }; /* of a transposition: 64 x 64 elements stay in the first-level cache */

/* Elements of a row of the parameter that the tensor is part of. */
static inline int64_t store_width(const lm_model *m, const lm_slice *s)
{
    const lm_tensor *t = &m->graph->value[m->param[s->param].value].t;
    int64_t n = 1;
    for (int i = 1; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

/* The codes in which a parameter is kept; NULL: numbers. */
static inline lm_code_rows *store_codes(const lm_model *m, int param)
{
    return (lm_code_rows *)(uintptr_t)m->graph->value[m->param[param].value].t.codes;
}

/* True if the numbers of a parameter for products are in panels. */
static inline bool store_panels(const lm_model *m, int param)
{
    return m->graph->value[m->param[param].value].t.panels;
}

/* The codes of tensor i of the model; NULL: numbers. */
static inline struct lm_code_run *store_run(const lm_model *m, int i)
{
    lm_code_rows *c = store_codes(m, m->slice[i].param);
    int k = 0;
    while (c && c->run[k].row != m->slice[i].row)
        k++;
    return c ? &c->run[k] : NULL;
}

/* A tensor in a block: [rows, cols] there, files may store it as [cols, rows]. */
typedef struct {
    int tensor; /* its number in the model */
    size_t at;  /* bytes before it */
    int64_t rows, cols;
    bool turned;
    int64_t stack; /* matrices below each other, of which each is turned */
    /* it is a part of the whole, as its tensor is: its own numbers, and states of that shape; NULL: all of it.  With cut->none
     * nothing is here, and rows and columns are those of the whole */
    const lm_cut *cut;
    /* of a block that ranks share: the rows that are this rank's; otherwise all */
    lm_store_own own;
    bool owned; /* lm_state_part.owned */
    bool apart; /* and there is memory for these alone */
} store_piece;

static inline bool store_is_none(const store_piece *p)
{
    return p->cut && p->cut->none;
}

static inline bool store_is_own(const store_piece *p)
{
    return p->own.rows == p->rows;
}

/* The rows that are this rank's as a piece; of the parts of a stack all or none. */
static inline store_piece store_own_rows(const store_piece *p, size_t element)
{
    store_piece own = *p;
    own.at += (size_t)(p->own.row * p->cols) * element;
    own.rows = p->own.rows;
    return own;
}

/* The whole tensor, as other ranks' pieces and this one make it. */
static inline store_piece store_whole(const store_piece *p)
{
    store_piece w = *p;
    if (p->cut && p->cut->ranks > 1 && p->cut->dim == 0 && p->stack > 1) /* whole matrices of it */
        w.stack = p->cut->whole / (p->rows / p->stack);
    if (p->cut && p->cut->ranks > 1)
        *(p->cut->dim ? &w.cols : &w.rows) = p->cut->whole;
    return w;
}

/* Bytes of an element of a block; 0: its format is not plain. */
static inline size_t store_element(const lm_store_block *k)
{
    return k->format->element == LM_DTYPE_NONE ? 0 : lm_dtype_size(k->format->element);
}

/* The block of the own numbers or codes of tensor i of the model; NULL: they are in a file. */
static inline const lm_store_block *store_own(const lm_store *s, int i)
{
    return s->place[i].block < 0 ? NULL : &s->block[s->place[i].block];
}

/* True for a parameter whose numbers in F32 a graph reads in their block. */
static inline bool store_is_read(const lm_store *s, int param)
{
    const lm_model *m = s->model;
    return !s->gathered && m->graph->value[m->param[param].value].t.dtype == LM_DTYPE_F32;
}

/* Set what of piece p is this rank's.  A state of another shape than its tensor's is where all of the tensor is. */
static inline void store_set_own(const lm_store *s, const lm_store_block *k, store_piece *p)
{
    const lm_slice *of = &s->model->slice[p->tensor];
    p->own = (lm_store_own){ 0, p->rows };
    if (!s->own || !of->trains || k->role == LM_KEPT_DERIVED || k->role == LM_KEPT_FROZEN)
        return;
    const lm_store_own *own = &s->own[p->tensor];
    if (store_is_none(p)) {
        p->own = (lm_store_own){ 0, 0 };
        p->apart = true;
        return;
    }
    const bool same = p->rows == of->rows && p->cols == store_width(s->model, of);
    const bool all = own->rows == of->rows && (of->rows > 0 || !of->cut.ranks);
    p->own = same ? *own : (lm_store_own){ 0, all ? p->rows : 0 };
    p->apart = k->role == LM_KEPT_OPT || (k->role == LM_KEPT_PARAM && !store_is_read(s, of->param));
}

/* Number i of a block's tensors. */
static inline store_piece store_piece_of(const lm_store *s, const lm_store_block *k, int i)
{
    static const lm_cut elsewhere = { .ranks = 1, .none = true };
    store_piece out;
    if (k->state) {
        const struct lm_state_part *p = &k->state->part[i];
        const lm_slice *of = &s->model->slice[p->tensor];
        const int64_t rows = p->shape.ndim ? p->shape.dim[0] : 1;
        int64_t cols = 1; /* a rank may have no rows of it */
        for (int d = 1; d < p->shape.ndim; d++)
            cols *= p->shape.dim[d];
        const bool cut = of->cut.ranks == 1 ||
                         (of->cut.ranks && rows == of->rows && cols == store_width(s->model, of));
        out = (store_piece){ .tensor = p->tensor,
                             .at = (size_t)p->at * store_element(k),
                             .rows = rows,
                             .cols = cols,
                             .turned = p->turned,
                             .stack = 1,
                             .owned = p->owned,
                             .cut = p->owned ? (p->none ? &elsewhere : NULL)
                                    : cut    ? &of->cut
                                             : NULL };
    } else {
        const lm_slice *t = &s->model->slice[i];
        const int64_t width = store_width(s->model, t);
        out =
            (store_piece){ .tensor = i,
                           .at = k == store_own(s, i)
                                     ? s->place[i].at
                                     : (size_t)(s->model->param[t->param].offset + t->row * width) *
                                           store_element(k),
                           .rows = t->cut.none ? t->cut.whole : t->rows,
                           .cols = width,
                           .turned = t->transposed,
                           .stack = t->stack,
                           .cut = t->cut.ranks ? &t->cut : NULL };
    }
    store_set_own(s, k, &out);
    return out;
}

/* The shape of the whole tensor in files. */
int store_file_shape(const lm_store *s, const lm_store_block *k, int i, int64_t dim[LM_MAX_DIMS]);

static inline void *store_at(const lm_store_block *k, const store_piece *p)
{
    return (char *)k->data + p->at;
}

static inline size_t store_bytes(const lm_store_block *k, const store_piece *p)
{
    lm_tensor_size size;
    lm_tensor_bytes(k->format, 2, (int64_t[]){ p->rows, p->cols }, &size, NULL);
    return size.all;
}

/* Call fn for each run of elements of this rank's rows of number i of a block that lie behind each other in files, too: `count`
 * of them, from element `local` of these rows in the order of files, and from element `at` of the whole tensor.  Without a cut,
 * and where all rows are its own, it is one. */
typedef lm_code store_run_fn(void *ctx, int64_t local, int64_t at, int64_t count, lm_err *e);
lm_code store_each_run(const lm_store *s, const lm_store_block *k, int i, store_run_fn *fn,
                       void *ctx, lm_err *e);

/* Memory of the host for the whole of a piece of block k, in the block's format and order: the block itself, or
 * the buffer for a device and for tensors of which the block has a part.  NULL: it failed. */
void *store_open(lm_store *s, const lm_store_block *k, const store_piece *p, lm_err *e);
/* Copy this memory, or the part of it, to the block; and to other ranks (lm_store_share). */
lm_code store_close(lm_store *s, const lm_store_block *k, const store_piece *p, const void *made,
                    lm_err *e);
/* Send the whole tensor at `made` to the ranks of lm_store.shared. */
lm_code store_send(lm_store *s, const lm_store_block *k, const store_piece *p, const void *made,
                   lm_err *e);
/* Release the buffer. */
void store_end(lm_store *s);

/* Write a [rows, cols] matrix of `from` (F32, BF16) to `to` in panels. */
void store_pack(const lm_store *s, lm_dtype from, const void *src, int64_t rows, int64_t cols,
                void *to);

/* Behind store_close: where tensor i of the block is read in panels, they replace its rows.  Ranks send each other rows, as
 * each has panels of its own part. */
lm_code store_into_panels(lm_store *s, const lm_store_block *k, int i, lm_err *e);

/* A [rows, cols] matrix of elements of `size` bytes (1, 2, 4 or 8) into dst [cols, rows]. */
void store_transpose(lm_par *par, const void *src, int64_t rows, int64_t cols, size_t size,
                     void *dst);

/* The elements of a turned piece from the order of files into that of the store, or back. */
void store_turn(lm_par *par, const store_piece *p, bool back, const void *src, size_t size,
                void *dst);

/* LM_ENUMERIC if a tensor of an adapter's file holds a number that is not finite (store_finite.c). */
lm_code store_check_finite(const lm_st *st, lm_err *e);

#endif
