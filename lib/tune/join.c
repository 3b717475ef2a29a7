/* SPDX-License-Identifier: Apache-2.0 */
/* join.c -- see join.h. */
#include "tune/join.h"

#include <stdio.h>

#include "base/mem.h"
#include "kernels/embed.h"
#include "op/ops.h"
#include "tune/attach_impl.h"
#include "tune/methods.h"

struct lm_join {
    lm_adapt adapt;
    lm_loaded_adapter adapter;
    lm_attach **of;
    const lm_st **tensors;
    int n;
    uint64_t building; /* the graph that the masks belong to (lm_b_number) */
};

bool lm_join_takes(const lm_attach *a)
{
    if (a->method != &lm_tune_lora || !a->n_modules || a->adapt.head || a->adapt.experts)
        return false;
    for (size_t i = 0; i < a->n_modules; i++)
        if (!lm_attach_is_lora(a, &a->module[i]) || lm_attach_has_lengths(a, &a->module[i]))
            return false;
    for (size_t i = 0; i < a->bases->n; i++) {
        const lm_tune_base *b = &a->bases->at[i];
        if ((b->weight && lm_attach_trains((void *)(uintptr_t)a, b->weight)) ||
            (b->bias && lm_attach_trains((void *)(uintptr_t)a, b->bias)))
            return false;
    }
    return true;
}

/* [N,1]: one in the rows of adapter k, by a table with a row for each number. */
static lm_vid make_mask(const lm_join *j, lm_builder *b, int k)
{
    const lm_embed_attr embed = { .scale = 0 };
    const int64_t rows = j->n + 1;
    lm_vid table = LM_NONE;
    double *number = NULL;
    if (lm_arena_alloc(lm_b_arena(b), &number, (size_t)rows, sizeof *number, lm_b_err(b)) ||
        lm_graph_value(lm_b_graph(b), LM_ROLE_CONST, lm_shape2(LM_DTYPE_F32, rows, 1), "adapter",
                       &table, lm_b_err(b)))
        return LM_NONE;
    for (int64_t i = 0; i < rows; i++)
        number[i] = i == k + 1;
    lm_b_const(b, table, number, NULL, rows);
    return lm_b_append(b, &lm_op_embed, &embed,
                       (lm_vid[]){ lm_b_model(b)->chosen, table, LM_NONE, LM_NONE });
}

static void begin(lm_join *j, lm_builder *b)
{
    if (j->building == lm_b_number(b))
        return;
    j->building = lm_b_number(b);
    for (int k = 0; k < j->n; k++) {
        j->of[k]->mask = lm_b_ok(b) ? make_mask(j, b, k) : LM_NONE;
        snprintf(j->of[k]->prefix, sizeof j->of[k]->prefix, "%d:", k + 1);
    }
}

static lm_vid linear(void *ctx, lm_builder *b, const lm_adapt_linear *place)
{
    lm_join *j = ctx;
    lm_vid *h = NULL;
    size_t n = (size_t)j->n * LM_ADAPT_MODULES;
    begin(j, b);
    if (!lm_b_ok(b) || lm_arena_alloc(lm_b_arena(b), &h, n, sizeof *h, lm_b_err(b)))
        return LM_NONE;
    int paths = 0;
    for (int k = 0; k < j->n; k++)
        paths += lm_attach_lora_down(j->of[k], b, place, h + (ptrdiff_t)k * LM_ADAPT_MODULES);
    if (!paths)
        return LM_NONE;
    lm_vid y = lm_b_linear(b, place->x, place->w, place->bias);
    for (int k = 0; k < j->n; k++)
        y = lm_attach_lora_up(j->of[k], b, place, h + (ptrdiff_t)k * LM_ADAPT_MODULES, y);
    return y;
}

static lm_vid embed(void *ctx, lm_builder *b, const lm_adapt_embed *place)
{
    lm_join *j = ctx;
    lm_vid x = LM_NONE;
    begin(j, b);
    for (int k = 0; k < j->n && lm_b_ok(b); k++) {
        const attach_module *m = lm_attach_find(j->of[k], place->module.name);
        lm_adapt_embed now = *place;
        now.x = x >= 0 ? x : place->x;
        if (m)
            x = lm_attach_lora_embed(j->of[k], b, &now, m);
    }
    return x;
}

static bool replaces(void *ctx, const char *tensor)
{
    (void)ctx;
    (void)tensor;
    return false;
}

lm_code lm_join_new(lm_attach *const *a, const lm_st *const *tensors, int n, lm_join **out,
                    lm_err *e)
{
    lm_join *j = NULL;
    *out = NULL;
    if (lm_alloc_n(&j, 1, sizeof *j, "adapters", e))
        return e->code;
    if (lm_alloc_n(&j->of, (size_t)n, sizeof *j->of, "adapters", e) ||
        lm_alloc_n(&j->tensors, (size_t)n, sizeof *j->tensors, "adapters", e)) {
        lm_join_free(j);
        return e->code;
    }
    for (int k = 0; k < n; k++) {
        j->of[k] = a[k];
        j->tensors[k] = tensors[k];
    }
    j->n = n;
    j->adapt = (lm_adapt){ .ctx = j, .linear = linear, .embed = embed };
    j->adapter = (lm_loaded_adapter){
        .adapt = &j->adapt, .replaces = replaces, .ctx = j, .joined = n, .each = j->tensors
    };
    *out = j;
    return LM_OK;
}

void lm_join_free(lm_join *j)
{
    if (!j)
        return;
    lm_free(j->of);
    lm_free(j->tensors);
    lm_free(j);
}

const lm_loaded_adapter *lm_join_adapter(const lm_join *j)
{
    return &j->adapter;
}
