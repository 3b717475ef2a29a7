/* SPDX-License-Identifier: Apache-2.0 */
/* average.c -- the average of a parameter over its last steps (EMA), beside any rule; evaluations and checkpoints show
 * it in the parameter's place.
 *   e = d e + (1 - d) p after each step, d = min(ema, (1 + t) / (10 + t)): of few steps an average of few */
#include <math.h>

#include "train/optim/rule.h"

double lm_rule_average_keeps(double ema, int64_t t)
{
    return fmin(ema, (1 + (double)(t + 1)) / (10 + (double)(t + 1)));
}

lm_code lm_rule_average(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    static const char *const number[] = { "d" };
    lm_vid average;
    if (lm_rule_state(u, t, "ema", &average, e))
        return e->code;
    const lm_formula_name names[] = { LM_IS("p", t->param), LM_IS("e", average) };
    lm_formula_scope s = { .name = names,
                           .n_names = 2,
                           .number = number,
                           .n_numbers = 1,
                           .numbers = lm_update_average_keeps(u),
                           .gate = lm_update_scale(u) };
    if (lm_formula_append(lm_update_graph(u), "e = d*e + (1 - d)*p", &s, e))
        return e->code;
    s.gate = LM_NONE;
    lm_update_at_start(u);
    if (lm_formula_append(lm_update_graph(u), "e = p", &s, e))
        return e->code;
    lm_update_to_show(u);
    return lm_formula_append(lm_update_graph(u), "p = e", &s, e);
}
