/* SPDX-License-Identifier: Apache-2.0 */
/* amsgrad.c -- Adam whose second moment never falls (Reddi et al. 2018, arXiv:1904.09237), in the form of
 * frameworks: the largest v is kept before its bias is corrected. */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = { BETA_1(0.9), BETA_2(0.999), EPS(1e-8), DECAY(0), { 0 } };

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid m, v, most;
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e) ||
        lm_rule_state(u, t, "max_exp_avg_sq", &most, e))
        return e->code;
    return lm_rule(u, t,
                   "d = g + weight_decay*p;"
                   "m = beta1*m + (1 - beta1)*d;"
                   "v = beta2*v + (1 - beta2)*d*d;"
                   "most = max(most, v);"
                   "p = p - lr/bc1 * m / (sqrt(most/bc2) + eps)",
                   NAMES(LM_IS("m", m), LM_IS("v", v), LM_IS("most", most)), e);
}

const lm_optim lm_optim_amsgrad = {
    .name = "amsgrad",
    .rate = 3e-4,
    .about = "Adam whose second moment never falls",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
