/* SPDX-License-Identifier: Apache-2.0 */
/* join.h -- several adapters in one graph of their base, each for the rows that choose it.
 *
 * The graph has one product of each layer's weight for all rows, and beside it the low-rank paths
 * of every adapter.  The input lm_model.chosen has the number of an adapter for each row, from 1
 * on, 0: none; what an adapter's A makes of the rows of others is replaced by zeros before its B.
 * So a row has the numbers that a graph with its adapter alone gives it.
 *
 * Tensors of adapter k have the names of its file behind "k:". */
#ifndef LM_TUNE_JOIN_H
#define LM_TUNE_JOIN_H

#include "format/safetensors.h"
#include "model/loaded.h"
#include "tune/attach.h"

typedef struct lm_join lm_join;

/* True for LoRA with low-rank paths alone (without DoRA, biases or tensors of the base that train):
 * only such adapters can be joined. */
bool lm_join_takes(const lm_attach *a);

/* n >= 1 adapters of one base and their tensors; all borrowed. */
lm_code lm_join_new(lm_attach *const *a, const lm_st *const *tensors, int n, lm_join **out,
                    lm_err *e);
void lm_join_free(lm_join *j); /* after graphs with them; NULL is fine */
/* For lm_loaded.adapter. */
const lm_loaded_adapter *lm_join_adapter(const lm_join *j);

#endif
