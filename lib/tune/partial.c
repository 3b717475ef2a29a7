/* SPDX-License-Identifier: Apache-2.0 */
/* partial.c -- which tensors of a model train. */
#include "tune/partial.h"

#include "base/json.h"
#include "base/text.h"
#include "model/arch.h"
#include "train/groups.h"

typedef struct {
    lm_tune_partial *p;
    const char *patterns;
} walk;

static lm_code see_tensor(void *ctx, const lm_model_tensor *t)
{
    walk *w = ctx;
    int64_t n = t->ndim > 1 ? t->dim[0] * t->dim[1] : t->dim[0];
    w->p->params += n;
    if (!lm_groups_match(w->patterns, t->hf, t->part, t->bias))
        return LM_OK;
    w->p->trained += n;
    return json_object_set_new(w->p->names, lm_arch_rootless(t->hf), json_true()) ? LM_ELIMIT
                                                                                  : LM_OK;
}

/* Each pattern must match: a misspelt one would silently train less. */
static lm_code check_each(const lm_config *c, const char *patterns, lm_err *e)
{
    const char *at = patterns;
    char one[256];
    for (;; at++) {
        lm_tune_partial alone = { .names = json_object() };
        walk w = { &alone, one };
        if (!lm_text_until(&at, "|", one, sizeof one))
            return lm_fail(e, LM_EUSAGE, "patterns", "write shorter ones", "a pattern is too long");
        lm_code rc = alone.names ? lm_model_tensors_walk(c, see_tensor, &w) : LM_ELIMIT;
        json_decref(alone.names);
        if (rc)
            return lm_fail(e, LM_ELIMIT, "patterns", NULL, "no memory");
        if (!alone.trained)
            return lm_fail(e, LM_EUSAGE, "patterns",
                           "name tensors as inspect-model lists them, or embed, head, norm, bias",
                           "no tensor of the model matches '%s'", one);
        if (!*at)
            return LM_OK;
    }
}

lm_code lm_tune_partial_make(const lm_config *c, const char *patterns, lm_tune_partial *out,
                             lm_err *e)
{
    walk w = { out, patterns };
    *out = (lm_tune_partial){ .names = json_object() };
    lm_code rc = out->names ? check_each(c, patterns, e)
                            : lm_fail(e, LM_ELIMIT, "patterns", NULL, "no memory");
    if (!rc && lm_model_tensors_walk(c, see_tensor, &w))
        rc = lm_fail(e, LM_ELIMIT, "patterns", NULL, "no memory");
    if (rc)
        lm_tune_partial_fini(out);
    return rc;
}

void lm_tune_partial_fini(lm_tune_partial *p)
{
    json_decref(p->names);
    *p = (lm_tune_partial){ 0 };
}

bool lm_tune_partial_trains(void *ctx, const char *tensor)
{
    const lm_tune_partial *p = ctx;
    return json_object_get(p->names, lm_arch_rootless(tensor)) != NULL;
}
