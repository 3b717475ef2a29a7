/* SPDX-License-Identifier: Apache-2.0 */
/* peft-tune -- train an adapter of a model, or a part of the model.  See man/man1/peft-tune.1.
 *
 * The options are in peft-tune/options.c, their translation for the library in peft-tune/ask.c; here are the inputs,
 * the order of the work, and what is printed. */
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/ranks.h"
#include "common/training.h"
#include "peft-tune/options.h"
#include "train/advice.h"

/* ---- inputs ---- */

static int choice(const char *const *list, const char *name)
{
    int i = 0;
    while (list[i] && strcmp(list[i], name) != 0)
        i++;
    return i;
}

/* One file of records in windows, with a line about it. */
static lm_code read_records(tune_session *s, const char *path, int64_t limit, lm_packed_set *out,
                            lm_err *e)
{
    const lm_text_examples_opts how = { .path = &path,
                                        .n = 1,
                                        .map = s->map.n ? &s->map : NULL,
                                        .maker = s->maker,
                                        .limit = limit,
                                        .tmp = tool.tmpdir,
                                        .sink = &tool.sink };
    const int64_t window = s->maker.pair ? s->t.o.source : s->t.o.seq;
    lm_buf line = { 0 };
    lm_code rc = lm_packed_read(&how, window, opt.packing, s->t.par, out, e);
    if (!rc && !lm_stopping() && !(rc = lm_packed_line(out, window, &line, e)))
        lm_say(&tool, LM_LOG_NOTICE, "%s: %s", path, line.data);
    lm_buf_fini(&line);
    return rc;
}

static lm_code read_data(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (!t->ask.data)
        return LM_OK;
    s->maker.loss_on = (lm_loss_on)choice(lm_loss_on_names, opt.loss_on);
    s->maker.cut = (lm_truncation)choice(lm_cut_names, opt.truncation);
    s->maker.pair = t->o.source > 0;
    s->maker.most_target = t->o.seq;
    if (lm_packed_maker(t->source, opt.chat_template, lm_config_eos(&t->config), &s->maker, e) ||
        lm_training_template(&opt.chat_template, &s->template, e) ||
        read_records(s, t->ask.data, opt.max_examples, &s->data, e))
        return e->code;
    if (lm_stopping()) /* what was read is not the whole */
        return LM_OK;
    if (tune_check_data(s, e))
        return e->code;
    if (opt.loop.val && read_records(s, opt.loop.val, 0, &s->val, e))
        return e->code;
    tune_fit_pairs(s);
    return LM_OK;
}

/* ---- what trains ---- */

/* Parameters that train, and their share of all. */
static void say_trained(const tune_session *s)
{
    const lm_session *t = &s->t;
    const lm_model *m = t->program->train;
    double trained = 0, all = 0;
    char a[32], b[32];
    lm_tuning_say(&tool, &s->tuning);
    for (int i = 0; i < m->n_params; i++) {
        all += (double)m->param[i].count;
        trained += m->param[i].trains ? (double)m->param[i].count : 0;
    }
    lm_say(&tool, LM_LOG_NOTICE, "%s of %s parameters train (%.3g %%)", lm_show_count(trained, a),
           lm_show_count(all, b), 100 * trained / all);
}

/* ---- the work ---- */

static lm_code prepare(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (tune_ask(s, e) || lm_training_open(&tool, &opt.loop, t, e) ||
        lm_session_config(t, NULL, e) || tune_ask_shape(s, e))
        return e->code;
    lm_training_refuse_inputs(&tool, &opt.loop, t);
    lm_training_say_slow(&tool, t);
    return lm_training_check_experts(&opt.loop, t, e) || tune_choose(s, e) || read_data(s, e)
               ? e->code
               : LM_OK;
}

static lm_code work(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_memory_plan plan;
    lm_buf text = { 0 };
    if (prepare(s, e))
        return e->code;
    if (lm_stopping())
        return LM_OK;
    if (tune_ask_steps(s, e) || lm_session_program(t, &plan, e) ||
        lm_tuning_check_formats(&opt.tuning, t, e))
        return e->code;
    if (opt.dump_graph)
        return lm_print_text(lm_program_dump(t->program, &text, e), &text, "");
    say_trained(s);
    lm_train_advise(&t->o, &t->config, &tool.sink);
    if (tool.dry_run)
        return lm_training_tell_outlook(&tool, &opt.loop, t, &plan, e);
    if (lm_session_use_examples(t, &s->data.data, opt.loop.val ? &s->val.data : NULL,
                                t->config.vocab + s->maker.virtuals, t->ask.data, e) ||
        lm_training_agree(&tool, &s->run, t, e) || lm_options_save(&s->run.options, e) ||
        lm_session_open_run(t, e))
        return e->code;
    return lm_training_run(&tool, &opt.loop, t, &plan, e);
}

static bool lists(void)
{
    return opt.list_methods || opt.loop.list_optimizers;
}

static lm_code print_lists(lm_err *e)
{
    lm_buf text = { 0 };
    if (!opt.list_methods)
        return lm_training_list_optimizers(&tool, e);
    return tool.json ? lm_print_text(lm_tuning_recipes_json(&text, e), &text, "\n")
                     : lm_print_text(lm_tuning_recipes_table(&text, e), &text, "");
}

static void close_all(tune_session *s, lm_err *e)
{
    lm_session_close(&s->t, e);
    lm_packed_fini(&s->data);
    lm_packed_fini(&s->val);
    lm_packed_maker_fini(&s->maker);
    lm_text_record_map_fini(&s->map);
    lm_free(s->template);
    lm_tune_partial_fini(&s->part);
    lm_tuning_fini(&s->tuning);
    lm_st_close(s->first);
    lm_bundle_close(s->files);
    lm_buf_fini(&s->groups);
    lm_training_close(&tool, &s->t);
}

/* Of several ranks the first does all else. */
static bool is_shared(void)
{
    return !lists() && !tune_derives() && !tune_plan_only();
}

static void do_work(tune_session *s, lm_err *e)
{
    if (lists())
        print_lists(e);
    else if (tune_derives())
        tune_derive(e);
    else
        work(s, e);
}

int main(int argc, char **argv)
{
    tune_session s = { .t.ask.from = -1 };
    lm_err e = { 0 };
    lm_begin(&tool, argc, argv);
    lm_refuse_ending(&tool, tool.output,
                     opt.to_lora && tool.output && lm_text_ends(tool.output, ".gguf")
                         ? LM_MAKES_GGUF
                         : LM_MAKES_FOLDER);
    if (!tune_plan_only() && !lists() &&
        !tune_derives()) /* the run is the product, not standard output */
        lm_outlast_readers(&tool);
    if (!lm_ranks_same_work(&tool, is_shared() ? "a training" : "work of one", &e) &&
        (tool.rank == 0 || is_shared()))
        do_work(&s, &e);
    close_all(&s, &e);
    if (lm_tuning_name_option(&opt.tuning, &e))
        lm_complain(&tool, &e);
    lm_loop_run_fini(&s.run); /* the options borrow from it */
    return lm_end(&tool);
}
