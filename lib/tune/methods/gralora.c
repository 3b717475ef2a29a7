/* SPDX-License-Identifier: Apache-2.0 */
/* gralora.c -- low-rank adaptation of sub-blocks: W in k x k blocks, block (o, i) gets s B_o[:, of
 * i] A_i[of o, :], where the r ranks of each block column and block row are divided among their k
 * partners; and with hybrid_r a plain low-rank part of that rank beside them.  s = alpha / (r +
 * hybrid_r).  A [k, in/k, r], B [k, r, out/k]. Sources: arXiv:2505.20355; huggingface/peft
 * tuners/gralora. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 32, 1, 1e6, "ranks of a block row", LM_WHOLE },
    { "alpha", 64, -1e9, 1e9, "scale: alpha / (r + hybrid_r)", NULL },
    { "gralora_k", 2, 1, 1e6, "blocks along each side", LM_WHOLE },
    { "hybrid_r", 0, 0, 1e6, "rank of a plain part", LM_WHOLE },
    { "gralora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, ALPHA, K, HYBRID };
enum { A, B, PLAIN_A, PLAIN_B };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R], k = (int64_t)m->hyper[K], h = (int64_t)m->hyper[HYBRID];
    lm_tune_tensor *t;

    *n = 0;
    if (m->in % k || m->out % k || r % k)
        return lm_fail(e, LM_EUSAGE, m->name, "use a gralora_k that divides all three",
                       "its weight [%lld,%lld] or its rank %lld does not divide into %lld",
                       (long long)m->out, (long long)m->in, (long long)r, (long long)k);
    t = lm_tune_tensor_add(out, n, "gralora_A", k, m->in / k, LM_TUNE_UNIFORM,
                           1 / sqrt((double)(m->in / k)));
    t->ndim = 3;
    t->dim[2] = r;
    t = lm_tune_tensor_add(out, n, "gralora_B", k, r, LM_TUNE_ZEROS, 0);
    t->ndim = 3;
    t->dim[2] = m->out / k;
    lm_tune_tensor_add(out, n, "gralora_A_general.weight", h, m->in, LM_TUNE_UNIFORM,
                       1 / sqrt((double)m->in))
        ->off = !h;
    lm_tune_tensor_add(out, n, "gralora_B_general.weight", m->out, h, LM_TUNE_ZEROS, 0)->off = !h;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t rank = (int64_t)m->hyper[R], k = (int64_t)m->hyper[K], each = rank / k;
    int64_t in = m->in / k, out = m->out / k;
    double s = m->hyper[ALPHA] / (m->hyper[R] + m->hyper[HYBRID]);
    /* A [i][in][o][each] -> [o][i][in][each];  B [o][i][each][out], batches of k k products */
    lm_vid a = lm_r_permute(r, p[A], LM_DIMS(k, in, k, each), (const int[]){ 2, 0, 1, 3 },
                            LM_DIMS(k * k, in, each));
    lm_vid b = lm_r_reshape(r, p[B], LM_DIMS(k * k, each, out));
    lm_vid d = lm_r_matmul(r, b, true, a, true); /* [o i][out][in] */
    lm_vid whole = lm_r_permute(r, d, LM_DIMS(k, k, out, in), (const int[]){ 0, 2, 1, 3 },
                                LM_DIMS(m->out, m->in));

    w = lm_r_add(r, w, s, whole);
    return p[PLAIN_A] < 0 ? w
                          : lm_r_add(r, w, s, lm_r_matmul(r, p[PLAIN_B], false, p[PLAIN_A], false));
}

const lm_tune_method lm_tune_gralora = {
    .peft_type = "GRALORA",
    .name = "gralora",
    .about = "low-rank adaptation of sub-blocks",
    .prefix = "gralora_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
