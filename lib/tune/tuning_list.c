/* SPDX-License-Identifier: Apache-2.0 */
/* tuning_list.c -- recipes for people and programs: every key that a new configuration takes, with
 * its default.
 *
 * Keys are read from the configuration itself, as it is when nothing is asked for; so none can be
 * missing here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "tune/modules.h"
#include "tune/tuning.h"

/* Descriptions of keys that no table of hyper-parameters has. */
static const struct {
    const char *key, *about;
} helps[] = {
    { "alpha_pattern", "alpha by module: {\"REGEX\": N}" },
    { "bias", "biases that train: none all lora_only" },
    { "block_size_pattern", "block size by module: {\"NAME\": N}" },
    { "cross_adapter", "a bottleneck behind attention to an encoder" },
    { "effective_rank", "directions that stay; null: half of them" },
    { "encoder_hidden_size", "width of the encoder" },
    { "encoder_num_layers", "of an LSTM" },
    { "encoder_reparameterization_type", "encoder of the rows: MLP LSTM" },
    { "fan_in_fan_out", "the base stores [in,out]: found in its files" },
    { "feedforward_modules", "modules whose inputs are scaled" },
    { "init_lora_weights", "true gaussian orthogonal pissa olora loftq" },
    { "init_weights", "of AdaMSS: orthogonal, from the base" },
    { "loftq_config", "loftq_bits, loftq_iter" },
    { "mh_adapter", "a bottleneck behind the attention" },
    { "n_frequency_pattern", "frequencies by module: {\"NAME\": N}" },
    { "name", "of the adapter" },
    { "non_linearity", "relu gelu gelu_new swish" },
    { "num_virtual_tokens", "rows in front of the text" },
    { "original_ln_before", "reads what the branch gives, normalised" },
    { "output_adapter", "a bottleneck behind the MLP" },
    { "prefix_projection", "rows from an encoder of two layers" },
    { "prompt_tuning_init", "for other programs: the rows are drawn" },
    { "prompt_tuning_init_text", "for other programs" },
    { "rank_pattern", "rank by module: {\"REGEX\": N}" },
    { "reduction_factor", "width of the model / that of the bottleneck" },
    { "save_indices", "places are written to the adapter" },
    { "scaling", "of what the bottleneck adds" },
    { "token_indices", "tokens whose rows train: [ID, ...]" },
    { "tokenizer_kwargs", "for other programs" },
    { "tokenizer_name_or_path", "for other programs" },
    { "total_step", "of the schedule; null: those of the run" },
    { "trainable_token_indices", "rows of the embedding that train: [ID, ...]" },
    { "use_asa", "drop subspaces in training: false only" },
    /* common to all */
    { "auto_mapping", "for other programs" },
    { "base_model_name_or_path", "the base" },
    { "exclude_modules", "modules that are not changed" },
    { "hidden_size", "of the base" },
    { "inference_mode", "of virtual tokens: false if an encoder trains" },
    { "layers_pattern", "name in front of the layer's number" },
    { "layers_to_transform", "only these layers: [0, 1]" },
    { "model_name", "the base" },
    { "modules_to_save", "modules that train whole" },
    { "num_attention_heads", "of the base" },
    { "num_layers", "of the base" },
    { "num_transformer_submodules", "tables of a prompt, of which the first is used" },
    { "revision", "of the base" },
    { "target_modules", "modules that are changed" },
    { "task_type", "for other programs" },
    { "token_dim", "of the base" },
};

/* Keys of every method that changes modules: they are listed once. */
static const char *const common[] = { "target_modules",
                                      "exclude_modules",
                                      "layers_to_transform",
                                      "layers_pattern",
                                      "modules_to_save",
                                      "base_model_name_or_path",
                                      "auto_mapping",
                                      "inference_mode",
                                      "revision",
                                      "task_type",
                                      NULL };

static const char *help_of(const char *key)
{
    for (size_t i = 0; i < sizeof helps / sizeof *helps; i++)
        if (!strcmp(helps[i].key, key))
            return helps[i].about;
    return "";
}

static bool is_common(const char *key)
{
    for (int i = 0; common[i]; i++)
        if (!strcmp(common[i], key))
            return true;
    return false;
}

/* A recipe with its method and its configuration, in which the keys of a bottleneck lie one level
 * deeper. */
typedef struct {
    lm_tuning_recipe recipe;
    const lm_tune_method *method; /* NULL: none of the registry */
    json_t *config;               /* NULL: it has no adapter */
    double *hyper;                /* defaults of the method's table */
} entry;

static void fini_entry(entry *r)
{
    json_decref(r->config);
    lm_free(r->hyper);
    *r = (entry){ 0 };
}

static lm_code read_entry(const char *name, entry *r, lm_err *e)
{
    lm_tuning_ask ask = { .rank = -1, .alpha = -1, .dropout = -1 };
    size_t n = 0;
    *r = (entry){ 0 };
    if (!lm_tuning_recipe_find(name, &r->recipe))
        return lm_fail(e, LM_EBUG, name, NULL, "its name is listed, but it is not there");
    r->method = r->recipe.method ? lm_tune_method_find(r->recipe.method) : NULL;
    ask.recipe = r->recipe;
    lm_code rc =
        lm_tuning_recipe_adapts(&r->recipe) ? lm_tuning_config(&ask, &r->config, e) : LM_OK;
    while (r->method && r->method->hyper[n].name)
        n++;
    rc = rc ? rc : lm_alloc_n(&r->hyper, n + 1, sizeof *r->hyper, "values of a method", e);
    if (!rc && r->method)
        rc = lm_tune_read_hyper(r->method, r->config, NULL, name, r->hyper, e);
    if (rc)
        fini_entry(r);
    return rc;
}

