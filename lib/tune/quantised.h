/* SPDX-License-Identifier: Apache-2.0 */
/* quantised.h -- an adapter of LoftQ as a plain LoRA that brings the weights of its base.
 *
 * LoftQ trains beside Q, the base's W quantised (arXiv:2310.08659), which no file holds: Q is
 * computed again from W.  Where W is already what quantising gives, as in a base that was saved so,
 * the adapter alone is enough.  Else its tensors are read together with those of Q, under PEFT's
 * names of weights below an adapter (MODULE.base_layer.weight), each computed when it is read:
 * memory is that of one matrix.  Private to lib/tune. */
#ifndef LM_TUNE_QUANTISED_H
#define LM_TUNE_QUANTISED_H

#include "tune/folder.h"

typedef struct lm_tune_quantised lm_tune_quantised;

/* f: bound to the modules of `base`; both must outlive it.  Fails: LM_EUSAGE for a base that is
 * read forward alone. */
lm_code lm_tune_quantised_new(const lm_tune_folder *f, lm_model_source *base,
                              lm_tune_quantised **out, lm_err *e);
void lm_tune_quantised_free(lm_tune_quantised *q);
/* The configuration, of a plain LoRA, and the tensors. */
const json_t *lm_tune_quantised_config(const lm_tune_quantised *q);
const lm_st *lm_tune_quantised_tensors(const lm_tune_quantised *q);
bool lm_tune_quantised_brings(const lm_tune_quantised *q); /* some tensors of the base */
/* True for a tensor of the base in place of which it has one. */
bool lm_tune_quantised_has(const lm_tune_quantised *q, const char *tensor);

#endif
