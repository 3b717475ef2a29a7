/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_sample.c -- a generation: prompts, completions, rewards, log-probabilities,
 * advantages. */
#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "tune/align/on_policy_impl.h"
#include "tune/align/portion.h"

/* ---- prompts ---- */

int64_t on_policy_prompt(const lm_on_policy *p, const char *series, int64_t i)
{
    const uint64_t all = (uint64_t)p->o.n_prompts, pass = (uint64_t)i / all;
    return (int64_t)lm_rng_permute(lm_rng_make(p->o.seed, series, pass), (uint64_t)i % all, all);
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
    s->len = x->len;
    s->truncated = x->truncated;
    char *text; /* the rollout's own is gone when prompts are replaced */
    if (lm_arena_strdup(p->arena, &text, x->text, x->len, e))
        return e->code;
    s->completion = text;
    return LM_OK;
}

/* Without rewards. */
static lm_code complete(lm_on_policy *p, on_policy_batch *b, bool *whole, lm_err *e)
{
    const lm_rollout_text *x = NULL;
    lm_rollout_prompt *ask;
    if (lm_arena_alloc(p->arena, &ask, (size_t)b->n, sizeof *ask, e))
        return e->code;
    for (int64_t i = 0; i < b->n; i++) {
        const lm_on_policy_prompt *from = &p->o.prompt[b->prompt[i]];
        ask[i] = (lm_rollout_prompt){ from->ids, from->n };
    }
    if (lm_rollout_run(p->rollout, b->draw, ask, b->n, p->o.group, &x, whole, &b->rollout, e) ||
        !*whole)
        return e->code;
    for (int64_t i = 0; i < b->n * p->o.group; i++) {
        b->out[i] = (sampled){ .prompt = b->prompt[i / p->o.group] };
        if (join_text(p, &p->o.prompt[b->out[i].prompt], &x[i], &b->out[i], e))
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
                             .whole = s->text.ids,
                             .n_whole = s->text.n,
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

static lm_code reward_all(lm_on_policy *p, on_policy_batch *b, bool *whole, lm_err *e)
{
    const size_t kinds = (size_t)lm_reward_count(p->o.reward), n = (size_t)(b->n * p->o.group);
    lm_reward_item *item;
    if (lm_arena_alloc(p->arena, &item, n, sizeof *item, e) ||
        lm_arena_alloc(p->arena, &b->each, n * kinds, sizeof *b->each, e) ||
        lm_arena_alloc(p->arena, &b->total, n, sizeof *b->total, e))
        return e->code;
    for (size_t i = 0; i < n; i++)
        make_item(&p->o.prompt[b->out[i].prompt], &b->out[i], &item[i]);
    if (lm_reward_score(p->o.reward, item, (int64_t)n, b->each, b->total, whole, e) || !*whole)
        return e->code;
    for (size_t i = 0; i < n; i++) {
        b->out[i].reward = b->total[i] = shape_reward(p, b->total[i], b->out[i].truncated);
        b->out[i].each = b->each + i * kinds;
    }
    return LM_OK;
}

lm_code on_policy_complete(lm_on_policy *p, on_policy_batch *b, bool *whole, lm_err *e)
{
    return complete(p, b, whole, e) || !*whole ? e->code : reward_all(p, b, whole, e);
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
                               double *const *logp, bool *whole, lm_err *e)
{
    lm_scorer *s = &p->reference.scorer;
    *whole = true;
    return p->o.reference ? p->o.reference(p->o.ctx, text, n, logp, e)
                          : lm_texts_score(&s->eval, s->comm, text, n, logp, whole, e);
}

static lm_code score_all(lm_on_policy *p, int64_t n, bool *whole, lm_err *e)
{
    lm_align_text *text;
    double **logp;
    if (p->scores) {
        double **value = NULL;
        if (make_arrays(p, n, &logp, &text, e) ||
            (p->values && make_arrays(p, n, &value, &text, e)) ||
            lm_texts_value(&p->own.eval, p->own.comm, text, n, logp, value, whole, e) || !*whole)
            return e->code;
        for (int64_t i = 0; i < n; i++) {
            p->made[i].old = logp[i];
            p->made[i].value = value ? value[i] : NULL;
        }
    }
    if (p->compares) {
        if (make_arrays(p, n, &logp, &text, e) || score_reference(p, text, n, logp, whole, e) ||
            !*whole)
            return e->code;
        for (int64_t i = 0; i < n; i++)
            p->made[i].ref = logp[i];
    }
    return LM_OK;
}

/* The penalty of a completion that is less likely by the reference. */
static void take_kl(const lm_on_policy *p, int64_t n, double *total)
{
    for (int64_t i = 0; i < n && p->kl > 0; i++) {
        const sampled *s = &p->made[i];
        double kl = 0;
        for (int64_t t = 0; t < s->n; t++)
            kl += (s->old ? s->old[t] : s->sampled[t]) - s->ref[t];
        total[i] -= p->kl * kl;
    }
}

/* ---- advantages ---- */

/* Of completions, from their rewards. */
static lm_code judge_groups(lm_on_policy *p, const on_policy_batch *b, double *zero_std, lm_err *e)
{
    const int64_t n = b->n * p->o.group;
    const int kinds = lm_reward_count(p->o.reward);
    lm_advantage_stats stats;
    double *adv, weight[ON_POLICY_REWARDS];
    if (lm_arena_alloc(p->arena, &adv, (size_t)n, sizeof *adv, e))
        return e->code;
    take_kl(p, n, b->total);
    for (int k = 0; k < kinds; k++)
        weight[k] = lm_reward_weight(p->o.reward, k);
    if (p->o.each)
        lm_advantage_each(b->each, weight, kinds, b->n, p->o.group, p->o.advantage.eps, adv,
                          &stats);
    else
        lm_advantage(&p->o.advantage, b->total, b->n, p->o.group, adv, &stats);
    for (int64_t i = 0; i < n; i++)
        p->made[i].advantage = adv[i];
    *zero_std = stats.zero_std;
    return LM_OK;
}

static lm_code judge_all(lm_on_policy *p, const on_policy_batch *b, lm_err *e)
{
    lm_advantage_stats shown;
    double *unused;
    if (lm_arena_alloc(p->arena, &unused, (size_t)(b->n * p->o.group), sizeof *unused, e))
        return e->code;
    lm_advantage(&p->o.advantage, b->total, b->n, p->o.group, unused, &shown);
    if (p->values ? on_policy_value(p, e) : !p->keeps && judge_groups(p, b, &shown.zero_std, e))
        return e->code;
    on_policy_control(p); /* sets the coefficient of the next generation */
    if (p->o.group == 1)  /* a reward is equal to itself */
        shown.zero_std = NAN;
    on_policy_measure(p, &shown, b->each, &b->rollout);
    return LM_OK;
}

static lm_code begin_arena(lm_on_policy *p, lm_err *e)
{
    lm_arena_free(p->arena);
    p->arena = NULL;
    return lm_arena_new(&p->arena, 1 << 20, e);
}

/* The prompts of generation `g`, completed and rewarded. */
static lm_code make_generation(lm_on_policy *p, int64_t g, on_policy_batch *b, bool *whole,
                               lm_err *e)
{
    int64_t *prompt;
    *b = (on_policy_batch){ .n = p->o.prompts, .draw = g, .out = p->made };
    if (lm_arena_alloc(p->arena, &prompt, (size_t)b->n, sizeof *prompt, e))
        return e->code;
    for (int64_t i = 0; i < b->n; i++)
        prompt[i] = on_policy_prompt(p, "prompts", g * b->n + i);
    b->prompt = prompt;
    if (on_policy_complete(p, b, whole, e) || !*whole)
        return e->code;
    return p->o.tries > 0 ? on_policy_again(p, g, b, whole, e) : LM_OK;
}

/* *whole: no rank is to stop. */
static lm_code go_on(const lm_on_policy *p, bool *whole, lm_err *e)
{
    bool stops;
    lm_code rc = lm_portion_stops(p->site.comm, false, &stops, e);
    *whole = !stops;
    return rc;
}

lm_code on_policy_sample(lm_on_policy *p, int64_t g, bool *whole, lm_err *e)
{
    on_policy_batch b;
    const double kl = p->kl;
    p->generation = -1;
    p->of_generation.n = 0;
    if (begin_arena(p, e) || make_generation(p, g, &b, whole, e) || !*whole)
        return e->code;
    if (go_on(p, whole, e) || !*whole || score_all(p, b.n * p->o.group, whole, e) || !*whole ||
        go_on(p, whole, e) || !*whole)
        return e->code;
    if (judge_all(p, &b, e) || on_policy_log(p, e)) {
        p->kl = kl; /* of this generation, which a resumed run makes again */
        return e->code;
    }
    p->generation = g;
    return LM_OK;
}

/* ---- evaluations ---- */

/* The validation prompts with their completions x, whose ids are joined in *ids for the caller to
 * free. */
static lm_code make_items(const lm_on_policy *p, const lm_rollout_text *x, lm_reward_item *item,
                          uint32_t **ids, lm_err *e)
{
    size_t all = 0;
    for (int64_t i = 0; i < p->o.n_val; i++)
        all += (size_t)(p->o.val[i].n + x[i].n);
    if (lm_alloc_n(ids, all + 1, sizeof **ids, "completions", e))
        return e->code;
    uint32_t *at = *ids;
    for (int64_t i = 0; i < p->o.n_val; i++) {
        const lm_on_policy_prompt *from = &p->o.val[i];
        memcpy(at, from->ids, (size_t)from->n * sizeof *at);
        memcpy(at + from->n, x[i].ids, (size_t)x[i].n * sizeof *at);
        item[i] = (lm_reward_item){ .prompt = from->text,
                                    .prompt_len = from->len,
                                    .text = x[i].text,
                                    .text_len = x[i].len,
                                    .ids = x[i].ids,
                                    .n = x[i].n,
                                    .whole = at,
                                    .n_whole = from->n + x[i].n,
                                    .truncated = x[i].truncated,
                                    .record = from->record };
        at += item[i].n_whole;
    }
    return LM_OK;
}

lm_code on_policy_evaluate(lm_on_policy *p, bool *whole, lm_err *e)
{
    enum { STEP = 1 }; /* above the generations: lm_rng_key takes 40 bits */
    const int64_t n = p->o.n_val;
    const lm_rollout_text *x = NULL;
    lm_rollout_prompt *ask = NULL;
    lm_reward_item *item = NULL;
    uint32_t *ids = NULL;
    double *total = NULL, std;
    *whole = false;
    if (!lm_alloc_n(&ask, (size_t)n, sizeof *ask, "prompts", e) &&
        !lm_alloc_n(&item, (size_t)n, sizeof *item, "completions", e) &&
        !lm_alloc_n(&total, (size_t)n, sizeof *total, "rewards", e)) {
        for (int64_t i = 0; i < n; i++)
            ask[i] = (lm_rollout_prompt){ p->o.val[i].ids, p->o.val[i].n };
        if (!lm_rollout_run(p->rollout, (int64_t)STEP << 39, ask, n, 1, &x, whole, NULL, e) &&
            *whole && !make_items(p, x, item, &ids, e) &&
            !lm_reward_score(p->o.reward, item, n, NULL, total, whole, e)) {
            lm_moments(total, n, &p->val_reward, &std);
        }
    }
    lm_free(ids);
    lm_free(ask);
    lm_free(item);
    lm_free(total);
    return e->code;
}
