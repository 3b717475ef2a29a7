/* SPDX-License-Identifier: Apache-2.0 */
/* galore.c -- GaLore (arXiv:2403.03507): Adam on gradients that are projected to a few singular vectors.
 *   every update_proj_gap steps (from the first on)   Q = the first `rank` singular vectors of g, on its shorter side
 *   r = g Q' (rows >= cols) or Q' g;  m = b1 m + (1 - b1) r;  v = b2 v + (1 - b2) r^2
 *   N = m / (sqrt(v) + eps);  p -= lr sqrt(1 - b2^t) / (1 - b1^t) galore_scale (N Q or Q N);  p -= lr wd p
 * Moments stay as they are when the basis changes.  Tensors outside the layers, vectors, and matrices with a side of
 * at most `rank` are not projected.  stagger: tensor i has its bases i steps later, so that no step has them all. */
#include "kernels/factor.h"
#include "op/ops.h"
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9),
    BETA_2(0.999),
    EPS(1e-6),
    { "rank", 128, 1, 16384, "singular vectors of a basis", LM_WHOLE },
    { "update_proj_gap", 200, 1, 1e9, "steps between two bases", LM_WHOLE },
    { "galore_scale", 0.25, 0, 100, "of the projected step", NULL },
    { "stagger", 0, 0, 1, "bases of tensors at different steps", "off on" },
    DECAY(0),
    { 0 },
};

typedef struct {
    bool right;
    lm_tensor low; /* shape of the projected gradient */
    lm_vid q;
} projector;

static bool is_projected(const lm_update *u, const lm_update_tensor *t)
{
    int64_t rank = (int64_t)lm_update_hyper(u, "rank");
    return lm_rule_is_hidden(t) && t->shape.dim[0] > rank && t->shape.dim[1] > rank;
}

/* The basis, made anew when it is due. */
static lm_code refresh(lm_update *u, const lm_update_tensor *t, const projector *p, lm_vid clean,
                       lm_err *e)
{
    int64_t gap = (int64_t)lm_update_hyper(u, "update_proj_gap");
    lm_svd_attr a = { .rank = (int64_t)lm_update_hyper(u, "rank"), .right = p->right };
    lm_vid made;
    if (lm_update_every(u, gap, lm_update_hyper(u, "stagger") != 0 ? t->index : 0, true, e) ||
        lm_rule_basis(u, &lm_op_svd, &a, clean, &made, e) ||
        lm_rule(u, t, "q = made", NAMES(LM_IS("q", p->q), LM_IS("made", made)), e))
        return e->code;
    lm_update_always(u);
    return LM_OK;
}

static lm_code project(lm_update *u, const projector *p, lm_vid x, lm_vid *out, lm_err *e)
{
    return p->right ? lm_rule_abt(u, x, p->q, out, e) : lm_rule_atb(u, p->q, x, out, e);
}

static lm_code project_back(lm_update *u, const projector *p, lm_vid x, lm_vid *out, lm_err *e)
{
    return p->right ? lm_rule_ab(u, x, p->q, out, e) : lm_rule_ab(u, p->q, x, out, e);
}

static lm_code update_projected(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    int64_t rows = t->shape.dim[0], cols = t->shape.dim[1];
    int64_t rank = (int64_t)lm_update_hyper(u, "rank");
    projector p = { .right = rows >= cols };
    lm_tensor basis =
        p.right ? lm_shape2(LM_DTYPE_F32, rank, cols) : lm_shape2(LM_DTYPE_F32, rows, rank);
    lm_vid clean = LM_NONE, r, m, v, way = LM_NONE;
    p.low = p.right ? lm_shape2(LM_DTYPE_F32, rows, rank) : lm_shape2(LM_DTYPE_F32, rank, cols);
    return lm_update_state(u, t, "ortho_matrix", basis, &p.q, e) ||
                   lm_update_state(u, t, "exp_avg", p.low, &m, e) ||
                   lm_update_state(u, t, "exp_avg_sq", p.low, &v, e) ||
                   lm_rule(u, t, "clean = g", NAMES(LM_MAKES("clean", &clean)), e) ||
                   refresh(u, t, &p, clean, e) || project(u, &p, clean, &r, e) ||
                   lm_rule(
                       u, t,
                       "m = beta1*m + (1 - beta1)*r;"
                       "v = beta2*v + (1 - beta2)*r*r;"
                       "way = m / (sqrt(v) + eps)",
                       NAMES(LM_IS("m", m), LM_IS("v", v), LM_IS("r", r), LM_MAKES("way", &way)),
                       e) ||
                   project_back(u, &p, way, &way, e) ||
                   lm_rule(u, t,
                           "next = p - lr*sqrt(bc2)/bc1*galore_scale*way;"
                           "p = next - lr*weight_decay*next",
                           NAMES(LM_IS("way", way)), e)
               ? e->code
               : LM_OK;
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid m, v;
    if (is_projected(u, t))
        return update_projected(u, t, e);
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e))
        return e->code;
    return lm_rule(u, t,
                   "m = beta1*m + (1 - beta1)*g;"
                   "v = beta2*v + (1 - beta2)*g*g;"
                   "next = p - lr*sqrt(bc2)/bc1*m / (sqrt(v) + eps);"
                   "p = next - lr*weight_decay*next",
                   NAMES(LM_IS("m", m), LM_IS("v", v)), e);
}

const lm_optim lm_optim_galore = {
    .name = "galore",
    .rate = 1e-2,
    .about = "Adam on gradients in a few singular vectors",
    .hyper = hyper,
    .n_numbers = LM_RULE_BIAS,
    .numbers = lm_rule_bias,
    .number = lm_rule_bias_names,
    .update = update,
};
