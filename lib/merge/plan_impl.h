/* SPDX-License-Identifier: Apache-2.0 */
/* plan_impl.h -- shared by the parts of planning.  Private to lib/merge. */
#ifndef LM_MERGE_PLAN_IMPL_H
#define LM_MERGE_PLAN_IMPL_H

#include "merge/plan.h"

/* Open every input, check that they are of one architecture, read the tokens of their
 * tokenizers. */
lm_code lm_plan_open(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e);
void lm_plan_close(lm_merge_plan *p);
/* plan_digest.c: set the digest of input i, that of its tensors and side files: two adapters of one base are two
 * inputs.  Left 0 where a stream cannot be read twice. */
lm_code lm_plan_digest(lm_merge_plan *p, int i, const lm_merge_plan_opts *o, lm_err *e);
/* Compare vocabularies and make the merged one. */
lm_code lm_plan_vocab(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e);
/* Check that models whose tokenizers were not read (is_read [inputs]) have the bytes of the
 * others. */
lm_code lm_plan_unread_tokenizers(const lm_merge_plan *p, const bool *is_read, lm_err *e);
/* Warn of an adapter with other tokens than its base, whose tokenizer is used for the input. */
lm_code lm_plan_adapter_tokens(const lm_merge_model *m, lm_sink *sink, lm_err *e);
/* Fill p->tensor. */
lm_code lm_plan_tensors(lm_merge_plan *p, lm_err *e);
/* config.json and generation_config.json of the result. */
lm_code lm_plan_config(lm_merge_plan *p, lm_sink *sink, lm_err *e);

/* The job of tensor t, without data, output and threads: the caller provides model [t->n_models]
 * and base. */
void lm_plan_job(const lm_merge_plan *p, const lm_merge_tensor *t, lm_merge_operand *model,
                 lm_merge_operand *base, lm_merge_job *out);
/* Shape and dtype of a tensor of model m after its LoRA. */
const lm_st_tensor *lm_plan_effective(const lm_merge_model *m, const lm_st_tensor *t);
/* The description of one tensor of the result. */
typedef struct {
    const lm_merge_slice *slice;
    const char *out;    /* its name */
    int64_t layer, of;  /* of the slice, for gradients; layer -1: outside */
    const char *suffix; /* behind the layer's number */
    const char *prefix; /* before it; NULL: outside the layers, the same name in all models */
} lm_plan_want;
lm_code lm_plan_add(lm_merge_plan *p, const lm_plan_want *w, size_t *cap, lm_err *e);
/* The name of w in layer `layer` of a model, or of the result. */
lm_code lm_plan_name_in(lm_merge_plan *p, const lm_plan_want *w, int64_t layer, const char **out,
                        lm_err *e);
/* The model's tensor of this name; for a tied head, the embedding; NULL: missing. */
const lm_st_tensor *lm_plan_find(const lm_merge_model *m, const char *name);
/* The embedding that is also the model's head, by its configuration; NULL: none. */
const lm_st_tensor *lm_plan_tied_to(const lm_merge_model *m);
/* LM_EUSAGE: one input has a tensor that another lacks. */
lm_code lm_plan_missing(const lm_merge_plan *p, int lacks, int has, const char *name, lm_err *e);
/* The input whose tensors determine those of a slice. */
int lm_plan_leader(const lm_merge_plan *p, const lm_merge_slice *s);
/* Layers that input i has in a module; 0: unknown, or none. */
int64_t lm_plan_layers(const lm_merge_plan *p, const lm_merge_module *mod, int i);

/* The same by the configuration alone, without adapters. */
bool lm_plan_says_tied(const lm_merge_model *m);
/* The architecture that config.json states; NULL: unknown, or no config. */
const lm_arch *lm_plan_arch(const lm_merge_model *m);
/* The value in config.json or its text_config; NULL: absent. */
json_t *lm_plan_tie_of(json_t *config);
/* True if input i takes part in a slice or is its base. */
bool lm_plan_used(const lm_merge_plan *p, int i);
int lm_plan_base_of(const lm_merge_plan *p, const lm_merge_slice *s);

#endif
