/* SPDX-License-Identifier: Apache-2.0 */
/* inspect_report.c -- reports of one model.  Text from files is cleaned: a name must not drive a
 * terminal. */
#include "format/inspect_report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "format/folder_run.h"
#include "format/inspect_text.h"
#include "format/provenance.h"

enum { MAX_TYPES = 32 };

typedef struct {
    const char *name; /* dtype */
    size_t tensors;
    int64_t params;
    uint64_t bytes;
} type_sum;

typedef struct {
    lm_model_source *m;
    const lm_inspect_opts *opts;
    type_sum type[MAX_TYPES];
    int n_types;
    char *checkpoint;       /* of a run folder */
    json_t *history;        /* array or NULL */
    lm_tensor_stats *stats; /* of each tensor, on request */
} report;

static bool listed(const report *r, const lm_st_tensor *t)
{
    return lm_name_among(t->name, r->opts->only, r->opts->n_only);
}

static bool has_stats(const report *r, const lm_st_tensor *t)
{
    return r->stats && t->dtype != LM_DTYPE_NONE;
}

/* ---- Gathering ---- */

static void sum_types(report *r)
{
    for (size_t i = 0; i < lm_model_source_count(r->m); i++) {
        const lm_st_tensor *t = lm_model_source_at(r->m, i);
        int k = 0;
        while (k < r->n_types && strcmp(r->type[k].name, t->dtype_name))
            k++;
        if (k == r->n_types)
            r->type[r->n_types++].name = t->dtype_name; /* there are fewer dtypes than MAX_TYPES */
        r->type[k].tensors++;
        r->type[k].params += t->count;
        r->type[k].bytes += t->bytes;
    }
}

static lm_code gather_stats(report *r, lm_par *par, lm_sink *sink, lm_err *e)
{
    size_t n = lm_model_source_count(r->m);
    double done = 0, total = (double)lm_model_source_bytes(r->m);
    lm_code rc = lm_alloc_n(&r->stats, n, sizeof *r->stats, "statistics", e);

    if (!rc)
        rc = lm_model_source_rewind(r->m, e);
    for (size_t i = 0; i < n && !rc && !lm_stopping(); i++) {
        const lm_st_tensor *t = NULL;
        rc = lm_model_source_next(r->m, &t, e);
        if (!rc && listed(r, t) && has_stats(r, t))
            rc = lm_tensor_stats_of(r->m, t, par, &r->stats[i], e);
        done += t ? (double)t->bytes : 0;
        lm_progress(sink, "read", done, total, "bytes", NULL);
    }
    return rc;
}

static lm_code check_globs(const report *r, lm_err *e)
{
    for (size_t i = 0; i < lm_model_source_count(r->m); i++)
        if (listed(r, lm_model_source_at(r->m, i)))
            return LM_OK;
    return r->opts->n_only ? lm_fail(e, LM_EUSAGE, r->opts->only[0], NULL,
                                     "no tensor of %s has such a name", lm_model_source_path(r->m))
                           : LM_OK;
}

static lm_code gather(report *r, lm_par *par, lm_sink *sink, lm_err *e)
{
    const char *history = lm_model_source_meta(r->m, LM_HISTORY_KEY);
    lm_err malformed = { 0 };
    lm_code rc = check_globs(r, e);

    sum_types(r);
    if (!rc && history)
        rc = lm_json_parse(history, strlen(history), "history", &r->history, &malformed);
    if (rc == LM_ELIMIT && malformed.code) /* any other text is not shown */
        *e = malformed;
    else if (malformed.code)
        rc = LM_OK;
    if (!json_is_array(r->history)) {
        json_decref(r->history);
        r->history = NULL;
    }
    if (!rc && lm_path_is_dir(lm_model_source_path(r->m)))
        rc = lm_run_latest(lm_model_source_path(r->m), &r->checkpoint, e);
    if (!rc && r->opts->stats)
        rc = gather_stats(r, par, sink, e);
    return rc;
}

static const char *config_text(const report *r, const char *key)
{
    return json_string_value(json_object_get(lm_model_source_config(r->m), key));
}

static const char *architecture(const report *r)
{
    const json_t *all = json_object_get(lm_model_source_config(r->m), "architectures");
    return json_string_value(json_array_get(all, 0));
}

