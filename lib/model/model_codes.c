/* SPDX-License-Identifier: Apache-2.0 */
/* model_codes.c -- selects the weights of a model that are kept in the codes of their source. */
#include "base/mem.h"
#include "model/build.h"
#include "numeric/code_rows.h"

/* True if the backend has kernels for this format for all readers of the parameter. */
static bool are_read(const lm_model *m, lm_vid v, const lm_format *f)
{
    lm_backend *b = m->build.backend;
    for (size_t k = 0; k < m->graph->n_nodes; k++) {
        const lm_node *n = &m->graph->node[k];
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] == v && !b->codes(b, n->op->name, i, lm_node_act(m->graph, n), f))
                return false;
    }
    return true;
}

/* The codes of all slices of parameter p, in order, of the source's tensors; n 0: it must be
 * decoded, because a reader has no kernel for them or because its numbers take no more bytes: then
 * decoding in every product would gain nothing.  A slice in plain numbers may be combined with
 * others in codes. */
static lm_code_rows codes_of(const lm_model *m, int p, const lm_st_tensor *const *tensor)
{
    const lm_param *param = &m->param[p];
    const lm_tensor *t = &m->graph->value[param->value].t;
    lm_tensor stored = *t;
    lm_code_rows c = { 0 };
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        bool turned = false;
        if (s->param != p)
            continue;
        const lm_st_tensor *st = tensor[i];
        const lm_format *f = st ? lm_model_source_format(m->build.codes, st, &turned) : NULL;
        /* plain elements can be transposed when they are loaded */
        bool fits = f && (turned == s->transposed || f->element == st->dtype);
        if (t->ndim != 2 || !fits || !lm_format_codes(f, t->dim[1]) || c.n == LM_MAX_CODE_RUNS ||
            !are_read(m, param->value, f))
            return (lm_code_rows){ 0 };
        const void *file = m->build.codes_space == LM_SPACE_FILE && m->build.backend->host_memory &&
                                   turned == s->transposed
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
    for (size_t k = 0; k < lm_model_source_count(src); k++) {
        int i = lm_model_slice(m, lm_model_source_at(src, k)->name);
        if (i >= 0)
            (*out)[i] = lm_model_source_at(src, k);
    }
    return LM_OK;
}

static lm_code keep(lm_model *m, const lm_st_tensor *const *tensor, lm_err *e)
{
    for (int p = 0; p < m->n_params; p++) {
        lm_code_rows found = codes_of(m, p, tensor), *c = NULL;
        if (!found.n)
            continue;
        if (lm_arena_alloc(m->graph->arena, (void **)&c, 1, sizeof *c, e))
            return e->code;
        *c = found;
        lm_value *v = &m->graph->value[m->param[p].value];
        v->t.codes = c;
        if (is_in_file(c))
            v->space = LM_SPACE_FILE;
    }
    return LM_OK;
}

lm_code lm_model_keep_codes(lm_model *m, lm_err *e)
{
    const lm_st_tensor **tensor = NULL;
    lm_backend *b = m->build.backend;
    if (!m->build.codes || !b || !b->codes)
        return LM_OK;
    lm_code rc = find_tensors(m, &tensor, e);
    rc = rc ? rc : keep(m, tensor, e);
    lm_free(tensor);
    return rc;
}
