/* SPDX-License-Identifier: Apache-2.0 */
/* preset.c -- presets, and changes of config keys. */
#include "model/preset.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/fp8_source.h"
#include "model/arch.h"

enum { MOST_BYTES = 1 << 24 }; /* of a config.json */

static bool is_json(const char *name)
{
    size_t n = strlen(name);
    return n > 5 && name[0] != '.' && !strcmp(name + n - 5, ".json");
}

lm_code lm_preset_list(const char *const *dirs, char ***names, size_t *n, lm_err *e)
{
    for (; *dirs; dirs++) {
        if (!lm_path_is_dir(*dirs))
            continue;
        if (lm_dir_list(*dirs, names, n, e))
            return e->code;
        size_t kept = 0;
        for (size_t i = 0; i < *n; i++) {
            char *name = (*names)[i];
            if (is_json(name)) {
                name[strlen(name) - 5] = 0;
                (*names)[kept++] = name;
            } else {
                lm_free(name);
            }
        }
        *n = kept;
        if (kept)
            return LM_OK;
        lm_names_free(*names, 0);
    }
    *names = NULL;
    *n = 0;
    return lm_fail(e, LM_EIO, "presets", "install them, or name a config.json",
                   "there is no folder of presets");
}

/* The file of `what` if it is a path: config.json itself or a folder that holds one. */
static lm_code as_path(const char *what, char **path, lm_err *e)
{
    if (lm_path_is_dir(what))
        return lm_path_join(path, what, "config.json", e);
    return lm_strdup(path, what, e);
}

static lm_code as_preset(const char *const *dirs, const char *what, char **path, lm_err *e)
{
    char file[300];
    snprintf(file, sizeof file, "%.200s.json", what);
    for (; *dirs; dirs++) {
        if (lm_path_join(path, *dirs, file, e))
            return e->code;
        if (lm_path_exists(*path))
            return LM_OK;
        lm_free(*path);
        *path = NULL;
    }
    return LM_OK;
}

static lm_code no_such(const char *const *dirs, const char *what, lm_err *e)
{
    char **names = NULL, todo[128];
    const char **list = NULL;
    size_t n = 0;
    if (lm_preset_list(dirs, &names, &n, e))
        return e->code;
    if (lm_alloc_n(&list, n + 1, sizeof *list, "names of presets", e)) {
        lm_names_free(names, n);
        return e->code;
    }
    for (size_t i = 0; i < n; i++)
        list[i] = names[i];
    const char *near = lm_nearest(what, list);
    if (near)
        snprintf(todo, sizeof todo, "did you mean %s?", near);
    else
        snprintf(todo, sizeof todo, "choose one of the presets");
    lm_fail(e, LM_EUSAGE, what, todo, "is neither a preset nor a config.json");
    lm_free(list);
    lm_names_free(names, n);
    return e->code;
}

lm_code lm_preset_load(const char *const *dirs, const char *what, json_t **out, char **path,
                       lm_err *e)
{
    char *file = NULL;
    lm_code rc;
    *out = NULL;
    if (!strchr(what, '/') && (rc = as_preset(dirs, what, &file, e)))
        return rc;
    if (!file && !lm_path_exists(what))
        return no_such(dirs, what, e);
    rc = file ? LM_OK : as_path(what, &file, e);
    if (!rc)
        rc = lm_json_load(file, MOST_BYTES, out, e);
    if (!rc && !json_is_object(*out)) {
        json_decref(*out);
        *out = NULL;
        rc = lm_fail(e, LM_EFORMAT, file, NULL, "is not a JSON object");
    }
    if (path && !rc) {
        *path = file;
        file = NULL;
    }
    lm_free(file);
    return rc;
}

lm_code lm_config_alone(const char *path, json_t **out, lm_err *e)
{
    char *file = NULL;
    lm_code rc = as_path(path, &file, e);
    *out = NULL;
    if (!rc && is_json(lm_path_base(file)) && lm_path_exists(file))
        rc = lm_json_load(file, MOST_BYTES, out, e);
    if (*out)
        lm_fp8_plain_config(*out);
    lm_free(file);
    return rc;
}

