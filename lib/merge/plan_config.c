/* SPDX-License-Identifier: Apache-2.0 */
/* plan_config.c -- config.json of the result: the lead's, adjusted to the tensors. */
#include <string.h>

#include "base/text.h"
#include "format/folder_json.h"
#include "merge/plan_impl.h"
#include "merge/plan_names.h"

static lm_code set(json_t *c, const char *key, json_t *value, lm_err *e)
{
    return value && !json_object_set_new(c, key, value)
               ? LM_OK
               : lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for '%s'", key);
}

/* torch's name of the type of all numbers of the result; NULL: they differ. */
static const char *common_dtype(const lm_merge_plan *p)
{
    static const char *const torch[LM_DTYPE_COUNT] = {
        [LM_DTYPE_F64] = "float64",          [LM_DTYPE_F32] = "float32",
        [LM_DTYPE_F16] = "float16",          [LM_DTYPE_BF16] = "bfloat16",
        [LM_DTYPE_F8E4M3] = "float8_e4m3fn", [LM_DTYPE_F8E5M2] = "float8_e5m2",
    };
    lm_dtype all = LM_DTYPE_NONE;

    for (int64_t i = 0; i < p->n; i++) {
        if (p->tensor[i].dtype == LM_DTYPE_NONE || !lm_dtype_is_float(p->tensor[i].dtype))
            continue;
        if (all != LM_DTYPE_NONE && all != p->tensor[i].dtype)
            return NULL;
        all = p->tensor[i].dtype;
    }
    return all == LM_DTYPE_NONE ? NULL : torch[all];
}

static lm_code fix_dtype(const lm_merge_plan *p, json_t *c, lm_err *e)
{
    const char *name = common_dtype(p);

    if (!name)
        return LM_OK;
    lm_config_set_dtype(c, name);
    return json_object_get(c, "dtype") || json_object_get(c, "torch_dtype")
               ? LM_OK
               : set(c, "torch_dtype", json_string(name), e);
}

/* Add "layer_types" if it is absent and the layers differ in their windows: they follow from the
 * numbers of the layers, which change. */
static lm_code name_types(json_t *c, lm_err *e)
{
    lm_config config;
    lm_err unknown = { 0 }; /* an architecture without a graph here: its keys stay as they are */
    bool sliding = false, full = false;
    lm_code rc = LM_OK;

    if (json_is_array(json_object_get(c, "layer_types")) ||
        lm_config_read(c, "", &config, &unknown))
        return LM_OK;
    for (int64_t l = 0; l < config.layers; l++) {
        sliding = sliding || config.layer[l].window > 0;
        full = full || config.layer[l].window <= 0;
    }
    json_t *list = sliding && full ? json_array() : NULL;
    for (int64_t l = 0; list && l < config.layers; l++)
        json_array_append_new(
            list, json_string(config.layer[l].window > 0 ? "sliding_attention" : "full_attention"));
    if (list && (int64_t)json_array_size(list) != config.layers) { /* no memory */
        json_decref(list);
        list = NULL;
    }
    if (sliding && full)
        rc = set(c, "layer_types", list, e);
    lm_config_fini(&config);
    return rc;
}

/* The entry of each layer in a list that has one for each ("layer_types"). */
static lm_code fix_list(const lm_merge_plan *p, const lm_merge_module *mod, json_t *c,
                        const char *key, lm_err *e)
{
    const lm_merge_slice *slice = &p->recipe->slice[mod->first];
    json_t *old = json_object_get(c, key), *list = NULL;
    int64_t layers = lm_plan_layers(p, mod, p->lead);

    if (!json_is_array(old) || (int64_t)json_array_size(old) != layers)
        return LM_OK;
    list = json_array();
    for (int s = 0; list && s < mod->n; s++)
        for (int64_t l = slice[s].source[0].from; l < slice[s].source[0].to; l++)
            json_array_append(list, json_array_get(old, (size_t)l)); /* absent: nothing */
    return set(c, key, list, e);
}

