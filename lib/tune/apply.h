/* SPDX-License-Identifier: Apache-2.0 */
/* apply.h -- a method's rule run once on the numbers of one module, in double: what merging,
 * conversion and tests do with it.
 *
 * The rule appends to a small graph, which runs in F64 on the reference kernels and those that give
 * their bits (kernels/cpu/double_simd.c), so the result is that of the definition with one rounding
 * at the end. */
#ifndef LM_TUNE_APPLY_H
#define LM_TUNE_APPLY_H

#include "base/par.h"
#include "tune/folder.h"

/* One module in memory: the method, the numbers of its tensors v[i] (NULL: off), and those of
 * `ids` tensors also in m.ids. */
typedef struct {
    const lm_tune_method *method;
    lm_tune_module m;
    const lm_tune_tensor *tensor;
    int n;
    double *v[LM_TUNE_TENSORS];
    const int64_t *ids[LM_TUNE_TENSORS];
    bool given[LM_TUNE_TENSORS]; /* by the file */
    double *block;               /* of the numbers */
    int64_t *whole;
} lm_tune_loaded;

/* Read the tensors of a part.  Release with lm_tune_loaded_fini. */
lm_code lm_tune_load(const lm_tune_folder *f, const lm_tune_part *p, lm_tune_loaded *out,
                     lm_err *e);
void lm_tune_loaded_fini(lm_tune_loaded *l);

/* W [out,in] of a module of the base, which the caller frees. */
lm_code lm_tune_base_weight(lm_model_source *base, const lm_tune_base *b, double **out, lm_err *e);

/* out = W' [out,in] of W = w; out may be w.  A method without `weight` leaves it.  Fails:
 * LM_EFORMAT for indices out of range, LM_ELIMIT. */
lm_code lm_tune_weight(const lm_tune_loaded *l, const double *w, double *out, lm_par *par,
                       lm_err *e);
/* out = b' [out] of b (NULL: the module has none; then *any says whether the method gives it one).
 * w: W before the change, which methods of LM_TUNE_MIXES read; NULL for the others. */
lm_code lm_tune_bias(const lm_tune_loaded *l, const double *w, const double *b, double *out,
                     bool *any, lm_par *par, lm_err *e);
/* Bytes of memory that lm_tune_weight takes at most, beside w and out: a guess of what rules
 * need. */
uint64_t lm_tune_apply_bytes(const lm_tune_module *m);

/* Rounded to `into`: F64 and F32 as they are; for 16-bit types the F32 that is rounded to odd, so
 * that a later rounding to 16 bits is the only one (Boldo and Melquiond, "Emulation of FMA and
 * correctly rounded sums", 2008).  out: F64 for F64, else F32. */
void lm_tune_round(const double *v, lm_dtype into, void *out, int64_t n);

#endif
