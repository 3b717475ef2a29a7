/* SPDX-License-Identifier: Apache-2.0 */
/* balanced.c -- KVarN (arXiv:2606.03458): tiles of `group` tokens of a rotated head, divided by scales of tokens and of
 * channels so that the standard deviations of both are near 1 (lib/numeric/kv_balance.c); then whole numbers from least
 * to most of each channel of keys, of each token of values. */
#include "kv/methods/methods.h"

enum { KBITS, VBITS, GROUP, SINKS, ROTATE };

static const lm_hyper hyper[] = {
    { "kbits", 4, 1, 8, "bits of keys, not 7", LM_WHOLE },
    { "vbits", 2, 1, 8, "bits of values, not 7", LM_WHOLE },
    { "group", 128, 16, LM_KV_MAX_TOKENS, "tokens that are coded together", LM_WHOLE },
    { "sinks", 128, 0, LM_KV_MAX_TOKENS, "first tokens kept plain, whole groups", LM_WHOLE },
    { "rotate", 1, 0, 1, "Hadamard rotation of the head", "off on" },
    LM_KV_ALONE(0),
    { 0 },
};

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    bool keys = q->side == LM_KV_K;
    int group = (int)q->h[GROUP];
    const lm_kv_format f = { .bits = (int)q->h[keys ? KBITS : VBITS],
                             .axis = keys ? LM_KV_CHANNEL : LM_KV_TOKEN,
                             .levels = LM_KV_ASYM,
                             .group = keys ? group : 0,
                             .span = keys ? 0 : group,
                             .second = true,
                             .scale = LM_DTYPE_F16 };
    out->residual = group;
    out->sinks = (int64_t)q->h[SINKS];
    out->rotate = q->h[ROTATE] != 0;
    return lm_kv_put_format(&f, q, out, e);
}

const lm_kv_method lm_kv_kvarn = {
    .name = "kvarn",
    .about = "scales of tokens and of channels, rotated, the first and newest 128 tokens plain",
    .hyper = hyper,
    .form = form,
};
