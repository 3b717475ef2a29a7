/* SPDX-License-Identifier: Apache-2.0 */
/* plan_names.h -- parses the name of a tensor: its layer, its part in the model, its module; and
 * what is assumed of a model of an unknown architecture, as any model can be merged.
 * Private to lib/merge. */
#ifndef LM_MERGE_PLAN_NAMES_H
#define LM_MERGE_PLAN_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The first part of the name that is a number: its offset and value; -1: none. */
int64_t lm_name_layer(const char *name, size_t *begin, size_t *end);
/* True if `end` is the name, or whole parts at its end. */
bool lm_name_ends(const char *name, const char *end);
bool lm_name_is_head(const char *name);
bool lm_name_is_embedding(const char *name);
bool lm_name_is_last(const char *name); /* outside the layers, behind them */

/* Keys of config.json for the number of layers, ended by NULL. */
extern const char *const lm_layer_count_keys[];
/* tie_word_embeddings of a config without that key: the default of its model_type.  stores_head:
 * decides for an unknown one, as models store no head that they do not use. */
bool lm_type_ties(const char *model_type, bool stores_head);

/* Length of the prefix that assigns the tensor to a module of a model of several modules
 * ("vision_tower", "encoder"; any other name is itself the prefix); 0: not in the module.  Of
 * several modules the one with the longest prefix has the tensor. */
size_t lm_name_fits_module(const char *tensor, const char *module);
/* "default" and "text_decoder" have the tensors of no other module. */
bool lm_name_takes_rest(const char *module);

#endif
