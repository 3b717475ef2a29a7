/* SPDX-License-Identifier: Apache-2.0 */
/* plan_list.c -- lists the tensors of the result, module by module, in order. */
#include <string.h>

#include "format/safetensors_table.h"
#include "merge/plan_impl.h"
#include "merge/plan_names.h"

/* ---- Modules ---- */

/* True if a module with a longer prefix than `best` has the tensor. */
static bool is_other(const lm_merge_recipe *r, const lm_merge_module *mod, const char *tensor,
                     size_t best)
{
    for (int i = 0; i < r->n_modules; i++)
        if (&r->module[i] != mod && lm_name_fits_module(tensor, r->module[i].name) > best)
            return true;
    return false;
}

static bool has_default(const lm_merge_recipe *r)
{
    for (int i = 0; i < r->n_modules; i++)
        if (!strcmp(r->module[i].name, "default"))
            return true;
    return false;
}

/* True if the tensor belongs to the module. */
static bool is_in_module(const lm_merge_recipe *r, const lm_merge_module *mod, const char *tensor)
{
    size_t mine;

    if (!mod->name)
        return true;
    mine = lm_name_fits_module(tensor, mod->name);
    if (!mine &&
        !(lm_name_takes_rest(mod->name) && (!strcmp(mod->name, "default") || !has_default(r))))
        return false;
    return !is_other(r, mod, tensor, mine);
}

int64_t lm_plan_layers(const lm_merge_plan *p, const lm_merge_module *mod, int i)
{
    const lm_model_source *m = p->model[i].source;
    int64_t layers = 0;
    size_t begin, end;

    if (!mod->name)
        return p->model[i].layers;
    for (size_t k = 0; k < lm_model_source_count(m); k++) {
        const char *name = lm_model_source_at(m, k)->name;
        int64_t l = is_in_module(p->recipe, mod, name) ? lm_name_layer(name, &begin, &end) : -1;

        layers = l >= layers ? l + 1 : layers;
    }
    return layers;
}

static const lm_merge_module *module_of(const lm_merge_plan *p, const lm_merge_slice *s)
{
    return &p->recipe->module[s->module];
}

/* Check that every tensor of input i is in a module. */
static lm_code check_modules(const lm_merge_plan *p, int i, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;

    for (size_t k = 0; k < lm_model_source_count(p->model[i].source); k++) {
        const char *name = lm_model_source_at(p->model[i].source, k)->name;
        char show[LM_ST_SHOWN];
        bool found = lm_arch_is_buffer(NULL, name);

        for (int m = 0; m < r->n_modules && !found; m++)
            found = is_in_module(r, &r->module[m], name);
        if (!found)
            return lm_fail(e, LM_EUSAGE, p->model[i].name,
                           "add its module, or one named default, which has all that remains",
                           "tensor '%s' does not belong to any of the modules",
                           lm_st_show(name, show));
    }
    return LM_OK;
}

/* ---- Ties ---- */

/* The head that the model stores; NULL: none. */
static const char *stored_head(const lm_merge_model *m)
{
    for (size_t i = 0; i < lm_model_source_count(m->source); i++)
        if (lm_name_is_head(lm_model_source_at(m->source, i)->name))
            return lm_model_source_at(m->source, i)->name;
    return NULL;
}

static bool is_untied(const lm_merge_model *m)
{
    return m->lora && lm_lora_unties(m->lora);
}

/* The head that the model has in addition to its embedding; NULL: none. */
static const char *head_of(const lm_merge_model *m)
{
    const char *stored = stored_head(m);
    return stored ? stored : is_untied(m) ? m->head : NULL;
}

/* True if the model uses its embedding as its head. */
static bool is_tied(const lm_merge_model *m)
{
    return lm_plan_says_tied(m) && !is_untied(m);
}

bool lm_plan_says_tied(const lm_merge_model *m)
{
    const json_t *c = lm_model_source_config(m->source);
    const json_t *v = lm_plan_tie_of((json_t *)(uintptr_t)c);
    const char *type = json_string_value(json_object_get(c, "model_type"));

    return v ? json_is_true(v) : c && lm_type_ties(type, stored_head(m));
}

const lm_arch *lm_plan_arch(const lm_merge_model *m)
{
    return lm_arch_of(lm_model_source_config(m->source));
}

/* True if the head must be added to the list of its tensors. */
static bool lacks_head(const lm_merge_model *m)
{
    return is_tied(m) || (is_untied(m) && !stored_head(m));
}

/* ---- Tensors of a slice ---- */

/* True if the tensor is of a module that predicts tokens further on: its layers are no layers of the model. */
static bool is_ahead(const lm_merge_model *m, const char *name)
{
    return m->config && lm_config_is_ahead(m->config, name);
}

