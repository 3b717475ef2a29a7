/* SPDX-License-Identifier: Apache-2.0 */
/* training_say.c -- what tools that train print: plans, results, lists. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/training.h"
#include "train/advice.h"
#include "train/report.h"

/* ---- plans ---- */

lm_code lm_training_outlook(const lm_loop_args *a, const lm_session *s, const lm_memory_plan *plan,
                            bool measure, lm_outlook *out, lm_err *e)
{
    const lm_outlook_ask ask = { s->ask.lmz, measure, s->ask.step, a->keep };
    char cure[sizeof out->verdict.cure];
    if (lm_outlook_make(&s->o, s->program, &ask, plan, out, e))
        return e->code;
    memcpy(out->verdict.cure, lm_advice_shown(out->verdict.cure, cure, sizeof cure), sizeof cure);
    return LM_OK;
}

lm_code lm_training_print_outlook(const lm_tool *t, const lm_outlook *o, lm_err *e)
{
    lm_buf text = { 0 };
    return t->json ? lm_print_text(lm_outlook_json(o, t->plans ? lm_options_plan : NULL, &text, e),
                                   &text, "\n")
                   : lm_print_text(lm_outlook_table(o, &text, e), &text, "");
}

lm_code lm_training_tell_outlook(const lm_tool *t, const lm_loop_args *a, const lm_session *s,
                                 const lm_memory_plan *plan, lm_err *e)
{
    lm_outlook o = { 0 };
    if (!lm_training_outlook(a, s, plan, false, &o, e))
        lm_training_print_outlook(t, &o, e);
    lm_outlook_fini(&o);
    return e->code;
}

lm_code lm_training_list_optimizers(const lm_tool *t, lm_err *e)
{
    lm_buf text = { 0 };
    return lm_print_text((t->json ? lm_optims_json : lm_optims_table)(&text, e), &text, "");
}

/* ---- results ---- */

/* One message for each line of the text. */
static void say_lines(lm_tool *t, lm_code rc, lm_buf *text)
{
    char *save = NULL;
    for (char *l = rc ? NULL : strtok_r(text->data, "\n", &save); l;
         l = strtok_r(NULL, "\n", &save))
        lm_say(t, LM_LOG_NOTICE, "%s", l);
    lm_buf_fini(text);
}

static void say_result(lm_tool *t, const lm_loop_args *a, lm_session *s, const lm_train_result *r,
                       const char *status)
{
    lm_err unseen = { 0 };
    lm_buf text = { 0 };
    say_lines(t, lm_train_result_line(r, status, &text, &unseen), &text);
    const lm_exec_time *line;
    size_t n = a->stats ? lm_trainer_times(s->trainer, &line) : 0;
    if (n)
        say_lines(t, lm_train_times_table(line, n, &text, &unseen), &text);
}

lm_code lm_training_run(lm_tool *t, const lm_loop_args *a, lm_session *s,
                        const lm_memory_plan *plan, lm_err *e)
{
    lm_train_result r = { .loss = NAN, .val_loss = NAN, .best_val_loss = NAN, .best_step = -1 };
    lm_code rc = lm_session_train(s, plan, &r, e);
    const char *status = lm_train_status(&r, rc);
    lm_buf text = { 0 };
    lm_err second = { 0 };
    if (lm_train_report_end(s->metrics, &r, status, &second) && !rc) {
        *e = second;
        rc = second.code;
    }
    if (rc || t->rank > 0)
        return rc;
    if (r.steps_run)
        say_result(t, a, s, &r, status);
    else
        lm_say(t, LM_LOG_NOTICE, "%s is at step %" PRId64 " already: nothing to do", s->ask.run,
               r.step);
    return t->json ? lm_print_text(lm_train_result_json(&r, status, &text, e), &text, "\n") : LM_OK;
}
