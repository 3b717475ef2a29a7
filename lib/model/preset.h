/* SPDX-License-Identifier: Apache-2.0 */
/* preset.h -- sources of a config.json: presets by name, and changes of single keys.
 *
 * A preset is share/models/NAME.json, a Hugging Face config.json like any other. */
#ifndef LM_MODEL_PRESET_H
#define LM_MODEL_PRESET_H

#include <stdbool.h>
#include <stddef.h>

#include "base/json.h"

/* Names of the presets in the first of `dirs` (NULL-terminated) that has any, sorted; free with
 * lm_names_free (base/file.h). */
lm_code lm_preset_list(const char *const *dirs, char ***names, size_t *n, lm_err *e);

/* The config named `what`: a preset by its name, a config.json by its path, or the config.json of a
 * model folder. The caller frees *out (json_decref); *path receives its file (lm_free; may be
 * NULL).  Fails: LM_EUSAGE if there is neither (names the nearest preset), LM_EIO, LM_EFORMAT. */
lm_code lm_preset_load(const char *const *dirs, const char *what, json_t **out, char **path,
                       lm_err *e);

/* The config at `path`, without weights: a config.json, or that of a model folder.  *out = NULL for
 * anything else.  The caller frees *out. */
lm_code lm_config_alone(const char *path, json_t **out, lm_err *e);

/* Apply "key=value" to a config.  The value is JSON, otherwise a plain string;
 * "rope_scaling.factor=8" sets a key of an object, which is created if absent.  Fails: LM_EUSAGE
 * for a key that the config's architecture does not have (names the nearest); lm_config_read checks
 * the value. */
lm_code lm_config_set(json_t *config, const char *assignment, lm_err *e);

/* The keys that a config of this model_type may have, NULL-terminated; NULL: unknown.  True if
 * `key` is one of them; true if it is one of any architecture. */
const char *const *lm_config_keys(const char *model_type);
bool lm_config_reads(const char *model_type, const char *key);
bool lm_config_known(const char *key);

#endif