/* A tensor of the module that another model has and the first lacks; `from` -1: of any layer. */
static lm_code check_others(const lm_merge_plan *p, const lm_merge_module *mod, int first,
                            int other, int64_t from, int64_t to, int64_t first_from, lm_err *e)
{
    const lm_merge_model *a = &p->model[first], *b = &p->model[other];

    for (size_t i = 0; i < lm_model_source_count(b->source); i++) {
        const char *name = lm_model_source_at(b->source, i)->name;
        size_t begin, end;
        int64_t layer = lm_name_layer(name, &begin, &end);
        char *mine = NULL;
        bool there;
        lm_code rc;

        if (!is_in_module(p->recipe, mod, name) || lm_arch_is_buffer(NULL, name) ||
            (from >= 0 && is_ahead(b, name)) ||
            (lm_name_is_head(name) && lacks_head(a))) /* handled by add_head */
            continue;
        if (layer < 0 || from < 0) {
            there = lm_model_source_find(a->source, name) != NULL; /* an alias of the head */
        } else {
            if (layer < from || layer >= to)
                continue;
            rc = lm_asprintf(&mine, e, "%.*s%lld%s", (int)begin, name,
                             (long long)(layer - from + first_from), name + end);
            if (rc)
                return rc;
            there = lm_model_source_find(a->source, mine) != NULL;
            lm_free(mine);
        }
        if (!there)
            return lm_plan_missing(p, first, other, name, e);
    }
    return LM_OK;
}

static lm_code check_slice(const lm_merge_plan *p, const lm_merge_slice *s, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int k = 0; !rc && k < s->n; k++) {
        const lm_merge_model *m = &p->model[s->source[k].input];
        int64_t layers = lm_plan_layers(p, module_of(p, s), s->source[k].input);

        if (s->source[k].to > layers && s->source[k].from >= 0)
            rc =
                lm_fail(e, LM_EUSAGE, m->name, NULL, "layers up to %lld are requested, it has %lld",
                        (long long)s->source[k].to, (long long)layers);
        if (!rc && s->source[k].input != s->source[0].input)
            rc = check_others(p, module_of(p, s), s->source[0].input, s->source[k].input,
                              s->source[k].from, s->source[k].to, s->source[0].from, e);
    }
    return rc;
}

/* Tensors of the model `first` of a slice that are outside the layers, before or behind them. */
static lm_code outside(lm_merge_plan *p, const lm_merge_slice *s, bool last, size_t *cap, lm_err *e)
{
    const lm_merge_model *m = &p->model[s->source[0].input];
    size_t begin, end;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_model_source_count(m->source); i++) {
        const char *name = lm_model_source_at(m->source, i)->name;
        lm_plan_want w = { .slice = s, .out = name, .layer = -1 };

        if (lm_name_layer(name, &begin, &end) < 0 && lm_name_is_last(name) == last &&
            !is_ahead(m, name) && is_in_module(p->recipe, module_of(p, s), name))
            rc = lm_plan_add(p, &w, cap, e);
    }
    return rc;
}

/* Layer `o` of the slice, number `number` of the result. */
static lm_code layer(lm_merge_plan *p, const lm_merge_slice *s, int64_t o, int64_t number,
                     size_t *cap, lm_err *e)
{
    const lm_merge_model *m = &p->model[s->source[0].input];
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < lm_model_source_count(m->source); i++) {
        const char *name = lm_model_source_at(m->source, i)->name;
        lm_plan_want w = { .slice = s, .layer = o, .of = s->source[0].to - s->source[0].from };
        size_t begin, end;
        char *prefix = NULL;

        if (lm_name_layer(name, &begin, &end) != s->source[0].from + o || is_ahead(m, name) ||
            !is_in_module(p->recipe, module_of(p, s), name))
            continue;
        rc = lm_arena_strdup(p->arena, &prefix, name, begin, e);
        w.prefix = prefix;
        w.suffix = name + end;
        if (!rc)
            rc = lm_plan_name_in(p, &w, number, &w.out, e);
        if (!rc)
            rc = lm_plan_add(p, &w, cap, e);
    }
    return rc;
}

/* ---- The head ---- */

static bool in_slice(const lm_merge_plan *p, const lm_merge_slice *s, int input)
{
    bool found = p->recipe->method->base_allowed && lm_plan_base_of(p, s) == input;

    for (int k = 0; !found && k < s->n; k++)
        found = s->source[k].input == input;
    return found;
}

/* Slice s provides the head, `first` the embedding.  *name: the head, if a model of s does not tie
 * it, or ties it to an embedding that is not the result's; NULL: tied, or no head. */
