/* SPDX-License-Identifier: Apache-2.0 */
/* calibrate.c -- quantize-kv --calibrate: a calibration of a model on text. */
#include <string.h>

#include "base/cpu.h"
#include "base/file.h"
#include "base/hyper.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "quantize-kv/model.h"

enum { BITS, OUTLIERS, QNORM, SCALE };
static const lm_hyper keys[] = {
    { "bits", 3, 1, 5, "of a number", LM_WHOLE },
    { "outliers", 0.01, 0, 0.5, "share of numbers stored apart", NULL },
    { "qnorm", 0, 0, 1, "levels keep mean and deviation", "off on" },
    { "scale", 0, 0, 1, "what has an FP8 scale of its own", "layer head" },
    { 0 },
};

static const char where[] = "calibration";

lm_code kv_calibration_parse(const char *text, lm_kv_calibrate_opts *o, char **rest, lm_err *e)
{
    double h[4] = { 3, 0.01, 0, 0 };
    lm_buf spec = { 0 };
    lm_hyper_text t;
    size_t len = strcspn(text, ":");
    lm_code rc = LM_OK;

    if (len != 7 || strncmp(text, "kvquant", len) != 0)
        return lm_fail(e, LM_EUSAGE, where, "give kvquant:bits=3,outliers=0.01",
                       "'%.60s' is not a method with a calibration", text);
    if (rest)
        rc = lm_buf_addf(&spec, e, "kvquant:file=calibration");
    for (const char *at = text + len + (text[len] == ':'); *at && !rc; at += *at == ',') {
        rc = lm_hyper_next(&at, "", where, "kvquant", &t, e);
        int i = rc ? -1 : lm_hyper_find(keys, t.key);
        if (i >= 0)
            rc = lm_hyper_set(&keys[i], where, "kvquant", t.value, &h[i], e);
        else if (!rc && rest)
            rc = lm_buf_addf(&spec, e, ",%s=%s", t.key, t.value);
        else if (!rc)
            rc = lm_hyper_fail(keys, where, "kvquant", "", t.key, e);
    }
    o->levels = (lm_kvquant_opts){ (int)h[BITS], h[OUTLIERS], h[QNORM] != 0 };
    o->heads = h[SCALE] != 0;
    if (rest && !rc)
        *rest = spec.data;
    else
        lm_buf_fini(&spec);
    return rc;
}

static lm_code run(kv_work *w, lm_err *e)
{
    lm_tool *t = w->tool;
    lm_kv_calibrate_opts o = { .candidates =
                                   strcmp(w->o->candidates, "none") ? w->o->candidates : NULL };
    lm_backend *b = NULL;
    lm_kv_data *d = NULL;
    double nll;

    if (kv_calibration_parse(w->o->method, &o, NULL, e) || lm_out_try(t->output, t->force, e) ||
        kv_work_open(w, w->o->windows, e) || lm_stopping())
        return e->code;
    o.ids = w->ids.v;
    o.windows = w->windows;
    o.seq = w->seq;
    o.error_tokens = w->seq;
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
