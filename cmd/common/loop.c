/* SPDX-License-Identifier: Apache-2.0 */
/* loop.c -- translates the options of tools that train into those of the trainer. */
#include "common/loop.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/text.h"

const char *const lm_loop_formats[] = { "safetensors", "lmz", NULL };
const char *const lm_loop_recomputes[] = { "none", "full", NULL };
const char *const lm_loop_aux_types[] = {
    "model", "layer", "sequence", "importance", "load", NULL
};
const char *const lm_loop_drop_policies[] = { "position", "probs", "reroute",
                                              NULL }; /* of lm_overflow */
const char *const lm_loop_router_dtypes[] = { "f32", "bf16", NULL };
const char *const lm_loop_side[] = { "tensorboard", "trace", NULL };
static const lm_loop_args built_in = LM_LOOP_DEFAULT;

static lm_code parse_save_every(const lm_loop_args *a, lm_trainer_opts *o, lm_err *e)
{
    const char *v = a->save_every;
    if (!v)
        v = "30m";
    if (!strcmp(v, "0"))
        return LM_OK;
    if (lm_run_interval(v, &o->save_every, &o->save_seconds))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--save-every", "give steps (100) or a time (90s, 10m, 2h)",
                   "'%s' is neither", v);
}

/* Options that are hyper-parameters of optimisers. */
enum { HYPERS = 7 };

static void hypers_given(const lm_loop_args *a, lm_hyper_value out[HYPERS + 1])
{
    const lm_hyper_value all[HYPERS] = {
        { "beta1", a->beta1 },
        { "beta2", a->beta2 },
        { "eps", a->eps },
        { "weight_decay", a->weight_decay },
        { "momentum", a->momentum },
        { "dampening", a->dampening },
        { "nesterov", a->nesterov ? 1 : -1 },
    };
    int n = 0;
    for (int i = 0; i < HYPERS; i++)
        if (all[i].value >= 0)
            out[n++] = all[i];
    out[n] = (lm_hyper_value){ 0 };
}

/* A hyper-parameter that was given and that the main optimiser does not have.  The saved options of an older
 * run are accepted: they hold the defaults of all. */
static lm_code refuse_hypers(const lm_tool *t, const lm_groups *g, const lm_hyper_value *given,
                             lm_err *e)
{
    char option[32], known[512];
    for (; given->name; given++) {
        snprintf(option, sizeof option, "--%s", given->name);
        for (char *c = option; *c; c++)
            *c = *c == '_' ? '-' : *c;
        if (lm_given(t, option + 2) && lm_optim_hyper(g->use[0].optim, given->name) < 0)
            return lm_fail(e, LM_EUSAGE, option, "leave it out", "serves --optimizer %s only",
                           lm_optims_with(given->name, known, sizeof known));
    }
    return LM_OK;
}

static lm_code read_optimizers(const lm_tool *t, const lm_loop_args *a, double fallback,
                               lm_trainer_opts *o, lm_err *e)
{
    lm_hyper_value given[HYPERS + 1];
    hypers_given(a, given);
    if (lm_groups_parse(a->optimizer, given, a->lr >= 0 ? a->lr : fallback, &o->groups, e))
        return e->code;
    o->schedule.lr = o->groups.lr;
    return refuse_hypers(t, &o->groups, given, e);
}

/* The schedules that read a number: "step or exponential". */
static const char *kinds_that_read(unsigned number, char *out, size_t size)
{
    size_t n = 0;
    for (int k = 0; k < LM_SCHED_COUNT && n < size; k++)
        if (lm_sched_reads((lm_sched_kind)k) & number)
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? " or " : "", lm_sched_names[k]);
    return out;
}

/* An option that the chosen schedule does not read is refused, not ignored.  Its default is accepted: a saved config
 * holds every option. */
