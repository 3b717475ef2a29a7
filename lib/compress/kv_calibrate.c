/* SPDX-License-Identifier: Apache-2.0 */
/* kv_calibrate.c -- a calibration: windows run through the captured model (kv_capture.h), layers in parallel. */
#include "compress/kv_calibrate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/stop.h"
#include "base/text.h"
#include "compress/kv_capture.h"
#include "model/arch.h"
#include "model/cache_about.h"
#include "model/cache_plan.h"

/* What is kept of one side of a layer. */
typedef struct {
    lm_kvquant_ranges *ranges; /* of keys, of the first run */
    lm_kvquant_levels *levels;
    float *lower, *upper; /* [K D] of keys, in the arena of the result */
    float *most;          /* [K]: the largest magnitude of each head, of keys as they are stored */
    double *error;        /* [candidates] */
    double *outside;      /* [K]: of values, outliers of each head */
} taken;

typedef struct {
    const lm_kv_calibrate_opts *o;
    lm_loaded *w;
    lm_backend *b;
    lm_kv_capture *c;
    taken *side; /* [layers][2] */
    bool second; /* the second run */
    int candidates;
    double done;    /* tokens, of all runs */
    lm_err *failed; /* [layers] */
    lm_kv_data *d;
} calibration;

static int64_t width_of(const calibration *k, int64_t layer)
{
    const lm_layer *y = &k->w->config.layer[layer];

    return y->kv_heads * y->head_dim;
}

/* ---- one window ---- */

/* The columns of keys, or of values, of rows. */
static void take_columns(const calibration *k, int64_t layer, int side, const float *rows,
                         float *out)
{
    const lm_layer *y = &k->w->config.layer[layer];
    int64_t width = width_of(k, layer), all = y->heads * y->head_dim + 2 * width;

    lm_kv_columns(rows, all, y->heads * y->head_dim + side * width, width, k->o->seq, out);
}

static void add_most(const calibration *k, int64_t layer, const float *x, float *most)
{
    const lm_layer *y = &k->w->config.layer[layer];
    int64_t D = y->head_dim;

    for (int64_t i = 0; i < k->o->seq * y->kv_heads; i++)
        for (int64_t d = 0; d < D; d++)
            most[i % y->kv_heads] = fmaxf(most[i % y->kv_heads], fabsf(x[i * D + d]));
}

/* Add the errors of the candidates on this window; stored: keys and values as attention reads them. */
static lm_code add_errors(calibration *k, int64_t layer, const float *q, float *const stored[2],
                          lm_err *e)
{
    lm_kv_site at = lm_cache_site(&k->w->config, LM_DTYPE_F32, layer);
    const lm_kv_attention a = lm_kv_attention_of(&k->w->config, layer);
    float error[2][LM_KV_MAX_CANDIDATES];
    int m;

    at.layer = 0; /* candidates are alike for all layers: all are coded */
    at.layers = 1;
    if (lm_kv_sensitivity(k->o->candidates, &at, &a, k->o->seq, LM_KV_ERROR_QUERIES, q, stored[0],
                          stored[1], error, &m, e))
        return e->code;
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < m; i++)
            k->side[2 * layer + side].error[i] += (double)error[side][i];
    return LM_OK;
}

/* The first run: ranges, scales and errors. */
static lm_code add_layer(calibration *k, int64_t layer, float *work, lm_err *e)
{
    const lm_layer *y = &k->w->config.layer[layer];
    const lm_kv_captured r = lm_kv_capture_layer(k->c, layer);
    int64_t n = k->o->seq, width = width_of(k, layer), queries = y->heads * y->head_dim;
    float *q = work, *stored[2] = { q + n * queries, q + n * (queries + width) };

    if (k->o->levels.bits) {
        take_columns(k, layer, LM_KV_K, r.before, q);
        if (lm_kvquant_ranges_add(k->side[2 * layer].ranges, q, n, e))
            return e->code;
    }
    for (int side = 0; side < 2; side++) {
        take_columns(k, layer, side, r.rotated, stored[side]);
        add_most(k, layer, stored[side], k->side[2 * layer + side].most);
    }
    if (!k->candidates)
        return LM_OK;
    lm_kv_columns(r.rotated, queries + 2 * width, 0, queries, n, q);
    return add_errors(k, layer, q, stored, e);
}

