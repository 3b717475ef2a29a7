/* SPDX-License-Identifier: Apache-2.0 */
/* folder.h -- adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors in a
 * folder, a tar or an .lmz, of any method.
 *
 * Reading: open, bind to the modules of a base, then parts by number.  Every tensor of the file
 * must belong to a module of the base and have the shape that the method's values demand, and
 * every tensor of a module that is there must be in the file. */
#ifndef LM_TUNE_FOLDER_H
#define LM_TUNE_FOLDER_H

#include "format/bundle.h"
#include "format/safetensors.h"
#include "model/arch.h"
#include "tune/experts.h"
#include "tune/modules.h"

typedef struct lm_tune_folder lm_tune_folder;

/* A module that the adapter changes.  file[i]: the adapter's tensor for tensor[i]; NULL: off, or
 * drawn. */
typedef struct {
    const lm_tune_base *base;
    /* the folder's, or that of tokens (trainable_token_indices of LoRA) */
    const lm_tune_method *method;
    lm_tune_module module;
    lm_tune_tensor *tensor;
    const lm_st_tensor **file;
    int n;
} lm_tune_part;

/* A tensor of the base that the adapter replaces: modules_to_save, trained biases, saved
 * embeddings. */
typedef struct {
    const char *name; /* in the base's terms: "lm_head.weight" */
    const lm_st_tensor *file;
} lm_tune_whole;

/* Read configuration and headers; `o` may be NULL.  Fails: LM_EUSAGE for kinds that are not served
 * (they are named), LM_EFORMAT, LM_EIO. */
lm_code lm_tune_folder_open(const char *path, const lm_bundle_opts *o, lm_tune_folder **out,
                            lm_err *e);
/* The same for adapters that are attached (attach.h): also those whose kind has no method, which
 * is then NULL; these cannot be bound. */
lm_code lm_tune_folder_open_any(const char *path, const lm_bundle_opts *o, lm_tune_folder **out,
                                lm_err *e);
void lm_tune_folder_close(lm_tune_folder *f);
const char *lm_tune_folder_path(const lm_tune_folder *f);
const lm_tune_method *lm_tune_folder_method(const lm_tune_folder *f);
const json_t *lm_tune_folder_config(const lm_tune_folder *f); /* adapter_config.json */
const char *
lm_tune_folder_task(const lm_tune_folder *f); /* its task_type; without one that of causal models */
const lm_st *lm_tune_folder_tensors(const lm_tune_folder *f);
lm_bundle *lm_tune_folder_files(const lm_tune_folder *f);

/* Fail for files that lack an adapter's configuration or tensors, LM_EUSAGE: a whole model is named as
 * such. */
lm_code lm_tune_no_adapter(const lm_bundle *b, const char *path, lm_err *e);
/* True if `path` is a folder or an archive with adapter_config.json; false for streams. */
bool lm_tune_folder_is(const char *path, const lm_bundle_opts *o);

/* Find the modules that the adapter changes and check every shape; `bases` must outlive the
 * folder.  Fails: LM_EUSAGE for a module or a shape that the base does not have; LM_EFORMAT. */
lm_code lm_tune_folder_bind(lm_tune_folder *f, const lm_tune_bases *bases, lm_err *e);
size_t lm_tune_folder_parts(const lm_tune_folder *f);
const lm_tune_part *lm_tune_folder_part(const lm_tune_folder *f, size_t i);
/* The first part that trains rows of tokens beside the folder's method (trainable_token_indices of
 * LoRA); NULL: none. */
const lm_tune_part *lm_tune_folder_rows(const lm_tune_folder *f);
/* LM_EUSAGE with `todo` if there is one: for what has no place for such rows. */
lm_code lm_tune_folder_refuse_rows(const lm_tune_folder *f, const char *todo, lm_err *e);
/* The part of the folder's method that changes this module; NULL: none. */
const lm_tune_part *lm_tune_folder_part_of(const lm_tune_folder *f, const char *module);
size_t lm_tune_folder_wholes(const lm_tune_folder *f);
const lm_tune_whole *lm_tune_folder_whole(const lm_tune_folder *f, size_t i);
/* Parameters of experts that it changes (target_parameters): those of a module side by side, the
 * innermost first. */
size_t lm_tune_folder_params(const lm_tune_folder *f);
const lm_tune_param *lm_tune_folder_param(const lm_tune_folder *f, size_t i);
/* How its pairs were given to parameters, in a line; false: it has none. */
bool lm_tune_folder_params_line(const lm_tune_folder *f, char *out, size_t size);
/* The numbers of tensor i of a part, in double: dim product of tensor[i]; of an absent one as the
 * method draws it. */
lm_code lm_tune_folder_load(const lm_tune_folder *f, const lm_tune_part *p, int i, double *out,
                            lm_err *e);

/* ---- Writing ---- */

/* A tensor to write, with its whole name. */
typedef struct {
    const char *name;
    lm_dtype dtype;
    int ndim;
    int64_t dim[LM_MAX_DIMS];
    const void *data;
} lm_tune_saved;

/* "base_model.model.MODULE.SUFFIX", or of a shared tensor "base_model.SUFFIX". */
lm_code lm_tune_tensor_name(const lm_tune_module *m, const lm_tune_tensor *t, char **out,
                            lm_err *e);
/* As Python's json.dumps(config, indent=2, sort_keys=True) writes it. */
lm_code lm_tune_config_text(const json_t *config, lm_buf *out, lm_err *e);
/* task_type of an adapter of the architecture; NULL: an unknown one. */
const char *lm_tune_task(const lm_arch *a);
/* The keys that PEFT writes for every method, and the method's at their defaults; the caller
 * changes what differs and releases it.  base: base_model_name_or_path, may be NULL. */
lm_code lm_tune_config_new(const lm_tune_method *t, const char *base, const char *task,
                           json_t **out, lm_err *e);
/* Write both files into a folder or a stream, which the caller commits (format/bundle.h). */
lm_code lm_tune_folder_write(lm_bundle_out *out, const json_t *config, const lm_tune_saved *t,
                             size_t n, lm_err *e);
/* The tensors as adapter_model.safetensors has them, behind what `out` holds. */
lm_code lm_tune_tensors_bytes(const lm_tune_saved *t, size_t n, lm_buf *out, lm_err *e);
/* Read from these bytes, which must stay where they are; path: for messages. */
lm_code lm_tune_tensors_open(lm_buf *file, const char *path, lm_st **out, lm_err *e);

#endif
