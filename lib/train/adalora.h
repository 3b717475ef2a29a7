/* SPDX-License-Identifier: Apache-2.0 */
/* adalora.h -- AdaLoRA's part of an update (lm_update_beside): the penalty's gradients, and the states by which lib/tune/ada.c
 * distributes ranks. */
#ifndef LM_TRAIN_ADALORA_H
#define LM_TRAIN_ADALORA_H

#include "train/update.h"

typedef struct {
    double beta1, beta2, weight; /* weight: of the penalty; 0: none */
    double matrices;             /* A and B of all modules */
    bool settled;                /* the adapter began with ranks that were distributed: they stay */
} lm_ada_nodes;

/* States: s and u of all numbers; importance of ranks by the numbers of one tensor; |A A' - 1|; what became of ranks. */
extern const char lm_ada_sensitivity[], lm_ada_uncertainty[], lm_ada_importance[],
    lm_ada_orthogonality[], lm_ada_kept[];

/* What `kept` says of a rank; 0: nothing was distributed yet. */
enum { LM_ADA_KEPT = 1, LM_ADA_TAKEN = -1, LM_ADA_TAKEN_FOR_GOOD = -2 };

/* 'A', 'E' or 'B' of a tensor's name; 0: another tensor. */
char lm_ada_kind(const char *name);
lm_code lm_ada_append(const lm_ada_nodes *a, lm_update *u, const lm_update_tensor *t, lm_err *e);

#endif
