/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_on_policy.c -- training on sampled completions: rewards rise with losses of policies and of pairs; a resumed
 * run has the same bits, also within a generation; rewards, advantages, corrections and derivatives are those of the
 * definition; a stop or a failing reward leaves a run that can be resumed. */
#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "base/stop.h"
#include "train/trainer_impl.h"
#include "tune/align/on_policy_impl.h"

enum { PROMPTS = 12, GROUP = 6, NEW = 6 };

static lm_backend *backend;
static tiny_model tiny;
static lm_tokenizer *tok;

/* A word for each id: "w5 " and so on. */
static lm_tokenizer *letters(void)
{
    lm_err e = { 0 };
    lm_tokenizer *out = NULL;
    lm_buf json = { 0 };
    const char *head = "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{",
               *tail = "}},\"decoder\":{\"type\":\"ByteLevel\"}}";
    ok(lm_buf_add(&json, head, strlen(head), &e), &e);
    for (int i = 0; i < VOCAB; i++)
        ok(lm_buf_addf(&json, &e, "%s\"w%d.\":%d", i ? "," : "", i, i), &e);
    ok(lm_buf_add(&json, tail, strlen(tail), &e), &e);
    ok(lm_tokenizer_from_json(json.data, json.len, NULL, 0, "test", &out, &e), &e);
    lm_buf_fini(&json);
    return out;
}

static uint32_t ids[PROMPTS][3];
static lm_on_policy_prompt prompts[PROMPTS];

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &e), &e);
    tiny_model_make(&tiny, llama_text, "m0");
    tok = letters();
    for (uint32_t i = 0; i < PROMPTS; i++) {
        ids[i][0] = 1 + i % 3;
        ids[i][1] = i;
        ids[i][2] = 40 + i;
        prompts[i] = (lm_on_policy_prompt){ ids[i], 2 + i % 2, "prompt", 6, NULL, NULL };
    }
    return 0;
}

static int end(void **state)
{
    (void)state;
    tiny_model_fini(&tiny);
    lm_tokenizer_free(tok);
    lm_backend_close(backend);
    return train_end();
}

/* ---- runs ---- */

typedef struct {
    const char *loss, *reward;
    int64_t steps, updates, iterations;
    double rate;
    lm_correct correct;
    lm_advantage_opts advantage;
    bool val, reference, mask;
    const char *run, *resume; /* folders */
    double kl_reward, kl_target;
    int64_t tries;
    int64_t stop_at; /* a stop is requested in the beginning of this step, from 1 */
    bool check;      /* every step is compared with its definition, and these are read: */
    double correct_least, correct_most, missing_eos, clip_reward;
} ask;

typedef struct {
    float *weights;
    int64_t n;
    lm_train_result r;
    lm_code rc;
    lm_err e;
    double first, last; /* rewards of the first and the last evaluation */
    int64_t batches;    /* graded */
    double replaced;
    int64_t ended, cut, bounded, free; /* completions by their end, ratios by their bound */
    int64_t moved; /* completions that are in another place than in the iteration before */
} outcome;

/* The objective between the trainer and this test. */
typedef struct {
    const lm_objective *inner;
    outcome *out;
    int evals;
    int64_t stop_at, generation;
    bool check;
    int64_t drawn[PROMPTS];    /* how often each prompt was */
    uint8_t seen[8 * GROUP];   /* completions of this iteration over the generation */
    int64_t before[8 * GROUP]; /* those of its first step in the last iteration */
    lm_on_policy *p;
} between;

static lm_code pass_ready(void *ctx, const lm_objective_site *s, lm_err *e)
{
    const lm_objective *x = ((between *)ctx)->inner;
    return x->ready(x->ctx, s, e);
}

/* ---- the definition ---- */

static void close_to(double got, double want, const char *what)
{
    if (!(fabs(got - want) <= 1e-9 * (1 + fabs(want))))
        fail_msg("%s is %.12g, by its definition %.12g", what, got, want);
}

