/* SPDX-License-Identifier: Apache-2.0 */
/* convert_types.h -- the type of each tensor of a GGUF file.  Private to lib/convert.
 *
 * Norms, biases, learned positions, routers and the gates of shared experts are always F32.  The mixtures are those of
 * llama.cpp (src/llama-quant.cpp): the head, some values and some second matrices of the MLP have more bits
 * than the rest. */
#ifndef LM_CONVERT_CONVERT_TYPES_H
#define LM_CONVERT_CONVERT_TYPES_H

#include "base/err.h"
#include "convert/names.h"
#include "format/safetensors.h"
#include "model/config.h"

/* One of lm_gguf_types (convert.h). */
typedef struct lm_gguf_recipe lm_gguf_recipe;

/* NULL is "keep".  Fails: LM_EUSAGE. */
lm_code lm_gguf_recipe_find(const char *name, const lm_gguf_recipe **out, lm_err *e);

typedef struct {
    const lm_gguf_recipe *recipe;
    bool pure;       /* no mixture: every matrix in the recipe's type */
    bool importance; /* there is an importance matrix, with which some mixtures use fewer bits */
} lm_gguf_rule;
/* The type of tensor s of a model, which now has `dtype`.  A row that is not a whole number of
 * blocks gets the next larger type of smaller blocks, one that fits no blocks is not converted;
 * *fell_back is then true. */
uint32_t lm_gguf_recipe_type(const lm_gguf_rule *r, const lm_config *c, const lm_model_tensor *s,
                             lm_dtype dtype, bool *fell_back);
/* True if each tensor keeps its own type. */
bool lm_gguf_recipe_keeps(const lm_gguf_recipe *r);
/* general.file_type, llama.cpp's number for the file as a whole (include/llama.h); from[i] is the
 * source of required tensor i. */
uint32_t lm_gguf_recipe_file_type(const lm_gguf_recipe *r, const lm_model_tensor *s, size_t n,
                                  const lm_st_tensor *const *from);

#endif
