/* SPDX-License-Identifier: Apache-2.0 */
/* kv_evaluate.h -- what a cache changes: generators of the same weights, which differ in how they
 * store keys and values, decode the same tokens.
 *
 * Each window of tokens is decoded one token at a time, so that every prediction reads the cache as
 * it is stored, from the first token on.  All generators go in step: the logits of the first one,
 * the reference, are compared with those of the others and then forgotten.  So any number of
 * candidates shares one run of the reference, and no logits are stored. */
#ifndef LM_COMPRESS_KV_EVALUATE_H
#define LM_COMPRESS_KV_EVALUATE_H

#include "model/generate.h"

typedef struct {
    const char *name; /* for messages */
    lm_generator *g;
} lm_kv_candidate;

/* Sums over positions, natural logarithms, in double; they do not depend on the number of
 * threads. */
typedef struct {
    int64_t tokens; /* positions compared */
    double nll;     /* -log p of the token that follows */
    double kl;      /* sum over the vocabulary of p log(p / q), p by the reference */
    double kl_most; /* the largest of a position */
    int64_t top1;   /* positions where the likeliest token is that of the reference */
} lm_kv_sums;

typedef struct {
    const uint32_t *ids; /* [windows, length], below the vocabulary; borrowed */
    int64_t windows, length;
    int64_t prompt; /* leading tokens of each window that run as a prompt, 1 to length - 1 */
    lm_backend *b;  /* of the generators */
    lm_par *par;    /* threads for the comparison; NULL: this one */
    void (*done)(void *ctx, int64_t tokens); /* after each step: positions so far; may be NULL */
    void *ctx;
} lm_kv_text;

/* Decode t->ids with all candidates, of which c[0] is the reference, and add to sum[0..n): in each
 * window the positions prompt - 1 to length - 2, whose next tokens are in the window.  The sums of
 * the reference are its nll, 0, 0 and all positions.  Windows run in as many slots as all
 * generators have.  Ends early when lm_stopping().
 *
 * Fails: LM_EUSAGE when the generators differ in vocabulary or have a shorter context than
 * `length`; LM_ENUMERIC for logits that are not numbers, naming the candidate and the position. */
lm_code lm_kv_compare(const lm_kv_candidate *c, int n, const lm_kv_text *t, lm_kv_sums *sum,
                      lm_err *e);

/* One row of the above: logits of the reference and of a candidate over V tokens, of which `next`
 * follows; *sum is increased by one position.  False: a logit is NaN or +Inf, or all are -Inf. */
bool lm_kv_compare_row(const float *reference, const float *logits, int64_t V, uint32_t next,
                       lm_kv_sums *sum);

#endif
