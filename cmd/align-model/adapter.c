/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.c -- the part of align-model that trains an adapter on a frozen model. */
#include <string.h>

#include "align-model/options.h"
#include "base/text.h"
#include "common/training.h"
#include "numeric/format.h"

/* ---- options ---- */

static lm_code refuse_alone(const align_session *s, lm_err *e)
{
    static const struct {
        const char *name;
        bool saved; /* also of an adapter that is read */
    } of_adapters[] = {
        { "rank", true },          { "lora-alpha", true },  { "adapter-dropout", true },
        { "target", true },        { "set", true },         { "modules-to-save", true },
        { "init-adapter", false }, { "base-format", false }
    };
    char where[40];
    for (size_t i = 0; i < sizeof of_adapters / sizeof *of_adapters; i++) {
        bool given = lm_given(&tool, of_adapters[i].name);
        snprintf(where, sizeof where, "--%s", of_adapters[i].name);
        if (given && !s->recipe.method)
            return lm_fail(e, LM_EUSAGE, where, "give --method lora too",
                           "method '%s' has no adapter", opt.method);
        if (given && of_adapters[i].saved && (opt.init_adapter || opt.loop.resume))
            return lm_fail(e, LM_EUSAGE, where, "leave it out",
                           "the saved adapter's configuration says it");
    }
    return LM_OK;
}

lm_code align_ask_adapter(align_session *s, lm_err *e)
{
    const char *near = lm_nearest(opt.method, lm_tuning_recipe_names());
    char todo[80] = "see peft-tune --list-methods";
    if (near)
        snprintf(todo, sizeof todo, "did you mean '%s'?", near);
    if (!lm_tuning_recipe_find(opt.method, &s->recipe))
        return lm_fail(e, LM_EUSAGE, "--method", todo, "no method '%s'", opt.method);
    if (!s->recipe.method && strcmp(s->recipe.name, "full") != 0)
        return lm_fail(e, LM_EUSAGE, "--method", "use full, or a method that has an adapter",
                       "'%s' trains a part of the model", opt.method);
    if (opt.loop.resume && s->recipe.method && lm_training_find_base(&s->t, &s->run, e))
        return e->code;
    return refuse_alone(s, e);
}

/* ---- the adapter ---- */

/* The configuration: that of a saved adapter, or a new one. */
static lm_code read_config(align_session *s, json_t **out, lm_err *e)
{
    const lm_session_ask *a = &s->t.ask;
    const char *saved = a->resume ? a->resume : opt.init_adapter;
    const lm_tuning_ask ask = { .recipe = s->recipe,
                                .base = a->model,
                                .rank = opt.rank,
                                .alpha = opt.lora_alpha,
                                .dropout = opt.adapter_dropout,
                                .target = opt.target,
                                .save = opt.save,
                                .set = opt.set.v,
                                .n_set = opt.set.n };
    return saved ? lm_tuning_open(saved, &a->how, &s->files, &s->first, out, e)
                 : lm_tuning_config(&ask, out, e);
}

/* A reward model's adapter, as PEFT has it: the head trains beside it and lies in its file. */
static lm_code save_head(json_t *config, lm_err *e)
{
    static const char head[] = "score";
    json_t *saved = json_object_get(config, "modules_to_save");
    size_t i;
    json_t *v;
    bool there = false;
    if (!json_is_array(saved))
        saved = json_array();
    else
        json_incref(saved);
    json_array_foreach(saved, i, v) there |=
        json_is_string(v) && !strcmp(json_string_value(v), head);
    if (!there)
        json_array_append_new(saved, json_string(head));
    bool bad = json_object_set_new(config, "modules_to_save", saved);
    bad |= json_object_set_new(config, "task_type", json_string("SEQ_CLS"));
    return bad ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory") : LM_OK;
}

static lm_code make_adapter(align_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    const char *where = t->ask.resume      ? t->ask.resume
                        : opt.init_adapter ? opt.init_adapter
                                           : "adapter";
    json_t *config = NULL;
    if (read_config(s, &config, e))
        return e->code;
    if (t->ask.resume)
        lm_tuning_resume(config, s->first);
    if (t->config.scores && save_head(config, e)) {
        json_decref(config);
        return e->code;
    }
    if (lm_tuning_new(config, where, t->source, &t->config, &s->tuning, e))
        return e->code;
    if (lm_attach_virtual(s->tuning.attach))
        return lm_fail(e, LM_EUSAGE, "--method", "use peft-tune for it, or another method here",
                       "'%s' has virtual tokens in front of texts", opt.method);
    s->tuning.base = t->source;
    s->tuning.seed = (uint64_t)tool.seed;
    s->tuning.first = t->ask.resume ? NULL : s->first;
    if (lm_tuning_ids(&s->tuning, s->first, e))
        return e->code;
    lm_tuning_build(&s->tuning, &t->o.build);
    t->adapter.config = s->tuning.text.data;
    t->adapter.start = lm_tuning_start;
    t->adapter.ctx = &s->tuning;
    return LM_OK;
}

lm_code align_choose_adapter(align_session *s, lm_err *e)
{
    lm_build *b = &s->t.o.build;
    if (!s->recipe.method)
        return LM_OK;
    const char *format = strcmp(opt.base_format, "auto") != 0 ? opt.base_format : s->recipe.format;
    b->codes = s->t.source;
    if (format && lm_format_find(format, NULL, &b->frozen_format, e)) {
        lm_err_in(e, "--base-format");
        return e->code;
    }
    return make_adapter(s, e);
}

void align_say_adapter(const align_session *s)
{
    lm_buf line = { 0 };
    lm_err unseen = { 0 };
    if (s->tuning.attach && !lm_tuning_line(&s->tuning, &line, &unseen))
        lm_say(&tool, LM_LOG_NOTICE, "%s", line.data);
    lm_buf_fini(&line);
}

double align_rate(const align_session *s)
{
    double rate = s->spec.use[0].loss->rate;
    return s->recipe.method ? 10 * rate : rate;
}

void align_close_adapter(align_session *s)
{
    lm_tuning_fini(&s->tuning);
    lm_st_close(s->first);
    lm_bundle_close(s->files);
}
