/* SPDX-License-Identifier: Apache-2.0 */
/* train -- pretraining and continued training.  See man/man1/train.1. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/text.h"
#include "common/device.h"
#include "common/presets.h"
#include "common/tool.h"
#include "format/folder_run.h"
#include "model/preset.h"
#include "train/advice.h"
#include "train/data.h"
#include "train/outlook.h"
#include "train/report.h"
#include "train/resume.h"
#include "train/run.h"
#include "train/session.h"

static struct {
    const char *resume, *resume_schedule, *val, *tensorboard, *trace;
    int64_t steps, batch, seq, accumulate, warmup, decay_steps, step_size, cycles;
    double lr, min_lr_ratio, gamma;
    const char *schedule, *optimizer, *dtype;
    double beta1, beta2, eps, weight_decay, momentum, dampening;
    bool nesterov;
    double max_grad_norm, clip_value, dropout;
    bool documents, check_tokenizer;
    const char *format;
    int64_t eval_every, eval_batches, log_every, keep, patience;
    double min_delta, peak_tflops;
    const char *save_every, *checkpoint_format;
    bool dump_graph, list_optimizers, measure, stats, deterministic;
} opt = { .steps = 1000,
          .batch = 8,
          .seq = 256,
          .accumulate = 1,
          .decay_steps = -1,
          .step_size = 1000,
          .cycles = 1,
          .lr = 3e-4,
          .min_lr_ratio = 0.1,
          .gamma = 0.999,
          .schedule = "cosine",
          .optimizer = "adamw",
          .dtype = "f32",
          .beta1 = -1, /* not given: as in the optimiser's table */
          .beta2 = -1,
          .eps = -1,
          .weight_decay = -1,
          .momentum = -1,
          .dampening = -1,
          .max_grad_norm = 1,
          .dropout = -1,
          .documents = true,
          .check_tokenizer = true,
          .format = "auto",
          .eval_batches = 16,
          .log_every = 1,
          .keep = 3,
          .checkpoint_format = "safetensors",
          .peak_tflops = -1 };
static __typeof__(opt) built_in; /* the defaults, as they stood before parsing */

static const char *const formats[] = { "auto", "megatron", "llmc", "nanogpt", NULL };
static const char *const dtypes[] = { "f32", "bf16", NULL };
static const char *const checkpoint_formats[] = { "safetensors", "lmz", NULL };

