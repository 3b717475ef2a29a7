/* SPDX-License-Identifier: Apache-2.0 */
/* attach.c -- from a configuration to the functions that a builder calls. */
#include "tune/attach.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "tune/attach_impl.h"
#include "tune/methods.h"

static const char *saved_name(void *ctx, lm_builder *b, const char *tensor);

/* ---- the graph that is being built ---- */

const attach_module *lm_attach_find(const lm_attach *a, const char *name)
{
    for (size_t i = 0; i < a->n_modules; i++)
        if (!strcmp(a->module[i].module.name, name))
            return &a->module[i];
    return NULL;
}

void lm_attach_begin(lm_attach *a, lm_builder *b)
{
    if (a->building == lm_b_number(b))
        return;
    a->building = lm_b_number(b);
    a->n_shared = 0;
    a->rows.table = LM_NONE;
}

static lm_vid *shared_at(lm_attach *a, const char *suffix)
{
    for (int i = 0; i < a->n_shared; i++)
        if (!strcmp(a->shared[i].suffix, suffix))
            return &a->shared[i].value;
    if (a->n_shared == LM_TUNE_TENSORS)
        return NULL;
    attach_shared *s = &a->shared[a->n_shared++];
    snprintf(s->suffix, sizeof s->suffix, "%s", suffix);
    s->value = LM_NONE;
    return &s->value;
}

static lm_init init_of(const lm_tune_tensor *t)
{
    return t->init == LM_TUNE_ONES      ? LM_INIT_ONES
           : t->init == LM_TUNE_FULL    ? LM_INIT_FULL
           : t->init == LM_TUNE_UNIFORM ? LM_INIT_UNIFORM
           : t->init == LM_TUNE_NORMAL  ? LM_INIT_NORMAL
                                        : LM_INIT_ZEROS; /* LM_TUNE_BASE: the method's start */
}

static lm_vid declare_one(lm_builder *b, const lm_tune_module *m, const lm_tune_tensor *t)
{
    char name[LM_TENSOR_NAME + LM_TUNE_SUFFIX + 2];
    lm_model *made = lm_b_model(b);
    if (t->shared)
        snprintf(name, sizeof name, "%s", t->suffix);
    else
        snprintf(name, sizeof name, "%s.%s", m->name, t->suffix);
    lm_vid v = lm_b_param(b, t->ndim, t->dim, "%s", name);
    lm_b_slice(b, t->dim[0], false, init_of(t), t->scale, "base_model.%s%s",
               t->shared ? "" : "model.", name);
    if (lm_b_ok(b)) {
        made->slice[made->n_slices - 1].trains = !t->frozen;
        made->param[made->n_params - 1].decay = t->matrix;
    }
    return v;
}

void lm_attach_declare(lm_attach *a, lm_builder *b, const lm_tune_module *m, lm_vid *p)
{
    lm_tune_tensor *t = NULL;
    int n = 0;
    lm_err *e = lm_b_err(b);
    for (int i = 0; i < LM_TUNE_TENSORS; i++)
        p[i] = LM_NONE;
    lm_attach_begin(a, b);
    if (!lm_b_ok(b) || lm_alloc_n(&t, LM_TUNE_TENSORS, sizeof *t, "tensors of a module", e))
        return;
    if (!a->method->tensors(m, t, &n, e))
        for (int i = 0; lm_b_ok(b) && i < n; i++) {
            lm_vid *at = t[i].shared ? shared_at(a, t[i].suffix) : NULL;
            if (t[i].off)
                continue;
            if (t[i].ids) {
                if (!at || *at < 0) /* the file has shared ones once */
                    lm_attach_declare_ids(b, lm_attach_find(a, m->name), &t[i], i);
                if (at)
                    *at = 0;
                continue;
            }
            p[i] = at && *at >= 0 ? *at : declare_one(b, m, &t[i]);
            if (at)
                *at = p[i];
        }
    lm_free(t);
}

/* ---- places ---- */

static int chosen_of(const lm_attach *a, const lm_adapt_linear *place)
{
    int n = 0;
    for (int i = 0; i < place->n_modules; i++)
        n += lm_attach_find(a, place->module[i].name) != NULL;
    return n;
}

