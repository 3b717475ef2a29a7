/* SPDX-License-Identifier: Apache-2.0 */
/* rollout.h -- samples completions of prompts with the weights that train, in the same memory.
 *
 * Continuous batching (model/serve.h) over graphs that are bound to the blocks of the training's
 * store: what the last update wrote is what the next token is drawn from, and no weight is copied.
 * The samples of a prompt share one computation of it. Caches are empty at the beginning of each
 * run, because they are those of the weights.
 *
 * The tokens depend on (seed, step, number of the prompt, number of the sample) and the weights
 * alone, to the bit: not on the memory, the sequences at a time or the other prompts of the run
 * (serve.h).  A resumed run samples the same again.
 *
 * Ranks have the same weights and prompts, and divide the prompts: each samples all completions of its own, and then all have
 * those of all. */
#ifndef LM_TUNE_ALIGN_ROLLOUT_H
#define LM_TUNE_ALIGN_ROLLOUT_H

#include "comm/comm.h"
#include "kernels/sample.h"
#include "model/store.h"
#include "text/tokenizer.h"

/* The model.  All borrowed, for the life of the rollout. */
typedef struct {
    lm_backend *backend;
    lm_comm *comm; /* of the ranks that divide the prompts; NULL: one */
    lm_par *par;   /* of the host; may be NULL */
    const lm_config *config;
    const lm_store *store; /* of the training */
    const lm_model *model; /* the one that trains: its precision and adapters hold */
    const lm_tokenizer *tokenizer;
} lm_rollout_site;

typedef struct {
    int64_t most_prompt, most_new; /* tokens */
    int64_t sequences;             /* that grow at a time; 0: 64 */
    /* that begin at a time, for activations of that size; 0: as many as sequences */
    int64_t prompts;
    size_t memory; /* bytes of their caches; 0: enough for all, or three quarters of what is free */
    lm_sample_attr sample;
    const int64_t *eos; /* n_eos ids, each of which ends a completion, as its last token */
    int n_eos;
    const char *const *stop; /* strings that end one; the tokens that complete one belong to it */
    int n_stop;
    uint64_t seed;
} lm_rollout_opts;

/* A completion.  Borrowed until the next run. */
typedef struct {
    const uint32_t *ids; /* [n] new tokens, the one that ends it included */
    const float *logp;   /* [n] natural log of the probability of each under the plain logits */
    int64_t n;
    const char *text; /* without special tokens and what a stop string begins */
    size_t len;
    bool truncated; /* it has most_new tokens and no end */
} lm_rollout_text;

typedef struct {
    const uint32_t *ids;
    int64_t n;
} lm_rollout_prompt;

typedef struct {
    int64_t tokens, truncated;      /* new tokens, completions */
    double seconds, prompt_seconds; /* of the rank that takes longest */
    int64_t again;                  /* sequences that were computed again, for lack of pages */
} lm_rollout_stats;

typedef struct lm_rollout lm_rollout;

/* Fails: LM_EUSAGE for texts longer than the positions of the model, or memory that does not hold
 * one; LM_ELIMIT. */
lm_code lm_rollout_new(const lm_rollout_site *site, const lm_rollout_opts *o, lm_rollout **out,
                       lm_err *e);
void lm_rollout_free(lm_rollout *r);
/* Bytes of caches and activations. */
size_t lm_rollout_bytes(const lm_rollout *r);
/* The same before anything is allocated; site->store may be NULL. */
lm_code lm_rollout_outlook(const lm_rollout_site *site, const lm_rollout_opts *o, size_t *bytes,
                           lm_err *e);

/* Complete n prompts `group` times each: *out [n * group], those of a prompt together.  `step`
 * numbers the draws. *whole false: lm_stopping() on a rank, and some are missing.  Fails: LM_EUSAGE for
 * a prompt without tokens, or longer than most_prompt; LM_ENUMERIC for logits that are not
 * numbers. */
lm_code lm_rollout_run(lm_rollout *r, int64_t step, const lm_rollout_prompt *prompt, int64_t n,
                       int64_t group, const lm_rollout_text **out, bool *whole,
                       lm_rollout_stats *stats, lm_err *e);

#endif
