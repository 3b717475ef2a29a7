/* SPDX-License-Identifier: Apache-2.0 */
/* precision.c -- types for a forward graph: each operator gets the type of its class, parameters
 * follow, and a cast is inserted where an operator of another type reads an activation. */
#include <string.h>

#include "graph/passes.h"

typedef struct {
    lm_graph *g;
    const lm_precision *p;
    lm_vid *cast_of; /* by value and type: the value's copy in that type, or LM_NONE */
    bool *seen;      /* by value that is not an activation: its type is chosen */
} pass;

static bool kept(const lm_precision *p, const char *op)
{
    for (const char *const *k = p->keep; k && *k; k++)
        if (!strcmp(*k, op))
            return true;
    return false;
}

/* The type that node n computes in. */
static lm_dtype wanted(const pass *s, const lm_node *n)
{
    if (s->p->low == LM_DTYPE_F64)
        return LM_DTYPE_F64;
    if (n->op->prec == LM_PREC_DENY || kept(s->p, n->op->name))
        return LM_DTYPE_F32;
    if (n->op->prec == LM_PREC_INFER)
        for (int i = 0; i < n->n_in; i++)
            if ((n->op->in[i].is & LM_ACT_TYPE) && n->in[i] >= 0)
                return s->g->value[n->in[i]].t.dtype;
    return s->p->low;
}

/* v in type d: itself, or a cast appended now. */
static lm_code in_type(pass *s, lm_vid v, lm_dtype d, lm_vid *out, lm_err *e)
{
    lm_value *x = &s->g->value[v];
    *out = v;
    if (x->t.dtype == d)
        return LM_OK;
    lm_vid *copy = &s->cast_of[(size_t)v * LM_DTYPE_COUNT + (size_t)d], to = LM_NONE;
    if (*copy != LM_NONE) {
        *out = *copy;
        return LM_OK;
    }
    lm_tensor shape = x->t;
    shape.dtype = d;
    if (lm_graph_value(s->g, LM_ROLE_ACT, shape, NULL, &to, e) ||
        lm_graph_append(s->g, &lm_op_cast, NULL, &v, &to, e))
        return e->code;
    *copy = *out = to;
    return LM_OK;
}

static lm_code param_type(pass *s, const lm_node *n, lm_vid v, lm_dtype d, lm_err *e)
{
    lm_value *x = &s->g->value[v];
    if (s->seen[v] && x->t.dtype != d)
        return lm_fail(e, LM_EUSAGE, x->name, "keep all of its operators in one type",
                       "used as %s and, by %s, as %s", lm_dtype_name(x->t.dtype), n->op->name,
                       lm_dtype_name(d));
    s->seen[v] = true;
    x->t.dtype = d;
    return LM_OK;
}

static lm_code retype_node(pass *s, lm_node n, lm_err *e)
{
    lm_dtype d = wanted(s, &n);
    for (int i = 0; i < n.n_in; i++) {
        lm_vid v = n.in[i];
        if (v < 0 || !lm_dtype_is_float(s->g->value[v].t.dtype))
            continue;
        if (s->g->value[v].role == LM_ROLE_PARAM) {
            if (param_type(s, &n, v, n.op->in[i].is & LM_LOW_PARAM ? d : lm_wide(d), e))
                return e->code;
        } else if (n.op->in[i].is & LM_ACT_TYPE) {
            if (s->g->value[v].role != LM_ROLE_ACT && !s->seen[v]) {
                s->seen[v] = true;
                s->g->value[v].t.dtype = d;
            }
            if (in_type(s, v, d, &n.in[i], e))
                return e->code;
        } else if (s->g->value[v].role != LM_ROLE_ACT) {
            s->g->value[v].t.dtype = lm_wide(d);
        } else if (!(n.op->in[i].is & (LM_ANY_TYPE | LM_DOUBLE))) {
            if (in_type(s, v, lm_wide(d), &n.in[i], e)) /* logits of a product in the low type */
                return e->code;
        }
    }
    /* Outputs keep their numbers; the shape rule sets their types again. */
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_call c = lm_node_call(s->g, &n, in, out);
    unsigned want = 0;
    for (int i = 0; i < n.n_out; i++) {
        want |= (unsigned)(n.out[i] >= 0) << i;
        if (d == LM_DTYPE_F64 && n.op != &lm_op_cast && lm_dtype_is_float(out[i].dtype))
            out[i].dtype = d; /* where the caller chose it */
    }
    if (lm_op_shape(n.op, &c, want, e))
        return e->code;
    for (int i = 0; i < n.n_out; i++)
        if (n.out[i] >= 0)
            s->g->value[n.out[i]].t.dtype = out[i].dtype;
    if (lm_grow(&s->g->node, &s->g->cap_nodes, s->g->n_nodes + 1, sizeof n, "nodes of a graph", e))
        return e->code;
    s->g->node[s->g->n_nodes++] = n;
    return LM_OK;
}

lm_code lm_pass_precision(lm_graph *g, const lm_precision *p, lm_err *e)
{
    pass s = { .g = g, .p = p };
    lm_node *old = NULL;
    size_t n_old = g->n_nodes, n_copies = g->n_values * LM_DTYPE_COUNT;
    for (size_t v = 0; v < g->n_values; v++)
        if (g->value[v].of >= 0)
            return lm_fail(e, LM_EBUG, "precision", NULL,
                           "views must be created after types are chosen");
    lm_code rc = lm_alloc_n(&s.cast_of, n_copies, sizeof *s.cast_of, "a pass", e);
    if (!rc)
        rc = lm_alloc_n(&s.seen, g->n_values, sizeof *s.seen, "a pass", e);
    if (!rc)
        rc = lm_alloc_n(&old, n_old, sizeof *old, "a pass", e);
    if (!rc) {
        for (size_t i = 0; i < n_copies; i++)
            s.cast_of[i] = LM_NONE;
        if (n_old) /* a list without nodes has no memory */
            memcpy(old, g->node, n_old * sizeof *old);
        g->n_nodes = 0;
        for (size_t i = 0; !rc && i < n_old; i++) {
            g->phase = old[i].phase;
            g->layer = old[i].layer;
            rc = retype_node(&s, old[i], e);
        }
    }
    lm_free(s.cast_of);
    lm_free(s.seen);
    lm_free(old);
    return rc;
}
