/* SPDX-License-Identifier: Apache-2.0 */
/* muon.c -- Muon (Jordan et al. 2024): hidden matrices move by their momentum, made orthonormal; embeddings, head,
 * norms and biases by AdamW.
 *   m += (1 - mu) (g - m);  u = nesterov ? (1 - mu) g + mu m : m;  U = orthogonal(u)
 *   p *= 1 - lr wd;  p -= lr s U
 *   s: sqrt(max(1, rows/cols)), or (Moonlight, arXiv:2502.16982) 0.2 sqrt(max(rows, cols)), with which the rates
 *   of AdamW serve.  q, k and v that a file has in one tensor are made orthonormal apart.
 * Cautious decay (arXiv:2510.12402): only where the step and the weight agree in sign. */
#include <math.h>

#include "train/optim/rule.h"

enum { ORIGINAL, MOONLIGHT };

static const lm_hyper hyper[] = {
    ADAMW_FOR_OTHERS,
    { "momentum", 0.95, 0, 0.9999999, "of hidden matrices", NULL },
    { "nesterov", 1, 0, 1, "look ahead by the momentum", "off on" },
    { "ns", 0, 0, 1, "coefficients of the rounds", "quintic polar" },
    { "ns_steps", 5, 1, 20, "rounds of orthogonalisation", LM_WHOLE },
    { "scaling", ORIGINAL, 0, 1, "of the step", "original moonlight" },
    { "bf16", 1, 0, 1, "products of the rounds in BF16", "off on" },
    DECAY(0.01),
    { "cautious", 0, 0, 1, "decay only where the step agrees", "off on" },
    { 0 },
};

static lm_code update_matrix(lm_update *u, const lm_update_tensor *t, lm_vid m, lm_err *e)
{
    lm_orthogonal o = { .steps = (int)lm_update_hyper(u, "ns_steps"),
                        .polar = lm_update_hyper(u, "ns") != 0,
                        .bf16 = lm_update_hyper(u, "bf16") != 0 };
    double rows = (double)t->shape.dim[0], cols = (double)t->shape.dim[1];
    double size = lm_update_hyper(u, "scaling") == MOONLIGHT ? 0.2 * sqrt(fmax(rows, cols))
                                                             : sqrt(fmax(1, rows / cols));
    lm_vid ahead = LM_NONE, way;
    if (lm_rule(u, t,
                "m = m + (1 - momentum)*(g - m);"
                "ahead = where(nesterov, (1 - momentum)*g + momentum*m, m)",
                NAMES(LM_IS("m", m), LM_MAKES("ahead", &ahead)), e) ||
        lm_rule_orthogonal(u, t, &o, ahead, &way, e))
        return e->code;
    return lm_rule(u, t,
                   "decays = where(cautious, 1 - (way*p < 0), 1);"
                   "p = p - lr*weight_decay*decays*p - lr*size*way",
                   NAMES(LM_IS("way", way), LM_CONSTANT("size", size)), e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    double rate = lm_update_hyper(u, "adam_rate");
    lm_vid m;
    if (!lm_rule_is_hidden(t)) {
        double usual = lm_update_hyper(u, "scaling") == MOONLIGHT ? 1 : 0.015;
        return lm_rule_adamw(u, t, rate > 0 ? rate : usual, e);
    }
    if (lm_rule_state(u, t, "momentum_buffer", &m, e))
        return e->code;
    for (int k = 0; k < lm_rule_n_pieces(t); k++) {
        lm_update_tensor piece;
        lm_vid part;
        if (lm_rule_piece(u, t, k, &piece, e) || lm_rule_part(u, m, k, piece.shape, &part, e) ||
            update_matrix(u, &piece, part, e))
            return e->code;
    }
    return LM_OK;
}

const lm_optim lm_optim_muon = {
    .name = "muon",
    .rate = 0.02,
    .about = "orthogonalised momentum for hidden matrices",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
