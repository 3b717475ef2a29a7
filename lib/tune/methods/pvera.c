/* SPDX-License-Identifier: Apache-2.0 */
/* pvera.c -- VeRA whose inner scales have a mean and a variance:
 * W' = W + diag(b) B diag(d) A, d [r] and b [out] trained, A [r,in], B [out,r] the first columns
 * and rows of matrices that are as wide as the widest module.
 * lambda_d and A are of 2r: the first half, d and A, gives the mean, which alone applies after
 * training; the second half, e and C, gives the logarithm of the variance for each input:
 * training adds diag(b) B (n * exp(diag(e) C x / 2)), n normal.
 *
 * A file without A and B (save_projection false) has those that torch draws from
 * projection_prng_key: uniform within sqrt(6 / columns).  Sources: arXiv:2512.07703;
 * huggingface/peft tuners/pvera. */
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 256, 1, 1e6, "rank", LM_WHOLE },
    { "d_initial", 0.1, -1e9, 1e9, "value of d at the beginning", NULL },
    { "projection_prng_key", 0, 0, 9e15, "seed of A and B", LM_WHOLE },
    { "pvera_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { PARTS = 2 }; /* of A and d */

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    static const char *const name[] = { "pvera_A", "pvera_B", "pvera_lambda_d", "pvera_lambda_b" };

    (void)e;
    return lm_tune_vera_tensors(m, name, PARTS, out, n);
}

static lm_code draw(const lm_tune_module *m, int i, double *out, lm_err *e)
{
    (void)e;
    return lm_tune_vera_draw(m, PARTS, i, out);
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    lm_code rc = draw(m, 0, v[0], e);

    (void)w, (void)changed, (void)rng;
    return rc ? rc : draw(m, 1, v[1], e);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    return lm_tune_vera_weight(r, m, PARTS, w, p);
}

static void noise(lm_rule *r, const lm_tune_module *m, const lm_vid *p, lm_vid *up, lm_vid *down)
{
    lm_tune_vera_factors(r, m, PARTS, 1, p, up, down);
}

const lm_tune_method lm_tune_pvera = {
    .peft_type = "PVERA",
    .name = "pvera",
    .about = "scales between frozen random matrices",
    .prefix = "pvera_",
    .is = LM_TUNE_LINEAR | LM_TUNE_SEEDED,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .noise = noise,
    .start = start,
    .draw = draw,
};
