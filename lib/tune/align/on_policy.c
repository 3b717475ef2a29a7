/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy.c -- the steps of a generation as an objective of the trainer. */
#include "tune/align/on_policy.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tune/align/on_policy_impl.h"

/* ---- life ---- */

static bool reads_reference(const lm_on_policy_opts *o)
{
    return lm_align_reads_ref(o->loss) || o->kl_reward > 0;
}

static lm_code check_opts(const lm_on_policy_opts *o, lm_err *e)
{
    const bool pairs = lm_align_kind_of(o->loss) == LM_ALIGN_PAIRS,
               values = lm_align_values(o->loss);
    if (!pairs && lm_align_kind_of(o->loss) != LM_ALIGN_POLICY)
        return lm_fail(e, LM_EUSAGE, "loss", "use a loss of policies, or of pairs",
                       "%s is not for sampled completions", o->loss->use[0].loss->name);
    if (o->group < 1 || (o->group < 2 && (pairs || (o->advantage.kind != LM_ADVANTAGE_GLOBAL &&
                                                    !values && !lm_align_keeps(o->loss)))))
        return lm_fail(e, LM_EUSAGE, "group", "sample at least two completions of a prompt",
                       "%" PRId64 " completion%s a prompt has nothing to be compared with",
                       o->group, o->group == 1 ? "" : "s");
    if (o->n_prompts < 1)
        return lm_fail(e, LM_EUSAGE, "data", NULL, "there are no prompts");
    if (o->updates < 1 || o->iterations < 1 || o->prompts < 1 || o->prompts % o->updates)
        return lm_fail(e, LM_EUSAGE, "updates", "choose a divisor",
                       "%" PRId64 " prompts of a rollout cannot be cut into %" PRId64 " steps",
                       o->prompts, o->updates);
    if (reads_reference(o) && !o->reference && !o->reference_model)
        return lm_fail(e, LM_EUSAGE, "loss", NULL,
                       "it compares with a reference, and no reference is given");
    if (o->loss->n > 1 && (values || lm_align_keeps(o->loss)))
        return lm_fail(e, LM_EUSAGE, "loss", "train with one of them",
                       "ppo and reject do not go together with another loss");
    if (lm_align_keeps(o->loss) && (o->best < 1 || o->best > o->group))
        return lm_fail(e, LM_EUSAGE, "best", "keep fewer, or sample more",
                       "%" PRId64 " of %" PRId64 " completions of a prompt cannot be kept", o->best,
                       o->group);
    if (o->correct && !(o->correct_least < o->correct_most))
        return lm_fail(e, LM_EUSAGE, "correct-least", "choose one below the other",
                       "ratios from %g to %g leave none", o->correct_least, o->correct_most);
    if (o->tries > 0 && (o->group < 2 || o->tries > ON_POLICY_TRIES))
        return lm_fail(e, LM_EUSAGE, "resample", "sample several completions of a prompt",
                       "%" PRId64 " tries with groups of %" PRId64
                       " (at most %d, and groups of two)",
                       o->tries, o->group, ON_POLICY_TRIES);
    if (o->kl_target > 0 && (!(o->kl_reward > 0) || !(o->kl_horizon > 0)))
        return lm_fail(e, LM_EUSAGE, "kl-target", "begin with a coefficient of the KL",
                       "a target for the KL needs a penalty in the reward, and a horizon");
    if (lm_reward_count(o->reward) > ON_POLICY_REWARDS)
        return lm_fail(e, LM_EUSAGE, "reward", NULL, "there are more than %d", ON_POLICY_REWARDS);
    return LM_OK;
}

static void name_rewards(lm_on_policy *p)
{
    for (int k = 0; k < lm_reward_count(p->o.reward); k++) {
        const char *name = lm_reward_name(p->o.reward, k);
        snprintf(p->name[2 * k], ON_POLICY_NAME, "rewards/%s/mean", name);
        snprintf(p->name[2 * k + 1], ON_POLICY_NAME, "rewards/%s/std", name);
    }
}

/* ---- a step ---- */

static const uint8_t *mask_of(const lm_on_policy *p, const sampled *s)
{
    return is_silent(p, s) ? p->none : NULL;
}

static void count_members(lm_on_policy *p)
{
    p->counts = (lm_align_counts){ 0 };
    for (int64_t i = 0; i < p->n_members; i += p->pairs ? 2 : 1) {
        lm_align_seq q[2] = { { 0 } };
        const int n = p->pairs ? 2 : 1;
        for (int k = 0; k < n; k++) {
            const sampled *s = &p->made[p->member[i + k]];
            q[k] = (lm_align_seq){ .n = s->n, .mask = mask_of(p, s) };
        }
        lm_align_count(q, n, &p->counts);
    }
}

