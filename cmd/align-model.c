/* SPDX-License-Identifier: Apache-2.0 */
/* align-model -- training on preferences.  See man/man1/align-model.1.
 *
 * The options are in align-model/options.c, their translation for the library in align-model/ask.c, the data in
 * align-model/answers.c; here are the order of the work, and what is printed. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "align-model/options.h"
#include "base/mem.h"
#include "base/stop.h"
#include "common/device.h"
#include "train/advice.h"
#include "train/outlook.h"
#include "train/report.h"

/* ---- plans and summaries ---- */

/* Print the text that a library call with the result rc made. */
static lm_code print_text(lm_code rc, lm_buf *text, const char *end)
{
    if (!rc)
        printf("%s%s", text->data, end);
    lm_buf_fini(text);
    return rc;
}

/* --dry-run: the memory of the run, and whether it fits here. */
static lm_code print_outlook(lm_session *t, const lm_memory_plan *plan, lm_err *e)
{
    const lm_outlook_ask ask = { t->ask.lmz, false, t->ask.step, opt.loop.keep };
    lm_outlook o;
    lm_buf text = { 0 };
    char cure[sizeof o.verdict.cure];
    if (lm_outlook_make(&t->o, t->program, &ask, plan, &o, e))
        return e->code;
    memcpy(o.verdict.cure, lm_advice_shown(o.verdict.cure, cure, sizeof cure), sizeof cure);
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

/* Records and reports overwrite no input. */
static void refuse_inputs(const lm_session *t)
{
    const char *const outputs[] = { tool.metrics ? tool.metrics : "-", opt.loop.tensorboard,
                                    opt.loop.trace };
    const char *const inputs[] = { t->ask.model, t->ask.data, opt.val, opt.resume };
    for (size_t o = 0; o < sizeof outputs / sizeof *outputs; o++) {
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
            if (outputs[o] && inputs[i])
                lm_refuse_same(&tool, outputs[o], inputs[i]);
        lm_refuse_ending(&tool, outputs[o], LM_MAKES_TEXT);
    }
}

/* A reward model is made of a language model; any other loss needs one. */
static lm_code make_head(align_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (lm_align_kind_of(&s->spec) == LM_ALIGN_SCORES)
        return lm_config_make_scores(&t->config, t->config_json, e);
    return t->config.scores ? lm_fail(e, LM_EUSAGE, t->ask.model, "use --loss reward",
                                      "gives scores to texts: it is no language model")
                            : LM_OK;
}

static lm_code prepare(align_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (align_ask(s, e))
        return e->code;
    refuse_inputs(t);
    if (lm_par_new(&t->par, tool.threads, e) ||
        lm_open_backend(&tool, t->par, opt.deterministic, &t->backend, e))
        return e->code;
    t->ask.how = lm_tool_bundle(&tool, t->par);
    t->ask.plan = tool.dry_run && !t->ask.data; /* data need the tokenizer of the model */
    if (lm_session_config(t, NULL, e))
        return e->code;
    t->ask.plan = tool.dry_run;
    if (make_head(s, e) || align_choose_adapter(s, e))
        return e->code;
    if (t->backend->host_memory && t->o.precision.low == LM_DTYPE_BF16 && tool.cpu < LM_CPU_AMX)
        lm_say(&tool, LM_LOG_WARN, "no AMX here: bf16 saves memory, but its products run in f32");
    return LM_OK;
}

static lm_code open_data(align_session *s, lm_err *e)
{
    if ((s->samples ? align_open_prompts(s, e) : align_open_answers(s, e)) ||
        align_open_teacher(s, e))
        return e->code;
    if (s->t.ask.data && !lm_stopping() &&
        (s->samples         ? align_make_policy(s, e)
         : align_distils(s) ? align_make_distilling(s, e)
                            : align_make_objective(s, e)))
        return e->code;
    if (s->samples)
        return align_schedule(s, s->prompts.n * opt.iterations, e);
    if (s->gkd)
        return align_schedule(s, lm_text_answers_count(s->train), e);
    return align_schedule(s, s->offline ? lm_offline_records(s->offline) : 0, e);
}

static lm_code work(align_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_memory_plan plan;
    lm_train_result r = { .loss = NAN, .val_loss = NAN, .best_val_loss = NAN, .best_step = -1 };
    if (prepare(s, e) || open_data(s, e) || lm_session_program(t, &plan, e) ||
        align_add_memory(s, &plan, e) || align_add_teacher(s, &plan, e))
        return e->code;
    align_say_adapter(s);
    lm_train_advise(&t->o, &t->config, &tool.sink);
    if (tool.dry_run)
        return print_outlook(t, &plan, e);
    if (lm_stopping())
        return LM_OK;
    if (lm_options_save(&s->options, e) || align_keep_base(s, e) || lm_session_open_run(t, e) ||
        align_open_log(s, e))
        return e->code;
    return summarise(t, &r, lm_session_train(t, &plan, &r, e), e);
}

static lm_code print_lists(lm_err *e)
{
    lm_buf text = { 0 };
    if (opt.list_losses)
        return print_text(lm_align_list(true, &text, e), &text, "");
    if (opt.list_rewards)
        return print_text(lm_reward_list(&text, e), &text, "");
    return print_text((tool.json ? lm_optims_json : lm_optims_table)(&text, e), &text, "");
}

static void close_all(align_session *s, lm_err *e)
{
    lm_session_close(&s->t, e);
    align_close_rollouts(s);
    align_close_teacher(s);
    align_close_answers(s);
    align_close_adapter(s);
    lm_close_backend(&tool, s->t.backend);
    lm_par_free(s->t.par);
    lm_buf_fini(&s->options);
    lm_free(s->step_dir);
    lm_free(s->own_run);
    lm_free(s->reference);
    lm_free(s->kept);
}

int main(int argc, char **argv)
{
    align_session s = { .t.ask.from = -1 };
    lm_err e = { 0 };
    bool lists;
    lm_begin(&tool, argc, argv);
    lists = opt.loop.list_optimizers || opt.list_losses || opt.list_rewards;
    if (!tool.dry_run && !lists) /* the run is the product, not standard output */
        lm_outlast_readers(&tool);
    if (lists)
        print_lists(&e);
    else
        work(&s, &e);
    close_all(&s, &e);
    if (e.code)
        lm_complain(&tool, &e);
    json_decref(s.saved); /* the options borrow from it */
    return lm_end(&tool);
}
