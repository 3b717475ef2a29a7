/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h -- choosing the next token of each sequence from its logits, on the backend that has the
 * logits.
 *
 * sample  in  logits [B,V] F32, seen [B,S] I32 (optional: no penalty), n_seen [B] I32 (with seen), u [B] F64 in [0,1),
 *             on [B] I32 (0: the row is skipped, its outputs are not written)
 *         out token [B] I32, logprob [B] F64 (optional)
 *
 * In this order, which is that of transformers: repetition penalty over the ids of seen[b][0..n_seen)
 * (arXiv:1909.05858 section 4.1: a logit is divided by it when positive, multiplied when negative; each
 * id once), temperature, top-k, top-p (arXiv:1904.09751: the fewest tokens whose probabilities reach
 * p), min-p (arXiv:2407.01082), then the token at which the running sum of what is left, ranked by
 * logit, equal logits by id, first exceeds u times the whole.  temperature 0: the likeliest.  token
 * is -1 when a logit is NaN or +Inf, or all are -Inf.  logprob: natural log of the token's probability
 * under the plain logits.
 *
 * Sums in F64.  The same token on every backend for the same numbers.
 *
 * sample_accept  in  logits, seen, n_seen, u, on as above, drafted [B] I32, draft [B,V] F32: the logits of which a smaller
 *                    model drew `drafted` by the same attr, accept [B] F64 in [0,1)
 *                out token, logprob as above
 * With p of `logits` and q of `draft`, what is left by attr of each: the token is `drafted` if accept q(drafted) < p(drafted),
 * otherwise that at which the running sum of max(0, p - q) by id first exceeds u times the whole.  So its distribution is p,
 * whatever q is (arXiv:2211.17192, algorithm 1 and appendix A.1).  On the CPU alone. */
#ifndef LM_KERNELS_SAMPLE_H
#define LM_KERNELS_SAMPLE_H

#include "kernels/kernel.h"

typedef struct {
    double temperature;        /* 0: the likeliest token */
    int64_t top_k;             /* 0: all */
    double top_p;              /* 1: all */
    double min_p;              /* 0: all */
    double repetition_penalty; /* 1: none */
} lm_sample_attr;

#endif
