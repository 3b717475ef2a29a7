/* SPDX-License-Identifier: Apache-2.0 */
/* methods.h -- the methods by variable, and what several of them use.  Private to lib/tune. */
#ifndef LM_TUNE_METHODS_H
#define LM_TUNE_METHODS_H

#include "tune/method.h"
#include "tune/svd.h"

extern const lm_tune_method lm_tune_lora, lm_tune_adalora, lm_tune_loha, lm_tune_lokr, lm_tune_vera,
    lm_tune_pvera, lm_tune_randlora, lm_tune_vblora, lm_tune_unilora, lm_tune_tinylora,
    lm_tune_gralora, lm_tune_hira, lm_tune_delora, lm_tune_miss, lm_tune_c3a, lm_tune_fourierft,
    lm_tune_waveft, lm_tune_shira, lm_tune_supertuning, lm_tune_ia3, lm_tune_road, lm_tune_oft,
    lm_tune_boft, lm_tune_hra, lm_tune_deft, lm_tune_glora, lm_tune_peanut, lm_tune_beft,
    lm_tune_ln_tuning, lm_tune_tokens, lm_tune_osf, lm_tune_frod, lm_tune_adamss;

/* The value of a map {regular expression: number} of the configuration for the module; false:
 * there is none. */
bool lm_tune_pattern_value(const lm_tune_module *m, const char *map, double *out);
/* LoRA's A [r,in] and B [out,r] by init_lora_weights, which keep what they have where it is true;
 * w may change (lora_start.c). s: the scale of B A. */
lm_code lm_tune_lora_start(const lm_tune_module *m, int64_t r, double s, double *w, bool *changed,
                           double *a, double *b, lm_rng rng, lm_err *e);
/* alpha / r of a module of LoRA, or alpha / sqrt(r). */
double lm_tune_lora_scale(const lm_tune_module *m);
/* Of a module of AdaLoRA: its rank, that of rank_pattern where it has the module; the scale of B
 * diag(E) A; and the deviation with which A and B begin. */
int64_t lm_tune_adalora_rank(const lm_tune_module *m);
double lm_tune_adalora_scale(const lm_tune_module *m);
#define LM_TUNE_ADALORA_STD 0.02
/* VeRA's parts, of a method whose first hyper-parameters are VeRA's and whose A and d have `parts`
 * times the rank, of which the first r rows apply; name: of A, B, d, b (vera.c). */
lm_code lm_tune_vera_tensors(const lm_tune_module *m, const char *const name[4], int64_t parts,
                             lm_tune_tensor *out, int *n);
lm_code lm_tune_vera_draw(const lm_tune_module *m, int64_t parts, int i, double *out);
lm_vid lm_tune_vera_weight(lm_rule *r, const lm_tune_module *m, int64_t parts, lm_vid w,
                           const lm_vid *p);
/* diag(b) B, and diag(d) A of r rows, those of this part. */
void lm_tune_vera_factors(lm_rule *r, const lm_tune_module *m, int64_t parts, int64_t part,
                          const lm_vid *p, lm_vid *left, lm_vid *right);
/* The tensor of a method whose n_frequency coefficients train: n_frequency, the first
 * hyper-parameter, or the value of n_frequency_pattern; and this number (fourierft.c). */
lm_code lm_tune_spectrum(const lm_tune_module *m, const char *suffix, lm_tune_init init,
                         double scale, lm_tune_tensor *out, int *n, lm_err *e);
int64_t lm_tune_spectrum_count(const lm_tune_module *m);
/* A matrix [rows,cols] in which number k of v is at row ids[k], column ids[n + k], and the rest is
 * 0.  Fails as lm_r_scatter (shira.c). */
lm_vid lm_tune_scatter(lm_rule *r, lm_vid v, const int64_t *ids, int64_t rows, int64_t cols);
/* Whether a regular expression matches the whole text. */
lm_code lm_tune_matches(const char *pattern, const char *text, bool *hit, lm_err *e);

#endif
