/* SPDX-License-Identifier: Apache-2.0 */
/* rollouts.c -- the part of align-model that samples: options, prompts, rewards, and the objective. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "align-model/options.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/training.h"

enum { USUAL_ROWS = 2048 };

/* ---- options ---- */

static int count_rewards(void)
{
    return opt.reward.n + opt.command.n + opt.reward_model.n;
}

bool align_has_rewards(void)
{
    return count_rewards() > 0;
}

static double kl_in_loss(const align_session *s)
{
    return lm_align_hyper(&s->spec, "beta", -1);
}

/* --kl is the loss's beta, or a penalty in the rewards where the loss has none. */
static lm_code take_kl(align_session *s, lm_err *e)
{
    char text[40];
    if (opt.kl <= 0 || s->spec.n < 1 || kl_in_loss(s) < 0)
        return LM_OK;
    snprintf(text, sizeof text, "%.17g", opt.kl);
    return lm_align_set(&s->spec, "beta", text, e);
}

static lm_code find_judges(align_session *s, lm_err *e)
{
    lm_code rc = LM_OK;
    for (int i = 0; !rc && i < opt.reward_model.n && i < MOST_REWARDS; i++)
        rc = align_absolute(&opt.reward_model.v[i], &s->judges[i], e);
    return rc;
}

/* What was not given, and depends on the loss: TRL's defaults. */
static void choose_defaults(align_session *s)
{
    const bool values = lm_align_values(&s->spec);
    opt.group = opt.group ? opt.group : values ? 1 : 8;
    opt.iterations = opt.iterations ? opt.iterations : values ? 4 : 1;
    opt.kl = opt.kl >= 0 ? opt.kl : values ? 0.05 : 0;
    s->t.o.value = values;
}

lm_code align_ask_rollouts(align_session *s, lm_err *e)
{
    const lm_align_kind kind = lm_align_kind_of(&s->spec);
    s->samples = kind == LM_ALIGN_POLICY || align_has_rewards();
    if (!s->samples)
        return align_refuse_without_effect(s, e) ? e->code : align_find_given_reference(s, e);
    if (!align_has_rewards())
        return lm_fail(e, LM_EUSAGE, "--reward",
                       "name one: --reward gsm8k; --list-rewards shows all",
                       "%s learns from rewards, and no reward is given", s->spec.use[0].loss->name);
    if (kind != LM_ALIGN_POLICY && kind != LM_ALIGN_PAIRS)
        return lm_fail(e, LM_EUSAGE, "--reward", "use a loss of policies (grpo), or of pairs (dpo)",
                       "%s is not for sampled completions", s->spec.use[0].loss->name);
    if (align_refuse_without_effect(s, e))
        return e->code;
    choose_defaults(s);
    if (opt.kl_target > 0 && (opt.kl <= 0 || kl_in_loss(s) >= 0))
        return lm_fail(e, LM_EUSAGE, "--kl-target",
                       kl_in_loss(s) < 0 ? "begin with a weight: --kl 0.05" : "leave it out",
                       kl_in_loss(s) < 0 ? "the rewards of %s have no KL"
                                         : "the KL of %s is in the loss, with a fixed weight",
                       s->spec.use[0].loss->name);
    if (opt.samples) {
        lm_refuse_same(&tool, opt.samples, s->t.ask.model);
        if (s->t.ask.data)
            lm_refuse_same(&tool, opt.samples, s->t.ask.data);
    }
    if (opt.samples && tool.rank == 0 && !opt.loop.resume && lm_out_try(opt.samples, tool.force, e))
        return e->code;
    return take_kl(s, e) ? e->code : align_find_reference(s, e);
}

/* ---- prompts ---- */

static void say_prompts(const char *path, const lm_prompts *p)
{
    lm_say(&tool, LM_LOG_INFO, "%s: %" PRId64 " prompts (%s), the longest has %" PRId64 " tokens",
           path, p->n, p->form, p->longest);
    if (p->dropped)
        lm_say(&tool, LM_LOG_WARN,
               "%s: %" PRId64 " of %" PRId64 " prompts are left out: longer than %" PRId64
               " tokens",
               path, p->dropped, p->records, opt.most_prompt);
}