/* Rewards: those of the command or pattern, less of completions without end, cut.  Advantages: of these, less the KL. */
static void check_rewards(between *t)
{
    const lm_on_policy *p = t->p;
    const int64_t n = p->o.prompts * p->o.group;
    double *total = calloc((size_t)n, sizeof *total), *adv = calloc((size_t)n, sizeof *adv);
    for (int64_t i = 0; i < n; i++) {
        const sampled *s = &p->made[i];
        const bool cut = s->text.ids[s->text.n - 1] != 63; /* the end of text */
        double want = *s->each - (cut ? p->o.missing_eos : 0), most = p->o.clip_reward;
        assert_int_equal(s->truncated, cut);
        *(cut ? &t->out->cut : &t->out->ended) += 1;
        want = most > 0 ? fmax(-most, fmin(most, want)) : want;
        close_to(s->reward, want, "a reward");
        total[i] = want;
        for (int64_t k = 0; p->o.kl_reward > 0 && k < s->n; k++)
            total[i] -= p->o.kl_reward * ((s->old ? s->old[k] : s->sampled[k]) - s->ref[k]);
    }
    lm_advantage(&p->o.advantage, total, p->o.prompts, p->o.group, adv, NULL);
    for (int64_t i = 0; i < n && !p->pairs && !p->values; i++)
        close_to(p->made[i].advantage, adv[i], "an advantage");
    free(total);
    free(adv);
}

/* Of each prompt the completions with the best and the worst reward, in this order, none that is masked. */
static void check_pairs(const lm_on_policy *p)
{
    for (int64_t k = 0; k < p->n_members; k += 2) {
        const sampled *best = &p->made[p->member[k]], *worst = &p->made[p->member[k + 1]];
        const int64_t first = p->member[k] / p->o.group * p->o.group;
        assert_true(best->reward > worst->reward &&
                    p->member[k + 1] / p->o.group * p->o.group == first);
        for (int64_t i = first; i < first + p->o.group; i++)
            if (!p->o.mask_truncated || !p->made[i].truncated)
                assert_true(p->made[i].reward <= best->reward &&
                            p->made[i].reward >= worst->reward);
        assert_false(p->o.mask_truncated && (best->truncated || worst->truncated));
    }
}

/* Each pass over the prompts has all of them. */
static void check_prompts(between *t)
{
    const lm_on_policy *p = t->p;
    for (int64_t q = 0; q < p->o.prompts; q++)
        t->drawn[p->made[q * p->o.group].prompt]++;
    if ((p->generation + 1) * p->o.prompts % PROMPTS == 0)
        for (int i = 1; i < PROMPTS; i++)
            assert_int_equal(t->drawn[i], t->drawn[0]);
}

/* Each step of an iteration has other completions: those of its prompts, or with values any, in another order than in
 * the iteration before. */
static void check_members(between *t)
{
    const lm_on_policy *p = t->p;
    const int64_t part = p->step % (p->o.updates * p->o.iterations) % p->o.updates,
                  each = p->o.prompts * p->o.group / p->o.updates;
    if (part == 0)
        memset(t->seen, 0, sizeof t->seen);
    assert_int_equal(p->n_members, each);
    for (int64_t i = 0; i < each; i++) {
        assert_false(t->seen[p->member[i]]);
        t->seen[p->member[i]] = 1;
        if (!p->values)
            assert_int_equal(p->member[i], part * each + i);
        if (part == 0) {
            t->out->moved += p->member[i] != t->before[i];
            t->before[i] = p->member[i];
        }
    }
}

/* Of a new generation, whose sampler is then moved away from the training's numbers. */
static void check_begin(between *t)
{
    const lm_on_policy *p = t->p;
    if (t->generation != p->generation) {
        check_rewards(t);
        check_prompts(t);
        for (int64_t i = 0; i < p->o.prompts * p->o.group; i++)
            for (int64_t k = 0; k < p->made[i].n; k++)
                p->made[i].sampled[k] += 0.4 * (double)((i + k) % 5 - 2);
    }
    t->generation = p->generation;
    if (p->pairs)
        check_pairs(p);
    else
        check_members(t);
}

