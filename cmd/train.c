/* SPDX-License-Identifier: Apache-2.0 */
/* train -- pretraining and continued training.  See man/man1/train.1.
 *
 * The options are in train/options.c, their translation for the library in train/ask.c; here are the inputs, the order
 * of the work, and what is printed. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "common/elastic.h"
#include "common/links.h"
#include "common/presets.h"
#include "common/ranks.h"
#include "common/training.h"
#include "model/preset.h"
#include "train/advice.h"
#include "train/data.h"
#include "train/options.h"
#include "train/run.h"

/* ---- inputs ---- */

/* A preset replaces the model in a plan; a training with a preset is refused. */
static lm_code load_preset(const char *name, json_t **out, lm_err *e)
{
    lm_presets p;
    lm_err none = { 0 };
    lm_code rc = lm_presets_find(&p, e);
    if (!rc)
        lm_preset_load((const char *const *)p.dir, name, out, NULL, &none);
    lm_presets_fini(&p);
    if (rc || (none.code && !train_plan_only()))
        return rc;
    if (none.code)
        *e = none;
    else if (!train_plan_only())
        lm_fail(e, LM_EUSAGE, name,
                "make a model of it first with init-model, or ask what it takes with --dry-run",
                "is a preset, not a model");
    if (e->code) {
        json_decref(*out);
        *out = NULL;
    }
    return e->code;
}

static lm_code read_config(lm_session *t, lm_err *e)
{
    const char *model = t->ask.model;
    json_t *preset = NULL;
    if (!t->ask.resume && !lm_path_exists(model) && strcmp(model, "-") &&
        load_preset(model, &preset, e))
        return e->code;
    return lm_session_config(t, preset, e);
}

static lm_code open_train(lm_session *t, lm_err *e)
{
    if (lm_session_find_data(t, e))
        return e->code;
    lm_training_refuse_inputs(&tool, &opt.loop, t);
    return lm_session_open_train(t, e);
}

/* ---- plans ---- */

/* --dry-run: the memory of the run, whether it fits here, and with --measure its time. */
static lm_code measure_and_print(lm_session *t, lm_outlook *o, lm_err *e)
{
    if (t->ask.data && open_train(t, e)) /* fails for data that the run would refuse */
        return e->code;
    if (opt.measure && o->verdict.fits &&
        lm_train_measured(&t->o, t->program, t->train, &tool.sink, &o->measure, e))
        return e->code;
    return lm_training_print_outlook(&tool, o, e);
}

/* A plan says the mesh, even that of ranks which only share the batch. */
static void name_mesh(void)
{
    lm_mesh_args *m = &opt.mesh;
    if (m->mesh || m->ranks < 2)
        return;
    snprintf(m->wanted, sizeof m->wanted, "dp=%d", (int)m->ranks);
    m->mesh = m->wanted;
}

static lm_code print_outlook(lm_session *t, const lm_memory_plan *plan, lm_err *e)
{
    lm_outlook o = { 0 };
    name_mesh();
    if (!lm_training_outlook(&opt.loop, t, plan, opt.measure, &o, e))
        measure_and_print(t, &o, e);
    lm_outlook_fini(&o);
    return e->code;
}

/* ---- the work ---- */

/* Called before a model is read from a pipe.  A folder is checked when it is opened. */
static lm_code check_data_exists(const char *data, lm_err *e)
{
    if (data && !lm_path_is_dir(data) && lm_data_there(data, e))
        return e->code;
    return opt.loop.val && opt.loop.eval_every > 0 ? lm_data_there(opt.loop.val, e) : LM_OK;
}

/* A rate for biases that no router has. */
static lm_code check_biases(const lm_session *t, lm_err *e)
{
    bool any = !lm_given(&tool, "moe-router-bias-update-rate");
    for (int64_t l = 0; l < t->config.layers; l++)
        any |= t->config.layer[l].moe.score_bias;
    return any ? LM_OK
               : lm_fail(e, LM_EUSAGE, "--moe-router-bias-update-rate", "leave it out",
                         "serves routers with biases; those of %s have none", t->ask.model);
}

/* A weight for modules that the model does not have. */
static lm_code check_ahead(const lm_session *t, lm_err *e)
{
    return t->config.ahead || !lm_given(&tool, "mtp-loss-scaling-factor")
               ? LM_OK
               : lm_fail(e, LM_EUSAGE, "--mtp-loss-scaling-factor", "leave it out",
                         "serves models with modules that predict tokens further on; %s has none",
                         t->ask.model);
}

/* Spans are cut out of text that runs on. */
static lm_code check_documents(const lm_session *t, lm_err *e)
{
    if (!t->o.span || !lm_given(&tool, "document-mask") || !opt.documents)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--document-mask", "leave it out",
                   "spans are cut out of text that runs on over borders of documents");
}

