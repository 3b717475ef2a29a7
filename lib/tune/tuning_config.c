/* SPDX-License-Identifier: Apache-2.0 */
/* tuning_config.c -- recipes, and adapter_config.json from what is asked for. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "tune/methods.h"
#include "tune/tuning.h"

/* Learning rates: LoRA's of LLaMA-Factory and unsloth; full fine-tuning's of TRL; those of IA3,
 * VeRA and prompts of PEFT's examples. */
static const lm_tuning_recipe recipes[] = {
    { "lora", "lora", "", NULL, NULL, 2e-4, 0, "W + s B A of low rank (arXiv:2106.09685)", NULL },
    { "qlora", "lora", "", "nf4_dq", NULL, 2e-4, 0,
      "lora on a base in NF4 with double quantisation (arXiv:2305.14314)", NULL },
    { "rslora", "lora", "use_rslora=true", NULL, NULL, 2e-4, 0,
      "lora with s = alpha / sqrt(r) (arXiv:2312.03732)", NULL },
    { "dora", "lora", "use_dora=true", NULL, NULL, 2e-4, 0,
      "lora of directions, and magnitudes (arXiv:2402.09353)", NULL },
    { "loraplus", "lora", "", NULL, NULL, 1e-4, 16,
      "lora with a 16 times larger rate of B (arXiv:2402.12354)", NULL },
    { "pissa", "lora", "init_lora_weights=pissa", NULL, NULL, 2e-4, 0,
      "lora that starts at principal components (arXiv:2404.02948)", NULL },
    { "olora", "lora", "init_lora_weights=olora", NULL, NULL, 2e-4, 0,
      "lora that starts orthonormal (arXiv:2406.01775)", NULL },
    { "loftq", "lora", "init_lora_weights=loftq,loftq_config={\"loftq_bits\":4}", NULL, NULL, 2e-4,
      0, "lora that starts at what NF4 loses of the base (arXiv:2310.08659)", NULL },
    { "full", NULL, "", NULL, "*", 2e-5, 0, "all weights of the model", NULL },
    { "bitfit", NULL, "", NULL, "*bias", 1e-3, 0, "the biases of the model (arXiv:2106.10199)",
      NULL },
    { "prompt", NULL, "", NULL, NULL, 3e-2, 0, "embeddings of virtual tokens (arXiv:2104.08691)",
      "{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":20,\"prompt_tuning_init\":"
      "\"RANDOM\","
      "\"prompt_tuning_init_text\":null,\"tokenizer_name_or_path\":null,\"tokenizer_kwargs\":"
      "null}" },
    { "p-tuning", NULL, "", NULL, NULL, 1e-3, 0,
      "embeddings of virtual tokens from an encoder (arXiv:2103.10385)",
      "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":20,\"encoder_hidden_size\":128,"
      "\"encoder_reparameterization_type\":\"MLP\",\"encoder_num_layers\":2,\"inference_mode\":"
      "false}" },
    { "prefix", NULL, "", NULL, NULL, 1e-2, 0,
      "keys and values of virtual tokens (arXiv:2101.00190)",
      "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":20,\"prefix_projection\":false,"
      "\"inference_mode\":false,\"encoder_hidden_size\":null}" },
    { "houlsby", NULL, "", NULL, NULL, 1e-4, 0,
      "bottlenecks behind attention and MLP (arXiv:1902.00751)",
      "{\"name\":\"adapter\",\"config\":{\"mh_adapter\":true,\"output_adapter\":true,"
      "\"cross_adapter\":false,\"reduction_factor\":16,\"non_linearity\":\"swish\",\"original_ln_"
      "before\":false,"
      "\"scaling\":1.0}}" },
    { "pfeiffer", NULL, "", NULL, NULL, 1e-4, 0, "bottlenecks behind the MLP (arXiv:2005.00247)",
      "{\"name\":\"adapter\",\"config\":{\"mh_adapter\":false,\"output_adapter\":true,"
      "\"cross_adapter\":false,\"reduction_factor\":16,\"non_linearity\":\"relu\",\"original_ln_"
      "before\":true,"
      "\"scaling\":1.0}}" },
};
enum { LORA_RANK = 16 }; /* of unsloth and TRL; PEFT has 8 */
enum { RECIPES = sizeof recipes / sizeof *recipes, MOST_NAMES = 96 };

