/* SPDX-License-Identifier: Apache-2.0 */
/* rule.c -- formulas, products and sums for the rules of optimisers. */
#include "train/optim/rule.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/linear.h"
#include "op/ops.h"

/* ---- formulas ---- */

enum { NAMES_AT_MOST = 40, TEXT = 1024 };

/* Nodes before the first step and those that show an average run without gradients, and penalties before their norm is
 * known. */
static bool is_gated(const lm_update *u)
{
    int when = lm_update_graph(u)->when;
    return when != LM_UPDATE_START && when != LM_UPDATE_SHOW && when != LM_UPDATE_PENALTY;
}

/* Clip the gradients that the text reads, and write copies of the parameters that it writes. */
static lm_code complete(const lm_update *u, const lm_update_tensor *t, const char *text, char *out,
                        lm_err *e)
{
    bool clips = lm_update_clip_value(u) > 0;
    const char *g = !lm_formula_mentions(text, "g") ? ""
                    : clips ? "g = max(-clip_value, min(clip_value, grad*scale)); "
                            : "g = grad*scale; ";
    bool writes = t->low >= 0 && lm_formula_mentions(text, "p") == 2 && is_gated(u);
    const char *low = writes ? "; low = p" : "";
    int n = snprintf(out, TEXT, "%s%s%s", g, text, low);
    return n < TEXT ? LM_OK : lm_fail(e, LM_EBUG, "a formula", NULL, "too long: \"%.200s\"", text);
}

static int own_names(const lm_update *u, const lm_update_tensor *t, lm_formula_name *out)
{
    const lm_optim_use *use = lm_update_use(u);
    int n = 0;
    out[n++] = (lm_formula_name)LM_IS("p", t->param);
    out[n++] = (lm_formula_name)LM_IS("grad", t->grad);
    out[n++] = (lm_formula_name)LM_IS("scale", lm_update_scale(u));
    if (t->low >= 0)
        out[n++] = (lm_formula_name)LM_IS("low", t->low);
    out[n++] = (lm_formula_name)LM_CONSTANT("clip_value", lm_update_clip_value(u));
    for (int i = 0; use->optim->hyper[i].name; i++) {
        bool none = !strcmp(use->optim->hyper[i].name, "weight_decay") && !t->decay;
        out[n++] =
            (lm_formula_name)LM_CONSTANT(use->optim->hyper[i].name, none ? 0 : use->hyper[i]);
    }
    return n;
}

lm_code lm_rule(lm_update *u, const lm_update_tensor *t, const char *text,
                const lm_formula_name *names, lm_err *e)
{
    static const char *const rate_alone[] = { "lr" };
    const lm_optim *optim = lm_update_use(u)->optim;
    lm_formula_name all[NAMES_AT_MOST];
    char whole[TEXT];
    int n = own_names(u, t, all);
    for (; names && names->name; names++) {
        if (n == NAMES_AT_MOST)
            return lm_fail(e, LM_EBUG, "a formula", NULL, "too many names: \"%.200s\"", text);
        all[n++] = *names;
    }
    const lm_formula_scope scope = { .name = all,
                                     .n_names = n,
                                     .number = optim->number ? optim->number : rate_alone,
                                     .n_numbers = optim->number ? optim->n_numbers : 1,
                                     .numbers = lm_update_numbers(u),
                                     .gate = is_gated(u) ? lm_update_scale(u) : LM_NONE };
    if (complete(u, t, text, whole, e))
        return e->code;
    return lm_formula_append(lm_update_graph(u), whole, &scope, e);
}

void lm_rule_bias(const double *h, double lr, int64_t t, double *out)
{
    out[0] = lr;
    out[1] = 1 - pow(h[0], (double)(t + 1));
    out[2] = 1 - pow(h[1], (double)(t + 1));
}

const char *const lm_rule_bias_names[] = { "lr", "bc1", "bc2" };

/* ---- states ---- */

lm_code lm_rule_state(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                      lm_err *e)
{
    return lm_update_state(u, t, name, t->shape, out, e);
}

lm_code lm_rule_rows(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                     lm_err *e)
{
    return lm_update_state(u, t, name, lm_shape2(LM_DTYPE_F32, t->shape.dim[0], 1), out, e);
}

lm_code lm_rule_columns(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                        lm_err *e)
{
    return lm_update_state(u, t, name, lm_shape2(LM_DTYPE_F32, 1, t->shape.dim[1]), out, e);
}

