/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.c -- numbers of 8 bits with an exponent: x = s * fp8(x / s), beyond the largest number that one.
 *
 *   scale=1      s = 1, a plain conversion
 *   scale=layer  s of a calibration, one for keys and one for values of a layer; where it has those of the heads, the
 *                largest one
 *   scale=head   s of a calibration, for each key/value head
 *   scale=token  s = largest magnitude of the head at a token, or of `group` channels of it, / largest number (E4M3 448, E5M2
 *                57,344), in F16 */
#include <math.h>

#include "base/text.h"
#include "kv/methods/methods.h"

enum { SCALE, GROUP };
enum { ONE, LAYER, HEAD, TOKEN };

static const lm_hyper hyper[] = {
    { "scale", ONE, 0, 3, "what has a scale of its own", "1 layer head token" },
    { "group", 0, 0, LM_KV_MAX_DIM, "of token: channels of a scale (0: a head)", LM_WHOLE },
    LM_KV_ALONE(0),
    { 0 },
};

static bool calibrated(const double *h)
{
    return h[SCALE] == LAYER || h[SCALE] == HEAD;
}

/* Scales of a calibration: one for the layer, or one for each head; the largest of these holds for the layer. */
static lm_code put_scales(const lm_kv_ask *q, lm_kv_format *f, lm_err *e)
{
    bool head = q->h[SCALE] == HEAD;
    int64_t layer = q->site->layer, need = head ? q->site->kv_heads : 1;
    if (!q->data)
        return lm_fail(e, LM_EUSAGE, q->name, "measure a calibration, and set file",
                       "scales of layers and heads need a "
                       "calibration");
    int64_t have = layer < q->data->layers ? q->data->side[2 * layer + q->side].scales : 0;
    if (have != need && have != q->site->kv_heads)
        return lm_fail(e, LM_EUSAGE, q->name, "use a calibration of all scales",
                       "%s has %lld scale%s for this layer, not %lld", q->data->path,
                       (long long)have, lm_plural(have), (long long)need);
    const float *scale = q->data->side[2 * layer + q->side].scale;
    f->constant = (double)scale[0];
    for (int64_t h = 1; h < have && !head; h++)
        f->constant = fmax(f->constant, (double)scale[h]);
    f->head = head ? scale : NULL;
    return LM_OK;
}

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    double scale = q->h[SCALE];
    lm_kv_format f = { .bits = 8,
                       .axis = LM_KV_TOKEN,
                       .levels = LM_KV_FLOAT8,
                       .float8 = q->method->base.float8,
                       .scale = scale == TOKEN ? LM_DTYPE_F16 : LM_DTYPE_NONE,
                       .group = (int)q->h[GROUP],
                       .constant = 1 };
    if (f.group && scale != TOKEN)
        return lm_fail(e, LM_EUSAGE, q->name, "set scale=token, or leave group out",
                       "groups have scales of tokens");
    if ((scale == LAYER || scale == HEAD) && put_scales(q, &f, e))
        return e->code;
    if (q->data && (scale == ONE || scale == TOKEN))
        return lm_fail(e, LM_EUSAGE, q->name, "leave file out, or set scale to layer or head",
                       "no calibration is read");
    return lm_kv_put_format(&f, q, out, e);
}

#define FLOAT8(id, type, text)        \
    const lm_kv_method lm_kv_##id = { \
        .name = #id,                  \
        .about = text,                \
        .hyper = hyper,               \
        .file = true,                 \
        .calibrated = calibrated,     \
        .form = form,                 \
        .base = { .float8 = type },   \
    };

FLOAT8(fp8_e4m3, LM_DTYPE_F8E4M3, "FP8 with 4 bits of exponent")
FLOAT8(fp8_e5m2, LM_DTYPE_F8E5M2, "FP8 with 5 bits of exponent")
