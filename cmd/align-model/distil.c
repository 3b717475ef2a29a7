/* SPDX-License-Identifier: Apache-2.0 */
/* distil.c -- the part of align-model that learns from a teacher: its options, the teacher, and the objective. */
#include <stdio.h>
#include <stdlib.h>

#include "align-model/options.h"
#include "base/stop.h"
#include "common/model.h"

static const char *const own_options[] = { "teacher", "lambda", "distill-temperature", NULL };

bool align_distils(const align_session *s)
{
    return lm_align_kind_of(&s->spec) == LM_ALIGN_TEACHER;
}

static double lambda_of(const align_session *s)
{
    return lm_align_hyper(&s->spec, "lambda", 0);
}

/* ---- options ---- */

/* A resumed run may begin in another folder. */
static lm_code find_teacher(align_session *s, lm_err *e)
{
    if (*opt.teacher == '/')
        return LM_OK;
    s->teacher_path = realpath(opt.teacher, NULL);
    if (!s->teacher_path)
        return lm_fail(e, LM_EIO, opt.teacher, "name a model", "cannot be read");
    opt.teacher = s->teacher_path;
    return LM_OK;
}

lm_code align_ask_teacher(align_session *s, lm_err *e)
{
    char where[40];
    for (int i = 0; own_options[i] && !align_distils(s); i++)
        if (lm_given(&tool, own_options[i])) {
            snprintf(where, sizeof where, "--%s", own_options[i]);
            return lm_fail(e, LM_EUSAGE, where, "give --loss gkd too", "%s learns from no teacher",
                           s->spec.use[0].loss->name);
        }
    if (!align_distils(s))
        return LM_OK;
    if (s->spec.n > 1)
        return lm_fail(e, LM_EUSAGE, "--loss", "name it alone", "gkd is not added to other losses");
    if (!opt.teacher)
        return lm_fail(e, LM_EUSAGE, "--teacher", "name a model: --teacher MODEL",
                       "gkd learns from a teacher, and no teacher is given");
    if (!opt.loop.resume && !lm_given(&tool, "temperature")) /* those of TRL's GKD */
        opt.temperature = 0.9;
    if (!opt.loop.resume && !lm_given(&tool, "max-new-tokens"))
        opt.most_new = 128;
    return find_teacher(s, e);
}

/* ---- the teacher ---- */

int64_t align_longest_own(const align_session *s)
{
    int64_t most = 0;
    if (!align_distils(s) || lambda_of(s) <= 0)
        return 0;
    for (int64_t i = 0; s->train && i < lm_text_answers_count(s->train); i++) {
        const int64_t n = lm_text_answers_at(s->train, i)->prompt;
        most = n > most ? n : most;
    }
    return (s->train ? most : align_planned_prompt(s)) + opt.most_new;
}

lm_code align_open_teacher(align_session *s, lm_err *e)
{
    lm_session *t = &s->t;
    const lm_build how = {
        .batch = t->o.batch, .seq = t->o.seq, .precision = t->o.precision, .backend = t->backend
    };
    if (!align_distils(s) || lm_stopping())
        return LM_OK;
    if (lm_open_model(&tool, opt.teacher, NULL, t->par, &s->teacher.weights, e) ||
        lm_teacher_check(&s->teacher, opt.teacher, &t->config, s->tok, e) ||
        lm_teacher_build(&s->teacher, &how, lm_align_hyper(&s->spec, "beta", 0.5),
                         lm_align_hyper(&s->spec, "temperature", 1), e))
        return e->code;
    t->o.build.teacher = &s->teacher.as;
    return LM_OK;
}

/* ---- the objective ---- */

lm_code align_make_distilling(align_session *s, lm_err *e)
{
    const int64_t own = align_longest_own(s);
    const lm_gkd_opts o = { .spec = &s->spec,
                            .train = s->train,
                            .val = s->val,
                            .teacher = &s->teacher,
                            .each = opt.batch,
                            .check = opt.loop.eval_batches,
                            .vocab = s->t.config.vocab,
                            .seed = (uint64_t)tool.seed,
                            .rollout =
                                own ? align_rollout(s, own - opt.most_new) : (lm_rollout_opts){ 0 },
                            .tokenizer = s->tok };
    double rows = 0;
    if (lm_gkd_new(&o, &s->gkd, e))
        return e->code;
    s->t.ask.objective = lm_gkd_objective(s->gkd);
    for (int64_t i = 0; i < lm_text_answers_count(s->train); i++)
        rows += (double)(lm_text_answers_at(s->train, i)->n - 1);
    rows *= (double)opt.batch / (double)lm_text_answers_count(s->train);
    const double micros = rows / (double)(s->t.o.seq * s->t.o.batch);
    s->t.o.accumulate = micros > 1 ? (int64_t)(micros + 1) : 1;
    return LM_OK;
}

lm_code align_add_teacher(align_session *s, lm_memory_plan *plan, lm_err *e)
{
    const bool device = !s->t.backend->host_memory;
    const int64_t own = align_longest_own(s);
    if (!align_distils(s))
        return LM_OK;
    lm_memory_add(plan, "teacher",
                  (double)lm_teacher_bytes(&s->teacher, (size_t)plan->arena) * align_ranks_here(s),
                  device);
    return own ? align_add_rollouts(s, own - opt.most_new, plan, e) : LM_OK;
}

void align_close_teacher(align_session *s)
{
    lm_gkd_free(s->gkd);
    lm_teacher_close(&s->teacher);
    free(s->teacher_path);
}