static lm_code read_prompts(align_session *s, const char *path, lm_prompts *out, lm_err *e)
{
    const lm_prompts_opts o = {
        .path = &path,
        .n = 1,
        .map = &s->map,
        .maker = { .tok = s->tok, .chat = s->chat, .eos = lm_config_eos(&s->t.config) },
        .most = opt.most_prompt,
        .limit = opt.max_examples
    };
    if (lm_prompts_read(&o, out, e))
        return e->code;
    if (out->n)
        say_prompts(path, out);
    return LM_OK;
}

int64_t align_planned_prompt(const align_session *s)
{
    const int64_t room = s->t.config.max_positions - opt.most_new;
    return room < 1 || opt.most_prompt < room ? opt.most_prompt : room;
}

/* Of the training and of evaluations. */
static int64_t longest_prompt(const align_session *s)
{
    const int64_t a = s->prompts.longest, b = s->val_prompts.longest;
    return !s->prompts.n ? align_planned_prompt(s) : a > b ? a : b;
}

lm_code align_check_positions(const align_session *s, int64_t prompt, const char *todo, lm_err *e)
{
    const int64_t room = s->t.config.max_positions;
    if (prompt + opt.most_new <= room)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--max-new-tokens", todo,
                   "prompts of up to %" PRId64 " tokens and %" PRId64 " more pass the %" PRId64
                   " positions of the model",
                   prompt, opt.most_new, room);
}

static lm_code check_room(const align_session *s, lm_err *e)
{
    return align_check_positions(
        s, longest_prompt(s), "give a smaller one, or leave long prompts out: --max-prompt-length",
        e);
}

/* Windows hold the longest text, or a pair of them. */
static lm_code choose_windows(align_session *s, lm_err *e)
{
    lm_trainer_opts *o = &s->t.o;
    const int64_t unit = lm_align_kind_of(&s->spec) == LM_ALIGN_PAIRS ? 2 : 1;
    int64_t prompt = s->prompts.n ? s->prompts.longest : align_planned_prompt(s),
            need = unit * (prompt + opt.most_new - 1);
    if (!s->t.ask.data && check_room(s, e))
        return e->code;
    if (opt.seq && opt.seq < need)
        return lm_fail(e, LM_EUSAGE, "--seq-len", "use longer windows, or shorter completions",
                       "prompt and completion need %" PRId64 " tokens", need);
    o->seq = opt.seq ? opt.seq : need;
    const int64_t windows = opt.batch * (unit == 2 ? 1 : opt.group), /* that a step needs at most */
        share = (windows + o->leaves - 1) / o->leaves;
    o->batch = opt.micro ? opt.micro : USUAL_ROWS / o->seq;
    o->batch = o->batch < 1 ? 1 : o->batch;
    if (!opt.micro && o->leaves > 1 && share < o->batch) /* each leaf has some */
        o->batch = share;
    /* What a step takes at most, for plans. */
    int64_t rows = windows * need;
    o->accumulate = (rows + o->seq * o->batch - 1) / (o->seq * o->batch);
    return LM_OK;
}

/* The ids that end a completion: those of the model, or of its tokenizer. */
lm_code align_read_ends(align_session *s, lm_err *e)
{
    json_t *o = NULL;
    if (lm_model_source_json(s->t.source, "generation_config.json", &o, e))
        return e->code;
    lm_generation_read(&s->t.config, o, s->t.ask.model, &s->generation, e);
    json_decref(o);
    if (!e->code && !s->generation.n_eos && lm_tokenizer_eos(s->tok) < 0 && !opt.stop.n)
        lm_say(&tool, LM_LOG_WARN,
               "%s: no token ends a text: every completion has %" PRId64 " tokens", s->t.ask.model,
               opt.most_new);
    return e->code;
}

/* Of the texts; their columns follow from the options, on which the ranks agree. */
static uint64_t digest_of(const lm_prompts *p)
{
    uint64_t h = 0;
    for (int64_t i = 0; i < p->n; i++)
        h = lm_hash64(p->v[i].ids, (size_t)p->v[i].n * sizeof *p->v[i].ids, h);
    return h;
}

lm_code align_open_prompts(align_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (!a->data)
        return choose_windows(s, e);
    if (align_open_text(s, e) || align_read_ends(s, e) ||
        read_prompts(s, a->data, &s->prompts, e) ||
        (opt.loop.val && read_prompts(s, opt.loop.val, &s->val_prompts, e)))
        return e->code;
    if (lm_strdup(&s->t.train_path, a->data, e) || lm_stopping())
        return e->code;
    return align_agree_on_data(digest_of(&s->prompts), e) ||
                   align_agree_on_data(digest_of(&s->val_prompts), e)
               ? e->code
               : choose_windows(s, e);
}

