/* SPDX-License-Identifier: Apache-2.0 */
/* reference.c -- the model that answers are compared with: MODEL, or MODEL+ADAPTER. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "align-model/options.h"
#include "base/mem.h"
#include "common/training.h"
#include "tune/align/reference_model.h"

/* ---- paths ---- */

/* The base and the adapter of a specification; a path that exists is one model, whatever its name. */
static lm_code split(const char *spec, char **base, char **adapter, lm_err *e)
{
    const char *plus = lm_path_exists(spec) ? NULL : strrchr(spec, '+');
    *adapter = NULL;
    if (lm_strdup(base, spec, e) || !plus)
        return e->code;
    (*base)[plus - spec] = '\0';
    return lm_strdup(adapter, plus + 1, e);
}

lm_code align_absolute(const char **spec, char **owned, lm_err *e)
{
    char *path[2] = { NULL, NULL }, *real[2] = { NULL, NULL };
    if (split(*spec, &path[0], &path[1], e) || !path[1]) {
        lm_free(path[0]);
        return e->code ? e->code : lm_training_absolute(spec, owned, e);
    }
    const char *base = path[0], *adapter = path[1];
    lm_code rc = lm_training_absolute(&base, &real[0], e);
    rc = rc ? rc : lm_training_absolute(&adapter, &real[1], e);
    rc = rc ? rc : lm_asprintf(owned, e, "%s+%s", base, adapter);
    if (!rc)
        *spec = *owned;
    for (int i = 0; i < 2; i++) {
        lm_free(path[i]);
        lm_free(real[i]);
    }
    return rc;
}

/* ---- which ---- */

bool align_compares(const align_session *s)
{
    return lm_align_reads_ref(&s->spec) || opt.kl > 0;
}

bool align_shares_reference(const align_session *s)
{
    return s->tuning.attach && lm_tuning_keeps_base(&s->tuning) && s->ref_base &&
           lm_path_same(s->ref_base, s->t.ask.model);
}

/* The model before the first step: with --init-adapter it has that one. */
static lm_code choose(align_session *s, lm_err *e)
{
    const char *first = opt.tuning.init_adapter;
    if (opt.reference)
        return LM_OK;
    opt.reference = s->t.ask.model;
    if (!first || opt.loop.resume)
        return LM_OK;
    if (lm_asprintf(&s->ref_spec, e, "%s+%s", s->t.ask.model, first))
        return e->code;
    opt.reference = s->ref_spec;
    return LM_OK;
}

/* A path that is not absolute now is that of no file. */
static lm_code check_path(const char *path, lm_err *e)
{
    if (*path == '/' || lm_path_exists(path))
        return LM_OK;
    if (!strcmp(path, "-"))
        return lm_fail(e, LM_EUSAGE, "standard input",
                       "name the model that is compared with: --reference MODEL",
                       "cannot be read again");
    return lm_fail(e, LM_EIO, path, "give what is compared with: --reference MODEL[+ADAPTER]",
                   "cannot open");
}

/* opt.reference as two absolute paths. */
static lm_code resolve(align_session *s, lm_err *e)
{
    if (align_absolute(&opt.reference, &s->ref_owned, e) ||
        split(opt.reference, &s->ref_base, &s->ref_adapter, e) || check_path(s->ref_base, e))
        return e->code;
    return s->ref_adapter ? check_path(s->ref_adapter, e) : LM_OK;
}

static lm_code fail_unread(const align_session *s, lm_err *e)
{
    const lm_align_loss *loss = s->spec.use[0].loss;
    const bool keeps = lm_align_keeps(&s->spec);
    return lm_fail(
        e, LM_EUSAGE, "--reference", keeps ? "leave it out" : "leave it out, or give --kl X",
        "%s%s compares completions with no other model", loss->name, keeps ? "" : " without --kl");
}

lm_code align_find_reference(align_session *s, lm_err *e)
{
    if (!align_compares(s)) {
        opt.reference = NULL;
        return lm_given(&tool, "reference") ? fail_unread(s, e) : LM_OK;
    }
    return choose(s, e) ? e->code : resolve(s, e);
}

lm_code align_find_given_reference(align_session *s, lm_err *e)
{
    return opt.reference && (!opt.loop.resume || lm_given(&tool, "reference")) ? resolve(s, e)
                                                                               : LM_OK;
}

void align_reference(const align_session *s, lm_on_policy_opts *o)
{
    o->reference_model = s->ref_base;
    o->reference_adapter = s->ref_adapter;
    o->reference_shares = align_shares_reference(s);
}

/* ---- memory ---- */

/* Of given answers it is closed before the first step: on a host it counts as far as it passes what
 * is not touched until then. */
lm_code align_add_reference(const align_session *s, lm_memory_plan *plan, lm_err *e)
{
    const lm_session *t = &s->t;
    const bool closes = !s->samples && t->backend->host_memory;
    lm_reference_model r = { .shares = align_shares_reference(s) };
    size_t bytes = 0;
    if (!lm_reference_model_read(&r, s->ref_base, s->ref_adapter, &t->config, s->tok, e))
        lm_reference_model_outlook(&r, t->program->train, closes ? 0 : (size_t)plan->arena, &bytes,
                                   e);
    lm_reference_model_close(&r);
    const double all = (double)bytes * align_ranks_here(s);
    lm_memory_add(plan, "reference", closes ? fmax(all - plan->later, 0) : all,
                  !t->backend->host_memory);
    return e->code;
}

void align_close_reference(align_session *s)
{
    lm_free(s->ref_spec);
    lm_free(s->ref_owned);
    lm_free(s->ref_base);
    lm_free(s->ref_adapter);
}
