/* SPDX-License-Identifier: Apache-2.0 */
/* ldadam.c -- LDAdam (arXiv:2410.16103): AdamW in a subspace that follows the gradients at every step; what a
 * projection loses is added to the next gradient.
 * For a matrix with rows <= cols (the other case is its transpose), Q of the last step as P, k steps done:
 *   A = g + E;  B = rho P m / (1 - b1^k) + (1 - rho) A;  Q = orthonormal basis of B (B' P)
 *   a = Q' A;  T = Q' P;  m' = T m
 *   E = A - Q a + b1 / (1 - b1) (P m - Q m')
 *   v = |(1 - b2^k) ((T o T) (v / (1 - b2^k) - (m / (1 - b1^k))^2) + (m' / (1 - b1^k))^2)|
 *   m = b1 m' + (1 - b1) a;  v = b2 v + (1 - b2) a^2
 *   p *= 1 - lr wd;  p -= lr Q (m / (1 - b1^(k+1))) / (sqrt(v / (1 - b2^(k+1))) + eps)
 * At first P is the first `rank` singular vectors of A, and m and v are 0.  Tensors outside the layers, vectors, and
 * matrices with a side of at most `rank` have AdamW.  Clipping sees g, not E. */
#include <math.h>

#include "kernels/factor.h"
#include "op/ops.h"
#include "train/optim/rule.h"

enum { BETA1, BETA2 };

static const lm_hyper hyper[] = {
    [BETA1] = BETA_1(0.908),
    [BETA2] = BETA_2(0.99),
    EPS(1e-8),
    { "rank", 16, 1, 16384, "vectors of a basis", LM_WHOLE },
    { "rho", 0.908, 0, 0.9999999, "of the momentum in the next basis", NULL },
    { "error_feedback", 1, 0, 1, "add what was lost to the next gradient", "off on" },
    DECAY(0),
    { 0 },
};

static const char *const numbers_are[] = { "lr", "bc1", "bc2", "past1", "past2" };
enum { N_NUMBERS = 5 };

/* The bias corrections with this step, and before it (1 at first, when the moments are 0). */
static void numbers(const double *h, double lr, int64_t t, double *out)
{
    lm_rule_bias(h, lr, t, out);
    out[3] = t > 0 ? 1 - pow(h[BETA1], (double)t) : 1;
    out[4] = t > 0 ? 1 - pow(h[BETA2], (double)t) : 1;
}

/* Bases are columns of [shorter side, rank].  right: rows > cols, and all is the transpose of the above. */
typedef struct {
    const lm_update_tensor *t;
    bool right;
    int64_t rank;
    lm_vid p, m, v, error; /* states; error LM_NONE: nothing is fed back */
} subspace;

/* A matrix into a basis, and back. */
static lm_code project(lm_update *u, const subspace *s, lm_vid basis, lm_vid x, lm_vid *out,
                       lm_err *e)
{
    return s->right ? lm_rule_ab(u, x, basis, out, e) : lm_rule_atb(u, basis, x, out, e);
}

static lm_code project_back(lm_update *u, const subspace *s, lm_vid basis, lm_vid x, lm_vid *out,
                            lm_err *e)
{
    return s->right ? lm_rule_abt(u, x, basis, out, e) : lm_rule_ab(u, basis, x, out, e);
}

/* From the last basis to this one. */
static lm_code move(lm_update *u, const subspace *s, lm_vid change, lm_vid x, lm_vid *out,
                    lm_err *e)
{
    return s->right ? lm_rule_ab(u, x, change, out, e) : lm_rule_ab(u, change, x, out, e);
}

static lm_code first_basis(lm_update *u, const subspace *s, lm_vid a, lm_err *e)
{
    const lm_svd_attr attr = { .rank = s->rank, .right = s->right };
    lm_vid made, one;
    if (lm_update_every(u, 0, 0, true, e) || lm_rule_basis(u, &lm_op_svd, &attr, a, &made, e))
        return e->code;
    /* V' (V V'), and V V' is the identity: columns of rows. */
    if (s->right && (lm_rule_abt(u, made, made, &one, e) || lm_rule_atb(u, made, one, &made, e)))
        return e->code;
    if (lm_rule(u, s->t, "q = made", NAMES(LM_IS("q", s->p), LM_IS("made", made)), e))
        return e->code;
    lm_update_always(u);
    return LM_OK;
}

/* One power iteration from the last basis; moved: P m. */
static lm_code next_basis(lm_update *u, const subspace *s, lm_vid a, lm_vid moved, lm_vid *q,
                          lm_err *e)
{
    lm_vid b = LM_NONE, y;
    return lm_rule(u, s->t, "b = rho/past1*moved + (1 - rho)*a",
                   NAMES(LM_IS("moved", moved), LM_IS("a", a), LM_MAKES("b", &b)), e) ||
                   (s->right ? lm_rule_ab(u, b, s->p, &y, e) : lm_rule_atb(u, b, s->p, &y, e)) ||
                   (s->right ? lm_rule_atb(u, b, y, &y, e) : lm_rule_ab(u, b, y, &y, e)) ||
                   lm_rule_basis(u, &lm_op_qr, NULL, y, q, e)
               ? e->code
               : LM_OK;
}

