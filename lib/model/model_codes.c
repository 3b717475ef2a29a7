/* SPDX-License-Identifier: Apache-2.0 */
/* model_codes.c -- selects the weights of a model that are kept in the codes of their source, or are encoded
 * when they are loaded. */
#include <string.h>

#include "base/mem.h"
#include "model/build.h"
#include "numeric/code_rows.h"
#include "op/ops.h"

/* True if the backend has kernels for this format for all readers of the parameter; a teacher's head is read by its
 * student. */
static bool are_read(const lm_model *m, lm_vid v, const lm_format *f)
{
    lm_backend *b = m->build.backend;
    for (size_t k = 0; k < m->graph->n_nodes; k++) {
        const lm_node *n = &m->graph->node[k];
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] == v && !b->codes(b, n->op->name, i, lm_node_act(m->graph, n), f))
                return false;
    }
    return v != m->head || (b->codes(b, lm_op_divergence.name, 3, m->build.precision.low, f) &&
                            b->codes(b, lm_op_divergence_grad.name, 3, m->build.precision.low, f));
}

/* The format that the source has slice i in; NULL: numbers, or codes that cannot be kept as they are. */
static const lm_format *source_format(const lm_model *m, int i, const lm_st_tensor *st,
                                      bool *turned)
{
    const lm_slice *s = &m->slice[i];
    *turned = false;
    const lm_format *f = st ? lm_model_source_format(m->build.codes, st, turned) : NULL;
    /* plain elements can be transposed when they are loaded */
    return f && (*turned == s->transposed || f->element == st->dtype) ? f : NULL;
}

/* The readers of a linear weight, and of an embedding or output head. */
static const lm_op *const linear_readers[] = { &lm_op_linear, &lm_op_linear_dx, &lm_op_widen,
                                               NULL };
static const lm_op *const embed_readers[] = { &lm_op_embed,
                                              &lm_op_head_stats,
                                              &lm_op_head_grad,
                                              &lm_op_head_loss,
                                              &lm_op_divergence,
                                              &lm_op_divergence_grad,
                                              NULL };

/* True if all readers of v are among these operators, inside the layers or outside of them; false without readers. */
static bool is_read_by(const lm_model *m, lm_vid v, const lm_op *const *ops, bool in_layers)
{
    /* those of an encoder too; modules that predict further on are outside */
    const int64_t layers = lm_config_all_layers(&m->config) - m->config.ahead;
    bool read = false;
    for (size_t k = 0; k < m->graph->n_nodes; k++) {
        const lm_node *n = &m->graph->node[k];
        for (int i = 0; i < n->n_in; i++) {
            const lm_op *const *op = ops;
            if (n->in[i] != v)
                continue;
            while (*op && *op != n->op)
                op++;
            if (!*op || (n->layer >= 0 && n->layer < layers) != in_layers)
                return false;
            read = true;
        }
    }
    return read;
}

/* The format to which parameter p of the checkpoint is encoded; NULL: none. */
static const lm_format *encoded_format(const lm_model *m, int p)
{
    const lm_vid v = m->param[p].value;
    const lm_format *f = is_read_by(m, v, linear_readers, true)   ? m->build.frozen_format
                         : is_read_by(m, v, embed_readers, false) ? m->build.frozen_embed
                                                                  : NULL;
    for (int i = 0; i < m->n_slices; i++)
        if (m->slice[i].param == p && m->slice[i].of_adapter)
            return NULL;
    return f && f->encode ? f : NULL;
}

/* The codes of all slices of parameter p, in order: those of the source's tensors, otherwise those in which they are
 * encoded; n 0: it must be decoded, because a reader has no kernel for them or because its numbers take no more bytes:
 * then decoding in every product would gain nothing.  A slice in plain numbers may be combined with
 * others in codes.  run: room for as many runs as the model has slices. */
