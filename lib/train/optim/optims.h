/* SPDX-License-Identifier: Apache-2.0 */
/* optims.h -- the list of optimisers, X(VARIABLE, NAME) in the order in which lists show them: the file of that name
 * defines lm_optim_VARIABLE.  Variants of a rule are in its file: momentum and nesterov in sgd.c, soap_muon in soap.c.
 * Private to lib/train. */
#ifndef LM_TRAIN_OPTIM_OPTIMS_H
#define LM_TRAIN_OPTIM_OPTIMS_H

#include "train/update.h"

#define LM_OPTIMS(X)                  \
    X(adamw, "adamw")                 \
    X(sgd, "sgd")                     \
    X(momentum, "momentum")           \
    X(nesterov, "nesterov")           \
    X(adam, "adam")                   \
    X(amsgrad, "amsgrad")             \
    X(adagrad, "adagrad")             \
    X(rmsprop, "rmsprop")             \
    X(lion, "lion")                   \
    X(schedule_free, "schedule-free") \
    X(lamb, "lamb")                   \
    X(adafactor, "adafactor")         \
    X(sm3, "sm3")                     \
    X(came, "came")                   \
    X(adam_mini, "adam-mini")         \
    X(muon, "muon")                   \
    X(normuon, "normuon")             \
    X(soap, "soap")                   \
    X(soap_muon, "soap-muon")         \
    X(adamw8bit, "adamw8bit")         \
    X(galore, "galore")               \
    X(q_galore, "q-galore")           \
    X(ldadam, "ldadam")

#define LM_OPTIM_DECLARE(variable, name) extern const lm_optim lm_optim_##variable;
LM_OPTIMS(LM_OPTIM_DECLARE)

#endif
