/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_sample.c -- a generation: prompts, completions, rewards, log-probabilities, advantages. */
#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "base/stop.h"
#include "tune/align/on_policy_impl.h"

/* ---- prompts ---- */

/* Prompt number `i` of the endless series: each pass over all prompts in an order of its own. */
static int64_t prompt_at(const lm_on_policy *p, int64_t i)
{
    const uint64_t all = (uint64_t)p->o.n_prompts, pass = (uint64_t)i / all;
    return (int64_t)lm_rng_permute(lm_rng_make(p->o.seed, "prompts", pass), (uint64_t)i % all, all);
}

/* ---- completions ---- */

static lm_code join_text(lm_on_policy *p, const lm_on_policy_prompt *from, const lm_rollout_text *x,
                         sampled *s, lm_err *e)
{
    uint32_t *ids;
    if (lm_arena_alloc(p->arena, &ids, (size_t)(from->n + x->n), sizeof *ids, e) ||
        lm_arena_alloc(p->arena, &s->sampled, (size_t)x->n, sizeof *s->sampled, e))
        return e->code;
    memcpy(ids, from->ids, (size_t)from->n * sizeof *ids);
    memcpy(ids + from->n, x->ids, (size_t)x->n * sizeof *ids);
    for (int64_t t = 0; t < x->n; t++)
        s->sampled[t] = (double)x->logp[t];
    s->text = (lm_align_text){ ids, from->n + x->n, from->n };
    s->n = x->n;
    s->completion = x->text; /* of the rollout, until its next run: for rewards and the log */
    s->len = x->len;
    s->truncated = x->truncated;
    return LM_OK;
}

/* Complete prompts `first` to `first` + n of the series. */
static lm_code complete(lm_on_policy *p, int64_t first, int64_t n, int64_t step, bool *whole,
                        lm_rollout_stats *stats, lm_err *e)
{
    const lm_rollout_text *x = NULL;
    lm_rollout_prompt *ask;
    if (lm_arena_alloc(p->arena, &ask, (size_t)n, sizeof *ask, e))
        return e->code;
    for (int64_t i = 0; i < n; i++) {
        const lm_on_policy_prompt *from = &p->o.prompt[prompt_at(p, first + i)];
        ask[i] = (lm_rollout_prompt){ from->ids, from->n };
    }
    if (lm_rollout_run(p->rollout, step, ask, n, p->o.group, &x, whole, stats, e) || !*whole)
        return e->code;
    for (int64_t i = 0; i < n * p->o.group; i++) {
        p->made[i] = (sampled){ .prompt = prompt_at(p, first + i / p->o.group) };
        if (join_text(p, &p->o.prompt[p->made[i].prompt], &x[i], &p->made[i], e))
            return e->code;
    }
    return LM_OK;
}

/* ---- rewards ---- */

static void make_item(const lm_on_policy_prompt *from, const sampled *s, lm_reward_item *out)
{
    *out = (lm_reward_item){ .prompt = from->text,
                             .prompt_len = from->len,
                             .text = s->completion,
                             .text_len = s->len,
                             .ids = s->text.ids + s->text.from,
                             .n = s->n,
                             .truncated = s->truncated,
                             .record = from->record };
}

static double shape_reward(const lm_on_policy *p, double r, bool truncated)
{
    r -= truncated ? p->o.missing_eos : 0;
    if (p->o.clip_reward > 0 && !isnan(r))
        r = r > p->o.clip_reward ? p->o.clip_reward : r < -p->o.clip_reward ? -p->o.clip_reward : r;
    return r;
}

