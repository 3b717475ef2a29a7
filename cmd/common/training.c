/* SPDX-License-Identifier: Apache-2.0 */
/* training.c -- inputs of tools that train: operands, the run that is resumed, the device. */
#include "common/training.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "common/device.h"
#include "common/links.h"
#include "format/folder_run.h"
#include "train/run.h"

/* ---- operands ---- */

const char *lm_training_saved(const lm_loop_run *r, const char *key)
{
    return json_string_value(json_object_get(r->saved, key));
}

/* Options that a resumed run does not take from the former one, those of any of these tools.  The
 * last four belong to the former run when -o begins another. */
static const char *const not_kept[] = {
    "resume",       "resume-schedule", "dry-run",         "json",    "print-config",
    "force",        "threads",         "output",          "measure", "dump-graph",
    "stats",        "device",          "progress",        "trace",   "list-losses",
    "list-methods", "list-rewards",    "list-optimizers", "ranks",   "schedule",
    "metrics",      "tensorboard",     "write-samples",   "save-to", NULL
};
/* Which ranks there are is not kept, either, but by elastic runs. */
static const char *const of_ranks[] = { "mesh",        "cp",   "stages",        "sequence-parallel",
                                        "expert-room", "zero", "zero-prefetch", NULL };
enum {
    NOT_KEPT = sizeof not_kept / sizeof *not_kept,
    OF_RANKS = sizeof of_ranks / sizeof *of_ranks
};

/* Each tool resumes its own runs.  Runs of older versions do not name theirs. */
static lm_code check_tool(const lm_tool *t, const lm_loop_args *a, const lm_loop_run *r, lm_err *e)
{
    const char *of = lm_training_saved(r, "tool");
    char todo[160];
    if (!of || !strcmp(of, t->name))
        return LM_OK;
    snprintf(todo, sizeof todo, "go on with %.20s --resume %.100s", of, a->resume);
    return lm_fail(e, LM_EUSAGE, a->resume, todo, "is a run of %.20s", of);
}

/* Set the options that were not given to those of the run. */
static lm_code take_options(const lm_loop_args *a, bool same_run, const lm_loop_run *r, lm_err *e)
{
    const char *skip[NOT_KEPT + OF_RANKS] = { NULL };
    const bool elastic = a->elastic || json_is_true(json_object_get(r->saved, "elastic"));
    int n = 0;
    for (int i = 0; i < NOT_KEPT - (same_run ? 5 : 1); i++)
        skip[n++] = not_kept[i];
    for (int i = 0; !elastic && i < OF_RANKS - 1; i++)
        skip[n++] = of_ranks[i];
    return lm_options_resume(r->saved, skip, r->step_dir, e);
}

/* With --resume: find the checkpoint, and set all options that were not given from those of the
 * run. */
static lm_code resume_run(lm_tool *t, const lm_loop_args *a, bool plan, lm_session_ask *ask,
                          lm_loop_run *r, lm_err *e)
{
    char todo[80];
    if (!plan && t->rank == 0 && lm_run_check_idle(a->resume, t->output, e))
        return e->code;
    if (lm_run_find(a->resume, t->output, &r->step_dir, &r->own_run, e) ||
        lm_ckpt_options(r->step_dir, &r->saved, &r->step, e) || check_tool(t, a, r, e))
        return e->code;
    ask->step = r->step;
    ask->run = r->own_run;
    if (t->output && !lm_path_same(t->output, ask->run))
        ask->run = t->output;
    else
        ask->from = lm_run_step_of(lm_path_base(r->step_dir));
    if (take_options(a, ask->from >= 0, r, e))
        return e->code;
    ask->model = ask->resume = r->step_dir;
    ask->data = t->argc > 0 ? t->argv[0] : lm_training_saved(r, "data");
    bool stream = ask->data && !strcmp(ask->data, "-") && t->argc == 0;
    if (ask->data && !stream)
        return LM_OK;
    snprintf(todo, sizeof todo, "name the data: %s --resume RUN DATA", t->name);
    return lm_fail(e, LM_EUSAGE, r->step_dir, todo,
                   stream ? "its data came from standard input"
                          : "does not say which data it was trained on");
}

