/* SPDX-License-Identifier: Apache-2.0 */
/* align-model -- training on preferences.  See man/man1/align-model.1.
 *
 * The options are in align-model/options.c, their translation for the library in align-model/ask.c, the data in
 * align-model/answers.c; here are the order of the work, and what is printed. */
#include "align-model/options.h"
#include "base/mem.h"
#include "base/stop.h"
#include "common/ranks.h"
#include "common/training.h"
#include "train/advice.h"

/* ---- the work ---- */

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
    lm_training_refuse_inputs(&tool, &opt.loop, t);
    if (lm_training_open(&tool, &opt.loop, t, e))
        return e->code;
    t->ask.plan = tool.dry_run && !t->ask.data; /* data need the tokenizer of the model */
    if (lm_session_config(t, NULL, e) ||
        lm_config_check_alone(&t->config, t->ask.model, "preferences", e))
        return e->code;
    t->ask.plan = tool.dry_run;
    if (lm_training_check_experts(&opt.loop, t, e) || make_head(s, e) || align_choose_adapter(s, e))
        return e->code;
    lm_training_say_slow(&tool, t);
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
    if (prepare(s, e) || open_data(s, e))
        return e->code;
    if (lm_stopping())
        return LM_OK;
    if (lm_session_program(t, &plan, e) || lm_tuning_check_formats(&opt.tuning, t, e) ||
        align_add_memory(s, &plan, e) || align_add_teacher(s, &plan, e))
        return e->code;
    lm_tuning_say(&tool, &s->tuning);
    lm_train_advise(&t->o, &t->config, &tool.sink);
    if (tool.dry_run)
        return lm_training_tell_outlook(&tool, &opt.loop, t, &plan, e);
    if (lm_training_agree(&tool, &s->run, t, e) || lm_options_save(&s->run.options, e) ||
        lm_session_open_run(t, e) || align_open_log(s, e))
        return e->code;
    if (lm_training_run(&tool, &opt.loop, t, &plan, e))
        return e->code;
    if (s->policy && !lm_on_policy_taught(s->policy))
        lm_say(&tool, LM_LOG_WARN,
               "rewards: in no step was one of a prompt's completions better than another: nothing "
               "was learnt from them: look at completions.jsonl in %s",
               t->ask.run);
    return LM_OK;
}

static lm_code print_lists(lm_err *e)
{
    lm_buf text = { 0 };
    if (opt.list_losses)
        return tool.json ? lm_print_text(lm_align_list_json(&text, e), &text, "\n")
                         : lm_print_text(lm_align_list(true, &text, e), &text, "");
    if (opt.list_rewards)
        return tool.json ? lm_print_text(lm_reward_list_json(&text, e), &text, "\n")
                         : lm_print_text(lm_reward_list(&text, e), &text, "");
    return lm_training_list_optimizers(&tool, e);
}

static void close_all(align_session *s, lm_err *e)
{
    align_close_log(s);
    lm_session_close(&s->t, e);
    align_close_rollouts(s);
    align_close_teacher(s);
    align_close_answers(s);
    align_close_adapter(s);
    lm_training_close(&tool, &s->t);
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
    const bool prints = lists || tool.dry_run; /* of several ranks the first */
    if (!lm_ranks_same_work(&tool, prints ? "a plan or a list" : "a run", &e) &&
        (tool.rank == 0 || !prints)) {
        if (lists)
            print_lists(&e);
        else
            work(&s, &e);
    }
    close_all(&s, &e);
    if (lm_tuning_name_option(&opt.tuning, &e))
        lm_complain(&tool, &e);
    lm_loop_run_fini(&s.run); /* the options borrow from it */
    return lm_end(&tool);
}
