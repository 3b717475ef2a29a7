/* SPDX-License-Identifier: Apache-2.0 */
/* source_made.h -- a model in another format (GGUF) as a model source: tensors by functions, small files in
 * memory. */
#ifndef LM_FORMAT_SOURCE_MADE_H
#define LM_FORMAT_SOURCE_MADE_H

#include "format/folder.h"

typedef struct {
    /* All numbers of t, until the next call. */
    lm_code (*load)(void *ctx, const lm_st_tensor *t, const void **data, lm_err *e);
    /* As lm_model_source_format and lm_model_source_codes. */
    const lm_format *(*format)(void *ctx, const lm_st_tensor *t, bool *turned);
    lm_code (*codes)(void *ctx, const lm_st_tensor *t, void *dst, lm_err *e);
    /* As lm_model_source_codes_in_file; NULL: never. */
    const void *(*codes_in_file)(void *ctx, const lm_st_tensor *t);
    /* NULL if absent; a NULL function: as the model below has it (lm_model_source_make_over) */
    const char *(*meta)(void *ctx, const char *key);
    void (*close)(void *ctx);
} lm_source_maker;

typedef struct {
    const char *path;
    const json_t *config;         /* config.json; a reference of its own is taken */
    const lm_folder_files *small; /* copied */
    const lm_st_plan *plan;       /* the tensors, until close */
    const lm_source_maker *by;
    void *ctx; /* by->close is called when the source is closed, not when this fails */
} lm_source_parts;

/* Calls of the functions never overlap. */
lm_code lm_model_source_make(const lm_source_parts *p, lm_model_source **out, lm_err *e);

/* Put a model made by functions over *src: the path, the tokenizer's files and generation_config.json are those of
 * *src.  `config` as in lm_source_parts.  *src is the new model, which finishes and closes the former one, but after
 * by->close; if this fails, it is unchanged. */
lm_code lm_model_source_make_over(lm_model_source **src, const json_t *config,
                                  const lm_st_plan *plan, const lm_source_maker *by, void *ctx,
                                  lm_err *e);

#endif