/* True if the rewards of the step's sequences move weights. */
static bool teaches(const lm_on_policy *p)
{
    const double rounding = 1e-9; /* of advantages of equal rewards, whose mean is rounded */
    for (int64_t i = 0; i < p->n_members; i++) {
        const sampled *s = &p->made[p->member[i]];
        if (p->pairs || p->keeps ||
            (!is_silent(p, s) && (p->values || fabs(s->advantage) > rounding)))
            return true;
    }
    return false;
}

/* An evaluation is a micro-batch without targets: its loss is made of rewards alone. */
static lm_code evaluate(lm_on_policy *p, int64_t *micros, lm_err *e)
{
    bool whole = false;
    if (!p->o.n_val || on_policy_evaluate(p, &whole, e) || !whole)
        return e->code;
    *micros = 1;
    return lm_texts_place(NULL, 0, 1, p->site.seq, &p->places, e);
}

static lm_code begin_round(lm_on_policy *p, const lm_round *r, int64_t *micros, lm_err *e)
{
    const int64_t all = steps_of_generation(p), g = r->step / all;
    bool whole = true;
    *micros = 0;
    p->step = r->step;
    if (r->val)
        return evaluate(p, micros, e);
    if (p->generation != g && on_policy_sample(p, g, &whole, e))
        return e->code;
    if (!whole) {
        *micros = -1;
        return LM_OK;
    }
    lm_align_sums_begin(&p->sums);
    on_policy_choose(p, r->step % all);
    count_members(p);
    p->began = true;
    p->taught |= teaches(p);
    if (lm_texts_place(p->text, p->n_members, p->pairs ? 2 : 1, p->site.seq, &p->places, e))
        return e->code;
    *micros = (p->places.windows + p->site.batch - 1) / p->site.batch;
    return LM_OK;
}

/* The other ranks, which wait for this one, know of rewards that fail only. */
static lm_code begin(void *ctx, const lm_round *r, int64_t *micros, lm_err *e)
{
    lm_on_policy *p = ctx;
    lm_comm *c = p->site.comm;
    if (begin_round(p, r, micros, e) && c && !lm_reward_failed(p->o.reward))
        lm_comm_abort(c, e);
    return e->code;
}

static lm_code fill(void *ctx, const lm_round *r, int64_t micro, lm_batch *b, lm_err *e)
{
    lm_on_policy *p = ctx;
    (void)r;
    return lm_texts_fill(&p->places, p->text, micro * p->site.batch, p->site.config->vocab, b, e);
}

/* ---- derivatives ---- */

/* The ratios of a sequence between the training's numbers and the sampler's. */
static void correct_sequence(lm_on_policy *p, const sampled *s, const double *logp, double *out)
{
    const bool by_token = p->o.correct <= LM_CORRECT_TOKEN_MASK,
               drop = p->o.correct == LM_CORRECT_TOKEN_MASK ||
                      p->o.correct == LM_CORRECT_SEQUENCE_MASK;
    const double *old = s->old ? s->old : logp;
    double all = 0;
    for (int64_t t = 0; t < s->n; t++)
        all += old[t] - s->sampled[t];
    for (int64_t t = 0; t < s->n; t++) {
        double x = old[t] - s->sampled[t], ratio = exp(by_token ? x : all);
        const double bounded = fmin(fmax(ratio, p->o.correct_least), p->o.correct_most);
        out[t] = bounded == ratio ? ratio : drop ? 0 : bounded;
        lm_align_note(&p->metrics, "sampling/sampling_logp_difference/mean", fabs(x), 1,
                      LM_ALIGN_MEAN);
        lm_align_note(&p->metrics, "sampling/sampling_logp_difference/max", fabs(x), 1,
                      LM_ALIGN_MOST);
        lm_align_note(&p->metrics, "sampling/importance_sampling_ratio/mean", out[t], 1,
                      LM_ALIGN_MEAN);
        lm_align_note(&p->metrics, "sampling/importance_sampling_ratio/min", out[t], 1,
                      LM_ALIGN_LEAST);
        lm_align_note(&p->metrics, "sampling/importance_sampling_ratio/max", out[t], 1,
                      LM_ALIGN_MOST);
    }
}

