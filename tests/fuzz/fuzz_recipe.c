/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_recipe.c -- mergekit YAML: any text gives a recipe or one error, and the recipe can be
 * printed and checked.  The table of methods is a stub: no method runs. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "merge/recipe.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const names[] = { "none", "l1", "expected", NULL };
const lm_merge_param_info lm_merge_params[LM_MERGE_PARAMS] = {
    [LM_MERGE_WEIGHT] = { "weight", NULL, true, false, -1e30, 1e30, "" },
    [LM_MERGE_DENSITY] = { "density", NULL, true, false, 0, 1, "" },
    [LM_MERGE_GAMMA] = { "gamma", NULL, true, false, 0, 1, "" },
    [LM_MERGE_EPSILON] = { "epsilon", NULL, true, false, 0, 1, "" },
    [LM_MERGE_SCALE] = { "scale", NULL, true, false, -1e30, 1e30, "" },
    [LM_MERGE_NORMALIZE] = { "normalize", NULL, false, true, 0, 1, "" },
    [LM_MERGE_RESCALE] = { "rescale", names, false, false, 0, 2, "" },
    [LM_MERGE_LAMBDA] = { "lambda", NULL, false, false, -1e30, 1e30, "" },
    [LM_MERGE_T] = { "t", NULL, false, false, -1e30, 1e30, "" },
    [LM_MERGE_NUSLERP_FLATTEN] = { "nuslerp_flatten", NULL, false, true, 0, 1, "" },
    [LM_MERGE_NUSLERP_ROW_WISE] = { "nuslerp_row_wise", NULL, false, true, 0, 1, "" },
    [LM_MERGE_NORMALIZE_WEIGHTS] = { "normalize_weights", NULL, false, true, 0, 1, "" },
    [LM_MERGE_EPS] = { "eps", NULL, false, false, 0, 1, "" },
    [LM_MERGE_MAX_ITER] = { "max_iter", NULL, false, false, 0, 1e6, "" },
    [LM_MERGE_TOL] = { "tol", NULL, false, false, 0, 1, "" },
    [LM_MERGE_SELECT_TOPK] = { "select_topk", NULL, false, false, 0, 1, "" },
    [LM_MERGE_FILTER_WISE] = { "filter_wise", NULL, false, true, 0, 1, "" },
    [LM_MERGE_SIGN_ELECTION] = { "sign_election", names, false, false, 0, 2, "" },
    [LM_MERGE_CLAMP_T] = { "clamp_t", NULL, false, true, 0, 1, "" },
    [LM_MERGE_ALPHA] = { "alpha", NULL, false, false, 0, 1, "" },
    [LM_MERGE_FISHER_FLOOR] = { "fisher_floor", NULL, false, false, 1e-20, 1e30, "" },
    [LM_MERGE_RAM_EPSILON] = { "ram_epsilon", NULL, false, false, 0, 1e30, "" },
    [LM_MERGE_RAM_R] = { "r", NULL, false, false, 0, 1e30, "" },
    [LM_MERGE_RAM_ALPHA] = { "ram_alpha", NULL, false, false, 0, 1e30, "" },
};
/* Has every parameter, so that every reader is reached. */
static const lm_merge_method any = {
    .name = "ties", .base_allowed = true, .min_models = 1, .takes = ~(uint64_t)0, .required = 1
};

lm_code lm_merge_method_find(const char *name, const lm_merge_method **out, lm_err *e)
{
    *out = &any;
    return *name ? LM_OK : lm_fail(e, LM_EUSAGE, name, NULL, "no such merge method");
}

int lm_merge_param_find(const lm_merge_method *m, const char *name)
{
    (void)m;
    for (int p = 0; p < LM_MERGE_PARAMS; p++)
        if (!strcmp(lm_merge_params[p].name, name))
            return p;
    return -1;
}

static void use(const lm_merge_recipe *r)
{
    lm_buf text = { 0 };
    lm_err e = { 0 };

    for (int s = 0; s < r->n_slices; s++)
        for (int k = 0; k < r->slice[s].n; k++) {
            const lm_merge_source *x = &r->slice[s].source[k];

            if (x->input < 0 || x->input >= r->n_inputs)
                abort();
            for (int p = 0; p < LM_MERGE_PARAMS; p++)
                for (int u = 0; u <= 4; u++)
                    lm_merge_value_at(&x->set.param[p], (lm_merge_param)p, "model.layers.0.mlp",
                                      u / 4.0);
        }
    if (lm_merge_recipe_models(r) > r->n_inputs || lm_merge_recipe_json(r, true, &text, &e))
        abort();
    lm_buf_fini(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_merge_recipe *r = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_merge_recipe_parse((const char *)data, size, "fuzz", &r, &e);

    if (!rc)
        use(r);
    else if (!e.what[0] || r)
        abort();
    lm_merge_recipe_free(r);
    return 0;
}