/* pi_old / pi_sampler of a token or of the whole completion, bounded or left out. */
static double correction_of(between *t, const sampled *s, const double *old, int64_t at)
{
    const lm_on_policy_opts *o = &t->p->o;
    double ratio = 1;
    for (int64_t k = 0; k < s->n; k++)
        if (k == at || o->correct >= LM_CORRECT_SEQUENCE_TRUNCATE)
            ratio *= exp(old[k]) / exp(s->sampled[k]);
    const bool above = ratio > o->correct_most, below = ratio < o->correct_least;
    *(above || below ? &t->out->bounded : &t->out->free) += 1;
    if (!above && !below)
        return ratio;
    return o->correct == LM_CORRECT_TOKEN_MASK || o->correct == LM_CORRECT_SEQUENCE_MASK ? 0
           : above ? o->correct_most
                   : o->correct_least;
}

/* The derivatives of a micro-batch are those of its completions' numbers. */
static void check_grade(between *t, int64_t micro, const lm_batch *b, const lm_row_results *rows,
                        const float *scale)
{
    enum { MOST = 64 };
    static double logp[MOST][NEW], correct[MOST][NEW], d[MOST][NEW];
    static const uint8_t none[NEW];
    lm_on_policy *p = t->p;
    lm_err e = { 0 };
    lm_align_seq seq[MOST];
    int64_t row[MOST];
    lm_align_batch run = { .counts = &p->counts, .seq = seq };
    for (int64_t i = 0; i < p->n_members; i++) {
        const sampled *s = &p->made[p->member[i]];
        const int64_t at = lm_texts_row(&p->places, p->text, i, micro * b->batch, b->batch),
                      k = run.n;
        if (at < 0)
            continue;
        row[k] = at;
        seq[k] = (lm_align_seq){ .n = s->n,
                                 .logp = logp[k],
                                 .ref = s->ref,
                                 .old = s->old,
                                 .sampled = s->sampled,
                                 .correct = p->o.correct ? correct[k] : NULL,
                                 .mask = p->o.mask_truncated && s->truncated ? none : NULL,
                                 .advantage = s->advantage,
                                 .dlogp = memset(d[k], 0, sizeof d[k]) };
        for (int64_t c = 0; c < s->n; c++) {
            assert_int_equal(b->targets[at + c], s->text.ids[s->text.from + c]);
            logp[k][c] = -(double)rows->nll[at + c];
        }
        for (int64_t c = 0; p->o.correct && c < s->n; c++)
            correct[k][c] = correction_of(t, s, s->old ? s->old : logp[k], c);
        run.n++;
    }
    ok(lm_align_run(p->o.loss, &run, &e), &e);
    for (int64_t k = 0; k < run.n; k++)
        for (int64_t c = 0; c < seq[k].n; c++) {
            assert_true(!seq[k].mask || scale[row[k] + c] == 0);
            if (!(fabs((double)scale[row[k] + c] + d[k][c]) <= 1e-6 * fabs(d[k][c])))
                fail_msg("derivative %.9g, by its definition %.9g", (double)scale[row[k] + c],
                         -d[k][c]);
        }
}

static lm_code pass_begin(void *ctx, const lm_round *r, int64_t *micros, lm_err *e)
{
    between *t = ctx;
    const lm_objective *x = t->inner;
    if (r->step + 1 == t->stop_at)
        lm_stop_request(2);
    if (x->begin(x->ctx, r, micros, e))
        return e->code;
    if (t->check && !r->val)
        check_begin(t);
    return LM_OK;
}

static lm_code pass_fill(void *ctx, const lm_round *r, int64_t micro, lm_batch *b, lm_err *e)
{
    const lm_objective *x = ((between *)ctx)->inner;
    return x->fill(x->ctx, r, micro, b, e);
}

