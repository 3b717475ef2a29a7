/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of train into the structures of the library. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/text.h"
#include "format/folder_run.h"
#include "train/options.h"
#include "train/resume.h"
#include "train/run.h"

bool train_plan_only(void)
{
    return tool.dry_run || opt.dump_graph;
}

/* With --resume: find the checkpoint, and set all options that were not given from those of the run. */
static lm_code resume_run(train_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    /* The last two belong to the old run when -o begins another. */
    static const char *const not_kept[] = {
        "resume",   "resume-schedule", "dry-run",         "json",       "print-config", "force",
        "threads",  "output",          "measure",         "dump-graph", "stats",        "device",
        "progress", "trace",           "list-optimizers", "metrics",    "tensorboard",  NULL
    };
    static const char *not_kept_here[sizeof not_kept / sizeof *not_kept - 2];
    if (!train_plan_only() && lm_run_check_idle(opt.resume, tool.output, e))
        return e->code;
    if (lm_run_find(opt.resume, tool.output, &s->step_dir, &s->own_run, e) ||
        lm_ckpt_options(s->step_dir, &s->saved, &a->step, e))
        return e->code;
    a->run = s->own_run;
    if (tool.output && !lm_path_same(tool.output, a->run))
        a->run = tool.output;
    else
        a->from = lm_run_step_of(lm_path_base(s->step_dir));
    memcpy(not_kept_here, not_kept, sizeof not_kept_here - sizeof *not_kept);
    if (lm_options_resume(s->saved, a->from < 0 ? not_kept : not_kept_here, s->step_dir, e))
        return e->code;
    a->model = a->resume = s->step_dir;
    a->data = tool.argc > 0 ? tool.argv[0] : json_string_value(json_object_get(s->saved, "data"));
    if (!a->data)
        return lm_fail(e, LM_EUSAGE, s->step_dir, "name the data: train --resume RUN DATA",
                       "does not say which data it was trained on");
    return LM_OK;
}

static lm_code parse_save_every(lm_trainer_opts *o, lm_err *e)
{
    const char *v = opt.save_every;
    if (!v)
        v = "30m";
    if (!strcmp(v, "0"))
        return LM_OK;
    size_t n = strlen(v);
    bool time_ = n && strchr("smh", v[n - 1]);
    if (time_ ? lm_parse_seconds(v, &o->save_seconds) && o->save_seconds > 0
              : lm_parse_count(v, &o->save_every) && o->save_every > 0)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--save-every", "give steps (100) or a time (90s, 10m, 2h)",
                   "'%s' is neither", v);
}

static lm_code find_operands(train_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (opt.resume && tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "with --resume only DATA may be named",
                  "one operand too many");
    if (opt.resume)
        return resume_run(s, e);
    if (tool.argc < 1 || (tool.argc < 2 && !train_plan_only()))
        lm_misuse(&tool, "operands", "give MODEL and DATA, or --resume RUN", "%d given", tool.argc);
    a->model = tool.argv[0];
    a->data = tool.argc > 1 ? tool.argv[1] : NULL;
    a->run = tool.output;
    if (!a->run && !train_plan_only())
        lm_misuse(&tool, "--output", "name the folder of the run with -o RUN", "is missing");
    if (tool.output && !strcmp(tool.output, "-"))
        lm_misuse(&tool, "--output", "name the folder of the run with -o RUN",
                  "a run is a folder, not a stream");
    return LM_OK;
}

/* Options that are hyper-parameters of optimisers. */
enum { HYPERS = 7 };

static void hypers_given(lm_hyper_value out[HYPERS + 1])
{
    const lm_hyper_value all[HYPERS] = {
        { "beta1", opt.beta1 },
        { "beta2", opt.beta2 },
        { "eps", opt.eps },
        { "weight_decay", opt.weight_decay },
        { "momentum", opt.momentum },
        { "dampening", opt.dampening },
        { "nesterov", opt.nesterov ? 1 : -1 },
    };
    int n = 0;
    for (int i = 0; i < HYPERS; i++)
        if (all[i].value >= 0)
            out[n++] = all[i];
    out[n] = (lm_hyper_value){ 0 };
}

/* A hyper-parameter that was given and that the main optimiser does not have.  The saved options of an older
 * run are accepted: they hold the defaults of all. */
static lm_code refuse_hypers(const lm_groups *g, const lm_hyper_value *given, lm_err *e)
{
    char option[32], known[512];
    for (; given->name; given++) {
        snprintf(option, sizeof option, "--%s", given->name);
        for (char *c = option; *c; c++)
            *c = *c == '_' ? '-' : *c;
        if (lm_given(&tool, option + 2) && lm_optim_hyper(g->use[0].optim, given->name) < 0)
            return lm_fail(e, LM_EUSAGE, option, "leave it out", "serves --optimizer %s only",
                           lm_optims_with(given->name, known, sizeof known));
    }
    return LM_OK;
}

