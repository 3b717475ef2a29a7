/* SPDX-License-Identifier: Apache-2.0 */
/* policy.h -- which tokens of a cache stay, as pure functions of scores.
 *
 * A head keeps all tokens of a prompt while it is processed, then lm_kv_policy_budget of them:
 * those that lm_kv_policy_select marks.  Of generated tokens each takes the place of the one that
 * lm_kv_policy_evict names, so that the budget stays; SnapKV adds them instead.  Each key/value
 * head selects for itself; its scores are those of its query heads, added.
 *
 *   streaming  the first `sinks` tokens and the last `window` ones, at positions inside the cache (arXiv:2309.17453,
 *              section 3.2), which a new token reads beside itself; or at those of the text
 *   h2o        half of the budget are the newest tokens, the other half those of the largest mass: the sum of
 *              the probabilities that all queries gave the token (arXiv:2306.14048)
 *   snapkv     the last `window` tokens of the prompt, and those of the largest mass from the queries of these,
 *              averaged over `kernel` neighbours (arXiv:2404.14469)
 *   random     as h2o with random numbers for masses: the control for both
 *   merge      no token is dropped, neighbours with similar keys are merged after the prompt (merge.h); of the
 *              functions here those that do not select hold for it
 * Among equal scores the lower position stays; NaN is the lowest. */
#ifndef LM_KV_POLICY_H
#define LM_KV_POLICY_H

#include <stdbool.h>
#include <stdint.h>

typedef enum {
    LM_KV_STREAMING,
    LM_KV_H2O,
    LM_KV_SNAPKV,
    LM_KV_RANDOM,
    LM_KV_MERGE,
    LM_KV_STAY /* no method: continues a cache from which tokens were dropped, and keeps what is there */
} lm_kv_policy_kind;

typedef struct lm_kv_policy {
    lm_kv_policy_kind kind;
    int64_t sinks;  /* streaming: first tokens that stay */
    int64_t window; /* streaming, snapkv: newest tokens that stay */
    /* streaming: the position of a token is its rank among those that stay when it is read; keys are stored before their
     * rotation.  Otherwise tokens keep their positions in the text. */
    bool ranked;
    double keep;      /* h2o, random: the budget as a share of the prompt */
    bool protect;     /* h2o, random: the prompt stays, and the budget is of generated tokens */
    int64_t capacity; /* snapkv: the budget; stay: tokens that are there */
    int64_t kernel;   /* snapkv: odd */
    /* Budgets that fall from layer to layer (PyramidKV, arXiv:2406.02069): the last layer has 1 / beta of the mean
     * without the newest tokens; 0: the same for all. */
    int64_t beta;
    uint64_t seed;    /* random */
    double threshold; /* merge: the least cosine of keys */
    double heavy;     /* merge: share of tokens that stay alone for their masses */
    bool halves;      /* merge: rule=pivot */
} lm_kv_policy;

/* True if the policy reads the masses of tokens. */
bool lm_kv_policy_weighs(const lm_kv_policy *p);
/* True if a generated token takes the place of another one, so that single tokens are coded
 * anew. */
bool lm_kv_policy_replaces(const lm_kv_policy *p);

/* Tokens that a head of a layer keeps of a prompt of n; at most n.  `layer` counts those that drop
 * tokens, `layers` in all. */
int64_t lm_kv_policy_budget(const lm_kv_policy *p, int64_t n, int64_t layer, int64_t layers);
/* The newest tokens that stay whatever their scores, after a prompt of n. */
int64_t lm_kv_policy_recent(const lm_kv_policy *p, int64_t n);
/* Tokens that a head holds at most later, when a prompt of n had this budget; INT64_MAX: no
 * limit. */
int64_t lm_kv_policy_most(const lm_kv_policy *p, int64_t n, int64_t budget);

/* Marks the `budget` tokens of a prompt of n that stay.  mass [n], read if lm_kv_policy_weighs and
 * for random, where they are lm_kv_random_masses; work [n + budget]. */
void lm_kv_policy_select(const lm_kv_policy *p, int64_t budget, int64_t n, const float *mass,
                         bool *keep, double *work);
/* The row that a new token at position `next` replaces, of the `rows` that a head holds, as many as
 * lm_kv_policy_most.  Row i has position at[i] (any order) and mass[i], as above; the prompt had n
 * tokens.  -1: no row may be replaced. */
int64_t lm_kv_policy_evict(const lm_kv_policy *p, int64_t n, int64_t next, int64_t rows,
                           const int32_t *at, const float *mass);

/* Random masses of positions first .. first + n, the same for each call. */
void lm_kv_random_masses(uint64_t seed, int64_t layer, int64_t head, int64_t first, int64_t n,
                         float *mass);

/* Marks the k largest of n scores in addition to those that are marked; work [k]. */
void lm_kv_mark_largest(const double *score, int64_t n, int64_t k, bool *keep, double *work);
/* y[i] = the sum of x[i - kernel / 2 .. i + kernel / 2] / kernel; numbers outside are 0. */
void lm_kv_average(const float *x, int64_t n, int64_t kernel, double *y);

#endif
