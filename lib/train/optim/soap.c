/* SPDX-License-Identifier: Apache-2.0 */
/* soap.c -- SOAP (arXiv:2409.11321): Adam in the eigenvectors of Shampoo's preconditioners; and SOAP-Muon, whose step
 * is that one, made orthonormal.  For hidden matrices; AdamW does the others.
 *   L = b L + (1 - b) g g',  R = b R + (1 - b) g' g        b: shampoo_beta
 *   every precondition_frequency steps Ql, Qr = one orthogonal iteration on L, R (at first: their eigenvectors)
 *   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) (Ql' g Qr)^2
 *   N = Ql ((Ql' m Qr) / (sqrt(v) + eps)) Qr'
 *   p -= lr sqrt(1 - b2^t) / (1 - b1^t) N;  p -= lr wd p   (SOAP-Muon: p -= lr sqrt(max(1, rows/cols)) orthogonal(N))
 * The first step only makes bases, so that no gradient is seen by bases of its own.  A side of more than
 * max_precond_dim has none. */
#include <math.h>

#include "op/ops.h"
#include "train/optim/rule.h"

enum { BETA1 = 4, BETA2 };

#define COMMON(beta)                                                                       \
    ADAMW_FOR_OTHERS, BETA_1(beta), BETA_2(beta),                                          \
        { "shampoo_beta", 0.95, 0, 0.9999999, "of the preconditioners", NULL }, EPS(1e-8), \
        { "precondition_frequency", 10, 1, 1e6, "steps between two bases", LM_WHOLE },     \
    {                                                                                      \
        "max_precond_dim", 10000, 1, 16384, "sides that are longer have none", LM_WHOLE    \
    }

static const lm_hyper hyper[] = { COMMON(0.95), DECAY(0.01), { 0 } };

static const lm_hyper muon_hyper[] = {
    COMMON(0.95),
    { "ns", 0, 0, 1, "coefficients of the rounds", "quintic polar" },
    { "ns_steps", 5, 1, 20, "rounds of orthogonalisation", LM_WHOLE },
    { "bf16", 1, 0, 1, "products of the rounds in BF16", "off on" },
    DECAY(0.01),
    { "cautious", 0, 0, 1, "decay only where the step agrees", "off on" },
    { 0 },
};

static const char *const numbers_are[] = { "lr", "bc1", "bc2", "going", "correction" };
enum { N_NUMBERS = 5 };

/* Of AdamW for the others, then: is this not the first step; what corrects the biases of those counted
 * from the second. */
static void numbers(const double *h, double lr, int64_t t, double *out)
{
    lm_rule_bias(h, lr, t, out);
    out[3] = t > 0;
    out[4] = t > 0 ? sqrt(1 - pow(h[BETA2], (double)t)) / (1 - pow(h[BETA1], (double)t)) : 1;
}

/* One side of a matrix: its preconditioner and basis, or LM_NONE. */
typedef struct {
    lm_vid gg, q;
} side;

typedef struct {
    side left, right;
    lm_vid m, v;
} soap_states;

static bool has_basis(const lm_update *u, int64_t n)
{
    return n <= (int64_t)lm_update_hyper(u, "max_precond_dim");
}

/* Ql' x Qr. */
static lm_code project(lm_update *u, const soap_states *s, lm_vid x, lm_vid *out, lm_err *e)
{
    *out = x;
    if (s->left.q >= 0 && lm_rule_atb(u, s->left.q, x, out, e))
        return e->code;
    return s->right.q >= 0 ? lm_rule_ab(u, *out, s->right.q, out, e) : LM_OK;
}

/* Ql x Qr'. */
static lm_code project_back(lm_update *u, const soap_states *s, lm_vid x, lm_vid *out, lm_err *e)
{
    *out = x;
    if (s->left.q >= 0 && lm_rule_ab(u, s->left.q, x, out, e))
        return e->code;
    return s->right.q >= 0 ? lm_rule_abt(u, *out, s->right.q, out, e) : LM_OK;
}

