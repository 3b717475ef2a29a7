/* SPDX-License-Identifier: Apache-2.0 */
/* dump.c -- a graph as text. */
#include <inttypes.h>
#include <string.h>

#include "graph/graph.h"
#include "numeric/kv_format.h"

static lm_code add_value(const lm_graph *g, lm_vid v, lm_buf *out, lm_err *e)
{
    static const lm_layout replicated;
    const lm_value *x = &g->value[v];
    lm_code rc = lm_buf_addf(out, e, x->name ? " %%%d %s" : " %%%d", v, x->name);
    if (!rc && !lm_layout_same(&x->layout, &replicated)) {
        rc = lm_buf_addf(out, e, " {");
        rc = rc ? rc : lm_layout_print(&x->layout, out, e);
        rc = rc ? rc : lm_buf_addf(out, e, "}");
    }
    return rc || x->of < 0 ? rc : lm_buf_addf(out, e, " of %%%d+%" PRId64, x->of, x->at);
}

static lm_code add_shape(const lm_tensor *t, lm_buf *out, lm_err *e)
{
    lm_code rc = lm_buf_addf(out, e, " %s[", lm_dtype_name(t->dtype));
    for (int i = 0; !rc && i < t->ndim; i++)
        rc = lm_buf_addf(out, e, i ? ",%" PRId64 : "%" PRId64, t->dim[i]);
    rc = rc ? rc : lm_buf_addf(out, e, t->panels ? "] panels" : "]");
    return rc || !t->kv ? rc : lm_buf_addf(out, e, " as %s", t->kv->name);
}

static bool is_zero(const lm_field *f, const void *at)
{
    if (f->kind == LM_FIELD_INT)
        return *(const int64_t *)at == 0;
    return f->kind == LM_FIELD_FLAG ? !*(const bool *)at : *(const double *)at == 0;
}

static lm_code add_field(const lm_field *f, const void *attr, lm_buf *out, lm_err *e)
{
    const void *at = (const char *)attr + f->at;
    const char *dot = strrchr(f->name, '.'), *name = dot ? dot + 1 : f->name;
    if (f->rare && is_zero(f, at))
        return LM_OK;
    switch (f->kind) {
    case LM_FIELD_INT:
        return lm_buf_addf(out, e, " %s=%" PRId64, name, *(const int64_t *)at);
    case LM_FIELD_REAL:
        return lm_buf_addf(out, e, " %s=%.15g", name, *(const double *)at);
    case LM_FIELD_FLAG:
        return lm_buf_addf(out, e, " %s=%s", name, *(const bool *)at ? "true" : "false");
    case LM_FIELD_TEXT:
        return lm_buf_addf(out, e, " \"%s\"", (const char *)at);
    case LM_FIELD_WORD:
        break;
    }
    return lm_buf_addf(out, e, " %s=%s", name, f->word[*(const int *)at]);
}

static lm_code add_node(const lm_graph *g, const lm_node *n, lm_buf *out, lm_err *e)
{
    const char *before = "";
    lm_code rc = lm_buf_addf(out, e, "%s (", n->op->name);
    for (int i = 0; !rc && i < n->n_in; i++) {
        if (n->in[i] < 0)
            continue;
        rc = lm_buf_addf(out, e, "%s%s", before, n->op->in[i].name);
        rc = rc ? rc : add_value(g, n->in[i], out, e);
        before = ", ";
    }
    rc = rc ? rc : lm_buf_addf(out, e, ")");
    for (const lm_field *f = n->op->fields; !rc && f && f->name; f++)
        rc = add_field(f, n->attr, out, e);
    before = " -> ";
    for (int i = 0; !rc && i < n->n_out; i++) {
        if (n->out[i] < 0)
            continue;
        rc = lm_buf_addf(out, e, "%s%s", before, n->op->out[i].name);
        rc = rc ? rc : add_value(g, n->out[i], out, e);
        rc = rc ? rc : add_shape(&g->value[n->out[i]].t, out, e);
        before = ", ";
    }
    return rc ? rc : lm_buf_addf(out, e, "\n");
}

lm_code lm_graph_dump(const lm_graph *g, lm_buf *out, lm_err *e)
{
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        if (lm_buf_addf(out, e, "%4zu %-7s L%-2d ", k, lm_phase_name(n->phase), n->layer) ||
            add_node(g, n, out, e))
            return e->code;
    }
    return LM_OK;
}
