/* SPDX-License-Identifier: Apache-2.0 */
/* grid.c -- whole numbers of 2 to 8 bits at equal distances.
 *
 *   sym=off  s = (most - least) / (2^b - 1), x ~ s c + least
 *   sym=on   s = largest magnitude / ((2^b - 1) / 2), x ~ s (c - 2^(b-1))
 * of groups of `group` adjacent channels of a token (axis=token; 0: the head), or of `group` adjacent tokens of a
 * channel (axis=channel).  Few channels of keys are large in all tokens: those suit axis=channel, or a rotation of
 * the head, which spreads them over all channels. */
#include <math.h>

#include "kv/methods/methods.h"

enum { AXIS, GROUP, SYM, RESIDUAL, SINKS, ROTATE };

#define TABLE(bits, group, sym, residual, rotate)                                                  \
    static const lm_hyper hyper_##bits[] = {                                                       \
        { "axis", LM_KV_TOKEN, 0, 1, "what has scales of its own", "token channel" },              \
        { "group", group, 0, LM_KV_MAX_TOKENS, "numbers with one scale (0: the head)", LM_WHOLE }, \
        { "sym", sym, 0, 1, "levels lie symmetrically about zero", "off on" },                     \
        { "residual", residual, 0, LM_KV_MAX_TOKENS, "newest tokens kept plain", LM_WHOLE },       \
        { "sinks", 0, 0, LM_KV_MAX_TOKENS, "first tokens kept plain", LM_WHOLE },                  \
        { "rotate", rotate, 0, 1, "Hadamard rotation of the head", "off on" },                     \
        LM_KV_ALONE(0),                                                                            \
        { 0 },                                                                                     \
    };

/* A channel has no scale before a group of tokens is complete, and needs no rotation. */
static void complete(double *h, const bool *given)
{
    if (h[AXIS] == LM_KV_TOKEN)
        return;
    if (!given[GROUP])
        h[GROUP] = 32;
    if (!given[RESIDUAL])
        h[RESIDUAL] = fmax(h[GROUP], 1);
    if (!given[ROTATE])
        h[ROTATE] = 0;
}

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    const double *h = q->h;
    const lm_kv_format f = {
        .bits = q->method->base.bits,
        .axis = h[AXIS] == LM_KV_TOKEN ? LM_KV_TOKEN : LM_KV_CHANNEL,
        .levels = h[SYM] != 0 ? LM_KV_SYM : LM_KV_ASYM,
        .group = (int)h[GROUP],
        .scale = LM_DTYPE_F16,
    };
    out->residual = (int64_t)h[RESIDUAL];
    out->sinks = (int64_t)h[SINKS];
    out->rotate = h[ROTATE] != 0;
    if (f.axis == LM_KV_CHANNEL && !f.group)
        return lm_fail(e, LM_EUSAGE, q->name, "set group",
                       "scales of channels need groups of tokens");
    return lm_kv_put_format(&f, q, out, e);
}

#define GRID(bits_, group, sym, residual, rotate, text) \
    TABLE(bits_, group, sym, residual, rotate)          \
    const lm_kv_method lm_kv_int##bits_ = {             \
        .name = "int" #bits_,                           \
        .about = text,                                  \
        .hyper = hyper_##bits_,                         \
        .complete = complete,                           \
        .form = form,                                   \
        .base = { .bits = bits_ },                      \
    };

GRID(8, 0, 1, 0, 0, "8-bit whole numbers, a scale a token and head")
GRID(6, 32, 0, 0, 1, "6-bit whole numbers in groups, rotated")
GRID(5, 32, 0, 0, 1, "5-bit whole numbers in groups, rotated")
GRID(4, 32, 0, 0, 1, "4-bit whole numbers in groups, rotated")
GRID(3, 32, 0, 0, 1, "3-bit whole numbers in groups, rotated")
GRID(2, 32, 0, 32, 1, "2-bit whole numbers in groups, rotated, the newest 32 tokens plain")
