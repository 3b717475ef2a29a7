/* SPDX-License-Identifier: Apache-2.0 */
/* ln_tuning.c -- the norms alone train: W' = the adapter's weight, b' its bias.
 * Sources: arXiv:2312.11420; huggingface/peft tuners/ln_tuning. */
#include "tune/methods.h"

static const lm_hyper hyper[] = { { 0 } };
enum { WEIGHT, BIAS };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "ln_tuning_layers.weight", m->out, 0, LM_TUNE_BASE, 0);
    lm_tune_tensor_add(out, n, "ln_tuning_layers.bias", m->out, 0, LM_TUNE_BASE, 0)->off =
        !m->has_bias;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    (void)w;
    return lm_r_shape2(r, p[WEIGHT], 1, m->out);
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    (void)w;
    return b < 0 ? b : lm_r_shape2(r, p[BIAS], 1, m->out);
}

const lm_tune_method lm_tune_ln_tuning = {
    .peft_type = "LN_TUNING",
    .name = "ln_tuning",
    .about = "the norms alone",
    .prefix = "ln_tuning_",
    .is = LM_TUNE_VECTORS,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .bias = bias,
};