/* True if all modules of the place that are changed run as low-rank paths. */
static bool all_lora(const lm_attach *a, const lm_adapt_linear *place)
{
    for (int i = 0; i < place->n_modules; i++) {
        const attach_module *m = lm_attach_find(a, place->module[i].name);
        if (m && !lm_attach_is_lora(a, m))
            return false;
    }
    return true;
}

static bool any_lengths(const lm_attach *a, const lm_adapt_linear *place)
{
    bool any = false;
    for (int i = 0; i < place->n_modules; i++) {
        const attach_module *m = lm_attach_find(a, place->module[i].name);
        any = any || (m && lm_attach_has_lengths(a, m));
    }
    return any;
}

static bool apart(void *ctx, const lm_adapt_linear *place)
{
    const lm_attach *a = ctx;
    if (!chosen_of(a, place))
        return false;
    return all_lora(a, place) ? any_lengths(a, place) : !lm_attach_only_output(a);
}

static lm_vid linear(void *ctx, lm_builder *b, const lm_adapt_linear *place)
{
    lm_attach *a = ctx;
    if (!chosen_of(a, place))
        return LM_NONE;
    if (all_lora(a, place))
        return lm_attach_lora(a, b, place);
    return lm_attach_rules(a, b, place);
}

static lm_vid embed(void *ctx, lm_builder *b, const lm_adapt_embed *place)
{
    lm_attach *a = ctx;
    const attach_module *m = lm_attach_find(a, place->module.name);
    if (a->tokens.base)
        return lm_attach_tokens_embed(a, b, place, place->x);
    return m ? lm_attach_lora_embed(a, b, place, m) : LM_NONE;
}

/* ---- the configuration ---- */

static lm_code check_module(const lm_attach *a, const attach_module *m, const char *where,
                            lm_err *e)
{
    if (m->base->head)
        return lm_attach_head_check(a, m, where, e);
    if (m->module.embedding && !lm_attach_embeds(a, m) && a->method != &lm_tune_tokens)
        return lm_fail(e, LM_EUSAGE, where, "take it from the targets",
                       "%s does not train the embedding '%s'", a->method->name, m->base->name);
    return LM_OK;
}

static lm_code add_module(lm_attach *a, const lm_tune_base *base, size_t hypers, const char *where,
                          lm_err *e)
{
    attach_module *m = &a->module[a->n_modules++];
    m->base = base;
    if (lm_alloc_n(&m->hyper, hypers + 1, sizeof *m->hyper, "values of a module", e) ||
        lm_tune_read_hyper(a->method, a->adapter, base->name, where, m->hyper, e))
        return e->code;
    m->module = (lm_tune_module){ .name = base->name,
                                  .out = base->out,
                                  .in = base->in,
                                  .layer = base->layer,
                                  .turned = base->turned || base->kind == LM_TUNE_EMBEDDING,
                                  .embedding = base->kind == LM_TUNE_EMBEDDING,
                                  .has_bias = base->bias != NULL,
                                  .hyper = m->hyper,
                                  .config = a->adapter,
                                  .place = (int64_t)a->n_modules - 1 };
    return check_module(a, m, where, e);
}

/* A tied head is not a module of its own, and would be left out of the targets. */
static lm_code check_tied(const lm_attach *a, const char *where, lm_err *e)
{
    const json_t *targets = json_object_get(a->adapter, "target_modules"), *v;
    char name[LM_TENSOR_NAME];
    size_t i, n = strlen(lm_arch_head(a->config->arch, name));
    bool named = json_is_string(targets) && !strncmp(name, json_string_value(targets), n - 7);

    json_array_foreach((json_t *)(uintptr_t)targets, i, v)
    {
        const char *target = json_string_value(v);
        named |= target && strlen(target) == n - 7 && !strncmp(name, target, n - 7);
    }
    return named && a->config->tied
               ? lm_fail(e, LM_EUSAGE, where, "take it from the targets",
                         "the head '%.*s' is the embedding, and cannot have an adapter of its own",
                         (int)(n - 7), name)
               : LM_OK;
}

/* True if parameters of experts are all that is changed. */
static bool only_experts(const lm_attach *a)
{
    const json_t *v = json_object_get(a->adapter, "target_modules");
    bool none = !v || json_is_null(v) || (json_is_array(v) && !json_array_size(v));
    return none && lm_attach_names_experts(a->adapter);
}