lm_code lm_rule_number(lm_update *u, const lm_update_tensor *t, const char *name, lm_vid *out,
                       lm_err *e)
{
    return lm_update_state(u, t, name, lm_shape1(LM_DTYPE_F32, 1), out, e);
}

/* ---- sums and products ---- */

lm_code lm_rule_reduce(lm_update *u, lm_reduce_kind kind, lm_reduce_over over, bool mean, lm_vid x,
                       lm_vid *out, lm_err *e)
{
    lm_reduce_attr a = { .kind = kind, .over = over, .mean = mean };
    *out = LM_NONE;
    return lm_graph_append(lm_update_graph(u), &lm_op_reduce, &a, &x, out, e);
}

lm_code lm_rule_abt(lm_update *u, lm_vid a, lm_vid b, lm_vid *out, lm_err *e)
{
    lm_vid in[3] = { a, b, LM_NONE };
    *out = LM_NONE;
    return lm_graph_append(lm_update_graph(u), &lm_op_linear, &(lm_linear_attr){ LM_ACC_FIRST }, in,
                           out, e);
}

lm_code lm_rule_ab(lm_update *u, lm_vid a, lm_vid b, lm_vid *out, lm_err *e)
{
    lm_vid in[2] = { a, b };
    *out = LM_NONE;
    return lm_graph_append(lm_update_graph(u), &lm_op_linear_dx, &(lm_linear_attr){ LM_ACC_FIRST },
                           in, out, e);
}

lm_code lm_rule_atb(lm_update *u, lm_vid a, lm_vid b, lm_vid *out, lm_err *e)
{
    lm_vid in[2] = { a, b }, both[2] = { LM_NONE, LM_SKIP };
    lm_code rc = lm_graph_append(lm_update_graph(u), &lm_op_linear_dw,
                                 &(lm_linear_attr){ LM_ACC_FIRST }, in, both, e);
    *out = both[0];
    return rc;
}

lm_code lm_rule_basis(lm_update *u, const lm_op *op, const void *attr, lm_vid x, lm_vid *out,
                      lm_err *e)
{
    lm_vid in[2] = { x, LM_NONE }, made[2] = { LM_NONE, LM_SKIP };
    lm_code rc = lm_graph_append(lm_update_graph(u), op, attr, in, made, e);
    *out = made[0];
    return rc;
}

/* ---- whole matrices, and the others ---- */

bool lm_rule_is_hidden(const lm_update_tensor *t)
{
    return t->shape.ndim == 2 && t->layer >= 0 && !t->bias;
}

lm_code lm_rule_adamw(lm_update *u, const lm_update_tensor *t, double rate, lm_err *e)
{
    lm_vid m, v;
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e))
        return e->code;
    return lm_rule(u, t,
                   "m = adam_beta1*m + (1 - adam_beta1)*g;"
                   "v = adam_beta2*v + (1 - adam_beta2)*g*g;"
                   "p = p*(1 - lr*rate*weight_decay) - lr*rate/bc1 * m / (sqrt(v/bc2) + adam_eps)",
                   NAMES(LM_IS("m", m), LM_IS("v", v), LM_CONSTANT("rate", rate)), e);
}

int lm_rule_n_pieces(const lm_update_tensor *t)
{
    return t->part == LM_PART_QKV && t->shape.dim[0] % 3 == 0 ? 3 : 1;
}

lm_code lm_rule_part(lm_update *u, lm_vid state, int k, lm_tensor shape, lm_vid *out, lm_err *e)
{
    *out = LM_NONE;
    return state < 0 ? LM_OK
                     : lm_graph_view(lm_update_graph(u), state, k * lm_tensor_count(&shape), shape,
                                     NULL, out, e);
}

lm_code lm_rule_piece(lm_update *u, const lm_update_tensor *t, int k, lm_update_tensor *out,
                      lm_err *e)
{
    *out = *t;
    out->shape.dim[0] /= lm_rule_n_pieces(t);
    return lm_rule_part(u, t->param, k, out->shape, &out->param, e) ||
                   lm_rule_part(u, t->grad, k, out->shape, &out->grad, e) ||
                   lm_rule_part(u, t->low, k, out->shape, &out->low, e)
               ? e->code
               : LM_OK;
}
