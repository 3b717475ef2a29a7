/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h -- turns a recipe and its opened models into the list of the result's tensors.
 *
 * Tensors are matched by name: those of the base (otherwise of the first model) are the result's,
 * in its order, for any architecture.  The layer of a tensor is the first number among the parts of
 * its name ("model.layers.7.mlp.up_proj.weight": 7).  With slices, layers are renumbered; tensors
 * outside the layers come from the first slice, the final norm and the head from the last.
 *
 * Everything is checked here, before anything is written: every model has every tensor, with the
 * same shape, a number type where the others have one, and a config of the same architecture.  If
 * one model stores a head that another ties to its embedding, the latter's embedding is used, and
 * the result stores a head; likewise when slices take embedding and head from different models.
 * Buffers that are recomputed (rotary_emb.inv_freq, attn.bias, attn.masked_bias) may be missing. */
#ifndef LM_MERGE_PLAN_H
#define LM_MERGE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json.h"
#include "base/par.h"
#include "base/progress.h"
#include "format/folder.h"
#include "format/provenance.h"
#include "format/safetensors.h"
#include "merge/lora.h"
#include "merge/recipe.h"
#include "merge/vocab.h"
#include "model/arch.h"
#include "text/tokenizer.h"

/* An input, opened. */
typedef struct {
    const char *name;          /* path as in the recipe */
    lm_model_source *source;   /* with a LoRA: its base */
    lm_lora *lora;             /* NULL: none */
    lm_st *fisher, *gram;      /* NULL: none */
    lm_tokenizer *tok;         /* NULL: missing, or not needed */
    int64_t layers;            /* num_hidden_layers; 0: unknown */
    lm_config *config;         /* NULL: none, or of an unknown architecture */
    char head[LM_TENSOR_NAME]; /* name of its head, stored or not */
    /* of its tensors (lm_plan_digest_kind), mixed with that of its side data; 0: not computed */
    uint64_t digest;
} lm_merge_model;

/* One model's part in one tensor. */
typedef struct {
    int input;
    const lm_st_tensor *tensor; /* of its source */
    const lm_st_tensor *extra;  /* Fisher or Gram, of its file; NULL: absent */
    double param[LM_MERGE_PARAMS];
} lm_merge_ref;

/* One tensor of the result. */
typedef struct {
    const char *name;
    lm_dtype dtype;         /* of the result; NONE: bytes are copied */
    const char *dtype_name; /* as in the file */
    int ndim;
    int64_t dim[LM_ST_MAX_DIMS];
    int64_t count;
    uint64_t bytes;
    /* the result has the bytes of model[0] (not floating point; or passthrough of the same type) */
    bool copy;
    bool transposed;     /* a matrix that is [in, out] (GPT-2's Conv1D) */
    bool table;          /* has one row per token and is remapped by the vocabulary */
    lm_merge_ref *model; /* without the base, in the recipe's order */
    int n_models;
    const lm_merge_ref *base; /* NULL: none */
    double param[LM_MERGE_PARAMS];
} lm_merge_tensor;

typedef struct {
    const lm_merge_recipe *recipe; /* borrowed */
    lm_merge_model *model;         /* [recipe->n_inputs] */
    const char **path;             /* [recipe->n_inputs]: the opened models */
    int tokenizer; /* the input whose tokenizer files are copied when no tokenizer is made */
    int lead;      /* the input whose config, tokenizer and order are used */
    bool untied;   /* the result stores a head, regardless of the lead's config */
    lm_merge_tensor *tensor;
    int64_t n;
    json_t *config, *generation_config; /* of the result; generation_config NULL: none */
    lm_vocab *vocab;      /* NULL: vocabularies were not compared (no tokenizers, no policy) */
    uint64_t read, write; /* most bytes of memory of the merge */
    uint64_t largest;     /* bytes of the largest tensor, of inputs or result */
    uint64_t side; /* most bytes that adapters, side data and their matrices take for a tensor */
    int threads;   /* of the merge, for their memory */
    lm_arena *arena;
    bool whole; /* the digests cover all bytes */
} lm_merge_plan;

/* How inputs are opened. */
typedef struct {
    const lm_bundle_opts *bundle; /* may be NULL */
    lm_sink *sink;                /* warnings */
    bool no_digest;               /* leave lm_merge_model.digest 0 */
    bool whole_digest;            /* digests of all bytes; streams are spooled for them */
} lm_merge_plan_opts;

/* Open the inputs and make the plan.  Fails: LM_EUSAGE, LM_EFORMAT, LM_EIO. */
lm_code lm_merge_plan_new(const lm_merge_recipe *r, const lm_merge_plan_opts *o,
                          lm_merge_plan **out, lm_err *e);
void lm_merge_plan_free(lm_merge_plan *p);

/* The bound on the resident memory of a merge: 2 x largest tensor x inputs + side + 64 MiB. */
uint64_t lm_merge_plan_bound(const lm_merge_plan *p);

/* The name of the digests of a plan in reports and history: "xxh3_sample", "xxh3_tensors". */
const char *lm_plan_digest_kind(const lm_merge_plan *p);

#endif