static lm_code_rows codes_of(const lm_model *m, int p, const lm_st_tensor *const *tensor,
                             struct lm_code_run *run)
{
    const lm_param *param = &m->param[p];
    const lm_tensor *t = &m->graph->value[param->value].t;
    lm_tensor stored = *t;
    lm_code_rows c = { .run = run };
    const lm_format *to = encoded_format(m, p), *read = NULL;
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        bool turned;
        if (s->param != p)
            continue;
        const lm_st_tensor *st = tensor[i];
        const lm_format *f = source_format(m, i, st, &turned);
        bool made = to && (!f || f->element != LM_DTYPE_NONE);
        f = made ? to : f;
        if (param->plain || t->ndim != 2 || !f ||
            (f != read && (!lm_format_codes(f, t->dim[1]) || !are_read(m, param->value, f))))
            return (lm_code_rows){ 0 };
        read = f;
        const void *file = m->build.codes_space == LM_SPACE_FILE && m->build.backend->host_memory &&
                                   turned == s->transposed && !made
                               ? lm_model_source_codes_in_file(m->build.codes, st)
                               : NULL;
        c.run[c.n++] = (struct lm_code_run){
            .row = s->row, .rows = s->rows, .format = f, .data = file, .in_file = file != NULL
        };
    }
    stored.codes = &c;
    return lm_stored_bytes(&stored) < lm_stored_bytes(t) ? c : (lm_code_rows){ 0 };
}

static bool is_in_file(const lm_code_rows *c)
{
    bool all = true;
    for (int i = 0; i < c->n; i++)
        all = all && c->run[i].in_file;
    return all;
}

/* The source's tensor of each slice; NULL: missing. */
static lm_code find_tensors(const lm_model *m, const lm_st_tensor ***out, lm_err *e)
{
    const lm_model_source *src = m->build.codes;
    if (lm_alloc_n(out, (size_t)m->n_slices, sizeof **out, "a list of tensors", e))
        return e->code;
    for (size_t k = 0; src && k < lm_model_source_count(src); k++) {
        int i = lm_model_slice(m, lm_model_source_at(src, k)->name);
        if (i >= 0 && !m->slice[i].of_adapter)
            (*out)[i] = lm_model_source_at(src, k);
    }
    return LM_OK;
}

static lm_code set_codes(lm_model *m, int p, const lm_code_rows *codes, lm_err *e)
{
    lm_code_rows *c = NULL;
    if (lm_arena_alloc(m->graph->arena, (void **)&c, 1, sizeof *c, e) ||
        lm_arena_alloc(m->graph->arena, (void **)&c->run, (size_t)codes->n, sizeof *c->run, e))
        return e->code;
    c->n = codes->n;
    memcpy(c->run, codes->run, (size_t)codes->n * sizeof *c->run);
    lm_value *v = &m->graph->value[m->param[p].value];
    v->t.codes = c;
    if (is_in_file(c))
        v->space = LM_SPACE_FILE;
    return LM_OK;
}

static lm_code keep(lm_model *m, const lm_st_tensor *const *tensor, lm_err *e)
{
    bool train = m->build.mode == LM_MODE_TRAIN || m->build.trainable;
    struct lm_code_run *run = NULL;
    lm_code rc = lm_alloc_n(&run, (size_t)m->n_slices, sizeof *run, "a list of tensors", e);
    for (int p = 0; !rc && p < m->n_params; p++) {
        lm_code_rows found = { 0 };
        if (!(train && m->param[p].trains))
            found = codes_of(m, p, tensor, run);
        if (found.n)
            rc = set_codes(m, p, &found, e);
    }
    lm_free(run);
    return rc;
}

lm_code lm_model_keep_codes(lm_model *m, lm_err *e)
{
    const lm_st_tensor **tensor = NULL;
    lm_backend *b = m->build.backend;
    if (!(m->build.codes || m->build.frozen_format || m->build.frozen_embed) || !b || !b->codes)
        return LM_OK;
    lm_code rc = find_tensors(m, &tensor, e);
    rc = rc ? rc : keep(m, tensor, e);
    lm_free(tensor);
    return rc;
}

/* The parameter of `like` with the same first tensor and shape; -1: none, as where an adapter has modules apart. */
static int same_param(const lm_model *m, int p, const lm_model *like)
{
    int i = 0;
    while (m->slice[i].param != p)
        i++;
    const int k = lm_model_slice(like, m->slice[i].name);
    return k >= 0 && like->slice[k].row == 0 &&
                   like->param[like->slice[k].param].count == m->param[p].count
               ? like->slice[k].param
               : -1;
}

lm_code lm_model_keep_like(lm_model *m, const lm_model *like, lm_err *e)
{
    for (int p = 0; p < m->n_params; p++) {
        const int q = same_param(m, p, like);
        if (q < 0)
            continue;
        const lm_tensor *t = &like->graph->value[like->param[q].value].t;
        m->graph->value[m->param[p].value].t.panels = t->panels;
        if (t->codes && set_codes(m, p, t->codes, e))
            return e->code;
    }
    return LM_OK;
}
