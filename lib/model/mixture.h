/* SPDX-License-Identifier: Apache-2.0 */
/* mixture.h -- a mixture of experts from dense models: their MLPs become experts, everything else is that of a base.
 *
 * Sparse upcycling (arXiv:2212.05055) is the case of one model: each expert is a copy of its MLP, and a fresh router
 * chooses among them.  As the weights of a token's experts add up to 1 (norm_topk_prob; always in Mixtral), copies
 * without noise compute the dense model's function.  Where the architecture has a shared expert (Qwen2-MoE), it is a copy
 * too, behind a gate of zeros, whose sigmoid is 1/2; with `halves` the experts' down_proj are halved, so that the sum is
 * again the MLP.
 *
 * Copies that are alike learn alike.  Two ways to make them differ, both per expert and counted (base/rng.h):
 *   noise  w + s n, n normal, s a number or a share of the matrix's standard deviation
 *   drop   a share of the MLP's inner columns, drawn for each expert, gets fresh numbers in gate, up and down, normal
 *          with the mean and the deviation of the numbers that they replace (Drop-Upcycling, arXiv:2502.19261)
 *
 * Memory: one expert's matrix at a time. */
#ifndef LM_MODEL_MIXTURE_H
#define LM_MODEL_MIXTURE_H

#include "base/par.h"
#include "base/progress.h"
#include "format/folder.h"
#include "model/arch.h"

/* The config.json of a mixture of models with the config `dense`, which is read as `where` names it.  The caller frees
 * *out.  Fails: LM_EUSAGE for an architecture without one, or properties that the mixture's cannot express. */
lm_code lm_mixture_config(const json_t *dense, const char *where, int64_t experts, int64_t chosen,
                          json_t **out, lm_err *e);

/* Where an expert's matrices come from. */
typedef struct {
    lm_model_source *src; /* in any order (lm_model_source_spool) */
    double noise;         /* standard deviation of what is added; 0: none */
    double noise_share;   /* the same in standard deviations of the matrix */
    double drop;          /* share of the inner columns that are drawn again */
    double down;          /* factor of down_proj */
} lm_mixture_mlp;

typedef struct {
    const lm_config *config, *dense; /* of the mixture, and of all models */
    lm_model_source *base;
    const lm_mixture_mlp *expert; /* [experts] */
    lm_mixture_mlp shared;        /* if the architecture has one */
    bool halves;                  /* down_proj of the experts times 1/2 beside a shared one */
    /* routers [layers, experts, width]; NULL: normal, with deviation gate_std */
    const float *gates;
    const float *switches; /* gates of the shared experts [layers, width]; NULL: 0 */
    double gate_std;
    uint64_t seed;
    lm_par *par;
} lm_mixture_spec;

typedef struct lm_mixture lm_mixture;
/* Find all tensors; the spec is borrowed.  Fails: LM_EUSAGE naming a tensor that is missing, of another
 * shape or not of numbers. */
lm_code lm_mixture_new(const lm_mixture_spec *spec, lm_mixture **out, lm_err *e);
void lm_mixture_free(lm_mixture *m);
/* Add all tensors to a plan; dtype NONE: each in the type that it has in its model. */
lm_code lm_mixture_plan(const lm_mixture *m, lm_dtype dtype, lm_st_plan *plan, lm_err *e);
/* Write them to a folder of that plan.  Stops early when lm_stopping(). */
lm_code lm_mixture_write(const lm_mixture *m, lm_folder *f, lm_sink *sink, lm_err *e);

#endif
