/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of peft-tune into the structures of the library. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "format/folder_run.h"
#include "peft-tune/options.h"
#include "train/resume.h"
#include "train/run.h"

bool tune_plan_only(void)
{
    return tool.dry_run || opt.dump_graph;
}

/* The string of the saved options, NULL if there is none. */
static const char *saved_text(const tune_session *s, const char *key)
{
    return json_string_value(json_object_get(s->saved, key));
}

/* With --resume: find the checkpoint, and set all options that were not given from those of the run. */
static lm_code resume_run(tune_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    /* The last two belong to the old run when -o begins another. */
    static const char *const not_kept[] = {
        "resume",       "resume-schedule", "dry-run",     "json",    "print-config",
        "force",        "threads",         "output",      "measure", "dump-graph",
        "stats",        "device",          "progress",    "trace",   "list-optimizers",
        "list-methods", "metrics",         "tensorboard", NULL
    };
    static const char *not_kept_here[sizeof not_kept / sizeof *not_kept - 2];
    if (!tune_plan_only() && lm_run_check_idle(opt.resume, tool.output, e))
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
    a->resume = s->step_dir;
    if (!lm_tuning_recipe_find(opt.method, &s->recipe))
        return lm_fail(e, LM_EFORMAT, s->step_dir, NULL, "was made by an unknown method '%s'",
                       opt.method);
    a->model = lm_tuning_recipe_adapts(&s->recipe) ? saved_text(s, "base") : s->step_dir;
    a->data = tool.argc > 0 ? tool.argv[0] : saved_text(s, "data");
    if (!a->model || !a->data)
        return lm_fail(e, LM_EUSAGE, s->step_dir, "name a run of peft-tune",
                       "does not say which model was tuned on which data");
    return LM_OK;
}

static lm_code find_operands(tune_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (!opt.resume && tool.argc > 2)
        lm_misuse(&tool, tool.argv[2], "give one MODEL and one DATA", "one operand too many");
    if (opt.share > 0)
        lm_misuse(&tool, "--share", "leave it out", "serves --unmerge, --to-lora and --combine");
    if (opt.resume && tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "with --resume only DATA may be named",
                  "one operand too many");
    if (opt.resume)
        return resume_run(s, e);
    if (tool.argc < 1 || (tool.argc < 2 && !tune_plan_only()))
        lm_misuse(&tool, "operands", "give MODEL and DATA, or --resume RUN", "%d given", tool.argc);
    a->model = tool.argv[0];
    a->data = tool.argc > 1 ? tool.argv[1] : NULL;
    a->run = tool.output;
    if (!a->run && !tune_plan_only())
        lm_misuse(&tool, "--output", "name the folder of the adapter with -o FOLDER", "is missing");
    if (tool.output && !strcmp(tool.output, "-"))
        lm_misuse(&tool, "--output", "name the folder of the adapter with -o FOLDER",
                  "a run is a folder, not a stream");
    return LM_OK;
}

/* Options without effect because another one is missing. */
static lm_code refuse_alone(lm_err *e)
{
    if (opt.resume_schedule && !opt.resume)
        return lm_fail(e, LM_EUSAGE, "--resume-schedule", "leave it out", "serves --resume only");
    if (opt.val && !opt.loop.eval_every && !opt.resume)
        return lm_fail(e, LM_EUSAGE, "--val", "give --eval-every too",
                       "nothing is evaluated during the run");
    if (opt.loop.eval_every && !opt.val)
        return lm_fail(e, LM_EUSAGE, "--eval-every", "give --val FILE too",
                       "there are no validation data");
    return LM_OK;
}

static lm_code find_recipe(tune_session *s, lm_err *e)
{
    static const struct {
        const char *name;
        bool saved; /* also of an adapter that is read */
    } of_adapters[] = { { "rank", true },
                        { "alpha", true },
                        { "adapter-dropout", true },
                        { "target", true },
                        { "exclude", true },
                        { "layers", true },
                        { "set", true },
                        { "modules-to-save", true },
                        { "init-adapter", false },
                        { "lora-plus-ratio", false } };
    const char *near = lm_nearest(opt.method, lm_tuning_recipe_names());
    char todo[80] = "see --list-methods", where[40];
    if (near)
        snprintf(todo, sizeof todo, "did you mean '%s'?", near);
    if (!lm_tuning_recipe_find(opt.method, &s->recipe))
        return lm_fail(e, LM_EUSAGE, "--method", todo, "no method '%s'", opt.method);
    for (size_t i = 0; i < sizeof of_adapters / sizeof *of_adapters; i++) {
        bool given = lm_given(&tool, of_adapters[i].name);
        snprintf(where, sizeof where, "--%s", of_adapters[i].name);
        if (given && !lm_tuning_recipe_adapts(&s->recipe))
            return lm_fail(e, LM_EUSAGE, where, "leave it out", "method '%s' has no adapter",
                           opt.method);
        if (given && of_adapters[i].saved && (opt.init_adapter || opt.resume))
            return lm_fail(e, LM_EUSAGE, where, "leave it out",
                           "the saved adapter's configuration says it");
    }
    if (opt.train && lm_tuning_recipe_adapts(&s->recipe))
        return lm_fail(e, LM_EUSAGE, "--train", "choose --method full, or give --modules-to-save",
                       "serves no adapter");
    return LM_OK;
}