/* The operands of a new run. */
static void begin_run(lm_tool *t, bool plan, const char *product, lm_session_ask *ask)
{
    char todo[80];
    snprintf(todo, sizeof todo, "name the folder of %s", product);
    if (t->argc > 2) /* where the table allows more, for other work of the tool */
        lm_misuse(t, t->argv[2], "give one MODEL and one DATA", "one operand too many");
    if (t->argc < 1 || (t->argc < 2 && !plan))
        lm_misuse(t, "operands", "give MODEL and DATA, or --resume RUN", "%d given", t->argc);
    ask->model = t->argv[0];
    ask->data = t->argc > 1 ? t->argv[1] : NULL;
    ask->run = t->output;
    if (!ask->run && !plan)
        lm_misuse(t, "--output", todo, "is missing");
    if (t->output && !strcmp(t->output, "-"))
        lm_misuse(t, "--output", todo, "a run is a folder, not a stream");
}

/* Launchers give standard input to one rank. */
static void refuse_stream(lm_tool *t, const char *operand)
{
    if (t->comm && operand && !strcmp(operand, "-"))
        lm_misuse(t, "-", "name a file or a folder",
                  "standard input cannot be read by each of %d ranks", t->ranks);
}

lm_code lm_training_operands(lm_tool *t, const lm_loop_args *a, bool plan, const char *product,
                             lm_session *s, lm_loop_run *r, lm_err *e)
{
    if (a->resume && t->argc > 1)
        lm_misuse(t, t->argv[1], "with --resume only DATA may be named", "one operand too many");
    if (!a->resume)
        begin_run(t, plan, product, &s->ask);
    else if (resume_run(t, a, plan, &s->ask, r, e))
        return e->code;
    refuse_stream(t, s->ask.model);
    refuse_stream(t, s->ask.data);
    refuse_stream(t, a->val);
    lm_refuse_twice(t, (const char *[]){ a->val, a->resume }, 2);
    if (plan || (s->ask.from < 0 && lm_run_apart(s->ask.run, s->ask.model, e)))
        return e->code;
    return t->rank > 0 ? LM_OK : lm_run_check(s->ask.run, s->ask.from, t->force, e);
}

/* Option i and what follows it, which is its value if it has one. */
static void show_option(const lm_tool *t, int i, char *out, size_t size)
{
    const char *name = i < t->told_argc ? t->told_argv[i] : "none",
               *value = i + 1 < t->told_argc ? t->told_argv[i + 1] : "";
    snprintf(out, size, *value && strncmp(value, "--", 2) != 0 ? "%s %s" : "%s", name, value);
}

/* One by one, so that the first that differs is shown. */
static lm_code agree_on_options(const lm_tool *t, lm_comm *c, lm_err *e)
{
    int32_t most = t->told_argc;
    char text[512];
    if (lm_comm_all_reduce(c, &most, &most, 1, LM_DTYPE_I32, LM_COMM_MAX, e))
        return e->code;
    for (int i = 0; i < most; i++) {
        show_option(t, i, text, sizeof text);
        if (lm_comm_agree(c, "options", text, e))
            return e->code;
    }
    return LM_OK;
}

