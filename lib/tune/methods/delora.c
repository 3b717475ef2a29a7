/* SPDX-License-Identifier: Apache-2.0 */
/* delora.c -- low-rank adaptation whose strength is apart from its direction:
 * W' = W + (lambda / r) B diag(1 / (|a_i| |b_i|)) A diag(w), a_i rows of A, b_i columns of B
 * (lengths at least 1e-4), and w_j the length of column j of the base's W, kept in the file.  A
 * [r,in], B [out,r], lambda [1], w [in]. Sources: arXiv:2503.18225; huggingface/peft
 * tuners/delora. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "rank", LM_WHOLE },
    { "delora_lambda", 15, 0, 1e9, "bound of the change at the beginning", NULL },
    { "module_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, LAMBDA };
enum { A, B, STRENGTH, LENGTHS };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    lm_tune_tensor *t;

    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "delora_A", r, m->in, LM_TUNE_UNIFORM, 1 / sqrt((double)m->in));
    lm_tune_tensor_add(out, n, "delora_B", m->out, r, LM_TUNE_ZEROS, 0);
    lm_tune_tensor_add(out, n, "delora_lambda", 1, 0, LM_TUNE_FULL, m->hyper[LAMBDA]);
    t = lm_tune_tensor_add(out, n, "delora_w_norm", m->in, 0, LM_TUNE_BASE, 0);
    t->frozen = true;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    /* lambda / r / (|a| |b|) for each rank, [r,1]; bounded before the root, whose slope at 0 is
     * none */
    lm_vid s = LM_R_MAP(r, "y = l / n / sqrt(max(a, 1e-8) * max(b, 1e-8))", LM_IS("l", p[STRENGTH]),
                        LM_CONSTANT("n", m->hyper[R]), LM_IS("a", lm_r_sum(r, p[A], true, false)),
                        LM_IS("b", lm_r_turn(r, lm_r_sum(r, p[B], true, true))));
    lm_vid a = LM_R_MAP(r, "y = a * s", LM_IS("a", p[A]), LM_IS("s", s));

    return LM_R_MAP(r, "y = w + d * v", LM_IS("w", w),
                    LM_IS("d", lm_r_matmul(r, p[B], false, a, false)),
                    LM_IS("v", lm_r_shape2(r, p[LENGTHS], 1, m->in)));
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    (void)changed, (void)rng, (void)e;
    for (int64_t j = 0; j < m->in; j++) {
        double squares = 0;

        for (int64_t i = 0; i < m->out; i++)
            squares += w[i * m->in + j] * w[i * m->in + j];
        v[LENGTHS][j] = sqrt(squares);
    }
    return LM_OK;
}

const lm_tune_method lm_tune_delora = {
    .peft_type = "DELORA",
    .name = "delora",
    .about = "low-rank adaptation with bounded strength",
    .prefix = "delora_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
