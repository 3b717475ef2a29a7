/* SPDX-License-Identifier: Apache-2.0 */
/* inspect_compare.c -- the report of two models side by side. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/text.h"
#include "format/inspect_report.h"
#include "format/inspect_text.h"

/* Why a pair differs, in a word or two; NULL when the numbers show it. */
static const char *reason(const lm_tensor_diff *p)
{
    if (!p->b)
        return "only in A";
    if (!p->a)
        return "only in B";
    if (p->measured && p->differing)
        return NULL;
    if (p->measured)
        return "dtype";
    return strcmp(p->a->dtype_name, p->b->dtype_name) ? "dtype or shape" : "shape or bytes";
}

static void text_pair(const lm_tensor_diff *p, lm_text *x)
{
    const lm_st_tensor *t = p->a ? p->a : p->b;
    const char *why = reason(p);
    char a[LM_SHAPE_TEXT], b[LM_SHAPE_TEXT];

    if (!why)
        lm_text_addf(x, "%12" PRId64 "  %12" PRId64 "  %11.4g  %11.4g  %11.4g  ", p->differing,
                     t->count, p->max_abs, p->max_rel, p->rel_l2);
    else
        lm_text_addf(x, "%-65s  ", why);
    lm_text_clean(x, t->name);
    if (p->a && p->b && why)
        lm_text_addf(x, "  A: %s %s  B: %s %s", p->a->dtype_name, lm_text_shape(p->a, a),
                     p->b->dtype_name, lm_text_shape(p->b, b));
    lm_text_add(x, "\n");
}

static void text_diff(const lm_model_source *a, const lm_model_source *b, const lm_model_diff *d,
                      lm_text *x)
{
    size_t same = 0;

    for (size_t i = 0; i < d->n; i++)
        same += d->pair[i].same;
    lm_text_add(x, "A ");
    lm_text_clean(x, lm_model_source_path(a));
    lm_text_add(x, "\nB ");
    lm_text_clean(x, lm_model_source_path(b));
    lm_text_add(x, "\n");
    if (!d->same)
        lm_text_addf(x, "\n%12s  %12s  %11s  %11s  %11s  name\n", "differing", "of", "max |A-B|",
                     "max rel", "rel L2");
    for (size_t i = 0; i < d->n; i++)
        if (!d->pair[i].same)
            text_pair(&d->pair[i], x);
    lm_text_addf(x, "\n%zu of %zu tensor%s %s the same", same, d->n, lm_plural(d->n),
                 d->n == 1 ? "is" : "are");
    if (d->dtypes)
        lm_text_addf(x, ", %zu with another dtype", d->dtypes);
    if (!d->same)
        lm_text_addf(x, "; largest difference %.4g, largest relative %.4g", d->max_abs, d->max_rel);
    lm_text_add(x, "\n");
}

static void json_pair(const lm_tensor_diff *p, lm_jw *w)
{
    const lm_st_tensor *side[2] = { p->a, p->b };

    lm_jw_obj(w, NULL);
    lm_jw_str(w, "name", (p->a ? p->a : p->b)->name);
    lm_jw_bool(w, "same", p->same);
    for (int i = 0; i < 2; i++) {
        if (!side[i]) {
            lm_jw_str(w, i ? "b" : "a", NULL);
            continue;
        }
        lm_jw_obj(w, i ? "b" : "a");
        lm_jw_str(w, "dtype", side[i]->dtype_name);
        lm_text_json_shape(w, side[i]);
        lm_jw_close_obj(w);
    }
    if (p->measured) {
        lm_jw_int(w, "differing", p->differing);
        lm_jw_f64(w, "max_abs", p->max_abs);
        lm_jw_f64(w, "max_rel", p->max_rel);
        lm_jw_f64(w, "rel_l2", p->rel_l2);
        if (!isfinite(p->max_abs) || !isfinite(p->rel_l2))
            lm_jw_str(w, "nonfinite", "inf");
    }
    lm_jw_close_obj(w);
}

static lm_code json_diff(const lm_model_source *a, const lm_model_source *b, const lm_model_diff *d,
                         lm_buf *out, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "a", lm_model_source_path(a));
    lm_jw_str(&w, "b", lm_model_source_path(b));
    lm_jw_bool(&w, "same", d->same);
    lm_jw_int(&w, "differing", (int64_t)d->differing);
    lm_jw_int(&w, "only_a", (int64_t)d->only_a);
    lm_jw_int(&w, "only_b", (int64_t)d->only_b);
    lm_jw_int(&w, "other_shape", (int64_t)d->shapes);
    lm_jw_int(&w, "other_dtype", (int64_t)d->dtypes);
    lm_jw_f64(&w, "max_abs", d->max_abs);
    lm_jw_f64(&w, "max_rel", d->max_rel);
    lm_jw_arr(&w, "tensors");
    for (size_t i = 0; i < d->n; i++)
        json_pair(&d->pair[i], &w);
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

lm_code lm_compare_report(const lm_model_source *a, const lm_model_source *b,
                          const lm_model_diff *d, bool json, lm_buf *out, lm_err *e)
{
    lm_text x = { .out = out, .err = e };

    if (json)
        return json_diff(a, b, d, out, e);
    text_diff(a, b, d, &x);
    return x.rc;
}
