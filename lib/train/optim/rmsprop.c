/* SPDX-License-Identifier: Apache-2.0 */
/* rmsprop.c -- RMSprop (Tieleman and Hinton 2012), in the form of PyTorch: eps outside the root, states from zero.
 *   g += wd p;  v = a v + (1 - a) g^2;  centered: m = a m + (1 - a) g, v' = max(v - m^2, 0)
 *   d = g / (sqrt(v') + eps);  momentum: buf = mu buf + d, d = buf;  p -= lr d */
#include <stdio.h>

#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    { "alpha", 0.99, 0, 0.9999999, "second moment", NULL },
    EPS(1e-8),
    { "momentum", 0, 0, 0.9999999, "0: none, and no state", NULL },
    { "centered", 0, 0, 1, "divide by the deviation", "off on" },
    DECAY(0),
    { 0 },
};

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    bool centered = lm_update_hyper(u, "centered") != 0;
    bool momentum = lm_update_hyper(u, "momentum") > 0;
    lm_vid v, m = LM_NONE, buf = LM_NONE;
    char text[400];
    if (lm_rule_state(u, t, "square_avg", &v, e) ||
        (centered && lm_rule_state(u, t, "grad_avg", &m, e)) ||
        (momentum && lm_rule_state(u, t, "momentum_buffer", &buf, e)))
        return e->code;
    snprintf(text, sizeof text,
             "d = g + weight_decay*p;"
             "v = alpha*v + (1 - alpha)*d*d; %s"
             "d = d / (sqrt(%s) + eps); %s"
             "p = p - lr*d",
             centered ? "m = alpha*m + (1 - alpha)*d;" : "", centered ? "max(v - m*m, 0)" : "v",
             momentum ? "buf = momentum*buf + d; d = buf;" : "");
    return lm_rule(u, t, text, NAMES(LM_IS("v", v), LM_IS("m", m), LM_IS("buf", buf)), e);
}

const lm_optim lm_optim_rmsprop = {
    .name = "rmsprop",
    .rate = 1e-3,
    .about = "gradients over the root of their mean square",
    .hyper = hyper,
    .update = update,
};
