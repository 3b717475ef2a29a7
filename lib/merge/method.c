/* SPDX-License-Identifier: Apache-2.0 */
/* method.c -- the table of methods and of their parameters, and checks that need no data. */
#include "merge/method.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "merge/blocks.h"
#include "merge/entries.h"

static const lm_merge_method *const families[] = {
    lm_merge_linear_methods, lm_merge_sphere_methods, lm_merge_task_methods, lm_merge_other_methods,
    lm_merge_arcee_methods,  lm_merge_gram_methods,   lm_merge_ram_methods,
};
enum { N_FAMILIES = sizeof(families) / sizeof(families[0]) };

static const char *const rescale_names[] = { "none", "l1", "expected", NULL };
static const char *const election_names[] = { "weighted", "sum", "count", NULL };

#define BIG 1e30
const lm_merge_param_info lm_merge_params[LM_MERGE_PARAMS] = {
    [LM_MERGE_WEIGHT] = { "weight", NULL, true, false, -BIG, BIG, "share of the model" },
    [LM_MERGE_DENSITY] = { "density", NULL, true, false, 0, 1,
                           "fraction of its delta that is kept" },
    [LM_MERGE_GAMMA] = { "gamma", NULL, true, false, 0, 1,
                         "fraction of the largest deltas that is dropped" },
    [LM_MERGE_EPSILON] = { "epsilon", NULL, true, false, 0, 1,
                           "keep probabilities reach from density - epsilon to density + epsilon" },
    [LM_MERGE_SCALE] = { "scale", NULL, true, false, -BIG, BIG, "factor on the tensor" },
    [LM_MERGE_NORMALIZE] = { "normalize", NULL, false, true, 0, 1, "divide by the sum of weights" },
    [LM_MERGE_RESCALE] = { "rescale", rescale_names, false, false, 0, 2,
                           "how the rest of a pruned delta is scaled" },
    [LM_MERGE_LAMBDA] = { "lambda", NULL, false, false, -BIG, BIG, "factor on the merged delta" },
    [LM_MERGE_T] = { "t", NULL, false, false, -BIG, BIG,
                     "position between the base (0) and the model (1)" },
    [LM_MERGE_NUSLERP_FLATTEN] = { "nuslerp_flatten", NULL, false, true, 0, 1,
                                   "one angle for the tensor" },
    [LM_MERGE_NUSLERP_ROW_WISE] = { "nuslerp_row_wise", NULL, false, true, 0, 1,
                                    "one angle for each column, not for each row" },
    [LM_MERGE_NORMALIZE_WEIGHTS] = { "normalize_weights", NULL, false, true, 0, 1,
                                     "divide the weights by their sum" },
    [LM_MERGE_EPS] = { "eps", NULL, false, false, 0, 1, "added to norms" },
    [LM_MERGE_MAX_ITER] = { "max_iter", NULL, false, false, 0, 1e6, "most steps of the mean" },
    [LM_MERGE_TOL] = { "tol", NULL, false, false, 0, 1, "length of a step that ends the search" },
    [LM_MERGE_SELECT_TOPK] = { "select_topk", NULL, false, false, 0, 1,
                               "share of the elements, by variance, that are merged" },
    [LM_MERGE_FILTER_WISE] = { "filter_wise", NULL, false, true, 0, 1, "one angle for each row" },
    [LM_MERGE_SIGN_ELECTION] = { "sign_election", election_names, false, false, 0, 2,
                                 "what elects the sign of an element" },
    [LM_MERGE_CLAMP_T] = { "clamp_t", NULL, false, true, 0, 1,
                           "hold the ratio of model stock to [0,1]" },
    [LM_MERGE_ALPHA] = { "alpha", NULL, false, false, 0, 1,
                         "share of the off-diagonal of the Gram matrix" },
    [LM_MERGE_FISHER_FLOOR] = { "fisher_floor", NULL, false, false, 1e-20, BIG,
                                "least importance" },
    [LM_MERGE_RAM_EPSILON] = { "epsilon", NULL, false, false, 0, BIG,
                               "a delta of this size or less counts as 0" },
    [LM_MERGE_RAM_R] = { "r", NULL, false, false, 0, BIG,
                         "how much deltas of one model alone are raised" },
    [LM_MERGE_RAM_ALPHA] = { "alpha", NULL, false, false, 0, BIG,
                             "upper bound of shared over unique deltas" },
};

const lm_merge_method *lm_merge_method_at(int i)
{
    for (int f = 0; i >= 0 && f < N_FAMILIES; f++)
        for (const lm_merge_method *m = families[f]; m->name; m++)
            if (i-- == 0)
                return m;
    return NULL;
}

lm_code lm_merge_method_find(const char *name, const lm_merge_method **out, lm_err *e)
{
    char names[256] = "";
    size_t used = 0;
    for (int i = 0; (*out = lm_merge_method_at(i)); i++)
        if (!strcmp((*out)->name, name))
            return LM_OK;
    for (int i = 0; lm_merge_method_at(i) && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? " " : "",
                                 lm_merge_method_at(i)->name);
    return lm_fail(e, LM_EUSAGE, name, names, "no such merge method");
}

