/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of train into the structures of the library. */
#include "common/training.h"
#include "model/preset.h"
#include "parallel/fit.h"
#include "train/options.h"

bool train_plan_only(void)
{
    return tool.dry_run || opt.dump_graph;
}

/* Options without effect because another one is missing. */
static lm_code refuse_alone(lm_err *e)
{
    if (opt.measure && !tool.dry_run)
        return lm_fail(e, LM_EUSAGE, "--measure", "give --dry-run too", "serves --dry-run only");
    if (opt.measure && tool.comm)
        return lm_fail(e, LM_EUSAGE, "--measure", "start one process, or leave it out",
                       "measures one process, with its threads");
    return lm_training_refuse_alone(&opt.loop, true, e);
}

/* What the session needs besides the operands and the numbers of the training. */
static void ask_session(train_session *s)
{
    lm_session_ask *a = &s->t.ask;
    a->plan = train_plan_only();
    a->dropout = opt.dropout;
    a->comm = train_plan_only() ? NULL : tool.comm;
    a->targets = &s->targets;
    a->kind = lm_tokens_kind_find(opt.format);
    a->check_tokenizer = opt.check_tokenizer;
    lm_loop_session(&tool, &opt.loop, &s->run, a);
}

/* The numbers of the training. */
static void ask_training(lm_trainer_opts *o)
{
    *o = (lm_trainer_opts){
        .batch = opt.batch,
        .seq = opt.seq,
        .steps = opt.steps,
        .precision = { .low = lm_dtype_parse(opt.dtype) },
        .documents = opt.documents,
        .dropout = true,
        .seed = (uint64_t)tool.seed,
        .bias_rate = opt.bias_rate,
        .ahead_weight = opt.ahead_weight,
    };
}

/* The config of the model that is being asked about; NULL: nothing needs it. */
static const lm_config *the_config;

static bool is_legal(const lm_mesh *mesh, const char *schedule, const char *stages)
{
    const lm_train_pipe_ask ask = { .schedule = schedule,
                                    .stages = stages,
                                    .ranks = lm_mesh_along(mesh, LM_AXIS_PP),
                                    .micros = opt.mesh.accumulate / opt.mesh.leaves,
                                    .batch = opt.batch,
                                    .seq = opt.seq };
    lm_train_pipe *pipe = NULL;
    lm_err why = { 0 };
    const bool fits = !lm_fit_mesh(the_config, mesh, opt.batch, opt.seq, &why) &&
                      (ask.ranks == 1 || !lm_train_pipe_new(&ask, the_config, &pipe, &why));
    lm_train_pipe_free(pipe);
    return fits;
}

/* The mesh, of elastic runs with what the model can have. */
static lm_code ask_mesh(train_session *s, lm_err *e)
{
    json_t *json = NULL;
    lm_config config = { 0 };
    const char *model = s->t.ask.model;
    if (opt.mesh.elastic && lm_path_exists(model) && !lm_config_alone(model, &json, e) &&
        !lm_config_read(json, model, &config, e)) {
        the_config = &config;
        opt.mesh.legal = is_legal;
        if (s->run.saved)
            opt.mesh.was = json_integer_value(json_object_get(s->run.saved, "ranks"));
    }
    if (!e->code)
        lm_mesh_ask(&tool, &opt.mesh, opt.loop.resume != NULL, &s->t.o, e);
    lm_config_fini(&config);
    json_decref(json);
    return e->code;
}

lm_code train_ask(train_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    opt.loop.elastic = opt.mesh.elastic;
    if (lm_training_operands(&tool, &opt.loop, train_plan_only(), "the run with -o RUN", t, &s->run,
                             e))
        return e->code;
    if (lm_targets_parse(opt.objective, &s->targets, e))
        return e->code;
    ask_training(&t->o);
    opt.mesh.splits = true;
    opt.mesh.devices = true;
    if (refuse_alone(e) || ask_mesh(s, e))
        return e->code;
    if (tool.rests)
        return LM_OK;
    ask_session(s); /* with the history, in which ranks have told their numbers */
    return lm_loop_ask(&tool, &opt.loop, -1, opt.steps, &s->run, &t->o, e);
}
