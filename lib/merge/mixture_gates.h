/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_gates.h -- routers of a mixture of dense models, from prompts that its experts are to get.
 * Private to lib/merge. */
#ifndef LM_MERGE_MIXTURE_GATES_H
#define LM_MERGE_MIXTURE_GATES_H

#include "base/progress.h"
#include "format/folder.h"
#include "graph/backend.h"
#include "merge/mixture_recipe.h"
#include "model/config.h"

typedef struct {
    const lm_mixture_recipe *recipe;
    const lm_config *config; /* of the base */
    lm_model_source *base;   /* in any order; its tokenizer reads the prompts */
    lm_backend *backend;     /* of the host */
    lm_par *par;
    lm_sink *sink;
    uint64_t seed;
} lm_gates_spec;

/* gates [layers, experts, width], and switches [layers, width] if there is a shared expert with prompts or random gates
 * (otherwise 0).  A prompt begins with the token that begins a text.  Warns of layers in which the rows of two experts
 * are nearly the same.  Fails: as the tokenizer and the model; LM_EUSAGE for a base without tokenizer. */
lm_code lm_mixture_gates(const lm_gates_spec *spec, float *gates, float *switches, lm_err *e);

#endif