static const struct {
    const char *method;
    double rate;
} rates[] = { { "ia3", 3e-3 },      { "vera", 4e-3 },          { "prompt_tuning", 3e-2 },
              { "p_tuning", 1e-3 }, { "prefix_tuning", 1e-2 }, { "ln_tuning", 1e-3 },
              { "adapter", 1e-4 } };

/* A method under its own name. */
static lm_tuning_recipe plain(const lm_tune_method *m)
{
    lm_tuning_recipe r = {
        .name = m->name, .method = m->name, .keys = "", .rate = 2e-4, .about = m->about
    };
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        if (!strcmp(rates[i].method, m->name))
            r.rate = rates[i].rate;
    return r;
}

/* Number i of all: the table, then the methods that it does not name. */
static bool recipe_at(int i, lm_tuning_recipe *out)
{
    if (i < RECIPES) {
        *out = recipes[i];
        return true;
    }
    int n = RECIPES; /* of those that follow */
    for (int k = 0; lm_tune_method_at(k); k++) {
        bool named = false;
        for (int j = 0; j < RECIPES; j++)
            named = named || !strcmp(recipes[j].name, lm_tune_method_at(k)->name);
        if (!named && n++ == i) {
            *out = plain(lm_tune_method_at(k));
            return true;
        }
    }
    return false;
}

bool lm_tuning_recipe_begins(const lm_tuning_recipe *r)
{
    return !r->method || !(lm_tune_method_find(r->method)->is & LM_TUNE_SAVED);
}

bool lm_tuning_recipe_fits(const lm_tuning_recipe *r, const json_t *config)
{
    const char *type = json_string_value(json_object_get(config, "peft_type"));
    json_t *own = r->config ? json_loads(r->config, 0, NULL) : NULL;
    const char *want = r->method ? lm_tune_method_find(r->method)->peft_type
                                 : json_string_value(json_object_get(own, "peft_type"));
    bool same = type && want ? !strcmp(type, want) : !type && !want; /* bottlenecks have none */
    json_decref(own);
    return same;
}

bool lm_tuning_recipe_find(const char *name, lm_tuning_recipe *out)
{
    for (int i = 0; recipe_at(i, out); i++)
        if (!strcmp(out->name, name))
            return true;
    return false;
}

const char *const *lm_tuning_recipe_names(void)
{
    static const char *names[MOST_NAMES];
    lm_tuning_recipe r;
    for (int i = 0; !names[0] || i; i++) {
        if (i == MOST_NAMES - 1 || !recipe_at(i, &r))
            break;
        names[i] = r.name;
    }
    return names;
}

/* ---- the configuration ---- */

/* The first of the names that is a key of the method's table; NULL: none. */
static const char *key_of(const lm_tune_method *t, const char *const *names)
{
    for (; *names; names++)
        if (lm_hyper_find(t->hyper, *names) >= 0)
            return *names;
    return NULL;
}

static lm_code set_number(json_t *c, const char *key, double v, lm_err *e)
{
    json_t *n = v == (double)(json_int_t)v ? json_integer((json_int_t)v) : json_real(v);
    return json_object_set_new(c, key, n)
               ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory")
               : LM_OK;
}

static lm_code set_option(json_t *c, const lm_tune_method *t, const char *what, double v,
                          const char *const *names, lm_err *e)
{
    const char *key = v >= 0 ? key_of(t, names) : NULL;
    if (v < 0)
        return LM_OK;
    if (!key)
        return lm_fail(e, LM_EUSAGE, what, "leave it out", "method '%s' has none", t->name);
    return set_number(c, key, v, e);
}

/* "a,b" as a list. */
static lm_code set_list(json_t *c, const char *key, const char *text, lm_err *e)
{
    json_t *list = json_array();
    char one[256];
    for (const char *at = text;; at++) {
        if (!lm_text_until(&at, ",", one, sizeof one)) {
            json_decref(list);
            return lm_fail(e, LM_EUSAGE, key, "write shorter names", "a name is too long");
        }
        if (*one)
            json_array_append_new(list, json_string(one));
        if (!*at)
            break;
    }
    return json_object_set_new(c, key, list)
               ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory")
               : LM_OK;
}

enum { MOST_LAYER = 100000 };