/* The coefficient of the KL of the generation. */
static double kl_of(const lm_on_policy *p)
{
    for (int i = 0; i < p->of_generation.n; i++)
        if (!strcmp(p->of_generation.item[i].name, "objective/kl_coef"))
            return lm_align_value(&p->of_generation.item[i]);
    return 0;
}

/* A generation of PPO: advantages as sums over the tokens behind each one, whitened; those of the micro-batch train. */
static void check_tokens(const lm_on_policy *p, const lm_batch *b, const lm_row_results *rows,
                         const float *dvalue)
{
    const int64_t n = p->o.prompts * p->o.group;
    double sum = 0, square = 0, count = 0, any = 0;
    for (int pass = 0; pass < 3; pass++)
        for (int64_t i = 0; i < n; i++) {
            const sampled *s = &p->made[i];
            for (int64_t t = 0; t < s->n; t++) {
                double a = 0, w = 1;
                for (int64_t k = t; k < s->n; k++, w *= p->o.gamma * p->o.lambda) {
                    double next = k + 1 < s->n ? s->value[k + 1] : s->reward / p->o.gamma;
                    double kl = s->ref ? kl_of(p) * (s->old[k] - s->ref[k]) : 0;
                    a += w * (p->o.gamma * next - s->value[k] - kl);
                }
                if (pass == 0) {
                    sum += a;
                    count++;
                    assert_true(fabs(s->returns[t] - a - s->value[t]) < 1e-9);
                } else if (pass == 1)
                    square += pow(a - sum / count, 2);
                else {
                    a = (a - sum / count) / sqrt(square / (count - 1) + 1e-8);
                    assert_true(fabs(s->advantages[t] - a) < 1e-9);
                }
            }
        }
    assert_non_null(rows->value);
    for (int64_t i = 0; i < b->batch * b->seq; i++) {
        assert_true(b->targets[i] >= 0 || dvalue[i] == 0);
        any += dvalue[i] != 0;
    }
    assert_true(any > 0);
}

/* Groups that teach nothing are fewer than before, if any was replaced. */
static void check_replaced(const lm_on_policy *p, outcome *out)
{
    double tries = 0, replaced = 0, groups = 0, flat = 0;
    for (int i = 0; i < p->of_generation.n; i++) {
        const lm_align_metric *m = &p->of_generation.item[i];
        tries = strcmp(m->name, "resampled/tries") ? tries : lm_align_value(m);
        replaced = strcmp(m->name, "resampled/replaced") ? replaced : lm_align_value(m);
        groups = strcmp(m->name, "resampled/groups") ? groups : lm_align_value(m);
    }
    for (int64_t q = 0; q < p->o.prompts; q++) {
        double r[GROUP];
        for (int i = 0; i < GROUP; i++) {
            r[i] = p->made[q * GROUP + i].reward;
            if (p->made[q * GROUP + i].each) /* not of a checkpoint */
                assert_true(r[i] == *p->made[q * GROUP + i].each);
            assert_int_equal(p->made[q * GROUP + i].prompt, p->made[q * GROUP].prompt);
        }
        flat += lm_advantage_flat(r, GROUP);
    }
    assert_true(tries <= (double)p->o.tries && replaced <= groups);
    assert_true(flat == 0 || tries == (double)p->o.tries);
    out->replaced += replaced;
}

static lm_code pass_grade(void *ctx, const lm_round *r, int64_t micro, const lm_batch *b,
                          const lm_row_results *rows, const lm_row_slopes *to, lm_err *e)
{
    between *t = ctx;
    const lm_objective *x = t->inner;
    const float *scale = to ? to->nll : NULL;
    lm_code rc = x->grade(x->ctx, r, micro, b, rows, to, e);
    assert_int_equal(rows->entropy == NULL, r->val);
    for (int64_t i = 0; rows->entropy && i < b->batch * b->seq; i++)
        assert_true(b->targets[i] < 0 || /* at most that of the uniform distribution */
                    (rows->entropy[i] >= 0 && rows->entropy[i] < 1e-4 + log(VOCAB)));
    for (int64_t i = 0; scale && !rc && i < b->batch * b->seq; i++)
        assert_true(scale[i] == 0 || b->targets[i] >= 0);
    t->out->batches += scale != NULL;
    if (t->check && !rc && !r->val && !t->p->values)
        check_grade(t, micro, b, rows, scale);
    if (t->p->values && !rc && !r->val)
        check_tokens(t->p, b, rows, to->value);
    if (t->p->o.tries && !r->val)
        check_replaced(t->p, t->out);
    return rc;
}

