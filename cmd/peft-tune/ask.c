/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of peft-tune into the structures of the library. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "common/training.h"
#include "peft-tune/options.h"

bool tune_plan_only(void)
{
    return tool.dry_run || opt.dump_graph;
}

static lm_code find_operands(tune_session *s, lm_err *e)
{
    if (opt.share > 0)
        lm_misuse(&tool, "--share", "leave it out", "serves --unmerge, --to-lora and --combine");
    if (lm_training_operands(&tool, &opt.loop, tune_plan_only(), "the adapter with -o FOLDER",
                             &s->t, &s->run, e) ||
        !opt.loop.resume)
        return e->code;
    if (!lm_tuning_recipe_find(opt.tuning.method, &s->recipe))
        return lm_fail(e, LM_EFORMAT, s->run.step_dir, NULL, "was made by an unknown method '%s'",
                       opt.tuning.method);
    return lm_tuning_recipe_adapts(&s->recipe) ? lm_training_find_base(&s->t, &s->run, e) : LM_OK;
}

static lm_code find_recipe(tune_session *s, lm_err *e)
{
    static const lm_tuning_option of_adapters[] = { { "rank", true },
                                                    { "lora-alpha", true },
                                                    { "adapter-dropout", true },
                                                    { "target", true },
                                                    { "exclude", true },
                                                    { "layers", true },
                                                    { "set", true },
                                                    { "modules-to-save", true },
                                                    { "init-adapter", false },
                                                    { "lora-plus-ratio", false },
                                                    { NULL, false } };
    if (lm_tuning_find(&opt.tuning, "see --list-methods", &s->recipe, e) ||
        lm_tuning_refuse_alone(&tool, &opt.tuning, of_adapters, lm_tuning_recipe_adapts(&s->recipe),
                               opt.loop.resume != NULL, "leave it out", e))
        return e->code;
    if (opt.train && lm_tuning_recipe_adapts(&s->recipe))
        return lm_fail(e, LM_EUSAGE, "--train", "choose --method full, or give --modules-to-save",
                       "serves no adapter");
    return LM_OK;
}

lm_code tune_ask(tune_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (find_operands(s, e))
        return e->code;
    opt.mesh.splits = true;
    if (lm_mesh_ask(&tool, &opt.mesh, opt.loop.resume != NULL, &s->t.o, e))
        return e->code;
    a->comm = tune_plan_only() ? NULL : tool.comm;
    a->dropout = -1;
    a->pairs = true;
    lm_loop_session(&tool, &opt.loop, &s->run, a);
    if (tune_plan_only()) /* nothing is measured; the model is opened for its modules */
        a->peak_flops = 0;
    if (opt.map && lm_text_record_map_add(&s->map, opt.map, e))
        return e->code;
    return lm_training_refuse_alone(&opt.loop, false, e) || find_recipe(s, e) ? e->code : LM_OK;
}

/* Without adapter: the tensors that match. */
static lm_code choose_tensors(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    const char *patterns = opt.train ? opt.train : s->recipe.train;
    if (!strcmp(patterns, "*"))
        return LM_OK;
    if (lm_tune_partial_make(&t->config, patterns, &s->part, e)) {
        if (opt.train || e->code != LM_EUSAGE)
            return e->code;
        *e = (lm_err){ 0 }; /* the patterns are the method's */
        return lm_fail(e, LM_EUSAGE, "--method", "choose another method",
                       "'%s' trains tensors named %s, of which the model has none", s->recipe.name,
                       patterns);
    }
    t->o.build.trainable = lm_tune_partial_trains;
    t->o.build.ctx = &s->part;
    return LM_OK;
}

static lm_code choose_adapter(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    json_t *config = NULL;
    if (lm_tuning_read(&opt.tuning, &s->recipe, t, &s->files, &s->first, &config, e) ||
        lm_tuning_attach(&tool, &opt.tuning, t, config, s->first, &s->tuning, e))
        return e->code;
    s->maker.virtual_first = t->config.vocab;
    s->maker.virtuals = lm_attach_virtual(s->tuning.attach);
    s->maker.unseen = s->maker.virtuals > 0 && !lm_attach_predicts(s->tuning.attach);
    return LM_OK;
}

lm_code tune_choose(tune_session *s, lm_err *e)
{
    bool paged = opt.states_in[0] == 'h' || (opt.states_in[0] == 'a' && s->recipe.format);
    s->t.o.states_in = opt.states_in[0] == 'f' ? LM_STATES_FILE
                       : paged                 ? LM_STATES_HOST
                                               : LM_STATES_NEAR;
    s->t.o.states_dir = s->t.ask.run;
    if (lm_tuning_encode(&opt.tuning, &s->recipe, &s->t, e))
        return e->code;
    return lm_tuning_recipe_adapts(&s->recipe) ? choose_adapter(s, e) : choose_tensors(s, e);
}

