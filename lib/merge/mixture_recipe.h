/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_recipe.h -- the description of a mixture of experts made from dense models: a YAML file of mergekit-moe.
 *
 *   base_model: PATH          everything but the MLPs, and the model that reads the prompts
 *   gate_mode: hidden         see lm_gate_mode
 *   dtype: bfloat16           of the result; absent: each tensor's own
 *   experts_per_token: 2
 *   architecture: NAME        mixtral, qwen or qwen3, which must be what the models make anyway
 *   experts:                  and shared_experts, a list of one, where the architecture has one
 *     - source_model: PATH    whose MLPs it gets
 *       positive_prompts: [TEXT, ...]
 *       negative_prompts: [TEXT, ...]
 *       noise_scale: 0        standard deviation of normal noise that is added
 *       residual_scale: 1     factor of down_proj
 * Source: arcee-ai/mergekit, docs/moe.md and mergekit/moe/. */
#ifndef LM_MERGE_MIXTURE_RECIPE_H
#define LM_MERGE_MIXTURE_RECIPE_H

#include "base/err.h"
#include "base/mem.h"
#include "merge/yaml.h"
#include "numeric/dtype.h"

/* How a router's rows are made: an expert's row is a vector of unit length for each layer, of the positive prompts
 * minus that of the negative ones. */
typedef enum {
    LM_GATE_HIDDEN, /* the mean over prompts of what enters the layer at the last token ("hidden_last" too) */
    LM_GATE_HIDDEN_AVG, /* the same with the mean over the tokens */
    LM_GATE_EMBED,      /* the sum of the tokens' embeddings, the same for each layer */
    LM_GATE_RANDOM,     /* not of unit length: normal with deviation 1 */
    LM_GATE_UNIFORM,    /* uniform, at most 1/sqrt(width) */
} lm_gate_mode;

typedef struct {
    const char *path;
    const char **positive, **negative;
    int n_positive, n_negative;
    double noise, residual;
} lm_recipe_expert;

typedef struct {
    const char *base;
    const char *architecture; /* NULL: not given */
    lm_gate_mode mode;
    lm_dtype dtype; /* NONE: not given */
    int64_t chosen;
    lm_recipe_expert *expert, *shared; /* shared NULL: none */
    int n;
    lm_arena *arena;
} lm_mixture_recipe;

/* True if the text is a YAML mapping with the key "experts". */
bool lm_mixture_recipe_is(const char *text, size_t len);
/* Fails: LM_EUSAGE with line and key for what is unknown or contradictory: no prompts, prompts that are the same for
 * all experts, one model for all of them unless gates are random, more experts of a token than there are. */
lm_code lm_mixture_recipe_parse(const char *text, size_t len, const char *where,
                                lm_mixture_recipe **out, lm_err *e);
void lm_mixture_recipe_free(lm_mixture_recipe *r);

#endif
