/* SPDX-License-Identifier: Apache-2.0 */
/* attach.h -- an adapter in the graph of its base: the configuration of a method
 * (adapter_config.json) as functions of model/adapt.h.
 *
 * LoRA runs as low-rank paths that read x once for all modules of a layer (kernels/lora.h).  Other
 * methods append their own rules (tune/method.h): `input` and `output` where they have them, else
 * the product of the changed weight.  Inputs are dropped in training (lora_dropout) by LoRA's paths
 * alone; with DoRA, or another method's dropout, a graph that trains with lm_build.dropout is
 * refused.  Prompts, prefixes and P-tuning give rows to virtual tokens (attach_virtual.c): ids from
 * the size of the vocabulary on, lm_attach_virtual of them, must stand in front of every document.
 *
 *     lm_attach_new(bases, &config, adapter_config, where, &a, e)
 *     build.adapt = lm_attach_adapt(a), build.trainable = lm_attach_trains, build.ctx = a
 *
 * The names of the adapter's tensors are those of PEFT's file. */
#ifndef LM_TUNE_ATTACH_H
#define LM_TUNE_ATTACH_H

#include "model/adapt.h"
#include "model/store.h"
#include "tune/modules.h"

typedef struct lm_attach lm_attach;

/* `config` of the model, `adapter` and `bases` are borrowed.  `where` names the configuration in
 * messages.  Fails: LM_EUSAGE for a method that is not known, modules that are not there, values
 * that do not fit a module, and what has no form in a graph (adapted heads); LM_EFORMAT. */
lm_code lm_attach_new(const lm_tune_bases *bases, const lm_config *config, const json_t *adapter,
                      const char *where, lm_attach **out, lm_err *e);
void lm_attach_free(lm_attach *a);

/* What the builder calls; it lives as long as `a`. */
const lm_adapt *lm_attach_adapt(const lm_attach *a);
/* The method; NULL for those of virtual tokens and bottlenecks. */
const lm_tune_method *lm_attach_method(const lm_attach *a);
/* The number of virtual tokens; 0: none. */
int64_t lm_attach_virtual(const lm_attach *a);
/* True if their last state predicts the token after them: prompts and P-tuning.  A prefix has keys
 * and values alone. */
bool lm_attach_predicts(const lm_attach *a);

/* Rows of the embedding that train (attach_tokens.c); false: there are none. */
typedef struct {
    const char *weight; /* of the base: the table [vocab,width] */
    int64_t vocab, width;
    const json_t *list;             /* tokens, each in range and once */
    char name[LM_TENSOR_NAME + 64]; /* of the adapter's tensor */
} lm_attach_rows;
bool lm_attach_tokens(const lm_attach *a, lm_attach_rows *out);

/* Modules that are changed: their number, and each as its method sees it. */
size_t lm_attach_modules(const lm_attach *a);
const lm_tune_module *lm_attach_module(const lm_attach *a, size_t i);

/* Indices (lm_tune_tensor.ids) are constants of graphs, and must be set before one is built.  True
 * if the adapter has some; their numbers from the tensors of a saved adapter, but for `absent`
 * ones; and room for those of tensor k of module i, to be filled.  read fails: LM_EFORMAT for a
 * tensor that is missing or not of whole numbers; LM_EUSAGE for one of another shape. */
bool lm_attach_has_ids(const lm_attach *a);
lm_code lm_attach_read_ids(lm_attach *a, const lm_st *st, lm_err *e);
lm_code lm_attach_make_ids(lm_attach *a, size_t i, int k, int64_t count, int64_t **out, lm_err *e);

/* For lm_build.trainable, with ctx = the lm_attach: true for tensors of the base that train beside
 * the adapter: modules_to_save, biases by `bias`, norms of LN_TUNING. */
bool lm_attach_trains(void *ctx, const char *tensor);

/* Of P-tuning and projected prefixes: set the tensor prompt_embeddings of a store of the model to
 * the rows that its encoder makes now, as an adapter's file holds them beside it.  Does nothing for
 * others. */
lm_code lm_attach_fold(const lm_attach *a, lm_store *s, lm_err *e);

#endif
