/* SPDX-License-Identifier: Apache-2.0 */
/* lora_set.h -- a LoRA adapter in memory while it is made, module by module.  Private to lib/tune.
 * */
#ifndef LM_TUNE_LORA_SET_H
#define LM_TUNE_LORA_SET_H

#include "tune/convert.h"

typedef struct {
    lm_tune_saved *tensor;
    size_t n, cap;
    json_t *targets, *ranks, *saved; /* names of modules; name -> rank; modules_to_save */
    bool bias, any_bias;
    const lm_tune_lora_opts *o;
    lm_tune_lora_report *report;
    double lost, all; /* sums of squares */
} lm_lora_set;

lm_code lm_lora_set_new(const lm_tune_lora_opts *o, lm_tune_lora_report *report, lm_lora_set *s,
                        lm_err *e);
void lm_lora_set_fini(lm_lora_set *s);
/* Add factors left [out,rank], right [rank,in]; `lost`, `all`: sums of squares of what they miss
 * and of the whole. */
lm_code lm_lora_set_add(lm_lora_set *s, const lm_tune_module *m, int64_t rank, const double *left,
                        const double *right, double lost, double all, lm_err *e);
/* The same from a change d [out,in] by singular values. */
lm_code lm_lora_set_split(lm_lora_set *s, const lm_tune_module *m, const double *d, lm_err *e);
/* A tensor under a name behind "base_model.model.". */
lm_code lm_lora_set_tensor(lm_lora_set *s, const char *name, int ndim, const int64_t *dim,
                           const double *v, lm_err *e);
/* A module in modules_to_save, by the last part of its name. */
lm_code lm_lora_set_saved(lm_lora_set *s, const char *module, lm_err *e);
/* Its configuration, which the caller releases. */
lm_code lm_lora_set_config(const lm_lora_set *s, const char *base, json_t **out, lm_err *e);
/* Write the folder. */
lm_code lm_lora_set_write(const lm_lora_set *s, const char *base, const char *dir, lm_err *e);

#endif
