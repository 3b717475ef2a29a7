/* SPDX-License-Identifier: Apache-2.0 */
/* backward.c -- reverse-mode differentiation: walk the forward list backwards and let each
 * operator's gradient rule append its nodes. */
#include <string.h>

#include "graph/passes.h"
#include "kernels/arrange.h"

struct lm_grad {
    lm_graph *g;
    const lm_backward *b;
    size_t n_forward;  /* number of values on entry */
    lm_vid *grad;      /* by forward value: its gradient so far */
    bool *wants;       /* by forward value */
    lm_vid *param_out; /* by forward value: GRAD value of a parameter */
};

lm_graph *lm_grad_graph(lm_grad *s)
{
    return s->g;
}

bool lm_grad_wants(const lm_grad *s, lm_vid v)
{
    return v >= 0 && (size_t)v < s->n_forward && s->wants[v];
}

lm_vid lm_grad_of(const lm_grad *s, lm_vid v)
{
    return v >= 0 && (size_t)v < s->n_forward ? s->grad[v] : LM_NONE;
}

lm_vid lm_grad_take(lm_grad *s, lm_vid v)
{
    lm_vid d = lm_grad_of(s, v);
    if (d != LM_NONE)
        s->grad[v] = LM_NONE;
    return d;
}

lm_code lm_grad_param(lm_grad *s, lm_vid v, lm_vid *out, lm_acc *acc, lm_err *e)
{
    *out = LM_SKIP;
    if (!lm_grad_wants(s, v))
        return LM_OK;
    *acc = LM_ACC_ADD;
    if (s->param_out[v] == LM_NONE) {
        lm_tensor t = s->g->value[v].t;
        char name[256];
        t.dtype = lm_wide(t.dtype);
        const char *base = s->g->value[v].name ? s->g->value[v].name : "param";
        size_t len = strlen(base) < 248 ? strlen(base) : 248;
        memcpy(name, "d ", 2);
        memcpy(name + 2, base, len);
        name[len + 2] = 0;
        if (lm_graph_value(s->g, LM_ROLE_GRAD, t, name, &s->param_out[v], e))
            return e->code;
        s->g->value[s->param_out[v]].grad_of = v;
        s->g->value[s->param_out[v]].layout = s->g->value[v].layout;
        *acc = LM_ACC_FIRST;
    }
    *out = s->param_out[v];
    return LM_OK;
}

static bool is_computed(const lm_grad *s, lm_vid v)
{
    return v >= 0 && s->g->value[v].role != LM_ROLE_PARAM && lm_grad_wants(s, v);
}

lm_code lm_grad_weight(lm_grad *s, lm_vid v, lm_vid *out, lm_acc *acc, lm_err *e)
{
    if (!is_computed(s, v))
        return lm_grad_param(s, v, out, acc, e);
    *out = LM_NONE;
    *acc = LM_ACC_FRESH;
    return LM_OK;
}

lm_code lm_grad_weight_give(lm_grad *s, lm_vid v, lm_vid out, lm_err *e)
{
    return is_computed(s, v) ? lm_grad_give(s, v, out, e) : LM_OK;
}

/* A gradient that is a value of its own: by one more node to where the parameter's gradients are summed. */
static lm_code add_to_param(lm_grad *s, lm_vid v, lm_vid d, lm_err *e)
{
    lm_accumulate_attr attr = { LM_ACC_ADD };
    lm_phase phase = s->g->phase;
    lm_vid out;
    if (lm_grad_param(s, v, &out, &attr.acc, e))
        return e->code;
    s->g->phase = LM_PHASE_BACKWARD_WEIGHT;
    lm_graph_append(s->g, &lm_op_accumulate, &attr, &d, &out, e);
    s->g->phase = phase;
    return e->code;
}

