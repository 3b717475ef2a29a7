/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- describes a merge before or after it is done: models, effective weights, bytes, bound
 * of memory. */
#include "merge/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

/* The first tensor that is computed: its weights are reported when no gradient or filter changes
 * them. */
static const lm_merge_tensor *typical(const lm_merge_plan *p)
{
    for (int64_t i = 0; i < p->n; i++)
        if (!p->tensor[i].copy)
            return &p->tensor[i];
    return NULL;
}

static bool normalizes(const lm_merge_tensor *t)
{
    double n = t->param[LM_MERGE_NORMALIZE];

    return !isnan(n) && n != 0;
}

/* The effective factor of model k: divided by the sum if the method normalises. */
static double effective(const lm_merge_tensor *t, int k)
{
    double sum = 0;

    if (!normalizes(t))
        return t->model[k].param[LM_MERGE_WEIGHT];
    for (int i = 0; i < t->n_models; i++)
        sum += t->model[i].param[LM_MERGE_WEIGHT];
    return t->model[k].param[LM_MERGE_WEIGHT] / sum;
}

/* The weight of input i, which may be used as several models; NAN if it has none. */
static double effective_of_input(const lm_merge_tensor *t, int i)
{
    double sum = NAN;

    for (int k = 0; t && k < t->n_models; k++)
        if (t->model[k].input == i && !isnan(t->model[k].param[LM_MERGE_WEIGHT]))
            sum = (isnan(sum) ? 0 : sum) + effective(t, k);
    return sum;
}

static int64_t parameters(const lm_merge_plan *p)
{
    int64_t n = 0;

    for (int64_t i = 0; i < p->n; i++)
        n += p->tensor[i].count;
    return n;
}

/* ---- JSON ---- */

static void param_json(lm_jw *w, const double param[LM_MERGE_PARAMS])
{
    for (int i = 0; i < LM_MERGE_PARAMS; i++) {
        const lm_merge_param_info *info = &lm_merge_params[i];

        if (isnan(param[i]))
            continue;
        if (info->choices)
            lm_jw_str(w, info->name, info->choices[(int)param[i]]);
        else if (info->truth)
            lm_jw_bool(w, info->name, param[i] != 0);
        else
            lm_jw_f64(w, info->name, param[i]);
    }
}

static void shape_json(lm_jw *w, const int64_t *dim, int n)
{
    lm_jw_arr(w, "shape");
    for (int i = 0; i < n; i++)
        lm_jw_int(w, NULL, dim[i]);
    lm_jw_close_arr(w);
}

static void tensor_json(lm_jw *w, const lm_merge_plan *p, const lm_merge_tensor *t)
{
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "name", t->name);
    lm_jw_str(w, "dtype", t->dtype_name);
    shape_json(w, t->dim, t->ndim);
    lm_jw_bool(w, "copied", t->copy);
    if (t->base)
        lm_jw_str(w, "base", p->model[t->base->input].name);
    lm_jw_arr(w, "models");
    for (int k = 0; k < t->n_models; k++) {
        lm_jw_obj(w, NULL);
        lm_jw_str(w, "model", p->model[t->model[k].input].name);
        lm_jw_str(w, "tensor", t->model[k].tensor->name);
        if (!t->copy)
            param_json(w, t->model[k].param);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    if (!t->copy)
        param_json(w, t->param);
    lm_jw_close_obj(w);
}

static lm_code as_json(const lm_merge_plan *p, const lm_merge_report_opts *o, lm_buf *out,
                       lm_err *e)
{
    const lm_merge_tensor *t = typical(p);
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "output", o->output);
    lm_jw_str(&w, "method", p->recipe->method->name);
    if (p->recipe->base >= 0)
        lm_jw_str(&w, "base", p->model[p->recipe->base].name);
    lm_jw_arr(&w, "inputs");
    for (int i = 0; i < p->recipe->n_inputs; i++) {
        char hex[17];

        snprintf(hex, sizeof hex, "%016" PRIx64, p->model[i].digest);
        lm_jw_obj(&w, NULL);
        lm_jw_str(&w, "name", p->model[i].name);
        if (p->model[i].digest)
            lm_jw_str(&w, lm_plan_digest_kind(p), hex);
        double weight = effective_of_input(t, i);
        if (!isnan(weight))
            lm_jw_f64(&w, "effective_weight", weight);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    lm_jw_int(&w, "tensor_count", p->n);
    lm_jw_int(&w, "parameters", parameters(p));
    lm_jw_int(&w, "bytes_read", (int64_t)p->read);
    lm_jw_int(&w, "bytes_written", (int64_t)p->write);
    lm_jw_int(&w, "largest_tensor", (int64_t)p->largest);
    lm_jw_int(&w, "memory_bound", (int64_t)lm_merge_plan_bound(p));
    if (o->output) {
        lm_jw_int(&w, "peak_rss", (int64_t)o->peak_rss);
        lm_jw_f64(&w, "seconds", o->seconds);
    }
    if (o->tensors) {
        lm_jw_arr(&w, "tensors");
        for (int64_t i = 0; i < p->n; i++)
            tensor_json(&w, p, &p->tensor[i]);
        lm_jw_close_arr(&w);
    }
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

lm_code lm_merge_method_json(const lm_merge_method *m, lm_buf *out, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "method", m->name);
    lm_jw_str(&w, "about", m->about);
    lm_jw_str(&w, "source", m->source);
    lm_jw_str(&w, "base", m->base_required ? "required" : m->base_allowed ? "optional" : "none");
    lm_jw_arr(&w, "parameters");
    for (int i = 0; i < LM_MERGE_PARAMS; i++)
        if (m->takes >> i & 1)
            lm_jw_str(&w, NULL, lm_merge_params[i].name);
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}