static lm_code refuse_idle(const lm_loop_args *a, lm_err *e)
{
    const struct {
        bool changed;
        unsigned number;
        const char *option;
    } all[] = {
        { a->step_size != built_in.step_size, LM_SCHED_READS_STEP_SIZE, "--step-size" },
        { a->gamma != built_in.gamma, LM_SCHED_READS_GAMMA, "--gamma" },
        { a->cycles != built_in.cycles, LM_SCHED_READS_CYCLES, "--cycles" },
        { a->decay_steps != built_in.decay_steps, LM_SCHED_READS_DECAY, "--decay-steps" },
    };
    char kinds[128];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].changed && !(lm_sched_reads(lm_sched_find(a->schedule)) & all[i].number))
            return lm_fail(e, LM_EUSAGE, all[i].option, "leave it out",
                           "serves --lr-schedule %s only",
                           kinds_that_read(all[i].number, kinds, sizeof kinds));
    return LM_OK;
}

static double wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void lm_loop_session(lm_tool *t, const lm_loop_args *a, lm_loop_run *r, lm_session_ask *ask)
{
    ask->val = a->val;
    ask->note = r->note;
    ask->options = &r->options;
    ask->peak_flops = a->peak_tflops * 1e12;
    ask->force = t->force;
    ask->lmz = !strcmp(a->checkpoint_format, "lmz");
    ask->keep = (int)a->keep;
    ask->tiers = &r->tiers;
    ask->metrics = t->metrics;
    ask->tensorboard = a->tensorboard;
    ask->trace = a->trace;
    ask->wall_clock = wall_clock;
    ask->history = lm_tool_step(t);
    ask->tool = t->name;
    ask->argc = t->full_argc;
    ask->argv = t->full_argv;
    ask->seed = t->seed;
    ask->sink = &t->sink;
}

static lm_code ask_tiers(const lm_tool *t, const lm_loop_args *a, lm_loop_run *r,
                         lm_trainer_opts *o, lm_err *e)
{
    if (lm_run_tiers_parse(a->save_to.v, a->save_to.n, &r->tiers, e)) {
        snprintf(e->where, sizeof e->where, "--save-to");
        return e->code;
    }
    o->places = r->tiers.n;
    o->in_memory = lm_run_tiers_in_memory(&r->tiers);
    return o->in_memory && t->comm && t->ranks_here < t->ranks
               ? lm_fail(e, LM_EUSAGE, "--save-to memory", "give a folder that all machines see",
                         "is the memory of one machine, and %d of %d ranks are on others",
                         t->ranks - t->ranks_here, t->ranks)
               : LM_OK;
}

/* The schedule of a resumed run. */
static lm_code place_schedule(const lm_tool *t, const lm_loop_args *a, double fallback,
                              lm_loop_run *r, lm_trainer_opts *o, lm_err *e)
{
    const lm_resume_ask ask = { .how = a->resume_schedule,
                                .step = r->step,
                                .steps = o->steps,
                                .warmup_given = lm_given(t, "warmup"),
                                .decay = a->decay_steps,
                                .lr = fallback >= 0 ? fallback : o->groups.use[0].optim->rate };
    return lm_resume_schedule(r->saved, r->step_dir, &ask, &o->schedule, r->note, e);
}

/* Without a coefficient, what the config of the model asks. */
static lm_code ask_routing(const lm_loop_args *a, lm_routing_losses *out, lm_err *e)
{
    const bool layer = !strcmp(a->aux_type, "layer"), sequence = !strcmp(a->aux_type, "sequence");
    const bool load = !strcmp(a->aux_type, "load");
    const bool importance = load || !strcmp(a->aux_type, "importance");
    const bool other = layer || sequence || importance;
    const double coef = a->aux_coef;
    if (coef < 0 && other)
        return lm_fail(e, LM_EUSAGE, "--moe-aux-loss-type", "give --moe-aux-loss-coeff too",
                       "there is no coefficient of such a loss");
    *out = (lm_routing_losses){ .layer = layer ? coef : 0,
                                .sequence = sequence ? coef : 0,
                                .importance = importance ? coef : 0,
                                .load = load ? coef : 0,
                                .model = other      ? 0
                                         : coef < 0 ? LM_ROUTING_OF_CONFIG
                                                    : coef,
                                .z = a->z_coef,
                                .affinity = a->affinity_coef,
                                .nodes = a->affinity_nodes };
    if (a->affinity_coef > 0 && !a->affinity_nodes)
        return lm_fail(e, LM_EUSAGE, "--moe-affinity-loss-coeff", "give --moe-affinity-nodes too",
                       "there are no nodes");
    if (a->affinity_nodes && !(a->affinity_coef > 0))
        return lm_fail(e, LM_EUSAGE, "--moe-affinity-nodes", "give --moe-affinity-loss-coeff too",
                       "there is no loss of nodes");
    return LM_OK;
}

