/* SPDX-License-Identifier: Apache-2.0 */
/* adalora.c -- see adalora.h. */
#include "train/adalora.h"

#include <string.h>

#include "base/mem.h"
#include "train/optim/rule.h"

const char lm_ada_sensitivity[] = "sensitivity", lm_ada_uncertainty[] = "uncertainty",
           lm_ada_importance[] = "importance", lm_ada_orthogonality[] = "orthogonality",
           lm_ada_kept[] = "kept";

char lm_ada_kind(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && !strncmp(dot, ".lora_", 6) && strlen(dot) == 7 ? dot[6] : 0;
}

static lm_code append_importance(const lm_ada_nodes *a, lm_update *u, const lm_update_tensor *t,
                                 char kind, lm_err *e)
{
    lm_vid s, d, i, product = LM_NONE, mean = LM_NONE;
    lm_reduce_over over = kind == 'A' ? LM_OVER_ROW : LM_OVER_COLUMN;
    if (lm_rule_state(u, t, lm_ada_sensitivity, &s, e) ||
        lm_rule_state(u, t, lm_ada_uncertainty, &d, e) ||
        (kind == 'B' ? lm_rule_columns : lm_rule_rows)(u, t, lm_ada_importance, &i, e) ||
        lm_rule(u, t,
                "now = abs(p*g);"
                "s = where(open, keep1*s + (1 - keep1)*now, s);"
                "d = where(open, keep2*d + (1 - keep2)*abs(now - s), d);"
                "y = s*d",
                NAMES(LM_IS("s", s), LM_IS("d", d), LM_IS("open", lm_update_beside_numbers(u)),
                      LM_CONSTANT("keep1", a->beta1), LM_CONSTANT("keep2", a->beta2),
                      LM_MAKES("y", &product)),
                e))
        return e->code;
    if (kind != 'E' && lm_rule_reduce(u, LM_REDUCE_SUM, over, true, product, &mean, e))
        return e->code;
    return lm_rule(u, t, "i = y", NAMES(LM_IS("i", i), LM_IS("y", kind == 'E' ? product : mean)),
                   e);
}

static lm_code identity(lm_update *u, int64_t n, lm_vid *out, lm_err *e)
{
    float *one = NULL;
    if (lm_alloc_n(&one, (size_t)(n * n), sizeof *one, "an identity", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        one[i * n + i] = 1;
    lm_code rc = lm_update_const(u, lm_shape2(LM_DTYPE_F32, n, n), one, out, e);
    lm_free(one);
    return rc;
}

/* With D = A A' - 1 the gradient of |D| is 2 D A / |D|; of B' B - 1 it is 2 B D / |D|. */
static lm_code append_penalty(const lm_ada_nodes *a, lm_update *u, const lm_update_tensor *t,
                              bool of_a, lm_err *e)
{
    lm_vid one, product, d = LM_NONE, squares, x, o, p = t->param;
    lm_update_to_penalise(u);
    if (identity(u, t->shape.dim[of_a ? 0 : 1], &one, e) ||
        (of_a ? lm_rule_abt : lm_rule_atb)(u, p, p, &product, e) ||
        lm_rule(u, t, "d = c - i", NAMES(LM_IS("c", product), LM_IS("i", one), LM_MAKES("d", &d)),
                e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, false, d, &squares, e) ||
        lm_rule_ab(u, of_a ? d : p, of_a ? p : d, &x, e) ||
        lm_rule(u, t, "grad = grad + where(f, k / sqrt(max(f, 1e-37)), 0) * x",
                NAMES(LM_IS("f", squares), LM_IS("x", x),
                      LM_CONSTANT("k", 2 * a->weight / a->matrices)),
                e) ||
        lm_rule_number(u, t, lm_ada_orthogonality, &o, e) ||
        lm_rule(u, t, "o = sqrt(f)", NAMES(LM_IS("o", o), LM_IS("f", squares)), e))
        return e->code;
    lm_update_always(u);
    return LM_OK;
}

lm_code lm_ada_append(const lm_ada_nodes *a, lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    char kind = lm_ada_kind(t->name);
    lm_vid k;
    if (!kind)
        return LM_OK;
    if (!a->settled && kind == 'E' &&
        (lm_rule_rows(u, t, lm_ada_kept, &k, e) ||
         lm_rule(u, t, "p = where(k < -1.5, 0, p)", NAMES(LM_IS("k", k)), e)))
        return e->code;
    if (!a->settled && append_importance(a, u, t, kind, e))
        return e->code;
    return kind != 'E' && a->weight > 0 ? append_penalty(a, u, t, kind == 'A', e) : LM_OK;
}