lm_code lm_grad_give(lm_grad *s, lm_vid v, lm_vid d, lm_err *e)
{
    if (!lm_grad_wants(s, v))
        return LM_OK;
    if (s->g->value[v].role == LM_ROLE_PARAM)
        return add_to_param(s, v, d, e);
    if (s->grad[v] == LM_NONE) {
        s->grad[v] = d;
        return LM_OK;
    }
    lm_vid in[2] = { s->grad[v], d }, out = LM_NONE;
    if (lm_graph_append(s->g, &lm_op_add, NULL, in, &out, e))
        return e->code;
    s->grad[v] = out;
    return LM_OK;
}

/* Whether input i of a node is a value that needs a gradient and passes one on. */
static bool is_wanted(const lm_grad *s, const lm_node *n, int i)
{
    return !(n->op->in[i].is & LM_FIXED) && lm_grad_wants(s, n->in[i]);
}

/* A value needs a gradient if it is a trainable parameter, is in `wrt`, or is computed from a value
 * that needs one. */
static void mark_wants(lm_grad *s)
{
    const lm_backward *b = s->b;
    for (size_t v = 0; v < s->n_forward; v++)
        if (s->g->value[v].role == LM_ROLE_PARAM)
            s->wants[v] = !b->trainable || b->trainable(b->ctx, (lm_vid)v);
    for (int i = 0; i < b->n_wrt; i++)
        s->wants[b->wrt[i]] = true;
    for (size_t k = 0; k < s->g->n_nodes; k++) {
        const lm_node *n = &s->g->node[k];
        bool any = false;
        for (int i = 0; i < n->n_in; i++)
            any |= is_wanted(s, n, i);
        for (int i = 0; any && i < n->n_out; i++)
            if (n->out[i] >= 0)
                s->wants[n->out[i]] = true;
    }
}

static lm_code run(lm_grad *s, lm_err *e)
{
    lm_graph *g = s->g;
    size_t n_nodes = g->n_nodes;
    mark_wants(s);
    s->grad[s->b->root] = s->b->seed;
    for (int i = 0; i < s->b->n_more; i++)
        s->grad[s->b->more[i]] = s->b->more_seed[i];
    for (size_t k = n_nodes; k-- > 0;) {
        lm_node n = g->node[k];
        bool reached = false, wanted = false;
        for (int i = 0; i < n.n_out; i++)
            reached |= lm_grad_of(s, n.out[i]) != LM_NONE;
        for (int i = 0; i < n.n_in; i++)
            wanted |= is_wanted(s, &n, i);
        if (!reached || !wanted)
            continue;
        if (!n.op->grad)
            return lm_fail(e, LM_EUSAGE, n.op->name, NULL, "has no gradient");
        g->layer = n.layer;
        g->phase = LM_PHASE_BACKWARD_INPUT;
        if (n.op->grad(s, &n, e))
            return e->code;
    }
    if (s->b->grads)
        for (size_t v = 0; v < s->n_forward; v++)
            s->b->grads[v] = s->param_out[v] != LM_NONE ? s->param_out[v] : s->grad[v];
    g->phase = LM_PHASE_FORWARD;
    return LM_OK;
}

lm_code lm_pass_backward(lm_graph *g, const lm_backward *b, lm_err *e)
{
    size_t n = g->n_values;
    lm_grad s = { .g = g, .b = b, .n_forward = n };
    lm_code rc = lm_alloc_n(&s.grad, n, sizeof *s.grad, "the backward pass", e);
    if (!rc)
        rc = lm_alloc_n(&s.wants, n, sizeof *s.wants, "the backward pass", e);
    if (!rc)
        rc = lm_alloc_n(&s.param_out, n, sizeof *s.param_out, "the backward pass", e);
    if (!rc) {
        for (size_t v = 0; v < n; v++)
            s.grad[v] = s.param_out[v] = LM_NONE;
        rc = run(&s, e);
    }
    lm_free(s.grad);
    lm_free(s.wants);
    lm_free(s.param_out);
    return rc;
}
