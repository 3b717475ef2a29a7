/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_own.c -- which files of an existing folder a new model may replace. */
#include <string.h>

#include "base/text.h"
#include "format/bundle_impl.h"
#include "format/folder.h"

static const char *skip_number(const char *s)
{
    size_t n = strspn(s, "0123456789");

    return n >= 5 ? s + n : NULL;
}

/* "model.safetensors", "model-00002-of-00003.safetensors" */
static bool is_weights(const char *name)
{
    const char *at = name + 5;

    if (strncmp(name, "model", 5) != 0)
        return false;
    if (*at == '-')
        at = (at = skip_number(at + 1)) && !strncmp(at, "-of-", 4) ? skip_number(at + 4) : NULL;
    return at && !strcmp(at, ".safetensors");
}

bool lm_bundle_own(const char *name)
{
    static const char *const fixed[] = { "config.json", "generation_config.json",
                                         "model.safetensors.index.json" };

    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (!strcmp(name, fixed[i]))
            return true;
    for (int i = 0; lm_tokenizer_files[i]; i++)
        if (!strcmp(name, lm_tokenizer_files[i]))
            return true;
    return is_weights(name);
}

bool lm_bundle_own_checkpoint(const void *none, const char *name)
{
    (void)none;
    return lm_bundle_own(name) || !strcmp(name, "optimizer.safetensors") ||
           !strcmp(name, "state.json") || !strcmp(name, "objective.json") ||
           !strcmp(name, "adapter_config.json") || !strcmp(name, "adapter_model.safetensors");
}
