/* SPDX-License-Identifier: Apache-2.0 */
/* lamb.c -- LAMB (arXiv:1904.00962): steps of Adam whose length is a share of the tensor's own.
 *   m, v as Adam's, with their biases corrected;  u = m / (sqrt(v) + eps) + wd p
 *   trust = clamp(|p| / |u|, 0.01, 10) over the whole tensor, 1 where either is 0;  p -= lr trust u
 * Vectors take neither decay nor trust. */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9),
    BETA_2(0.999),
    EPS(1e-6),
    DECAY(0.01),
    { "bias_correction", 1, 0, 1, "of the moments", "off on" },
    { 0 },
};

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    static const char moments[] =
        "m = beta1*m + (1 - beta1)*g;"
        "v = beta2*v + (1 - beta2)*g*g;"
        "c1 = where(bias_correction, bc1, 1); c2 = where(bias_correction, bc2, 1);"
        "way = m/c1 / (sqrt(v/c2) + eps) + weight_decay*p";
    lm_vid m, v, way = LM_NONE, size, own;
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e) ||
        lm_rule(u, t, moments, NAMES(LM_IS("m", m), LM_IS("v", v), LM_MAKES("way", &way)), e))
        return e->code;
    if (t->shape.ndim == 1)
        return lm_rule(u, t, "p = p - lr*way", NAMES(LM_IS("way", way)), e);
    if (lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, false, way, &size, e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, false, t->param, &own, e))
        return e->code;
    return lm_rule(u, t,
                   "trust = where(own*size, max(0.01, min(10, sqrt(own/size))), 1);"
                   "p = p - lr*trust*way",
                   NAMES(LM_IS("way", way), LM_IS("own", own), LM_IS("size", size)), e);
}

const lm_optim lm_optim_lamb = {
    .name = "lamb",
    .rate = 2e-3,
    .about = "Adam with steps in proportion to tensors",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
