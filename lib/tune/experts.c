/* SPDX-License-Identifier: Apache-2.0 */
/* experts.c -- parameters of all experts, in the files of a base. */
#include "tune/experts.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

enum { NAME = 600, PIECES = 2 };

/* In the order of declaration.  `pieces`: matrices of an expert that make the parameter, one below
 * the other. */
static const struct {
    const char *name, *pieces[3][PIECES];
} known[] = {
    { "gate_up_proj", { { "gate_proj", "up_proj" }, { "w1", "w3" }, { "fc1", "fc3" } } },
    { "gate_proj", { { "gate_proj" } } },
    { "up_proj", { { "up_proj" } } },
    { "down_proj", { { "down_proj" }, { "w2" }, { "fc2" } } },
};
enum { KNOWN = sizeof known / sizeof *known };

int lm_tune_stack_order(const char *name)
{
    int i = 0;

    while (i < KNOWN && strcmp(known[i].name, name) != 0)
        i++;
    return i;
}

/* Types of models whose files hold [E,in,out].  Only where out = in does it matter: else shapes say
 * it. */
static bool turns(const json_t *config)
{
    static const char *const types[] = { "gpt_oss", "openai_privacy_filter", "aria_text",
                                         "qwen3_vl_moe_text", "qwen3_vl_moe" };
    const char *type = json_string_value(json_object_get(config, "model_type"));

    for (size_t i = 0; type && i < sizeof types / sizeof *types; i++)
        if (!strcmp(types[i], type))
            return true;
    return false;
}

bool lm_tune_stack_is(const lm_st_tensor *t)
{
    return t->ndim == 3 && t->count && lm_dtype_is_float(t->dtype) && strstr(t->name, ".experts.");
}

/* One tensor of all experts. */
static lm_code take_whole(const lm_tune_bases *b, const char *name, lm_arena *arena,
                          lm_tune_stack *s, bool *found, lm_err *e)
{
    const lm_st_tensor *t = lm_tune_tensor_find(b->source, name);
    lm_code rc;

    *found = t && t->ndim == 3 && t->count && lm_dtype_is_float(t->dtype);
    if (!*found)
        return LM_OK;
    rc = lm_arena_alloc(arena, &s->slice, 1, sizeof *s->slice, e);
    if (rc)
        return rc;
    s->experts = t->dim[0];
    s->turned = turns(b->config);
    s->out = t->dim[s->turned ? 2 : 1];
    s->in = t->dim[s->turned ? 1 : 2];
    s->slice[0] = (lm_tune_slice){ .base = t, .expert = -1, .rows = s->out };
    s->n = 1;
    return LM_OK;
}

/* The matrix of an expert; files of Mixtral call the module block_sparse_moe. */
static const lm_st_tensor *matrix_of(const lm_tune_bases *b, const char *module, int64_t expert,
                                     const char *piece)
{
    static const char here[] = ".mlp.";
    const char *at = strstr(module, here);
    const lm_st_tensor *t;
    char name[NAME];

    snprintf(name, sizeof name, "%.300s.%lld.%s.weight", module, (long long)expert, piece);
    t = lm_tune_tensor_find(b->source, name);
    if (!t && at) {
        snprintf(name, sizeof name, "%.*s.block_sparse_moe.%.200s.%lld.%s.weight",
                 (int)(at - module < 200 ? at - module : 200), module, at + sizeof here - 1,
                 (long long)expert, piece);
        t = lm_tune_tensor_find(b->source, name);
    }
    return t && t->ndim == 2 && t->count && lm_dtype_is_float(t->dtype) ? t : NULL;
}