static void find_head(const lm_merge_plan *p, const lm_merge_slice *first, const lm_merge_slice *s,
                      const char **name)
{
    bool moved = false, tied = false;

    *name = NULL;
    for (int i = 0; i < p->recipe->n_inputs; i++) {
        const lm_merge_model *m = &p->model[i];
        bool here = in_slice(p, s, i);

        moved = moved || here != in_slice(p, first, i);
        tied = tied || (here && is_tied(m));
        if (here && !is_tied(m) && !*name)
            *name = head_of(m);
    }
    if (!*name && moved && tied)
        *name = p->model[lm_plan_leader(p, s)].head;
}

/* A model that ties its head does not list it: where the result needs it, it comes last. */
static lm_code add_head(lm_merge_plan *p, const lm_merge_module *mod, size_t *cap, lm_err *e)
{
    const lm_merge_slice *first = &p->recipe->slice[mod->first], *s = first + mod->n - 1;
    const lm_merge_model *m = &p->model[lm_plan_leader(p, s)];
    lm_plan_want w = { .slice = s, .layer = -1 };

    find_head(p, first, s, &w.out);
    if (!w.out || !is_in_module(p->recipe, mod, w.out))
        return LM_OK;
    p->untied = true;
    return lacks_head(m) && !stored_head(m) ? lm_plan_add(p, &w, cap, e) : LM_OK;
}

/* ---- All tensors, in order ---- */

static lm_code stacked(lm_merge_plan *p, const lm_merge_module *mod, size_t *cap, lm_err *e)
{
    const lm_merge_slice *slice = &p->recipe->slice[mod->first];
    int64_t number = 0;
    lm_code rc = LM_OK;

    for (int s = 0; !rc && s < mod->n; s++)
        rc = check_slice(p, &slice[s], e);
    if (!rc)
        rc = outside(p, &slice[0], false, cap, e);
    for (int s = 0; !rc && s < mod->n; s++)
        for (int64_t o = 0; !rc && o < slice[s].source[0].to - slice[s].source[0].from; o++)
            rc = layer(p, &slice[s], o, number++, cap, e);
    return rc ? rc : outside(p, &slice[mod->n - 1], true, cap, e);
}

static lm_code plain(lm_merge_plan *p, const lm_merge_module *mod, size_t *cap, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    const lm_merge_slice *s = &r->slice[mod->first];
    int first = lm_plan_leader(p, s);
    const lm_model_source *lead = p->model[first].source;
    int64_t layers = lm_plan_layers(p, mod, first);
    size_t begin, end;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < r->n_inputs; i++)
        if (i != first && (i == r->base || in_slice(p, s, i)))
            rc = check_others(p, mod, first, i, -1, -1, -1, e);
    for (size_t i = 0; !layers && i < lm_model_source_count(lead); i++) {
        int64_t l = lm_name_layer(lm_model_source_at(lead, i)->name, &begin, &end);

        layers = l >= layers ? l + 1 : layers;
    }
    for (size_t i = 0; !rc && i < lm_model_source_count(lead); i++) {
        lm_plan_want w = { .slice = s, .of = layers };

        w.out = lm_model_source_at(lead, i)->name;
        w.layer = lm_name_layer(w.out, &begin, &end);
        if (is_in_module(r, mod, w.out))
            rc = lm_plan_add(p, &w, cap, e);
    }
    return rc;
}

/* Check that every tensor of a file of side data is in its model: a wrong name would be ignored. */
static lm_code check_names(const lm_merge_model *m, const lm_st *side, lm_err *e)
{
    for (size_t i = 0; side && i < lm_st_count(side); i++) {
        const char *name = lm_st_at(side, i)->name;
        char show[LM_ST_SHOWN];

        if (!lm_plan_find(m, name))
            return lm_fail(e, LM_EUSAGE, lm_st_path(side), "name its tensors as the model does",
                           "%.80s has no tensor '%s'", m->name, lm_st_show(name, show));
    }
    return LM_OK;
}

lm_code lm_plan_tensors(lm_merge_plan *p, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    size_t cap = 0;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < r->n_inputs; i++) {
        rc = check_names(&p->model[i], p->model[i].fisher, e);
        rc = rc ? rc : check_names(&p->model[i], p->model[i].gram, e);
        if (!rc && lm_plan_used(p, i))
            rc = check_modules(p, i, e);
    }
    for (int m = 0; !rc && m < r->n_modules; m++) {
        const lm_merge_module *mod = &r->module[m];
        int64_t before = p->n;

        rc = mod->sliced ? stacked(p, mod, &cap, e) : plain(p, mod, &cap, e);
        if (!rc && mod->name && p->n == before)
            rc = lm_fail(e, LM_EUSAGE, p->model[p->lead].name, "name an existing module",
                         "it has no tensors of module '%.60s'", mod->name);
        rc = rc ? rc : add_head(p, mod, &cap, e);
    }
    if (!rc && !p->n)
        rc = lm_fail(e, LM_EUSAGE, p->model[p->lead].name, NULL, "it has no tensors");
    return rc;
}
