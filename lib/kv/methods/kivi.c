/* SPDX-License-Identifier: Apache-2.0 */
/* kivi.c -- KIVI (arXiv:2402.02750): keys with scales for each channel over groups of tokens, values with scales for
 * each token over groups of channels, both from least to most.
 *
 * Keys leave the plain part all at once, when it has `residual` tokens; values leave it one by one.  The published code
 * stores scales in the type of activations, and rounds differences to it; here scales are F16 and differences are
 * not rounded.  A group of equal numbers, NaN there, is exact here. */
#include "kv/methods/methods.h"

enum { BITS, GROUP, RESIDUAL };

static const lm_hyper hyper[] = {
    { "bits", 2, 1, 8, "bits of a number, not 7", LM_WHOLE },
    { "group", 32, 16, LM_KV_MAX_TOKENS, "tokens (keys), channels (values) a scale", LM_WHOLE },
    { "residual", 128, 1, LM_KV_MAX_TOKENS, "newest tokens kept plain, whole groups", LM_WHOLE },
    LM_KV_ALONE(0),
    { 0 },
};

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    const lm_kv_format f = { .bits = (int)q->h[BITS],
                             .axis = q->side == LM_KV_K ? LM_KV_CHANNEL : LM_KV_TOKEN,
                             .levels = LM_KV_ASYM,
                             .group = (int)q->h[GROUP],
                             .scale = LM_DTYPE_F16 };
    out->residual = (int64_t)q->h[RESIDUAL];
    return lm_kv_put_format(&f, q, out, e);
}

const lm_kv_method lm_kv_kivi = {
    .name = "kivi",
    .about = "keys by channel, values by token, the newest tokens plain",
    .hyper = hyper,
    .form = form,
};
