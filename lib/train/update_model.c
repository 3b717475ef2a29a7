/* SPDX-License-Identifier: Apache-2.0 */
/* update_model.c -- the tensors of a model that an update steps. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/panels.h"
#include "train/update_impl.h"

/* Of tensors at one place the ones of which this rank has nothing come first, so that all ranks have the same neighbours. */
static int by_offset(const void *a, const void *b)
{
    const lm_update_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    const bool first = update_count(x) == 0, second = update_count(y) == 0;
    return first != second ? second - first : x->index - y->index;
}

static int64_t count_whole(const lm_slice *s)
{
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->dim[i];
    return n;
}

/* Borders of rows are borders of blocks of the norms and of panels; files must not turn matrices of a stack one by one. */
static int64_t unit_of(const lm_slice *s, int64_t width)
{
    int64_t unit = LM_PANEL;
    if (s->transposed && s->stack > 1)
        return 0;
    while (unit * width % LM_SUM_BLOCK)
        unit *= 2;
    return unit;
}

static void describe(const lm_model *m, int i, lm_update_tensor *t)
{
    const lm_slice *s = &m->slice[i];
    const lm_param *p = &m->param[s->param];
    const lm_tensor *whole = &m->graph->value[p->value].t;
    *t = (lm_update_tensor){ .name = s->name,
                             .shape = *whole,
                             .transposed = s->transposed,
                             .decay = p->decay,
                             .layer = -1,
                             .cut = s->cut.ranks ? &s->cut : NULL,
                             .sums = p->sums,
                             .offset = p->offset + s->row * (p->count / whole->dim[0]),
                             .whole = count_whole(s),
                             .unit = unit_of(s, p->count / whole->dim[0]),
                             .index = i };
    t->shape.dtype = LM_DTYPE_F32;
    t->shape.data = NULL;
    t->shape.panels = false;
    t->panels = whole->panels;
    t->shape.dim[0] = s->rows;
}

/* The layer of a tensor: the encoder's have numbers of their own. */
static const lm_layer *layer_of(const lm_config *c, const lm_model_tensor *t)
{
    const char *encoders = c->encoder ? c->encoder->arch->layers : NULL;
    return encoders && !strncmp(t->hf, encoders, strlen(encoders)) ? &c->encoder->layer[t->layer]
                                                                   : &c->layer[t->layer];
}

/* The tensor of conversion's list with this name; *at: the start of the search, as both lists are
 * ordered by layers. */
static void name_part(const lm_config *c, const lm_model_tensor *known, size_t n, size_t *at,
                      lm_update_tensor *t)
{
    size_t k = *at, left = n;
    for (; left && strcmp(known[k].hf, t->name); left--)
        k = (k + 1) % n;
    if (!left)
        return;
    *at = (k + 1) % n;
    t->part = known[k].part;
    t->bias = known[k].bias;
    t->layer = known[k].layer;
    bool q = t->part == LM_PART_Q, kv = t->part == LM_PART_K || t->part == LM_PART_V;
    if (q || kv || t->part == LM_PART_QKV) {
        const lm_layer *y = layer_of(c, &known[k]);
        t->heads = q ? y->heads : kv ? y->kv_heads : y->heads + 2 * y->kv_heads;
        t->head_dim = y->head_dim;
        if (t->cut && t->cut->dim == 0 && !t->cut->none)
            t->heads = t->shape.dim[0] / y->head_dim;
    }
}

lm_code lm_update_tensors(const lm_model *m, lm_update_tensor **out, int *n, int64_t *blocks,
                          lm_err *e)
{
    lm_model_tensor *known = NULL;
    lm_update_tensor *t = NULL;
    size_t n_known = 0, at = 0;
    *out = NULL;
    *n = 0;
    *blocks = 0;
    if (lm_model_tensors_make_all(&m->config, &known, &n_known, e))
        return e->code;
    lm_code rc = lm_alloc_n(&t, (size_t)m->n_slices + 1, sizeof *t, "a list of tensors", e);
    for (int i = 0; !rc && i < m->n_slices; i++) {
        if (!m->slice[i].trains)
            continue;
        describe(m, i, &t[*n]);
        t[*n].norm_at = *blocks;
        *blocks += update_norm_blocks(t[*n].whole);
        name_part(&m->config, known, n_known, &at, &t[(*n)++]);
    }
    lm_free(known);
    if (rc)
        return rc;
    qsort(t, (size_t)*n, sizeof *t, by_offset);
    *out = t;
    return LM_OK;
}