static lm_code prepare(train_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    if (train_ask(s, e) || tool.rests)
        return e->code;
    if (check_data_exists(t->ask.data, e) || lm_training_open(&tool, &opt.loop, t, e) ||
        read_config(t, e) || check_documents(t, e) || lm_training_check_experts(&opt.loop, t, e) ||
        check_biases(t, e) || check_ahead(t, e))
        return e->code;
    lm_training_say_slow(&tool, t);
    if (opt.mesh.turned && t->config.tied)
        lm_say(
            &tool, LM_LOG_WARN,
            "--mesh: from here on embedding and output head, which are one, add up their gradients "
            "apart, as stages must: the last bits differ from those of the run so far");
    return LM_OK;
}

static lm_code work(train_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    lm_memory_plan plan;
    lm_buf text = { 0 };
    if (prepare(s, e) || tool.rests || lm_session_program(t, &plan, e))
        return e->code;
    if (opt.dump_graph)
        return lm_print_text(lm_program_dump(t->program, &text, e), &text, "");
    lm_train_advise(&t->o, &t->config, &tool.sink);
    if (tool.dry_run)
        return print_outlook(t, &plan, e);
    if (open_train(t, e) || lm_session_open_val(t, e) || lm_training_agree(&tool, &s->run, t, e) ||
        lm_options_save(&s->run.options, e) || lm_session_open_run(t, e))
        return e->code;
    return lm_training_run(&tool, &opt.loop, t, &plan, e);
}

/* Nothing is made: of several ranks the first prints it. */
static bool prints(void)
{
    return train_plan_only() || opt.loop.list_optimizers;
}

/* --elastic: the ranks are processes that this one starts. */
static bool starts_ranks(void)
{
    return opt.mesh.elastic && !tool.comm && !prints() && !opt.check_links &&
           !lm_elastic_is_rank() && (opt.mesh.ranks > 1 || opt.mesh.mesh);
}

static lm_code start_ranks(lm_err *e)
{
    lm_mesh mesh = lm_mesh_alone;
    char *step_dir = NULL, *own = NULL;
    if (opt.mesh.mesh && lm_mesh_read(opt.mesh.mesh, &mesh, e)) {
        snprintf(e->where, sizeof e->where, "--mesh");
        return e->code;
    }
    if (!tool.output && !opt.loop.resume)
        lm_misuse(&tool, "--output", "name the folder of the run with -o RUN", "is missing");
    if (!tool.output && lm_run_find(opt.loop.resume, NULL, &step_dir, &own, e))
        return e->code;
    lm_elastic_start(&tool, (int)(opt.mesh.ranks > 0 ? opt.mesh.ranks : lm_mesh_ranks(&mesh)),
                     tool.output ? tool.output : own, !opt.loop.resume, e);
    lm_free(step_dir);
    lm_free(own);
    return e->code;
}

/* In such a process: after a loss the run goes on, whatever the command line began. */
static void be_rank(void)
{
    lm_mesh mesh = lm_mesh_alone;
    lm_err unread = { 0 };
    if (opt.mesh.ranks > 0 && (!opt.mesh.mesh || !lm_mesh_read(opt.mesh.mesh, &mesh, &unread)))
        opt.mesh.was = opt.mesh.ranks / (lm_mesh_ranks(&mesh) / mesh.size[LM_AXIS_DP]);
    opt.mesh.ranks = tool.comm ? -1 : 1;
    if (!lm_elastic_run())
        return;
    tool.argc = opt.loop.resume && !tool.output ? tool.argc : 0;
    opt.loop.resume = lm_elastic_run();
    tool.force = false;
}

static const char *kind_of_work(void)
{
    return opt.check_links ? "a check of links" : prints() ? "a plan or a list" : "a run";
}

/* Links are tried without a run: an option of a run would have no effect. */
static void check_alone(void)
{
    static const char *const used[] = {
        "check-links", "threads", "json", "config", "progress", NULL
    };
    const char *other = lm_given_besides(&tool, used);
    char name[64];

    if (tool.argc)
        lm_misuse(&tool, tool.argv[0], "leave it out", "--check-links has no operands");
    if (!other)
        return;
    snprintf(name, sizeof name, "--%s", other);
    lm_misuse(&tool, name, "leave it out", "belongs to a run, and --check-links starts none");
}

int main(int argc, char **argv)
{
    train_session s = { .t.ask.from = -1 };
    lm_err e = { 0 };
    lm_begin(&tool, argc, argv);
    if (opt.check_links)
        check_alone();
    if (!prints() && !opt.check_links) /* the run is the product, not standard output */
        lm_outlast_readers(&tool);
    const bool all = opt.check_links || !prints();
    if (lm_elastic_is_rank())
        be_rank();
    if (starts_ranks())
        start_ranks(&e);
    else if (!lm_ranks_same_work(&tool, kind_of_work(), &e) && (tool.rank == 0 || all)) {
        if (opt.check_links)
            lm_links_check(&tool, &e);
        else if (opt.loop.list_optimizers)
            lm_training_list_optimizers(&tool, &e);
        else
            work(&s, &e);
    }
    lm_session_close(&s.t, &e);
    lm_training_close(&tool, &s.t);
    if (e.code)
        lm_complain(&tool, &e);
    lm_loop_run_fini(&s.run); /* the options borrow from it */
    return lm_end(&tool);
}
