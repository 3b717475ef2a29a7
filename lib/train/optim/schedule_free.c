/* SPDX-License-Identifier: Apache-2.0 */
/* schedule_free.c -- schedule-free AdamW (arXiv:2405.15682): an average in place of a falling rate.  The parameter is y,
 * where gradients are taken; what is evaluated and published is the average x = y + (1 - 1/b1) (z - y).
 *   rate = lr min(1, t/warmup_steps);  top = max(top, rate)
 *   w = t^r top^weight_lr_power;  W += w;  c = w / W
 *   v = b2 v + (1 - b2) g^2;  d = g / (sqrt(v / (1 - b2^t)) + eps) + wd y
 *   y += c (z - y);  y += rate (b1 (1 - c) - 1) d;  z -= rate d
 * As in schedulefree 1.4; give it a constant schedule. */
#include <math.h>
#include <stdio.h>

#include "train/optim/rule.h"

enum { BETA1, BETA2, EPS_, DECAY_, WARMUP, POWER, RATE_POWER };

static const lm_hyper hyper[] = {
    [BETA1] = { "beta1", 0.9, 1e-3, 0.9999999, "between the average and its lead", NULL },
    [BETA2] = BETA_2(0.999),
    [EPS_] = EPS(1e-8),
    [DECAY_] = DECAY(0),
    [WARMUP] = { "warmup_steps", 0, 0, 1e9, "steps of a rising rate", NULL },
    [POWER] = { "r", 0, 0, 100, "power of the step in the average's weights", NULL },
    [RATE_POWER] = { "weight_lr_power", 2, 0, 4, "power of the rate in them", LM_WHOLE },
    { 0 },
};

static const char *const numbers_are[] = { "rate", "of_step", "bc2" };

static void numbers(const double *h, double lr, int64_t t, double *out)
{
    double step = (double)(t + 1);
    double risen = h[WARMUP] > 0 ? fmin(1, step / h[WARMUP]) : 1;
    out[0] = lr * risen;
    out[1] = pow(step, h[POWER]);
    out[2] = 1 - pow(h[BETA2], step);
}

/* The share of this step in the average. */
static lm_code share(lm_update *u, const lm_update_tensor *t, lm_vid *out, lm_err *e)
{
    static const char *const power[] = { "1", "top", "top*top", "top*top*top", "top*top*top*top" };
    lm_vid top, weights;
    char text[200];
    *out = LM_NONE;
    snprintf(text, sizeof text,
             "top = max(top, rate);"
             "w = of_step * %s;"
             "weights = weights + w;"
             "c = where(weights, w/weights, 0)",
             power[(int)lm_update_hyper(u, "weight_lr_power")]);
    return lm_rule_number(u, t, "lr_max", &top, e) ||
                   lm_rule_number(u, t, "weight_sum", &weights, e) ||
                   lm_rule(u, t, text,
                           NAMES(LM_IS("top", top), LM_IS("weights", weights), LM_MAKES("c", out)),
                           e)
               ? e->code
               : LM_OK;
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid z, v, c;
    if (lm_rule_state(u, t, "z", &z, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e))
        return e->code;
    lm_update_at_start(u);
    if (lm_rule(u, t, "z = p", NAMES(LM_IS("z", z)), e))
        return e->code;
    lm_update_always(u);
    if (share(u, t, &c, e) || lm_rule(u, t,
                                      "v = beta2*v + (1 - beta2)*g*g;"
                                      "d = g / (sqrt(v/bc2) + eps) + weight_decay*p;"
                                      "p = p + c*(z - p) + rate*(beta1*(1 - c) - 1)*d;"
                                      "z = z - rate*d",
                                      NAMES(LM_IS("z", z), LM_IS("v", v), LM_IS("c", c)), e))
        return e->code;
    lm_update_to_show(u);
    return lm_rule(u, t, "p = p + (1 - 1/beta1)*(z - p)", NAMES(LM_IS("z", z)), e);
}

const lm_optim lm_optim_schedule_free = {
    .name = "schedule-free",
    .rate = 2.5e-3,
    .about = "AdamW with an average for a schedule",
    .averages = true,
    .hyper = hyper,
    .n_numbers = 3,
    .numbers = numbers,
    .number = numbers_are,
    .update = update,
};
