/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of train into the structures of the library. */
#include "common/training.h"
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

lm_code train_ask(train_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (lm_training_operands(&tool, &opt.loop, train_plan_only(), "the run with -o RUN", t, &s->run,
                             e))
        return e->code;
    if (lm_targets_parse(opt.objective, &s->targets, e))
        return e->code;
    ask_training(&t->o);
    opt.mesh.splits = true;
    if (refuse_alone(e) || lm_mesh_ask(&tool, &opt.mesh, opt.loop.resume != NULL, &t->o, e))
        return e->code;
    ask_session(s); /* with the history, in which ranks have told their numbers */
    return lm_loop_ask(&tool, &opt.loop, -1, opt.steps, &s->run, &t->o, e);
}
