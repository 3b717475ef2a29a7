/* SPDX-License-Identifier: Apache-2.0 */
/* attach_head.c -- an adapter of the head.
 *
 * Losses read the head's matrix row by row and never hold all logits, so what trains is the changed
 * matrix W', which each step computes: its gradient flows on to the adapter.  In generation a plain
 * LoRA adds s (x A^T) B^T to the logits instead, in F32: of few rows that is far less work. */
#include <math.h>

#include "op/ops.h"
#include "tune/attach_impl.h"
#include "tune/methods.h"

/* The module of the head that is changed; NULL: none. */
static const attach_module *head_module(const lm_attach *a)
{
    for (size_t i = 0; i < a->n_modules; i++)
        if (a->module[i].base->head)
            return &a->module[i];
    return NULL;
}

static bool is_path(const lm_attach *a, const attach_module *m)
{
    return a->method == &lm_tune_lora && lm_attach_is_lora(a, m) && !lm_attach_has_lengths(a, m);
}

/* W' [V,C] of the head. */
static lm_vid changed_head(lm_attach *a, lm_builder *b, const attach_module *m,
                           const lm_adapt_linear *place)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    lm_vid p[LM_TUNE_TENSORS], w;
    lm_attach_declare(a, b, &m->module, p);
    w = lm_b_append(b, &lm_op_widen, NULL, &place->w);
    w = lm_b_ok(b) ? a->method->weight(&r, &m->module, w, p) : LM_NONE;
    if (lm_b_ok(b) && a->method->bias && a->method->bias(&r, &m->module, place->w, LM_NONE, p) >= 0)
        lm_fail(r.e, LM_EUSAGE, m->module.name, "take it from the targets",
                "%s adds a bias to the head, which has none", a->method->name);
    lm_attach_end_rule(b, &r);
    return w;
}

static lm_vid head(void *ctx, lm_builder *b, const lm_adapt_linear *place)
{
    lm_attach *a = ctx;
    const attach_module *m = head_module(a);
    bool generates = lm_b_model(b)->build.mode == LM_MODE_GENERATE;
    if (!m)
        return lm_attach_tokens_head(ctx, b, place);
    if (!lm_attach_may_drop(a, b, place) || (generates && is_path(a, m)))
        return LM_NONE;
    return changed_head(a, b, m, place);
}

static lm_vid logits(void *ctx, lm_builder *b, const lm_adapt_linear *place, lm_vid y)
{
    const lm_attach *a = ctx;
    const attach_module *m = head_module(a);
    if (!m || !is_path(a, m))
        return LM_NONE;
    return lm_attach_lora_logits(a, b, place, m, y);
}

lm_code lm_attach_head_check(const lm_attach *a, const attach_module *m, const char *where,
                             lm_err *e)
{
    return a->method->weight
               ? LM_OK
               : lm_fail(e, LM_EUSAGE, where, "take it from the targets",
                         "%s has no form on the head '%s'", a->method->name, m->base->name);
}

void lm_attach_head_set(lm_attach *a)
{
    if (head_module(a) || a->tokens.base)
        a->adapt.head = head;
    if (head_module(a))
        a->adapt.logits = logits;
}