/* Sequence i of the step, whose first row in the micro-batch is `at`. */
static void make_sequence(lm_on_policy *p, int64_t i, int64_t at, const lm_row_results *rows,
                          lm_align_seq *out)
{
    const sampled *s = &p->made[p->member[i]];
    for (int64_t t = 0; rows->entropy && t < s->n; t++)
        p->entropy[at + t] = (double)rows->entropy[at + t];
    for (int64_t t = 0; t < s->n; t++) {
        p->logp[at + t] = -(double)rows->nll[at + t];
        p->dlogp[at + t] = 0;
    }
    if (p->o.correct && !p->keeps)
        correct_sequence(p, s, p->logp + at, p->correct + at);
    *out = (lm_align_seq){ .n = s->n,
                           .logp = p->logp + at,
                           .ref = s->ref,
                           .old = s->old,
                           .sampled = s->sampled,
                           .correct = p->o.correct && !p->keeps ? p->correct + at : NULL,
                           .mask = mask_of(p, s),
                           .entropy = rows->entropy && !p->collides ? p->entropy + at : NULL,
                           .collision = rows->entropy && p->collides ? p->entropy + at : NULL,
                           .advantage = s->advantage,
                           .advantages = s->advantages,
                           .old_value = s->value,
                           .returns = s->returns,
                           .dlogp = p->dlogp + at,
                           .dentropy = p->dentropy + at };
    for (int64_t t = 0; p->values && t < s->n; t++) {
        p->value[at + t] = (double)rows->value[at + t];
        p->dvalue[at + t] = 0;
    }
    if (p->values) {
        out->value = p->value + at;
        out->dvalue = p->dvalue + at;
    }
}

static lm_code grade(void *ctx, const lm_round *r, int64_t micro, const lm_batch *b,
                     const lm_row_results *rows, const lm_row_slopes *to, lm_err *e)
{
    lm_on_policy *p = ctx;
    const int64_t w = micro * p->site.batch,
                  end = w + b->batch < p->places.windows ? w + b->batch : p->places.windows;
    lm_align_batch run = { .counts = &p->counts, .seq = p->seq, .metrics = &p->metrics };
    if (r->val)
        return LM_OK;
    p->metrics.n = 0;
    for (int64_t j = p->places.first[w]; j < p->places.first[end]; j++) {
        const int64_t i = p->places.order[j];
        make_sequence(p, i, lm_texts_row(&p->places, p->text, i, w, b->batch), rows,
                      &p->seq[run.n++]);
    }
    if (lm_align_run(p->o.loss, &run, e) || lm_align_sums_add(&p->sums, run.loss, &p->metrics, e))
        return e->code;
    for (int64_t k = 0; to && k < run.n; k++) {
        const int64_t at = run.seq[k].dlogp - p->dlogp;
        for (int64_t t = 0; t < run.seq[k].n; t++)
            to->nll[at + t] = (float)-run.seq[k].dlogp[t];
        for (int64_t t = 0; p->values && t < run.seq[k].n; t++)
            to->value[at + t] = (float)run.seq[k].dvalue[t];
        for (int64_t t = 0; to->entropy && t < run.seq[k].n; t++)
            to->entropy[at + t] = (float)run.seq[k].dentropy[t];
    }
    return LM_OK;
}

static lm_code finish(void *ctx, const lm_round *r, double *loss, lm_err *e)
{
    lm_on_policy *p = ctx;
    lm_code rc = r->val ? LM_OK : lm_align_sums_join(&p->sums, p->site.comm, e);
    *loss = r->val ? -p->val_reward : p->sums.loss;
    return rc;
}

/* ---- life ---- */

static lm_code make_arrays(lm_on_policy *p, lm_err *e)
{
    const size_t rows = (size_t)(p->site.batch * p->site.seq),
                 all = (size_t)(p->o.prompts * p->o.group);
    if (lm_alloc_n(&p->made, all, sizeof *p->made, "completions", e) ||
        lm_alloc_n(&p->member, all + 2, sizeof *p->member, "completions", e) ||
        lm_alloc_n(&p->text, all + 2, sizeof *p->text, "completions", e) ||
        lm_alloc_n(&p->seq, rows, sizeof *p->seq, "sequences", e) ||
        lm_alloc_n(&p->logp, rows, sizeof *p->logp, "log-probabilities", e) ||
        lm_alloc_n(&p->dlogp, rows, sizeof *p->dlogp, "log-probabilities", e) ||
        lm_alloc_n(&p->entropy, rows, sizeof *p->entropy, "entropies", e) ||
        lm_alloc_n(&p->dentropy, rows, sizeof *p->dentropy, "entropies", e) ||
        lm_alloc_n(&p->value, rows, sizeof *p->value, "values", e) ||
        lm_alloc_n(&p->dvalue, rows, sizeof *p->dvalue, "values", e) ||
        lm_alloc_n(&p->correct, rows, sizeof *p->correct, "log-probabilities", e))
        return e->code;
    return lm_alloc_n(&p->none, (size_t)p->o.rollout.most_new, sizeof *p->none, "a mask", e);
}