/* "0-3,7" as a list of numbers. */
static lm_code set_layers(json_t *c, const char *text, lm_err *e)
{
    json_t *list = json_array();
    char one[64];
    for (const char *at = text;; at++) {
        long long from, to;
        char rest;
        if (!lm_text_until(&at, ",", one, sizeof one))
            *one = 0;
        int n = sscanf(one, "%lld-%lld%c", &from, &to, &rest);
        if (n == 1 && strspn(one, "0123456789") == strlen(one))
            to = from;
        else if (n != 2)
            to = -1;
        if (n < 1 || from < 0 || from > to || to > MOST_LAYER) {
            json_decref(list);
            return lm_fail(e, LM_EUSAGE, "layers", "write 0-3,7", "'%s' is not a list of layers",
                           text);
        }
        for (long long i = from; i <= to; i++)
            json_array_append_new(list, json_integer(i));
        if (!*at)
            break;
    }
    return json_object_set_new(c, "layers_to_transform", list)
               ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory")
               : LM_OK;
}

static bool is_pattern(const char *target)
{
    return strpbrk(target, "*()[]|\\^$+?") != NULL;
}

/* Names of parameters that hold all experts of a layer are not modules in PEFT. */
static bool is_parameter(const char *name)
{
    const char *at = strstr(name, "experts.");
    return at && (!strcmp(at, "experts.gate_up_proj") || !strcmp(at, "experts.down_proj"));
}

/* A list of names: of modules, and of parameters of experts. */
static lm_code set_names(json_t *c, const char *target, lm_err *e)
{
    json_t *list, *modules = json_array(), *parameters = json_array(), *v;
    size_t i;
    if (set_list(c, "target_modules", target, e)) {
        json_decref(modules);
        json_decref(parameters);
        return e->code;
    }
    list = json_object_get(c, "target_modules");
    json_array_foreach(list, i, v)
    {
        json_array_append(is_parameter(json_string_value(v)) ? parameters : modules, v);
    }
    if (json_array_size(parameters)) {
        json_object_set(c, "target_modules", modules);
        json_object_set(c, "target_parameters", parameters);
    }
    json_decref(modules);
    json_decref(parameters);
    return LM_OK;
}

static lm_code set_target(json_t *c, const char *target, lm_err *e)
{
    bool hit;
    if (strcmp(target, "all-linear") != 0 && !is_pattern(target))
        return set_names(c, target, e);
    if (is_pattern(target) && lm_tune_matches(target, "", &hit, e)) {
        *e = (lm_err){ 0 };
        return lm_fail(e, LM_EUSAGE, "target", "correct it, or name modules: q_proj,v_proj",
                       "'%.60s' is not a valid regular expression", target);
    }
    return json_object_set_new(c, "target_modules", json_string(target))
               ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory")
               : LM_OK;
}

/* The method's share of what is dropped: of inputs, blocks or modules; not that of rows
 * (rank_dropout). */
static const char *key_of_dropout(const lm_tune_method *t)
{
    for (int i = 0; t->hyper[i].name; i++)
        if (strstr(t->hyper[i].name, "dropout") && strcmp(t->hyper[i].name, "rank_dropout") != 0)
            return t->hyper[i].name;
    return NULL;
}

/* The nearest key of the object. */
static lm_code fail_key(const json_t *c, const char *key, lm_err *e)
{
    const char *names[128], *k;
    json_t *v;
    size_t n = 0;
    char todo[120] = "list the methods to see their keys";
    json_object_foreach((json_t *)(uintptr_t)c, k, v) if (n < 127) names[n++] = k;
    names[n] = NULL;
    const char *near = lm_nearest(key, names);
    if (near)
        snprintf(todo, sizeof todo, "did you mean '%.60s'?", near);
    return lm_fail(e, LM_EUSAGE, key, todo, "is no key of the method");
}

