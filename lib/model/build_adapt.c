/* SPDX-License-Identifier: Apache-2.0 */
/* build_adapt.c -- the places of a decoder at which an adapter's functions run. */
#include <stdio.h>

#include "base/mem.h"
#include "kernels/elementwise.h"
#include "model/build.h"
#include "op/ops.h"

/* ---- for the adapter's functions ---- */

lm_graph *lm_b_graph(const lm_builder *b)
{
    return b->m->graph;
}

lm_model *lm_b_model(const lm_builder *b)
{
    return b->m;
}

uint64_t lm_b_number(const lm_builder *b)
{
    return b->number;
}

lm_arena *lm_b_arena(const lm_builder *b)
{
    return b->arena;
}

lm_err *lm_b_err(const lm_builder *b)
{
    return b->e;
}

/* Sites of the model's own dropout keep their numbers, and so their masks. */
bool lm_b_adapter_draws(lm_builder *b, int64_t *site)
{
    enum { ADAPTER_SITES = 1 << 20 };
    *site = ADAPTER_SITES + b->adapter_site++;
    return b->m->build.mode == LM_MODE_TRAIN && b->m->build.dropout;
}

lm_vid lm_b_adapter_dropout(lm_builder *b, lm_vid x, double p)
{
    lm_dropout_attr attr = { .p = p };
    return lm_b_adapter_draws(b, &attr.site) && p > 0 ? lm_b_append(b, &lm_op_dropout, &attr, &x)
                                                      : x;
}

void lm_b_const(lm_builder *b, lm_vid value, const double *number, const int32_t *id, int64_t count)
{
    lm_model *m = b->m;
    if (!lm_b_ok(b) || lm_grow(&m->constant, &b->cap_constants, (size_t)m->n_constants + 1,
                               sizeof *m->constant, "constants", b->e))
        return;
    m->constant[m->n_constants++] = (lm_model_const){ value, number, id, count };
}

void **lm_b_shared(lm_builder *b)
{
    return &b->shared;
}

/* ---- places ---- */

/* The adapter's functions, while they may run. */
static const lm_adapt *enter(lm_builder *b)
{
    b->adapting = b->m->build.adapt && lm_b_ok(b);
    return b->adapting ? b->m->build.adapt : NULL;
}

static lm_vid leave(lm_builder *b, lm_vid made, lm_vid plain)
{
    b->adapting = false;
    return made >= 0 ? made : plain;
}

/* True if some of the modules' tensors of one kind train and others do not: a parameter trains as a whole. */
static bool differ(const lm_builder *b, const lm_adapt_linear *place)
{
    static const char *const kind[] = { "weight", "bias" };
    const lm_build *how = &b->m->build;
    char name[LM_TENSOR_NAME + 8];
    for (int k = 0; how->trainable && k < 2; k++) {
        bool first = false;
        for (int i = 0; i < place->n_modules; i++) {
            snprintf(name, sizeof name, "%s.%s", place->module[i].name, kind[k]);
            bool trains = how->trainable(how->ctx, name);
            if (i && trains != first)
                return true;
            first = trains;
        }
    }
    return false;
}

bool lm_b_apart(lm_builder *b, const lm_adapt_linear *place)
{
    const lm_adapt *a = b->m->build.adapt;
    return place->n_modules > 1 && (differ(b, place) || (a && a->apart && a->apart(a->ctx, place)));
}

lm_vid lm_b_product(lm_builder *b, const lm_adapt_linear *place)
{
    const lm_adapt *a = enter(b);
    lm_vid y = leave(b, a && a->linear ? a->linear(a->ctx, b, place) : LM_NONE, LM_NONE);
    return y >= 0 ? y : lm_b_linear(b, place->x, place->w, place->bias);
}

lm_vid lm_b_adapt_grouped(lm_builder *b, const lm_routed *r, int64_t layer, bool down, lm_vid x,
                          lm_vid w)
{
    lm_adapt_experts place = { .x = x,
                               .w = w,
                               .offsets = r->offsets,
                               .experts = b->m->config.layer[layer].moe.experts,
                               .down = down };
    const lm_adapt *a = enter(b);
    snprintf(place.module, sizeof place.module, "%.60s%lld.mlp.experts", b->m->config.arch->layers,
             (long long)layer);
    lm_vid y = leave(b, a && a->experts ? a->experts(a->ctx, b, &place) : LM_NONE, LM_NONE);
    return y >= 0 ? y : lm_b_grouped(b, r, x, w);
}

lm_vid lm_b_adapt_embed(lm_builder *b, const lm_adapt_embed *place)
{
    const lm_adapt *a = enter(b);
    return leave(b, a && a->embed ? a->embed(a->ctx, b, place) : LM_NONE, place->x);
}

lm_vid lm_b_adapt_branch(lm_builder *b, const lm_adapt_branch *place)
{
    const lm_adapt *a = enter(b);
    return leave(b, a && a->branch ? a->branch(a->ctx, b, place) : LM_NONE, place->h);
}

lm_vid lm_b_adapt_heads(lm_builder *b, const lm_adapt_heads *place)
{
    const lm_adapt *a = enter(b);
    return leave(b, a && a->heads ? a->heads(a->ctx, b, place) : LM_NONE, place->qkv);
}

lm_vid lm_b_adapt_head(lm_builder *b, const lm_adapt_linear *place)
{
    const lm_adapt *a = enter(b);
    return leave(b, a && a->head ? a->head(a->ctx, b, place) : LM_NONE, place->w);
}

lm_vid lm_b_adapt_logits(lm_builder *b, const lm_adapt_linear *place, lm_vid y)
{
    const lm_adapt *a = enter(b);
    return leave(b, a && a->logits ? a->logits(a->ctx, b, place, y) : LM_NONE, y);
}
