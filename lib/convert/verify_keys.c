/* SPDX-License-Identifier: Apache-2.0 */
/* verify_keys.c -- reports keys of config.json without effect on the computation. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "convert/verify.h"
#include "model/preset.h"

/* Known, and without effect here: about files, classes and training, or defaults of other programs. */
static const char *const neutral[] = { "_attn_implementation_autoset",
                                       "_name_or_path",
                                       "architectures",
                                       "auto_map",
                                       "chunk_size_feed_forward",
                                       "dtype",
                                       "gradient_checkpointing",
                                       "id2label",
                                       "is_decoder",
                                       "label2id",
                                       "n_ctx",
                                       "name_or_path",
                                       "output_attentions",
                                       "output_hidden_states",
                                       "pretraining_tp",
                                       "problem_type",
                                       "reorder_and_upcast_attn",
                                       "return_dict",
                                       "summary_activation",
                                       "summary_first_dropout",
                                       "summary_proj_to_labels",
                                       "summary_type",
                                       "summary_use_proj",
                                       "task_specific_params",
                                       "tokenizer_class",
                                       "torch_dtype",
                                       "transformers_version",
                                       "unsloth_version",
                                       "use_cache",
                                       NULL };

/* Read, and refused with another value than the supported one. */
static const char *const fixed[] = { "add_cross_attention", "partial_rotary_factor", NULL };

/* The keys of each kind of position scaling besides its type and rope_theta. */
static const struct {
    const char *type, *key[8];
} rope[] = {
    { "default", { NULL } },
    { "linear", { "factor", NULL } },
    { "dynamic", { "factor", "original_max_position_embeddings", NULL } },
    { "llama3",
      { "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        NULL } },
    { "yarn",
      { "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
        "mscale", "mscale_all_dim", "truncate" } },
};

static bool is_among(const char *key, const char *const *list, size_t most)
{
    for (size_t i = 0; i < most && list[i]; i++)
        if (!strcmp(list[i], key))
            return true;
    return false;
}

static void check_rope(const json_t *config, const char *of, lm_findings *f)
{
    static const char *const all[] = { "type", "rope_type", "rope_theta", "partial_rotary_factor",
                                       NULL };
    const json_t *s = json_object_get(config, of);
    const char *type = json_string_value(json_object_get(s, "rope_type")), *key;
    char name[160];
    json_t *v;

    if (!type)
        type = json_string_value(json_object_get(s, "type"));
    for (size_t i = 0; type && i < sizeof rope / sizeof *rope; i++) {
        if (strcmp(type, rope[i].type))
            continue;
        json_object_foreach((json_t *)(uintptr_t)s, key, v)
        {
            if (json_is_null(v) || is_among(key, all, 8) || is_among(key, rope[i].key, 8))
                continue;
            snprintf(name, sizeof name, "%s.%.100s", of, key);
            lm_verify_say(f, false, "config.json", name, "has no effect: %s does not read it",
                          type);
        }
    }
}

/* A window that is switched off, and keys that layer_types overrides. */
static void check_window(const json_t *config, const char *type, lm_findings *f)
{
    static const char *const keys[] = { "sliding_window", "max_window_layers" };
    bool qwen = !strncmp(type, "qwen", 4),
         off = !json_is_true(json_object_get(config, "use_sliding_window"));
    const json_t *layers = json_object_get(config, "layer_types");

    for (size_t i = 0; qwen && i < 2; i++) {
        const json_t *v = json_object_get(config, keys[i]);
        if (!v || json_is_null(v))
            continue;
        if (off)
            lm_verify_say(f, false, "config.json", keys[i],
                          "has no effect: use_sliding_window is not true");
        else if (i == 1 && json_is_array(layers))
            lm_verify_say(f, false, "config.json", keys[i],
                          "has no effect: layer_types says which layers slide");
    }
}

void lm_verify_keys(const json_t *config, lm_findings *f)
{
    const char *type = json_string_value(json_object_get(config, "model_type")), *key;
    const char *const *known = type ? lm_config_keys(type) : NULL;
    json_t *v;

    if (!known)
        return; /* verify.c reports the unknown architecture */
    json_object_foreach((json_t *)(uintptr_t)config, key, v)
    {
        const char *near;
        if (!strcmp(key, "model_type") || !strcmp(key, "quantization_config") || json_is_null(v) ||
            is_among(key, fixed, SIZE_MAX))
            continue;
        if (is_among(key, neutral, SIZE_MAX))
            lm_verify_say(f, false, "config.json", key, "has no effect on the computation");
        else if (lm_config_reads(type, key))
            continue;
        else if (lm_config_known(key))
            lm_verify_say(f, false, "config.json", key,
                          "has no effect: a %s model does not read it", type);
        else if ((near = lm_nearest(key, known)))
            lm_verify_say(f, false, "config.json", key, "has no effect: unknown; did you mean %s?",
                          near);
        else
            lm_verify_say(f, false, "config.json", key, "has no effect: unknown");
    }
    check_rope(config, "rope_parameters", f);
    check_rope(config, "rope_scaling", f);
    check_window(config, type, f);
}
