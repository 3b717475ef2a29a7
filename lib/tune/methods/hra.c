/* SPDX-License-Identifier: Apache-2.0 */
/* hra.c -- Householder reflections of the inputs: W' = W H_1 H_2 ... H_r, H_i = 1 - 2 u_i u_i^T,
 * columns u_i of U [in,r] at length 1. apply_GS: W' = W (1 - 2 U U^T), the columns made
 * orthonormal one after the other. Sources: arXiv:2405.17484; huggingface/peft tuners/hra. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "number of reflections", LM_WHOLE },
    { "apply_GS", 0, 0, 1, "orthonormal directions (Gram-Schmidt)", "false true" },
    { 0 },
};
enum { R, ORTHONORMAL };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "hra_u", m->in, (int64_t)m->hyper[R], LM_TUNE_BASE, 0);
    return LM_OK;
}

static lm_vid unit(lm_rule *r, lm_vid u)
{
    return LM_R_MAP(r, "y = u / sqrt(q)", LM_IS("u", u), LM_IS("q", lm_r_sum(r, u, true, true)));
}

/* x - 2 (x u) u^T of rows x */
static lm_vid reflect(lm_rule *r, lm_vid x, lm_vid u)
{
    return lm_r_add(r, x, -2, lm_r_matmul(r, lm_r_matmul(r, x, false, u, false), false, u, true));
}

/* Rows of x, or of W, through all reflections. */
static lm_vid turn(lm_rule *r, const lm_tune_module *m, lm_vid x, lm_vid u, bool backwards)
{
    int64_t n = (int64_t)m->hyper[R];

    for (int64_t i = 0; i < n && m->hyper[ORTHONORMAL] <= 0; i++)
        x = reflect(r, x, unit(r, lm_r_part(r, u, 0, m->in, backwards ? n - 1 - i : i, 1)));
    if (m->hyper[ORTHONORMAL] <= 0)
        return x;
    lm_vid base = unit(r, lm_r_part(r, u, 0, m->in, 0, 1)), all = base, left = x;
    left = reflect(r, x, base);
    for (int64_t i = 1; i < n; i++) {
        lm_vid c = lm_r_part(r, u, 0, m->in, i, 1);
        /* The directions are orthonormal, so the reflections commute and one after the other is
         * all at once. */
        c = unit(r,
                 lm_r_add(r, c, -1,
                          lm_r_matmul(r, all, false, lm_r_matmul(r, all, true, c, false), false)));
        left = reflect(r, left, c);
        all = lm_r_join(r, all, c);
    }
    return left;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    return turn(r, m, w, p[0], false);
}

/* y = W H_1 .. H_r x: a row x goes through them from the last to the first. */
static lm_vid input(lm_rule *r, const lm_tune_module *m, lm_vid x, const lm_vid *p)
{
    return turn(r, m, x, p[0], true);
}

/* Pairs of equal columns, so that their reflections cancel; of an odd number, any. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t n = (int64_t)m->hyper[R];
    bool even = n % 2 == 0;
    double bound = 1 / sqrt((double)(even ? n / 2 : n));

    (void)w, (void)changed, (void)e;
    for (int64_t i = 0; i < m->in * n; i++) {
        int64_t from = even ? i / 2 : i;

        v[0][i] = bound * (2 * lm_rng_uniform(rng, (uint64_t)from) - 1);
    }
    return LM_OK;
}

const lm_tune_method lm_tune_hra = {
    .peft_type = "HRA",
    .name = "hra",
    .about = "Householder reflections of the inputs",
    .prefix = "hra_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .input = input,
    .start = start,
};