/* *each [n, rewards] and *total [n]. */
static lm_code reward_all(lm_on_policy *p, int64_t n, double **each, double **total, lm_err *e)
{
    const size_t kinds = (size_t)lm_reward_count(p->o.reward);
    lm_reward_item *item;
    if (lm_arena_alloc(p->arena, &item, (size_t)n, sizeof *item, e) ||
        lm_arena_alloc(p->arena, each, (size_t)n * kinds, sizeof **each, e) ||
        lm_arena_alloc(p->arena, total, (size_t)n, sizeof **total, e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        make_item(&p->o.prompt[p->made[i].prompt], &p->made[i], &item[i]);
    if (lm_reward_score(p->o.reward, item, n, *each, *total, e))
        return e->code;
    for (int64_t i = 0; i < n; i++) {
        p->made[i].reward = (*total)[i] = shape_reward(p, (*total)[i], p->made[i].truncated);
        p->made[i].each = *each + (size_t)i * kinds;
    }
    return LM_OK;
}

/* ---- log-probabilities ---- */

/* One more array for each completion, and the list of all. */
static lm_code make_arrays(lm_on_policy *p, int64_t n, double ***out, lm_align_text **text,
                           lm_err *e)
{
    if (lm_arena_alloc(p->arena, out, (size_t)n, sizeof **out, e) ||
        lm_arena_alloc(p->arena, text, (size_t)n, sizeof **text, e))
        return e->code;
    for (int64_t i = 0; i < n; i++) {
        (*text)[i] = p->made[i].text;
        if (lm_arena_alloc(p->arena, &(*out)[i], (size_t)p->made[i].n, sizeof ***out, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code score_reference(lm_on_policy *p, const lm_align_text *text, int64_t n,
                               double *const *logp, lm_err *e)
{
    return p->o.reference ? p->o.reference(p->o.ctx, text, n, logp, e)
                          : lm_texts_score(&p->reference.scorer.eval, text, n, logp, e);
}

static lm_code score_all(lm_on_policy *p, int64_t n, lm_err *e)
{
    lm_align_text *text;
    double **logp;
    if (p->scores) {
        if (make_arrays(p, n, &logp, &text, e) || lm_texts_score(&p->own.eval, text, n, logp, e))
            return e->code;
        for (int64_t i = 0; i < n; i++)
            p->made[i].old = logp[i];
    }
    if (p->compares) {
        if (make_arrays(p, n, &logp, &text, e) || score_reference(p, text, n, logp, e))
            return e->code;
        for (int64_t i = 0; i < n; i++)
            p->made[i].ref = logp[i];
    }
    return LM_OK;
}

/* The penalty of a completion that is less likely by the reference. */
static void take_kl(const lm_on_policy *p, int64_t n, double *total)
{
    for (int64_t i = 0; i < n && p->o.kl_reward > 0; i++) {
        const sampled *s = &p->made[i];
        double kl = 0;
        for (int64_t t = 0; t < s->n; t++)
            kl += (s->old ? s->old[t] : s->sampled[t]) - s->ref[t];
        total[i] -= p->o.kl_reward * kl;
    }
}

/* ---- advantages ---- */

static lm_code judge_all(lm_on_policy *p, int64_t n, const double *each, double *total,
                         const lm_rollout_stats *rollout, lm_err *e)
{
    const int kinds = lm_reward_count(p->o.reward);
    lm_advantage_stats stats, shown;
    double *adv, weight[ON_POLICY_REWARDS];
    if (lm_arena_alloc(p->arena, &adv, (size_t)n, sizeof *adv, e))
        return e->code;
    lm_advantage(&p->o.advantage, total, n / p->o.group, p->o.group, adv, &shown);
    take_kl(p, n, total);
    for (int k = 0; k < kinds; k++)
        weight[k] = lm_reward_weight(p->o.reward, k);
    if (p->o.each)
        lm_advantage_each(each, weight, kinds, n / p->o.group, p->o.group, p->o.advantage.eps, adv,
                          &stats);
    else
        lm_advantage(&p->o.advantage, total, n / p->o.group, p->o.group, adv, &stats);
    for (int64_t i = 0; i < n; i++)
        p->made[i].advantage = adv[i];
    shown.zero_std = stats.zero_std;
    on_policy_measure(p, &shown, each, rollout);
    return LM_OK;
}

static lm_code begin_arena(lm_on_policy *p, lm_err *e)
{
    lm_arena_free(p->arena);
    p->arena = NULL;
    return lm_arena_new(&p->arena, 1 << 20, e);
}

lm_code on_policy_sample(lm_on_policy *p, int64_t g, bool *whole, lm_err *e)
{
    const int64_t n = p->o.prompts * p->o.group;
    lm_rollout_stats rollout = { 0 };
    double *each, *total;
    p->generation = -1;
    if (begin_arena(p, e) || complete(p, g * p->o.prompts, p->o.prompts, g, whole, &rollout, e) ||
        !*whole || reward_all(p, n, &each, &total, e))
        return e->code;
    if (lm_stopping() || score_all(p, n, e) || lm_stopping()) {
        *whole = false;
        return e->code;
    }
    if (judge_all(p, n, each, total, &rollout, e) || on_policy_log(p, e))
        return e->code;
    p->generation = g;
    return LM_OK;
}

/* ---- evaluations ---- */

lm_code on_policy_evaluate(lm_on_policy *p, bool *whole, lm_err *e)
{
    enum { STEP = 1 }; /* above the generations: lm_rng_key takes 40 bits */
    const int64_t n = p->o.n_val;
    const lm_rollout_text *x = NULL;
    lm_rollout_prompt *ask = NULL;
    lm_reward_item *item = NULL;
    double *total = NULL, std;
    *whole = false;
    if (!lm_alloc_n(&ask, (size_t)n, sizeof *ask, "prompts", e) &&
        !lm_alloc_n(&item, (size_t)n, sizeof *item, "completions", e) &&
        !lm_alloc_n(&total, (size_t)n, sizeof *total, "rewards", e)) {
        for (int64_t i = 0; i < n; i++)
            ask[i] = (lm_rollout_prompt){ p->o.val[i].ids, p->o.val[i].n };
        if (!lm_rollout_run(p->rollout, (int64_t)STEP << 39, ask, n, 1, &x, whole, NULL, e) &&
            *whole) {
            for (int64_t i = 0; i < n; i++)
                item[i] = (lm_reward_item){ .prompt = p->o.val[i].text,
                                            .prompt_len = p->o.val[i].len,
                                            .text = x[i].text,
                                            .text_len = x[i].len,
                                            .ids = x[i].ids,
                                            .n = x[i].n,
                                            .truncated = x[i].truncated,
                                            .record = p->o.val[i].record };
            lm_reward_score(p->o.reward, item, n, NULL, total, e);
            lm_moments(total, n, &p->val_reward, &std);
        }
    }
    lm_free(ask);
    lm_free(item);
    lm_free(total);
    return e->code;
}
