/* SPDX-License-Identifier: Apache-2.0 */
/* folder_json.h -- JSON trees in the style of Hugging Face's config.json: two spaces, one member a
 * line, and the shortest digits that read back as the same double (1e-06, not
 * 9.9999999999999995e-07). */
#ifndef LM_FORMAT_FOLDER_JSON_H
#define LM_FORMAT_FOLDER_JSON_H

#include "base/buf.h"
#include "base/json.h"

/* Appended to `out`, with a newline at the end. */
lm_code lm_json_pretty(const json_t *tree, lm_buf *out, lm_err *e);

/* Set every "dtype" and "torch_dtype" of a config.json and its parts (text_config, vision_config,
 * ...) to Torch's name of the weights' type; true if one changed. */
bool lm_config_set_dtype(json_t *config, const char *name);

#endif
