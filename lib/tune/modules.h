/* SPDX-License-Identifier: Apache-2.0 */
/* modules.h -- the modules of a base model that adapters name, and which of them a configuration
 * means.
 *
 * Names are those of transformers' modules, with the architecture's root even where files leave it
 * out: "transformer.h.0.attn.c_attn", "model.layers.0.self_attn.q_proj", "lm_head". */
#ifndef LM_TUNE_MODULES_H
#define LM_TUNE_MODULES_H

#include "format/folder.h"
#include "tune/method.h"

typedef enum { LM_TUNE_LINEAR_LAYER, LM_TUNE_EMBEDDING, LM_TUNE_NORM } lm_tune_kind;

typedef struct {
    const char *name;
    const char *weight, *bias; /* names of its tensors in the file; bias NULL: none */
    lm_tune_kind kind;
    bool head; /* the linear layer that gives logits */
    /* an expert's, or the router: parameters in transformers 5, where "all-linear" leaves them out */
    bool routed;
    bool turned;     /* a linear layer whose file stores [in,out] */
    int64_t out, in; /* of an embedding: width, tokens; of a norm: width, 0 */
    int64_t layer;   /* -1: outside the layers */
    int part;        /* its place in the architecture's table of tensors */
} lm_tune_base;

typedef struct {
    lm_tune_base *at;
    size_t n, cap;
    const lm_tune_base **by_name; /* in the order of their names without the architecture's root */
    lm_arena *arena;
    const json_t *config;          /* of the model; borrowed */
    const lm_model_source *source; /* the model; borrowed */
    char *path;
} lm_tune_bases;

/* The modules of a model, in the order of its architecture (of an unknown one: of its file).
 * `turned` of models of an unknown architecture: as `turned` says (fan_in_fan_out).  Fails: for
 * memory. */
lm_code lm_tune_bases_read(const lm_model_source *base, bool turned, lm_tune_bases *out, lm_err *e);
void lm_tune_bases_fini(lm_tune_bases *b);
/* The module of that name, whichever of the two has an architecture's root in front; NULL: none. */
const lm_tune_base *lm_tune_base_find(const lm_tune_bases *b, const char *name, size_t len);

/* The base's tensor of that name; names in files may lack the architecture's root, or have one
 * more. NULL: none. */
const lm_st_tensor *lm_tune_tensor_find(const lm_model_source *base, const char *name);

/* Mark in chosen[n] the modules that the configuration means: target_modules (a list of names or
 * of their ends, a regular expression for the whole name, "all-linear": all linear layers but the
 * head; absent: the method's usual modules of this type of model), without exclude_modules and
 * modules_to_save, in layers_to_transform (of layers_pattern). Matching is PEFT's.  Fails:
 * LM_EUSAGE if nothing matches, with names that are near; LM_EFORMAT for a regular expression that
 * is none. */
lm_code lm_tune_choose(const lm_tune_bases *b, const lm_tune_method *t, const json_t *config,
                       const char *where, bool *chosen, lm_err *e);

/* Every name of modules_to_save is that of a module of the base; `asked`, of a configuration that
 * is new: also every name of target_modules (of a module that `t` can change; t NULL: has none) and
 * of exclude_modules, and every number of layers_to_transform.  A tied head may be named, too.
 * Fails: LM_EUSAGE with the names that match nothing, and the nearest. */
lm_code lm_tune_check_names(const lm_tune_bases *b, const lm_tune_method *t, const json_t *config,
                            bool asked, lm_err *e);

/* The value of the first entry of a map {regular expression: number} that matches the end of the
 * module's name; *out is left alone if none does.  Fails: LM_EFORMAT. */
lm_code lm_tune_pattern(const json_t *map, const char *module, double *out, const char *where,
                        lm_err *e);
/* Values of the method's table by a configuration, for a module (NULL: for none in particular):
 * rank_pattern gives `r`, alpha_pattern `alpha` or `lora_alpha`.  out: room for the table.  Fails:
 * LM_EFORMAT for values of a wrong type or out of range; LM_EUSAGE for a key that changes the
 * mathematics and is not served. */
lm_code lm_tune_read_hyper(const lm_tune_method *t, const json_t *config, const char *module,
                           const char *where, double *out, lm_err *e);
lm_code lm_tune_check_config(const lm_tune_method *t, const json_t *config, const char *where,
                             lm_err *e);
/* The method's usual modules of a type of model (PEFT's table): a NULL-terminated list; NULL: the
 * table has no entry. */
const char *const *lm_tune_usual_modules(const lm_tune_method *t, const char *model_type);

#endif