/* Count the outliers among values x [n,K D]; work [K D]. */
static void add_outside(const calibration *k, int64_t layer, const float *x, float *work)
{
    const lm_layer *y = &k->w->config.layer[layer];
    double *outside = k->side[2 * layer + LM_KV_V].outside;
    int64_t width = width_of(k, layer);

    for (int64_t t = 0; t < k->o->seq; t++, x += width) {
        float range[2];
        lm_kv_token_range(k->o->levels.outliers, x, width, range, work);
        for (int64_t i = 0; i < width; i++)
            outside[i / y->head_dim] += x[i] < range[0] || x[i] > range[1];
    }
}

/* The second run: levels. */
static lm_code add_levels(calibration *k, int64_t layer, float *work, lm_err *e)
{
    const lm_kv_captured r = lm_kv_capture_layer(k->c, layer);
    int64_t n = k->o->seq, numbers = n * width_of(k, layer);
    float *x = work, *w = work + numbers;

    for (int side = 0; side < 2; side++) {
        const taken *t = &k->side[2 * layer + side];
        take_columns(k, layer, side, r.before, x);
        take_columns(k, layer, side, r.gradient, w);
        for (int64_t i = 0; i < numbers; i++)
            w[i] *= w[i];
        if (lm_kvquant_levels_add(t->levels, x, w, n, t->lower, t->upper, e))
            return e->code;
        if (side == LM_KV_V && k->o->levels.outliers > 0)
            add_outside(k, layer, x, w);
    }
    return LM_OK;
}

static void add_layers(void *ctx, int64_t begin, int64_t end, int worker)
{
    calibration *k = ctx;

    (void)worker;
    for (int64_t l = begin; l < end; l++) {
        const lm_layer *y = &k->w->config.layer[l];
        int64_t width = width_of(k, l), queries = y->heads * y->head_dim;
        size_t columns = (size_t)((queries > width ? queries : width) + 2 * width);
        float *work;
        if (lm_alloc_n(&work, (size_t)k->o->seq * columns, sizeof *work, "a window", &k->failed[l]))
            continue;
        if (k->second ? add_levels(k, l, work, &k->failed[l])
                      : add_layer(k, l, work, &k->failed[l]))
            lm_err_in(&k->failed[l], "layer %" PRId64, l);
        lm_free(work);
    }
}

static lm_code first_failure(const calibration *k, lm_err *e)
{
    for (int64_t l = 0; l < k->w->config.layers; l++)
        if (k->failed[l].code) {
            *e = k->failed[l];
            return e->code;
        }
    return LM_OK;
}

static lm_code run_windows(calibration *k, double *nll, lm_err *e)
{
    const lm_kv_calibrate_opts *o = k->o;
    double all = (double)(o->windows * o->seq) * (o->levels.bits ? 2 : 1), sum = 0;
    lm_code rc = lm_kv_capture_new(k->w, o->seq, k->second, k->b, &k->c, e);

    for (int64_t i = 0; i < o->windows && !rc && !lm_stopping(); i++) {
        rc = lm_kv_capture_run(k->c, o->ids + i * o->seq, &sum, e);
        if (rc)
            break;
        lm_par_for(o->par, k->w->config.layers, 1, add_layers, k);
        rc = first_failure(k, e);
        k->done += (double)o->seq;
        lm_progress(o->sink, "calibrate", k->done, all, "tokens", NULL);
    }
    lm_kv_capture_free(k->c);
    k->c = NULL;
    if (nll && !k->second)
        *nll = sum / (double)(o->windows * (o->seq - 1));
    return rc;
}