/* The type of the computation: that of the model's files, when it is not given. */
static lm_dtype pick_dtype(const lm_session *t)
{
    const json_t *c = lm_model_source_config(t->source);
    const char *of = json_string_value(json_object_get(c, "torch_dtype"));
    of = of ? of : json_string_value(json_object_get(c, "dtype"));
    if (strcmp(opt.dtype, "auto") != 0)
        return lm_dtype_parse(opt.dtype);
    return of && (!strcmp(of, "bfloat16") || !strcmp(of, "float16")) ? LM_DTYPE_BF16 : LM_DTYPE_F32;
}

/* A model with an encoder reads pairs, one a window, whose targets train. */
static lm_code ask_pairs(lm_session *t, lm_err *e)
{
    lm_trainer_opts *o = &t->o;
    if (!t->config.encoder && opt.target > 0)
        return lm_fail(e, LM_EUSAGE, "--target-len", "give --seq-len alone",
                       "serves models with an encoder; %s has none", t->ask.model);
    if (!t->config.encoder)
        return LM_OK;
    if (lm_given(&tool, "packing") && opt.packing)
        return lm_fail(e, LM_EUSAGE, "--packing", "leave it out",
                       "an encoder reads one source at a time");
    if (strcmp(opt.loss_on, "auto") != 0 && strcmp(opt.loss_on, "completion") != 0)
        return lm_fail(e, LM_EUSAGE, "--loss-on", "leave it out",
                       "of a source and a target the target trains, and nothing else");
    o->documents = false;
    o->source = o->seq;
    o->seq = opt.target > 0 ? opt.target : o->source;
    return LM_OK;
}

lm_code tune_ask_shape(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_trainer_opts *o = &t->o;
    o->batch = opt.batch;
    o->seq = opt.seq;
    if (!lm_given(&tool, "seq-len") && !opt.loop.resume && t->config.max_positions > 0 &&
        t->config.max_positions < o->seq)
        o->seq = opt.seq = t->config.max_positions;
    o->precision.low = pick_dtype(t);
    o->documents = opt.packing;
    o->dropout = true;
    return ask_pairs(t, e);
}

void tune_fit_pairs(tune_session *s)
{
    const lm_text_examples *of[] = { s->data.examples, s->val.examples };
    lm_trainer_opts *o = &s->t.o;
    int64_t source = 0, target = 0;
    for (int i = 0; o->source && i < 2; i++) {
        if (!of[i])
            continue;
        const lm_text_examples_stats *st = lm_text_examples_stat(of[i]);
        source = st->source > source ? st->source : source;
        target = st->target > target ? st->target : target;
    }
    if (target) {
        o->source = source;
        o->seq = target;
    }
}

/* AdamW as adapters are trained: no decay, the usual second moment. */
static lm_loop_args loop_args(void)
{
    lm_loop_args a = opt.loop;
    if (strcmp(a.optimizer, "adamw") != 0)
        return a;
    a.weight_decay = a.weight_decay < 0 ? 0 : a.weight_decay;
    a.beta2 = a.beta2 < 0 ? 0.999 : a.beta2;
    return a;
}

/* With LoRA+ a group of its own for B. */
static lm_code add_plus(tune_session *s, lm_loop_args *a, lm_err *e)
{
    double plus = opt.plus > 0 ? opt.plus : s->recipe.plus;
    double rate = a->lr >= 0 ? a->lr : s->recipe.rate;
    if (plus <= 1)
        return LM_OK;
    if (!s->recipe.method || strcmp(s->recipe.method, "lora") != 0)
        return lm_fail(e, LM_EUSAGE, "--lora-plus-ratio", "leave it out", "serves lora only");
    if (strchr(a->optimizer, ';'))
        return lm_fail(e, LM_EUSAGE, "--optimizer", "name one optimiser for all tensors",
                       "its groups and those of LoRA+ exclude each other");
    lm_code rc =
        lm_buf_addf(&s->groups, e, "%s;*lora_B*|*lora_embedding_B*=%s%slr=%.17g", a->optimizer,
                    a->optimizer, strchr(a->optimizer, ':') ? "," : ":", rate * plus);
    a->optimizer = s->groups.data;
    return rc;
}

lm_code tune_ask_steps(tune_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_loop_args a = loop_args();
    double rate = s->recipe.rate;
    if (add_plus(s, &a, e))
        return e->code;
    double windows = s->data.examples ? (double)s->data.pack.windows : 0,
           a_step = (double)(opt.batch * opt.mesh.accumulate);
    int64_t steps = opt.steps > 0 ? opt.steps : (int64_t)ceil(opt.epochs * windows / a_step);
    return lm_loop_ask(&tool, &a, rate, steps < 1 ? 1 : steps, &s->run, &t->o, e)
               ? e->code
               : lm_tuning_schedule(&s->tuning, t, e);
}

/* ---- the data of a resumed run ---- */

lm_code tune_check_data(tune_session *s, lm_err *e)
{
    const char *was = lm_training_saved(&s->run, "data_digest");
    snprintf(s->digest, sizeof s->digest, "%016" PRIx64, lm_text_examples_digest(s->data.examples));
    s->t.ask.data_digest = s->digest;
    if (!was || !strcmp(was, s->digest) || tool.argc > 0)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, s->t.ask.data,
                   "restore them, or name the data to go on with: peft-tune --resume RUN DATA",
                   "the data are no longer those of the run");
}
