/* SPDX-License-Identifier: Apache-2.0 */
/* build_experts.c -- the parts of a mixture of experts.  The router runs in F32 whatever the rest does: small errors of
 * its logits would send tokens elsewhere. */
#include "kernels/grouped.h"
#include "kernels/matmul.h"
#include "kernels/route.h"
#include "model/build.h"
#include "op/formula.h"
#include "op/ops.h"

lm_routed lm_b_route(lm_builder *b, int64_t layer, lm_vid h, lm_vid w)
{
    const lm_moe *m = &b->m->config.layer[layer].moe;
    const lm_matmul_attr product = { .turn_b = true };
    const lm_route_attr choose = {
        .k = m->chosen, .normalise = m->normalise, .scale = 1, .site = layer
    };
    const lm_route_plan_attr plan = { .experts = m->experts };
    const lm_routed r = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    lm_vid z = lm_b_append(b, &lm_op_matmul, &product, (lm_vid[]){ h, w });
    lm_vid chosen[LM_MAX_OUT] = { LM_NONE, LM_NONE },
           rows[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE };
    if (!lm_b_ok(b) ||
        lm_graph_append(b->m->graph, &lm_op_route_choose, &choose, (lm_vid[]){ z, LM_NONE }, chosen,
                        b->e) ||
        lm_graph_append(b->m->graph, &lm_op_route_plan, &plan, &chosen[1], rows, b->e))
        return r;
    return (
        lm_routed){ .weight = chosen[0], .offsets = rows[0], .from = rows[1], .place = rows[2] };
}

lm_vid lm_b_to_experts(lm_builder *b, const lm_routed *r, lm_vid h)
{
    return lm_b_append(b, &lm_op_route_rows, NULL, (lm_vid[]){ h, r->from, r->place, LM_NONE });
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

lm_vid lm_b_from_experts(lm_builder *b, const lm_routed *r, lm_vid x)
{
    return lm_b_append(b, &lm_op_route_sum, NULL, (lm_vid[]){ x, r->from, r->place, r->weight });
}

lm_vid lm_b_weigh(lm_builder *b, lm_vid x, lm_vid gate)
{
    lm_vid y = LM_NONE;
    const lm_formula_name names[] = { LM_IS("x", x), LM_IS("g", gate), LM_MAKES("y", &y) };
    const lm_formula_scope scope = {
        .name = names, .n_names = 3, .numbers = LM_NONE, .gate = LM_NONE
    };
    if (!lm_b_ok(b) || lm_formula_append(b->m->graph, "y = x / (1 + exp(-g))", &scope, b->e))
        return LM_NONE;
    return y;
}