static lm_code add_modules(lm_attach *a, const char *where, lm_err *e)
{
    bool *chosen = NULL;
    const lm_tune_base *ahead = NULL;
    size_t hypers = 0;
    int64_t most_out = 0, most_in = 0;
    while (a->method->hyper[hypers].name)
        hypers++;
    lm_code rc = lm_alloc_n(&chosen, a->bases->n + 1, sizeof *chosen, "modules", e);
    rc = rc ? rc : lm_alloc_n(&a->module, a->bases->n + 1, sizeof *a->module, "modules", e);
    if (!rc && !only_experts(a))
        rc = lm_tune_choose(a->bases, a->method, a->adapter, where, chosen, e);
    for (size_t i = 0; !rc && i < a->bases->n; i++) {
        const lm_tune_base *base = &a->bases->at[i];
        if (!chosen[i])
            continue;
        if (lm_config_is_ahead(a->config, base->weight)) { /* no loss of it is in the graph */
            ahead = base;
            continue;
        }
        if (base->routed) {
            rc = lm_fail(e, LM_EUSAGE, where,
                         "name other modules, or merge the adapter into its base",
                         "'%.100s' belongs to the experts of a mixture, beside which adapters are "
                         "not attached",
                         base->name);
            break;
        }
        rc = add_module(a, base, hypers, where, e);
        if (!rc && !lm_attach_has_rank(a, &a->module[a->n_modules - 1])) {
            lm_free(a->module[--a->n_modules].hyper);
            continue;
        }
        most_out = base->out > most_out ? base->out : most_out;
        most_in = base->in > most_in ? base->in : most_in;
    }
    if (!rc && ahead && !a->n_modules)
        rc = lm_fail(e, LM_EUSAGE, where, "name other modules",
                     "'%.100s' serves the prediction of tokens further on, which is not tuned",
                     ahead->name);
    for (size_t i = 0; i < a->n_modules; i++) {
        a->module[i].module.most_out = most_out;
        a->module[i].module.most_in = most_in;
        a->module[i].module.places = (int64_t)a->n_modules;
    }
    lm_free(chosen);
    return rc;
}

/* Every module's values are good for its shape. */
static lm_code check_tensors(const lm_attach *a, lm_err *e)
{
    lm_tune_tensor *t = NULL;
    lm_code rc = lm_alloc_n(&t, LM_TUNE_TENSORS, sizeof *t, "tensors of a module", e);
    for (size_t i = 0; !rc && i < a->n_modules; i++) {
        int n = 0;
        rc = a->method->tensors(&a->module[i].module, t, &n, e);
    }
    lm_free(t);
    return rc;
}

static bool changes_embedding(const lm_attach *a)
{
    bool any = a->tokens.base != NULL;
    for (size_t i = 0; i < a->n_modules; i++)
        any = any || a->module[i].module.embedding;
    return any;
}

static lm_code set_method(lm_attach *a, const char *type, const char *where, lm_err *e)
{
    a->method = lm_tune_method_of(type);
    if (!a->method)
        return lm_fail(e, LM_EUSAGE, where, NULL, "adapters of the kind %.40s are not known", type);
    if (lm_tune_check_config(a->method, a->adapter, where, e) || check_tied(a, where, e) ||
        lm_attach_experts_set(a, where, e) || add_modules(a, where, e) || check_tensors(a, e) ||
        lm_attach_tokens_set(a, where, e))
        return e->code;
    if (changes_embedding(a) && lm_config_check_alone(a->config, where, "adapted embeddings", e))
        return e->code;
    a->adapt.linear = linear;
    a->adapt.apart = apart;
    a->adapt.embed = embed;
    lm_attach_head_set(a);
    if (a->method->is & LM_TUNE_VECTORS) /* tensors of the base that train: lm_attach_trains */
        a->adapt = (lm_adapt){ .ctx = a, .saved = saved_name };
    return LM_OK;
}

