/* SPDX-License-Identifier: Apache-2.0 */
/* frod.c -- values in a basis that the modules of one place share: W' = U (S + diag(l)) V^T, where
 * U diag(l0) V^T = W with columns of U at length 1, l [in] starts as l0, and S [in,in] is sparse.
 *
 * V [in,in] and the places of S are shared by modules with the same last two parts of their names,
 * and are in the file (frod_V.mlp_down_proj); without them it is refused, because they follow from
 * all weights at once and a seed. Source: huggingface/peft tuners/frod. */
#include <stdio.h>
#include <string.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "sparse_rate", 0.01, 0, 1, "share of S that trains", NULL },
    { "frod_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { BASIS, PLACES, SIZE, VALUES, SPARSE };

/* "mlp_down_proj" of "model.layers.0.mlp.down_proj" */
static void group_of(const char *name, char out[40])
{
    const char *last = strrchr(name, '.'), *at = last;

    while (at && at > name && at[-1] != '.')
        at--;
    snprintf(out, 40, "%s", at ? at : name);
    for (char *p = out; *p; p++)
        *p = *p == '.' ? '_' : *p;
}

static lm_tune_tensor *add(lm_tune_tensor *out, int *n, const char *name, const char *group,
                           int64_t rows, int64_t cols)
{
    char text[64];
    lm_tune_tensor *t;

    snprintf(text, sizeof text, "%s.%s", name, group);
    t = lm_tune_tensor_add(out, n, text, rows, cols, LM_TUNE_BASE, 0);
    t->shared = t->frozen = true;
    return t;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t count = (int64_t)(m->hyper[0] * (double)(m->in * m->in));
    char group[40];

    (void)e;
    group_of(m->name, group);
    *n = 0;
    add(out, n, "frod_V", group, m->in, m->in);
    add(out, n, "frod_s_indices", group, 2, count)->ids = true;
    add(out, n, "frod_s_size", group, 2, 0)->ids = true;
    lm_tune_tensor_add(out, n, "frod_lambda_l", m->in, 0, LM_TUNE_BASE, 0);
    lm_tune_tensor_add(out, n, "frod_lambda_s_values", count, 0, LM_TUNE_ZEROS, 0);
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    /* W V^-T, and its columns at length 1 */
    lm_vid u = lm_r_matmul(r, w, false, lm_r_inverse(r, p[BASIS]), true);
    lm_vid unit = LM_R_MAP(r, "y = u * where(1e-24 < q, 1 / sqrt(max(q, 1e-24)), 0)", LM_IS("u", u),
                           LM_IS("q", lm_r_sum(r, u, true, true)));

    lm_vid s = lm_tune_scatter(r, p[SPARSE], m->ids[PLACES], m->in, m->in);
    lm_vid scaled =
        LM_R_MAP(r, "y = u * l", LM_IS("u", unit), LM_IS("l", lm_r_shape2(r, p[VALUES], 1, m->in)));
    lm_vid left = lm_r_add(r, scaled, 1, lm_r_matmul(r, unit, false, s, false));

    return lm_r_matmul(r, left, false, p[BASIS], true);
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    (void)w, (void)changed, (void)v, (void)rng;
    return lm_fail(e, LM_EUSAGE, m->name, "begin with an adapter that peft made",
                   "the basis of frod follows from all weights at once, which is not done here");
}

const lm_tune_method lm_tune_frod = {
    .peft_type = "FROD",
    .name = "frod",
    .about = "values in a basis that modules share",
    .prefix = "frod_",
    .is = LM_TUNE_SAVED,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
