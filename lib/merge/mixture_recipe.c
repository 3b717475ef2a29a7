/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_recipe.c -- see mixture_recipe.h. */
#include "merge/mixture_recipe.h"

#include <stdio.h>
#include <string.h>

enum { MOST_EXPERTS = 4096 };

typedef struct {
    lm_mixture_recipe *r;
    const char *where;
    lm_err *e;
} reader;

static lm_code wrong(const reader *x, const lm_yaml *y, const char *key, const char *need)
{
    return lm_yaml_wrong(y, x->where, key, need, x->e);
}

static lm_code check_keys(const reader *x, const lm_yaml *map, const char *what,
                          const char *const *known)
{
    return lm_yaml_check_keys(map, x->where, what, known, x->e);
}

static lm_code get_text(const reader *x, const lm_yaml *map, const char *key, const char **out)
{
    const lm_yaml *y = lm_yaml_given(map, key);
    char *copy = NULL;

    *out = NULL;
    if (!y)
        return LM_OK;
    if (y->kind != LM_YAML_SCALAR)
        return wrong(x, y, key, "a string");
    lm_code rc = lm_arena_strdup(x->r->arena, &copy, y->text, strlen(y->text), x->e);
    *out = copy;
    return rc;
}

static lm_code get_number(const reader *x, const lm_yaml *map, const char *key, double least,
                          double *out)
{
    const lm_yaml *y = lm_yaml_given(map, key);
    return y && (!lm_yaml_number(y, out) || *out < least) ? wrong(x, y, key, "a number in range")
                                                          : LM_OK;
}

static lm_code get_prompts(const reader *x, const lm_yaml *map, const char *key, const char ***out,
                           int *n)
{
    const lm_yaml *y = lm_yaml_given(map, key);
    lm_code rc = LM_OK;

    if (!y)
        return LM_OK;
    if (y->kind != LM_YAML_LIST || y->n > MOST_EXPERTS)
        return wrong(x, y, key, "a list of texts");
    if (lm_arena_alloc(x->r->arena, out, y->n + 1, sizeof **out, x->e))
        return x->e->code;
    for (size_t i = 0; !rc && i < y->n; i++) {
        char *copy = NULL;
        if (y->item[i]->kind != LM_YAML_SCALAR || !*y->item[i]->text)
            return wrong(x, y->item[i], key, "a text");
        rc = lm_arena_strdup(x->r->arena, &copy, y->item[i]->text, strlen(y->item[i]->text), x->e);
        (*out)[(*n)++] = copy;
    }
    return rc;
}

static lm_code read_expert(const reader *x, const lm_yaml *y, lm_recipe_expert *out)
{
    static const char *const known[] = { "source_model", "positive_prompts", "negative_prompts",
                                         "noise_scale",  "residual_scale",   NULL };
    *out = (lm_recipe_expert){ .residual = 1 };
    if (check_keys(x, y, "experts", known) || get_text(x, y, "source_model", &out->path))
        return x->e->code;
    if (!out->path)
        return wrong(x, y, "source_model", "a model's path");
    if (get_prompts(x, y, "positive_prompts", &out->positive, &out->n_positive) ||
        get_prompts(x, y, "negative_prompts", &out->negative, &out->n_negative) ||
        get_number(x, y, "noise_scale", 0, &out->noise))
        return x->e->code;
    return get_number(x, y, "residual_scale", -1e30, &out->residual);
}

static lm_code read_experts(const reader *x, const lm_yaml *root)
{
    const lm_yaml *list = lm_yaml_given(root, "experts"),
                  *shared = lm_yaml_given(root, "shared_experts");
    lm_mixture_recipe *r = x->r;
    lm_code rc = LM_OK;

    if (!list || list->kind != LM_YAML_LIST || !list->n || list->n > MOST_EXPERTS)
        return wrong(x, list ? list : root, "experts", "a list of models");
    if (lm_arena_alloc(r->arena, &r->expert, list->n + 1, sizeof *r->expert, x->e))
        return x->e->code;
    for (size_t i = 0; !rc && i < list->n; i++)
        rc = read_expert(x, list->item[i], &r->expert[r->n++]);
    if (rc || !shared)
        return rc;
    if (shared->kind != LM_YAML_LIST || shared->n > 1)
        return wrong(x, shared, "shared_experts", "a list of one model");
    if (shared->n)
        r->shared = &r->expert[r->n];
    return shared->n ? read_expert(x, shared->item[0], r->shared) : LM_OK;
}

static lm_code read_mode(const reader *x, const lm_yaml *root)
{
    static const char *const names[] = { "hidden",      "hidden_last", "hidden_avg",
                                         "cheap_embed", "random",      "uniform_random" };
    static const lm_gate_mode modes[] = { LM_GATE_HIDDEN, LM_GATE_HIDDEN, LM_GATE_HIDDEN_AVG,
                                          LM_GATE_EMBED,  LM_GATE_RANDOM, LM_GATE_UNIFORM };
    const lm_yaml *y = lm_yaml_given(root, "gate_mode");

    x->r->mode = LM_GATE_HIDDEN;
    for (size_t i = 0; y && i < sizeof names / sizeof *names; i++)
        if (y->kind == LM_YAML_SCALAR && !strcmp(y->text, names[i])) {
            x->r->mode = modes[i];
            return LM_OK;
        }
    return y ? wrong(x, y, "gate_mode",
                     "hidden, hidden_avg, hidden_last, cheap_embed, random or uniform_random")
             : LM_OK;
}