static lm_code read_optimizers(train_session *s, lm_err *e)
{
    lm_hyper_value given[HYPERS + 1];
    hypers_given(given);
    if (lm_groups_parse(opt.optimizer, given, opt.lr, &s->t.o.groups, e))
        return e->code;
    s->t.o.schedule.lr = s->t.o.groups.lr;
    return refuse_hypers(&s->t.o.groups, given, e);
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
static lm_code refuse_idle(lm_err *e)
{
    const struct {
        bool changed;
        unsigned number;
        const char *option;
    } all[] = {
        { opt.step_size != built_in.step_size, LM_SCHED_READS_STEP_SIZE, "--step-size" },
        { opt.gamma != built_in.gamma, LM_SCHED_READS_GAMMA, "--gamma" },
        { opt.cycles != built_in.cycles, LM_SCHED_READS_CYCLES, "--cycles" },
        { opt.decay_steps != built_in.decay_steps, LM_SCHED_READS_DECAY, "--decay-steps" },
    };
    char kinds[128];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].changed && !(lm_sched_reads(lm_sched_find(opt.schedule)) & all[i].number))
            return lm_fail(e, LM_EUSAGE, all[i].option, "leave it out",
                           "serves --lr-schedule %s only",
                           kinds_that_read(all[i].number, kinds, sizeof kinds));
    return LM_OK;
}

/* Options without effect because another one is missing. */
static lm_code refuse_alone(lm_err *e)
{
    if (opt.resume_schedule && !opt.resume)
        return lm_fail(e, LM_EUSAGE, "--resume-schedule", "leave it out", "serves --resume only");
    if (opt.measure && !tool.dry_run)
        return lm_fail(e, LM_EUSAGE, "--measure", "give --dry-run too", "serves --dry-run only");
    if (opt.patience && !opt.eval_every)
        return lm_fail(e, LM_EUSAGE, "--early-stop", "give --eval-every too",
                       "nothing is evaluated during the run");
    if (opt.val && !opt.eval_every && !opt.resume) /* a resumed run may have it from before */
        return lm_fail(e, LM_EUSAGE, "--val", "give --eval-every too",
                       "nothing is evaluated during the run");
    return LM_OK;
}

/* The schedule of a resumed run. */
static lm_code place_schedule(train_session *s, lm_err *e)
{
    const lm_resume_ask ask = { .how = opt.resume_schedule,
                                .step = s->t.ask.step,
                                .steps = opt.steps,
                                .warmup_given = lm_given(&tool, "warmup"),
                                .decay = opt.decay_steps,
                                .lr = s->t.o.groups.use[0].optim->rate };
    return lm_resume_schedule(s->saved, s->step_dir, &ask, &s->t.o.schedule, s->note, e);
}

static double wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* What the session needs besides the operands and the numbers of the training. */
static void ask_session(train_session *s)
{
    lm_session_ask *a = &s->t.ask;
    a->val = opt.val;
    a->plan = train_plan_only();
    a->dropout = opt.dropout;
    a->peak_flops = opt.peak_tflops * 1e12;
    a->kind = lm_tokens_kind_find(opt.format);
    a->check_tokenizer = opt.check_tokenizer;
    a->force = tool.force;
    a->lmz = !strcmp(opt.checkpoint_format, "lmz");
    a->keep = (int)opt.keep;
    a->metrics = tool.metrics;
    a->tensorboard = opt.tensorboard;
    a->trace = opt.trace;
    a->wall_clock = wall_clock;
    a->note = s->note;
    a->options = &s->options;
    a->history = lm_tool_step(&tool);
    a->tool = tool.name;
    a->argc = tool.full_argc;
    a->argv = tool.full_argv;
    a->seed = tool.seed;
    a->sink = &tool.sink;
}

/* The numbers of the training. */
static void ask_training(lm_trainer_opts *o)
{
    *o = (lm_trainer_opts){
        .batch = opt.batch,
        .seq = opt.seq,
        .accumulate = opt.accumulate,
        .steps = opt.steps,
        .precision = { .low = lm_dtype_parse(opt.dtype) },
        .documents = opt.documents,
        .dropout = true,
        .seed = (uint64_t)tool.seed,
        .schedule = { .kind = lm_sched_find(opt.schedule),
                      .lr = opt.lr,
                      .min_ratio = opt.min_lr_ratio,
                      .warmup = opt.warmup,
                      .total = opt.steps,
                      .decay = opt.decay_steps >= 0 ? opt.decay_steps : opt.steps / 10,
                      .step_size = opt.step_size,
                      .cycles = opt.cycles,
                      .gamma = opt.gamma },
        .clip_norm = opt.max_grad_norm,
        .clip_value = opt.clip_value,
        .eval_every = opt.eval_every,
        .eval_batches = opt.eval_batches,
        .log_every = opt.log_every,
        .patience = opt.patience,
        .min_delta = opt.min_delta,
        .timed = opt.stats,
    };
}

lm_code train_ask(train_session *s, lm_err *e)
{
    if (find_operands(s, e))
        return e->code;
    lm_refuse_twice(&tool, (const char *[]){ opt.val, opt.resume }, 2);
    ask_session(s);
    ask_training(&s->t.o);
    if (read_optimizers(s, e) || refuse_idle(e) || refuse_alone(e) ||
        (s->saved && place_schedule(s, e)))
        return e->code;
    return parse_save_every(&s->t.o, e);
}
