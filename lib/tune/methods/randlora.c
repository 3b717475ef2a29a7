/* SPDX-License-Identifier: Apache-2.0 */
/* randlora.c -- a change of full rank from random matrices of low rank that all modules share:
 * with n = the shorter side / r, rounded up, W' = W + s Y (of the longer side first; transposed
 * where out < in), Y[x,z] = sum over k < n r of B[x,k] A'[k,z], s = alpha / r, where A'[rho n + b,
 * z] = A[rho,z] lambda[rho,b] gamma[b,z], and B [longer, n, r] is read row by row.
 *
 * A [r,1,shortest] and B [longest,bases,r] are as wide as the widest module; lambda [r,n], gamma
 * [n,shorter].  A file without them (save_projection false) is refused: they are drawn in a 16-bit
 * type that depends on the machine. Sources: arXiv:2502.00987; huggingface/peft tuners/randlora. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 32, 1, 1e6, "rank of a random matrix", LM_WHOLE },
    { "randlora_alpha", 640, -1e9, 1e9, "scale: alpha / r", NULL },
    { "randlora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, ALPHA };
enum { A, B, LAMBDA, GAMMA, OWN_A, OWN_B };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a < b ? b : a;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R], shorter = least(m->in, m->out), bases = (shorter + r - 1) / r;
    int64_t shortest = least(m->most_in, m->most_out), longest = most(m->most_in, m->most_out);

    (void)e;
    *n = 0;
    for (int own = 0; own < 2; own++) { /* peft saves them for every module, too */
        for (int i = 0; i < 2; i++) {
            lm_tune_tensor *t = i ? lm_tune_tensor_add(out, n, "randlora_B", longest,
                                                       (shortest + r - 1) / r, LM_TUNE_BASE, 0)
                                  : lm_tune_tensor_add(out, n, "randlora_A", r, 1, LM_TUNE_BASE, 0);

            t->ndim = 3;
            t->dim[2] = i ? r : shortest;
            t->frozen = true;
            t->shared = !own;
            t->absent = own;
        }
        if (own)
            continue;
        lm_tune_tensor_add(out, n, "randlora_lambda", r, bases, LM_TUNE_ZEROS, 0);
        lm_tune_tensor_add(out, n, "randlora_gamma", bases, shorter, LM_TUNE_FULL,
                           1 / (double)most(bases, shorter));
    }
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = (int64_t)m->hyper[R], shorter = least(m->in, m->out), longer = most(m->in, m->out);
    int64_t bases = (shorter + n - 1) / n, all = lm_r_dim(r, p[B], 1);
    lm_vid a = lm_r_part(r, lm_r_shape2(r, p[A], n, lm_r_dim(r, p[A], 2)), 0, n, 0, shorter);
    lm_vid b =
        lm_r_part(r, lm_r_shape2(r, p[B], lm_r_dim(r, p[B], 0), all * n), 0, longer, 0, bases * n);
    /* rows rho bases + b of A and of gamma, times lambda */
    lm_vid scaled = LM_R_MAP(
        r, "y = a * g * l",
        LM_IS("a", lm_r_matmul(r, lm_r_spread(r, n, bases, true), false, a, false)),
        LM_IS("g", lm_r_matmul(r, lm_r_spread(r, bases, n, false), false, p[GAMMA], false)),
        LM_IS("l", lm_r_shape2(r, p[LAMBDA], n * bases, 1)));
    double s = m->hyper[ALPHA] / m->hyper[R];

    return shorter == m->in ? lm_r_add(r, w, s, lm_r_matmul(r, b, false, scaled, false))
                            : lm_r_add(r, w, s, lm_r_matmul(r, scaled, true, b, true));
}

/* Uniform, then brought to deviation 1. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R], shortest = least(m->most_in, m->most_out);
    int64_t na = r * shortest, nb = most(m->most_in, m->most_out) * ((shortest + r - 1) / r) * r;

    (void)w, (void)changed, (void)e;
    for (int64_t i = 0; i < na; i++)
        v[A][i] = sqrt(3) * (2 * lm_rng_uniform(rng, (uint64_t)i) - 1);
    for (int64_t i = 0; i < nb; i++)
        v[B][i] = sqrt(3) * (2 * lm_rng_uniform(rng, (uint64_t)(na + i)) - 1);
    return LM_OK;
}

const lm_tune_method lm_tune_randlora = {
    .peft_type = "RANDLORA",
    .name = "randlora",
    .about = "full-rank change from shared random matrices",
    .prefix = "randlora_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
