/* SPDX-License-Identifier: Apache-2.0 */
/* optims.h -- the optimisers by variable: one line each here and in registry.c.  Private to lib/train. */
#ifndef LM_TRAIN_OPTIM_OPTIMS_H
#define LM_TRAIN_OPTIM_OPTIMS_H

#include "train/update.h"

extern const lm_optim lm_optim_adamw, lm_optim_sgd;

#endif
