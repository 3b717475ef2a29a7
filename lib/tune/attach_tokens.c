/* SPDX-License-Identifier: Apache-2.0 */
/* attach_tokens.c -- rows of the embedding that train: those of TRAINABLE_TOKENS, and those that
 * LoRA has beside its factors (trainable_token_indices).
 *
 * delta [n,C] has the rows that take the place of the table's.  What changes is D = delta - the
 * table's rows: the embedding adds scale S D to its result, where S [N,n] has a 1 in the column of
 * a row's token; a tied head reads W + P D, P [V,n] likewise. The table itself is not copied for
 * the embedding. */
#include <stdio.h>
#include <string.h>

#include "kernels/embed.h"
#include "op/ops.h"
#include "tune/attach_impl.h"
#include "tune/methods.h"

/* ---- the configuration ---- */

static const char beside_key[] = "trainable_token_indices";

/* The embedding of tokens is the first of the base's; positions follow it. */
static const lm_tune_base *embedding_of(const lm_attach *a)
{
    for (size_t i = 0; i < a->bases->n; i++)
        if (a->bases->at[i].kind == LM_TUNE_EMBEDDING)
            return &a->bases->at[i];
    return NULL;
}

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return m <= n && !strcmp(name + n - m, end) && (m == n || name[n - m - 1] == '.');
}

/* LoRA's list, or the only entry of its map, which names the embedding. */
static lm_code find_list(const lm_attach *a, const char *module, const char *where,
                         const json_t **out, lm_err *e)
{
    const json_t *all = json_object_get(a->adapter, beside_key);
    const char *key;
    json_t *v;
    *out = json_is_array(all) ? all : NULL;
    if (!all || json_is_null(all) || *out)
        return LM_OK;
    json_object_foreach((json_t *)(uintptr_t)all, key, v)
    {
        if (!ends_in(module, key))
            return lm_fail(e, LM_EUSAGE, where, "name the embedding of tokens alone",
                           "%s names '%.60s', and the embedding is '%s'", beside_key, key, module);
        *out = v;
    }
    return *out ? LM_OK
                : lm_fail(e, LM_EFORMAT, where, "write [3,5] or {\"embed_tokens\": [3,5]}",
                          "%s is neither a list nor a map", beside_key);
}

/* The same check as that of adapters that are merged, which reads token_indices. */
static lm_code check_list(const lm_tune_module *of, const json_t *list, lm_err *e)
{
    lm_tune_tensor t[2];
    lm_tune_module m = *of;
    int n = 0;
    json_t *config = json_pack("{sO}", "token_indices", list);
    if (!config)
        return lm_fail(e, LM_ELIMIT, beside_key, NULL, "no memory");
    m.config = config;
    lm_code rc = lm_tune_tokens.tensors(&m, t, &n, e);
    json_decref(config);
    return rc;
}

lm_code lm_attach_tokens_set(lm_attach *a, const char *where, lm_err *e)
{
    const lm_tune_base *base = embedding_of(a);
    bool own = a->method == &lm_tune_tokens;
    const json_t *list = own ? json_object_get(a->adapter, "token_indices") : NULL;
    if (own && (a->n_modules != 1 || a->module[0].base != base))
        return lm_fail(e, LM_EUSAGE, where, "name the embedding alone as the target",
                       "other modules have no rows of tokens");
    if (!base || (!own && find_list(a, base->name, where, &list, e)) || !list)
        return e->code;
    const lm_tune_module m = { .name = base->name, .out = base->out, .in = base->in };
    if (check_list(&m, list, e))
        return e->code;
    if (!own && lm_attach_find(a, base->name))
        return lm_fail(e, LM_EUSAGE, where, "take the embedding from the targets",
                       "%s has rows of its own in %s", base->name, beside_key);
    a->tokens.base = base;
    a->tokens.list = list;
    a->tokens.beside = !own;
    return LM_OK;
}

bool lm_attach_tokens(const lm_attach *a, lm_attach_rows *out)
{
    if (!a->tokens.base)
        return false;
    *out = (lm_attach_rows){ .weight = a->tokens.base->weight,
                             .vocab = a->tokens.base->in,
                             .width = a->tokens.base->out,
                             .list = a->tokens.list };
    snprintf(out->name, sizeof out->name, "base_model.model.%s.%strainable_tokens_delta",
             a->tokens.base->name, a->tokens.beside ? "token_adapter." : "");
    return true;
}