lm_code tune_ask(tune_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (find_operands(s, e))
        return e->code;
    lm_refuse_twice(&tool, (const char *[]){ opt.val, opt.resume }, 2);
    a->val = opt.val;
    a->dropout = -1;
    a->note = s->note;
    a->options = &s->options;
    lm_loop_session(&tool, &opt.loop, a);
    if (tune_plan_only()) /* nothing is measured; the model is opened for its modules */
        a->peak_flops = 0;
    if (opt.map && lm_text_record_map_add(&s->map, opt.map, e))
        return e->code;
    return refuse_alone(e) || find_recipe(s, e) ? e->code : LM_OK;
}

/* Without adapter: the tensors that match. */
static lm_code choose_tensors(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    const char *patterns = opt.train ? opt.train : s->recipe.train;
    if (!strcmp(patterns, "*"))
        return LM_OK;
    if (lm_tune_partial_make(&t->config, patterns, &s->part, e))
        return e->code;
    t->o.build.trainable = lm_tune_partial_trains;
    t->o.build.ctx = &s->part;
    return LM_OK;
}

/* The configuration: that of a saved adapter, or a new one. */
static lm_code read_config(tune_session *s, lm_err *e)
{
    const lm_session_ask *a = &s->t.ask;
    const char *saved = a->resume ? a->resume : opt.init_adapter;
    const lm_tuning_ask ask = { .recipe = s->recipe,
                                .base = a->model,
                                .model = &s->t.config,
                                .rank = opt.rank,
                                .alpha = opt.alpha,
                                .dropout = opt.adapter_dropout,
                                .target = opt.target,
                                .exclude = opt.exclude,
                                .layers = opt.layers,
                                .save = opt.save,
                                .set = opt.set.v,
                                .n_set = opt.set.n };
    return saved ? lm_tuning_open(saved, &a->how, &s->files, &s->first, &s->config, e)
                 : lm_tuning_config(&ask, &s->config, e);
}

static lm_code choose_adapter(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    const char *where = t->ask.resume      ? t->ask.resume
                        : opt.init_adapter ? opt.init_adapter
                                           : "adapter";
    if (read_config(s, e))
        return e->code;
    if (t->ask.resume)
        lm_tuning_resume(s->config, s->first);
    json_t *config = s->config;
    s->config = NULL;
    if (lm_tuning_new(config, where, t->source, &t->config, &s->tuning, e))
        return e->code;
    s->tuning.base = t->source;
    s->tuning.seed = (uint64_t)tool.seed;
    s->tuning.first = t->ask.resume ? NULL : s->first;
    if (lm_tuning_ids(&s->tuning, s->first, e))
        return e->code;
    lm_tuning_build(&s->tuning, &t->o.build);
    t->adapter.config = s->tuning.text.data;
    t->adapter.start = lm_tuning_start;
    t->adapter.fold = lm_tuning_fold;
    t->adapter.ctx = &s->tuning;
    s->maker.virtual_first = t->config.vocab;
    s->maker.virtuals = lm_attach_virtual(s->tuning.attach);
    return LM_OK;
}

lm_code tune_choose(tune_session *s, lm_err *e)
{
    lm_build *b = &s->t.o.build;
    const char *format = strcmp(opt.base_format, "auto") != 0 ? opt.base_format : s->recipe.format;
    bool paged =
        opt.states_in[0] == 'h' || (opt.states_in[0] == 'a' && !strcmp(s->recipe.name, "qlora"));
    s->t.o.states_in = opt.states_in[0] == 'f' ? LM_STATES_FILE
                       : paged                 ? LM_STATES_HOST
                                               : LM_STATES_NEAR;
    s->t.o.states_dir = s->t.ask.run;
    b->codes = s->t.source;
    if (format && lm_format_find(format, NULL, &b->frozen_format, e)) {
        lm_err_in(e, "--base-format");
        return e->code;
    }
    return lm_tuning_recipe_adapts(&s->recipe) ? choose_adapter(s, e) : choose_tensors(s, e);
}

