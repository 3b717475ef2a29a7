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
    return !lm_part_is_embedding(t->part) &&
           (double)lm_tensor_count(&t->shape) >= lm_update_hyper(u, "min_8bit_size");
}

/* Moments that are in F32 for a moment stay in the caches: a piece of a tensor at a time, as long as the list of
 * nodes does not become long for that. */
enum { PIECE = 1 << 18, PIECES = 16 };

static int64_t piece_of(int64_t count)
{
    int64_t n = (count + PIECES - 1) / PIECES;
    return n <= PIECE ? PIECE : (n + LM_CODES_BLOCK - 1) / LM_CODES_BLOCK * LM_CODES_BLOCK;
}

static lm_code step(lm_update *u, const lm_update_tensor *t, lm_vid m, lm_vid v, lm_err *e)
{
    return lm_rule(u, t,
                   "m = beta1*m + (1 - beta1)*g;"
                   "v = beta2*v + (1 - beta2)*g*g;"
                   "p = p*(1 - lr*weight_decay) - lr/bc1 * m / (sqrt(v/bc2) + eps)",
                   NAMES(LM_IS("m", m), LM_IS("v", v)), e);
}

/* Elements [at, at + n) of a tensor. */
static lm_code span_of(lm_update *u, const lm_update_tensor *t, int64_t at, int64_t n,
                       lm_update_tensor *out, lm_err *e)
{
    lm_graph *g = lm_update_graph(u);
    *out = *t;
    out->shape = lm_shape1(LM_DTYPE_F32, n);
    return lm_graph_view(g, t->param, at, out->shape, NULL, &out->param, e) ||
                   lm_graph_view(g, t->grad, at, out->shape, NULL, &out->grad, e) ||
                   (t->low >= 0 && lm_graph_view(g, t->low, at, out->shape, NULL, &out->low, e))
               ? e->code
               : LM_OK;
}

static lm_code update_coded(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    int64_t count = lm_tensor_count(&t->shape), most = piece_of(count);
    lm_rule_moments all, x;
    if (lm_rule_moments_make(u, t, t->shape, true, &all, e))
        return e->code;
    for (int64_t at = 0; at < count; at += most) {
        int64_t n = count - at < most ? count - at : most;
        lm_update_tensor span;
        if (span_of(u, t, at, n, &span, e) || lm_rule_moments_span(u, &all, at, n, &x, e) ||
            lm_rule_moments_read(u, &x, e) || step(u, &span, x.m, x.v, e) ||
            lm_rule_moments_write(u, &x, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_rule_moments x;
    if (has_codes(u, t))
        return update_coded(u, t, e);
    return lm_rule_moments_make(u, t, t->shape, false, &x, e) || step(u, t, x.m, x.v, e) ? e->code
                                                                                         : LM_OK;
}

const lm_optim lm_optim_adamw8bit = {
    .name = "adamw8bit",
    .rate = 3e-4,
    .about = "AdamW with states of 8 bits",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