int lm_merge_param_find(const lm_merge_method *m, const char *name)
{
    int any = -1;
    for (int p = 0; p < LM_MERGE_PARAMS; p++) {
        if (strcmp(lm_merge_params[p].name, name) != 0)
            continue;
        if (m && m->takes >> p & 1)
            return p;
        any = any < 0 ? p : any;
    }
    return any;
}

void lm_merge_defaults(const lm_merge_method *m, double param[LM_MERGE_PARAMS])
{
    for (int p = 0; p < LM_MERGE_PARAMS; p++)
        if (isnan(param[p]) && (m->defaults & LM_MERGE_BIT(p)))
            param[p] = m->def[p];
}

static lm_code check_value(const lm_merge_method *m, const char *where, int p, double v, lm_err *e)
{
    const lm_merge_param_info *i = &lm_merge_params[p];
    if (isnan(v))
        return LM_OK;
    if (!(m->takes & LM_MERGE_BIT(p)))
        return lm_fail(e, LM_EUSAGE, where, "leave it out", "%s takes no %s", m->name, i->name);
    if (v < i->min || v > i->max)
        return lm_fail(e, LM_EUSAGE, where, NULL, "%s is %g, must be from %g to %g", i->name, v,
                       i->min, i->max);
    if ((i->truth || i->choices) && v != floor(v))
        return lm_fail(e, LM_EUSAGE, where, NULL, "%s is %g, must be a whole number", i->name, v);
    if (p == LM_MERGE_RESCALE && v == LM_RESCALE_EXPECTED && m->def[p] != LM_RESCALE_EXPECTED)
        return lm_fail(e, LM_EUSAGE, where, "take l1 or none",
                       "%s keeps by magnitude, so there is no probability to rescale by", m->name);
    return LM_OK;
}

static lm_code check_operand(const lm_merge_method *m, const lm_merge_job *j, int i, lm_err *e)
{
    const lm_merge_operand *o = i < 0 ? j->base : &j->model[i];
    char where[256], who[32] = "base";
    if (i >= 0)
        snprintf(who, sizeof who, "model %d", i + 1);
    snprintf(where, sizeof where, "%.200s: %s", j->name ? j->name : "tensor", who);
    if (!lm_dtype_is_float(o->dtype))
        return lm_fail(e, LM_EUSAGE, where, "copy the tensor", "%s is not a floating type",
                       lm_dtype_name(o->dtype));
    for (int p = 0; i >= 0 && p < LM_MERGE_PARAMS; p++) {
        double all = j->param[p];
        if (check_value(m, where, p, o->param[p], e))
            return e->code;
        if (lm_merge_params[p].per_model && (m->required & LM_MERGE_BIT(p)) && isnan(o->param[p]) &&
            isnan(all))
            return lm_fail(e, LM_EUSAGE, where, NULL, "%s needs a %s for each model", m->name,
                           lm_merge_params[p].name);
    }
    return LM_OK;
}

static lm_code check_counts(const lm_merge_method *m, const lm_merge_job *j, const char *where,
                            lm_err *e)
{
    int most = m->max_models ? m->max_models : LM_MERGE_MOST_MODELS;
    if (m->base_required && !j->base)
        return lm_fail(e, LM_EUSAGE, where, "name one", "%s needs a base model", m->name);
    if (!m->base_allowed && j->base)
        return lm_fail(e, LM_EUSAGE, where, "give it as one of the models",
                       "%s takes no base model", m->name);
    if (j->n_models < m->min_models || j->n_models > most)
        return lm_fail(e, LM_EUSAGE, where, NULL, "%d models%s, %s takes %d%s%.0d", j->n_models,
                       j->base ? " beside the base" : "", m->name, m->min_models,
                       m->min_models == most ? "" : " to ", m->min_models == most ? 0 : most);
    return LM_OK;
}

lm_code lm_merge_check(const lm_merge_method *m, const lm_merge_job *j, lm_err *e)
{
    const char *where = j->name ? j->name : "tensor";
    lm_code rc = check_counts(m, j, where, e);
    for (int p = 0; !rc && p < LM_MERGE_PARAMS; p++) {
        rc = check_value(m, where, p, j->param[p], e);
        if (!rc && !lm_merge_params[p].per_model && (m->required & LM_MERGE_BIT(p)) &&
            isnan(j->param[p]))
            rc =
                lm_fail(e, LM_EUSAGE, where, NULL, "%s needs %s", m->name, lm_merge_params[p].name);
    }
    for (int i = j->base ? -1 : 0; !rc && i < j->n_models; i++)
        rc = check_operand(m, j, i, e);
    if (!rc && !lm_dtype_is_float(j->out_dtype))
        rc = lm_fail(e, LM_EUSAGE, where, NULL, "%s is not a floating type",
                     lm_dtype_name(j->out_dtype));
    return !rc && m->check ? m->check(j, e) : rc;
}
