/* SPDX-License-Identifier: Apache-2.0 */
/* deft.c -- projection out of a subspace, and a low-rank matrix into it: W' = W - P relu(P)^T W +
 * s P R; para: without the last part. P [out,r], R [r,in], s = alpha / r, 1 without alpha.
 * Source: huggingface/peft tuners/deft. */
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "dimensions of the subspace", LM_WHOLE },
    { "alpha", 0, -1e9, 1e9, "scale of the new part: alpha / r; 0: 1", NULL },
    { "para", 0, 0, 1, "projection alone", "false true" },
    { "decomposition_method", 0, 0, 0, "basis of the subspace", "relu" },
    { "init_scale", 1, 0, 1e9, "scale of a random R", NULL },
    { "deft_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, ALPHA, PARA };
enum { P, NEW };

static int64_t rank_of(const lm_tune_module *m)
{
    int64_t r = (int64_t)m->hyper[R];

    return r < m->out ? r : m->out;
}

static double scale_of(const lm_tune_module *m)
{
    return m->hyper[ALPHA] != 0 ? m->hyper[ALPHA] / (double)rank_of(m) : 1;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = rank_of(m);

    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "deft_P", m->out, r, LM_TUNE_BASE, 0);
    lm_tune_tensor_add(out, n, "deft_R", r, m->in, LM_TUNE_BASE, 0)->off = m->hyper[PARA] > 0;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    lm_vid positive = LM_R_MAP(r, "y = max(p, 0)", LM_IS("p", p[P]));
    lm_vid old = lm_r_matmul(r, positive, true, w, false);
    lm_vid change = m->hyper[PARA] > 0 ? lm_r_scale(r, -1, old)
                                       : LM_R_MAP(r, "y = s * n - o", LM_IS("n", p[NEW]),
                                                  LM_IS("o", old), LM_CONSTANT("s", scale_of(m)));

    return lm_r_add(r, w, 1, lm_r_matmul(r, p[P], false, change, false));
}

/* R starts as what the projection removes, so that W' = W. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t r = rank_of(m);

    (void)changed, (void)e;
    for (int64_t i = 0; i < m->out * r; i++)
        v[P][i] = 0.02 * lm_rng_normal(rng, (uint64_t)i);
    for (int64_t i = 0; v[NEW] && i < r * m->in; i++)
        v[NEW][i] = 0;
    for (int64_t o = 0; v[NEW] && o < m->out; o++)
        for (int64_t k = 0; k < r; k++)
            for (int64_t j = 0; v[P][o * r + k] > 0 && j < m->in; j++)
                v[NEW][k * m->in + j] += v[P][o * r + k] * w[o * m->in + j] / scale_of(m);
    return LM_OK;
}

const lm_tune_method lm_tune_deft = {
    .peft_type = "DEFT",
    .name = "deft",
    .about = "projection out of a subspace",
    .prefix = "deft_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