lm_code lm_attach_new(const lm_tune_bases *bases, const lm_config *config, const json_t *adapter,
                      const char *where, lm_attach **out, lm_err *e)
{
    lm_attach *a = NULL;
    const char *type = json_string_value(json_object_get(adapter, "peft_type"));
    *out = NULL;
    if (!type && !lm_attach_bottleneck_is(adapter))
        return lm_fail(e, LM_EFORMAT, where, NULL, "does not say its peft_type");
    if (lm_alloc_n(&a, 1, sizeof *a, "an adapter", e))
        return e->code;
    *a = (lm_attach){ .adapt = { .ctx = a, .saved = saved_name },
                      .bases = bases,
                      .config = config,
                      .adapter = adapter,
                      .rows = { .table = LM_NONE },
                      .mask = LM_NONE };
    lm_code rc = !type                        ? lm_attach_bottleneck_set(a, where, e)
                 : lm_attach_virtual_is(type) ? lm_attach_virtual_set(a, where, e)
                                              : set_method(a, type, where, e);
    if (rc) {
        lm_attach_free(a);
        return rc;
    }
    *out = a;
    return LM_OK;
}

void lm_attach_free(lm_attach *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->n_modules; i++) {
        lm_free(a->module[i].hyper);
        for (int k = 0; k < LM_TUNE_TENSORS; k++)
            lm_free(a->module[i].ids[k]);
    }
    lm_free(a->module);
    lm_free(a);
}

const lm_adapt *lm_attach_adapt(const lm_attach *a)
{
    return &a->adapt;
}

const lm_tune_method *lm_attach_method(const lm_attach *a)
{
    return a->method;
}

int64_t lm_attach_virtual(const lm_attach *a)
{
    return a->rows.tokens;
}

bool lm_attach_predicts(const lm_attach *a)
{
    return a->rows.tokens > 0 && !a->rows.prefix;
}

size_t lm_attach_modules(const lm_attach *a)
{
    return a->n_modules;
}

const lm_tune_module *lm_attach_module(const lm_attach *a, size_t i)
{
    return &a->module[i].module;
}

/* ---- tensors of the base that train ---- */

/* A tensor "MODULE.weight" or "MODULE.bias" of the base. */
typedef struct {
    const char *name;
    size_t len;   /* of MODULE */
    bool is_bias; /* .bias */
    bool chosen;  /* MODULE is one that the method changes */
} base_tensor;

static base_tensor parse_tensor(const lm_attach *a, const char *tensor)
{
    const char *dot = strrchr(tensor, '.');
    base_tensor t = { .name = tensor,
                      .len = dot ? (size_t)(dot - tensor) : strlen(tensor),
                      .is_bias = dot && !strcmp(dot, ".bias") };
    for (size_t i = 0; i < a->n_modules; i++) {
        const char *name = a->module[i].module.name;
        t.chosen |= strlen(name) == t.len && !strncmp(name, tensor, t.len);
    }
    return t;
}

/* Entries of modules_to_save match the end of a module's name, whichever letter stands before them,
 * as in PEFT. */
static bool is_saved(const lm_attach *a, const base_tensor *t)
{
    const json_t *saved = json_object_get(a->adapter, "modules_to_save"), *v;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)saved, i, v)
    {
        const char *part = json_string_value(v);
        size_t k = part ? strlen(part) : 0;
        if (k && k <= t->len && !strncmp(t->name + t->len - k, part, k))
            return true;
    }
    return false;
}

static bool trains_bias(const lm_attach *a, const base_tensor *t)
{
    const char *bias = json_string_value(json_object_get(a->adapter, "bias"));
    return t->is_bias && bias && (!strcmp(bias, "all") || (t->chosen && strstr(bias, "_only")));
}

static bool trains_norm(const lm_attach *a, const base_tensor *t)
{
    return t->chosen && a->method && (a->method->is & LM_TUNE_VECTORS);
}

bool lm_attach_trains(void *ctx, const char *tensor)
{
    const lm_attach *a = ctx;
    base_tensor t = parse_tensor(a, tensor);
    return is_saved(a, &t) || trains_bias(a, &t) || trains_norm(a, &t);
}

/* In the module that wraps one that is changed. */
static const char *saved_name(void *ctx, lm_builder *b, const char *tensor)
{
    const lm_attach *a = ctx;
    base_tensor t = parse_tensor(a, tensor);
    const char *inner = trains_norm(a, &t) ? "ln_tuning_layers" : "base_layer";
    char text[2 * LM_TENSOR_NAME], *out = NULL;
    if (!t.chosen || is_saved(a, &t))
        return NULL;
    snprintf(text, sizeof text, "base_model.model.%.*s.%s%s", (int)t.len, t.name, inner,
             t.name + t.len);
    lm_arena_strdup(lm_b_arena(b), &out, text, strlen(text), lm_b_err(b));
    return out;
}
