/* SPDX-License-Identifier: Apache-2.0 */
/* hira.c -- a low-rank factor of every weight: W' = W + W o (B A).  A [r,in], B [out,r]; of an
 * embedding A [r,V], B [H,r]. Sources: openreview.net TwJrTz9cRS; huggingface/peft tuners/hira. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 32, 1, 1e6, "rank", LM_WHOLE },
    { "hira_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R };
enum { A, B };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];

    (void)e;
    *n = 0;
    if (m->embedding) {
        lm_tune_tensor_add(out, n, "hira_embedding_A", r, m->in, LM_TUNE_ZEROS, 0);
        lm_tune_tensor_add(out, n, "hira_embedding_B", m->out, r, LM_TUNE_NORMAL, 1);
        return LM_OK;
    }
    lm_tune_tensor_add(out, n, "hira_A", r, m->in, LM_TUNE_UNIFORM, 1 / sqrt((double)m->in));
    lm_tune_tensor_add(out, n, "hira_B", m->out, r, LM_TUNE_ZEROS, 0);
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    (void)m;
    return LM_R_MAP(r, "y = w + w * d", LM_IS("w", w),
                    LM_IS("d", lm_r_matmul(r, p[B], false, p[A], false)));
}

const lm_tune_method lm_tune_hira = {
    .peft_type = "HIRA",
    .name = "hira",
    .about = "low-rank factors of the weights themselves",
    .prefix = "hira_",
    .is = LM_TUNE_EMBEDS,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