/* ---- Text ---- */

static lm_code param_text(const double param[LM_MERGE_PARAMS], const char *before, lm_buf *out,
                          lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; i < LM_MERGE_PARAMS && !rc; i++) {
        const lm_merge_param_info *info = &lm_merge_params[i];

        if (isnan(param[i]))
            continue;
        if (info->choices)
            rc = lm_buf_addf(out, e, "%s%s=%s", before, info->name, info->choices[(int)param[i]]);
        else if (info->truth)
            rc = lm_buf_addf(out, e, "%s%s=%s", before, info->name,
                             param[i] != 0 ? "true" : "false");
        else
            rc = lm_buf_addf(out, e, "%s%s=%g", before, info->name, param[i]);
        before = " ";
    }
    return rc;
}

static lm_code model_text(const lm_merge_plan *p, const lm_merge_tensor *t, int k, lm_buf *out,
                          lm_err *e)
{
    const lm_merge_ref *m = &t->model[k];
    lm_code rc = lm_buf_addf(out, e, "model      %s", p->model[m->input].name);

    if (!rc && !t->copy)
        rc = param_text(m->param, "  ", out, e);
    if (!rc && !isnan(m->param[LM_MERGE_WEIGHT]) && normalizes(t))
        rc = lm_buf_addf(out, e, " (effective %g)", effective(t, k));
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

static lm_code tensor_text(const lm_merge_plan *p, const lm_merge_tensor *t, lm_buf *out, lm_err *e)
{
    lm_code rc = lm_buf_addf(out, e, "%s %s [", t->name, t->dtype_name);

    for (int i = 0; i < t->ndim && !rc; i++)
        rc = lm_buf_addf(out, e, "%s%" PRId64, i ? "," : "", t->dim[i]);
    if (!rc)
        rc = lm_buf_addf(out, e, "]%s", t->copy ? "  copied" : "");
    if (!rc && !t->copy)
        rc = param_text(t->param, "  ", out, e);
    for (int k = 0; k < t->n_models && !rc; k++) {
        rc = lm_buf_addf(out, e, "%s%s", k ? ", " : "  ", p->model[t->model[k].input].name);
        if (!rc && strcmp(t->model[k].tensor->name, t->name) != 0)
            rc = lm_buf_addf(out, e, " %s", t->model[k].tensor->name);
        if (!rc && !t->copy)
            rc = param_text(t->model[k].param, ":", out, e);
    }
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

static lm_code as_text(const lm_merge_plan *p, const lm_merge_report_opts *o, lm_buf *out,
                       lm_err *e)
{
    const lm_merge_tensor *t = typical(p);
    char read[32], write[32], largest[32], bound[32];
    lm_code rc = lm_buf_addf(out, e, "method     %s", p->recipe->method->name);

    if (!rc && t)
        rc = param_text(t->param, "  ", out, e);
    if (!rc)
        rc = lm_buf_add(out, "\n", 1, e);
    if (!rc && p->recipe->base >= 0)
        rc = lm_buf_addf(out, e, "base       %s\n", p->model[p->recipe->base].name);
    for (int k = 0; t && k < t->n_models && !rc; k++)
        rc = model_text(p, t, k, out, e);
    if (!rc)
        rc = lm_buf_addf(out, e,
                         "tensors    %" PRId64 "\nparameters %" PRId64
                         "\nreads      %s\nwrites     %s\nlargest    %s\nmemory     at most %s "
                         "(2 x largest tensor x %d input%s",
                         p->n, parameters(p), lm_show_bytes((double)p->read, read),
                         lm_show_bytes((double)p->write, write),
                         lm_show_bytes((double)p->largest, largest),
                         lm_show_bytes((double)lm_merge_plan_bound(p), bound), p->recipe->n_inputs,
                         lm_plural(p->recipe->n_inputs));
    if (!rc && p->side)
        rc = lm_buf_addf(out, e, " + %s beside them", lm_show_bytes((double)p->side, largest));
    if (!rc)
        rc = lm_buf_addf(out, e, " + 64 MiB)\n");
    for (int64_t i = 0; o->tensors && i < p->n && !rc; i++)
        rc = tensor_text(p, &p->tensor[i], out, e);
    return rc;
}

lm_code lm_merge_report(const lm_merge_plan *p, const lm_merge_report_opts *o, lm_buf *out,
                        lm_err *e)
{
    return o->json ? as_json(p, o, out, e) : as_text(p, o, out, e);
}
