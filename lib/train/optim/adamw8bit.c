/* SPDX-License-Identifier: Apache-2.0 */
/* adamw8bit.c -- AdamW with states of 8 bits (arXiv:2110.02861): each block of 256 numbers has codes of the dynamic
 * map and the largest magnitude (kernels/codes.h).  States are read, the step is that of adamw.c in F32, and they are
 * written as codes again; the step sees them before that.
 * Embeddings and tensors of fewer than min_8bit_size elements have states in F32. */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9),
    BETA_2(0.95),
    EPS(1e-8),
    { "min_8bit_size", 4096, 0, 1e15, "elements from which on states have 8 bits", LM_WHOLE },
    DECAY(0.1),
    { 0 },
};

static bool has_codes(const lm_update *u, const lm_update_tensor *t)
{
    return t->part != LM_PART_EMBED && t->part != LM_PART_POSITION &&
           (double)lm_tensor_count(&t->shape) >= lm_update_hyper(u, "min_8bit_size");
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_rule_moments x;
    return lm_rule_moments_read(u, t, t->shape, has_codes(u, t), &x, e) ||
                   lm_rule(u, t,
                           "m = beta1*m + (1 - beta1)*g;"
                           "v = beta2*v + (1 - beta2)*g*g;"
                           "p = p*(1 - lr*weight_decay) - lr/bc1 * m / (sqrt(v/bc2) + eps)",
                           NAMES(LM_IS("m", x.m), LM_IS("v", x.v)), e) ||
                   lm_rule_moments_write(u, &x, e)
               ? e->code
               : LM_OK;
}

const lm_optim lm_optim_adamw8bit = {
    .name = "adamw8bit",
    .about = "AdamW with states of 8 bits",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