/* ---- the graph ---- */

static lm_vid ids_of(const lm_attach *a, lm_builder *b)
{
    int64_t n = (int64_t)json_array_size(a->tokens.list);
    int32_t *id = NULL;
    lm_vid v = LM_NONE;
    if (!lm_b_ok(b) || lm_arena_alloc(lm_b_arena(b), &id, (size_t)n, sizeof *id, lm_b_err(b)) ||
        lm_graph_value(lm_b_graph(b), LM_ROLE_CONST, lm_shape1(LM_DTYPE_I32, n), NULL, &v,
                       lm_b_err(b)))
        return LM_NONE;
    for (int64_t i = 0; i < n; i++)
        id[i] = (int32_t)json_integer_value(json_array_get(a->tokens.list, (size_t)i));
    lm_b_const(b, v, NULL, id, n);
    return v;
}

/* P [V,n] */
static lm_vid places_of(const lm_attach *a, lm_rule *r)
{
    int64_t n = (int64_t)json_array_size(a->tokens.list), vocab = a->tokens.base->in;
    double *p = NULL;
    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &p, (size_t)(n * vocab), sizeof *p, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < n; i++)
        p[json_integer_value(json_array_get(a->tokens.list, (size_t)i)) * n + i] = 1;
    return lm_r_const(r, LM_DIMS(vocab, n), p);
}

/* Declares delta, and computes D, once for a graph. */
static void make_change(lm_attach *a, lm_builder *b, lm_rule *r, lm_vid table)
{
    lm_attach_rows rows;
    lm_embed_attr plain = { .scale = 0 };
    int64_t n = (int64_t)json_array_size(a->tokens.list);
    lm_attach_begin(a, b);
    lm_attach_tokens(a, &rows);
    lm_vid delta = lm_b_param(b, 2, (int64_t[]){ n, rows.width }, "%s.trainable_tokens_delta",
                              a->tokens.base->name);
    lm_b_slice(b, n, false, LM_INIT_ZEROS, 0, "%s", rows.name);
    if (!a->tokens.beside && a->config->tied) /* PEFT's file has both names */
        lm_b_again(b, "base_model.model.lm_head.trainable_tokens_delta");
    lm_vid was =
        lm_b_append(b, &lm_op_embed, &plain, (lm_vid[]){ ids_of(a, b), table, LM_NONE, LM_NONE });
    a->tokens.table = table;
    a->tokens.places = places_of(a, r);
    a->tokens.change =
        lm_b_ok(b) ? LM_R_MAP(r, "y = d - w", LM_IS("d", delta), LM_IS("w", lm_r_stop(r, was)))
                   : LM_NONE;
}

lm_vid lm_attach_tokens_embed(lm_attach *a, lm_builder *b, const lm_adapt_embed *place, lm_vid x)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    lm_embed_attr plain = { .scale = 0 };
    make_change(a, b, &r, place->table);
    lm_vid s = lm_b_append(b, &lm_op_embed, &plain,
                           (lm_vid[]){ place->tokens, a->tokens.places, LM_NONE, LM_NONE });
    lm_vid d = lm_r_turn(&r, a->tokens.change);
    if (place->scale > 0 && place->scale != 1)
        d = lm_r_scale(&r, place->scale, d);
    x = lm_b_add(b, x, lm_b_linear(b, s, d, LM_NONE));
    lm_attach_end_rule(b, &r);
    return x;
}

/* Of a tied head. */
lm_vid lm_attach_tokens_head(void *ctx, lm_builder *b, const lm_adapt_linear *place)
{
    lm_attach *a = ctx;
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    if (a->building != lm_b_number(b) || place->w != a->tokens.table)
        return LM_NONE;
    lm_vid w = lm_b_append(b, &lm_op_widen, NULL, &place->w);
    w = lm_r_add(&r, w, 1, lm_r_matmul(&r, a->tokens.places, false, a->tokens.change, false));
    lm_attach_end_rule(b, &r);
    return w;
}
