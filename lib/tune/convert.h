/* SPDX-License-Identifier: Apache-2.0 */
/* convert.h -- LoRA adapters made of other things: of an adapter of any method, of the difference
 * of two models, of several adapters.
 *
 * A change D = W' - W of each module becomes factors B [out,r] A [r,in] by its largest singular
 * values, B = U sqrt(S), A = sqrt(S) V^T, with lora_alpha = r, so that its scale is 1; modules
 * whose rank or alpha is not the usual one are in rank_pattern and alpha_pattern.  Where a method
 * gives exact factors, these are kept as long as their rank is allowed.  Singular values of
 * matrices with a lesser side beyond 512 come from a random projection with 4 rounds of iteration
 * (Halko, Martinsson, Tropp, arXiv:0909.4061), which is drawn from `seed`.  Source of the layout:
 * arcee-ai/mergekit, lora extraction. */
#ifndef LM_TUNE_CONVERT_H
#define LM_TUNE_CONVERT_H

#include "base/buf.h"
#include "base/par.h"
#include "tune/folder.h"

typedef struct {
    int64_t rank; /* at most; 0: 16 */
    /* of the sum of squares of D's singular values that is kept, if `rank` allows; 0 or 1: `rank` decides */
    double share;
    lm_dtype type; /* of the tensors; NONE: F32 */
    uint64_t seed;
    lm_par *par;
    const char *base; /* base_model_name_or_path; NULL: that of the source, or none */
} lm_tune_lora_opts;

/* What was made. */
typedef struct {
    size_t modules, whole; /* with factors; tensors saved as they are */
    int64_t most, least;   /* ranks */
    double lost;           /* |D - B A| / |D| over all modules, Frobenius norms */
    double worst;          /* of a module, */
    char where[128];       /* this one */
} lm_tune_lora_report;

/* An adapter bound to its base's modules, as LoRA in `out`, which the caller commits.  Fails:
 * LM_EUSAGE for changes of biases, norms and embeddings that LoRA has no form for. */
lm_code lm_tune_to_lora(const lm_tune_folder *f, lm_model_source *base, const lm_tune_lora_opts *o,
                        lm_bundle_out *out, lm_tune_lora_report *report, lm_err *e);

/* The same in memory.  `out` stays where it is until its end: the tensors are read from its
 * bytes. */
typedef struct {
    json_t *config;
    lm_st *tensors;
    lm_buf file; /* adapter_model.safetensors */
} lm_tune_plain;
lm_code lm_tune_to_plain(const lm_tune_folder *f, lm_model_source *base, const lm_tune_lora_opts *o,
                         lm_tune_plain *out, lm_tune_lora_report *report, lm_err *e);
void lm_tune_plain_fini(lm_tune_plain *l);

/* The difference of two models of the same shapes: linear layers as factors, their biases as
 * lora_B.bias, other tensors that differ whole, in modules_to_save.  `bases`: modules of `base`. */
lm_code lm_tune_extract(lm_model_source *base, lm_model_source *tuned, const lm_tune_bases *bases,
                        const lm_tune_lora_opts *o, lm_bundle_out *out, lm_tune_lora_report *report,
                        lm_err *e);

/* Adapters of LoRA of one base as one:
 *   linear  ranks are equal: A = sum of sqrt(|w_i| s_i) A_i, B = sum of sign(w_i) sqrt(|w_i| s_i)
 * B_i, as PEFT's add_weighted_adapter
 *   cat     A stacked, B side by side: exactly the sum of w_i s_i B_i A_i; the ranks add up
 *   svd     that sum, by its largest singular values */
typedef enum {
    LM_TUNE_COMBINE_LINEAR,
    LM_TUNE_COMBINE_CAT,
    LM_TUNE_COMBINE_SVD
} lm_tune_combination;
/* Folders are bound.  Fails: LM_EUSAGE for other methods, and for linear with unequal ranks. */
lm_code lm_tune_combine(lm_tune_folder *const *f, const double *weight, int n,
                        lm_tune_combination how, const lm_tune_lora_opts *o, lm_bundle_out *out,
                        lm_tune_lora_report *report, lm_err *e);

#endif