/* What this step's basis cannot hold of A and of the momentum.  m2: Q' P m. */
static lm_code feed_back(lm_update *u, const subspace *s, lm_vid a, lm_vid moved, lm_vid q,
                         lm_vid low, lm_vid m2, lm_err *e)
{
    lm_vid held = LM_NONE;
    if (s->error < 0)
        return LM_OK;
    return lm_rule(u, s->t, "held = r + beta1/(1 - beta1)*m2",
                   NAMES(LM_IS("r", low), LM_IS("m2", m2), LM_MAKES("held", &held)), e) ||
                   project_back(u, s, q, held, &held, e) ||
                   lm_rule(u, s->t, "error = a + beta1/(1 - beta1)*moved - held",
                           NAMES(LM_IS("error", s->error), LM_IS("a", a), LM_IS("moved", moved),
                                 LM_IS("held", held)),
                           e)
               ? e->code
               : LM_OK;
}

/* The moments in the new basis, and the direction there. */
static lm_code step(lm_update *u, const subspace *s, lm_vid change, lm_vid low, lm_vid m2,
                    lm_vid *way, lm_err *e)
{
    lm_vid squared = LM_NONE, spread = LM_NONE;
    *way = LM_NONE;
    return lm_rule(u, s->t, "squared = change*change",
                   NAMES(LM_IS("change", change), LM_MAKES("squared", &squared)), e) ||
                   lm_rule(u, s->t, "spread = v/past2 - m*m/(past1*past1)",
                           NAMES(LM_IS("v", s->v), LM_IS("m", s->m), LM_MAKES("spread", &spread)),
                           e) ||
                   move(u, s, squared, spread, &spread, e) ||
                   lm_rule(u, s->t,
                           "v = beta2*abs(past2*(spread + m2*m2/(past1*past1)))"
                           "    + (1 - beta2)*r*r;"
                           "m = beta1*m2 + (1 - beta1)*r;"
                           "way = m/bc1 / (sqrt(v/bc2) + eps)",
                           NAMES(LM_IS("v", s->v), LM_IS("m", s->m), LM_IS("m2", m2),
                                 LM_IS("r", low), LM_IS("spread", spread), LM_MAKES("way", way)),
                           e)
               ? e->code
               : LM_OK;
}

static lm_code update_in(lm_update *u, const subspace *s, lm_err *e)
{
    lm_vid a = LM_NONE, moved, q, low, change, m2, way;
    const char *sum = s->error >= 0 ? "a = g + error" : "a = g";
    return lm_rule(u, s->t, sum, NAMES(LM_IS("error", s->error), LM_MAKES("a", &a)), e) ||
                   first_basis(u, s, a, e) || project_back(u, s, s->p, s->m, &moved, e) ||
                   next_basis(u, s, a, moved, &q, e) || project(u, s, q, a, &low, e) ||
                   (s->right ? lm_rule_atb(u, s->p, q, &change, e)
                             : lm_rule_atb(u, q, s->p, &change, e)) ||
                   move(u, s, change, s->m, &m2, e) || feed_back(u, s, a, moved, q, low, m2, e) ||
                   step(u, s, change, low, m2, &way, e) || project_back(u, s, q, way, &way, e) ||
                   lm_rule(u, s->t, "p = p*(1 - lr*weight_decay) - lr*way",
                           NAMES(LM_IS("way", way)), e) ||
                   lm_rule(u, s->t, "last = q", NAMES(LM_IS("last", s->p), LM_IS("q", q)), e)
               ? e->code
               : LM_OK;
}

static lm_code update_plain(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid m, v;
    if (lm_rule_state(u, t, "exp_avg", &m, e) || lm_rule_state(u, t, "exp_avg_sq", &v, e))
        return e->code;
    return lm_rule(u, t,
                   "m = beta1*m + (1 - beta1)*g;"
                   "v = beta2*v + (1 - beta2)*g*g;"
                   "p = p*(1 - lr*weight_decay) - lr*(m/bc1) / (sqrt(v/bc2) + eps)",
                   NAMES(LM_IS("m", m), LM_IS("v", v)), e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    int64_t rows = t->shape.dim[0], cols = t->shape.dim[1];
    subspace s = {
        .t = t, .right = rows > cols, .rank = (int64_t)lm_update_hyper(u, "rank"), .error = LM_NONE
    };
    if (!lm_rule_is_hidden(t) || rows <= s.rank || cols <= s.rank)
        return update_plain(u, t, e);
    lm_tensor low = lm_shape2(LM_DTYPE_F32, s.right ? rows : s.rank, s.right ? s.rank : cols);
    lm_tensor basis = lm_shape2(LM_DTYPE_F32, s.right ? cols : rows, s.rank);
    bool feeds = lm_update_hyper(u, "error_feedback") != 0;
    return lm_update_state(u, t, "ortho_matrix", basis, &s.p, e) ||
                   lm_update_state(u, t, "exp_avg", low, &s.m, e) ||
                   lm_update_state(u, t, "exp_avg_sq", low, &s.v, e) ||
                   (feeds && lm_rule_state(u, t, "error", &s.error, e)) || update_in(u, &s, e)
               ? e->code
               : LM_OK;
}

const lm_optim lm_optim_ldadam = {
    .name = "ldadam",
    .rate = 1e-3,
    .about = "AdamW in a subspace that follows the gradients",
    .hyper = hyper,
    .n_numbers = N_NUMBERS,
    .numbers = numbers,
    .number = numbers_are,
    .update = update,
};