/* Ranges between the two runs. */
static lm_code end_ranges(calibration *k, lm_err *e)
{
    for (int64_t l = 0; l < k->w->config.layers; l++) {
        taken *t = &k->side[2 * l];
        size_t width = (size_t)width_of(k, l);
        if (lm_arena_alloc(k->d->arena, &t->lower, width, sizeof *t->lower, e) ||
            lm_arena_alloc(k->d->arena, &t->upper, width, sizeof *t->upper, e) ||
            lm_kvquant_ranges_end(t->ranges, t->lower, t->upper, e))
            return e->code;
        lm_kvquant_ranges_free(t->ranges);
        t->ranges = NULL;
    }
    return LM_OK;
}

/* ---- results ---- */

/* The scales of one side of a layer in the checkpoint: one number, or one for each head.  *n 0: there are none. */
static lm_code read_scales(const calibration *k, int64_t layer, int side, float *scale, int64_t *n,
                           lm_err *e)
{
    const lm_model_source *src = k->w->src;
    int64_t heads = k->w->config.layer[layer].kv_heads;

    *n = 0;
    for (size_t i = 0; src && i < lm_model_source_count(src); i++) {
        const lm_st_tensor *t = lm_model_source_at(src, i);
        int64_t of;
        if (lm_arch_kv_scale(t->name, &of) != (side == LM_KV_K ? 'k' : 'v') || of != layer)
            continue;
        *n = 1;
        for (int d = 0; d < t->ndim; d++)
            *n *= t->dim[d];
        if (*n != 1 && *n != heads)
            return lm_fail(e, LM_EFORMAT, t->name,
                           "give a model with one scale, or one for each head",
                           "%" PRId64 " scale%s for a layer of %" PRId64 " head%s", *n,
                           lm_plural((uint64_t)*n), heads, lm_plural((uint64_t)heads));
        if (lm_model_source_load(src, t, LM_DTYPE_F32, scale, e))
            return e->code;
        for (int64_t h = 0; h < *n; h++)
            if (!(scale[h] > 0) || !isfinite(scale[h]))
                return lm_fail(e, LM_EFORMAT, t->name, NULL,
                               "the scale %g is not a positive number", (double)scale[h]);
        return LM_OK;
    }
    return LM_OK;
}

/* Scales of the checkpoint, otherwise by the largest magnitudes; one for each head if asked for. */
static lm_code give_scales(const calibration *k, int64_t layer, int side, lm_kv_numbers *out,
                           lm_err *e)
{
    int64_t heads = k->w->config.layer[layer].kv_heads, n;
    const taken *t = &k->side[2 * layer + side];
    float *scale;

    if (lm_arena_alloc(k->d->arena, &scale, (size_t)heads, sizeof *scale, e) ||
        read_scales(k, layer, side, scale, &n, e))
        return e->code;
    if (!n) {
        float most = 0;
        for (int64_t h = 0; h < heads; h++) {
            most = fmaxf(most, t->most[h]);
            scale[h] = t->most[h] > 0 ? t->most[h] / (float)LM_KV_FP8_MOST : 1;
        }
        n = k->o->heads ? heads : 1;
        if (n == 1)
            scale[0] = most > 0 ? most / (float)LM_KV_FP8_MOST : 1;
    } else if (k->o->heads) {
        for (int64_t h = n; h < heads; h++)
            scale[h] = scale[0];
        n = heads;
    } else if (n > 1) { /* of the layer, the largest one loses nothing */
        for (int64_t h = 1; h < n; h++)
            scale[0] = fmaxf(scale[0], scale[h]);
        n = 1;
    }
    out->scale = scale;
    out->scales = n;
    return LM_OK;
}

