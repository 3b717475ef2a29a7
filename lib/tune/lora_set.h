/* SPDX-License-Identifier: Apache-2.0 */
/* lora_set.h -- a LoRA adapter in memory while it is made, module by module.
 * Private to lib/tune. */
#ifndef LM_TUNE_LORA_SET_H
#define LM_TUNE_LORA_SET_H

#include "tune/convert.h"

/* Factors of a parameter of experts, until their names are known. */
typedef struct {
    const char *module, *name; /* borrowed */
    size_t a;                  /* lora_A's place among the tensors; lora_B follows */
} lm_lora_level;

typedef struct {
    lm_tune_saved *tensor;
    size_t n, cap;
    json_t *targets, *ranks, *saved; /* names of modules; name -> rank; modules_to_save */
    json_t *params;                  /* target_parameters */
    lm_lora_level *level;
    size_t n_levels, cap_levels;
    bool bias, any_bias;
    const char *task;
    const lm_tune_lora_opts *o;
    lm_tune_lora_report *report;
    double lost, all; /* sums of squares */
} lm_lora_set;

/* task: task_type of its configuration, borrowed. */
lm_code lm_lora_set_new(const lm_tune_lora_opts *o, const char *task, lm_tune_lora_report *report,
                        lm_lora_set *s, lm_err *e);
void lm_lora_set_fini(lm_lora_set *s);
/* Add factors left [out,rank], right [rank,in]; `lost`, `all`: sums of squares of what they miss
 * and of the whole. */
lm_code lm_lora_set_add(lm_lora_set *s, const lm_tune_module *m, int64_t rank, const double *left,
                        const double *right, double lost, double all, lm_err *e);
/* The same from a change d [out,in] by singular values. */
lm_code lm_lora_set_split(lm_lora_set *s, const lm_tune_module *m, const double *d, lm_err *e);
/* The same of a parameter of experts: left [E,out,rank], right [E,rank,in].  Strings of the stack
 * stay where they are until lm_lora_set_nest, which is called after the last. */
lm_code lm_lora_set_stack(lm_lora_set *s, const lm_tune_stack *p, int64_t rank, const double *left,
                          const double *right, double lost, double all, lm_err *e);
/* From the changes d [out,in] of experts, which `change` gives twice, by singular values; all
 * experts get the largest rank that one of them needs. */
typedef lm_code (*lm_lora_change_fn)(void *ctx, int64_t expert, double *d, lm_err *e);
lm_code lm_lora_set_split_stack(lm_lora_set *s, const lm_tune_stack *p, lm_lora_change_fn change,
                                void *ctx, lm_err *e);
lm_code lm_lora_set_nest(lm_lora_set *s, lm_err *e);
/* Count a module in the report. */
lm_code lm_lora_set_note(lm_lora_set *s, const char *module, json_t *list, int64_t rank,
                         double lost, double all, lm_err *e);
/* A tensor under a name behind "base_model.model.". */
lm_code lm_lora_set_tensor(lm_lora_set *s, const char *name, int ndim, const int64_t *dim,
                           const double *v, lm_err *e);
/* A module in modules_to_save, by the last part of its name. */
lm_code lm_lora_set_saved(lm_lora_set *s, const char *module, lm_err *e);
/* Its configuration, which the caller releases. */
lm_code lm_lora_set_config(const lm_lora_set *s, const char *base, json_t **out, lm_err *e);
/* Write its files. */
lm_code lm_lora_set_write(const lm_lora_set *s, const char *base, lm_bundle_out *out, lm_err *e);

/* ---- experts_lora.c: parameters of experts ---- */

/* Those of an adapter, at the ranks that the options allow. */
lm_code lm_tune_params_convert(const lm_tune_folder *f, lm_lora_set *s, lm_err *e);
/* Those of several adapters, added. */
lm_code lm_tune_params_combine(lm_tune_folder *const *f, const double *weight, int n,
                               lm_tune_combination how, lm_lora_set *s, lm_err *e);
/* Where `tuned` differs; arena: of names.  Takes parameters that one tensor of the base holds. */
lm_code lm_tune_params_extract(const lm_tune_bases *bases, lm_model_source *tuned, lm_arena *arena,
                               lm_lora_set *s, lm_err *e);

#endif
