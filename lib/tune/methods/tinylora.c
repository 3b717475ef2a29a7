/* SPDX-License-Identifier: Apache-2.0 */
/* tinylora.c -- a handful of numbers: W' = W + B (sum over i of v_i P_i) A, A = sqrt(S) V^T and B
 * = U sqrt(S) of the largest r singular values of the base's W, P_i [r,r] random, and v [u]
 * trained, shared by weight_tying of the modules.
 *
 * The file has A, B and, with save_projection, P; without P it is refused, because torch draws it
 * from a normal distribution whose bits depend on the machine.  Sources: arXiv:2602.04118;
 * huggingface/peft tuners/tinylora. */
#include <math.h>
#include <stdio.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 2, 1, 1e6, "singular values", LM_WHOLE },
    { "u", 64, 1, 1e9, "trained numbers", LM_WHOLE },
    { "weight_tying", 0, 0, 1, "share of modules that share them", NULL },
    { "tinylora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, U, TYING };
enum { A, B, P, V };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t least = m->in < m->out ? m->in : m->out;
    int64_t r = (int64_t)m->hyper[R] < least ? (int64_t)m->hyper[R] : least;
    int64_t u = (int64_t)m->hyper[U];
    int64_t groups = (int64_t)rint((double)m->places * (1 - m->hyper[TYING])), each;
    char name[48];
    lm_tune_tensor *t;

    (void)e;
    groups = groups > 1 ? groups : 1;
    each = m->places > groups ? m->places / groups : 1;
    *n = 0;
    lm_tune_tensor_add(out, n, "tinylora_A", r, m->in, LM_TUNE_BASE, 0)->frozen = true;
    lm_tune_tensor_add(out, n, "tinylora_B", m->out, r, LM_TUNE_BASE, 0)->frozen = true;
    t = lm_tune_tensor_add(out, n, "tinylora_P", u, r, LM_TUNE_NORMAL, 1 / sqrt((double)r));
    t->ndim = 3;
    t->dim[2] = r;
    t->frozen = true;
    snprintf(name, sizeof name, "tinylora_v.%lld",
             (long long)(m->place / each < groups ? m->place / each : groups - 1));
    t = lm_tune_tensor_add(out, n, name, u, 0, LM_TUNE_ZEROS, 0);
    t->shared = true;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = lm_r_dim(r, p[A], 0), u = lm_r_dim(r, p[V], 0);
    lm_vid middle =
        lm_r_matmul(r, lm_r_shape2(r, p[V], 1, u), false, lm_r_shape2(r, p[P], u, n * n), false);
    lm_vid left = lm_r_matmul(r, p[B], false, lm_r_shape2(r, middle, n, n), false);

    (void)m;
    return lm_r_add(r, w, 1, lm_r_matmul(r, left, false, p[A], false));
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t least = m->in < m->out ? m->in : m->out;
    int64_t r = (int64_t)m->hyper[R] < least ? (int64_t)m->hyper[R] : least;

    (void)changed, (void)rng;
    return lm_tune_largest(w, m->out, m->in, r, 0.5, v[B], v[A], e);
}

const lm_tune_method lm_tune_tinylora = {
    .peft_type = "TINYLORA",
    .name = "tinylora",
    .about = "a handful of numbers between singular vectors",
    .prefix = "tinylora_",
    .is = LM_TUNE_LINEAR | LM_TUNE_DIVIDES,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
