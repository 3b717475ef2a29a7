/* SPDX-License-Identifier: Apache-2.0 */
/* lora_tied.c -- adapters of a base whose head is its embedding.
 *
 * PEFT copies a module in modules_to_save: the module that was tied to it remains that of the base.
 * With ensure_weight_tying it saves both with the same numbers.  An adapter of the embedding changes what goes in, and the
 * head reads the base's rows, so that the result has both. */
#include <stdio.h>
#include <string.h>

#include "format/safetensors_table.h"
#include "merge/lora_impl.h"
#include "merge/plan_names.h"
#include "model/arch.h"

/* The adapter's change of the head, or of the embedding; NULL: none. */
static lm_lora_change *change_to(lm_lora *l, bool (*is)(const char *name))
{
    for (size_t i = 0; i < l->n; i++)
        if (is(l->change[i].name))
            return &l->change[i];
    return NULL;
}

/* True if the module of this weight is in modules_to_save. */
static bool is_saved(const lm_lora *l, const lm_lora_change *c)
{
    const json_t *list = json_object_get(l->config, "modules_to_save"), *item;
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)list, i, item)
    {
        char name[512];
        if (json_is_string(item) && strlen(json_string_value(item)) < 500) {
            snprintf(name, sizeof name, "%s.weight", json_string_value(item));
            if (lm_name_ends(c->name, name))
                return true;
        }
    }
    return false;
}

static bool same_numbers(const lm_lora_change *a, const lm_lora_change *b)
{
    return a->whole->dtype == b->whole->dtype && a->whole->bytes == b->whole->bytes &&
           !memcmp(a->whole_data, b->whole_data, (size_t)a->whole->bytes);
}

/* A tensor of the result that the base does not store. */
static lm_code stand_beside(lm_lora *l, lm_lora_change *c, const char *name,
                            const lm_st_tensor *like, lm_err *e)
{
    char show[LM_ST_SHOWN];

    if (c->whole->ndim != 2 || c->whole->dim[0] != like->dim[0] || c->whole->dim[1] != like->dim[1])
        return lm_fail(e, LM_EUSAGE, l->path, "merge it into the model on which it was trained",
                       "'%s' does not have the shape of the embedding to which the head is tied",
                       lm_st_show(c->name, show));
    c->base = c->whole;
    c->own = name;
    return LM_OK;
}

/* True if the embedding is adapted apart from the head.  Rows of tokens train in both. */
static bool adapts_apart(const lm_lora_change *embed)
{
    return embed && lm_lora_adds(embed) &&
           !(embed->part && !strcmp(embed->part->method->name, "tokens"));
}

lm_code lm_lora_untie(lm_lora *l, const lm_model_source *base, const lm_st_tensor *tied, lm_err *e)
{
    lm_lora_change *head = change_to(l, lm_name_is_head);
    lm_lora_change *embed = change_to(l, lm_name_is_embedding);
    bool stored = head && lm_tune_tensor_find(base, head->name);
    char name[LM_TENSOR_NAME];
    bool own_head = head && head->whole && !lm_lora_adds(head),
         own_embed = embed && embed->whole && !lm_lora_adds(embed);

    if (head && !stored && !own_head)
        return lm_fail(e, LM_EUSAGE, l->path,
                       "untie it first: save the base with a head of its own and "
                       "tie_word_embeddings false",
                       "it adapts the head, which %.80s ties to its embedding",
                       lm_model_source_path(base));
    if (own_head && own_embed && same_numbers(head, embed)) {
        head->skipped = !stored;
        return LM_OK;
    }
    l->untied = own_head || (own_embed && is_saved(l, embed)) || adapts_apart(embed);
    if (own_head && !stored)
        return stand_beside(l, head, head->name, own_embed ? embed->whole : tied, e);
    lm_arch_head(lm_arch_of(lm_model_source_config(base)), name);
    if (own_embed && l->untied && !lm_model_source_find(base, name))
        return stand_beside(l, embed, tied->name, tied, e);
    if (adapts_apart(embed) && !lm_model_source_find(base, name)) {
        l->beside = *tied;
        l->tied = tied;
        embed->base = &l->beside;
        embed->own = tied->name;
    }
    return LM_OK;
}

bool lm_lora_unties(const lm_lora *l)
{
    return l->untied;
}

const lm_st_tensor *lm_lora_own(const lm_lora *l, const char *name)
{
    for (size_t i = 0; l->untied && i < l->n; i++)
        if (l->change[i].own && !strcmp(l->change[i].own, name))
            return l->change[i].base;
    return NULL;
}

const lm_st_tensor *lm_lora_stored(const lm_lora *l, const lm_st_tensor *t)
{
    return l && t == &l->beside ? l->tied : t;
}