static lm_code pass_finish(void *ctx, const lm_round *r, double *loss, lm_err *e)
{
    between *t = ctx;
    lm_code rc = t->inner->finish(t->inner->ctx, r, loss, e);
    if (r->val) {
        t->out->first = t->evals++ ? t->out->first : -*loss;
        t->out->last = -*loss;
    }
    return rc;
}

static lm_code pass_save(void *ctx, int64_t step, lm_buf *out, lm_err *e)
{
    const lm_objective *x = ((between *)ctx)->inner;
    return x->save(x->ctx, step, out, e);
}

static lm_code pass_load(void *ctx, int64_t step, const json_t *o, lm_err *e)
{
    const lm_objective *x = ((between *)ctx)->inner;
    return x->load(x->ctx, step, o, e);
}

/* Every token of the reference has the log-probability -4. */
static lm_code flat_reference(void *ctx, const lm_align_text *text, int64_t n, double *const *logp,
                              lm_err *e)
{
    (void)ctx, (void)e;
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < text[i].n - text[i].from; k++)
            logp[i][k] = -4;
    return LM_OK;
}

static const int64_t eos = 63;

static lm_on_policy_opts opts_of(const ask *a, const lm_align_spec *spec, lm_reward_set *reward)
{
    return (lm_on_policy_opts){ .loss = spec,
                                .reward = reward,
                                .prompt = prompts,
                                .val = a->val ? prompts : NULL,
                                .n_prompts = PROMPTS,
                                .n_val = a->val ? PROMPTS : 0,
                                .prompts = 8,
                                .group = GROUP,
                                .updates = a->updates ? a->updates : 1,
                                .iterations = a->iterations ? a->iterations : 1,
                                .advantage = a->advantage,
                                .correct = a->correct,
                                .correct_least = a->correct_least,
                                .correct_most = a->check ? a->correct_most : 3,
                                .missing_eos = a->missing_eos,
                                .clip_reward = a->clip_reward,
                                .kl_reward = a->kl_reward,
                                .kl_target = a->kl_target,
                                .kl_horizon = 100,
                                .gamma = 0.9,
                                .lambda = 0.8,
                                .best = 2,
                                .least = -INFINITY,
                                .tries = a->tries,
                                .mask_truncated = a->mask,
                                .rollout = { .most_prompt = 3,
                                             .most_new = NEW,
                                             .sample = { 1, 0, 1, 0, 1 },
                                             .eos = &eos,
                                             .n_eos = 1,
                                             .seed = 2 },
                                .tokenizer = tok,
                                .reference = a->reference ? flat_reference : NULL,
                                .seed = 2 };
}

