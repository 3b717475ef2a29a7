/* SPDX-License-Identifier: Apache-2.0 */
/* plan_impl.h -- what the parts of planning share. */
#ifndef LM_MERGE_PLAN_IMPL_H
#define LM_MERGE_PLAN_IMPL_H

#include "merge/plan.h"

/* Open every input, check that they are of one architecture, read their tokenizers' words. */
lm_code lm_plan_open(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e);
void lm_plan_close(lm_merge_plan *p);
/* Compare vocabularies and make the merged one. */
lm_code lm_plan_vocab(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e);
/* Models whose tokenizers were not read (is_read [inputs]) must have the bytes of the others. */
lm_code lm_plan_unread_tokenizers(const lm_merge_plan *p, const bool *is_read, lm_err *e);
/* Fill p->tensor. */
lm_code lm_plan_tensors(lm_merge_plan *p, lm_err *e);
/* config.json and generation_config.json of the result. */
lm_code lm_plan_config(lm_merge_plan *p, lm_err *e);

/* The job of tensor t, without data, output and threads: model [t->n_models] and base are the
 * caller's. */
void lm_plan_job(const lm_merge_plan *p, const lm_merge_tensor *t, lm_merge_operand *model,
                 lm_merge_operand *base, lm_merge_job *out);
/* What stands for a tensor of model m after its LoRA: shape and dtype. */
const lm_st_tensor *lm_plan_effective(const lm_merge_model *m, const lm_st_tensor *t);
/* Does a model with this config.json (may be NULL) use its embedding as its head? */
bool lm_plan_ties(const json_t *config);
/* True if input i takes part in a slice or is its base. */
bool lm_plan_used(const lm_merge_plan *p, int i);
int lm_plan_base_of(const lm_merge_plan *p, const lm_merge_slice *s);
/* Rows of the embedding of a model; 0: it has none that is known. */
int64_t lm_plan_rows(const lm_merge_model *m);

#endif