static lm_code ask_choice(const lm_tool *t, const lm_loop_args *a, lm_routing_choice *out,
                          lm_err *e)
{
    *out =
        (lm_routing_choice){ .capacity = a->expert_choice && !(a->capacity > 0) ? 1 : a->capacity,
                             .pad = a->pad_experts,
                             .second_random = a->random_second,
                             .by_expert = a->expert_choice,
                             .jitter = a->jitter,
                             .noise = a->router_noise,
                             .low = !strcmp(a->router_dtype, "bf16") };
    while (strcmp(lm_loop_drop_policies[out->policy], a->drop_policy) != 0)
        out->policy++;
    if (a->pad_experts && !(a->capacity > 0))
        return lm_fail(e, LM_EUSAGE, "--moe-pad-expert-input-to-capacity",
                       "give --moe-expert-capacity-factor too", "there is no capacity");
    if (lm_given(t, "moe-token-drop-policy") && (a->expert_choice || !(a->capacity > 0)))
        return lm_fail(e, LM_EUSAGE, "--moe-token-drop-policy",
                       a->expert_choice ? "leave it out" : "give --moe-expert-capacity-factor too",
                       a->expert_choice ? "serves tokens that choose experts"
                                        : "there is no capacity");
    if (a->expert_choice && (a->aux_coef > 0 || a->random_second))
        return lm_fail(e, LM_EUSAGE, "--moe-expert-choice",
                       "leave out --moe-aux-loss-coeff and --moe-random-second",
                       "loads are equal already, and tokens choose nothing");
    return LM_OK;
}

lm_code lm_loop_ask(const lm_tool *t, const lm_loop_args *a, double fallback, int64_t steps,
                    lm_loop_run *r, lm_trainer_opts *o, lm_err *e)
{
    o->steps = steps;
    o->seed = (uint64_t)t->seed;
    o->schedule = (lm_schedule){ .kind = lm_sched_find(a->schedule),
                                 .min_ratio = a->min_lr_ratio,
                                 .warmup = a->warmup,
                                 .total = steps,
                                 .decay = a->decay_steps >= 0 ? a->decay_steps : steps / 10,
                                 .step_size = a->step_size,
                                 .cycles = a->cycles,
                                 .gamma = a->gamma };
    o->clip_norm = a->max_grad_norm;
    o->clip_value = a->clip_value;
    o->eval_every = a->eval_every;
    o->eval_batches = a->eval_batches;
    o->log_every = a->log_every;
    o->patience = a->patience;
    o->min_delta = a->min_delta;
    o->timed = a->stats;
    if (a->recompute)
        o->build.recompute = !strcmp(a->recompute, "full");
    if (read_optimizers(t, a, fallback, o, e) || refuse_idle(a, e) ||
        ask_routing(a, &o->build.routing, e) || ask_choice(t, a, &o->build.choice, e))
        return e->code;
    if (a->patience && !a->eval_every)
        return lm_fail(e, LM_EUSAGE, "--early-stop", "give --eval-every too",
                       "nothing is evaluated during the run");
    if (parse_save_every(a, o, e) || ask_tiers(t, a, r, o, e))
        return e->code;
    return r->saved ? place_schedule(t, a, fallback, r, o, e) : LM_OK;
}