/* The part of the configuration for a module, and the possible names of its number of layers. */
static json_t *part_of(json_t *c, const char *module, const char *const **keys)
{
    static const char *const vision[] = { "num_hidden_layers", "depth", "num_layers", NULL };
    static const char *const encoder[] = { "encoder_layers", "num_encoder_layers", "num_layers",
                                           NULL };
    static const char *const decoder[] = { "decoder_layers", "num_decoder_layers", NULL };
    json_t *part = NULL;

    *keys = lm_layer_count_keys;
    if (!module)
        return c;
    if (!strncmp(module, "vision", 6)) {
        *keys = vision;
        part = json_object_get(c, "vision_config");
    } else if (!strcmp(module, "encoder") || !strcmp(module, "decoder")) {
        *keys = *module == 'e' ? encoder : decoder;
    } else if (lm_name_takes_rest(module)) {
        part = json_object_get(c, "text_config");
    }
    return json_is_object(part) ? part : c;
}

static lm_code fix_module(const lm_merge_plan *p, const lm_merge_module *mod, json_t *c, lm_err *e)
{
    const lm_merge_slice *slice = &p->recipe->slice[mod->first];
    const char *const *keys;
    json_t *part = part_of(c, mod->name, &keys);
    bool found = false;
    int64_t n = 0;
    lm_code rc = name_types(part, e);

    if (!rc)
        rc = fix_list(p, mod, part, "layer_types", e);

    for (int s = 0; s < mod->n; s++)
        n += slice[s].source[0].to - slice[s].source[0].from;
    for (; !rc && *keys; keys++)
        if (json_object_get(part, *keys)) {
            found = true;
            rc = set(part, *keys, json_integer(n), e);
        }
    if (!rc && !found && mod->name && n != lm_plan_layers(p, mod, p->lead))
        rc = lm_fail(e, LM_EUSAGE, p->model[p->lead].name, "keep the number of its layers",
                     "config.json has no key for the %lld layer%s of module '%.60s'", (long long)n,
                     lm_plural(n), mod->name);
    return rc;
}

/* Slices are of the layers of the model: modules that predict tokens further on are left out. */
static lm_code drop_ahead(const lm_merge_model *from, json_t *c, lm_sink *sink, lm_err *e)
{
    const char *first = NULL;
    if (!from->config)
        return LM_OK;
    for (size_t i = 0; !first && i < lm_model_source_count(from->source); i++) {
        const char *name = lm_model_source_at(from->source, i)->name;
        first = lm_config_is_ahead(from->config, name) ? name : NULL;
    }
    if (first)
        lm_log(
            sink, LM_LOG_WARN,
            "%s: '%s' and others: left out: modules that predict tokens further on are in no slice",
            from->name, first);
    return lm_config_drop_ahead(c, e);
}

static lm_code fix_layers(const lm_merge_plan *p, json_t *c, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int m = 0; m < p->recipe->n_modules && !rc; m++)
        if (p->recipe->module[m].sliced)
            rc = fix_module(p, &p->recipe->module[m], c, e);
    return rc;
}

static const char tie[] = "tie_word_embeddings";

json_t *lm_plan_tie_of(json_t *c)
{
    json_t *v = json_object_get(c, tie);

    return v ? v : json_object_get(json_object_get(c, "text_config"), tie);
}

/* A stored head is not tied, regardless of the lead. */
static lm_code fix_tie(const lm_merge_plan *p, json_t *c, lm_err *e)
{
    json_t *text = json_object_get(c, "text_config");

    if (!p->untied || !lm_plan_says_tied(&p->model[p->lead]))
        return LM_OK;
    if (json_object_get(text, tie) && set(text, tie, json_false(), e))
        return e->code;
    return set(c, tie, json_false(), e);
}

/* The ids of special tokens ("eos_token_id") that `from` names; NULL names none. */
static lm_code take_ids(json_t *c, const json_t *from, lm_err *e)
{
    static const char suffix[] = "_token_id";
    const char *key;
    json_t *value;
    lm_code rc = LM_OK;

    json_object_foreach((json_t *)(uintptr_t)from, key, value)
    {
        size_t len = strlen(key), tail = sizeof suffix - 1;

        if (!rc && len > tail && !strcmp(key + len - tail, suffix) && !json_is_null(value))
            rc = set(c, key, json_deep_copy(value), e);
    }
    return rc;
}