static bool same_texts(const char *const *a, int n, const char *const *b, int m)
{
    bool same = n == m;
    for (int i = 0; same && i < n; i++)
        same = !strcmp(a[i], b[i]);
    return same;
}

/* What does not make a mixture that works. */
static lm_code check(const reader *x)
{
    const lm_mixture_recipe *r = x->r;
    const lm_recipe_expert *first = r->expert;
    bool prompts = true, models = true;

    if (r->chosen < 1 || r->chosen > r->n)
        return lm_fail(x->e, LM_EUSAGE, x->where, NULL, "experts_per_token is %lld, of %d experts",
                       (long long)r->chosen, r->n);
    if (r->mode == LM_GATE_RANDOM || r->mode == LM_GATE_UNIFORM)
        return LM_OK;
    for (int i = 0; i < r->n + (r->shared != NULL); i++)
        if (!r->expert[i].n_positive)
            return lm_fail(x->e, LM_EUSAGE, x->where, "add them, or set gate_mode to random",
                           "%s %d has no positive_prompts", i < r->n ? "expert" : "shared expert",
                           i < r->n ? i : 0);
    for (int i = 1; i < r->n; i++) {
        const lm_recipe_expert *y = &r->expert[i];
        prompts = prompts &&
                  same_texts(first->positive, first->n_positive, y->positive, y->n_positive) &&
                  same_texts(first->negative, first->n_negative, y->negative, y->n_negative);
        models = models && !strcmp(first->path, y->path);
    }
    if (r->n > 1 && (prompts || models))
        return lm_fail(x->e, LM_EUSAGE, x->where, "set gate_mode to random, and train the result",
                       "all experts have the same %s", prompts ? "prompts" : "source_model");
    return LM_OK;
}

static lm_code read_root(const reader *x, const lm_yaml *root)
{
    static const char *const known[] = { "base_model",     "gate_mode",
                                         "dtype",          "experts_per_token",
                                         "architecture",   "experts",
                                         "shared_experts", NULL };
    const lm_yaml *chosen;
    const char *type = NULL;
    lm_mixture_recipe *r = x->r;

    r->chosen = 2;
    r->dtype = LM_DTYPE_NONE;
    if (check_keys(x, root, "the file", known) || get_text(x, root, "base_model", &r->base) ||
        get_text(x, root, "architecture", &r->architecture) || get_text(x, root, "dtype", &type))
        return x->e->code;
    if (!r->base)
        return wrong(x, root, "base_model", "a model's path");
    if (type && !strncmp(type, "torch.", 6))
        type += 6;
    if (type)
        r->dtype = !strcmp(type, "float32")    ? LM_DTYPE_F32
                   : !strcmp(type, "float16")  ? LM_DTYPE_F16
                   : !strcmp(type, "bfloat16") ? LM_DTYPE_BF16
                                               : LM_DTYPE_NONE;
    if (type && r->dtype == LM_DTYPE_NONE)
        return wrong(x, lm_yaml_given(root, "dtype"), "dtype", "float32, float16 or bfloat16");
    chosen = lm_yaml_given(root, "experts_per_token");
    if (chosen && !lm_yaml_integer(chosen, &r->chosen))
        return wrong(x, chosen, "experts_per_token", "a whole number");
    return read_mode(x, root) || read_experts(x, root) ? x->e->code : check(x);
}

bool lm_mixture_recipe_is(const char *text, size_t len)
{
    const lm_yaml *root = NULL;
    lm_arena *a = NULL;
    lm_err unseen = { 0 };
    bool is = !lm_arena_new(&a, 1 << 16, &unseen) &&
              !lm_yaml_parse(text, len, "", a, &root, &unseen) && root->kind == LM_YAML_MAP &&
              lm_yaml_get(root, "experts") && !lm_yaml_get(root, "merge_method");
    lm_arena_free(a);
    return is;
}

lm_code lm_mixture_recipe_parse(const char *text, size_t len, const char *where,
                                lm_mixture_recipe **out, lm_err *e)
{
    const lm_yaml *root = NULL;
    lm_mixture_recipe *r = NULL;
    lm_code rc = lm_alloc_n(&r, 1, sizeof *r, "a recipe", e);

    *out = NULL;
    if (rc)
        return rc;
    const reader x = { r, where, e };
    rc = lm_arena_new(&r->arena, 1 << 16, e);
    if (!rc)
        rc = lm_yaml_parse(text, len, where, r->arena, &root, e);
    if (!rc)
        rc = read_root(&x, root);
    if (rc)
        lm_mixture_recipe_free(r);
    else
        *out = r;
    return rc;
}

void lm_mixture_recipe_free(lm_mixture_recipe *r)
{
    if (!r)
        return;
    lm_arena_free(r->arena);
    lm_free(r);
}
