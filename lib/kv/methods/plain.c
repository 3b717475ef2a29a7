/* SPDX-License-Identifier: Apache-2.0 */
/* plain.c -- keys and values as numbers of a type; and auto, which with bits is replaced by methods that a calibration
 * suggests (lib/kv/spec_auto.c), so that numbers have that many bits on average, scales included. */
#include "kv/methods/methods.h"

static const lm_hyper hyper[] = { { 0 } };
static const lm_hyper auto_hyper[] = {
    { "bits", 0, 0, 32, "mean bits of a number (0: of activations)", NULL },
    { 0 },
};

/* auto with a budget */
static bool calibrated(const double *h)
{
    return h[0] > 0;
}

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    if (q->data)
        return lm_fail(e, LM_EUSAGE, q->name, "set bits, or leave file out",
                       "no calibration is read");
    if (q->method->plain != LM_DTYPE_NONE)
        out->plain = q->method->plain;
    return LM_OK;
}

#define PLAIN(id, type, text)         \
    const lm_kv_method lm_kv_##id = { \
        .name = #id,                  \
        .about = text,                \
        .hyper = hyper,               \
        .form = form,                 \
        .plain = type,                \
    };

const lm_kv_method lm_kv_auto = {
    .name = "auto",
    .about = "numbers of the type of activations, or methods by a budget of bits",
    .hyper = auto_hyper,
    .file = true,
    .calibrated = calibrated,
    .form = form,
    .plain = LM_DTYPE_NONE,
};
PLAIN(f32, LM_DTYPE_F32, "FP32")
PLAIN(f16, LM_DTYPE_F16, "FP16")
PLAIN(bf16, LM_DTYPE_BF16, "BF16")