static const char *const rope_keys[] = { "rope_type",
                                         "type",
                                         "rope_theta",
                                         "factor",
                                         "low_freq_factor",
                                         "high_freq_factor",
                                         "beta_fast",
                                         "beta_slow",
                                         "attention_factor",
                                         "mscale",
                                         "mscale_all_dim",
                                         "truncate",
                                         "original_max_position_embeddings",
                                         NULL };

const char *const *lm_config_keys(const char *model_type)
{
    const lm_arch *a = lm_arch_find(model_type);

    return a ? a->keys : NULL;
}

bool lm_config_reads(const char *model_type, const char *key)
{
    const char *const *list = lm_config_keys(model_type);

    while (list && *list && strcmp(*list, key))
        list++;
    return list && *list;
}

bool lm_config_known(const char *key)
{
    for (int i = 0; lm_arch_at(i); i++)
        if (lm_config_reads(lm_arch_at(i)->name, key))
            return true;
    return false;
}

static lm_code known(const char *key, const char *const *list, const char *of, lm_err *e)
{
    char todo[128] = "";
    for (int i = 0; list[i]; i++)
        if (!strcmp(list[i], key))
            return LM_OK;
    const char *near = lm_nearest(key, list);
    if (near)
        snprintf(todo, sizeof todo, "did you mean %s?", near);
    return lm_fail(e, LM_EUSAGE, "config key", near ? todo : NULL, "%s has no key \"%s\"", of, key);
}

static lm_code check_key(const json_t *config, const char *key, const char *inner, lm_err *e)
{
    const char *type = NULL;
    char of[80], list[LM_ARCH_LIST];
    if (lm_json_str_or(config, "model_type", NULL, &type, "config", e))
        return e->code;
    const lm_arch *a = type ? lm_arch_find(type) : NULL;
    if (!a)
        return lm_fail(e, LM_EUSAGE, "config", lm_arch_list(false, list),
                       "unknown model_type \"%s\"", type ? type : "");
    snprintf(of, sizeof of, "a %s config", type);
    if (known(key, a->keys, of, e))
        return e->code;
    if (!inner)
        return LM_OK;
    if (!strcmp(key, "block_sparse_attention"))
        return known(inner, lm_block_sparse_keys, key, e);
    if (!strcmp(key, "linear_attention"))
        return known(inner, lm_linear_attention_keys, key, e);
    if (strcmp(key, "rope_scaling") != 0 && strcmp(key, "rope_parameters") != 0)
        return lm_fail(e, LM_EUSAGE, "config key", NULL, "\"%s\" is not an object", key);
    return known(inner, rope_keys, key, e);
}

static lm_code set_key(json_t *config, const char *key, const char *inner, const char *value,
                       lm_err *e)
{
    json_t *v = json_loads(value, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    json_t *obj = config;
    if (v && lm_json_check_numbers(value, "config key", e)) {
        json_decref(v);
        return e->code = LM_EUSAGE;
    }
    if (!v)
        v = json_string(value);
    if (!v)
        return lm_fail(e, LM_EUSAGE, "config key", NULL, "the value of %s is not UTF-8", key);
    if (inner) {
        obj = json_object_get(config, key);
        if (!json_is_object(obj)) {
            obj = json_object();
            json_object_set_new(config, key, obj);
        }
        key = inner;
    }
    if (json_object_set_new(obj, key, v))
        return lm_fail(e, LM_ELIMIT, "config key", NULL, "no memory for %s", key);
    return LM_OK;
}

lm_code lm_config_set(json_t *config, const char *assignment, lm_err *e)
{
    const char *equals = strchr(assignment, '=');
    char key[128], *dot;
    if (!equals || equals == assignment || equals - assignment >= (ptrdiff_t)sizeof key)
        return lm_fail(e, LM_EUSAGE, "config key", "write it as key=value",
                       "'%s' is not an assignment", assignment);
    snprintf(key, sizeof key, "%.*s", (int)(equals - assignment), assignment);
    if ((dot = strchr(key, '.')))
        *dot++ = 0;
    if (check_key(config, key, dot, e))
        return e->code;
    return set_key(config, key, dot, equals + 1, e);
}
