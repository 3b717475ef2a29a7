/* SPDX-License-Identifier: Apache-2.0 */
/* optim.h -- optimisers behind one interface.
 *
 * An optimiser is an entry of a table: its name, the states it keeps beside each parameter, and a
 * function that steps one run of the flat parameter block (all elements of a run share weight
 * decay).  States are F32 blocks of the parameters' own layout, so a checkpoint stores them by
 * tensor name and shape and any layout resumes them. */
#ifndef LM_TRAIN_OPTIM_H
#define LM_TRAIN_OPTIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "graph/backend.h"

enum { LM_OPTIM_MAX_STATES = 3, LM_OPTIM_NOW = 3 };

typedef struct {
    double beta1, beta2, eps, weight_decay;
    double momentum, dampening;
    bool nesterov;
} lm_optim_hyper;

/* One step of one run of elements. */
typedef struct {
    int64_t n;
    float *param;
    const float *grad;
    float *state[LM_OPTIM_MAX_STATES];
    uint16_t *low;     /* BF16 copy to refresh, or NULL */
    double lr;         /* of this step, and */
    int64_t t;         /* steps taken before this one: neither is looked at when `now` is given */
    const double *now; /* what `now` below makes, in the backend's memory; NULL: of the two above */
    double clip_norm;  /* bounds the norm of all gradients together; 0: none */
    double clip_value; /* bounds every gradient after that; 0: none */
    const double *sumsq; /* squares of all gradients together, where the backend has them; and  */
    const double
        *watch; /* a number that must be finite, too, for the step to be taken (NULL: none) */
    bool decay; /* weight decay applies to this run            */
} lm_optim_run;

typedef struct {
    const char *name;
    int n_states;
    const char *state[LM_OPTIM_MAX_STATES]; /* names in checkpoints: "exp_avg" */
    /* How many states these hyper-parameters need (plain SGD: none). */
    int (*states)(const lm_optim_hyper *h);
    /* The numbers that change from step to step: step t (from 0) with the rate lr. */
    void (*now)(const lm_optim_hyper *h, double lr, int64_t t, double out[LM_OPTIM_NOW]);
    lm_code (*run)(lm_backend *b, const lm_optim_hyper *h, const lm_optim_run *r, lm_err *e);
} lm_optim_flat;

/* By name, NULL if unknown; the names, NULL-terminated. */
const lm_optim_flat *lm_optim_flat_find(const char *name);
extern const char *const lm_optim_names[];

#endif
