/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_report.c -- metrics of a generation, and the completions of its log. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tune/align/on_policy_impl.h"

void on_policy_note(lm_on_policy *p, const char *name, double x)
{
    lm_align_note(&p->of_generation, name, x, 1, LM_ALIGN_MEAN);
}

static void measure_rewards(lm_on_policy *p, const double *each)
{
    const int kinds = lm_reward_count(p->o.reward);
    const int64_t n = p->o.prompts * p->o.group;
    for (int k = 0; k < kinds; k++) {
        double sum = 0, square = 0, count = 0;
        for (int64_t i = 0; i < n; i++) {
            double r = each[i * kinds + k];
            sum += isnan(r) ? 0 : r;
            count += !isnan(r);
        }
        for (int64_t i = 0; i < n; i++) {
            double d = each[i * kinds + k] - sum / count;
            square += isnan(d) ? 0 : d * d;
        }
        on_policy_note(p, p->name[2 * k], sum / count);
        on_policy_note(p, p->name[2 * k + 1], sqrt(square / (count - 1)));
    }
}

static void measure_lengths(lm_on_policy *p)
{
    const int64_t n = p->o.prompts * p->o.group;
    double sum = 0, ended = 0, n_ended = 0, least = INFINITY, most = 0;
    for (int64_t i = 0; i < n; i++) {
        const sampled *s = &p->made[i];
        sum += (double)s->n;
        ended += s->truncated ? 0 : (double)s->n;
        n_ended += !s->truncated;
        least = fmin(least, (double)s->n);
        most = fmax(most, (double)s->n);
    }
    on_policy_note(p, "completions/mean_length", sum / (double)n);
    on_policy_note(p, "completions/min_length", least);
    on_policy_note(p, "completions/max_length", most);
    on_policy_note(p, "completions/clipped_ratio", 1 - n_ended / (double)n);
    if (n_ended > 0)
        on_policy_note(p, "completions/mean_terminated_length", ended / n_ended);
}

static void measure_kept(lm_on_policy *p)
{
    double n = 0, sum = 0, prompts = 0;
    for (int64_t q = 0; q < p->o.prompts; q++) {
        const int64_t kept = on_policy_kept(p, q, p->member); /* free until a step begins */
        for (int64_t i = 0; i < kept; i++)
            sum += p->made[p->member[i]].reward;
        n += (double)kept;
        prompts += kept > 0;
    }
    on_policy_note(p, "kept/ratio", n / (double)(p->o.prompts * p->o.group));
    on_policy_note(p, "kept/prompts", prompts / (double)p->o.prompts);
    if (n > 0)
        on_policy_note(p, "kept/reward", sum / n);
}

void on_policy_measure(lm_on_policy *p, const lm_advantage_stats *rewards, const double *each,
                       const lm_rollout_stats *rollout)
{
    on_policy_note(p, "reward", rewards->mean);
    on_policy_note(p, "reward_std", rewards->std);
    on_policy_note(p, "frac_reward_zero_std", rewards->zero_std);
    if (rewards->unscored)
        on_policy_note(p, "completions/unscored", (double)rewards->unscored);
    measure_rewards(p, each);
    measure_lengths(p);
    if (p->keeps)
        measure_kept(p);
    on_policy_note(p, "rollout/seconds", rollout->seconds);
    if (rollout->seconds > 0)
        on_policy_note(p, "rollout/tokens_per_second", (double)rollout->tokens / rollout->seconds);
}

/* ---- the log ---- */