/* ---- Text ---- */

static void text_history(const report *r, lm_text *x)
{
    size_t i;
    json_t *step;

    json_array_foreach(r->history, i, step)
    {
        size_t k;
        json_t *arg;
        lm_text_add(x, i ? "             " : "  history    ");
        json_array_foreach(json_object_get(step, "argv"), k, arg)
        {
            lm_text_add(x, k ? " " : "");
            lm_text_clean(x, json_string_value(arg));
        }
        const char *version = json_string_value(json_object_get(step, "version"));
        if (version) {
            lm_text_add(x, "  (");
            lm_text_clean(x, version);
            lm_text_add(x, ")");
        }
        lm_text_add(x, "\n");
    }
}

static void text_summary(const report *r, lm_text *x)
{
    char a[32], b[32];
    const char *type = config_text(r, "model_type"), *arch = architecture(r);
    size_t files = lm_model_source_files(r->m);

    lm_text_clean(x, lm_model_source_path(r->m));
    lm_text_add(x, "\n");
    if (type) {
        lm_text_add(x, "  model      ");
        lm_text_clean(x, type);
        if (arch) {
            lm_text_add(x, " (");
            lm_text_clean(x, arch);
            lm_text_add(x, ")");
        }
        lm_text_add(x, "\n");
    }
    if (r->checkpoint)
        lm_text_addf(x, "  checkpoint %s\n", r->checkpoint);
    lm_text_addf(x, "  files      %zu\n  tensors    %zu\n", files, lm_model_source_count(r->m));
    lm_text_addf(x, "  parameters %" PRId64 " (%s)\n", lm_model_source_params(r->m),
                 lm_show_count((double)lm_model_source_params(r->m), a));
    if (r->opts->active)
        lm_text_addf(x, "  active     %" PRId64 " (%s) in a token\n", r->opts->active,
                     lm_show_count((double)r->opts->active, a));
    if (r->opts->ahead)
        lm_text_addf(x, "  further    %" PRId64 " (%s) of these predict tokens further on\n",
                     r->opts->ahead, lm_show_count((double)r->opts->ahead, a));
    lm_text_addf(x, "  bytes      %" PRIu64 " (%s)\n", lm_model_source_bytes(r->m),
                 lm_show_bytes((double)lm_model_source_bytes(r->m), b));
    for (int i = 0; i < r->n_types; i++)
        lm_text_addf(x, "%s%-8s %s in %zu tensor%s, %s\n", i ? "             " : "  dtypes     ",
                     r->type[i].name, lm_show_count((double)r->type[i].params, a),
                     r->type[i].tensors, lm_plural(r->type[i].tensors),
                     lm_show_bytes((double)r->type[i].bytes, b));
    text_history(r, x);
}

static int shape_width(const report *r)
{
    int width = 5;
    char shape[LM_SHAPE_TEXT];

    for (size_t i = 0; i < lm_model_source_count(r->m); i++) {
        int n = (int)strlen(lm_text_shape(lm_model_source_at(r->m, i), shape));
        width = n > width ? n : width;
    }
    return width;
}

static void text_list(const report *r, lm_text *x)
{
    int width = shape_width(r);
    char shape[LM_SHAPE_TEXT], bytes[32];

    lm_text_addf(x, "\n%-7s  %-*s  %12s  %10s", "dtype", width, "shape", "parameters", "bytes");
    if (r->stats)
        lm_text_addf(x, "  %11s  %11s  %11s  %11s  %9s  %9s", "min", "max", "mean", "std", "zeros",
                     "nonfinite");
    lm_text_add(x, "  name\n");
    for (size_t i = 0; i < lm_model_source_count(r->m); i++) {
        const lm_st_tensor *t = lm_model_source_at(r->m, i);
        if (!listed(r, t))
            continue;
        lm_text_addf(x, "%-7s  %-*s  %12" PRId64 "  %10s", t->dtype_name, width,
                     lm_text_shape(t, shape), t->count, lm_show_bytes((double)t->bytes, bytes));
        if (has_stats(r, t))
            lm_text_addf(x, "  %11.4g  %11.4g  %11.4g  %11.4g  %9" PRId64 "  %9" PRId64,
                         r->stats[i].min, r->stats[i].max, r->stats[i].mean, r->stats[i].std,
                         r->stats[i].zeros, r->stats[i].nans + r->stats[i].infs);
        else if (r->stats)
            lm_text_addf(x, "  %11s  %11s  %11s  %11s  %9s  %9s", "-", "-", "-", "-", "-", "-");
        lm_text_add(x, "  ");
        lm_text_clean(x, t->name);
        lm_text_add(x, "\n");
    }
}