/* If the tokenizer is that of one model, its special tokens apply. */
static lm_code take_special(const lm_merge_plan *p, json_t *c, lm_err *e)
{
    int owner = lm_vocab_owner(p->vocab);
    lm_model_source *m = owner < 0 || owner == p->lead ? NULL : p->model[owner].source;
    const json_t *config = m ? lm_model_source_config(m) : NULL;
    json_t *generation = NULL, *text = json_object_get(c, "text_config");
    lm_code rc = m ? lm_model_source_json(m, "generation_config.json", &generation, e) : LM_OK;

    if (!rc && config)
        rc = take_ids(c, config, e);
    if (!rc && config && json_is_object(text))
        rc = take_ids(text, json_object_get(config, "text_config"), e);
    if (!rc && p->generation_config)
        rc = take_ids(p->generation_config, generation ? generation : config, e);
    json_decref(generation);
    return rc;
}

/* Set vocab_size where it exists: in the whole, or in the part for text. */
static lm_code set_rows(json_t *c, int64_t rows, lm_err *e)
{
    json_t *const parts[] = { c, json_object_get(c, "text_config") };
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < 2; i++) {
        const json_t *said = json_object_get(parts[i], "vocab_size");
        if (json_is_integer(said) && json_integer_value(said) != rows)
            rc = set(parts[i], "vocab_size", json_integer(rows), e);
    }
    return rc;
}

static lm_code fix_vocab(const lm_merge_plan *p, json_t *c, lm_err *e)
{
    int of = p->lead;
    lm_code rc;

    if (p->vocab && !lm_vocab_same(p->vocab)) {
        rc = lm_vocab_fix_config(p->vocab, of, c, e);
        if (!rc && json_is_object(json_object_get(c, "text_config")))
            rc = lm_vocab_fix_config(p->vocab, of, json_object_get(c, "text_config"), e);
        if (!rc && p->generation_config)
            rc = lm_vocab_fix_config(p->vocab, of, p->generation_config, e);
        if (!rc)
            rc = take_special(p, c, e);
        if (rc)
            return rc;
    }
    for (int64_t i = 0; i < p->n; i++) {
        const lm_merge_tensor *t = &p->tensor[i];

        if (t->ndim == 2 && lm_vocab_is_table(t->name))
            return set_rows(c, t->dim[0], e);
    }
    return LM_OK;
}

/* Warn of a config of a known model_type from which no model can be built.  The merge needs no
 * config, and its type may have variants that are unknown here. */
static void check_config(const lm_merge_plan *p, const lm_merge_model *from, lm_sink *sink)
{
    lm_config config;
    lm_err e = { 0 };
    json_t *quantised = json_object_get(p->config, "quantization_config");

    if (!lm_arch_of(p->config) || json_is_object(quantised))
        return;
    if (!lm_config_read(p->config, from->name, &config, &e))
        lm_config_fini(&config);
    else if (e.code == LM_EUSAGE)
        lm_log(sink, LM_LOG_WARN,
               "%s: config.json, which is copied to the result, is not one of %s: %s", from->name,
               lm_arch_name(lm_arch_of(p->config)), e.what);
}

lm_code lm_plan_config(lm_merge_plan *p, lm_sink *sink, lm_err *e)
{
    const lm_merge_model *m = &p->model[p->lead];
    lm_code rc;

    for (int i = 0; !lm_model_source_config(m->source) && i < p->recipe->n_inputs; i++)
        m = &p->model[i]; /* the lead is a lone file */
    if (!lm_model_source_config(m->source))
        return LM_OK; /* weights without config */
    p->config = json_deep_copy(lm_model_source_config(m->source));
    if (!p->config)
        return lm_fail(e, LM_ELIMIT, m->name, NULL, "no memory for config.json");
    rc = lm_model_source_json(m->source, "generation_config.json", &p->generation_config, e);
    if (!rc)
        rc = fix_dtype(p, p->config, e);
    if (!rc && p->recipe->sliced)
        rc = drop_ahead(m, p->config, sink, e);
    if (!rc && p->recipe->sliced)
        rc = fix_layers(p, p->config, e);
    if (!rc)
        rc = fix_tie(p, p->config, e);
    if (!rc)
        rc = fix_vocab(p, p->config, e);
    if (!rc)
        check_config(p, m, sink);
    return rc;
}