/* The options of a resumed run, of which ranks may have copies. */
static lm_code agree_on_run(const lm_loop_run *r, lm_comm *c, lm_err *e)
{
    char text[64], *saved = r->saved ? json_dumps(r->saved, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    snprintf(text, sizeof text, "options of digest %016" PRIx64, saved ? lm_hash_str(saved) : 0);
    free(saved);
    return lm_comm_agree(c, "run", text, e);
}

lm_code lm_training_agree(lm_tool *t, const lm_loop_run *r, lm_session *s, lm_err *e)
{
    lm_comm *c = s->ask.comm;
    if (!c)
        return LM_OK;
    return agree_on_options(t, c, e) || agree_on_run(r, c, e) || lm_session_agree(s, e) ||
                   lm_links_try(t, e)
               ? e->code
               : LM_OK;
}

lm_code lm_training_find_base(lm_session *s, const lm_loop_run *r, lm_err *e)
{
    s->ask.model = lm_training_saved(r, "base");
    return s->ask.model ? LM_OK
                        : lm_fail(e, LM_EFORMAT, r->step_dir, "begin the run again",
                                  "does not say which model its adapter belongs to");
}

lm_code lm_training_absolute(const char **path, char **owned, lm_err *e)
{
    if (!*path || **path == '/' || !lm_path_exists(*path))
        return LM_OK;
    char *real = realpath(*path, NULL);
    if (!real)
        return lm_fail(e, LM_EIO, *path, NULL, "cannot be read");
    lm_code rc = lm_strdup(owned, real, e);
    free(real);
    if (!rc)
        *path = *owned;
    return rc;
}

lm_code lm_training_template(const char **name, char **owned, lm_err *e)
{
    return *name && strpbrk(*name, "./") ? lm_training_absolute(name, owned, e) : LM_OK;
}

/* ---- checks ---- */

lm_code lm_training_refuse_alone(const lm_loop_args *a, bool finds_val, lm_err *e)
{
    if (a->resume_schedule && !a->resume)
        return lm_fail(e, LM_EUSAGE, "--resume-schedule", "leave it out", "serves --resume only");
    if (a->val && !a->eval_every && !a->resume) /* a resumed run may have it from before */
        return lm_fail(e, LM_EUSAGE, "--val", "give --eval-every too",
                       "nothing is evaluated during the run");
    if (a->eval_every && !a->val && !finds_val)
        return lm_fail(e, LM_EUSAGE, "--eval-every", "give --val FILE too",
                       "there are no validation data");
    return LM_OK;
}

void lm_training_refuse_inputs(lm_tool *t, const lm_loop_args *a, const lm_session *s)
{
    const char *const outputs[] = { t->metrics ? t->metrics : "-", a->tensorboard, a->trace };
    const char *const inputs[] = { s->ask.model, s->train_path ? s->train_path : s->ask.data,
                                   s->val_path ? s->val_path : a->val, a->resume };
    for (size_t o = 0; o < sizeof outputs / sizeof *outputs; o++) {
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
            if (outputs[o] && inputs[i])
                lm_refuse_same(t, outputs[o], inputs[i]);
        lm_refuse_ending(t, outputs[o], LM_MAKES_TEXT);
    }
}

/* ---- threads and device ---- */

/* Those of this process.  Unless they were asked for, ranks that may use the same cores divide these. */
static int threads_of(const lm_tool *t)
{
    const bool asked = lm_given(t, "threads") || getenv("LM_THREADS");
    if (!t->comm || asked)
        return t->threads;
    return t->threads > t->ranks_sharing ? t->threads / t->ranks_sharing : 1;
}

lm_code lm_training_open(lm_tool *t, const lm_loop_args *a, lm_session *s, lm_err *e)
{
    const int ranks = !t->comm ? (int)lm_mesh_ranks(&s->o.mesh) : 1;
    const int threads = threads_of(t);
    if (lm_par_new(&s->par, threads, e) ||
        (ranks > 1 && lm_par_new(&s->rank_par, threads > ranks ? threads / ranks : 1, e)) ||
        lm_open_backend(t, ranks > 1 ? s->rank_par : s->par, a->deterministic, &s->backend, e))
        return e->code;
    s->ask.how = lm_tool_bundle(t, s->par);
    return LM_OK;
}

void lm_training_close(lm_tool *t, lm_session *s)
{
    lm_close_backend(t, s->backend);
    lm_par_free(s->rank_par);
    lm_par_free(s->par);
}

void lm_loop_run_fini(lm_loop_run *r)
{
    lm_free(r->step_dir);
    lm_free(r->own_run);
    json_decref(r->saved);
    lm_buf_fini(&r->options);
    lm_run_tiers_fini(&r->tiers);
}

/* What the routers of a layer must be for the options. */
static lm_code check_layer(const lm_loop_args *a, const lm_moe *m, const char *model, lm_err *e)
{
    if (a->random_second && m->chosen != 2)
        return lm_fail(e, LM_EUSAGE, "--moe-random-second", "leave it out",
                       "serves models that choose 2 experts, and %s chooses %lld", model,
                       (long long)m->chosen);
    if (!strcmp(a->aux_type, "load") && !m->noisy)
        return lm_fail(e, LM_EUSAGE, "--moe-aux-loss-type", "give importance or layer",
                       "load serves routers that learn noise (gate_add_noise); those of %s do not",
                       model);
    if (!strcmp(a->aux_type, "load") && a->random_second)
        return lm_fail(e, LM_EUSAGE, "--moe-aux-loss-type", "leave out --moe-random-second",
                       "load is that of tokens whose choices follow from their logits");
    if (m->noisy && a->router_noise > 0)
        return lm_fail(e, LM_EUSAGE, "--moe-router-noise", "leave it out",
                       "routers of %s learn their own (gate_add_noise)", model);
    if (a->affinity_nodes && m->experts % a->affinity_nodes)
        return lm_fail(e, LM_EUSAGE, "--moe-affinity-nodes", "give a divisor of them",
                       "%lld nodes do not divide the %lld experts of %s",
                       (long long)a->affinity_nodes, (long long)m->experts, model);
    if (a->expert_choice && (m->normalise || m->score_bias || m->groups > 1))
        return lm_fail(
            e, LM_EUSAGE, "--moe-expert-choice",
            "init-model --set norm_topk_prob=false makes a model that it serves",
            "serves routers without norm_topk_prob, bias and groups; those of %s have %s", model,
            m->normalise    ? "norm_topk_prob"
            : m->score_bias ? "a bias"
                            : "groups");
    return LM_OK;
}

lm_code lm_training_check_experts(const lm_loop_args *a, const lm_session *s, lm_err *e)
{
    const char *given = a->aux_coef > 0           ? "--moe-aux-loss-coeff"
                        : a->z_coef > 0           ? "--moe-z-loss-coeff"
                        : a->affinity_coef > 0    ? "--moe-affinity-loss-coeff"
                        : a->capacity > 0         ? "--moe-expert-capacity-factor"
                        : a->random_second        ? "--moe-random-second"
                        : a->expert_choice        ? "--moe-expert-choice"
                        : a->jitter > 0           ? "--moe-input-jitter-eps"
                        : a->router_noise > 0     ? "--moe-router-noise"
                        : *a->router_dtype == 'b' ? "--moe-router-dtype"
                                                  : NULL;
    bool any = false;
    if (*a->router_dtype == 'b' && s->o.precision.low != LM_DTYPE_BF16)
        return lm_fail(e, LM_EUSAGE, "--moe-router-dtype", "give --dtype bf16 too, or leave it out",
                       "serves computation in bf16");
    for (int64_t l = 0; l < s->config.layers; l++) {
        const lm_moe *m = &s->config.layer[l].moe;
        any |= m->experts > 0;
        if (m->experts && check_layer(a, m, s->ask.model, e))
            return e->code;
    }
    return !given || any ? LM_OK
                         : lm_fail(e, LM_EUSAGE, given, "leave it out",
                                   "serves mixtures of experts; %s has no experts", s->ask.model);
}

void lm_training_say_slow(lm_tool *t, const lm_session *s)
{
    if (s->backend->host_memory && s->o.precision.low == LM_DTYPE_BF16 && t->cpu < LM_CPU_BF16)
        lm_say(t, LM_LOG_WARN,
               "no AVX512-BF16 here: bf16 saves memory, but its products run in f32");
}
