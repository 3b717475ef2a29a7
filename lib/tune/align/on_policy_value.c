/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_value.c -- rewards of tokens, what the value head makes of them, and the coefficient of
 * the KL. */
#include <string.h>

#include "tune/align/on_policy_impl.h"

static int64_t count(const lm_on_policy *p)
{
    return p->o.prompts * p->o.group;
}

/* ---- the KL ---- */

static double kl_of(const sampled *s)
{
    const double *old = s->old ? s->old : s->sampled;
    double kl = 0;
    for (int64_t t = 0; s->ref && t < s->n; t++)
        kl += old[t] - s->ref[t];
    return kl;
}

void on_policy_control(lm_on_policy *p)
{
    double kl = 0;
    if (!p->compares || !(p->o.kl_reward > 0))
        return;
    for (int64_t i = 0; i < count(p); i++)
        kl += kl_of(&p->made[i]) / (double)count(p);
    on_policy_note(p, "objective/kl", kl);
    on_policy_note(p, "objective/kl_coef", p->kl);
    on_policy_note(p, "objective/non_score_reward", -p->kl * kl);
    if (p->o.kl_target > 0) {
        double off = fmin(fmax(kl / p->o.kl_target - 1, -0.2), 0.2);
        p->kl *= 1 + off * (double)count(p) / p->o.kl_horizon;
    }
}

/* ---- tokens ---- */

/* Numbers of all tokens of the generation, one completion behind the other. */
typedef struct {
    int64_t n;
    double *reward, *value, *advantage, *returns;
    bool *mask; /* tokens that train */
} token_list;

static lm_code list_tokens(lm_on_policy *p, token_list *x, lm_err *e)
{
    x->n = 0;
    for (int64_t i = 0; i < count(p); i++)
        x->n += p->made[i].n;
    const size_t n = (size_t)x->n;
    if (lm_arena_alloc(p->arena, &x->reward, n, sizeof *x->reward, e) ||
        lm_arena_alloc(p->arena, &x->value, n, sizeof *x->value, e) ||
        lm_arena_alloc(p->arena, &x->advantage, n, sizeof *x->advantage, e) ||
        lm_arena_alloc(p->arena, &x->returns, n, sizeof *x->returns, e) ||
        lm_arena_alloc(p->arena, &x->mask, n, sizeof *x->mask, e))
        return e->code;
    for (int64_t i = 0, at = 0; i < count(p); at += p->made[i++].n) {
        const sampled *s = &p->made[i];
        const bool silent = is_silent(p, s);
        memcpy(x->value + at, s->value, (size_t)s->n * sizeof *x->value);
        for (int64_t t = 0; t < s->n; t++)
            x->mask[at + t] = !silent;
        lm_token_rewards(s->old, s->ref ? s->ref : s->old, s->n, p->kl, silent ? 0 : s->reward,
                         x->reward + at);
    }
    return LM_OK;
}

/* Mean and variance where the mask is set. */
static void spread_of(const token_list *x, double (*at)(const token_list *x, int64_t i),
                      double *mean, double *var)
{
    double n = 0;
    *mean = *var = 0;
    for (int64_t i = 0; i < x->n; i++) {
        *mean += x->mask[i] ? at(x, i) : 0;
        n += x->mask[i];
    }
    *mean /= n;
    for (int64_t i = 0; i < x->n; i++)
        *var += x->mask[i] ? (at(x, i) - *mean) * (at(x, i) - *mean) / n : 0;
}

static double value_at(const token_list *x, int64_t i)
{
    return x->value[i];
}

static double return_at(const token_list *x, int64_t i)
{
    return x->returns[i];
}

static double miss_at(const token_list *x, int64_t i)
{
    return x->returns[i] - x->value[i];
}

static void note_values(lm_on_policy *p, const token_list *x)
{
    double value, returns, missed, var, miss;
    spread_of(x, value_at, &value, &var);
    spread_of(x, return_at, &returns, &var);
    spread_of(x, miss_at, &missed, &miss);
    on_policy_note(p, "val/mean", value);
    on_policy_note(p, "val/returns", returns);
    if (var > 0)
        on_policy_note(p, "val/explained_variance", 1 - miss / var);
}

lm_code on_policy_value(lm_on_policy *p, lm_err *e)
{
    token_list x;
    if (list_tokens(p, &x, e))
        return e->code;
    if (p->o.whiten_rewards)
        lm_whiten(x.reward, x.mask, x.n, true);
    for (int64_t i = 0, at = 0; i < count(p); at += p->made[i++].n)
        lm_gae(x.reward + at, x.value + at, p->made[i].n, p->o.gamma, p->o.lambda, x.advantage + at,
               x.returns + at);
    note_values(p, &x);
    lm_whiten(x.advantage, x.mask, x.n, false);
    for (int64_t i = 0, at = 0; i < count(p); at += p->made[i++].n) {
        sampled *s = &p->made[i];
        s->advantages = x.advantage + at;
        s->returns = x.returns + at;
        s->advantage = 0;
        for (int64_t t = 0; t < s->n; t++) /* for the log */
            s->advantage += is_silent(p, s) ? 0 : s->advantages[t] / (double)s->n;
    }
    return LM_OK;
}
