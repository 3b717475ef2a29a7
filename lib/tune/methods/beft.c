/* SPDX-License-Identifier: Apache-2.0 */
/* beft.c -- an added bias: b' = b + a, a [1,out].  Sources: arXiv:2509.15974; huggingface/peft
 * tuners/beft. */
#include "tune/methods.h"

static const lm_hyper hyper[] = { { 0 } };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "beft_bias", 1, m->out, LM_TUNE_ZEROS, 0)->matrix = false;
    return LM_OK;
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    (void)m, (void)w;
    return b < 0 ? p[0] : lm_r_add(r, b, 1, p[0]);
}

static lm_vid output(lm_rule *r, const lm_tune_module *m, lm_vid x, lm_vid y, const lm_vid *p)
{
    (void)m, (void)x;
    return LM_R_MAP(r, "y = a + b", LM_IS("a", y), LM_IS("b", p[0]));
}

const lm_tune_method lm_tune_beft = {
    .peft_type = "BEFT",
    .name = "beft",
    .about = "an added bias",
    .prefix = "beft_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .bias = bias,
    .output = output,
};
