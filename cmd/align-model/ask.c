/* SPDX-License-Identifier: Apache-2.0 */
/* ask.c -- translates the options and operands of align-model into the structures of the library. */
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>

#include "align-model/options.h"
#include "base/mem.h"
#include "common/training.h"
#include "train/run.h"

/* ---- operands ---- */

static lm_code find_operands(align_session *s, lm_err *e)
{
    char folder[PATH_MAX];
    if (lm_training_operands(&tool, &opt.loop, tool.dry_run, "the run with -o RUN", &s->t, &s->run,
                             e) ||
        !opt.loop.resume)
        return e->code;
    return lm_path_folder(s->run.step_dir, folder, e) ||
                   lm_path_join(&s->kept, folder, LM_RUN_REFERENCE, e)
               ? e->code
               : LM_OK;
}

/* ---- the loss ---- */

static lm_code read_loss(align_session *s, lm_err *e)
{
    const struct {
        const char *key, *value;
    } given[] = {
        { "beta", opt.beta },
        { "label_smoothing", opt.smoothing },
        { "f_divergence_type", opt.f_divergence },
        { "f_alpha_divergence_coef", opt.f_alpha },
        { "ld_alpha", opt.ld_alpha },
        { "average", opt.average },
        { "use_weighting", opt.weighting },
        { "entropy_coef", opt.entropy_coef },
        { "simpo_gamma", opt.gamma },
        { "cpo_alpha", opt.cpo_alpha },
        { "alpha", opt.alpha },
        { "desirable_weight", opt.desirable },
        { "undesirable_weight", opt.undesirable },
        { "lambda", opt.lambda },
        { "temperature", opt.distill_temperature },
    };
    if (lm_align_parse(opt.loss, &s->spec, e) || align_ask_teacher(s, e))
        return e->code;
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (given[i].value && lm_align_set(&s->spec, given[i].key, given[i].value, e))
            return e->code;
    lm_align_kind kind = lm_align_kind_of(&s->spec);
    if (align_ask_rollouts(s, e) || s->samples || kind != LM_ALIGN_POLICY)
        return e->code;
    return lm_fail(e, LM_EUSAGE, "--loss", "use one of the losses of pairs or judged answers",
                   "%s is not a loss of given answers", s->spec.use[0].loss->name);
}

/* ---- the training ---- */

static lm_code name_reference(align_session *s, lm_err *e)
{
    if (s->samples || !lm_align_reads_ref(&s->spec) || !s->t.ask.run) {
        lm_free(s->kept);
        s->kept = NULL;
        return LM_OK;
    }
    return lm_path_join(&s->reference, s->t.ask.run, LM_RUN_REFERENCE, e);
}

/* ---- ranks ---- */

int align_ranks_here(const align_session *s)
{
    const int ranks = (int)lm_mesh_ranks(&s->t.o.mesh), here = s->t.o.ranks_here;
    return here > 0 && here < ranks ? here : ranks;
}

lm_code align_agree_on_data(uint64_t digest, lm_err *e)
{
    char text[48];
    snprintf(text, sizeof text, "data of digest %016" PRIx64, digest);
    return tool.comm && !tool.dry_run ? lm_comm_agree(tool.comm, "data", text, e) : LM_OK;
}

/* What threads of one process cannot each have. */
static lm_code check_threads(const align_session *s, lm_err *e)
{
    const char *what = s->recipe.method   ? "the base of an adapter"
                       : align_distils(s) ? "a teacher"
                                          : NULL;
    if (tool.comm || lm_mesh_ranks(&s->t.o.mesh) == 1 || !what)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, lm_given(&tool, "ranks") ? "--ranks" : "--mesh",
                   "start processes: mpirun -n 2 align-model ...",
                   "ranks that are threads cannot share %s", what);
}

lm_code align_ask(align_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (find_operands(s, e))
        return e->code;
    s->t.o = (lm_trainer_opts){ .accumulate = 1,
                                .precision = { .low = lm_dtype_parse(opt.dtype) },
                                .documents = true,
                                .objective = true };
    opt.mesh.varies = true;
    if (lm_mesh_ask(&tool, &opt.mesh, opt.loop.resume != NULL, &s->t.o, e))
        return e->code;
    lm_loop_session(&tool, &opt.loop, &s->run, a);
    a->plan = tool.dry_run;
    a->comm = tool.dry_run ? NULL : tool.comm;
    a->dropout = 0;
    if (align_ask_adapter(s, e) || read_loss(s, e) || check_threads(s, e) ||
        lm_training_refuse_alone(&opt.loop, false, e) || name_reference(s, e))
        return e->code;
    return opt.map ? lm_text_record_map_add(&s->map, opt.map, e) : LM_OK;
}

lm_code align_schedule(align_session *s, int64_t records, lm_err *e)
{
    int64_t steps = opt.steps;
    if (!steps)
        steps = (int64_t)ceil(opt.epochs * (double)records / (double)opt.batch - 1e-9);
    return lm_loop_ask(&tool, &opt.loop, align_rate(s), steps < 1 ? 1 : steps, &s->run, &s->t.o, e)
               ? e->code
               : lm_tuning_schedule(&s->tuning, &s->t, e);
}