static outcome train(const ask *a)
{
    outcome out = { .first = NAN };
    lm_err e = { 0 };
    lm_align_spec spec;
    lm_reward_set *reward = NULL;
    lm_model_source *from = NULL;
    if (a->run)
        ok(lm_mkdir_p(a->run, &e), &e);
    if (a->resume)
        ok(lm_model_source_open(a->resume, NULL, &from, &e), &e);
    between t = { .out = &out, .stop_at = a->stop_at, .generation = -1, .check = a->check };
    ok(lm_align_parse(a->loss, &spec, &e), &e);
    ok(lm_reward_open(&a->reward, NULL, 1, &(lm_reward_opts){ .most_new = NEW, .timeout = 5 },
                      &reward, &e),
       &e);
    const lm_on_policy_opts how = opts_of(a, &spec, reward);
    ok(lm_on_policy_new(&how, &t.p, &e), &e);
    t.inner = lm_on_policy_objective(t.p);
    const lm_objective x = { .ctx = &t,
                             .ready = pass_ready,
                             .begin = pass_begin,
                             .fill = pass_fill,
                             .grade = pass_grade,
                             .finish = pass_finish,
                             .report = NULL,
                             .save = pass_save,
                             .load = pass_load };
    const lm_trainer_opts o = { .batch = 2,
                                .seq = T,
                                .accumulate = 1,
                                .steps = a->steps,
                                .precision = { .low = LM_DTYPE_F32 },
                                .documents = true,
                                .seed = 1,
                                .objective = true,
                                .entropy = LM_ENTROPY_READ,
                                .value = lm_on_policy_values(t.p),
                                .groups = lm_groups_of(lm_optim_default(lm_optim_find("adamw"))),
                                .schedule = { .kind = LM_SCHED_CONSTANT, .lr = a->rate },
                                .clip_norm = 1,
                                .eval_every = a->val ? 5 : 0,
                                .save_every = a->run && strstr(a->run, "failed") ? 1 : 0,
                                .log_every = 1 };
    const lm_trainer_io io = { .config = &tiny.config,
                               .weights = from ? from : tiny.source,
                               .resume = a->resume,
                               .checkpoint = { .run_dir = a->run, .config = tiny.json },
                               .objective = &x };
    lm_trainer *trainer = NULL;
    out.rc = lm_trainer_new(&o, &io, backend, &trainer, &out.e);
    if (!out.rc)
        out.rc = lm_trainer_run(trainer, &out.r, &out.e);
    if (trainer) {
        out.n = trainer->s.model->block;
        out.weights = malloc((size_t)out.n * sizeof(float));
        memcpy(out.weights, lm_store_flat(trainer->s.store, LM_KEPT_PARAM, 0),
               (size_t)out.n * sizeof(float));
    }
    lm_trainer_free(trainer);
    lm_on_policy_free(t.p);
    lm_reward_close(reward);
    lm_model_source_close(from);
    return out;
}

/* ---- rewards rise ---- */

static void expect_rise(ask a, double from, double to)
{
    a.val = true;
    outcome x = train(&a);
    if (x.rc)
        fail_msg("%s: %s: %s", a.loss, x.e.where, x.e.what);
    if (!(x.first < from && x.last > to))
        fail_msg("%s: the reward went from %g to %g", a.loss, x.first, x.last);
    free(x.weights);
}

static void rewards_rise(void **state)
{
    const lm_advantage_opts group = { .eps = 1e-4 },
                            rloo = { .kind = LM_ADVANTAGE_LEAVE_ONE_OUT, .eps = 1e-4 };
    const ask a = { .reward = "regex:w(5|6|7|8|9|10|11|12)\\.", .steps = 60, .rate = 3e-3 };
    ask b = a;
    (void)state;
    b.loss = "dapo";
    b.advantage = group;
    b.correct = LM_CORRECT_TOKEN_TRUNCATE;
    expect_rise(b, 0.9, 0.99);
    b.loss = "grpo:beta=0.01";
    b.reference = true;
    b.updates = 2;
    b.iterations = 2;
    b.correct = LM_CORRECT_SEQUENCE_MASK;
    expect_rise(b, 0.9, 0.99);
    b.loss = "rloo";
    b.kl_reward = 0.001;
    b.advantage = rloo;
    b.updates = b.iterations = 1;
    expect_rise(b, 0.9, 0.99);
    b = a;
    b.loss = "ppo";
    b.updates = b.iterations = 2;
    b.correct = LM_CORRECT_TOKEN_TRUNCATE;
    expect_rise(b, 0.9, 0.99);
    b = a;
    b.loss = "reject";
    expect_rise(b, 0.9, 0.99);
    b = a;
    b.loss = "dpo:beta=0.5";
    b.reference = true;
    expect_rise(b, 0.9, 0.99);
}

/* ---- definitions ---- */

