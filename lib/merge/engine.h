/* SPDX-License-Identifier: Apache-2.0 */
/* engine.h -- executes a plan: merges tensor after tensor to a model folder, a stream, or memory.
 *
 * Tensors are borrowed where the source maps them and dropped from the resident set after use;
 * others are read into reused buffers.  The next tensor is merged while the last one is written.
 * The bytes do not depend on the number of threads. */
#ifndef LM_MERGE_ENGINE_H
#define LM_MERGE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/err.h"
#include "base/par.h"
#include "base/progress.h"
#include "format/bundle.h"
#include "merge/plan.h"

/* Another key of __metadata__: the recipe, by lm_merge_recipe_json. */
#define LM_MERGE_KEY "lmutils.merge"

typedef struct lm_merge_engine lm_merge_engine;

/* plan and par (NULL: one thread) are borrowed.  One engine is used by one thread at a time. */
lm_code lm_merge_engine_new(const lm_merge_plan *plan, lm_par *par, lm_cpu_level cpu, lm_sink *sink,
                            lm_merge_engine **out, lm_err *e);
void lm_merge_engine_free(lm_merge_engine *g);

/* Tensor i of the plan into out (count elements of `dtype`, a floating-point type; a copied tensor
 * keeps its own).  `weight` [plan->recipe->n_inputs] replaces the weight of each input; NULL: as
 * planned; the entry of the base is ignored. */
lm_code lm_merge_engine_tensor(lm_merge_engine *g, int64_t i, const double *weight, lm_dtype dtype,
                               void *out, lm_err *e);

typedef struct {
    const char *output; /* the name selects the form, see lm_bundle_create */
    bool force;
    const lm_bundle_opts *bundle; /* may be NULL */
    uint64_t max_shard_bytes;     /* 0: LM_MAX_SHARD_BYTES */
    const lm_history_step *step;  /* tool, version, arguments; inputs are added by lm_merge_write */
} lm_merge_write_opts;

/* The whole model.  Ends early and writes nothing when lm_stopping().  Fails: LM_ENUMERIC naming
 * the tensor when a merged number is a NaN or an infinity (copied tensors keep theirs); errors of
 * sources, method or output.  After a failure no output is left. */
lm_code lm_merge_write(lm_merge_engine *g, const lm_merge_write_opts *o, lm_err *e);

#endif
