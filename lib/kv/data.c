/* SPDX-License-Identifier: Apache-2.0 */
/* data.c -- files of calibrations. */
#include "kv/data.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/text.h"
#include "format/safetensors.h"
#include "kv/file_impl.h"

enum { LOWER, UPPER, TABLE, SCALE, OUTSIDE, ERRORS, KINDS };
static const char *const kind_name[KINDS] = { "lower", "upper",    "table",
                                              "scale", "outliers", "errors" };

lm_code lm_kv_data_new(int64_t layers, const char *path, lm_kv_data **out, lm_err *e)
{
    lm_kv_data *d;
    char *own;
    *out = NULL;
    if (lm_alloc_n(&d, 1, sizeof *d, "calibration", e))
        return e->code;
    d->layers = layers;
    d->weights = d->config = d->candidates = "";
    if (lm_arena_new(&d->arena, 1 << 16, e) ||
        lm_arena_alloc(d->arena, &d->side, (size_t)layers, 2 * sizeof *d->side, e) ||
        lm_arena_strdup(d->arena, &own, path, strlen(path), e)) {
        lm_kv_data_free(d);
        return e->code;
    }
    d->path = own;
    *out = d;
    return LM_OK;
}

void lm_kv_data_free(lm_kv_data *d)
{
    if (!d)
        return;
    lm_arena_free(d->arena);
    lm_free(d);
}

/* ---- reading ---- */

typedef struct {
    int64_t layer;
    int side, kind;
} place;

/* "layers.N.k.lower" */
static bool parse_name(const char *name, place *out)
{
    int64_t layer = 0;
    const char *p = name + 7;
    if (strncmp(name, "layers.", 7) || *p < '0' || *p > '9' || (*p == '0' && p[1] != '.'))
        return false;
    for (; *p >= '0' && *p <= '9' && layer < LM_KV_MAX_LAYERS; p++)
        layer = layer * 10 + (*p - '0');
    if (layer >= LM_KV_MAX_LAYERS || *p != '.' || (p[1] != 'k' && p[1] != 'v') || p[2] != '.')
        return false;
    for (int kind = 0; kind < KINDS; kind++)
        if (!strcmp(p + 3, kind_name[kind])) {
            *out = (place){ layer, p[1] == 'v', kind };
            return kind >= TABLE || p[1] == 'k';
        }
    return false;
}

static bool is_finite(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return false;
    return true;
}

/* What is wrong with the numbers of a tensor; NULL: nothing. */
static const char *put_tensor(const lm_st_tensor *t, int kind, const float *x, lm_kv_numbers *to)
{
    if (!is_finite(x, t->count))
        return "a number is not finite";
    if (kind == LOWER || kind == UPPER) {
        if (t->ndim != 2 || t->dim[0] < 1 || t->dim[1] < 1)
            return "the shape is not [heads, numbers of a head]";
        if ((to->lower || to->upper) && (to->kv_heads != t->dim[0] || to->head_dim != t->dim[1]))
            return "lower and upper differ in their shapes";
        to->kv_heads = t->dim[0];
        to->head_dim = t->dim[1];
        *(kind == LOWER ? &to->lower : &to->upper) = x;
        return NULL;
    }
    if (t->ndim != 1 || t->count < 1)
        return "the shape is not a list";
    for (int64_t i = 0; i < t->count; i++)
        if (kind == SCALE     ? !(x[i] > 0)
            : kind == OUTSIDE ? !(x[i] >= 0 && x[i] <= 1)
            : kind == ERRORS  ? !(x[i] >= 0)
                              : i && !(x[i] > x[i - 1]))
            return kind == SCALE     ? "a scale is not above 0"
                   : kind == OUTSIDE ? "a share is not between 0 and 1"
                   : kind == ERRORS  ? "an error is negative"
                                     : "the levels do not rise";
    if (kind == OUTSIDE) {
        to->outside = x;
        to->heads = t->count;
        return NULL;
    }
    if (kind == ERRORS) {
        to->errors = x;
        to->candidates = t->count;
        return NULL;
    }
    if (kind == SCALE) {
        to->scale = x;
        to->scales = t->count;
        return NULL;
    }
    for (to->bits = 1; to->bits < 5 && 1 << to->bits != t->count; to->bits++)
        ;
    to->table = x;
    return 1 << to->bits == t->count ? NULL : "a table has 2, 4, 8, 16 or 32 levels";
}

