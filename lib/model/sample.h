/* sample.h -- one token from a row of logits.
 *
 * In this order, which is that of transformers: repetition penalty (arXiv:1909.05858, eq. in
 * section 4.1: the logit of a token that is there already is divided by it when positive,
 * multiplied when negative), temperature, top-k, top-p (arXiv:1904.09751: the fewest tokens whose
 * probabilities reach p), min-p (arXiv:2407.01082: tokens with at least min_p times the probability
 * of the likeliest). Equal logits rank by id, lowest first. */
#ifndef LM_MODEL_SAMPLE_H
#define LM_MODEL_SAMPLE_H

#include <stdint.h>

#include "base/err.h"
#include "base/rng.h"

typedef struct {
    double temperature;        /* 0: the likeliest token */
    int64_t top_k;             /* 0: all */
    double top_p;              /* 1: all */
    double min_p;              /* 0: all */
    double repetition_penalty; /* 1: none */
} lm_sample_opts;

typedef struct lm_sampler
    lm_sampler; /* scratch for rows of `vocab` logits; nothing is allocated later */
lm_code lm_sampler_new(int64_t vocab, lm_sampler **out, lm_err *e);
void lm_sampler_free(lm_sampler *s);

/* Choose by u in [0,1); -1 when a logit is NaN or +Inf, or all are -Inf.  `seen`: the ids that the penalty is for, each may be there more than once.
 * logprob (may be NULL) receives the natural log of the token's probability under the plain logits.
 */
int64_t lm_sample(lm_sampler *s, const lm_sample_opts *o, const float *logits, const uint32_t *seen,
                  int64_t n_seen, double u, double *logprob);

/* The draw for new token `position` of prompt `prompt`: nothing else decides it. */
double lm_sample_draw(uint64_t seed, int64_t prompt, int64_t position);

#endif
