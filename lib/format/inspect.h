/* SPDX-License-Identifier: Apache-2.0 */
/* inspect.h -- statistics of a model's tensors, and differences of two models.
 *
 * Both read the data in fixed spans of elements and merge the spans in order, so the result is the
 * same, bit for bit, for any number of threads.  All arithmetic is in double. */
#ifndef LM_FORMAT_INSPECT_H
#define LM_FORMAT_INSPECT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/par.h"
#include "base/progress.h"
#include "format/folder.h"

/* min, max, mean and std (of the population: divided by n) are over the finite elements; NaN if
 * there are none. */
typedef struct {
    int64_t count, zeros, nans, infs;
    double min, max, mean, std;
} lm_tensor_stats;

/* Fails: LM_EUSAGE for a dtype without values (LM_DTYPE_NONE), LM_EIO.  After lm_stop_request the
 * result is incomplete. */
lm_code lm_tensor_stats_of(const lm_model_source *m, const lm_st_tensor *t, lm_par *par,
                           lm_tensor_stats *out, lm_err *e);

typedef struct {
    /* a and b agree when |a-b| <= atol + rtol*|a|; NaN agrees with NaN, Inf with itself */
    double atol, rtol;
    bool strict; /* tensors of different dtypes differ, whatever their values */
    /* compare tensors whose name matches one of these globs (fnmatch); NULL: all */
    const char *const *only;
    int n_only;
} lm_compare_opts;

/* A tensor name that occurs in one or both models. */
typedef struct {
    const lm_st_tensor *a, *b; /* NULL: only in the other model */
    bool same;
    /* in both, with equal shapes and dtypes with values: the fields below are set */
    bool measured;
    int64_t differing; /* elements that do not agree */
    double max_abs;    /* max |a-b| */
    double max_rel;    /* max |a-b| / max(|a|,|b|), in [0,2] */
    double rel_l2;     /* ||a-b|| / ||a||; 0 when equal, +Inf when a is zero and b is not */
} lm_tensor_diff;

typedef struct {
    lm_tensor_diff *pair; /* in the order of a, then those only in b */
    size_t n;
    /* tensors; dtypes: of common tensors, not equal */
    size_t only_a, only_b, shapes, dtypes, differing;
    bool same;
    double max_abs, max_rel;
} lm_model_diff;

/* Compare two random-access models; LM_EUSAGE when `only` matches nothing; polls lm_stopping() (the
 * result is then incomplete).  Free with lm_model_diff_fini. */
lm_code lm_model_compare(const lm_model_source *a, const lm_model_source *b,
                         const lm_compare_opts *opts, lm_par *par, lm_sink *sink,
                         lm_model_diff *out, lm_err *e);
void lm_model_diff_fini(lm_model_diff *d);

/* True if name matches one of n globs, or n is 0. */
bool lm_name_among(const char *name, const char *const *globs, int n);

#endif