/* The share of outliers among the values of each head. */
static lm_code give_outside(const calibration *k, int64_t layer, lm_kv_numbers *out, lm_err *e)
{
    const lm_layer *y = &k->w->config.layer[layer];
    double numbers = (double)(k->o->windows * k->o->seq * y->head_dim);
    float *share;

    if (lm_arena_alloc(k->d->arena, &share, (size_t)y->kv_heads, sizeof *share, e))
        return e->code;
    for (int64_t h = 0; h < y->kv_heads; h++)
        share[h] = (float)(k->side[2 * layer + LM_KV_V].outside[h] / numbers);
    out->outside = share;
    out->heads = y->kv_heads;
    return LM_OK;
}

static lm_code give_side(const calibration *k, int64_t layer, int side, lm_err *e)
{
    const lm_layer *y = &k->w->config.layer[layer];
    const taken *t = &k->side[2 * layer + side];
    lm_kv_numbers *out = &k->d->side[2 * layer + side];
    float *table, *error;

    if (k->o->scales && give_scales(k, layer, side, out, e))
        return e->code;
    if (k->candidates) {
        if (lm_arena_alloc(k->d->arena, &error, LM_KV_MAX_CANDIDATES, sizeof *error, e))
            return e->code;
        for (int i = 0; i < k->candidates; i++)
            error[i] = (float)t->error[i];
        out->errors = error;
        out->candidates = k->candidates;
    }
    if (!k->o->levels.bits)
        return LM_OK;
    if (lm_arena_alloc(k->d->arena, &table, (size_t)1 << k->o->levels.bits, sizeof *table, e))
        return e->code;
    if (lm_kvquant_levels_end(t->levels, table, e)) {
        lm_err_in(e, "layer %" PRId64, layer);
        return e->code;
    }
    out->kv_heads = y->kv_heads;
    out->head_dim = y->head_dim;
    out->lower = t->lower;
    out->upper = t->upper;
    out->table = table;
    out->bits = k->o->levels.bits;
    return side == LM_KV_V && k->o->levels.outliers > 0 ? give_outside(k, layer, out, e) : LM_OK;
}

static lm_code put_text(const calibration *k, const char *text, const char **out, lm_err *e)
{
    char *own;

    if (lm_arena_strdup(k->d->arena, &own, text, strlen(text), e))
        return e->code;
    *out = own;
    return LM_OK;
}

static lm_code give(calibration *k, lm_err *e)
{
    uint8_t digest[16];
    char text[33] = "", config[33];

    for (int64_t i = 0; i < 2 * k->w->config.layers; i++)
        if (give_side(k, i / 2, (int)(i % 2), e))
            return e->code;
    k->d->outliers = k->o->levels.outliers;
    if (k->w->src && lm_model_source_weights_digest(k->w->src, digest, e))
        return e->code;
    if (k->w->src)
        lm_hash128_hex(digest, text);
    return lm_config_digest(&k->w->config, config, e) || put_text(k, text, &k->d->weights, e) ||
                   put_text(k, config, &k->d->config, e) ||
                   put_text(k, k->candidates ? k->o->candidates : "", &k->d->candidates, e)
               ? e->code
               : LM_OK;
}

/* ---- life ---- */

static int count_candidates(const char *candidates)
{
    int n = candidates && *candidates ? 1 : 0;

    for (const char *at = candidates; n && *at; at++)
        n += *at == ';' && at[1];
    return n;
}

static lm_code make_side(const calibration *k, int64_t layer, int side, lm_err *e)
{
    const lm_kv_calibrate_opts *o = k->o;
    taken *t = &k->side[2 * layer + side];
    int64_t width = width_of(k, layer);

    if (lm_alloc_n(&t->most, (size_t)k->w->config.layer[layer].kv_heads, sizeof *t->most,
                   "keys and values", e) ||
        lm_alloc_n(&t->outside, (size_t)k->w->config.layer[layer].kv_heads, sizeof *t->outside,
                   "outliers", e) ||
        lm_alloc_n(&t->error, LM_KV_MAX_CANDIDATES, sizeof *t->error, "errors", e))
        return e->code;
    if (o->levels.bits && side == LM_KV_K &&
        lm_kvquant_ranges_new(o->levels.outliers, o->windows * o->seq, width, &t->ranges, e))
        return e->code;
    return o->levels.bits ? lm_kvquant_levels_new(&o->levels, width, &t->levels, e) : LM_OK;
}

