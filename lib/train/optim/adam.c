/* SPDX-License-Identifier: Apache-2.0 */
/* adam.c -- Adam (arXiv:1412.6980) with L2 decay in the gradient, as frameworks have it; AdamW is adamw.c.
 *   g += wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = { BETA_1(0.9), BETA_2(0.999), EPS(1e-8), DECAY(0), { 0 } };

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid m, v;
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e))
        return e->code;
    return lm_rule(u, t,
                   "d = g + weight_decay*p;"
                   "m = beta1*m + (1 - beta1)*d;"
                   "v = beta2*v + (1 - beta2)*d*d;"
                   "p = p - lr/bc1 * m / (sqrt(v/bc2) + eps)",
                   NAMES(LM_IS("m", m), LM_IS("v", v)), e);
}

const lm_optim lm_optim_adam = {
    .name = "adam",
    .rate = 3e-4,
    .about = "Adam with L2 decay in the gradient",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
