/* SPDX-License-Identifier: Apache-2.0 */
/* sm3.c -- SM3-II (arXiv:1901.11150): Adagrad whose sums are kept for rows and for columns alone.
 *   v = min(R, C) + g^2;  d = g / sqrt(v + 1e-30);  R = max over columns of v, C = max over rows of v
 *   m = mu m + (1 - mu) d;  p -= lr m
 * Vectors: v = s + g^2 = s, plain Adagrad. */
#include <stdio.h>

#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    { "momentum", 0.9, 0, 0.9999999, "0: none, and no state", NULL },
    DECAY(0),
    { 0 },
};

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    bool matrix = t->shape.ndim > 1, moment = lm_update_hyper(u, "momentum") > 0;
    lm_vid m = LM_NONE, s = LM_NONE, rows = LM_NONE, columns = LM_NONE, v = LM_NONE, top[2];
    char text[400];
    if ((moment && lm_rule_state(u, t, "momentum_buffer", &m, e)) ||
        (matrix && (lm_rule_rows(u, t, "accumulator_0", &rows, e) ||
                    lm_rule_columns(u, t, "accumulator_1", &columns, e))) ||
        (!matrix && lm_rule_state(u, t, "accumulator_0", &s, e)))
        return e->code;
    snprintf(text, sizeof text,
             "d = g + weight_decay*p; %s"
             "d = d / sqrt(v + 1e-30); %s"
             "p = p - lr*d",
             matrix ? "v = min(r, c) + d*d;" : "s = s + d*d; v = s;",
             moment ? "m = momentum*m + (1 - momentum)*d; d = m;" : "");
    if (lm_rule(u, t, text,
                NAMES(LM_IS("m", m), LM_IS("s", s), LM_IS("r", rows), LM_IS("c", columns),
                      matrix ? (lm_formula_name)LM_MAKES("v", &v)
                             : (lm_formula_name)LM_CONSTANT("unused", 0)),
                e) ||
        !matrix)
        return e->code;
    return lm_rule_reduce(u, LM_REDUCE_MAX, LM_OVER_ROW, false, v, &top[0], e) ||
                   lm_rule_reduce(u, LM_REDUCE_MAX, LM_OVER_COLUMN, false, v, &top[1], e) ||
                   lm_rule(u, t, "r = top", NAMES(LM_IS("r", rows), LM_IS("top", top[0])), e) ||
                   lm_rule(u, t, "c = top", NAMES(LM_IS("c", columns), LM_IS("top", top[1])), e)
               ? e->code
               : LM_OK;
}

const lm_optim lm_optim_sm3 = {
    .name = "sm3",
    .rate = 0.1,
    .about = "Adagrad by rows and columns",
    .hyper = hyper,
    .update = update,
};
