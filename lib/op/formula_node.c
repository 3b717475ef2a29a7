/* SPDX-License-Identifier: Apache-2.0 */
/* formula_node.c -- a formula over values of a graph as a `map` node: its operands, results and shape. */
#include <string.h>

#include "op/formula.h"
#include "op/ops.h"

enum { CONSTANTS = 48 };

static bool is_of_a_word(char x)
{
    return (x >= 'a' && x <= 'z') || (x >= 'A' && x <= 'Z') || (x >= '0' && x <= '9') || x == '_';
}

typedef struct {
    lm_formula f;
    lm_formula_operand operand[LM_MAP_X];
    lm_formula_constant constant[CONSTANTS];
    const char *result[LM_MAP_Y];
    const lm_formula_name *made[LM_MAP_Y];
    lm_vid in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_tensor shape;
} node;

int lm_formula_mentions(const char *text, const char *name)
{
    size_t n = strlen(name);
    int found = 0;
    for (const char *at = text; (at = strstr(at, name)); at += n) {
        bool inside = (at > text && is_of_a_word(at[-1])) || is_of_a_word(at[n]);
        if (inside)
            continue;
        found = found > 1 || at[n + strspn(at + n, " ")] == '=' ? 2 : 1;
    }
    return found;
}

static void widen(lm_tensor *shape, const lm_tensor *x)
{
    if (!shape->ndim || (lm_tensor_count(shape) == 1 && lm_tensor_count(x) > 1))
        *shape = *x;
    else if (lm_tensor_count(x) > 1 && shape->ndim == x->ndim)
        for (int i = 0; i < x->ndim; i++)
            shape->dim[i] = x->dim[i] > shape->dim[i] ? x->dim[i] : shape->dim[i];
}

static lm_code add_name(lm_graph *g, node *n, const char *text, const lm_formula_name *name,
                        lm_err *e)
{
    int how = lm_formula_mentions(text, name->name);
    if (!how)
        return LM_OK;
    if (name->value >= 0) {
        if (n->f.n_operands == LM_MAP_X)
            return lm_fail(e, LM_EBUG, "a formula", NULL, "too many operands in \"%s\"", text);
        n->in[LM_MAP_FIRST_X + n->f.n_operands] = name->value;
        n->operand[n->f.n_operands] =
            (lm_formula_operand){ name->name, n->f.n_operands, &g->value[name->value].t };
        widen(&n->shape, &g->value[name->value].t);
        n->f.n_operands++;
    }
    if (how == 2 && (name->value >= 0 || name->made)) {
        if (n->f.n_results == LM_MAP_Y)
            return lm_fail(e, LM_EBUG, "a formula", NULL, "too many results in \"%s\"", text);
        n->made[n->f.n_results] = name;
        n->result[n->f.n_results++] = name->name;
    } else if (name->value < 0 && n->f.n_constants < CONSTANTS) {
        n->constant[n->f.n_constants++] = (lm_formula_constant){ name->name, name->constant };
    }
    return LM_OK;
}

lm_code lm_formula_append(lm_graph *g, const char *text, const lm_formula_scope *s, lm_err *e)
{
    lm_map_attr attr;
    node n = { .shape = { .ndim = 0 } };
    n.f = (lm_formula){ .text = text,
                        .operand = n.operand,
                        .constant = n.constant,
                        .number = s->number,
                        .n_numbers = s->n_numbers,
                        .result = n.result };
    for (int i = 0; i < LM_MAX_IN; i++)
        n.in[i] = LM_NONE;
    for (int i = 0; i < LM_MAX_OUT; i++)
        n.out[i] = LM_SKIP;
    n.in[0] = s->gate;
    n.in[1] = s->numbers;
    for (int i = 0; i < s->n_names; i++)
        if (add_name(g, &n, text, &s->name[i], e))
            return e->code;
    for (int i = 0; i < n.f.n_results; i++)
        for (int k = 0; k < n.f.n_operands; k++)
            if (strcmp(n.result[i], n.operand[k].name) &&
                lm_graph_share(g, n.made[i]->value, n.in[LM_MAP_FIRST_X + k]))
                return lm_fail(e, LM_EBUG, "a formula", NULL, "%s lies over %s in \"%.120s\"",
                               n.result[i], n.operand[k].name, text);
    /* Values of the graph move as it grows: compiled before any is made. */
    if (lm_formula_compile(&n.f, &attr, e))
        return e->code;
    for (int i = 0; i < n.f.n_results; i++) {
        const lm_formula_name *name = n.made[i];
        n.shape.dtype = name->made_type;
        n.out[i] = name->value;
        if (name->made && lm_graph_value(g, LM_ROLE_ACT, n.shape, NULL, &n.out[i], e))
            return e->code;
    }
    if (lm_graph_append(g, &lm_op_map, &attr, n.in, n.out, e))
        return e->code;
    for (int i = 0; i < n.f.n_results; i++)
        if (n.made[i]->made)
            *n.made[i]->made = n.out[i];
    return LM_OK;
}