static void steps_are_their_definition(void **state)
{
    const ask a = { .reward = "regex:w(5|6|7|8|9|10|11|12)\\.",
                    .steps = 4,
                    .rate = 1e-2,
                    .check = true,
                    .correct_most = 1.5,
                    .advantage = { .eps = 1e-4 } };
    (void)state;
    for (int k = 0; k < 7; k++) {
        static const char *const losses[] = {
            "grpo:beta=0.1", "rloo", "dapo", "gspo:beta=0.2", "dapo", "dpo:beta=0.5", "ppo"
        };
        static const lm_correct how[] = { LM_CORRECT_TOKEN_TRUNCATE,
                                          LM_CORRECT_SEQUENCE_TRUNCATE,
                                          LM_CORRECT_TOKEN_MASK,
                                          LM_CORRECT_SEQUENCE_MASK,
                                          LM_CORRECT_NONE,
                                          LM_CORRECT_NONE,
                                          LM_CORRECT_NONE };
        ask b = a;
        b.loss = losses[k];
        b.correct = how[k];
        b.reference = k != 2 && k != 4 && k != 6;
        b.kl_reward = k == 1 ? 0.3 : 0;
        b.advantage.kind = k == 1 ? LM_ADVANTAGE_LEAVE_ONE_OUT : LM_ADVANTAGE_GROUP;
        b.updates = b.iterations = k == 0 || k == 3 || k == 6 ? 2 : 1;
        b.mask = k == 0 || k == 2 || k == 5;
        b.correct_least = k % 2 ? 0.6 : 0;
        b.missing_eos = k == 4 ? 0 : 0.7;
        b.clip_reward = k == 1 ? 0.4 : 0;
        outcome x = train(&b);
        ok(x.rc, &x.e);
        assert_true(k != 6 || x.moved > 8 * GROUP / 2 + 8); /* in the second iteration, too */
        assert_true(x.ended > 0 && x.cut > 0 && x.batches > 0);
        assert_true(!b.correct || (x.bounded > 0 && x.free > 0));
        free(x.weights);
    }
}

/* ---- resume ---- */

static void expect_same(const outcome *a, const outcome *b)
{
    assert_int_equal(a->rc, LM_OK);
    assert_int_equal(b->rc, LM_OK);
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->weights, b->weights, (size_t)a->n * sizeof(float));
}

/* 7 steps at once, and 4 and 3 of them: within a generation if it has more than one. */
static void resumed_runs_repeat(void **state)
{
    double replaced = 0;
    (void)state;
    for (int k = 0; k < 6; k++) {
        char first[32], second[32];
        static const char *const losses[] = {
            "dapo:beta=0.01", "dapo:beta=0.01", "dpo", "ppo", "ppo", "reject"
        };
        ask a = { .loss = losses[k],
                  .reward = k % 2 ? "regex:w[56]\\." : "regex:w[0-9]\\.",
                  .steps = 7,
                  .rate = 1e-2,
                  .reference = true,
                  .advantage = { .eps = 1e-4 },
                  .correct = LM_CORRECT_TOKEN_TRUNCATE,
                  .kl_reward = k == 3 || k == 4 ? 0.05 : 0,
                  .kl_target = k == 4 ? 0.5 : 0,
                  .tries = k % 2,
                  .updates = k ? 2 : 1,
                  .iterations = k == 4 ? 1
                                : k    ? 3
                                       : 1 };
        outcome whole = train(&a), part, rest;
        snprintf(first, sizeof first, "first%d", k);
        snprintf(second, sizeof second, "second%d", k);
        char *one = path_of(first), *two = path_of(second), *from = NULL;
        lm_err e = { 0 };
        a.steps = 4;
        a.run = one;
        part = train(&a);
        assert_int_equal(part.rc, LM_OK);
        ok(lm_path_join(&from, one, "step-000004", &e), &e);
        a.steps = 7;
        a.run = two;
        a.resume = from;
        rest = train(&a);
        if (rest.rc)
            fail_msg("%s: %s", rest.e.where, rest.e.what);
        expect_same(&whole, &rest);
        replaced += whole.replaced;
        if (k && k != 4) { /* other numbers of steps do not fit */
            a.updates = 4;
            outcome other = train(&a);
            assert_int_equal(other.rc, LM_EUSAGE);
            free(other.weights);
        }
        free(whole.weights);
        free(part.weights);
        free(rest.weights);
        lm_free(one);
        lm_free(two);
        lm_free(from);
    }
    assert_true(replaced > 0);
}

