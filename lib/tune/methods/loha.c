/* SPDX-License-Identifier: Apache-2.0 */
/* loha.c -- the element-wise product of two low-rank matrices: W' = W + s (A1 B1) o (A2 B2), s =
 * alpha / r. w1_a, w2_a [out,r], w1_b, w2_b [r,in].  Sources: arXiv:2108.06098; huggingface/peft
 * tuners/loha. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "rank of each factor", LM_WHOLE },
    { "alpha", 8, -1e9, 1e9, "scale: alpha / r", NULL },
    { "rank_dropout", 0, 0, 1, "share of rows dropped in training", NULL },
    { "module_dropout", 0, 0, 1, "share of modules dropped in training", NULL },
    { 0 },
};
enum { R, ALPHA };
enum { A1, B1, A2, B2 };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    double in = 1 / sqrt((double)m->in), mid = 1 / sqrt((double)r);

    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "hada_w1_a", m->out, r, LM_TUNE_UNIFORM, mid);
    lm_tune_tensor_add(out, n, "hada_w1_b", r, m->in, LM_TUNE_UNIFORM, in);
    lm_tune_tensor_add(out, n, "hada_w2_a", m->out, r, LM_TUNE_UNIFORM, mid);
    lm_tune_tensor_add(out, n, "hada_w2_b", r, m->in, LM_TUNE_ZEROS, 0);
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    return LM_R_MAP(r, "y = w + s * a * b", LM_IS("w", w),
                    LM_IS("a", lm_r_matmul(r, p[A1], false, p[B1], false)),
                    LM_IS("b", lm_r_matmul(r, p[A2], false, p[B2], false)),
                    LM_CONSTANT("s", m->hyper[ALPHA] / m->hyper[R]));
}

const lm_tune_method lm_tune_loha = {
    .peft_type = "LOHA",
    .name = "loha",
    .about = "element-wise product of two low-rank matrices",
    .prefix = "hada_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