/* The type of the computation: that of the model's files, when it is not given. */
static lm_dtype pick_dtype(const lm_session *t)
{
    const json_t *c = lm_model_source_config(t->source);
    const char *of = json_string_value(json_object_get(c, "torch_dtype"));
    of = of ? of : json_string_value(json_object_get(c, "dtype"));
    if (strcmp(opt.dtype, "auto") != 0)
        return lm_dtype_parse(opt.dtype);
    return of && (!strcmp(of, "bfloat16") || !strcmp(of, "float16")) ? LM_DTYPE_BF16 : LM_DTYPE_F32;
}

void tune_ask_shape(tune_session *s)
{
    lm_session *t = &s->t;
    lm_trainer_opts *o = &t->o;
    o->batch = opt.batch;
    o->seq = opt.seq;
    if (!lm_given(&tool, "seq-len") && !opt.resume && t->config.max_positions > 0 &&
        t->config.max_positions < o->seq)
        o->seq = opt.seq = t->config.max_positions;
    o->accumulate = opt.accumulate;
    o->precision.low = pick_dtype(t);
    o->documents = opt.packing;
    o->dropout = true;
}

/* AdamW as adapters are trained: no decay, the usual second moment. */
static lm_loop_args loop_args(void)
{
    lm_loop_args a = opt.loop;
    if (strcmp(a.optimizer, "adamw") != 0)
        return a;
    a.weight_decay = a.weight_decay < 0 ? 0 : a.weight_decay;
    a.beta2 = a.beta2 < 0 ? 0.999 : a.beta2;
    return a;
}

/* With LoRA+ a group of its own for B. */
static lm_code add_plus(tune_session *s, lm_loop_args *a, lm_err *e)
{
    double plus = opt.plus > 0 ? opt.plus : s->recipe.plus;
    double rate = a->lr >= 0 ? a->lr : s->recipe.rate;
    if (plus <= 1)
        return LM_OK;
    if (!s->recipe.method || strcmp(s->recipe.method, "lora") != 0)
        return lm_fail(e, LM_EUSAGE, "--lora-plus-ratio", "leave it out", "serves lora only");
    if (strchr(a->optimizer, ';'))
        return lm_fail(e, LM_EUSAGE, "--optimizer", "name one optimiser for all tensors",
                       "its groups and those of LoRA+ exclude each other");
    lm_code rc =
        lm_buf_addf(&s->groups, e, "%s;*lora_B*|*lora_embedding_B*=%s%slr=%.17g", a->optimizer,
                    a->optimizer, strchr(a->optimizer, ':') ? "," : ":", rate * plus);
    a->optimizer = s->groups.data;
    return rc;
}

lm_code tune_ask_steps(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_loop_args a = loop_args();
    double rate = s->recipe.rate;
    if (add_plus(s, &a, e))
        return e->code;
    double windows = s->data.examples ? (double)s->data.pack.windows : 0,
           a_step = (double)(opt.batch * opt.accumulate);
    int64_t steps = opt.steps > 0 ? opt.steps : (int64_t)ceil(opt.epochs * windows / a_step);
    lm_trainer_opts shape = t->o;
    if (steps < 1)
        steps = 1;
    if (lm_loop_ask(&tool, &a, rate, steps, &shape, e))
        return e->code;
    t->o = shape;
    if (lm_tuning_schedule(&s->tuning, t, e))
        return e->code;
    if (!s->saved)
        return LM_OK;
    const lm_resume_ask ask = { .how = opt.resume_schedule,
                                .step = t->ask.step,
                                .steps = steps,
                                .warmup_given = lm_given(&tool, "warmup"),
                                .decay = a.decay_steps,
                                .lr = rate };
    return lm_resume_schedule(s->saved, s->step_dir, &ask, &t->o.schedule, s->note, e);
}

/* ---- what checkpoints keep besides the options ---- */

static void show_digest(const tune_session *s, char out[24])
{
    snprintf(out, 24, "%016" PRIx64, lm_text_examples_digest(s->data.examples));
}

lm_code tune_check_data(const tune_session *s, lm_err *e)
{
    char now[24];
    const char *was = saved_text(s, "data_digest");
    if (!was)
        return LM_OK;
    show_digest(s, now);
    if (!strcmp(was, now) || tool.argc > 0)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, s->t.ask.data,
                   "restore them, or name the data to go on with: peft-tune --resume RUN DATA",
                   "the data are no longer those of the run");
}

lm_code tune_keep(tune_session *s, lm_err *e)
{
    json_t *o = NULL;
    char digest[24];
    lm_jw w;
    if (lm_options_save(&s->options, e) ||
        lm_json_parse(s->options.data, s->options.len, "options", &o, e))
        return e->code;
    show_digest(s, digest);
    json_object_set_new(o, "data_digest", json_string(digest));
    lm_code rc = lm_run_keep_path(o, "base", s->t.ask.model, e);
    s->options.len = 0;
    lm_jw_begin(&w, &s->options, 0, e);
    lm_jw_json(&w, NULL, o);
    json_decref(o);
    return rc ? rc : lm_jw_end(&w);
}
