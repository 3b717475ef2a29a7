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
/* The next step for a model at `path` with weights that are not finite. */
const char *lm_advise_finite(const char *path);
/* With -v: the formats of its loaded weights, and their bytes. */
void lm_say_weights(lm_tool *t, const lm_loaded *m);

/* The option --weights-in, and what it asks for: decide where codes of the weights are read
 * (lm_loaded_place), before a model is built for `b`; a notice says when memory is too small for them. */
extern const char *const lm_weights_places[];
#define LM_WEIGHTS_IN(p)                                      \
    LM_CHOICE(0, "weights-in", p, "WHERE", lm_weights_places, \
              "coded weights: memory, file, or auto: file if memory is too small [auto]")
lm_code lm_place_weights(lm_tool *t, const char *where, lm_dtype precision, const lm_backend *b,
                         lm_loaded *l, lm_err *e);

#endif
