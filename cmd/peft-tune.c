/* SPDX-License-Identifier: Apache-2.0 */
/* peft-tune -- train an adapter of a model, or a part of the model.  See man/man1/peft-tune.1.
 *
 * The options are in peft-tune/options.c, their translation for the library in peft-tune/ask.c; here are the inputs,
 * the order of the work, and what is printed. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "common/device.h"
#include "peft-tune/options.h"
#include "train/advice.h"
#include "train/outlook.h"
#include "train/report.h"

/* ---- inputs ---- */

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
    lm_buf line = { 0 };
    lm_code rc = lm_packed_read(&how, s->t.o.seq, opt.packing, s->t.par, out, e);
    rc = rc ? rc : lm_packed_line(out, s->t.o.seq, &line, e);
    if (!rc)
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
    s->maker.cut = (lm_truncation)choice(lm_cut_names, opt.truncate);
    if (lm_packed_maker(t->source, opt.chat_template, lm_config_eos(&t->config), &s->maker, e) ||
        read_records(s, t->ask.data, opt.max_examples, &s->data, e) || tune_check_data(s, e))
        return e->code;
    return opt.val ? read_records(s, opt.val, 0, &s->val, e) : LM_OK;
}

/* ---- what trains ---- */

/* Parameters that train, and their share of all. */
static void say_trained(const tune_session *s)
{
    const lm_session *t = &s->t;
    lm_buf line = { 0 };
    lm_err unseen = { 0 };
    if (s->tuning.attach && !lm_tuning_line(&s->tuning, &line, &unseen))
        lm_say(&tool, LM_LOG_NOTICE, "%s", line.data);
    lm_buf_fini(&line);
    const lm_model *m = t->program->train;
    double trained = 0, all = 0;
    char a[32], b[32];
    for (int i = 0; i < m->n_params; i++) {
        all += (double)m->param[i].count;
        trained += m->param[i].trains ? (double)m->param[i].count : 0;
    }
    lm_say(&tool, LM_LOG_NOTICE, "%s of %s parameters train (%.3g %%)", lm_show_count(trained, a),
           lm_show_count(all, b), 100 * trained / all);
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

/* --dry-run: the memory of the run by part, and whether it fits here. */
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

static lm_code prepare(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (tune_ask(s, e) || lm_par_new(&t->par, tool.threads, e) ||
        lm_open_backend(&tool, t->par, opt.deterministic, &t->backend, e))
        return e->code;
    t->ask.how = lm_tool_bundle(&tool, t->par);
    if (lm_session_config(t, NULL, e))
        return e->code;
    tune_ask_shape(s);
    refuse_inputs(t);
    if (t->backend->host_memory && t->o.precision.low == LM_DTYPE_BF16 && tool.cpu < LM_CPU_AMX)
        lm_say(&tool, LM_LOG_WARN, "no AMX here: bf16 saves memory, but its products run in f32");
    return tune_choose(s, e) || read_data(s, e) ? e->code : LM_OK;
}

static lm_code work(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_memory_plan plan;
    lm_buf text = { 0 };
    lm_train_result r = { .loss = NAN, .val_loss = NAN, .best_val_loss = NAN, .best_step = -1 };
    if (prepare(s, e) || tune_ask_steps(s, e) || lm_session_program(t, &plan, e))
        return e->code;
    if (opt.dump_graph)
        return print_text(lm_program_dump(t->program, &text, e), &text, "");
    say_trained(s);
    lm_train_advise(&t->o, &t->config, &tool.sink);
    if (tool.dry_run)
        return print_outlook(t, &plan, e);
    if (lm_session_use_examples(t, &s->data.data, opt.val ? &s->val.data : NULL,
                                t->config.vocab + s->maker.virtuals, t->ask.data, e) ||
        tune_keep(s, e) || lm_session_open_run(t, e))
        return e->code;
    return summarise(t, &r, lm_session_train(t, &plan, &r, e), e);
}

static lm_code list_methods(lm_err *e)
{
    lm_buf text = { 0 };
    return tool.json ? print_text(lm_tuning_recipes_json(&text, e), &text, "\n")
                     : print_text(lm_tuning_recipes_table(&text, e), &text, "");
}

static void close_all(tune_session *s, lm_err *e)
{
    lm_session_close(&s->t, e);
    lm_close_backend(&tool, s->t.backend);
    lm_packed_fini(&s->data);
    lm_packed_fini(&s->val);
    lm_packed_maker_fini(&s->maker);
    lm_text_record_map_fini(&s->map);
    lm_tune_partial_fini(&s->part);
    lm_tuning_fini(&s->tuning);
    json_decref(s->config);
    lm_st_close(s->first);
    lm_bundle_close(s->files);
    lm_buf_fini(&s->groups);
    lm_par_free(s->t.par);
    lm_buf_fini(&s->options);
    lm_free(s->step_dir);
    lm_free(s->own_run);
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
    if (!tune_plan_only() && !opt.list_methods &&
        !tune_derives()) /* the run is the product, not standard output */
        lm_outlast_readers(&tool);
    if (opt.list_methods)
        list_methods(&e);
    else if (tune_derives())
        tune_derive(&e);
    else
        work(&s, &e);
    close_all(&s, &e);
    if (e.code)
        lm_complain(&tool, &e);
    json_decref(s.saved); /* the options borrow from it */
    return lm_end(&tool);
}
