/* SPDX-License-Identifier: Apache-2.0 */
/* adamw.c -- AdamW (arXiv:1711.05101, algorithm 2), with the full rate multiplying the decay as frameworks do:
 *   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) */
#include "kernels/optim.h"
#include "op/ops.h"
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9),
    BETA_2(0.95),
    EPS(1e-8),
    DECAY(0.1),
    { "cautious", 0, 0, 1, "decay only where the step agrees", "off on" },
    { 0 },
};

/* Decay only where the step and the weight agree in sign (arXiv:2510.12402). */
static lm_code update_cautious(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid m, v;
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e))
        return e->code;
    return lm_rule(
        u, t,
        "m = beta1*m + (1 - beta1)*g;"
        "v = beta2*v + (1 - beta2)*g*g;"
        "p = p - where(m*p < 0, 0, lr*weight_decay)*p - lr/bc1 * m / (sqrt(v/bc2) + eps)",
        NAMES(LM_IS("m", m), LM_IS("v", v)), e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    if (lm_update_hyper(u, "cautious") != 0)
        return update_cautious(u, t, e);
    lm_vid in[4] = { t->grad, lm_update_sumsq(u), lm_update_watch(u), lm_update_numbers(u) };
    lm_vid copy = t->panels ? t->packed : t->low;
    lm_vid out[4] = { t->param, LM_NONE, LM_NONE, copy >= 0 ? copy : LM_SKIP };
    lm_adamw_attr a = { .beta1 = lm_update_hyper(u, "beta1"),
                        .beta2 = lm_update_hyper(u, "beta2"),
                        .eps = lm_update_hyper(u, "eps"),
                        .weight_decay = t->decay ? lm_update_hyper(u, "weight_decay") : 0,
                        .clip_norm = lm_update_clip_norm(u),
                        .clip_value = lm_update_clip_value(u) };
    if (lm_update_state(u, t, "exp_avg", t->shape, &out[1], e) ||
        lm_update_state(u, t, "exp_avg_sq", t->shape, &out[2], e))
        return e->code;
    return lm_graph_append(lm_update_graph(u), &lm_op_adamw, &a, in, out, e);
}

const lm_optim lm_optim_adamw = {
    .name = "adamw",
    .rate = 3e-4,
    .about = "Adam with decoupled weight decay",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
