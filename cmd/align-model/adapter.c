/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.c -- the part of align-model that trains an adapter on a frozen model. */
#include <string.h>

#include "align-model/options.h"
#include "common/training.h"

/* ---- options ---- */

lm_code align_ask_adapter(align_session *s, lm_err *e)
{
    static const lm_tuning_option of_adapters[] = {
        { "rank", true },         { "lora-alpha", true },      { "adapter-dropout", true },
        { "target", true },       { "exclude", true },         { "layers", true },
        { "set", true },          { "modules-to-save", true }, { "init-adapter", false },
        { "base-format", false }, { "embed-format", false },   { NULL, false }
    };
    if (opt.tuning.init_adapter && !lm_given(&tool, "method"))
        opt.tuning.method = "lora"; /* as in peft-tune: the adapter's configuration says its own */
    if (lm_tuning_find(&opt.tuning, "see peft-tune --list-methods", &s->recipe, e))
        return e->code;
    if (!s->recipe.method && strcmp(s->recipe.name, "full") != 0)
        return lm_fail(e, LM_EUSAGE, "--method", "use full, or a method that has an adapter",
                       "'%s' trains a part of the model", opt.tuning.method);
    if (opt.loop.resume && s->recipe.method && lm_training_find_base(&s->t, &s->run, e))
        return e->code;
    return lm_tuning_refuse_alone(&tool, &opt.tuning, of_adapters, s->recipe.method != NULL,
                                  opt.loop.resume != NULL, "give --method lora too", e);
}

/* ---- the adapter ---- */

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

lm_code align_choose_adapter(align_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    json_t *config = NULL;
    if (!s->recipe.method)
        return LM_OK;
    if (lm_tuning_encode(&opt.tuning, &s->recipe, t, e) ||
        lm_tuning_read(&opt.tuning, &s->recipe, t, &s->files, &s->first, &config, e))
        return e->code;
    if (t->config.scores && save_head(config, e)) {
        json_decref(config);
        return e->code;
    }
    if (lm_tuning_attach(&tool, &opt.tuning, t, config, s->first, &s->tuning, e))
        return e->code;
    return lm_attach_virtual(s->tuning.attach)
               ? lm_fail(e, LM_EUSAGE, "--method", "use peft-tune for it, or another method here",
                         "'%s' has virtual tokens in front of texts", opt.tuning.method)
               : LM_OK;
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