static lm_code log_one(lm_on_policy *p, const sampled *s, int64_t k, bool best, lm_buf *text,
                       lm_err *e)
{
    const lm_on_policy_prompt *from = &p->o.prompt[s->prompt];
    lm_metrics *m = p->log;
    lm_metrics_begin(m, "completion");
    lm_metrics_int(m, "step", p->step + 1);
    text->len = 0;
    if (lm_buf_add(text, from->text, from->len, e))
        return e->code;
    lm_metrics_str(m, "prompt", text->data ? text->data : "");
    text->len = 0;
    if (lm_buf_add(text, s->completion, s->len, e))
        return e->code;
    lm_metrics_str(m, "completion", text->data ? text->data : "");
    lm_metrics_int(m, "sample", k);
    lm_metrics_f64(m, "reward", s->reward);
    for (int i = 0; i < lm_reward_count(p->o.reward); i++)
        lm_metrics_f64(m, p->name[2 * i], s->each[i]);
    lm_metrics_f64(m, "advantage", s->advantage);
    lm_metrics_int(m, "tokens", s->n);
    lm_metrics_int(m, "truncated", s->truncated);
    lm_metrics_int(m, "best", best);
    return lm_metrics_end(m, e);
}

/* The first completion of a prompt with the highest reward; -1: no other is better than another. */
static int64_t best_of(const lm_on_policy *p, int64_t prompt)
{
    const sampled *s = &p->made[prompt * p->o.group];
    int64_t best = -1;
    double worst = INFINITY;
    for (int64_t i = 0; i < p->o.group; i++) {
        if (isnan(s[i].reward))
            continue;
        best = best < 0 || s[i].reward > s[best].reward ? i : best;
        worst = fmin(worst, s[i].reward);
    }
    return best >= 0 && s[best].reward > worst ? best : -1;
}

/* The records of --write-samples. */
static lm_code log_kept(lm_on_policy *p, lm_err *e)
{
    for (int64_t q = 0; q < p->o.prompts; q++) {
        const int64_t kept = on_policy_kept(p, q, p->member);
        for (int64_t i = 0; i < kept; i++) {
            const sampled *s = &p->made[p->member[i]];
            const lm_on_policy_prompt *from = &p->o.prompt[s->prompt];
            const lm_sample x = { .step = p->step + 1,
                                  .prompt = from->asked,
                                  .text = from->text,
                                  .text_len = from->len,
                                  .completion = s->completion,
                                  .len = s->len,
                                  .reward = s->reward };
            if (lm_samples_add(p->samples, &x, e))
                return e->code;
        }
    }
    return lm_samples_flush(p->samples, e);
}

lm_code on_policy_log(lm_on_policy *p, lm_err *e)
{
    lm_buf text = { 0 };
    const int64_t prompts = p->o.log_prompts < p->o.prompts ? p->o.log_prompts : p->o.prompts;
    for (int64_t i = 0; p->log && i < prompts && !e->code; i++) {
        const int64_t best = best_of(p, i);
        for (int64_t k = 0; k < p->o.group && !e->code; k++)
            log_one(p, &p->made[i * p->o.group + k], k, k == best, &text, e);
    }
    lm_buf_fini(&text);
    return e->code || !p->samples ? e->code : log_kept(p, e);
}

void on_policy_report(void *ctx, const lm_round *r, lm_metrics *m)
{
    const lm_on_policy *p = ctx;
    if (r->val) {
        lm_metrics_f64(m, "reward", p->val_reward);
        return;
    }
    for (int i = 0; i < p->of_generation.n; i++)
        lm_metrics_f64(m, p->of_generation.item[i].name, lm_align_value(&p->of_generation.item[i]));
    const lm_align_metrics *x = &p->sums.metrics;
    for (int i = 0; i < x->n; i++)
        lm_metrics_f64(m, x->item[i].name, lm_align_value(&x->item[i]));
}

/* The mean of the rewards: the loss of a policy is near 0 whether it learns or not. */
const char *on_policy_followed(void *ctx, double *value)
{
    static const char name[] = "reward";
    const lm_on_policy *p = ctx;
    for (int i = 0; i < p->of_generation.n; i++)
        if (!strcmp(p->of_generation.item[i].name, name)) {
            *value = lm_align_value(&p->of_generation.item[i]);
            return name;
        }
    return NULL;
}