/* The direction of Adam in the bases. */
static lm_code direction(lm_update *u, const lm_update_tensor *t, const soap_states *s,
                         lm_vid *clean, lm_vid *way, lm_err *e)
{
    lm_vid of_g, of_m, ratio = LM_NONE;
    *clean = LM_NONE;
    if (lm_rule(u, t, "clean = g; m = where(going, beta1*m + (1 - beta1)*g, m)",
                NAMES(LM_IS("m", s->m), LM_MAKES("clean", clean)), e) ||
        project(u, s, *clean, &of_g, e) || project(u, s, s->m, &of_m, e) ||
        lm_rule(u, t,
                "v = where(going, beta2*v + (1 - beta2)*of_g*of_g, v);"
                "ratio = of_m / (sqrt(v) + eps)",
                NAMES(LM_IS("v", s->v), LM_IS("of_g", of_g), LM_IS("of_m", of_m),
                      LM_MAKES("ratio", &ratio)),
                e))
        return e->code;
    return project_back(u, s, ratio, way, e);
}

static lm_code step_of_muon(lm_update *u, const lm_update_tensor *t, lm_vid way, lm_err *e)
{
    lm_orthogonal o = { .steps = (int)lm_update_hyper(u, "ns_steps"),
                        .polar = lm_update_hyper(u, "ns") != 0,
                        .bf16 = lm_update_hyper(u, "bf16") != 0 };
    double rows = (double)t->shape.dim[0], cols = (double)t->shape.dim[1];
    lm_vid flat;
    return lm_rule_orthogonal(u, t, &o, way, &flat, e) ||
                   lm_rule(
                       u, t,
                       "decays = where(cautious, 1 - (way*p < 0), 1);"
                       "p = where(going, p - lr*weight_decay*decays*p - lr*size*way, p)",
                       NAMES(LM_IS("way", flat), LM_CONSTANT("size", sqrt(fmax(1, rows / cols)))),
                       e)
               ? e->code
               : LM_OK;
}

static lm_code step_of_soap(lm_update *u, const lm_update_tensor *t, lm_vid way, lm_err *e)
{
    return lm_rule(u, t,
                   "next = p - lr*correction*way;"
                   "p = where(going, next - lr*weight_decay*next, p)",
                   NAMES(LM_IS("way", way)), e);
}

static lm_code first_bases(lm_update *u, const lm_update_tensor *t, const soap_states *s, lm_err *e)
{
    const side *const both[2] = { &s->left, &s->right };
    if (lm_update_every(u, 0, 0, true, e))
        return e->code;
    for (int k = 0; k < 2; k++) {
        lm_vid q;
        if (both[k]->q >= 0 &&
            (lm_rule_basis(u, &lm_op_eigh, NULL, both[k]->gg, &q, e) ||
             lm_rule(u, t, "q = made", NAMES(LM_IS("q", both[k]->q), LM_IS("made", q)), e)))
            return e->code;
    }
    lm_update_always(u);
    return LM_OK;
}

/* One iteration for each side; the second moments follow the order of the vectors. */
static lm_code next_bases(lm_update *u, const lm_update_tensor *t, const soap_states *s, lm_err *e)
{
    const side *const both[2] = { &s->left, &s->right };
    lm_vid v = s->v;
    if (lm_update_every(u, (int64_t)lm_update_hyper(u, "precondition_frequency"), 0, false, e))
        return e->code;
    for (int k = 0; k < 2; k++) {
        lm_vid in[2] = { both[k]->gg, both[k]->q }, out[2] = { LM_NONE, LM_NONE };
        if (both[k]->q < 0)
            continue;
        if (lm_graph_append(lm_update_graph(u), &lm_op_eigh_next, NULL, in, out, e) ||
            (k ? lm_rule_ab(u, v, out[1], &v, e) : lm_rule_atb(u, out[1], v, &v, e)) ||
            lm_rule(u, t, "q = where(going, made, q)",
                    NAMES(LM_IS("q", both[k]->q), LM_IS("made", out[0])), e))
            return e->code;
    }
    if (v != s->v && lm_rule(u, t, "v = where(going, sorted, v)",
                             NAMES(LM_IS("v", s->v), LM_IS("sorted", v)), e))
        return e->code;
    lm_update_always(u);
    return LM_OK;
}

