/* SPDX-License-Identifier: Apache-2.0 */
/* policies.c -- the policies as methods (policy.h). */
#include "kv/methods/methods.h"
#include "kv/policy.h"

#define PYRAMID                                                                   \
    { "budget", 0, 0, 1, "tokens of layers: equal, or falling", "even pyramid" }, \
    {                                                                             \
        "beta", 20, 2, 1000, "of pyramid: steepness", LM_WHOLE                    \
    }

/* ---- streaming ---- */

static const lm_hyper streaming_hyper[] = {
    { "sinks", 4, 0, 1e6, "first tokens that stay", LM_WHOLE },
    { "window", 512, 1, 1e9, "newest tokens that stay", LM_WHOLE },
    { "positions", 0, 0, 2, "ranks (auto: where possible), or the text's", "auto cache text" },
    { 0 },
};

enum { AUTO, CACHE };

/* NULL if all layers can read tokens at their ranks, otherwise the reason. */
static const char *not_ranked(const lm_kv_site *site)
{
    for (int64_t l = 0; l < site->layers; l++) {
        if (!site[l].kv_heads) /* a state has no tokens */
            continue;
        if (site[l].rotary)
            return "latents are stored with keys that are rotated by the positions of the text";
        if (!site[l].rope)
            return "the model has learned positions, which do not change while a token stays";
        if (site[l].window)
            return "layers with a sliding window keep the positions of the text";
    }
    return NULL;
}

static lm_code make_streaming(const lm_kv_ask *q, lm_kv_policy *out, lm_err *e)
{
    const char *why = not_ranked(q->site);
    *out = (lm_kv_policy){ .kind = LM_KV_STREAMING,
                           .sinks = (int64_t)q->h[0],
                           .window = (int64_t)q->h[1],
                           .ranked = (int)q->h[2] == CACHE || ((int)q->h[2] == AUTO && !why) };
    return out->ranked && why ? lm_fail(e, LM_EUSAGE, q->name, "choose positions=text", "%s", why)
                              : LM_OK;
}

const lm_kv_method lm_kv_streaming = {
    .name = "streaming",
    .about = "the first and the newest tokens stay",
    .hyper = streaming_hyper,
    .policy = make_streaming,
};

/* ---- h2o and its control ---- */

#define HEAVY                                                                     \
    { "keep", 0.2, 1e-6, 1, "tokens that stay, as a share of the prompt", NULL }, \
        { "protect", 0, 0, 1, "tokens that always stay", "none prompt" }, PYRAMID

static const lm_hyper h2o_hyper[] = { HEAVY, { 0 } };
static const lm_hyper random_hyper[] = {
    HEAVY,
    { "seed", 0, 0, 1e15, "of the random numbers", LM_WHOLE },
    { 0 },
};

static lm_code make_heavy(const lm_kv_ask *q, lm_kv_policy *out, lm_err *e)
{
    (void)e;
    bool random = q->method->hyper == random_hyper;
    *out = (lm_kv_policy){ .kind = random ? LM_KV_RANDOM : LM_KV_H2O,
                           .keep = q->h[0],
                           .protect = q->h[1] != 0,
                           .beta = q->h[2] != 0 ? (int64_t)q->h[3] : 0,
                           .seed = random ? (uint64_t)q->h[4] : 0 };
    return LM_OK;
}

const lm_kv_method lm_kv_h2o = {
    .name = "h2o",
    .about = "the newest tokens stay, and those that all queries read most",
    .hyper = h2o_hyper,
    .policy = make_heavy,
};

const lm_kv_method lm_kv_random = {
    .name = "random",
    .about = "the newest tokens stay, and random others: a control",
    .hyper = random_hyper,
    .policy = make_heavy,
};

/* ---- snapkv ---- */

static const lm_hyper snapkv_hyper[] = {
    { "capacity", 2048, 2, 1e9, "tokens of the prompt that stay", LM_WHOLE },
    { "window", 32, 1, 1e6, "newest tokens, whose queries count", LM_WHOLE },
    { "kernel", 5, 1, 1001, "neighbours whose masses are averaged, odd", LM_WHOLE },
    PYRAMID,
    { 0 },
};

static lm_code make_snapkv(const lm_kv_ask *q, lm_kv_policy *out, lm_err *e)
{
    *out = (lm_kv_policy){ .kind = LM_KV_SNAPKV,
                           .capacity = (int64_t)q->h[0],
                           .window = (int64_t)q->h[1],
                           .kernel = (int64_t)q->h[2],
                           .beta = q->h[3] != 0 ? (int64_t)q->h[4] : 0 };
    if (out->capacity <= out->window)
        return lm_fail(e, LM_EUSAGE, q->name, "set a larger capacity",
                       "a capacity of %lld has no room beside a window of %lld",
                       (long long)out->capacity, (long long)out->window);
    if (out->kernel % 2 == 0)
        return lm_fail(e, LM_EUSAGE, q->name, "choose an odd number", "the kernel %lld is even",
                       (long long)out->kernel);
    return LM_OK;
}

const lm_kv_method lm_kv_snapkv = {
    .name = "snapkv",
    .about = "the end of the prompt stays, and what its queries read most",
    .hyper = snapkv_hyper,
    .policy = make_snapkv,
};

/* ---- merging ---- */

static const lm_hyper merge_hyper[] = {
    { "keep", 0.5, 1e-6, 1, "least tokens left, as a share of the prompt", NULL },
    { "threshold", 0.75, -1, 1, "least cosine of keys that are merged", NULL },
    { "window", 32, 0, 1e6, "newest tokens that are not merged", LM_WHOLE },
    { "heavy", 0.1, 0, 1, "share of the most read, which stay alone", NULL },
    { "rule", 0, 0, 1, "weights of a sum: by distance, or halves", "kernel pivot" },
    { 0 },
};

static lm_code make_merge(const lm_kv_ask *q, lm_kv_policy *out, lm_err *e)
{
    (void)e;
    *out = (lm_kv_policy){ .kind = LM_KV_MERGE,
                           .keep = q->h[0],
                           .threshold = q->h[1],
                           .window = (int64_t)q->h[2],
                           .heavy = q->h[3],
                           .halves = q->h[4] != 0 };
    return LM_OK;
}

const lm_kv_method lm_kv_kvmerge = {
    .name = "kvmerge",
    .about = "neighbours with similar keys become one token",
    .hyper = merge_hyper,
    .policy = make_merge,
};
