/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of align-model into the structures of the library. */
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "align-model/options.h"
#include "base/mem.h"
#include "format/folder_run.h"
#include "train/resume.h"
#include "train/run.h"

/* ---- operands ---- */

/* With --resume: find the checkpoint, and set all options that were not given from those of the run. */
static lm_code resume_run(align_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    /* The last two belong to the old run when -o begins another. */
    static const char *const not_kept[] = {
        "resume",          "resume-schedule", "dry-run",      "json",    "print-config", "force",
        "threads",         "output",          "stats",        "device",  "progress",     "trace",
        "list-optimizers", "list-losses",     "list-rewards", "metrics", "tensorboard",  NULL
    };
    static const char *not_kept_here[sizeof not_kept / sizeof *not_kept - 2];
    if (!tool.dry_run && lm_run_check_idle(opt.resume, tool.output, e))
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
        return lm_fail(e, LM_EUSAGE, s->step_dir, "name the data: align-model --resume RUN DATA",
                       "does not say which data it was trained on");
    char folder[PATH_MAX];
    return lm_path_folder(s->step_dir, folder, e) ||
                   lm_path_join(&s->kept, folder, LM_RUN_REFERENCE, e)
               ? e->code
               : LM_OK;
}

static lm_code find_operands(align_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (opt.resume && tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "with --resume only DATA may be named",
                  "one operand too many");
    if (opt.resume)
        return resume_run(s, e);
    if (tool.argc < 1 || (tool.argc < 2 && !tool.dry_run))
        lm_misuse(&tool, "operands", "give MODEL and DATA, or --resume RUN", "%d given", tool.argc);
    a->model = tool.argv[0];
    a->data = tool.argc > 1 ? tool.argv[1] : NULL;
    a->run = tool.output;
    if (!a->run && !tool.dry_run)
        lm_misuse(&tool, "--output", "name the folder of the run with -o RUN", "is missing");
    if (tool.output && !strcmp(tool.output, "-"))
        lm_misuse(&tool, "--output", "name the folder of the run with -o RUN",
                  "a run is a folder, not a stream");
    return LM_OK;
}

/* ---- the loss ---- */

static lm_code read_loss(align_session *s, lm_err *e)
{
    const struct {
        const char *key, *value;
    } given[] = {
        { "beta", opt.beta },
        { "label_smoothing", opt.smoothing },
        { "f_divergence_type", opt.f_divergence },
        { "f_alpha_divergence_coef", opt.f_alpha },
        { "ld_alpha", opt.ld_alpha },
        { "average", opt.average },
        { "simpo_gamma", opt.gamma },
        { "cpo_alpha", opt.cpo_alpha },
        { "alpha", opt.alpha },
        { "desirable_weight", opt.desirable },
        { "undesirable_weight", opt.undesirable },
        { "lambda", opt.lambda },
        { "temperature", opt.distill_temperature },
    };
    if (lm_align_parse(opt.loss, &s->spec, e) || align_ask_teacher(s, e))
        return e->code;
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (given[i].value && lm_align_set(&s->spec, given[i].key, given[i].value, e))
            return e->code;
    lm_align_kind kind = lm_align_kind_of(&s->spec);
    if (align_ask_rollouts(s, e) || s->samples || kind != LM_ALIGN_POLICY)
        return e->code;
    return lm_fail(e, LM_EUSAGE, "--loss", "use one of the losses of pairs or judged answers",
                   "%s is not a loss of given answers", s->spec.use[0].loss->name);
}

/* ---- the training ---- */

static lm_code refuse_alone(const align_session *s, lm_err *e)
{
    if (opt.resume_schedule && !opt.resume)
        return lm_fail(e, LM_EUSAGE, "--resume-schedule", "leave it out", "serves --resume only");
    if (opt.val && !opt.loop.eval_every && !opt.resume) /* a resumed run may have it from before */
        return lm_fail(e, LM_EUSAGE, "--val", "give --eval-every too",
                       "nothing is evaluated during the run");
    if (opt.loop.eval_every && !opt.val)
        return lm_fail(e, LM_EUSAGE, "--eval-every", "name records with --val",
                       "there are none to evaluate");
    (void)s;
    return LM_OK;
}

static lm_code name_reference(align_session *s, lm_err *e)
{
    if (s->samples || !lm_align_reads_ref(&s->spec) || !s->t.ask.run) {
        lm_free(s->kept);
        s->kept = NULL;
        return LM_OK;
    }
    return lm_path_join(&s->reference, s->t.ask.run, LM_RUN_REFERENCE, e);
}

static void ask_session(align_session *s)
{
    lm_session_ask *a = &s->t.ask;
    a->val = opt.val;
    a->plan = tool.dry_run;
    a->dropout = 0;
    lm_loop_session(&tool, &opt.loop, a);
    a->note = s->note;
    a->options = &s->options;
}

lm_code align_ask(align_session *s, lm_err *e)
{
    if (find_operands(s, e))
        return e->code;
    lm_refuse_twice(&tool, (const char *[]){ opt.val, opt.resume }, 2);
    ask_session(s);
    s->t.o = (lm_trainer_opts){ .accumulate = 1,
                                .precision = { .low = lm_dtype_parse(opt.dtype) },
                                .documents = true,
                                .objective = true };
    if (align_ask_adapter(s, e) || read_loss(s, e) || refuse_alone(s, e) || name_reference(s, e))
        return e->code;
    return opt.map ? lm_text_record_map_add(&s->map, opt.map, e) : LM_OK;
}

lm_code align_schedule(align_session *s, int64_t records, lm_err *e)
{
    lm_trainer_opts *o = &s->t.o;
    int64_t steps = opt.steps;
    if (!steps)
        steps = (int64_t)ceil(opt.epochs * (double)records / (double)opt.batch - 1e-9);
    if (steps < 1)
        steps = 1;
    if (lm_loop_ask(&tool, &opt.loop, align_rate(s), steps, o, e) ||
        lm_tuning_schedule(&s->tuning, &s->t, e))
        return e->code;
    if (!s->saved)
        return LM_OK;
    const lm_resume_ask ask = { .how = opt.resume_schedule,
                                .step = s->t.ask.step,
                                .steps = steps,
                                .warmup_given = lm_given(&tool, "warmup"),
                                .decay = opt.loop.decay_steps,
                                .lr = align_rate(s) };
    return lm_resume_schedule(s->saved, s->step_dir, &ask, &o->schedule, s->note, e);
}
