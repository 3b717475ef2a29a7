/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- the model that a tool uses as it is. */
#ifndef LM_CMD_MODEL_H
#define LM_CMD_MODEL_H

#include "common/tool.h"
#include "model/loaded.h"

/* Open `path`: a model folder and its other forms (folder.h), or a GGUF file.  tokenizer: given by the user
 * in place of the model's own; NULL: none.  `par` (borrowed) loads. */
lm_code lm_open_model(lm_tool *t, const char *path, const char *tokenizer, lm_par *par,
                      lm_loaded *out, lm_err *e);

#endif