static const lm_opt options[] = {
    LM_GROUP("Run"),
    LM_STR(0, "resume", &opt.resume, "RUN", "go on with a run at its newest checkpoint"),
    LM_ALSO("resume-from-checkpoint"),
    LM_CHOICE(0, "resume-schedule", &opt.resume_schedule, "HOW", lm_resume_names,
              "of the rate, with other --steps: keep extend rewarm [extend]"),
    LM_COUNT(0, "steps", &opt.steps, "N", 1, 1e15, "optimiser steps in all [1000]"),
    LM_ALSO("max-steps max-iters train-iters max-train-steps"),
    LM_INSTEAD("epochs num-epochs num-train-epochs max-epochs",
               "give --steps N: epochs x tokens of DATA / (batch size x seq-len x accumulation)"),
    LM_COUNT(0, "batch-size", &opt.batch, "N", 1, 1e9, "sequences in a micro-batch [8]"),
    LM_ALSO("per-device-train-batch-size micro-batch-size"),
    LM_INSTEAD("global-batch-size total-batch-size",
               "give --batch-size B and --gradient-accumulation-steps A: B x A sequences a step"),
    LM_COUNT(0, "seq-len", &opt.seq, "N", 1, 1e9, "tokens in a sequence [256]"),
    LM_ALSO("block-size seq-length sequence-length max-seq-length max-seq-len context-length"),
    LM_COUNT(0, "gradient-accumulation-steps", &opt.accumulate, "N", 1, 65535,
             "micro-batches in a step [1]"),
    LM_ALSO("grad-accum-steps"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "f32, or bf16 with f32 master weights [f32]"),
    LM_ALSO("torch-dtype precision"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_INSTEAD("fp16", "give --dtype bf16: it needs no loss scaling"),
    LM_REAL(0, "dropout", &opt.dropout, "P", 0, 0.999, "all rates [those of config.json]"),
    LM_FLAG(0, "document-mask", &opt.documents, "attend inside documents only [on]"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", formats,
              "of DATA: auto, megatron, llmc or nanogpt [auto]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse data of another tokenizer than the model's [on]"),
    LM_STR(0, "val", &opt.val, "SHARD", "validation tokens [DATA/val]"),
    LM_FLAG(0, "deterministic", &opt.deterministic, "the same bits again, also on a GPU"),
    LM_GROUP("Optimiser"),
    LM_STR_OF(0, "optimizer", &opt.optimizer, "NAMES", lm_optim_names,
              "NAME[:key=value,...][;PATTERN=NAME...]... [adamw]"),
    LM_ALSO("optim"),
    LM_FLAG(0, "list-optimizers", &opt.list_optimizers, "print them with their keys and stop"),
    LM_REAL(0, "lr", &opt.lr, "X", 0, 1e3, "peak learning rate [3e-4]"),
    LM_ALSO("learning-rate max-lr"),
    LM_CHOICE(0, "lr-schedule", &opt.schedule, "NAME", lm_sched_names,
              "constant linear cosine step exponential wsd [cosine]"),
    LM_ALSO("lr-scheduler-type lr-scheduler lr-decay-style"),
    LM_COUNT(0, "warmup", &opt.warmup, "N", 0, 1e15, "steps of linear warm-up [0]"),
    LM_ALSO("warmup-steps warmup-iters num-warmup-steps lr-warmup-iters lr-warmup-steps"),
    LM_INSTEAD("warmup-ratio warmup-fraction lr-warmup-fraction",
               "give --warmup N: ratio x --steps"),
    LM_REAL(0, "min-lr-ratio", &opt.min_lr_ratio, "X", 0, 1, "floor, as a share of --lr [0.1]"),
    LM_INSTEAD("min-lr", "give --min-lr-ratio X: the least learning rate / --lr"),
    LM_COUNT(0, "decay-steps", &opt.decay_steps, "N", 0, 1e15, "wsd: last steps [10 % of --steps]"),
    LM_COUNT(0, "step-size", &opt.step_size, "N", 1, 1e15, "step: steps between drops [1000]"),
    LM_REAL(0, "gamma", &opt.gamma, "X", 0, 1, "step, exponential: factor [0.999]"),
    LM_COUNT(0, "cycles", &opt.cycles, "N", 1, 1e6, "cosine: restarts [1]"),
    LM_ALSO("num-cycles"),
    LM_REAL(0, "beta1", &opt.beta1, "X", 0, 0.9999999, "first moment [of the optimiser]"),
    LM_ALSO("adam-beta1"),
    LM_REAL(0, "beta2", &opt.beta2, "X", 0, 0.9999999, "second moment [of the optimiser]"),
    LM_ALSO("adam-beta2"),
    LM_REAL(0, "eps", &opt.eps, "X", 0, 1, "epsilon [of the optimiser]"),
    LM_ALSO("adam-epsilon adam-eps epsilon"),
    LM_REAL(0, "weight-decay", &opt.weight_decay, "X", 0, 10,
            "on matrices only [of the optimiser]"),
    LM_REAL(0, "momentum", &opt.momentum, "X", 0, 0.9999999, "of the buffer [of the optimiser]"),
    LM_REAL(0, "dampening", &opt.dampening, "X", 0, 1, "of what enters the buffer [0]"),
    LM_FLAG(0, "nesterov", &opt.nesterov, "Nesterov's momentum"),
    LM_REAL(0, "max-grad-norm", &opt.max_grad_norm, "X", 0, 1e9, "clip the norm; 0: no [1]"),
    LM_ALSO("grad-clip clip-grad gradient-clip-norm gradient-clipping"),
    LM_REAL(0, "clip-value", &opt.clip_value, "X", 0, 1e9, "clip each element; 0: no [0]"),
    LM_GROUP("Checkpoints, validation, reports"),
    LM_STR(0, "save-every", &opt.save_every, "N|TIME",
           "steps (100) or time (10m); 0: at the end [30m]"),
    LM_ALSO("save-steps save-interval"),
    LM_COUNT(0, "keep", &opt.keep, "N", 0, 1e6, "newest checkpoints kept; 0: all [3]"),
    LM_ALSO("save-total-limit"),
    LM_CHOICE(0, "checkpoint-format", &opt.checkpoint_format, "FORMAT", checkpoint_formats,
              "safetensors in a folder, or lmz, compressed [safetensors]"),
    LM_COUNT(0, "eval-every", &opt.eval_every, "N", 0, 1e15, "steps; 0: never [0]"),
    LM_ALSO("eval-steps eval-interval"),
    LM_COUNT(0, "eval-batches", &opt.eval_batches, "N", 0, 1e15, "0: all of them [16]"),
    LM_ALSO("eval-iters"),
    LM_COUNT(0, "early-stop", &opt.patience, "N", 0, 1e9, "evaluations without gain; 0: off [0]"),
    LM_ALSO("early-stopping-patience"),
    LM_REAL(0, "early-stop-delta", &opt.min_delta, "X", 0, 1e9, "what counts as gain [0]"),
    LM_ALSO("early-stopping-threshold"),
    LM_COUNT(0, "log-every", &opt.log_every, "N", 1, 1e15, "steps between records [1]"),
    LM_ALSO("logging-steps log-interval"),
    LM_STR(0, "tensorboard", &opt.tensorboard, "FILE", "event file for TensorBoard"),
    LM_REAL(0, "peak-tflops", &opt.peak_tflops, "X", 0, 1e9, "for MFU; 0: none [measured]"),
    LM_STR(0, "trace", &opt.trace, "FILE", "time line of step 3, for chrome://tracing"),
    LM_FLAG(0, "stats", &opt.stats, "at the end, the time of each operator"),
    LM_FLAG(0, "measure", &opt.measure, "with --dry-run: take a few steps, say how long all take"),
    LM_FLAG(0, "dump-graph", &opt.dump_graph, "print the training graph and stop"),
    LM_END
};

static const char *const examples[] = {
    "train m0/ data/ -o run/ --steps 300 --batch-size 16 --lr 3e-3 --dtype bf16",
    "train --resume run/ --steps 600", NULL
};

static const char *const side[] = { "tensorboard", "trace", NULL };

static lm_tool tool = { .name = "train",
                        .args = "MODEL DATA | --resume RUN [DATA] | --dry-run PRESET",
                        .brief = "train a language model on token shards",
                        .opts = options,
                        .side = side,
                        .makes = LM_MAKES_FOLDER,
                        .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON |
                               LM_USE_DEVICE | LM_USE_DRY_RUN | LM_USE_METRICS | LM_USE_HISTORY,
                        .min_args = 0,
                        .max_args = 2,
                        .examples = examples };

/* Everything that main holds, so that there is one place that lets go of it. */
typedef struct {
    lm_session t;
    char *step_dir, *own_run; /* what --resume implies */
    json_t *saved;
    lm_buf options;
    char note[256]; /* what the learning rate of a run that goes on does; "": nothing to say */
} session;

static double wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- what is asked for ---- */

/* Nothing is trained or written. */
static bool plan_only(void)
{
    return tool.dry_run || opt.dump_graph;
}

/* With --resume: the checkpoint, and the options of the run for all that was not given now. */
static lm_code take_up(session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    /* The last two belong to the old run when -o begins another. */
    static const char *const not_kept[] = {
        "resume",   "resume-schedule", "dry-run",         "json",       "print-config", "force",
        "threads",  "output",          "measure",         "dump-graph", "stats",        "device",
        "progress", "trace",           "list-optimizers", "metrics",    "tensorboard",  NULL
    };
    static const char *not_kept_here[sizeof not_kept / sizeof *not_kept - 2];
    if (!plan_only() && lm_run_check_idle(opt.resume, tool.output, e))
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

static lm_code find_operands(session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (opt.resume && tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "with --resume only DATA may be named",
                  "one operand too many");
    if (opt.resume)
        return take_up(s, e);
    if (tool.argc < 1 || (tool.argc < 2 && !plan_only()))
        lm_misuse(&tool, "operands", "give MODEL and DATA, or --resume RUN", "%d given", tool.argc);
    a->model = tool.argv[0];
    a->data = tool.argc > 1 ? tool.argv[1] : NULL;
    a->run = tool.output;
    if (!a->run && !plan_only())
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

/* The optimisers that read it. */
static const char *with_hyper(const char *name, char out[512])
{
    size_t n = 0;
    *out = 0;
    for (int i = 0; lm_optim_at(i) && n < 512; i++)
        if (lm_optim_hyper(lm_optim_at(i), name) >= 0)
            n += (size_t)snprintf(out + n, 512 - n, "%s%s", n ? ", " : "", lm_optim_at(i)->name);
    return out;
}

/* A hyper-parameter that was given and that the main optimiser does not have.  What an older run has saved passes: it
 * holds the defaults of all. */
static lm_code refuse_hypers(const lm_groups *g, const lm_hyper_value *given, lm_err *e)
{
    char option[32], known[512];
    for (; given->name; given++) {
        snprintf(option, sizeof option, "--%s", given->name);
        for (char *c = option; *c; c++)
            *c = *c == '_' ? '-' : *c;
        if (lm_given(&tool, option + 2) && lm_optim_hyper(g->use[0].optim, given->name) < 0)
            return lm_fail(e, LM_EUSAGE, option, "leave it out", "serves --optimizer %s only",
                           with_hyper(given->name, known));
    }
    return LM_OK;
}

static lm_code read_optimizers(session *s, lm_err *e)
{
    lm_hyper_value given[HYPERS + 1];
    hypers_given(given);
    if (lm_groups_parse(opt.optimizer, given, opt.lr, &s->t.o.groups, e))
        return e->code;
    return refuse_hypers(&s->t.o.groups, given, e);
}

/* An option that the chosen schedule does not read is refused, not ignored.  Its default passes: a saved config holds
 * every option. */
static lm_code refuse_idle(lm_err *e)
{
    bool step = !strcmp(opt.schedule, "step"), exponential = !strcmp(opt.schedule, "exponential");
    const struct {
        bool idle;
        const char *option, *needs;
    } checks[] = {
        { !step && opt.step_size != built_in.step_size, "--step-size", "--lr-schedule step" },
        { !step && !exponential && opt.gamma != built_in.gamma, "--gamma",
          "--lr-schedule step or exponential" },
        { strcmp(opt.schedule, "cosine") && opt.cycles != built_in.cycles, "--cycles",
          "--lr-schedule cosine" },
        { strcmp(opt.schedule, "wsd") && opt.decay_steps != built_in.decay_steps, "--decay-steps",
          "--lr-schedule wsd" },
        { opt.resume_schedule && !opt.resume, "--resume-schedule", "--resume" },
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (checks[i].idle)
            return lm_fail(e, LM_EUSAGE, checks[i].option, "leave it out", "serves %s only",
                           checks[i].needs);
    return LM_OK;
}

/* Where the schedule of a run that goes on lies. */
static lm_code place_schedule(session *s, lm_err *e)
{
    const lm_resume_ask ask = { .how = opt.resume_schedule,
                                .step = s->t.ask.step,
                                .steps = opt.steps,
                                .warmup_given = lm_given(&tool, "warmup"),
                                .decay = opt.decay_steps };
    return lm_resume_schedule(s->saved, s->step_dir, &ask, &s->t.o.schedule, s->note, e);
}

static lm_code gather(session *s, lm_err *e)
{
    lm_trainer_opts *o = &s->t.o;
    if (find_operands(s, e))
        return e->code;
    lm_refuse_twice(&tool, (const char *[]){ opt.val, opt.resume }, 2);
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
    if (read_optimizers(s, e) || refuse_idle(e) || (s->saved && place_schedule(s, e)))
        return e->code;
    if (opt.measure && !tool.dry_run)
        return lm_fail(e, LM_EUSAGE, "--measure", "give --dry-run too", "serves --dry-run only");
    if (opt.patience && !opt.eval_every)
        return lm_fail(e, LM_EUSAGE, "--early-stop", "give --eval-every too",
                       "nothing is evaluated during the run");
    if (opt.val && !opt.eval_every && !opt.resume) /* a run that goes on may have it from before */
        return lm_fail(e, LM_EUSAGE, "--val", "give --eval-every too",
                       "nothing is evaluated during the run");
    return parse_save_every(o, e);
}

/* ---- inputs ---- */

/* For a plan the name of a preset is enough; a training needs a model. */
static lm_code load_preset(const char *name, json_t **out, lm_err *e)
{
    lm_presets p;
    lm_err none = { 0 };
    lm_code rc = lm_presets_find(&p, e);
    if (!rc)
        lm_preset_load((const char *const *)p.dir, name, out, NULL, &none);
    lm_presets_fini(&p);
    if (rc || (none.code && !plan_only()))
        return rc;
    if (none.code)
        *e = none;
    else if (!plan_only())
        lm_fail(e, LM_EUSAGE, name,
                "make a model of it first with init-model, or ask what it takes with --dry-run",
                "is a preset, not a model");
    return e->code;
}

static lm_code read_config(lm_session *t, lm_err *e)
{
    const char *model = t->ask.model;
    json_t *preset = NULL;
    if (!lm_path_exists(model) && strcmp(model, "-") && load_preset(model, &preset, e))
        return e->code;
    return lm_session_config(t, preset, e);
}

/* Records and reports do not go where the training reads. */
static void refuse_inputs(const lm_session *t)
{
    const char *const outputs[] = { tool.metrics ? tool.metrics : "-", opt.tensorboard, opt.trace };
    const char *const inputs[] = { t->ask.model, t->train_path, t->val_path, opt.resume };
    for (size_t o = 0; o < sizeof outputs / sizeof *outputs; o++) {
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
            if (outputs[o] && inputs[i])
                lm_refuse_same(&tool, outputs[o], inputs[i]);
        lm_refuse_ending(&tool, outputs[o], LM_MAKES_TEXT);
    }
}

static lm_code open_train(lm_session *t, lm_err *e)
{
    if (lm_session_find_data(t, e))
        return e->code;
    refuse_inputs(t);
    return lm_session_open_train(t, e);
}

/* ---- plans and summaries ---- */

/* Print what a library call laid out. */
static lm_code print_text(lm_code rc, lm_buf *text, const char *end)
{
    if (!rc)
        printf("%s%s", text->data, end);
    lm_buf_fini(text);
    return rc;
}

/* --dry-run: what the run would hold, whether that fits here, and, where asked, how long it takes. */
static lm_code print_outlook(lm_session *t, const lm_memory_plan *plan, lm_err *e)
{
    const lm_outlook_ask ask = { t->ask.lmz, opt.measure, t->ask.step, opt.keep };
    lm_outlook o;
    lm_buf text = { 0 };
    char cure[sizeof o.verdict.cure];
    if (lm_outlook_make(&t->o, t->program, &ask, plan, &o, e))
        return e->code;
    memcpy(o.verdict.cure, lm_advice_shown(o.verdict.cure, cure, sizeof cure), sizeof cure);
    if (t->ask.data && open_train(t, e)) /* data that the run would refuse */
        return e->code;
    if (opt.measure && o.verdict.fits &&
        lm_train_measured(&t->o, t->program, t->train, &tool.sink, &o.measure, e))
        return e->code;
    return tool.json ? print_text(lm_outlook_json(&o, &text, e), &text, "\n")
                     : print_text(lm_outlook_table(&o, &text, e), &text, "");
}

/* Lines of talk at the end. */
static void say_lines(lm_code rc, lm_buf *text)
{
    char *save = NULL;
    for (char *l = rc ? NULL : strtok_r(text->data, "\n", &save); l;
         l = strtok_r(NULL, "\n", &save))
        lm_say(&tool, LM_LOG_NOTICE, "%s", l);
    lm_buf_fini(text);
}

static void say_result(lm_session *t, const lm_train_result *r, const char *status)
{
    lm_err unseen = { 0 };
    lm_buf text = { 0 };
    say_lines(lm_train_result_line(r, status, &text, &unseen), &text);
    const lm_exec_time *line;
    size_t n = opt.stats ? lm_trainer_times(t->trainer, &line) : 0;
    if (n)
        say_lines(lm_train_times_table(line, n, &text, &unseen), &text);
}

static lm_code summarise(lm_session *t, const lm_train_result *r, lm_code rc, lm_err *e)
{
    const char *status = lm_train_status(r, rc);
    lm_buf text = { 0 };
    lm_err second = { 0 };
    if (lm_train_report_end(t->metrics, r, status, &second) && !rc) {
        *e = second;
        rc = second.code;
    }
    if (rc)
        return rc;
    if (r->steps_run)
        say_result(t, r, status);
    else
        lm_say(&tool, LM_LOG_NOTICE, "%s is at step %" PRId64 " already: nothing to do", t->ask.run,
               r->step);
    return tool.json ? print_text(lm_train_result_json(r, status, &text, e), &text, "\n") : LM_OK;
}

/* ---- the work ---- */

/* Before a model comes through a pipe; of a folder its opening tells. */
static lm_code look_for_data(const char *data, lm_err *e)
{
    if (data && !lm_path_is_dir(data) && lm_data_there(data, e))
        return e->code;
    return opt.val && opt.eval_every > 0 ? lm_data_there(opt.val, e) : LM_OK;
}

/* What the library needs to know of this program. */
static void introduce(session *s)
{
    lm_session_ask *a = &s->t.ask;
    a->val = opt.val;
    a->plan = plan_only();
    a->dropout = opt.dropout;
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
    a->how = lm_tool_bundle(&tool, s->t.par);
    a->tool = tool.name;
    a->argc = tool.full_argc;
    a->argv = tool.full_argv;
    a->seed = tool.seed;
    a->sink = &tool.sink;
}

static lm_code prepare(session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (gather(s, e) || look_for_data(t->ask.data, e) || lm_par_new(&t->par, tool.threads, e) ||
        lm_open_backend(&tool, t->par, opt.deterministic, &t->backend, e))
        return e->code;
    introduce(s);
    if (read_config(t, e))
        return e->code;
    if (t->backend->host_memory && t->o.precision.low == LM_DTYPE_BF16 && tool.cpu < LM_CPU_AMX)
        lm_say(&tool, LM_LOG_WARN, "no AMX here: bf16 saves memory, but its products run in f32");
    if (opt.peak_tflops >= 0)
        t->o.peak_flops = opt.peak_tflops * 1e12;
    else if (!plan_only())
        t->o.peak_flops = t->backend->peak_flops(t->backend, t->o.precision.low);
    return LM_OK;
}

static lm_code work(session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_memory_plan plan;
    lm_buf text = { 0 };
    lm_train_result r = { .loss = NAN, .val_loss = NAN, .best_val_loss = NAN, .best_step = -1 };
    if (prepare(s, e) || lm_session_program(t, &plan, e))
        return e->code;
    if (opt.dump_graph)
        return print_text(lm_program_dump(t->program, &text, e), &text, "");
    lm_train_advise(&t->o, &t->config, &tool.sink);
    if (tool.dry_run)
        return print_outlook(t, &plan, e);
    if (open_train(t, e) || lm_session_open_val(t, e) || lm_options_save(&s->options, e) ||
        lm_session_open_run(t, e))
        return e->code;
    return summarise(t, &r, lm_session_train(t, &plan, &r, e), e);
}

static lm_code list_optimizers(lm_err *e)
{
    lm_buf text = { 0 };
    return print_text((tool.json ? lm_optims_json : lm_optims_table)(&text, e), &text, "");
}

static void let_go(session *s, lm_err *e)
{
    lm_session_close(&s->t, e);
    lm_close_backend(&tool, s->t.backend);
    lm_par_free(s->t.par);
    lm_buf_fini(&s->options);
    lm_free(s->step_dir);
    lm_free(s->own_run);
}

int main(int argc, char **argv)
{
    session s = { .t.ask.from = -1 };
    lm_err e = { 0 };
    built_in = opt;
    lm_begin(&tool, argc, argv);
    if (!plan_only() && !opt.list_optimizers) /* the run is the product, not the lines about it */
        lm_outlast_readers(&tool);
    if (opt.list_optimizers)
        list_optimizers(&e);
    else
        work(&s, &e);
    let_go(&s, &e);
    if (e.code)
        lm_complain(&tool, &e);
    json_decref(s.saved); /* the options borrow from it */
    return lm_end(&tool);
}
