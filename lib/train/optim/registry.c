/* SPDX-License-Identifier: Apache-2.0 */
/* registry.c -- the list of optimisers. */
#include <string.h>

#include "train/optim/optims.h"

#define POINTER(variable, name) &lm_optim_##variable,
#define NAME(variable, name)    name,

static const lm_optim *const optims[] = { LM_OPTIMS(POINTER) };
const char *const lm_optim_names[] = { LM_OPTIMS(NAME) NULL };

const lm_optim *lm_optim_at(int i)
{
    return i >= 0 && i < (int)(sizeof optims / sizeof *optims) ? optims[i] : NULL;
}

const lm_optim *lm_optim_find(const char *name)
{
    for (size_t i = 0; i < sizeof optims / sizeof *optims; i++)
        if (!strcmp(optims[i]->name, name))
            return optims[i];
    return NULL;
}

int lm_optim_numbers(const lm_optim *o)
{
    return o->numbers ? o->n_numbers : 1;
}

int lm_optim_hyper(const lm_optim *o, const char *name)
{
    for (int i = 0; o->hyper[i].name; i++)
        if (!strcmp(o->hyper[i].name, name))
            return i;
    return -1;
}

lm_optim_use lm_optim_default(const lm_optim *o)
{
    lm_optim_use u = { .optim = o, .rate = 1 };
    for (int i = 0; o->hyper[i].name; i++)
        u.hyper[i] = o->hyper[i].value;
    return u;
}