static lm_code precondition(lm_update *u, const lm_update_tensor *t, const soap_states *s,
                            lm_vid clean, lm_err *e)
{
    const side *const both[2] = { &s->left, &s->right };
    for (int k = 0; k < 2; k++) {
        lm_vid square;
        if (both[k]->gg < 0)
            continue;
        if ((k ? lm_rule_atb(u, clean, clean, &square, e)
               : lm_rule_abt(u, clean, clean, &square, e)) ||
            lm_rule(u, t, "gg = shampoo_beta*gg + (1 - shampoo_beta)*square",
                    NAMES(LM_IS("gg", both[k]->gg), LM_IS("square", square)), e))
            return e->code;
    }
    return first_bases(u, t, s, e) || next_bases(u, t, s, e) ? e->code : LM_OK;
}

typedef lm_code soap_step(lm_update *u, const lm_update_tensor *t, lm_vid way, lm_err *e);

static lm_code update_matrix(lm_update *u, const lm_update_tensor *t, const soap_states *s,
                             soap_step *step, lm_err *e)
{
    lm_vid clean, way;
    return direction(u, t, s, &clean, &way, e) || step(u, t, way, e) ||
                   precondition(u, t, s, clean, e)
               ? e->code
               : LM_OK;
}

/* Preconditioner and basis of a side for all pieces of a tensor. */
static lm_code make_side(lm_update *u, const lm_update_tensor *t, const char *gg, const char *q,
                         int64_t size, side *out, lm_err *e)
{
    lm_tensor all = lm_shape2(LM_DTYPE_F32, lm_rule_n_pieces(t) * size, size);
    *out = (side){ LM_NONE, LM_NONE };
    if (!has_basis(u, size))
        return LM_OK;
    return lm_update_state(u, t, gg, all, &out->gg, e) || lm_update_state(u, t, q, all, &out->q, e)
               ? e->code
               : LM_OK;
}

static lm_code part_of_side(lm_update *u, const side *all, int k, int64_t size, side *out,
                            lm_err *e)
{
    lm_tensor square = lm_shape2(LM_DTYPE_F32, size, size);
    return lm_rule_part(u, all->gg, k, square, &out->gg, e) ||
                   lm_rule_part(u, all->q, k, square, &out->q, e)
               ? e->code
               : LM_OK;
}

static lm_code update_with(lm_update *u, const lm_update_tensor *t, double rate, soap_step *step,
                           lm_err *e)
{
    double own = lm_update_hyper(u, "adam_rate");
    int64_t cols = t->shape.dim[1], rows = t->shape.dim[0] / lm_rule_n_pieces(t);
    soap_states all, s;
    if (!lm_rule_is_hidden(t))
        return lm_rule_adamw(u, t, own > 0 ? own : rate, e);
    if (lm_rule_state(u, t, "exp_avg", &all.m, e) || lm_rule_state(u, t, "exp_avg_sq", &all.v, e) ||
        make_side(u, t, "GG_0", "Q_0", rows, &all.left, e) ||
        make_side(u, t, "GG_1", "Q_1", cols, &all.right, e))
        return e->code;
    for (int k = 0; k < lm_rule_n_pieces(t); k++) {
        lm_update_tensor piece;
        if (lm_rule_piece(u, t, k, &piece, e) || lm_rule_part(u, all.m, k, piece.shape, &s.m, e) ||
            lm_rule_part(u, all.v, k, piece.shape, &s.v, e) ||
            part_of_side(u, &all.left, k, rows, &s.left, e) ||
            part_of_side(u, &all.right, k, cols, &s.right, e) ||
            update_matrix(u, &piece, &s, step, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    return update_with(u, t, 1, step_of_soap, e);
}

static lm_code update_muon(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    return update_with(u, t, 0.015, step_of_muon, e);
}

const lm_optim lm_optim_soap = {
    .name = "soap",
    .rate = 3e-3,
    .about = "Adam in Shampoo's eigenvectors",
    .hyper = hyper,
    .n_numbers = N_NUMBERS,
    .numbers = numbers,
    .number = numbers_are,
    .update = update,
};

const lm_optim lm_optim_soap_muon = {
    .name = "soap-muon",
    .rate = 0.02,
    .about = "SOAP's steps, orthogonalised",
    .hyper = muon_hyper,
    .n_numbers = N_NUMBERS,
    .numbers = numbers,
    .number = numbers_are,
    .update = update_muon,
};