/* The row of the table, with the default of a new configuration. */
static lm_hyper hyper_at(const entry *r, int i)
{
    lm_hyper h = r->method->hyper[i];
    h.value = r->hyper[i];
    return h;
}

/* True if the key is neither in the method's table, nor common, nor the kind itself. */
static bool is_own(const entry *r, const char *key)
{
    return strcmp(key, "peft_type") != 0 && !(r->method && is_common(key)) &&
           !(r->method && lm_hyper_find(r->method->hyper, key) >= 0);
}

typedef lm_code (*key_fn)(void *ctx, const char *key, const json_t *value, lm_err *e);

/* Call fn for each key that is its own. */
static lm_code each_key(const entry *r, key_fn fn, void *ctx, lm_err *e)
{
    const char *key, *inner;
    json_t *v, *w;
    lm_code rc = LM_OK;
    json_object_foreach(r->config, key, v)
    {
        if (rc || !is_own(r, key))
            continue;
        if (strcmp(key, "config") != 0) {
            rc = fn(ctx, key, v, e);
            continue;
        }
        json_object_foreach(v, inner, w) rc = rc ? rc : fn(ctx, inner, w, e);
    }
    return rc;
}

/* ---- as a table ---- */

static lm_code add_line(void *out, const char *key, const json_t *value, lm_err *e)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY);
    lm_code rc = lm_buf_addf(out, e, "  %-23s %-44s [%s]\n", key, help_of(key), text ? text : "");
    free(text);
    return rc;
}

/* A recipe that is a method with certain keys set says so: its keys are listed there. */
static lm_code add_recipe(const entry *r, lm_buf *out, lm_err *e)
{
    lm_code rc =
        lm_buf_addf(out, e, "%-16s lr %-8g %s%s\n", r->recipe.name, r->recipe.rate, r->recipe.about,
                    lm_tuning_recipe_begins(&r->recipe) ? "" : " (saved by PEFT alone)");
    if (!rc && r->method && strcmp(r->method->name, r->recipe.name) != 0)
        return lm_buf_addf(out, e, "  keys of %s%s%s\n", r->method->name,
                           *r->recipe.keys ? ", with " : "", r->recipe.keys);
    for (int i = 0; !rc && r->method && r->method->hyper[i].name; i++) {
        lm_hyper h = hyper_at(r, i);
        rc = lm_hyper_add_line(&h, out, e);
    }
    return rc ? rc : each_key(r, add_line, out, e);
}

lm_code lm_tuning_recipes_table(lm_buf *out, lm_err *e)
{
    const char *const *names = lm_tuning_recipe_names();
    lm_code rc = LM_OK;
    for (; !rc && *names; names++) {
        entry r;
        rc = read_entry(*names, &r, e);
        rc = rc ? rc : add_recipe(&r, out, e);
        fini_entry(&r);
    }
    rc =
        rc ? rc : lm_buf_addf(out, e, "Keys of all methods that change modules, but bottlenecks\n");
    for (int i = 0; !rc && common[i]; i++)
        rc = lm_buf_addf(out, e, "  %-23s %s\n", common[i], help_of(common[i]));
    return rc;
}

/* ---- as JSON ---- */

static lm_code add_json(void *ctx, const char *key, const json_t *value, lm_err *e)
{
    lm_jw *w = ctx;
    (void)e;
    lm_jw_obj(w, key);
    lm_jw_json(w, "value", value);
    lm_jw_str(w, "help", help_of(key));
    lm_jw_close_obj(w);
    return LM_OK;
}

static void add_object(const entry *r, lm_jw *w, lm_err *e)
{
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "name", r->recipe.name);
    lm_jw_str(w, "peft_type", json_string_value(json_object_get(r->config, "peft_type")));
    lm_jw_f64(w, "lr", r->recipe.rate);
    lm_jw_str(w, "about", r->recipe.about);
    lm_jw_bool(w, "begins", lm_tuning_recipe_begins(&r->recipe));
    lm_jw_obj(w, "keys");
    for (int i = 0; r->method && r->method->hyper[i].name; i++) {
        lm_hyper h = hyper_at(r, i);
        lm_hyper_add_json(&h, w);
    }
    each_key(r, add_json, w, e);
    for (int i = 0; r->method && common[i]; i++)
        add_json(w, common[i], json_object_get(r->config, common[i]), e);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

lm_code lm_tuning_recipes_json(lm_buf *out, lm_err *e)
{
    const char *const *names = lm_tuning_recipe_names();
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_arr(&w, NULL);
    for (; *names; names++) {
        entry r;
        if (read_entry(*names, &r, e))
            return e->code;
        add_object(&r, &w, e);
        fini_entry(&r);
    }
    lm_jw_close_arr(&w);
    return lm_jw_end(&w);
}
