/* SPDX-License-Identifier: Apache-2.0 */
/* came.c -- CAME (arXiv:2307.02047): Adafactor guided by how far its steps are from their average.
 *   U = g^2 + eps1;  R, C: averages (beta2) of U over columns and rows;  d = g / sqrt(R/mean(R)) / sqrt(C)
 *   d /= max(1, rms(d)/clip_threshold);  m = b1 m + (1 - b1) d
 *   res = (d - m)^2 + eps2;  Rr, Cr: averages (beta3) of res;  s = m / sqrt(Rr/mean(Rr)) / sqrt(Cr)
 *   p *= 1 - lr wd;  p -= lr s
 * Vectors: d = g / sqrt(v), s = m.  Averages begin at zero without correction, so warm up the rate. */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9),
    BETA_2(0.999),
    { "beta3", 0.9999, 0, 0.9999999, "of the distance from the average", NULL },
    { "eps1", 1e-30, 0, 1, "added to squares", NULL },
    { "eps2", 1e-16, 0, 1, "added to squares of distances", NULL },
    { "clip_threshold", 1, 1e-3, 1e9, "of the root mean square of a step", NULL },
    DECAY(0.1),
    { 0 },
};

/* x over the root of the moment of `square`, kept as rows and columns. */
static lm_code divided(lm_update *u, const lm_update_tensor *t, double beta, const char *row,
                       const char *column, lm_vid square, lm_vid x, lm_vid *out, lm_err *e)
{
    lm_vid rows, columns, of_rows, of_columns, mean;
    *out = LM_NONE;
    if (lm_rule_rows(u, t, row, &rows, e) || lm_rule_columns(u, t, column, &columns, e) ||
        lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_ROW, true, square, &of_rows, e) ||
        lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_COLUMN, true, square, &of_columns, e) ||
        lm_rule(u, t, "r = b*r + (1 - b)*x",
                NAMES(LM_IS("r", rows), LM_IS("x", of_rows), LM_CONSTANT("b", beta)), e) ||
        lm_rule(u, t, "c = b*c + (1 - b)*x",
                NAMES(LM_IS("c", columns), LM_IS("x", of_columns), LM_CONSTANT("b", beta)), e) ||
        lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_ALL, true, rows, &mean, e))
        return e->code;
    return lm_rule(u, t, "d = x / sqrt(r/mean) / sqrt(c)",
                   NAMES(LM_IS("r", rows), LM_IS("c", columns), LM_IS("mean", mean), LM_IS("x", x),
                         LM_MAKES("d", out)),
                   e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    bool matrix = t->shape.ndim > 1;
    lm_vid m, v, clean = LM_NONE, square = LM_NONE, d = LM_NONE, size, way;
    if (lm_rule_state(u, t, "exp_avg", &m, e))
        return e->code;
    if (matrix ? lm_rule(u, t, "clean = g; square = g*g + eps1",
                         NAMES(LM_MAKES("clean", &clean), LM_MAKES("square", &square)), e) ||
                     divided(u, t, lm_update_hyper(u, "beta2"), "exp_avg_sq_row", "exp_avg_sq_col",
                             square, clean, &d, e)
               : lm_rule_state(u, t, "exp_avg_sq", &v, e) ||
                     lm_rule(u, t, "v = beta2*v + (1 - beta2)*(g*g + eps1); d = g / sqrt(v)",
                             NAMES(LM_IS("v", v), LM_MAKES("d", &d)), e))
        return e->code;
    if (lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, true, d, &size, e) ||
        lm_rule(
            u, t,
            "step = d / max(1, sqrt(size)/clip_threshold);"
            "m = beta1*m + (1 - beta1)*step;"
            "square = (step - m)*(step - m) + eps2",
            NAMES(LM_IS("m", m), LM_IS("d", d), LM_IS("size", size), LM_MAKES("square", &square)),
            e))
        return e->code;
    way = m;
    if (matrix && divided(u, t, lm_update_hyper(u, "beta3"), "exp_avg_res_row", "exp_avg_res_col",
                          square, m, &way, e))
        return e->code;
    return lm_rule(u, t, "p = p*(1 - lr*weight_decay) - lr*way", NAMES(LM_IS("way", way)), e);
}

const lm_optim lm_optim_came = {
    .name = "came",
    .rate = 2e-4,
    .about = "Adafactor guided by confidence",
    .hyper = hyper,
    .update = update,
};
