/* SPDX-License-Identifier: Apache-2.0 */
/* optims.h -- the optimisers by variable: one line each here and in registry.c.  Private to lib/train. */
#ifndef LM_TRAIN_OPTIM_OPTIMS_H
#define LM_TRAIN_OPTIM_OPTIMS_H

#include "train/update.h"

extern const lm_optim lm_optim_adamw;
extern const lm_optim lm_optim_sgd, lm_optim_momentum, lm_optim_nesterov;
extern const lm_optim lm_optim_adam, lm_optim_amsgrad, lm_optim_adagrad, lm_optim_rmsprop;
extern const lm_optim lm_optim_lion, lm_optim_schedule_free;
extern const lm_optim lm_optim_lamb, lm_optim_adafactor, lm_optim_sm3, lm_optim_came,
    lm_optim_adam_mini;
extern const lm_optim lm_optim_muon, lm_optim_normuon, lm_optim_soap, lm_optim_soap_muon;

#endif