/* ---- the objective ---- */

static lm_code read_weights(double *out, lm_err *e)
{
    int n = 0;
    for (int i = 0; i < MOST_REWARDS; i++)
        out[i] = 1;
    if (!opt.weights)
        return LM_OK;
    if (lm_parse_list(opt.weights, out, MOST_REWARDS, &n) && n == count_rewards())
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--reward-weights", "give one for each: --reward-weights 1,0.5",
                   "'%.40s' are not the weights of %d rewards", opt.weights, count_rewards());
}

static lm_code open_rewards(align_session *s, lm_err *e)
{
    const lm_reward_opts o = { .most_new = opt.most_new,
                               .tokenizer = s->tok,
                               .timeout = opt.timeout };
    const lm_strs *const behind[] = { &opt.command, &opt.reward_model };
    static const char *const kind[] = { "command", "model" };
    int n = opt.reward.n;
    const char *spec[MOST_REWARDS];
    char *owned[MOST_REWARDS] = { NULL };
    double weight[MOST_REWARDS];
    if (count_rewards() > MOST_REWARDS)
        return lm_fail(e, LM_EUSAGE, "--reward", NULL, "there are more than %d", MOST_REWARDS);
    for (int i = 0; i < opt.reward.n; i++)
        spec[i] = opt.reward.v[i];
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < behind[k]->n && !e->code; i++, n++) {
            lm_asprintf(&owned[n], e, "%s:%s", kind[k], behind[k]->v[i]);
            spec[n] = owned[n];
        }
    if (!e->code && !read_weights(weight, e))
        lm_reward_open(spec, weight, count_rewards(), &o, &s->reward, e);
    for (int i = 0; i < MOST_REWARDS; i++)
        lm_free(owned[i]);
    return e->code;
}

/* The number of a word in a list that holds it. */
static int word_of(const char *const *list, const char *word)
{
    int i = 0;
    while (list[i] && strcmp(list[i], word) != 0)
        i++;
    return i;
}

static lm_advantage_opts advantage_of(const align_session *s)
{
    static const char *const kinds[] = { "group", "rloo", "batch", "global", NULL },
                             *const scales[] = { "group", "batch", "none", NULL };
    const char *loss = s->spec.use[0].loss->name,
               *kind = opt.advantage           ? opt.advantage
                       : !strcmp(loss, "rloo") ? "rloo"
                                               : "group",
               *scale = opt.scale                  ? opt.scale
                        : !strcmp(loss, "dr_grpo") ? "none"
                                                   : "group";
    return (lm_advantage_opts){ .kind = (lm_advantage_kind)word_of(kinds, kind),
                                .scale = (lm_advantage_scale)word_of(scales, scale),
                                .normalise = opt.normalise,
                                .eps = 1e-4 };
}

/* Completions that are sampled at a time, where no option says it: no more than there ever are. */
static int64_t at_a_time(const align_session *s)
{
    enum { USUAL = 64 };
    double most = (double)opt.batch; /* of a teacher's step; an evaluation samples none */
    if (!align_distils(s))
        most *= (double)opt.updates * (double)opt.group;
    most = (double)s->val_prompts.n > most ? (double)s->val_prompts.n : most;
    return opt.sequences ? opt.sequences : most < USUAL ? (int64_t)most : USUAL;
}

/* What decides on the memory of rollouts.  Completions of a prompt begin together; validation prompts have one each. */
static lm_rollout_opts size_rollouts(const align_session *s, int64_t most_prompt)
{
    const int64_t sequences = at_a_time(s), group = align_distils(s) ? 1 : opt.group,
                  val = s->val_prompts.n < sequences ? s->val_prompts.n : sequences,
                  prompts = (sequences + group - 1) / group;
    return (lm_rollout_opts){ .most_prompt = most_prompt,
                              .most_new = opt.most_new,
                              .sequences = sequences,
                              .prompts = prompts > val ? prompts : val,
                              .memory = (size_t)opt.memory };
}