static lm_code ready(void *ctx, const lm_objective_site *site, lm_err *e)
{
    lm_on_policy *p = ctx;
    const lm_rollout_site at = { .backend = site->backend,
                                 .comm = site->comm,
                                 .par = site->par,
                                 .config = site->config,
                                 .store = site->store,
                                 .model = site->model,
                                 .tokenizer = p->o.tokenizer };
    p->site = *site;
    if (make_arrays(p, e) || lm_rollout_new(&at, &p->o.rollout, &p->rollout, e))
        return e->code;
    if (p->values && !site->model->build.value)
        return lm_fail(e, LM_EBUG, "model", NULL, "has no value head");
    p->collides = lm_align_entropy(p->o.loss) == LM_ENTROPY_COLLISION;
    p->scores = !p->keeps && (p->values || steps_of_generation(p) > 1);
    p->compares = reads_reference(&p->o);
    p->reference.shares = p->o.reference_shares;
    if ((p->scores && lm_scorer_open(&p->own, site, e)) || lm_reward_ready(p->o.reward, site, e))
        return e->code;
    return p->compares && !p->o.reference
               ? lm_reference_model_open(&p->reference, p->o.reference_model,
                                         p->o.reference_adapter, p->o.tokenizer, site, e)
               : LM_OK;
}

/* With rewards of its own. */
static lm_code twin(void *ctx, const lm_objective **out, lm_err *e)
{
    const lm_on_policy *p = ctx;
    lm_on_policy *other = NULL;
    lm_on_policy_opts o = p->o;
    o.loss = &p->loss_spec;
    *out = NULL;
    if (lm_reward_twin(p->o.reward, &o.reward, e))
        return e->code;
    if (lm_on_policy_new(&o, &other, e)) {
        lm_reward_close(o.reward);
        return e->code;
    }
    other->own_reward = o.reward;
    *out = &other->objective;
    return LM_OK;
}

static void drop(void *ctx)
{
    lm_on_policy_free(ctx);
}

lm_code lm_on_policy_new(const lm_on_policy_opts *o, lm_on_policy **out, lm_err *e)
{
    lm_on_policy *p = NULL;
    *out = NULL;
    if (check_opts(o, e) || lm_alloc_n(&p, 1, sizeof *p, "training on completions", e))
        return e->code;
    p->o = *o;
    p->loss_spec = *o->loss;
    p->o.loss = &p->loss_spec;
    lm_align_bound_length(&p->loss_spec, o->rollout.most_new);
    p->pairs = lm_align_kind_of(o->loss) == LM_ALIGN_PAIRS;
    p->values = lm_align_values(o->loss);
    p->keeps = lm_align_keeps(o->loss);
    p->kl = o->kl_reward;
    p->generation = -1;
    name_rewards(p);
    p->objective = (lm_objective){ .ctx = p,
                                   .ready = ready,
                                   .begin = begin,
                                   .fill = fill,
                                   .grade = grade,
                                   .finish = finish,
                                   .report = on_policy_report,
                                   .followed = on_policy_followed,
                                   .save = on_policy_save,
                                   .load = on_policy_load,
                                   .twin = o->reference ? NULL : twin,
                                   .drop = drop };
    *out = p;
    return LM_OK;
}

void lm_on_policy_free(lm_on_policy *p)
{
    if (!p)
        return;
    lm_rollout_free(p->rollout);
    lm_reward_close(p->own_reward);
    lm_scorer_close(&p->own);
    lm_reference_model_close(&p->reference);
    lm_arena_free(p->arena);
    json_decref(p->kept);
    lm_texts_fini(&p->places);
    lm_align_sums_fini(&p->sums);
    lm_free(p->made);
    lm_free(p->member);
    lm_free(p->text);
    lm_free(p->seq);
    lm_free(p->logp);
    lm_free(p->dlogp);
    lm_free(p->correct);
    lm_free(p->entropy);
    lm_free(p->dentropy);
    lm_free(p->value);
    lm_free(p->dvalue);
    lm_free(p->none);
    lm_free(p);
}

void lm_on_policy_log(lm_on_policy *p, lm_metrics *m)
{
    p->log = m;
}

void lm_on_policy_samples(lm_on_policy *p, lm_samples *m)
{
    p->samples = m;
}

bool lm_on_policy_taught(const lm_on_policy *p)
{
    return p->taught || !p->began;
}

bool lm_on_policy_values(const lm_on_policy *p)
{
    return p->values;
}

const lm_objective *lm_on_policy_objective(lm_on_policy *p)
{
    return &p->objective;
}

size_t lm_on_policy_bytes(const lm_on_policy *p)
{
    return (p->rollout ? lm_rollout_bytes(p->rollout) : 0) +
           lm_reference_model_bytes(&p->reference);
}
