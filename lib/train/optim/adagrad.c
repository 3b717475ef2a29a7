/* SPDX-License-Identifier: Apache-2.0 */
/* adagrad.c -- Adagrad (Duchi et al. 2011): rates that fall with the sum of squares of all gradients so far.
 *   g += wd p;  s += g^2;  p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps) */
#include "train/optim/rule.h"

enum { LR_DECAY, EPS_, DECAY_ };

static const lm_hyper hyper[] = {
    [LR_DECAY] = { "lr_decay", 0, 0, 1, "of the rate, by steps", NULL },
    [EPS_] = EPS(1e-10),
    [DECAY_] = DECAY(0),
    { 0 },
};

static void numbers(const double *h, double lr, int64_t t, double *out)
{
    out[0] = lr / (1 + (double)t * h[LR_DECAY]);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid s;
    if (lm_rule_state(u, t, "sum", &s, e))
        return e->code;
    return lm_rule(u, t,
                   "d = g + weight_decay*p;"
                   "s = s + d*d;"
                   "p = p - lr*d / (sqrt(s) + eps)",
                   NAMES(LM_IS("s", s)), e);
}

const lm_optim lm_optim_adagrad = {
    .name = "adagrad",
    .rate = 1e-2,
    .about = "rates by the sum of all squared gradients",
    .hyper = hyper,
    .n_numbers = 1,
    .numbers = numbers,
    .update = update,
};