lm_rollout_opts align_rollout(align_session *s, int64_t most_prompt)
{
    static int64_t own;
    own = lm_tokenizer_eos(s->tok);
    const lm_generation *g = &s->generation;
    lm_rollout_opts o = size_rollouts(s, most_prompt);
    o.sample = (lm_sample_attr){ opt.temperature, opt.top_k, opt.top_p, opt.min_p, 1 };
    o.eos = g->n_eos ? g->eos : &own;
    o.n_eos = g->n_eos ? g->n_eos : own >= 0;
    o.stop = opt.stop.v;
    o.n_stop = opt.stop.n;
    o.seed = (uint64_t)tool.seed;
    return o;
}

lm_code align_make_policy(align_session *s, lm_err *e)
{
    static const char *const corrections[] = { "none",          "token-truncate",
                                               "token-mask",    "sequence-truncate",
                                               "sequence-mask", NULL };
    if (open_rewards(s, e) || find_judges(s, e))
        return e->code;
    lm_on_policy_opts o = {
        .loss = &s->spec,
        .reward = s->reward,
        .prompt = s->prompts.v,
        .val = s->val_prompts.v,
        .n_prompts = s->prompts.n,
        .n_val = s->val_prompts.n,
        .prompts = opt.batch * opt.updates,
        .group = opt.group,
        .updates = opt.updates,
        .iterations = opt.iterations,
        .advantage = advantage_of(s),
        .each = opt.each,
        .correct = (lm_correct)word_of(corrections, opt.correct),
        .correct_least = opt.correct_least,
        .correct_most = opt.correct_most,
        .kl_reward = kl_in_loss(s) < 0 ? opt.kl : 0,
        .kl_target = opt.kl_target,
        .kl_horizon = opt.kl_horizon,
        .gamma = opt.discount,
        .lambda = opt.gae_lambda,
        .whiten_rewards = opt.whiten,
        .best = opt.best,
        .least = opt.least > ANY_REWARD ? opt.least : -INFINITY,
        .tries = opt.tries,
        .missing_eos = opt.missing_eos,
        .clip_reward = opt.clip_reward,
        .mask_truncated = opt.mask_truncated,
        .rollout = align_rollout(s, longest_prompt(s)),
        .tokenizer = s->tok,
        .log_prompts = opt.shown,
        .seed = (uint64_t)tool.seed,
    };
    align_reference(s, &o);
    if (lm_on_policy_new(&o, &s->policy, e) || check_room(s, e))
        return e->code;
    s->t.ask.objective = lm_on_policy_objective(s->policy);
    s->t.o.entropy = lm_align_entropy(&s->spec);
    return LM_OK;
}

lm_code align_add_rollouts(align_session *s, int64_t most_prompt, lm_memory_plan *plan, lm_err *e)
{
    const lm_rollout_site site = { .backend = s->t.backend,
                                   .par = s->t.par,
                                   .config = &s->t.config,
                                   .model = s->t.program->train };
    const lm_rollout_opts o = size_rollouts(s, most_prompt);
    size_t bytes = 0;
    if (lm_rollout_outlook(&site, &o, &bytes, e))
        return e->code;
    lm_memory_add(plan, "rollouts", (double)bytes * align_ranks_here(s),
                  !s->t.backend->host_memory);
    return LM_OK;
}

lm_code align_add_memory(align_session *s, lm_memory_plan *plan, lm_err *e)
{
    size_t bytes = 0;
    if (!s->samples)
        return s->ref_base && !s->kept ? align_add_reference(s, plan, e) : LM_OK;
    if (align_add_rollouts(s, longest_prompt(s), plan, e))
        return e->code;
    if (s->reward &&
        lm_reward_bytes(s->reward, s->t.program->train, (size_t)plan->arena, &bytes, e))
        return e->code;
    lm_memory_add(plan, "reward model", (double)bytes * align_ranks_here(s),
                  !s->t.backend->host_memory);
    return align_compares(s) ? align_add_reference(s, plan, e) : LM_OK;
}

void align_close_rollouts(align_session *s)
{
    lm_on_policy_free(s->policy);
    lm_reward_close(s->reward);
    lm_prompts_fini(&s->prompts);
    lm_prompts_fini(&s->val_prompts);
    lm_generation_fini(&s->generation);
    align_close_reference(s);
    for (int i = 0; i < MOST_REWARDS; i++)
        lm_free(s->judges[i]);
}
