/* SPDX-License-Identifier: Apache-2.0 */
/* preset.h -- where a config.json comes from: presets by name, and single keys set by hand.
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

/* The config called `what`: a preset by its name, a config.json by its path, or the config.json of
 * a model folder. *out is yours (json_decref); *path receives the file it came from (lm_free; may
 * be NULL). Fails: LM_EUSAGE when there is no such thing (names the nearest preset), LM_EIO,
 * LM_EFORMAT. */
lm_code lm_preset_load(const char *const *dirs, const char *what, json_t **out, char **path,
                       lm_err *e);

/* The config of what lies at `path`, without its weights: a config.json, or a model folder's.  *out = NULL when it is
 * something else.  *out is yours. */
lm_code lm_config_alone(const char *path, json_t **out, lm_err *e);

/* Obey "key=value" on a config.  The value is JSON, or else a string as it stands;
 * "rope_scaling.factor=8" reaches into an object, which is made when absent.  Fails: LM_EUSAGE for
 * a key that the config's architecture does not know (names the nearest); whether the value fits is
 * for lm_config_read to say. */
lm_code lm_config_set(json_t *config, const char *assignment, lm_err *e);

/* The keys that a config of this model_type may have, NULL-terminated; NULL: it is not known.  Is
 * `key` among them; is it among those of any architecture? */
const char *const *lm_config_keys(const char *model_type);
bool lm_config_reads(const char *model_type, const char *key);
bool lm_config_known(const char *key);

#endif
