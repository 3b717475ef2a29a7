/* SPDX-License-Identifier: Apache-2.0 */
/* method.h -- the methods of merging one tensor, in one table.
 *
 * A method sees one tensor of every model at a time, as arrays in memory, and writes the merged
 * one.  Names, parameters and defaults are those of mergekit; each entry of the table names the
 * source of its equation and the differences to it.
 *
 * Arithmetic: FP32 when all inputs have 16 bits or fewer, FP64 otherwise, and one rounding to the
 * type of the output; sums over a tensor are FP64 over fixed blocks.  The bytes do not depend on
 * the number of threads.  A weight of one on one model gives that model's own bits where the
 * equation implies it (theta = theta_0 + 1 * (theta_1 - theta_0) is computed so that it is exact).
 * Masks are counted randomness: lm_rng_make(seed, "merge", hash of the tensor's name ^ model's
 * index), index = element.
 *
 * Deltas are taken in the arithmetic above, not rounded to the base's type as mergekit does.  The k
 * largest of a tensor are exact, and of equal ones the lower flat index wins.  A NaN or an infinity
 * propagates to the same element of the result, is ranked as the largest magnitude, and makes a sum
 * over the tensor (an angle, an L1 norm) NaN, with a warning; lm_merge_write refuses such a result.
 * A model of weight zero is not read.  Importances and Gram matrices must be finite:
 * LM_ENUMERIC. */
#ifndef LM_MERGE_METHOD_H
#define LM_MERGE_METHOD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/err.h"
#include "base/par.h"
#include "base/progress.h"
#include "numeric/dtype.h"

/* Parameters, global or of one model; names as in mergekit's YAML ("weight", "density", ...).  A
 * method's table entry lists its own; NAN: not given. */
typedef enum {
    /* of one model */
    LM_MERGE_WEIGHT,
    LM_MERGE_DENSITY,
    LM_MERGE_GAMMA,
    LM_MERGE_EPSILON,
    LM_MERGE_SCALE,
    /* global */
    LM_MERGE_NORMALIZE,
    LM_MERGE_RESCALE, /* an lm_merge_rescale; mergekit's true is L1, its false NONE */
    LM_MERGE_LAMBDA,
    LM_MERGE_T,
    LM_MERGE_NUSLERP_FLATTEN,
    LM_MERGE_NUSLERP_ROW_WISE,
    LM_MERGE_NORMALIZE_WEIGHTS,
    LM_MERGE_EPS,
    LM_MERGE_MAX_ITER,
    LM_MERGE_TOL,
    LM_MERGE_SELECT_TOPK,
    LM_MERGE_FILTER_WISE,
    LM_MERGE_SIGN_ELECTION, /* an lm_merge_election */
    LM_MERGE_CLAMP_T,       /* model stock: 1 = t is held to [0,1] */
    LM_MERGE_ALPHA,         /* RegMean: factor on the off-diagonal of the Gram matrix */
    LM_MERGE_FISHER_FLOOR,
    LM_MERGE_RAM_EPSILON, /* RAM's "epsilon" and "alpha" */
    LM_MERGE_RAM_R,
    LM_MERGE_RAM_ALPHA,
    LM_MERGE_PARAMS,
} lm_merge_param;

/* The rest of a delta after pruning is multiplied by 1, by the factor that restores its L1 norm
 * (mergekit), or by the inverse of the probability of being kept (the papers of DARE and DELLA; not
 * for methods that prune by magnitude).  Methods whose default here is EXPECTED have L1 in
 * mergekit. */
typedef enum { LM_RESCALE_NONE, LM_RESCALE_L1, LM_RESCALE_EXPECTED } lm_merge_rescale;
/* The sign of sum(w delta) (mergekit), of sum(delta) (the TIES paper), or of the count of signs. */
typedef enum { LM_ELECT_WEIGHTED, LM_ELECT_SUM, LM_ELECT_COUNT } lm_merge_election;

