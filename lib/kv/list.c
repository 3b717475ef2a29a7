/* SPDX-License-Identifier: Apache-2.0 */
/* list.c -- lists of the methods and policies. */
#include "kv/list.h"

#include "base/json.h"
#include "kv/cachegen.h"
#include "kv/method.h"

static const char cachegen[] = "for transport: deltas to anchors, entropy-coded, in levels";

static lm_code add_method(const lm_kv_method *m, lm_buf *out, lm_err *e)
{
    if (lm_buf_addf(out, e, "%-16s %s\n", m->name, m->about))
        return e->code;
    for (const lm_hyper *h = m->hyper; h->name; h++)
        if (lm_hyper_add_line(h, out, e))
            return e->code;
    return m->file ? lm_buf_addf(out, e, "  %-23s %s\n", "file", "a calibration") : LM_OK;
}

static lm_code add_name(int i, lm_buf *out, lm_err *e)
{
    const char *text, *name = lm_kv_alias_at(i, &text);
    return lm_buf_addf(out, e, "%-20s = %s\n", name, text);
}

lm_code lm_kv_methods_table(bool files, lm_buf *out, lm_err *e)
{
    const char *text;
    for (int i = 0; lm_kv_method_at(i); i++)
        if (add_method(lm_kv_method_at(i), out, e))
            return e->code;
    if (files &&
        lm_buf_addf(out, e, "%-16s %s 0 to %d\n", LM_KV_CACHEGEN, cachegen, LM_CACHEGEN_LEVELS - 1))
        return e->code;
    for (int i = 0; lm_kv_alias_at(i, &text); i++)
        if (add_name(i, out, e))
            return e->code;
    return LM_OK;
}

static void add_cachegen(lm_jw *w)
{
    lm_jw_obj(w, LM_KV_CACHEGEN);
    lm_jw_str(w, "about", cachegen);
    lm_jw_bool(w, "file", false);
    lm_jw_obj(w, "hyper");
    lm_jw_close_obj(w);
    lm_jw_int(w, "levels", LM_CACHEGEN_LEVELS);
    lm_jw_close_obj(w);
}

static void add_objects(lm_jw *w, bool policies, bool files)
{
    lm_jw_obj(w, policies ? "policies" : "methods");
    for (int i = 0; lm_kv_method_at(i); i++) {
        const lm_kv_method *m = lm_kv_method_at(i);
        if (!m->policy == policies)
            continue;
        lm_jw_obj(w, m->name);
        lm_jw_str(w, "about", m->about);
        lm_jw_bool(w, "file", m->file);
        lm_jw_obj(w, "hyper");
        for (const lm_hyper *h = m->hyper; h->name; h++)
            lm_hyper_add_json(h, w);
        lm_jw_close_obj(w);
        lm_jw_close_obj(w);
    }
    if (files && !policies)
        add_cachegen(w);
    lm_jw_close_obj(w);
}

lm_code lm_kv_methods_json(bool files, lm_buf *out, lm_err *e)
{
    lm_jw w;
    const char *text;
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    add_objects(&w, false, files);
    add_objects(&w, true, files);
    lm_jw_obj(&w, "names");
    for (int i = 0; lm_kv_alias_at(i, &text); i++) {
        const char *name = lm_kv_alias_at(i, &text);
        lm_jw_str(&w, name, text);
    }
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}
