/* SPDX-License-Identifier: Apache-2.0 */
/* build_experts.c -- the parts of a mixture of experts.  The router runs in F32 whatever the rest does, unless it is asked
 * for less: small errors of its logits send tokens elsewhere. */
#include <math.h>

#include "base/mem.h"
#include "kernels/expert.h"
#include "kernels/grouped.h"
#include "kernels/linear.h"
#include "kernels/matmul.h"
#include "kernels/noise.h"
#include "kernels/route.h"
#include "model/build.h"
#include "op/formula.h"
#include "op/ops.h"

/* Rows that an expert takes at most, of each token one; 0: all. */
static int64_t capacity_of(const lm_model *m, const lm_moe *moe)
{
    const double rows = (double)(m->build.batch * m->build.seq);
    const double most =
        ceil(m->build.choice.capacity * rows * (double)moe->chosen / (double)moe->experts);
    return m->build.mode == LM_MODE_TRAIN ? (int64_t)fmin(most, rows) : 0;
}

static bool in_training(const lm_builder *b)
{
    return b->m->build.mode == LM_MODE_TRAIN;
}

/* x with noise of that amount, in training.  The two of a layer have sites of their own. */
static lm_vid with_noise(lm_builder *b, int64_t layer, lm_vid x, double amount, bool scaled)
{
    const lm_noise_attr attr = { .amount = amount,
                                 .kind = scaled ? LM_NOISE_SCALED : LM_NOISE_ADDED,
                                 .site = 2 * layer + scaled };
    return in_training(b) && amount > 0 ? lm_b_append(b, &lm_op_noise, &attr, &x) : x;
}

/* z + b of each column. */
static lm_vid add_columns(lm_builder *b, lm_vid z, lm_vid bias)
{
    lm_vid y = LM_NONE;
    const lm_formula_name names[] = { LM_IS("z", z), LM_IS("b", bias), LM_MAKES("y", &y) };
    const lm_formula_scope scope = {
        .name = names, .n_names = 3, .numbers = LM_NONE, .gate = LM_NONE
    };
    if (!lm_b_ok(b) || lm_formula_append(b->m->graph, "y = z + b", &scope, b->e))
        return LM_NONE;
    return y;
}

static lm_vid router_product(lm_builder *b, lm_vid h, lm_vid w)
{
    const lm_matmul_attr wide = { .turn_b = true };
    const lm_linear_attr low = { LM_ACC_FIRST };
    return b->m->build.choice.low ? lm_b_append(b, &lm_op_linear, &low, (lm_vid[]){ h, w, LM_NONE })
                                  : lm_b_append(b, &lm_op_matmul, &wide, (lm_vid[]){ h, w });
}

/* The logits of h [N,C]; the noisy ones are what tokens choose by, also without noise. */
static lm_noisy_logits router_logits(lm_builder *b, int64_t layer, lm_vid h, const lm_router *p)
{
    const lm_routing_choice *how = &b->m->build.choice;
    const double jitter = how->jitter < 0 ? b->m->config.layer[layer].moe.jitter : how->jitter;
    h = with_noise(b, layer, h, jitter, true);
    lm_vid z = router_product(b, h, p->w);
    z = p->added == LM_NONE ? z : add_columns(b, z, p->added);
    if (p->noise != LM_NONE && in_training(b))
        return lm_b_learned_noise(b, layer, z, router_product(b, h, p->noise));
    return (lm_noisy_logits){ .clean = z,
                              .noisy = with_noise(b, layer, z, how->noise, false),
                              .deviation = LM_NONE };
}