/* ---- JSON ---- */

static void json_types(const report *r, lm_jw *w)
{
    lm_jw_obj(w, "dtypes");
    for (int i = 0; i < r->n_types; i++) {
        lm_jw_obj(w, r->type[i].name);
        lm_jw_int(w, "tensors", (int64_t)r->type[i].tensors);
        lm_jw_int(w, "parameters", r->type[i].params);
        lm_jw_int(w, "bytes", (int64_t)r->type[i].bytes);
        lm_jw_close_obj(w);
    }
    lm_jw_close_obj(w);
}

static void json_stats(const lm_tensor_stats *s, lm_jw *w)
{
    lm_jw_f64(w, "min", s->min);
    lm_jw_f64(w, "max", s->max);
    lm_jw_f64(w, "mean", s->mean);
    lm_jw_f64(w, "std", s->std);
    lm_jw_int(w, "zeros", s->zeros);
    lm_jw_int(w, "nan", s->nans);
    lm_jw_int(w, "inf", s->infs);
}

static void json_list(const report *r, lm_jw *w)
{
    lm_jw_arr(w, "tensors");
    for (size_t i = 0; i < lm_model_source_count(r->m); i++) {
        const lm_st_tensor *t = lm_model_source_at(r->m, i);
        if (!listed(r, t))
            continue;
        lm_jw_obj(w, NULL);
        lm_jw_str(w, "name", t->name);
        lm_jw_str(w, "dtype", t->dtype_name);
        lm_text_json_shape(w, t);
        lm_jw_int(w, "parameters", t->count);
        lm_jw_int(w, "bytes", (int64_t)t->bytes);
        lm_jw_str(w, "file", lm_model_source_file_of(r->m, t));
        if (has_stats(r, t))
            json_stats(&r->stats[i], w);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static lm_code json_report(const report *r, lm_buf *out, lm_err *e)
{
    const char *format = lm_model_source_meta(r->m, "format");
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "model", lm_model_source_path(r->m));
    lm_jw_str(&w, "model_type", config_text(r, "model_type"));
    lm_jw_str(&w, "architecture", architecture(r));
    lm_jw_str(&w, "checkpoint", r->checkpoint);
    lm_jw_str(&w, "format", format);
    lm_jw_int(&w, "files", (int64_t)lm_model_source_files(r->m));
    lm_jw_int(&w, "tensor_count", (int64_t)lm_model_source_count(r->m));
    lm_jw_int(&w, "parameters", lm_model_source_params(r->m));
    if (r->opts->active)
        lm_jw_int(&w, "active_parameters", r->opts->active);
    if (r->opts->ahead) {
        lm_jw_int(&w, "mtp_parameters", r->opts->ahead);
        lm_jw_int(&w, "mtp_stored", r->opts->ahead_stored);
    }
    lm_jw_int(&w, "bytes", (int64_t)lm_model_source_bytes(r->m));
    json_types(r, &w);
    if (r->history)
        lm_jw_json(&w, "history", r->history);
    if (r->opts->list)
        json_list(r, &w);
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

lm_code lm_inspect_report(lm_model_source *m, const lm_inspect_opts *opts, lm_par *par,
                          lm_sink *sink, lm_buf *out, lm_err *e)
{
    report r = { .m = m, .opts = opts };
    lm_code rc = gather(&r, par, sink, e);

    if (!rc && opts->json) {
        rc = json_report(&r, out, e);
    } else if (!rc) {
        lm_text x = { .out = out, .err = e };
        text_summary(&r, &x);
        if (opts->list)
            text_list(&r, &x);
        rc = x.rc;
    }
    json_decref(r.history);
    lm_free(r.checkpoint);
    lm_free(r.stats);
    return rc;
}
