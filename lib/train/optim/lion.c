/* SPDX-License-Identifier: Apache-2.0 */
/* lion.c -- Lion (arXiv:2302.06675): the sign of an average.  Every weight moves by the rate, so rates are 3 to 10
 * times lower than AdamW's, and the decay as many times higher.
 *   p *= 1 - lr wd;  p -= lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9), BETA_2(0.99),
    DECAY(0.1),  { "cautious", 0, 0, 1, "decay only where the step agrees", "off on" },
    { 0 },
};

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid m;
    if (lm_rule_state(u, t, "exp_avg", &m, e))
        return e->code;
    return lm_rule(u, t,
                   "way = sign(beta1*m + (1 - beta1)*g);"
                   "decays = where(cautious, 1 - (way*p < 0), 1);"
                   "p = p - lr*weight_decay*decays*p - lr*way;"
                   "m = beta2*m + (1 - beta2)*g",
                   NAMES(LM_IS("m", m)), e);
}

const lm_optim lm_optim_lion = {
    .name = "lion",
    .rate = 1e-4,
    .about = "the sign of an average of gradients",
    .hyper = hyper,
    .update = update,
};
