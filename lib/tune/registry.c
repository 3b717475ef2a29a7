/* SPDX-License-Identifier: Apache-2.0 */
/* registry.c -- all methods of adaptation, and the helpers of their tables. */
#include <stdio.h>
#include <string.h>

#include "tune/methods.h"

static const lm_tune_method *const methods[] = {
    &lm_tune_lora,      &lm_tune_adalora,  &lm_tune_loha,   &lm_tune_lokr,        &lm_tune_vera,
    &lm_tune_pvera,     &lm_tune_randlora, &lm_tune_vblora, &lm_tune_unilora,     &lm_tune_tinylora,
    &lm_tune_gralora,   &lm_tune_hira,     &lm_tune_delora, &lm_tune_miss,        &lm_tune_c3a,
    &lm_tune_fourierft, &lm_tune_waveft,   &lm_tune_shira,  &lm_tune_supertuning, &lm_tune_ia3,
    &lm_tune_road,      &lm_tune_oft,      &lm_tune_boft,   &lm_tune_hra,         &lm_tune_deft,
    &lm_tune_glora,     &lm_tune_peanut,   &lm_tune_beft,   &lm_tune_ln_tuning,   &lm_tune_tokens,
    &lm_tune_osf,       &lm_tune_frod,     &lm_tune_adamss,
};

const lm_tune_method *lm_tune_method_at(int i)
{
    return i >= 0 && (size_t)i < sizeof methods / sizeof *methods ? methods[i] : NULL;
}

const lm_tune_method *lm_tune_method_find(const char *name)
{
    const lm_tune_method *m;

    for (int i = 0; (m = lm_tune_method_at(i)); i++)
        if (!strcmp(m->name, name))
            return m;
    return NULL;
}

const lm_tune_method *lm_tune_method_of(const char *peft_type)
{
    const lm_tune_method *m;

    for (int i = 0; (m = lm_tune_method_at(i)); i++)
        if (!strcmp(m->peft_type, peft_type))
            return m;
    return NULL;
}

lm_tune_tensor *lm_tune_tensor_add(lm_tune_tensor *out, int *n, const char *suffix, int64_t rows,
                                   int64_t cols, lm_tune_init init, double scale)
{
    lm_tune_tensor *t = &out[(*n)++];

    *t = (lm_tune_tensor){ .ndim = cols ? 2 : 1, .init = init, .scale = scale, .matrix = cols > 0 };
    snprintf(t->suffix, sizeof t->suffix, "%s", suffix);
    t->dim[0] = rows;
    t->dim[1] = cols;
    return t;
}

double lm_tune_value(const lm_tune_method *t, const lm_tune_module *m, const char *key)
{
    int i = lm_hyper_find(t->hyper, key);

    return i < 0 ? 0 : m->hyper ? m->hyper[i] : t->hyper[i].value;
}
