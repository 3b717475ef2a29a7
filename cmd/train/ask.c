/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of train into the structures of the library. */
#include <stdio.h>
#include <string.h>

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

/* Options without effect because another one is missing. */
static lm_code refuse_alone(lm_err *e)
{
    if (opt.resume_schedule && !opt.resume)
        return lm_fail(e, LM_EUSAGE, "--resume-schedule", "leave it out", "serves --resume only");
    if (opt.measure && !tool.dry_run)
        return lm_fail(e, LM_EUSAGE, "--measure", "give --dry-run too", "serves --dry-run only");
    if (opt.val && !opt.loop.eval_every && !opt.resume) /* a resumed run may have it from before */
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
                                .decay = opt.loop.decay_steps,
                                .lr = s->t.o.groups.use[0].optim->rate };
    return lm_resume_schedule(s->saved, s->step_dir, &ask, &s->t.o.schedule, s->note, e);
}

/* What the session needs besides the operands and the numbers of the training. */
static void ask_session(train_session *s)
{
    lm_session_ask *a = &s->t.ask;
    a->val = opt.val;
    a->plan = train_plan_only();
    a->dropout = opt.dropout;
    a->kind = lm_tokens_kind_find(opt.format);
    a->check_tokenizer = opt.check_tokenizer;
    lm_loop_session(&tool, &opt.loop, a);
    a->note = s->note;
    a->options = &s->options;
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
    };
}

lm_code train_ask(train_session *s, lm_err *e)
{
    if (find_operands(s, e))
        return e->code;
    lm_refuse_twice(&tool, (const char *[]){ opt.val, opt.resume }, 2);
    ask_session(s);
    ask_training(&s->t.o);
    if (lm_loop_ask(&tool, &opt.loop, -1, opt.steps, &s->t.o, e) || refuse_alone(e))
        return e->code;
    return s->saved ? place_schedule(s, e) : LM_OK;
}
