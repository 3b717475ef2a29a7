/* SPDX-License-Identifier: Apache-2.0 */
/* adam_mini.c -- Adam-mini (arXiv:2406.16793): one second moment for each block of a tensor.
 *   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) mean of g^2 over the block
 *   p *= 1 - lr wd;  p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
 * Blocks: the rows of a head in q and k, a row of any other matrix, a whole norm; biases have Adam's own moment.
 * As in the authors' code, v has a block for each row where it is a tensor of its own, and for each head where q, k
 * and v are one tensor. */
#include "train/optim/rule.h"

static const lm_hyper hyper[] = { BETA_1(0.9), BETA_2(0.95), EPS(1e-8), DECAY(0.1), { 0 } };

/* Rows of a block; 0: the whole tensor is one. */
static int64_t block_rows(const lm_update_tensor *t)
{
    bool heads = t->part == LM_PART_Q || t->part == LM_PART_K || t->part == LM_PART_QKV;
    if (t->shape.ndim == 1)
        return t->bias ? 1 : 0;
    return heads && t->head_dim > 0 && t->shape.dim[0] % t->head_dim == 0 ? t->head_dim : 1;
}

/* The gradient's squares, and p, with a block in each row. */
static lm_code in_blocks(lm_update *u, const lm_update_tensor *t, int64_t rows,
                         lm_update_tensor *out, lm_err *e)
{
    int64_t count = lm_tensor_count(&t->shape);
    int64_t blocks = rows ? t->shape.dim[0] / rows : 1;
    *out = *t;
    out->shape = lm_shape2(LM_DTYPE_F32, blocks, count / blocks);
    return lm_rule_part(u, t->param, 0, out->shape, &out->param, e) ||
                   lm_rule_part(u, t->grad, 0, out->shape, &out->grad, e) ||
                   lm_rule_part(u, t->low, 0, out->shape, &out->low, e)
               ? e->code
               : LM_OK;
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    static const char step[] = "m = beta1*m + (1 - beta1)*g;"
                               "p = p*(1 - lr*weight_decay) - lr/bc1 * m / (sqrt(v/bc2) + eps)";
    lm_update_tensor b;
    lm_vid m, m_blocks, v, clean = LM_NONE, mean;
    if (in_blocks(u, t, block_rows(t), &b, e) || lm_rule_state(u, t, "exp_avg", &m, e) ||
        lm_rule_part(u, m, 0, b.shape, &m_blocks, e) ||
        lm_update_state(u, t, "exp_avg_sq", lm_shape2(LM_DTYPE_F32, b.shape.dim[0], 1), &v, e) ||
        lm_rule(u, &b, "clean = g", NAMES(LM_MAKES("clean", &clean)), e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ROW, true, clean, &mean, e) ||
        lm_rule(u, &b, "v = beta2*v + (1 - beta2)*mean", NAMES(LM_IS("v", v), LM_IS("mean", mean)),
                e))
        return e->code;
    return lm_rule(u, &b, step, NAMES(LM_IS("m", m_blocks), LM_IS("v", v)), e);
}

const lm_optim lm_optim_adam_mini = {
    .name = "adam-mini",
    .rate = 3e-4,
    .about = "Adam with one second moment a block",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