/* The memory that the runs need at most. */
static lm_code say_memory(const calibration *k, lm_err *e)
{
    const lm_kv_calibrate_opts *o = k->o;
    double weights, window, ranges = 0;
    char text[3][32];

    if (lm_kv_capture_bytes(k->w, o->seq, o->levels.bits > 0, k->b, &weights, &window, e))
        return e->code;
    for (int64_t l = 0; o->levels.bits && l < k->w->config.layers; l++)
        ranges += lm_kvquant_ranges_bytes(o->levels.outliers, o->windows * o->seq, width_of(k, l));
    lm_log(o->sink, LM_LOG_INFO, "calibration: weights %s, a window %s, ranges of all windows %s",
           lm_show_bytes(weights, text[0]), lm_show_bytes(window, text[1]),
           lm_show_bytes(ranges, text[2]));
    return LM_OK;
}

static lm_code begin(calibration *k, const char *path, lm_err *e)
{
    const lm_kv_calibrate_opts *o = k->o;
    size_t layers = (size_t)k->w->config.layers;

    k->candidates = count_candidates(o->candidates);
    if (k->candidates > LM_KV_MAX_CANDIDATES)
        return lm_fail(e, LM_EUSAGE, "candidates", NULL, "%d, more than %d", k->candidates,
                       LM_KV_MAX_CANDIDATES);
    if (say_memory(k, e) || lm_kv_data_new(k->w->config.layers, path, &k->d, e) ||
        lm_alloc_n(&k->side, layers, 2 * sizeof *k->side, "layers", e) ||
        lm_alloc_n(&k->failed, layers, sizeof *k->failed, "layers", e))
        return e->code;
    for (size_t i = 0; i < 2 * layers; i++)
        if (make_side(k, (int64_t)i / 2, (int)(i % 2), e))
            return e->code;
    return LM_OK;
}

static void finish(calibration *k)
{
    for (int64_t i = 0; k->side && i < 2 * k->w->config.layers; i++) {
        lm_kvquant_ranges_free(k->side[i].ranges);
        lm_kvquant_levels_free(k->side[i].levels);
        lm_free(k->side[i].most);
        lm_free(k->side[i].error);
        lm_free(k->side[i].outside);
    }
    lm_free(k->side);
    lm_free(k->failed);
}

lm_code lm_kv_calibrate(lm_loaded *w, const lm_kv_calibrate_opts *o, const char *path,
                        lm_backend *b, double *nll, lm_kv_data **out, lm_err *e)
{
    calibration k = { .o = o, .w = w, .b = b };

    *out = NULL;
    if (o->windows < 1 || o->levels.bits < 0 || o->levels.bits > 5)
        return lm_fail(e, LM_EUSAGE, "calibration", NULL,
                       "%" PRId64 " windows, %d bits: at least one window, 1 to 5 bits", o->windows,
                       o->levels.bits);
    lm_code rc = begin(&k, path, e);
    if (!rc)
        rc = run_windows(&k, nll, e);
    if (!rc && o->levels.bits && !lm_stopping())
        rc = end_ranges(&k, e);
    k.second = true;
    if (!rc && o->levels.bits && !lm_stopping())
        rc = run_windows(&k, NULL, e);
    if (!rc && !lm_stopping())
        rc = give(&k, e);
    finish(&k);
    if (rc || lm_stopping())
        lm_kv_data_free(k.d);
    else
        *out = k.d;
    return rc;
}
