/* SPDX-License-Identifier: Apache-2.0 */
/* arch.c -- the list of architectures. */
#include "model/arch.h"

#include <stdio.h>
#include <string.h>

static const lm_arch *const known[] = {
    &lm_arch_gpt2, &lm_arch_llama, &lm_arch_mistral, &lm_arch_qwen2, &lm_arch_qwen3,
};
enum { N_KNOWN = sizeof known / sizeof *known };

const lm_arch *lm_arch_at(int i)
{
    return i < N_KNOWN ? known[i] : NULL;
}

const lm_arch *lm_arch_find(const char *model_type)
{
    for (int i = 0; i < N_KNOWN; i++)
        if (!strcmp(known[i]->name, model_type))
            return known[i];
    return NULL;
}

const char *lm_arch_name(const lm_arch *a)
{
    return a->name;
}

const char *lm_arch_list(bool gguf, char out[200])
{
    size_t n = 0;
    int last = N_KNOWN - 1;

    for (; gguf && !known[last]->gguf_keys; last--)
        ;
    for (int i = 0; i <= last; i++)
        if (!gguf || known[i]->gguf_keys)
            n += (size_t)snprintf(out + n, n < 200 ? 200 - n : 0, "%s%s",
                                  !i          ? ""
                                  : i == last ? " and "
                                              : ", ",
                                  gguf ? known[i]->gguf : known[i]->name);
    snprintf(out + n, n < 200 ? 200 - n : 0, " are %s", gguf ? "converted" : "known");
    return out;
}

const lm_tensor_name *lm_arch_part(const lm_arch *a, lm_part part)
{
    for (const lm_tensor_name *t = a->tensors; t->part; t++)
        if (t->part == part)
            return t;
    return NULL;
}
