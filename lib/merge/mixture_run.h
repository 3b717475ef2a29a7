/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_run.h -- makes the mixture of experts that a recipe describes. */
#ifndef LM_MERGE_MIXTURE_RUN_H
#define LM_MERGE_MIXTURE_RUN_H

#include "base/progress.h"
#include "format/bundle.h"
#include "format/provenance.h"
#include "graph/backend.h"
#include "merge/mixture_recipe.h"

typedef struct {
    const char *output; /* NULL: only checks and counts */
    bool force;
    const lm_bundle_opts *bundle;
    uint64_t max_shard_bytes;
    lm_dtype dtype; /* NONE: the recipe's */
    uint64_t seed;
    lm_history_step step; /* inputs are added */
    lm_backend *backend;  /* of the host, for prompts */
    lm_par *par;
    lm_sink *sink;
} lm_mixture_opts;

typedef struct {
    const char *model_type;
    int64_t experts, chosen, parameters, active;
    uint64_t bytes;
} lm_mixture_counts;

/* Fails: LM_EUSAGE for models of different architectures or sizes, and what lm_mixture_config refuses; as
 * lm_mixture_gates, lm_mixture_new and the output. */
lm_code lm_mixture_run(const lm_mixture_recipe *r, const lm_mixture_opts *o, lm_mixture_counts *out,
                       lm_err *e);

#endif