static lm_code read_tensor(const lm_st *s, const lm_st_tensor *t, lm_kv_data *d, lm_hash128 *sum,
                           lm_err *e)
{
    place at;
    float *x;
    if (!parse_name(t->name, &at) || t->dtype != LM_DTYPE_F32)
        return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                       "'%.80s' of %s is no part of a calibration", t->name, t->dtype_name);
    if (t->count > (int64_t)1 << 24)
        return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                       "'%.80s' has %lld numbers", t->name, (long long)t->count);
    if (lm_arena_alloc(d->arena, &x, (size_t)t->count, sizeof *x, e) ||
        lm_st_load(s, t, LM_DTYPE_F32, x, e))
        return e->code;
    lm_hash128_add(sum, x, (size_t)t->bytes);
    const char *wrong = put_tensor(t, at.kind, x, &d->side[2 * at.layer + at.side]);
    return wrong ? lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again", "'%.80s': %s",
                           t->name, wrong)
                 : LM_OK;
}

/* Ranges have two ends, in order. */
static lm_code check_ranges(const lm_kv_data *d, lm_err *e)
{
    for (int64_t i = 0; i < 2 * d->layers; i++) {
        const lm_kv_numbers *n = &d->side[i];
        if (!n->lower != !n->upper)
            return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                           "layer %lld has one end of its ranges", (long long)(i / 2));
        for (int64_t k = 0; n->lower && k < n->kv_heads * n->head_dim; k++)
            if (n->lower[k] > n->upper[k])
                return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                               "layer %lld: the range of channel %lld ends before it begins",
                               (long long)(i / 2), (long long)k);
    }
    return LM_OK;
}

/* "" for a text that is not there. */
static lm_code copy_meta(lm_kv_data *d, const char *text, const char **out, lm_err *e)
{
    char *own = NULL;
    *out = "";
    if (!text)
        return LM_OK;
    if (lm_arena_strdup(d->arena, &own, text, strlen(text), e))
        return e->code;
    *out = own;
    return LM_OK;
}

static lm_code read_meta(const lm_st *s, lm_kv_data *d, lm_err *e)
{
    const char *format = lm_st_meta(s, "format"), *version = lm_st_meta(s, "version");
    const char *outliers = lm_st_meta(s, "outliers"), *weights = lm_st_meta(s, "weights");
    const char *candidates = lm_st_meta(s, "candidates"), *config = lm_st_meta(s, "config");
    if (!format || strcmp(format, "kv-calibration") || !version || strcmp(version, "1"))
        return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                       "it is not a calibration of version 1");
    if (outliers &&
        (!lm_parse_double(outliers, &d->outliers) || !(d->outliers >= 0 && d->outliers < 1)))
        return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                       "outliers are a share from 0 to 1, not '%.40s'", outliers);
    if (copy_meta(d, weights, &d->weights, e) || copy_meta(d, config, &d->config, e) ||
        copy_meta(d, candidates, &d->candidates, e))
        return e->code;
    return LM_OK;
}

static bool file_meta_at(const void *of, size_t i, const char **key, const char **value)
{
    return lm_st_meta_at(of, i, key, value);
}

static const lm_st_tensor *file_tensor_at(const void *of, size_t i)
{
    return lm_st_at(of, i);
}

static void end_hex(const lm_hash128 *sum, char hex[33])
{
    uint8_t digest[16];
    lm_hash128_end(sum, digest);
    lm_hash128_hex(digest, hex);
}

/* The checksums of the header and of the numbers. */
static lm_code check_sums(const lm_st *s, const lm_kv_data *d, const lm_hash128 *sum, lm_err *e)
{
    const kv_header h = { s, file_meta_at, file_tensor_at, lm_st_count(s) };
    const char *want[2] = { lm_st_meta(s, KV_HEADER_KEY), lm_st_meta(s, KV_DATA_KEY) };
    char hex[2][33];
    if (kv_header_digest(&h, hex[0], e))
        return e->code;
    end_hex(sum, hex[1]);
    for (int i = 0; i < 2; i++)
        if (!want[i] || strcmp(want[i], hex[i]))
            return lm_fail(e, LM_EFORMAT, d->path, "measure the calibration again",
                           "the checksum of its %s is %s", i ? "numbers" : "header",
                           want[i] ? "wrong" : "missing");
    return LM_OK;
}

lm_code lm_kv_data_read(const char *path, lm_kv_data **out, lm_err *e)
{
    lm_hash128 sum;
    lm_st *s;
    lm_kv_data *d = NULL;
    place at;
    int64_t layers = 0;
    *out = NULL;
    if (lm_st_open(path, &s, e))
        return e->code;
    for (size_t i = 0; i < lm_st_count(s); i++)
        if (parse_name(lm_st_at(s, i)->name, &at) && at.layer >= layers)
            layers = at.layer + 1;
    lm_code rc = lm_kv_data_new(layers, path, &d, e);
    if (!rc)
        rc = read_meta(s, d, e);
    lm_hash128_init(&sum);
    for (size_t i = 0; i < lm_st_count(s) && !rc; i++)
        rc = read_tensor(s, lm_st_at(s, i), d, &sum, e);
    if (!rc)
        rc = check_ranges(d, e);
    if (!rc)
        rc = check_sums(s, d, &sum, e);
    lm_st_close(s);
    if (rc)
        lm_kv_data_free(d);
    else
        *out = d;
    return rc;
}

