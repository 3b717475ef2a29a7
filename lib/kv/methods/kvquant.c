/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant.c -- KVQuant (arXiv:2401.18079): keys before the rotary embedding over fixed ranges of channels, values over the
 * range of each token, both with levels from a calibration (kvquant.h); outliers are stored apart. */
#include <math.h>
#include <string.h>

#include "kv/methods/methods.h"

enum { SINKS, BITS };

static const lm_hyper hyper[] = {
    { "sinks", 1, 0, LM_KV_MAX_TOKENS, "first tokens kept plain", LM_WHOLE },
    { "bits", 0, 0, 6, "of the calibration's levels (0: any)", LM_WHOLE },
    LM_KV_ALONE(0),
    { 0 },
};

static bool calibrated(const double *h)
{
    (void)h;
    return true;
}

/* Room for 1.5 times the mean of a head, as outliers are not spread evenly over pages.  Those of values are not over heads
 * either, for the range of a token is that of all of them: then the head with most of them counts.  Of the C values of a
 * token at least one on each side is an outlier (lm_kv_token_range). */
static int outliers_of(const lm_kv_ask *q)
{
    const lm_kv_numbers *m = &q->data->side[2 * q->site->layer + q->side];
    double n = (double)(q->page * q->site->head_dim), share = q->data->outliers;
    double C = (double)(q->site->kv_heads * q->site->head_dim);
    if (share > 0 && q->side == LM_KV_V)
        share = 2 * (floor(share / 2 * (C - 1)) + 1) / C;
    for (int64_t h = 0; share > 0 && h < m->heads; h++)
        share = fmax(share, (double)m->outside[h]);
    return (int)fmin(ceil(1.5 * share * n), n);
}

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    const lm_kv_site *at = q->site;
    bool keys = q->side == LM_KV_K;
    if (!q->data)
        return lm_fail(e, LM_EUSAGE, q->name, "measure a calibration, and set file",
                       "a calibration is needed");
    if (at->layer >= q->data->layers || !q->data->side[2 * at->layer + q->side].table)
        return lm_fail(e, LM_EUSAGE, q->name, "measure a calibration of this model",
                       "%s has no levels for this layer", q->data->path);
    const lm_kv_numbers *n = &q->data->side[2 * at->layer + q->side];
    if (keys && (n->kv_heads != at->kv_heads || n->head_dim != at->head_dim))
        return lm_fail(e, LM_EUSAGE, q->name, "use the calibration of this model",
                       "%s has ranges of %lld heads of %lld numbers, the layer has %lld of %lld",
                       q->data->path, (long long)n->kv_heads, (long long)n->head_dim,
                       (long long)at->kv_heads, (long long)at->head_dim);
    if (q->h[BITS] > 0 && (int)q->h[BITS] != n->bits)
        return lm_fail(e, LM_EUSAGE, q->name, "measure one of as many bits",
                       "%s has levels of %d bits", q->data->path, n->bits);
    lm_kv_format f = { .bits = n->bits,
                       .axis = keys ? LM_KV_CHANNEL : LM_KV_TOKEN,
                       .levels = LM_KV_TABLE,
                       .zero = true,
                       .scale = keys ? LM_DTYPE_NONE : LM_DTYPE_F16,
                       .lower = keys ? n->lower : NULL,
                       .upper = keys ? n->upper : NULL,
                       .outliers = outliers_of(q),
                       .n_table = 1 << n->bits };
    memcpy(f.table, n->table, (size_t)f.n_table * sizeof *f.table);
    out->pre_rope = keys && at->rope;
    out->sinks = (int64_t)q->h[SINKS];
    out->outliers = keys ? -1 : q->data->outliers;
    return lm_kv_put_format(&f, q, out, e);
}

const lm_kv_method lm_kv_kvquant = {
    .name = "kvquant",
    .about = "levels and ranges of a calibration, outliers apart",
    .hyper = hyper,
    .file = true,
    .calibrated = calibrated,
    .form = form,
};
