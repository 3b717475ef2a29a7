/* SPDX-License-Identifier: Apache-2.0 */
/* normuon.c -- NorMuon (arXiv:2510.05491): Muon whose steps are levelled along the longer side, by the second moment
 * of what is orthogonal, and keep their norm.
 *   U = orthogonal(nesterov momentum);  v = b2 v + (1 - b2) mean(U^2) over the shorter side
 *   W = U / sqrt(v);  W *= |U| / |W|;  p *= 1 - lr wd;  p -= lr sqrt(max(1, rows/cols)) W
 * As the public speedruns have it: coefficients of the Polar Express, cautious decay. */
#include <math.h>

#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    ADAMW_FOR_OTHERS,
    { "momentum", 0.95, 0, 0.9999999, "of hidden matrices", NULL },
    BETA_2(0.95),
    { "ns", 1, 0, 1, "coefficients of the rounds", "quintic polar" },
    { "ns_steps", 5, 1, 20, "rounds of orthogonalisation", LM_WHOLE },
    { "bf16", 1, 0, 1, "products of the rounds in BF16", "off on" },
    DECAY(0.01),
    { "cautious", 1, 0, 1, "decay only where the step agrees", "off on" },
    { 0 },
};

static lm_code update_matrix(lm_update *u, const lm_update_tensor *t, lm_vid m, lm_vid v, lm_err *e)
{
    lm_orthogonal o = { .steps = (int)lm_update_hyper(u, "ns_steps"),
                        .polar = lm_update_hyper(u, "ns") != 0,
                        .bf16 = lm_update_hyper(u, "bf16") != 0 };
    int64_t rows = t->shape.dim[0], cols = t->shape.dim[1];
    lm_vid ahead = LM_NONE, way, mean, level = LM_NONE, before, after;
    if (lm_rule(u, t,
                "m = m + (1 - momentum)*(g - m);"
                "ahead = (1 - momentum)*g + momentum*m",
                NAMES(LM_IS("m", m), LM_MAKES("ahead", &ahead)), e) ||
        lm_rule_orthogonal(u, t, &o, ahead, &way, e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, rows >= cols ? LM_OVER_ROW : LM_OVER_COLUMN, true, way,
                       &mean, e) ||
        lm_rule(u, t, "v = beta2*v + (1 - beta2)*mean", NAMES(LM_IS("v", v), LM_IS("mean", mean)),
                e) ||
        lm_rule(u, t, "level = way / sqrt(max(v, 1e-10))",
                NAMES(LM_IS("v", v), LM_IS("way", way), LM_MAKES("level", &level)), e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, false, way, &before, e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, false, level, &after, e))
        return e->code;
    return lm_rule(u, t,
                   "size = shape * sqrt(before) / max(sqrt(after), 1e-10);"
                   "decays = where(cautious, 1 - (level*p < 0), 1);"
                   "p = p - lr*weight_decay*decays*p - lr*size*level",
                   NAMES(LM_IS("level", level), LM_IS("before", before), LM_IS("after", after),
                         LM_CONSTANT("shape", sqrt(fmax(1, (double)rows / (double)cols)))),
                   e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    double rate = lm_update_hyper(u, "adam_rate");
    int n = lm_rule_n_pieces(t);
    lm_vid m, v;
    if (!lm_rule_is_hidden(t))
        return lm_rule_adamw(u, t, rate > 0 ? rate : 0.015, e);
    int64_t rows = t->shape.dim[0] / n, cols = t->shape.dim[1];
    lm_tensor side = lm_shape2(LM_DTYPE_F32, rows >= cols ? rows : 1, rows >= cols ? 1 : cols);
    lm_tensor sides = side;
    sides.dim[0] *= n;
    if (lm_rule_state(u, t, "momentum_buffer", &m, e) ||
        lm_update_state(u, t, "second_momentum_buffer", sides, &v, e))
        return e->code;
    for (int k = 0; k < n; k++) {
        lm_update_tensor piece;
        lm_vid m_part, v_part;
        if (lm_rule_piece(u, t, k, &piece, e) || lm_rule_part(u, m, k, piece.shape, &m_part, e) ||
            lm_rule_part(u, v, k, side, &v_part, e) || update_matrix(u, &piece, m_part, v_part, e))
            return e->code;
    }
    return LM_OK;
}

const lm_optim lm_optim_normuon = {
    .name = "normuon",
    .rate = 0.02,
    .about = "Muon levelled by a second moment",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