/* A matrix for each expert; `pieces` of one way to call them. */
static lm_code take_matrices(const lm_tune_bases *b, const char *module,
                             const char *const pieces[PIECES], lm_arena *arena, lm_tune_stack *s,
                             bool *found, lm_err *e)
{
    int64_t per = pieces[1] ? 2 : 1, experts = 0;
    lm_code rc;

    while (pieces[0] && matrix_of(b, module, experts, pieces[0]))
        experts++;
    if (!experts)
        return LM_OK;
    rc = lm_arena_alloc(arena, &s->slice, (size_t)(experts * per), sizeof *s->slice, e);
    for (int64_t x = 0; !rc && x < experts; x++) {
        int64_t row = 0;

        for (int64_t k = 0; k < per; k++) {
            const lm_st_tensor *t = matrix_of(b, module, x, pieces[k]);

            if (!t || (s->in && t->dim[1] != s->in))
                return lm_fail(e, LM_EUSAGE, b->path, "copy all files of the model",
                               "expert %lld of '%.150s' %s %s", (long long)x, module,
                               t ? "has another shape than the others in" : "has no", pieces[k]);
            s->in = t->dim[1];
            s->slice[s->n++] = (lm_tune_slice){ t, x, row, t->dim[0] };
            row += t->dim[0];
        }
        if (x && row != s->out)
            return lm_fail(e, LM_EUSAGE, b->path, "copy all files of the model",
                           "expert %lld of '%.150s' has another shape than the others in %s",
                           (long long)x, module, pieces[0]);
        s->out = row;
    }
    s->experts = experts;
    *found = !rc;
    return rc;
}

lm_code lm_tune_stack_find(const lm_tune_bases *b, const char *module, const char *name,
                           lm_arena *arena, lm_tune_stack *out, bool *found, lm_err *e)
{
    int order = lm_tune_stack_order(name);
    char key[NAME];
    char *text[3] = { NULL };
    lm_code rc;

    *found = false;
    *out = (lm_tune_stack){ 0 };
    if (snprintf(key, sizeof key, "%s.%s", module, name) >= (int)sizeof key)
        return LM_OK;
    rc = lm_arena_strdup(arena, &text[0], module, strlen(module), e);
    rc = rc ? rc : lm_arena_strdup(arena, &text[1], name, strlen(name), e);
    rc = rc ? rc : lm_arena_strdup(arena, &text[2], key, strlen(key), e);
    out->module = text[0];
    out->name = text[1];
    out->key = text[2];
    rc = rc ? rc : take_whole(b, key, arena, out, found, e);
    for (int i = 0; !rc && !*found && order < KNOWN && i < 3; i++)
        rc = take_matrices(b, module, known[order].pieces[i], arena, out, found, e);
    return rc;
}

/* Rows of lora_A lie side by side; columns of lora_B are E apart, and are read where the file is
 * mapped. */
lm_code lm_tune_param_expert(const lm_st *st, const lm_tune_param *p, int64_t expert, double *left,
                             double *right, lm_err *e)
{
    int64_t r = p->rank, in = p->stack.in, out = p->stack.out, experts = p->stack.experts;
    size_t size = lm_dtype_size(p->a->dtype), rows = (size_t)(r * in) * size;
    const char *b = lm_st_data(st, p->b);
    char *raw = NULL, *kept = NULL;
    lm_code rc = lm_alloc_n(&raw, rows, 1, "adapter", e);

    rc = rc ? rc : lm_st_read(st, p->a, (uint64_t)expert * rows, raw, rows, e);
    if (!rc)
        lm_convert(p->a->dtype, raw, LM_DTYPE_F64, right, r * in);
    if (!rc && !b) {
        rc = lm_alloc_n(&kept, (size_t)p->b->bytes, 1, "adapter", e);
        rc = rc ? rc : lm_st_read(st, p->b, 0, kept, (size_t)p->b->bytes, e);
        b = kept;
    }
    size = lm_dtype_size(p->b->dtype);
    for (int64_t i = 0; !rc && i < out * r; i++)
        lm_convert(p->b->dtype, b + (size_t)(i * experts + expert) * size, LM_DTYPE_F64, &left[i],
                   1);
    lm_free(raw);
    lm_free(kept);
    return rc;
}
