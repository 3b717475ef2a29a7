/* SPDX-License-Identifier: Apache-2.0 */
/* store_impl.h -- what the files of the store share.  Private to lib/model. */
#ifndef LM_MODEL_STORE_IMPL_H
#define LM_MODEL_STORE_IMPL_H

#include "model/store.h"

enum { STORE_TILE = 64 }; /* of a transposition: 64 x 64 elements stay in the first-level cache */

/* Elements of a row of the parameter that the tensor is part of. */
static inline int64_t store_width(const lm_model *m, const lm_slice *s)
{
    const lm_param *p = &m->param[s->param];
    return p->count / m->graph->value[p->value].t.dim[0];
}

/* Where the tensor begins in a block. */
static inline void *store_at(const lm_store *s, const lm_store_block *k, const lm_slice *t)
{
    int64_t at = s->place[t->param].offset + t->row * store_width(s->model, t);
    return (char *)k->data + (size_t)at * lm_dtype_size(k->format);
}

/* The block of the parameter's own numbers. */
static inline const lm_store_block *store_own(const lm_store *s, const lm_slice *t)
{
    return &s->block[s->place[t->param].block];
}

/* Memory of the host in which tensor i is to be made for block k, in the block's format and order:
 * its place, or the passage to a device.  NULL: it failed. */
void *store_open(lm_store *s, const lm_store_block *k, int i, lm_err *e);
/* What was made there goes to its place. */
lm_code store_close(lm_store *s, const lm_store_block *k, int i, const void *made, lm_err *e);
/* Release the passage. */
void store_end(lm_store *s);

/* A [rows, cols] matrix of elements of `size` bytes (2, 4 or 8) into dst [cols, rows]. */
void store_transpose(lm_par *par, const void *src, int64_t rows, int64_t cols, size_t size,
                     void *dst);

#endif
