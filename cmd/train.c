/* SPDX-License-Identifier: Apache-2.0 */
/* train -- pretraining and continued training.  See man/man1/train.1.
 *
 * The options are in train/options.c, their translation for the library in train/ask.c; here are the inputs, the order
 * of the work, and what is printed. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "common/device.h"
#include "common/presets.h"
#include "format/folder_run.h"
#include "model/preset.h"
#include "train/advice.h"
#include "train/data.h"
#include "train/options.h"
#include "train/outlook.h"
#include "train/report.h"

/* ---- inputs ---- */

/* A preset replaces the model in a plan; a training with a preset is refused. */
static lm_code load_preset(const char *name, json_t **out, lm_err *e)
{
    lm_presets p;
    lm_err none = { 0 };
    lm_code rc = lm_presets_find(&p, e);
    if (!rc)
        lm_preset_load((const char *const *)p.dir, name, out, NULL, &none);
    lm_presets_fini(&p);
    if (rc || (none.code && !train_plan_only()))
        return rc;
    if (none.code)
        *e = none;
    else if (!train_plan_only())
        lm_fail(e, LM_EUSAGE, name,
                "make a model of it first with init-model, or ask what it takes with --dry-run",
                "is a preset, not a model");
    if (e->code) {
        json_decref(*out);
        *out = NULL;
    }
    return e->code;
}

static lm_code read_config(lm_session *t, lm_err *e)
{
    const char *model = t->ask.model;
    json_t *preset = NULL;
    if (!t->ask.resume && !lm_path_exists(model) && strcmp(model, "-") &&
        load_preset(model, &preset, e))
        return e->code;
    return lm_session_config(t, preset, e);
}

/* Records and reports overwrite no input. */
static void refuse_inputs(const lm_session *t)
{
    const char *const outputs[] = { tool.metrics ? tool.metrics : "-", opt.loop.tensorboard,
                                    opt.loop.trace };
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

/* Print the text that a library call with the result rc made. */
static lm_code print_text(lm_code rc, lm_buf *text, const char *end)
{
    if (!rc)
        printf("%s%s", text->data, end);
    lm_buf_fini(text);
    return rc;
}

/* --dry-run: the memory of the run, whether it fits here, and with --measure its time. */
static lm_code print_outlook(lm_session *t, const lm_memory_plan *plan, lm_err *e)
{
    const lm_outlook_ask ask = { t->ask.lmz, opt.measure, t->ask.step, opt.loop.keep };
    lm_outlook o;
    lm_buf text = { 0 };
    char cure[sizeof o.verdict.cure];
    if (lm_outlook_make(&t->o, t->program, &ask, plan, &o, e))
        return e->code;
    memcpy(o.verdict.cure, lm_advice_shown(o.verdict.cure, cure, sizeof cure), sizeof cure);
    if (t->ask.data && open_train(t, e)) /* fails for data that the run would refuse */
        return e->code;
    if (opt.measure && o.verdict.fits &&
        lm_train_measured(&t->o, t->program, t->train, &tool.sink, &o.measure, e))
        return e->code;
    return tool.json ? print_text(lm_outlook_json(&o, &text, e), &text, "\n")
                     : print_text(lm_outlook_table(&o, &text, e), &text, "");
}

/* One message for each line of the text. */
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
    size_t n = opt.loop.stats ? lm_trainer_times(t->trainer, &line) : 0;
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

/* Called before a model is read from a pipe.  A folder is checked when it is opened. */
static lm_code check_data_exists(const char *data, lm_err *e)
{
    if (data && !lm_path_is_dir(data) && lm_data_there(data, e))
        return e->code;
    return opt.val && opt.loop.eval_every > 0 ? lm_data_there(opt.val, e) : LM_OK;
}

static lm_code prepare(train_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (train_ask(s, e) || check_data_exists(t->ask.data, e) ||
        lm_par_new(&t->par, tool.threads, e) ||
        lm_open_backend(&tool, t->par, opt.deterministic, &t->backend, e))
        return e->code;
    t->ask.how = lm_tool_bundle(&tool, t->par);
    if (read_config(t, e))
        return e->code;
    if (t->backend->host_memory && t->o.precision.low == LM_DTYPE_BF16 && tool.cpu < LM_CPU_AMX)
        lm_say(&tool, LM_LOG_WARN, "no AMX here: bf16 saves memory, but its products run in f32");
    return LM_OK;
}

static lm_code work(train_session *s, lm_err *e)
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

static void close_all(train_session *s, lm_err *e)
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
    train_session s = { .t.ask.from = -1 };
    lm_err e = { 0 };
    lm_begin(&tool, argc, argv);
    if (!train_plan_only() &&
        !opt.loop.list_optimizers) /* the run is the product, not standard output */
        lm_outlast_readers(&tool);
    if (opt.loop.list_optimizers)
        list_optimizers(&e);
    else
        work(&s, &e);
    close_all(&s, &e);
    if (e.code)
        lm_complain(&tool, &e);
    json_decref(s.saved); /* the options borrow from it */
    return lm_end(&tool);
}
