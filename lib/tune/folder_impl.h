/* SPDX-License-Identifier: Apache-2.0 */
/* folder_impl.h -- an adapter's folder, shared by the parts of its reader.  Private to lib/tune. */
#ifndef LM_TUNE_FOLDER_IMPL_H
#define LM_TUNE_FOLDER_IMPL_H

#include "tune/folder.h"

/* A pair of lora_A and lora_B on a parameter: of "M.base_layer" the depth is 1, of "M" 0. */
typedef struct {
    const char *module; /* M */
    int depth;
    const lm_st_tensor *a, *b;
} lm_tune_level;

struct lm_tune_folder {
    char *path;
    json_t *config;
    const lm_tune_method *method;
    lm_bundle *files;
    lm_st *st;
    const lm_tune_bases *bases;
    lm_arena *arena; /* of parts and names */
    /* Of each tensor of the file: its module, and the method's part of its name; NULL: neither. */
    const lm_tune_base **of;
    const char **own;
    /* The tensors of module m of the base: those at order[first[m]] to order[first[m + 1] - 1] of
     * the file. */
    size_t *first, *order;
    lm_tune_part *part;
    size_t n_parts, cap_parts;
    /* of each module of the base 1 + its part of the method, of tokens; 0: none */
    size_t *part_at[2];
    json_t *tokens; /* made configurations of parts of tokens */
    lm_tune_whole *whole;
    size_t n_wholes, cap_wholes;
    lm_tune_level *level;
    size_t n_levels, cap_levels;
    lm_tune_param *param;
    size_t n_params, cap_params;
};

extern const char lm_tune_config_file[], lm_tune_weights_file[];

/* ---- folder_experts.c: target_parameters ---- */

/* The name of a module for rank_pattern and alpha_pattern: that of its weight, MODULE.weight, where
 * target_parameters names it. */
const char *lm_tune_folder_key(const lm_tune_folder *f, const lm_tune_part *p, char out[600]);
lm_code lm_tune_folder_check_targets(const lm_tune_folder *f, lm_err *e);
/* Take tensor t of the file, whose module name[len] the base does not have, if target_parameters
 * names a parameter of it; own: "lora_A.weight". */
lm_code lm_tune_folder_level(lm_tune_folder *f, const lm_st_tensor *t, const char *name, size_t len,
                             const char *own, bool *taken, lm_err *e);
/* After all tensors: find the parameter of each pair. */
lm_code lm_tune_folder_bind_params(lm_tune_folder *f, lm_err *e);

#endif