/* "KEY=VALUE": a value of JSON, or a word. */
static lm_code set_key(json_t *c, const lm_tune_method *t, const char *text, size_t len, lm_err *e)
{
    char key[96], value[512];
    const char *eq = memchr(text, '=', len);
    size_t n = eq ? (size_t)(eq - text) : 0, m = eq ? len - n - 1 : 0;
    json_t *v = NULL;
    if (!n || n >= sizeof key || m >= sizeof value)
        return lm_fail(e, LM_EUSAGE, "set", "write r=16", "'%.*s' is not KEY=VALUE", (int)len,
                       text);
    memcpy(key, text, n);
    key[n] = 0;
    memcpy(value, eq + 1, m);
    value[m] = 0;
    if (!strcmp(key, "peft_type"))
        return lm_fail(e, LM_EUSAGE, key, "choose another method", "is that of the method");
    if (json_object_get(json_object_get(c, "config"), key)) /* of bottlenecks */
        c = json_object_get(c, "config");
    if (!json_object_get(c, key) && (!t || lm_hyper_find(t->hyper, key) < 0))
        return fail_key(c, key, e);
    v = json_loads(value, JSON_DECODE_ANY, NULL);
    if (!v)
        v = json_string(value);
    return json_object_set_new(c, key, v) ? lm_fail(e, LM_EUSAGE, key, NULL, "cannot be set")
                                          : LM_OK;
}

/* Keys with commas, as in a recipe. */
static lm_code set_keys(json_t *c, const lm_tune_method *t, const char *keys, lm_err *e)
{
    lm_code rc = LM_OK;
    while (*keys && !rc) {
        size_t n = strcspn(keys, ",");
        rc = set_key(c, t, keys, n, e);
        keys += n + (keys[n] == ',');
    }
    return rc;
}

/* Methods that change products, whose usual modules in PEFT are few, change all linear layers
 * here.  Scales and vectors keep their own. */
static bool has_all_linear(const lm_tune_method *t)
{
    return !(t->is & (LM_TUNE_VECTORS | LM_TUNE_SQUARE)) && strcmp(t->name, "ia3") != 0 &&
           strcmp(t->name, "tokens") != 0;
}

/* Of a prefix PEFT names the heads of keys and their width in all, else those of queries. */
static int64_t token_heads(const lm_tuning_ask *a, const json_t *c)
{
    const lm_layer *l = &a->model->layer[0];
    return json_object_get(c, "prefix_projection") ? l->kv_heads : l->heads;
}

static int64_t token_width(const lm_tuning_ask *a, const json_t *c)
{
    const lm_layer *l = &a->model->layer[0];
    return json_object_get(c, "prefix_projection") ? l->kv_heads * l->head_dim : a->model->width;
}

/* What all kinds outside the registry say about the base; null without one. */
static lm_code describe_base(const lm_tuning_ask *a, json_t *c, lm_err *e)
{
    const lm_config *m = a->model;
    json_t *name = a->base ? json_string(a->base) : json_null();
    bool peft = json_object_get(c, "peft_type") != NULL;
    int bad = 0;
    if (peft) {
        bad |= json_object_set_new(c, "base_model_name_or_path", name);
        bad |= json_object_set_new(c, "task_type", json_string(lm_tune_task(m ? m->arch : NULL)));
        if (!json_object_get(c, "inference_mode")) /* false: with an encoder */
            bad |= json_object_set_new(c, "inference_mode", json_true());
        bad |= json_object_set_new(c, "auto_mapping", json_null());
        bad |= json_object_set_new(c, "revision", json_null());
        bad |= json_object_set_new(c, "num_transformer_submodules",
                                   json_integer(m && m->encoder ? 2 : 1));
        bad |= json_object_set_new(c, "num_layers", m ? json_integer(m->layers) : json_null());
        bad |= json_object_set_new(c, "num_attention_heads",
                                   m ? json_integer(token_heads(a, c)) : json_null());
        bad |=
            json_object_set_new(c, "token_dim", m ? json_integer(token_width(a, c)) : json_null());
    } else {
        bad |= json_object_set_new(c, "hidden_size", m ? json_integer(m->width) : json_null());
        bad |= json_object_set_new(c, "model_name", name);
    }
    return bad ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory") : LM_OK;
}

/* A configuration of a kind that the registry does not have. */
static lm_code read_template(const lm_tuning_ask *a, json_t **out, lm_err *e)
{
    const struct {
        bool given;
        const char *what;
    } of_modules[] = { { a->rank >= 0, "rank" },
                       { a->alpha >= 0, "alpha" },
                       { a->dropout >= 0, "dropout" },
                       { a->target != NULL, "target" },
                       { a->exclude != NULL, "exclude" },
                       { a->layers != NULL, "layers" },
                       { a->save != NULL, "modules to save" } };
    for (size_t i = 0; i < sizeof of_modules / sizeof *of_modules; i++)
        if (of_modules[i].given)
            return lm_fail(e, LM_EUSAGE, of_modules[i].what, "leave it out", "method '%s' has none",
                           a->recipe.name);
    *out = json_loads(a->recipe.config, 0, NULL);
    return *out ? describe_base(a, *out, e)
                : lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory");
}

