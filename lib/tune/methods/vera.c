/* SPDX-License-Identifier: Apache-2.0 */
/* vera.c -- low-rank adaptation through two frozen random matrices that all modules share:
 * W' = W + diag(b) B diag(d) A, d [r] and b [out] trained, A [r,in], B [out,r] the first columns
 * and rows of matrices that are as wide as the widest module.
 *
 * A file without A and B (save_projection false) has those that torch draws from
 * projection_prng_key: uniform within sqrt(6 / columns).  Sources: arXiv:2310.11454;
 * huggingface/peft tuners/vera. */
#include <math.h>

#include "tune/methods.h"
#include "tune/torch_rng.h"

static const lm_hyper hyper[] = {
    { "r", 256, 1, 1e6, "rank", LM_WHOLE },
    { "d_initial", 0.1, -1e9, 1e9, "value of d at the beginning", NULL },
    { "projection_prng_key", 0, 0, 9e15, "seed of A and B", LM_WHOLE },
    { "vera_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, INITIAL, KEY };
enum { A, B, SCALE_D, SCALE_B };

lm_code lm_tune_vera_tensors(const lm_tune_module *m, const char *const name[4], int64_t parts,
                             lm_tune_tensor *out, int *n)
{
    int64_t r = (int64_t)m->hyper[R];

    *n = 0;
    for (int i = 0; i < 2; i++) {
        lm_tune_tensor *t =
            i ? lm_tune_tensor_add(out, n, name[B], m->most_out, r, LM_TUNE_BASE, 0)
              : lm_tune_tensor_add(out, n, name[A], parts * r, m->most_in, LM_TUNE_BASE, 0);
        t->shared = t->frozen = t->absent = true;
    }
    lm_tune_tensor_add(out, n, name[SCALE_D], parts * r, 0, LM_TUNE_FULL, m->hyper[INITIAL]);
    lm_tune_tensor_add(out, n, name[SCALE_B], m->out, 0, LM_TUNE_ZEROS, 0);
    return LM_OK;
}

/* B is drawn behind A from one generator. */
lm_code lm_tune_vera_draw(const lm_tune_module *m, int64_t parts, int i, double *out)
{
    int64_t r = (int64_t)m->hyper[R], a = parts * r * m->most_in;
    lm_torch_rng g;

    lm_torch_rng_seed(&g, (uint64_t)m->hyper[KEY]);
    if (i == B)
        for (int64_t k = 0; k < a; k++)
            lm_torch_rng_u32(&g);
    lm_torch_uniform(&g, sqrt(6 / (double)(i == B ? r : m->most_in)), i == B ? m->most_out * r : a,
                     out);
    return LM_OK;
}

void lm_tune_vera_factors(lm_rule *r, const lm_tune_module *m, int64_t parts, int64_t part,
                          const lm_vid *p, lm_vid *left, lm_vid *right)
{
    int64_t n = (int64_t)m->hyper[R];
    lm_vid d = lm_r_part(r, lm_r_shape2(r, p[SCALE_D], parts * n, 1), part * n, n, 0, 1);

    *right = LM_R_MAP(r, "y = a * d", LM_IS("a", lm_r_part(r, p[A], part * n, n, 0, m->in)),
                      LM_IS("d", d));
    *left = LM_R_MAP(r, "y = a * d", LM_IS("a", lm_r_part(r, p[B], 0, m->out, 0, n)),
                     LM_IS("d", lm_r_shape2(r, p[SCALE_B], m->out, 1)));
}

lm_vid lm_tune_vera_weight(lm_rule *r, const lm_tune_module *m, int64_t parts, lm_vid w,
                           const lm_vid *p)
{
    lm_vid left, right;

    lm_tune_vera_factors(r, m, parts, 0, p, &left, &right);
    return lm_r_add(r, w, 1, lm_r_matmul(r, left, false, right, false));
}

enum { PARTS = 1 }; /* of A and d */

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    static const char *const name[] = { "vera_A", "vera_B", "vera_lambda_d", "vera_lambda_b" };

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

const lm_tune_method lm_tune_vera = {
    .peft_type = "VERA",
    .name = "vera",
    .about = "scales between frozen random matrices",
    .prefix = "vera_",
    .is = LM_TUNE_LINEAR | LM_TUNE_SEEDED,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
    .draw = draw,
};
