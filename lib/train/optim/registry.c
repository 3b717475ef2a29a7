/* SPDX-License-Identifier: Apache-2.0 */
/* registry.c -- the list of optimisers. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

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
        if (!strcasecmp(optims[i]->name, name))
            return optims[i];
    return NULL;
}

int lm_optim_numbers(const lm_optim *o)
{
    return o->numbers ? o->n_numbers : 1;
}

int lm_optim_hyper(const lm_optim *o, const char *name)
{
    return lm_hyper_find(o->hyper, name);
}

const char *lm_optims_with(const char *hyper, char *out, size_t size)
{
    size_t n = 0;
    *out = 0;
    for (int i = 0; lm_optim_at(i) && n < size; i++)
        if (lm_optim_hyper(lm_optim_at(i), hyper) >= 0)
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "", lm_optim_at(i)->name);
    return out;
}

lm_optim_use lm_optim_default(const lm_optim *o)
{
    lm_optim_use u = { .optim = o, .rate = 1 };
    for (int i = 0; o->hyper[i].name; i++)
        u.hyper[i] = o->hyper[i].value;
    return u;
}