/* ---- stops and failures ---- */

#define JUDGE "case $x in *w[0-9].*) echo 1;; *) echo 0;; esac; done"

/* Go on from the checkpoint after `step` steps of the run; the end is that of `whole`. */
static void expect_resume(ask a, int64_t step, const outcome *whole)
{
    char *from = NULL, name[32];
    lm_err e = { 0 };
    snprintf(name, sizeof name, "step-%06d", (int)step);
    ok(lm_path_join(&from, a.run, name, &e), &e);
    a.resume = from;
    a.stop_at = 0;
    a.reward = "command:while read x; do " JUDGE;
    outcome rest = train(&a);
    expect_same(whole, &rest);
    free(rest.weights);
    lm_free(from);
}

static void stops_and_failures_can_be_resumed(void **state)
{
    ask a = { .loss = "dapo",
              .reward = "command:while read x; do " JUDGE,
              .steps = 4,
              .rate = 1e-2,
              .advantage = { .eps = 1e-4 } };
    outcome whole = train(&a), part;
    (void)state;
    ok(whole.rc, &whole.e);
    ask b = a;
    b.run = path_of("stopped");
    b.stop_at = 3;
    part = train(&b);
    lm_stop_request(0);
    assert_int_equal(part.rc, LM_OK);
    assert_int_equal(part.r.end, LM_TRAIN_STOPPED);
    assert_int_equal(part.r.step, 2);
    expect_resume(b, 2, &whole);
    free(part.weights);
    lm_free((char *)(uintptr_t)b.run);
    /* it ends in the rewards of the third step */
    b = a;
    b.run = path_of("failed");
    b.reward = "command:i=0; while read x; do i=$((i+1)); [ $i -gt 100 ] && exit 7; " JUDGE;
    part = train(&b);
    assert_int_equal(part.rc, LM_EIO);
    assert_non_null(strstr(part.e.what, "status 7 after 4 of 48"));
    expect_resume(b, 2, &whole);
    free(part.weights);
    lm_free((char *)(uintptr_t)b.run);
    free(whole.weights);
}

/* ---- refusals ---- */

static void refused(void **state)
{
    const char *reward = "think";
    lm_err e = { 0 };
    lm_reward_set *set = NULL;
    lm_on_policy *p = NULL;
    lm_align_spec spec;
    const ask a = { .loss = "dapo" };
    (void)state;
    ok(lm_reward_open(&reward, NULL, 1, &(lm_reward_opts){ .most_new = 1 }, &set, &e), &e);
    for (int k = 0; k < 7; k++) {
        ok(lm_align_parse(k == 5 ? "kto" : k == 4 ? "dpo" : "dapo", &spec, &e), &e);
        lm_on_policy_opts o = opts_of(&a, &spec, set);
        o.group = k == 0 ? 1 : o.group;
        o.updates = k == 1 ? 3 : 1;
        o.n_prompts = k == 2 ? 0 : o.n_prompts;
        o.kl_reward = k == 3 ? 0.1 : 0;
        o.correct = k == 6 ? LM_CORRECT_TOKEN_MASK : LM_CORRECT_NONE;
        o.correct_least = k == 6 ? o.correct_most : 0;
        assert_int_equal(lm_on_policy_new(&o, &p, &e), LM_EUSAGE);
        assert_null(p);
        e = (lm_err){ 0 };
    }
    lm_reward_close(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rewards_rise),
        cmocka_unit_test(steps_are_their_definition),
        cmocka_unit_test(resumed_runs_repeat),
        cmocka_unit_test(stops_and_failures_can_be_resumed),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests_name("align_on_policy", tests, begin, end);
}
