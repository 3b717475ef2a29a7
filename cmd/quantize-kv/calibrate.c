/* SPDX-License-Identifier: Apache-2.0 */
/* calibrate.c -- quantize-kv --calibrate: a calibration of a model on text. */
#include <string.h>

#include "base/cpu.h"
#include "base/file.h"
#include "base/hyper.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "kv/spec.h"
#include "quantize-kv/model.h"

static const char where[] = "--method";

enum { BITS, OUTLIERS, QNORM, SCALE, KEYS };
static const lm_hyper keys[] = {
    { "bits", 3, 1, 5, "of a number", LM_WHOLE },
    { "outliers", 0.01, 0, 0.5, "share of numbers stored apart", NULL },
    { "qnorm", 0, 0, 1, "levels keep mean and deviation", "off on" },
    { "scale", 0, 0, 1, "what has an FP8 scale of its own", "layer head" },
    { 0 },
};

/* Methods with a calibration; each has the keys from `first` on. */
enum { KVQUANT, AUTO, FP8, ALL, METHODS };
static const struct {
    const char *name;
    int first;
} methods[METHODS] = { { "kvquant", BITS }, { "auto", KEYS }, { "fp8", SCALE }, { "all", BITS } };

/* ---- methods as text ---- */

/* True if what follows a comma, up to the next one, is a key of the method before it: "residual=128". */
static bool continues(const char *text)
{
    size_t n = strcspn(text, ", \t\n"), equals = strcspn(text, "=");

    return equals < n && equals < strcspn(text, ":");
}

char *kv_next_method(char **at)
{
    char *begin = *at + strspn(*at, ", \t\n"), *end = begin;

    while (*end && !strchr(" \t\n", *end) && (*end != ',' || continues(end + 1)))
        end++;
    *at = end + (*end != 0);
    *end = 0;
    return *begin ? begin : NULL;
}

/* One of `methods`; METHODS: another one. */
static int method_of(const char *text)
{
    size_t len = strcspn(text, ":");
    int i = 0;

    while (i < METHODS && (strlen(methods[i].name) != len || strncmp(text, methods[i].name, len)))
        i++;
    return i == METHODS && strncmp(text, "fp8_", 4) == 0 ? FP8 : i;
}

static lm_code parse_keys(const char *text, int method, double h[KEYS], lm_buf *spec, lm_err *e)
{
    const lm_hyper *own = keys + methods[method].first;
    const char *name = methods[method].name;
    lm_hyper_text t;
    lm_code rc = LM_OK;

    for (const char *at = text; *at && !rc; at += *at == ',') {
        rc = lm_hyper_next(&at, "", where, name, &t, e);
        int i = rc ? -1 : lm_hyper_find(own, t.key);
        if (i >= 0)
            rc = lm_hyper_set(&own[i], where, name, t.value, &h[methods[method].first + i], e);
        else if (!rc && !spec)
            rc = lm_hyper_fail(own, where, name, "", t.key, e);
        if (!rc && spec && (i < 0 || method != KVQUANT)) /* keys of the specification */
            rc = lm_buf_addf(spec, e, ",%s=%s", t.key, t.value);
    }
    return rc;
}

lm_code kv_calibration_parse(const char *text, lm_kv_calibrate_opts *o, char **rest, lm_err *e)
{
    double h[KEYS] = { 3, 0.01, 0, o->heads };
    int method = method_of(text);
    size_t len = strcspn(text, ":");
    lm_buf spec = { 0 };

    if (method == METHODS)
        return lm_fail(e, LM_EUSAGE, where, "give kvquant:bits=3, auto, fp8 or all",
                       "'%.60s' is not a method with a calibration", text);
    lm_code rc = rest ? lm_buf_addf(&spec, e, "%.*s:file=calibration", (int)len, text) : LM_OK;
    if (!rc)
        rc = parse_keys(text + len + (text[len] == ':'), method, h, rest ? &spec : NULL, e);
    if (method == KVQUANT || method == ALL)
        o->levels = (lm_kvquant_opts){ (int)h[BITS], h[OUTLIERS], h[QNORM] != 0 };
    o->scales |= method != AUTO;
    o->heads = h[SCALE] != 0;
    if (method == AUTO || method == ALL)
        o->candidates = LM_KV_CANDIDATES;
    if (rest && !rc)
        *rest = spec.data;
    else
        lm_buf_fini(&spec);
    return rc;
}

bool kv_calibrated_here(const char *name)
{
    int method = method_of(name);

    if (strstr(name, "file="))
        return false;
    return method == KVQUANT || (method == AUTO && strstr(name, "bits=")) ||
           (method == FP8 && (strstr(name, "scale=layer") || strstr(name, "scale=head")));
}

/* All methods of --method, and --candidates. */
static lm_code parse_options(const kv_model_options *k, lm_kv_calibrate_opts *o, lm_err *e)
{
    char *list, *at, *name;
    lm_code rc = lm_alloc_n(&list, strlen(k->method) + 1, 1, "methods", e);

    if (rc)
        return rc;
    memcpy(list, k->method, strlen(k->method) + 1);
    for (at = list; !rc && (name = kv_next_method(&at));)
        rc = kv_calibration_parse(name, o, NULL, e);
    lm_free(list);
    if (rc)
        return rc;
    if (k->candidates && o->candidates && !strcmp(k->candidates, "none"))
        return lm_fail(e, LM_EUSAGE, "--candidates", "leave auto out, or name some",
                       "auto needs candidates to choose from");
    if (k->candidates)
        o->candidates = strcmp(k->candidates, "none") ? k->candidates : NULL;
    if (!o->levels.bits && !o->scales && !o->candidates)
        return lm_fail(e, LM_EUSAGE, "--method", "give kvquant:bits=3, auto, fp8 or all",
                       "no method is named");
    return o->candidates ? lm_kv_check_candidates(o->candidates, "--candidates", e) : LM_OK;
}

static lm_code run(kv_work *w, lm_err *e)
{
    lm_tool *t = w->tool;
    lm_kv_calibrate_opts o = { 0 };
    lm_backend *b = NULL;
    lm_kv_data *d = NULL;
    double nll;

    if (parse_options(w->o, &o, e) || lm_out_try(t->output, t->force, e) ||
        kv_work_open(w, w->o->windows, e) || lm_stopping())
        return e->code;
    o.ids = w->ids.v;
    o.windows = w->windows;
    o.seq = w->seq;
    o.par = w->par;
    o.sink = &t->sink;
    lm_code rc = lm_backend_cpu(t->cpu, w->par, &b, e);
    if (!rc)
        rc = lm_kv_calibrate(&w->model, &o, t->output, b, &nll, &d, e);
    if (!rc && d)
        rc = lm_kv_data_write(d, t->output, t->force, e);
    if (!rc && d)
        lm_say(t, LM_LOG_NOTICE, "%s: %lld window%s of %lld tokens, loss %.4f", t->output,
               (long long)w->windows, lm_plural(w->windows), (long long)w->seq, nll);
    lm_kv_data_free(d);
    lm_loaded_fini(&w->model);
    if (b)
        lm_backend_close(b);
    return rc;
}

void kv_calibrate(lm_tool *t, const kv_model_options *o)
{
    kv_work w = { .tool = t, .o = o, .path = t->argv[0], .data = t->argv[1] };
    lm_err e = { 0 };

    if (run(&w, &e))
        lm_complain(t, &e);
    kv_work_close(&w);
}