static lm_code set_asked(const lm_tuning_ask *a, const lm_tune_method *t, json_t *c, lm_err *e)
{
    static const char *const ranks[] = { "r", "rank", "init_r", NULL }, *const alphas[] = {
        "lora_alpha", "alpha", NULL
    };
    const char *const dropouts[] = { key_of_dropout(t), NULL };
    bool lora = !strcmp(t->name, "lora");
    double rank = a->rank < 0 && lora ? LORA_RANK : a->rank, alpha = a->alpha;
    const char *target = a->target ? a->target : has_all_linear(t) ? "all-linear" : NULL;
    if (alpha < 0 && key_of(t, alphas)) {
        const char *key = key_of(t, ranks);
        int at = key ? lm_hyper_find(t->hyper, key) : -1;
        alpha = rank >= 0 ? 2 * rank : at >= 0 ? 2 * t->hyper[at].value : -1;
        if (alpha == 0) /* no matrices to scale: null, as PEFT has it */
            alpha = -1;
    }
    if (set_option(c, t, "rank", rank, ranks, e) || set_option(c, t, "alpha", alpha, alphas, e) ||
        set_option(c, t, "dropout", a->dropout, dropouts, e))
        return e->code;
    if (target && set_target(c, target, e))
        return e->code;
    if (a->exclude && set_list(c, "exclude_modules", a->exclude, e))
        return e->code;
    if (a->save && set_list(c, "modules_to_save", a->save, e))
        return e->code;
    if (a->layers && target && is_pattern(target))
        return lm_fail(e, LM_EUSAGE, "layers", "write the layers into the expression",
                       "a regular expression matches whole names, with their layers");
    if (a->layers && set_layers(c, a->layers, e))
        return e->code;
    return LM_OK;
}

static bool is_asked(const lm_tuning_ask *a, const char *key)
{
    size_t n = strlen(key);
    for (int i = 0; i < a->n_set; i++)
        if (!strncmp(a->set[i], key, n) && a->set[i][n] == '=')
            return true;
    return false;
}

/* Of two keys that exclude each other, the one that was not asked for gives way: its default is not
 * what is meant. */
static lm_code settle_pairs(const lm_tuning_ask *a, const lm_tune_method *t, json_t *c, lm_err *e)
{
    static const struct {
        const char *method, *number, *size; /* the size has a default */
    } pairs[] = { { "oft", "r", "oft_block_size" },
                  { "boft", "boft_block_num", "boft_block_size" } };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (!strcmp(t->name, pairs[i].method) && !is_asked(a, pairs[i].size) &&
            json_number_value(json_object_get(c, pairs[i].number)) > 0)
            return set_number(c, pairs[i].size, 0, e);
    return LM_OK;
}

lm_code lm_tuning_config(const lm_tuning_ask *ask, json_t **out, lm_err *e)
{
    const lm_tune_method *t = ask->recipe.method ? lm_tune_method_find(ask->recipe.method) : NULL;
    *out = NULL;
    if (!t && !ask->recipe.config)
        return lm_fail(e, LM_EBUG, ask->recipe.name, NULL, "its method is unknown");
    lm_code rc = t ? lm_tune_config_new(t, ask->base,
                                        lm_tune_task(ask->model ? ask->model->arch : NULL), out, e)
                   : read_template(ask, out, e);
    if (t) {
        rc = rc ? rc : set_keys(*out, t, ask->recipe.keys, e);
        rc = rc ? rc : set_asked(ask, t, *out, e);
    }
    for (int i = 0; !rc && i < ask->n_set; i++)
        rc = set_key(*out, t, ask->set[i], strlen(ask->set[i]), e);
    if (!rc && t)
        rc = settle_pairs(ask, t, *out, e);
    if (!rc && t && t->begins)
        rc = t->begins(*out, e);
    if (rc) {
        json_decref(*out);
        *out = NULL;
    }
    return rc;
}
