/* SPDX-License-Identifier: Apache-2.0 */
/* plan_names.c -- see plan_names.h. */
#include "merge/plan_names.h"

#include <stdlib.h>
#include <string.h>

#include "model/arch.h"

int64_t lm_name_layer(const char *name, size_t *begin, size_t *end)
{
    for (size_t i = 0; name[i]; i++) {
        size_t n = strspn(name + i, "0123456789");

        if ((!i || name[i - 1] == '.') && n && n < 7 && (name[i + n] == '.' || !name[i + n])) {
            *begin = i;
            *end = i + n;
            return strtoll(name + i, NULL, 10);
        }
    }
    return -1;
}

bool lm_name_ends(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);

    return n >= k && !strcmp(s + n - k, end) && (n == k || s[n - k - 1] == '.');
}

bool lm_name_is_head(const char *name)
{
    return lm_arch_names(LM_PART_OUTPUT, "weight", name);
}

bool lm_name_is_embedding(const char *name)
{
    return lm_arch_names(LM_PART_EMBED, "weight", name);
}

bool lm_name_is_last(const char *name)
{
    return lm_arch_resembles(LM_PART_OUTPUT, name) ||
           lm_arch_resembles(LM_PART_OUTPUT_NORM, name) ||
           strstr(name, "score"); /* the head of a classifier */
}

/* ---- Configs of an unknown architecture ---- */

const char *const lm_layer_count_keys[] = { "num_hidden_layers", "n_layer", "num_layers",
                                            "n_layers", NULL };

bool lm_type_ties(const char *model_type, bool stores_head)
{
    static const char *const untied[] = { "mixtral", "phi3" };
    const lm_arch *a = model_type ? lm_arch_find(model_type) : NULL;

    for (size_t i = 0; model_type && i < sizeof untied / sizeof *untied; i++)
        if (!strcmp(model_type, untied[i]))
            return false;
    return a ? a->tied : !stores_head;
}

/* ---- Modules ---- */

/* Prefixes of the tensors of a module in models of several modules; other modules have their own
 * name as prefix. */
static const struct {
    const char *module, *prefix;
} known[] = {
    { "text_decoder", "language_model." },
    { "text_decoder", "model.language_model." },
    { "vision_tower", "vision_tower." },
    { "vision_tower", "model.vision_tower." },
    { "vision_tower", "visual." },
    { "vision_tower", "model.visual." },
    { "vision_model", "vision_model." },
    { "vision_model", "model.vision_model." },
    { "multi_modal_projector", "multi_modal_projector." },
    { "multi_modal_projector", "model.multi_modal_projector." },
    { "multi_modal_projector", "visual.merger." },
    { "multi_modal_projector", "model.visual.merger." },
    { "multi_modal_projector", "model.visual.deepstack_merger_list." },
    { "encoder", "encoder." },
    { "encoder", "model.encoder." },
    { "decoder", "decoder." },
    { "decoder", "model.decoder." },
    { "shared", "shared." },
    { "shared", "model.shared." },
    { "shared", "lm_head." },
};
enum { KNOWN = sizeof known / sizeof *known };

size_t lm_name_fits_module(const char *tensor, const char *module)
{
    size_t best = 0, n = strlen(module);
    bool listed = false;

    for (int i = 0; i < KNOWN; i++) {
        size_t len = strlen(known[i].prefix);

        if (strcmp(known[i].module, module) != 0)
            continue;
        listed = true;
        if (!strncmp(tensor, known[i].prefix, len) && len > best)
            best = len;
    }
    if (!listed && !strncmp(tensor, module, n) && (tensor[n] == '.' || (n && module[n - 1] == '.')))
        best = n;
    return best;
}

bool lm_name_takes_rest(const char *module)
{
    return !strcmp(module, "default") || !strcmp(module, "text_decoder");
}
