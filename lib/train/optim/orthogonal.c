/* SPDX-License-Identifier: Apache-2.0 */
/* orthogonal.c -- the nearest orthonormal matrix by products alone (Newton and Schulz): every round is an odd
 * polynomial of the singular values that drives them towards 1.
 *
 * Muon's coefficients are the same in each round, steep at zero, and end between 0.7 and 1.2.  Those of the
 * Polar Express (arXiv:2505.16932; five rounds, safety factor 0.02, cushion 2) are each the best for what
 * the rounds before have left; further rounds repeat the last. */
#include "train/optim/rule.h"

typedef struct {
    double a, b, c;
} quintic;

static quintic coefficients(bool polar, int round)
{
    static const quintic muon = { 3.4445, -4.7750, 2.0315 };
    static const quintic express[] = {
        { 8.156554524902461, -22.48329292557795, 15.878769915207462 },
        { 4.0429299351667245, -2.808917465908704, 0.5000178451051299 },
        { 3.8916678022926563, -2.772484153217685, 0.5060648178503389 },
        { 3.285753657755658, -2.3681294933425394, 0.46449024233003117 },
        { 2.3465413258596377, -1.7097828382687081, 0.42323551169305323 },
    };
    return polar ? express[round < 4 ? round : 4] : muon;
}

/* On the side where X X' or X' X is smaller. */
static lm_code one_round(lm_update *u, const lm_update_tensor *t, quintic q, lm_dtype type,
                         lm_vid *x, lm_err *e)
{
    bool tall = t->shape.dim[0] > t->shape.dim[1];
    lm_vid a, square, b = LM_NONE, bx, next = LM_NONE;
    if (tall ? lm_rule_atb(u, *x, *x, &a, e) : lm_rule_abt(u, *x, *x, &a, e))
        return e->code;
    if (tall && type == LM_DTYPE_BF16) {
        lm_vid low = LM_NONE;
        if (lm_rule(u, t, "low_a = a", NAMES(LM_IS("a", a), LM_MAKES_AS("low_a", &low, type)), e))
            return e->code;
        a = low;
    }
    if (lm_rule_abt(u, a, a, &square, e) ||
        lm_rule(u, t, "out = b*x + c*square",
                NAMES(LM_IS("x", a), LM_IS("square", square), LM_CONSTANT("b", q.b),
                      LM_CONSTANT("c", q.c), LM_MAKES_AS("out", &b, type)),
                e))
        return e->code;
    if (tall ? lm_rule_ab(u, *x, b, &bx, e) : lm_rule_ab(u, b, *x, &bx, e))
        return e->code;
    if (lm_rule(u, t, "out = a*x + bx",
                NAMES(LM_IS("x", *x), LM_IS("bx", bx), LM_CONSTANT("a", q.a),
                      LM_MAKES_AS("out", &next, type)),
                e))
        return e->code;
    *x = next;
    return LM_OK;
}

lm_code lm_rule_orthogonal(lm_update *u, const lm_update_tensor *t, const lm_orthogonal *o,
                           lm_vid x, lm_vid *out, lm_err *e)
{
    lm_dtype type = o->bf16 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    lm_vid square;
    *out = LM_NONE;
    if (lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, false, x, &square, e) ||
        lm_rule(u, t, "out = x / (sqrt(square)*room + 1e-7)",
                NAMES(LM_IS("x", x), LM_IS("square", square),
                      LM_CONSTANT("room", o->polar ? 1.02 : 1), LM_MAKES_AS("out", out, type)),
                e))
        return e->code;
    for (int i = 0; i < o->steps; i++)
        if (one_round(u, t, coefficients(o->polar, i), type, out, e))
            return e->code;
    return LM_OK;
}