lm_code lm_kv_data_check(const lm_kv_data *d, const char *weights, const char *config, lm_err *e)
{
    bool other = *d->weights && strcmp(d->weights, weights);
    if (!other && !(*d->config && strcmp(d->config, config)))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, d->path, "use the calibration of this model",
                   "it was measured with other %s",
                   other ? "weights" : "settings of the model's config.json");
}

/* ---- writing ---- */

/* The numbers of a kind, and their shape; NULL: there are no such numbers. */
static const float *numbers_of(const lm_kv_numbers *n, int kind, int64_t dim[2], int *ndim)
{
    *ndim = kind == LOWER || kind == UPPER ? 2 : 1;
    dim[0] = *ndim == 2        ? n->kv_heads
             : kind == TABLE   ? 1 << n->bits
             : kind == ERRORS  ? n->candidates
             : kind == OUTSIDE ? n->heads
                               : n->scales;
    dim[1] = n->head_dim;
    return kind == LOWER     ? n->lower
           : kind == UPPER   ? n->upper
           : kind == TABLE   ? n->table
           : kind == ERRORS  ? n->errors
           : kind == OUTSIDE ? n->outside
                             : n->scale;
}

static lm_code plan_file(const lm_kv_data *d, lm_st_plan *p, lm_err *e)
{
    char text[64];
    snprintf(text, sizeof text, "%.17g", d->outliers);
    if (lm_st_plan_meta(p, "format", "kv-calibration", e) ||
        lm_st_plan_meta(p, "version", "1", e) || lm_st_plan_meta(p, "weights", d->weights, e) ||
        lm_st_plan_meta(p, "config", d->config, e) || lm_st_plan_meta(p, "outliers", text, e) ||
        lm_st_plan_meta(p, "candidates", d->candidates, e))
        return e->code;
    for (int64_t i = 0; i < 2 * d->layers; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            int64_t dim[2];
            int ndim;
            snprintf(text, sizeof text, "layers.%lld.%c.%s", (long long)(i / 2), i % 2 ? 'v' : 'k',
                     kind_name[kind]);
            if (numbers_of(&d->side[i], kind, dim, &ndim) &&
                lm_st_plan_add(p, text, LM_DTYPE_F32, ndim, dim, e))
                return e->code;
        }
    return LM_OK;
}

static bool plan_meta_at(const void *of, size_t i, const char **key, const char **value)
{
    return lm_st_plan_meta_at(of, i, key, value);
}

static const lm_st_tensor *plan_tensor_at(const void *of, size_t i)
{
    return lm_st_plan_at(of, i);
}

/* The checksums, when all else is planned. */
static lm_code plan_sums(const lm_kv_data *d, lm_st_plan *p, lm_err *e)
{
    const kv_header h = { p, plan_meta_at, plan_tensor_at, lm_st_plan_count(p) };
    size_t next = 0;
    char hex[33];
    lm_hash128 sum;
    lm_hash128_init(&sum);
    for (int64_t i = 0; i < 2 * d->layers; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            int64_t dim[2];
            int ndim;
            const float *x = numbers_of(&d->side[i], kind, dim, &ndim);
            if (x)
                lm_hash128_add(&sum, x, (size_t)lm_st_plan_at(p, next++)->bytes);
        }
    end_hex(&sum, hex);
    if (lm_st_plan_meta(p, KV_DATA_KEY, hex, e) || kv_header_digest(&h, hex, e))
        return e->code;
    return lm_st_plan_meta(p, KV_HEADER_KEY, hex, e);
}

static lm_code write_numbers(const lm_kv_data *d, lm_st_writer *w, lm_err *e)
{
    for (int64_t i = 0; i < 2 * d->layers; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            int64_t dim[2];
            int ndim;
            const float *x = numbers_of(&d->side[i], kind, dim, &ndim);
            if (x && lm_st_write(w, x, (size_t)lm_st_next(w)->bytes, e))
                return e->code;
        }
    return LM_OK;
}

lm_code lm_kv_data_write(const lm_kv_data *d, const char *path, bool force, lm_err *e)
{
    lm_st_plan *p;
    lm_st_writer *w = NULL;
    if (lm_st_plan_new(&p, e))
        return e->code;
    lm_code rc = plan_file(d, p, e);
    if (!rc)
        rc = plan_sums(d, p, e);
    if (!rc)
        rc = lm_st_create(path, force, p, &w, e);
    if (!rc && (rc = write_numbers(d, w, e)))
        lm_st_drop(w);
    else if (!rc)
        rc = lm_st_commit(w, e);
    lm_st_plan_free(p);
    return rc;
}