lm_routed lm_b_route(lm_builder *b, int64_t layer, lm_vid h, const lm_router *p)
{
    const lm_moe *m = &b->m->config.layer[layer].moe;
    const lm_routing_choice *how = &b->m->build.choice;
    const int64_t capacity = capacity_of(b->m, m);
    const bool by_expert = how->by_expert && in_training(b);
    const lm_route_attr choose = {
        .k = by_expert ? m->experts : m->chosen,
        .capacity = capacity,
        .policy = how->policy,
        .second_random = how->second_random && in_training(b),
        .by_expert = by_expert,
        .sigmoid = m->sigmoid,
        .normalise = m->normalise,
        .scale = m->scale,
        .groups = m->groups,
        .kept_groups = m->kept_groups,
        .group_max = m->group_max,
        .site = layer,
    };
    const lm_route_plan_attr plan = { .experts = m->experts,
                                      .pad = how->pad || by_expert ? capacity : 0 };
    const lm_routed r = {
        LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE, { LM_NONE, LM_NONE, LM_NONE }
    };
    const lm_noisy_logits logits = router_logits(b, layer, h, p);
    lm_vid chosen[LM_MAX_OUT] = { LM_NONE, LM_NONE },
           rows[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE };
    if (!lm_b_ok(b) ||
        lm_graph_append(b->m->graph, &lm_op_route_choose, &choose,
                        (lm_vid[]){ logits.noisy, p->bias }, chosen, b->e) ||
        lm_graph_append(b->m->graph, &lm_op_route_plan, &plan, &chosen[1], rows, b->e))
        return r;
    return (lm_routed){ logits.noisy, chosen[1], chosen[0], rows[0], rows[1], rows[2], logits };
}

/* ---- losses ---- */

/* A loss of a router is added to those of the layers before. */
static void add_loss(lm_builder *b, lm_vid loss)
{
    lm_model *m = b->m;
    m->aux = m->aux == LM_NONE ? loss : lm_b_add(b, m->aux, loss);
}

static lm_code make_routed(lm_builder *b)
{
    lm_model *m = b->m;
    const size_t n = (size_t)lm_config_depth(&m->config);
    if (m->routed || lm_alloc_n(&m->routed, n, sizeof *m->routed, "mixtures of experts", b->e))
        return b->e->code;
    for (size_t l = 0; l < n; l++)
        m->routed[l] = (lm_routed_layer){ LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    return LM_OK;
}

void lm_b_watch_route(lm_builder *b, int64_t layer, const lm_routed *r)
{
    lm_model *m = b->m;
    const lm_routing_losses *w = &m->build.routing;
    const lm_route_aux_attr attr = { .sigmoid = m->config.layer[layer].moe.sigmoid,
                                     .balance = w->layer,
                                     .sequence = w->sequence,
                                     .z = w->z,
                                     .seq = m->build.seq,
                                     .by_expert = m->build.choice.by_expert,
                                     .affinity = w->affinity,
                                     .nodes = w->nodes };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    if (!lm_b_ok(b) || m->build.mode != LM_MODE_TRAIN || make_routed(b) ||
        lm_graph_append(m->graph, &lm_op_route_aux, &attr, (lm_vid[]){ r->z, r->expert, LM_NONE },
                        out, b->e))
        return;
    m->routed[layer] = (lm_routed_layer){ r->z, r->expert, out[2], out[1], out[3] };
    if (w->layer > 0 || w->sequence > 0 || w->z > 0 || w->affinity > 0)
        add_loss(b, out[0]);
    const lm_vid load = lm_b_load_losses(b, layer, r);
    if (load != LM_NONE)
        add_loss(b, load);
}

/* The loads of all layers together, and the number of these layers. */
static lm_vid sum_loads(lm_builder *b, int64_t *layers)
{
    lm_model *m = b->m;
    lm_vid sum = LM_NONE;
    for (int64_t l = 0; l < m->config.layers; l++) {
        const lm_vid load = m->routed[l].load;
        if (load == LM_NONE)
            continue;
        sum = sum == LM_NONE ? load : lm_b_add(b, sum, load);
        ++*layers;
    }
    return sum;
}

static double model_coef(const lm_model *m)
{
    double coef = m->build.choice.by_expert ? 0 : m->build.routing.model;
    for (int64_t l = 0; coef < 0 && l < m->config.layers; l++)
        if (m->config.layer[l].moe.experts)
            return m->config.layer[l].moe.aux_coef;
    return coef;
}

/* With n_e and p_te of L layers: coef E sum over e of (sum n_e / L T) (sum p_te / L T). */
static void balance_all(lm_builder *b, double coef)
{
    lm_model *m = b->m;
    int64_t layers = 0;
    const lm_vid count = sum_loads(b, &layers);
    for (int64_t l = 0; l < m->config.layers; l++) {
        const lm_routed_layer *r = &m->routed[l];
        const double k = (double)m->config.layer[l].moe.chosen;
        const lm_route_aux_attr attr = { .sigmoid = m->config.layer[l].moe.sigmoid,
                                         .balance = coef * k / (double)(layers * layers) };
        lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_SKIP, LM_SKIP, LM_SKIP };
        if (r->load == LM_NONE)
            continue;
        if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_route_aux, &attr,
                                           (lm_vid[]){ r->z, r->expert, count }, out, b->e))
            return;
        add_loss(b, out[0]);
    }
}

