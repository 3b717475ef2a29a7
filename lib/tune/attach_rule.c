/* SPDX-License-Identifier: Apache-2.0 */
/* attach_rule.c -- a method's own rules in the graph of a model. */
#include <string.h>

#include "kernels/arrange.h"
#include "kernels/noise.h"
#include "op/ops.h"
#include "tune/attach_impl.h"

bool lm_attach_only_output(const lm_attach *a)
{
    return a->method->output && !a->method->input;
}

static lm_rule rule_on(lm_builder *b)
{
    return (lm_rule){
        .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b), .shared = lm_b_shared(b)
    };
}

void lm_attach_end_rule(lm_builder *b, lm_rule *r)
{
    for (size_t i = 0; i < r->n_made; i++)
        lm_b_const(b, r->made[i].value, r->made[i].number, r->made[i].id, r->made[i].count);
    lm_rule_fini(r);
}

/* The product with the changed weight; its bias is added behind it, as its gradient needs the sum
 * over rows. */
static lm_vid by_weight(const lm_attach *a, lm_builder *b, lm_rule *r, const lm_tune_module *m,
                        const lm_adapt_linear *place, const lm_vid *p)
{
    const lm_tune_method *t = a->method;
    lm_vid wide = lm_b_append(b, &lm_op_widen, NULL, &place->w);
    lm_vid w = t->weight(r, m, wide, p), bias = place->bias;
    if (!t->bias)
        return lm_b_linear(b, place->x, w, bias);
    lm_vid plain = bias >= 0 ? lm_r_shape2(r, bias, 1, m->out) : LM_NONE;
    lm_vid changed = t->bias(r, m, wide, plain, p);
    if (changed == plain)
        return lm_b_linear(b, place->x, w, bias);
    lm_vid y = lm_b_linear(b, place->x, w, LM_NONE);
    return LM_R_MAP(r, "y = x + b", LM_IS("x", y), LM_IS("b", changed));
}

/* y with the noise of a method that has some, where the graph draws. */
static lm_vid with_noise(const lm_attach *a, lm_builder *b, lm_rule *r, const lm_tune_module *m,
                         const lm_adapt_linear *place, lm_vid y, const lm_vid *p)
{
    lm_noise_attr attr = { .amount = 1 };
    lm_vid up = LM_NONE, down = LM_NONE;
    if (!a->method->noise || !lm_b_adapter_draws(b, &attr.site))
        return y;
    a->method->noise(r, m, p, &up, &down);
    lm_vid h = lm_b_linear(b, place->x, down, LM_NONE);
    lm_vid none = lm_r_scale(r, 0, lm_r_stop(r, h));
    lm_vid n = lm_b_append(b, &lm_op_noise, &attr, &none);
    n = LM_R_MAP(r, "y = n * exp(h / 2)", LM_IS("n", n), LM_IS("h", h));
    return lm_r_add(r, y, 1, lm_b_linear(b, n, up, LM_NONE));
}

/* The only module of a place. */
static lm_vid one_module(lm_attach *a, lm_builder *b, const attach_module *m,
                         const lm_adapt_linear *place)
{
    const lm_tune_method *t = a->method;
    lm_vid p[LM_TUNE_TENSORS], y;
    lm_rule r = rule_on(b);
    lm_attach_declare(a, b, &m->module, p);
    if (!lm_b_ok(b)) {
        y = LM_NONE;
    } else if (t->input || t->output) {
        lm_vid x = t->input ? t->input(&r, &m->module, place->x, p) : place->x;
        y = lm_b_linear(b, x, place->w, place->bias);
        y = t->output ? t->output(&r, &m->module, x, y, p) : y;
    } else {
        y = by_weight(a, b, &r, &m->module, place, p);
        y = with_noise(a, b, &r, &m->module, place, y, p);
    }
    lm_attach_end_rule(b, &r);
    return y;
}

/* Columns [row, row + rows) of y. */
static lm_vid columns(lm_builder *b, lm_vid y, int64_t row, int64_t rows)
{
    if (!lm_b_ok(b))
        return LM_NONE;
    lm_window_attr attr = { .col = row, .rows = lm_b_graph(b)->value[y].t.dim[0], .cols = rows };
    return lm_b_append(b, &lm_op_window, &attr, &y);
}

/* Several modules whose results are changed: each a window of one product. */
static lm_vid some_modules(lm_attach *a, lm_builder *b, const lm_adapt_linear *place)
{
    lm_vid y = lm_b_linear(b, place->x, place->w, place->bias);
    lm_vid part[LM_JOIN_PARTS] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE,
                                   LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    lm_join_attr join = { .rows = false };
    lm_rule r = rule_on(b);
    for (int i = 0; i < place->n_modules; i++) {
        const attach_module *m = lm_attach_find(a, place->module[i].name);
        lm_vid p[LM_TUNE_TENSORS];
        part[i] = columns(b, y, place->module[i].row, place->module[i].rows);
        if (!m)
            continue;
        lm_attach_declare(a, b, &m->module, p);
        if (lm_b_ok(b))
            part[i] = a->method->output(&r, &m->module, place->x, part[i], p);
    }
    lm_attach_end_rule(b, &r);
    return lm_b_append(b, &lm_op_join, &join, part);
}

/* The first key of dropout that is above 0; NULL: there is none. */
static const char *dropout_of(const lm_attach *a, const attach_module *m)
{
    for (int i = 0; a->method->hyper[i].name; i++)
        if (strstr(a->method->hyper[i].name, "dropout") && m->hyper[i] > 0)
            return a->method->hyper[i].name;
    return NULL;
}

/* Rules drop nothing: refused where something would be dropped. */
bool lm_attach_may_drop(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place)
{
    const lm_build *o = &lm_b_model(b)->build;
    for (int i = 0; o->mode == LM_MODE_TRAIN && o->dropout && i < place->n_modules; i++) {
        const attach_module *m = lm_attach_find(a, place->module[i].name);
        const char *key = m ? dropout_of(a, m) : NULL;
        if (key) {
            lm_fail(lm_b_err(b), LM_EUSAGE, key, "set it to 0",
                    m->base->head ? "%s trains the head without dropout"
                                  : "%s trains without dropout",
                    a->method->name);
            return false;
        }
    }
    return true;
}

lm_vid lm_attach_rules(lm_attach *a, lm_builder *b, const lm_adapt_linear *place)
{
    if (!lm_attach_may_drop(a, b, place))
        return LM_NONE;
    if (place->n_modules > 1)
        return some_modules(a, b, place);
    return one_module(a, b, lm_attach_find(a, place->module[0].name), place);
}
