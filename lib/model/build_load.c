/* SPDX-License-Identifier: Apache-2.0 */
/* build_load.c -- noise whose deviations a router learns, and losses that keep the loads of experts even (arXiv:1701.06538,
 * section 2.1 and appendix A): the squared coefficients of variation of the importances of experts, which are the sums of
 * their weights, and of their loads, smooth sums of the probabilities that a token would choose them if its noise for that
 * expert alone were drawn again. */
#include "kernels/map.h"
#include "kernels/noise.h"
#include "kernels/route.h"
#include "model/build.h"
#include "op/formula.h"
#include "op/ops.h"

/* The y of a formula of at most three names. */
static lm_vid formula(lm_builder *b, const char *text, const lm_formula_name in[3])
{
    lm_vid y = LM_NONE;
    const lm_formula_name names[4] = { in[0], in[1], in[2], LM_MAKES("y", &y) };
    const lm_formula_scope scope = {
        .name = names, .n_names = 4, .numbers = LM_NONE, .gate = LM_NONE
    };
    if (!lm_b_ok(b) || lm_formula_append(b->m->graph, text, &scope, b->e))
        return LM_NONE;
    return y;
}

lm_noisy_logits lm_b_learned_noise(lm_builder *b, int64_t layer, lm_vid z, lm_vid n)
{
    const lm_noise_attr drawn = { .amount = 1, .kind = LM_NOISE_WEIGHED, .site = 2 * layer };
    lm_noisy_logits out = { .clean = z };
    const lm_formula_name names[3] = {
        LM_IS("n", n), LM_CONSTANT("least", b->m->config.layer[layer].moe.noise_least),
        LM_CONSTANT("none", 0)
    };
    /* Softplus, which is n where exp(n) would not fit.  Matrices of noise begin as zeros, where formulas with max and abs
     * have no derivative. */
    out.deviation = formula(b, "y = where(n < 20, log(1 + exp(min(n, 20))), n) + least", names);
    out.noisy = lm_b_add(b, z, lm_b_append(b, &lm_op_noise, &drawn, &out.deviation));
    return out;
}

static lm_vid mean(lm_builder *b, lm_vid x, lm_reduce_kind kind)
{
    const lm_reduce_attr attr = { .kind = kind, .over = LM_OVER_ALL, .mean = true };
    return lm_b_append(b, &lm_op_reduce, &attr, &x);
}

/* coef times the squared coefficient of variation of x: their variance by the square of their mean. */
static lm_vid variation(lm_builder *b, lm_vid x, double coef)
{
    const lm_vid m = mean(b, x, LM_REDUCE_SUM);
    const lm_formula_name off[3] = { LM_IS("x", x), LM_IS("m", m), LM_CONSTANT("none", 0) };
    const lm_vid v = mean(b, formula(b, "y = x - m", off), LM_REDUCE_SQUARES);
    const lm_formula_name share[3] = { LM_IS("v", v), LM_IS("m", m), LM_CONSTANT("coef", coef) };
    return formula(b, "y = coef * v / (m * m + 1e-20)", share);
}

/* The loads [1,E]: sums of the probabilities that a token's number is above its bar. */
static lm_vid loads(lm_builder *b, int64_t layer, const lm_noisy_logits *l)
{
    const lm_route_bar_attr attr = { b->m->config.layer[layer].moe.chosen };
    const lm_reduce_attr columns = { .kind = LM_REDUCE_SUM, .over = LM_OVER_COLUMN };
    lm_vid bar[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    if (!lm_b_ok(b) || lm_graph_append(b->m->graph, &lm_op_route_bar, &attr, &l->noisy, bar, b->e))
        return LM_NONE;
    const lm_formula_name names[3] = { LM_IS("z", l->clean), LM_IS("c", bar[0]),
                                       LM_IS("s", l->deviation) };
    const lm_vid p = formula(
        b, "y = 0.5 + 0.5 * erf(0.70710678118654752 * (z - c) / max(0.0009765625, s))", names);
    return lm_b_append(b, &lm_op_reduce, &columns, &p);
}

lm_vid lm_b_load_losses(lm_builder *b, int64_t layer, const lm_routed *r)
{
    const lm_moe *m = &b->m->config.layer[layer].moe;
    const lm_routing_losses *w = &b->m->build.routing;
    const lm_route_importance_attr attr = { m->experts };
    lm_vid sum = LM_NONE;
    if (w->importance > 0) {
        const lm_vid in[2] = { r->weight, r->expert };
        sum = variation(b, lm_b_append(b, &lm_op_route_importance, &attr, in), w->importance);
    }
    if (w->load > 0 && m->chosen < m->experts) { /* otherwise all loads are all tokens */
        const lm_vid load = variation(b, loads(b, layer, &r->logits), w->load);
        sum = sum == LM_NONE ? load : lm_b_add(b, sum, load);
    }
    return sum;
}