void lm_b_route_losses(lm_builder *b)
{
    lm_model *m = b->m;
    if (!lm_b_ok(b) || !m->routed)
        return;
    if (model_coef(m) > 0)
        balance_all(b, model_coef(m));
    if (lm_b_ok(b) && m->aux != LM_NONE)
        lm_graph_value(m->graph, LM_ROLE_INPUT, lm_shape1(lm_wide(m->build.precision.low), 1),
                       "daux", &m->daux, b->e);
}

/* ---- rows ---- */

lm_vid lm_b_to_experts(lm_builder *b, const lm_routed *r, lm_vid h)
{
    return lm_b_append(b, &lm_op_route_rows, NULL,
                       (lm_vid[]){ h, r->from, r->place, LM_NONE, r->offsets });
}

lm_vid lm_b_grouped(lm_builder *b, const lm_routed *r, lm_vid x, lm_vid w)
{
    const lm_value *v = b->m->graph->value;
    if (!lm_b_ok(b))
        return LM_NONE;
    const int64_t groups = v[r->offsets].t.dim[0] - 1;
    const lm_grouped_attr attr = { groups, v[w].t.dim[0] / groups, LM_ACC_FIRST };
    return lm_b_append(b, &lm_op_grouped_linear, &attr, (lm_vid[]){ x, w, r->offsets });
}

lm_vid lm_b_grouped_bias(lm_builder *b, const lm_routed *r, lm_vid x, lm_vid bias)
{
    if (!lm_b_ok(b))
        return LM_NONE;
    const lm_grouped_bias_attr attr = { b->m->graph->value[r->offsets].t.dim[0] - 1, LM_ACC_FIRST };
    return lm_b_append(b, &lm_op_grouped_bias, &attr, (lm_vid[]){ x, bias, r->offsets });
}

lm_vid lm_b_clamped(lm_builder *b, int64_t layer, lm_vid x)
{
    const lm_moe *m = &b->m->config.layer[layer].moe;
    const lm_clamped_swiglu_attr attr = { m->limit, m->alpha };
    return lm_b_append(b, &lm_op_clamped_swiglu, &attr, &x);
}

lm_vid lm_b_from_experts(lm_builder *b, const lm_routed *r, lm_vid x)
{
    return lm_b_append(b, &lm_op_route_sum, NULL,
                       (lm_vid[]){ x, r->from, r->place, r->weight, r->offsets });
}

lm_vid lm_b_weigh(lm_builder *b, lm_vid x, lm_vid gate)
{
    lm_vid y = LM_NONE;
    const lm_formula_name names[] = { LM_IS("x", x), LM_IS("g", gate), LM_MAKES("y", &y) };
    const lm_formula_scope scope = {
        .name = names, .n_names = 3, .numbers = LM_NONE, .gate = LM_NONE
    };
    if (!lm_b_ok(b) ||
        lm_formula_append(b->m->graph, "y = x / " LM_SIGMOID_DIVISOR("g"), &scope, b->e))
        return LM_NONE;
    return y;
}
