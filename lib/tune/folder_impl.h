/* SPDX-License-Identifier: Apache-2.0 */
/* folder_impl.h -- an adapter's folder, shared by the parts of its reader.  Private to lib/tune. */
#ifndef LM_TUNE_FOLDER_IMPL_H
#define LM_TUNE_FOLDER_IMPL_H

#include "tune/folder.h"

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
    lm_tune_part *part;
    size_t n_parts, cap_parts;
    json_t *tokens; /* made configurations of parts of tokens */
    lm_tune_whole *whole;
    size_t n_wholes, cap_wholes;
};

extern const char lm_tune_config_file[], lm_tune_weights_file[];

#endif