typedef struct {
    const char *name;           /* "filter_wise", as in YAML */
    const char *const *choices; /* names of the values 0, 1, ...; NULL: a number or a truth value */
    bool per_model, truth;
    double min, max;
    const char *help; /* one line */
} lm_merge_param_info;
extern const lm_merge_param_info lm_merge_params[LM_MERGE_PARAMS];

/* One model's share in a tensor. */
typedef struct {
    const void *data; /* count elements, any alignment */
    lm_dtype dtype;
    double param[LM_MERGE_PARAMS]; /* parameters of a model; NAN elsewhere */
    /* Side data, if the method needs it: Fisher: F32, one value (per-tensor importance) or count
     * values, none below 0; RegMean: the Gram matrix X'X of the layer's inputs, F32 or F64 [in,
     * in], symmetric.  NULL with a count of 0, in all models: absent, the tensor is averaged. */
    const void *extra;
    lm_dtype extra_dtype;
    int64_t extra_count;
} lm_merge_operand;

/* One tensor to merge. */
typedef struct {
    const char *name; /* for the masks and messages */
    int ndim;
    const int64_t *dim;
    int64_t count;
    const lm_merge_operand *model; /* without the base, in the order given */
    int n_models;
    const lm_merge_operand *base;  /* NULL: no base */
    double param[LM_MERGE_PARAMS]; /* global ones, defaults filled in by lm_merge_defaults */
    uint64_t seed;
    bool transposed; /* RegMean: the matrix is [in, out] (GPT-2's Conv1D), not [out, in] */
    void *out;       /* count elements; may not alias the inputs */
    lm_dtype out_dtype;
    lm_par *par;
    lm_cpu_level cpu; /* selects the loops; their bits are the same */
    void *work;       /* scratch of at least the method's work() bytes, 64-byte aligned */
    /* receives warnings: an angle that is undefined, a density that keeps no element */
    lm_sink *sink;
} lm_merge_job;

typedef struct lm_merge_method lm_merge_method;
struct lm_merge_method {
    const char *name, *about, *source; /* "ties"; one line; "arXiv:2306.01708" */
    bool base_required, base_allowed;
    int min_models, max_models; /* without the base; max 0: any number */
    uint64_t takes;             /* bit i: parameter i */
    uint64_t required;          /* bit i: must be given for every model, or globally */
    uint64_t defaults;          /* bit i: def[i] is used if it is not given */
    double def[LM_MERGE_PARAMS];
    enum { LM_EXTRA_NONE, LM_EXTRA_FISHER, LM_EXTRA_GRAM } extra;
    /* each element depends only on elements at the same index: a part of the tensor may be merged
     * like a whole one */
    bool pieces;
    /* Further checks of lm_merge_check: parameters that exclude each other.  NULL: none. */
    lm_code (*check)(const lm_merge_job *j, lm_err *e);
    /* Bytes of scratch; does not read the memory behind data, extra, out and work of the job.
     * Small compared with the tensor, except for the matrices of RegMean and, per thread, some rows
     * of DELLA. */
    size_t (*work)(const lm_merge_job *j, int threads);
    lm_code (*run)(const lm_merge_job *j, lm_err *e);
};

const lm_merge_method *lm_merge_method_at(int i); /* NULL past the end */
/* Fails: LM_EUSAGE listing the names. */
lm_code lm_merge_method_find(const char *name, const lm_merge_method **out, lm_err *e);
/* Check that the method can be applied: numbers of models, base, types, required parameters and
 * their ranges.  Reads no data, so it can be called before anything is written.  Fails: LM_EUSAGE
 * naming the model's position and the parameter. */
lm_code lm_merge_check(const lm_merge_method *m, const lm_merge_job *j, lm_err *e);
/* Set param[i] to the method's default where it is NAN. */
void lm_merge_defaults(const lm_merge_method *m, double param[LM_MERGE_PARAMS]);
/* The parameter of that name among those of m, otherwise any of that name (m may be NULL); -1 if
 * unknown. */
int lm_merge_param_find(const lm_merge_method *m, const char *name);

#endif
