/* SPDX-License-Identifier: Apache-2.0 */
/* verify_report.c -- the findings of a verification, as text and as JSON: faults first. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"
#include "convert/verify.h"
#include "format/inspect_text.h"

typedef struct {
    lm_text text[2]; /* of notes, of faults */
    lm_jw json[2];
    bool as_json;
} report;

static void say_text(lm_text *x, const lm_finding *f)
{
    lm_text_add(x, f->fault ? "  fault  " : "  note   ");
    lm_text_clean(x, f->file);
    lm_text_add(x, f->file[0] ? ": " : "");
    lm_text_clean(x, f->name ? f->name : "");
    lm_text_add(x, f->name ? ": " : "");
    lm_text_clean(x, f->what);
    lm_text_add(x, "\n");
}

static void say(void *ctx, const lm_finding *f)
{
    report *r = ctx;
    lm_jw *w = &r->json[f->fault];

    if (!r->as_json) {
        say_text(&r->text[f->fault], f);
        return;
    }
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "file", f->file[0] ? f->file : NULL);
    lm_jw_str(w, "name", f->name);
    lm_jw_str(w, "what", f->what);
    lm_jw_close_obj(w);
}

static lm_code put_text(const lm_model_source *m, report *r, const lm_findings *f, lm_buf *out,
                        lm_err *e)
{
    lm_text x = { .out = out, .err = e };

    lm_text_clean(&x, lm_model_source_path(m));
    lm_text_add(&x, "\n");
    for (int i = 1; i >= 0; i--)
        lm_text_add(&x, r->text[i].out->len ? r->text[i].out->data : "");
    lm_text_addf(&x, "%zu tensor%s: %" PRIu64 " fault%s, %" PRIu64 " note%s\n",
                 lm_model_source_count(m), lm_plural(lm_model_source_count(m)), f->faults,
                 lm_plural(f->faults), f->notes, lm_plural(f->notes));
    return x.rc ? x.rc : r->text[0].rc ? r->text[0].rc : r->text[1].rc;
}

static lm_code put_json(const lm_model_source *m, report *r, const lm_findings *f, lm_buf *out,
                        lm_err *e)
{
    static const char *const keys[2] = { "notes", "faults" };
    lm_jw w;
    lm_code rc = LM_OK;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "model", lm_model_source_path(m));
    lm_jw_int(&w, "tensor_count", (int64_t)lm_model_source_count(m));
    for (int i = 1; i >= 0 && !rc; i--) {
        json_t *list = NULL;
        lm_jw_close_arr(&r->json[i]);
        rc = lm_jw_end(&r->json[i]);
        if (!rc)
            rc = lm_json_parse(r->text[i].out->data, r->text[i].out->len, keys[i], &list, e);
        if (!rc)
            lm_jw_json(&w, keys[i], list);
        json_decref(list);
    }
    lm_jw_bool(&w, "ok", f->faults == 0);
    lm_jw_close_obj(&w);
    lm_code end = lm_jw_end(&w);
    return rc ? rc : end ? end : lm_buf_add(out, "\n", 1, e);
}

lm_code lm_model_verify_report(lm_model_source *m, bool json, lm_buf *out, uint64_t *faults,
                               lm_err *e)
{
    lm_buf part[2] = { 0 };
    report r = { .as_json = json };
    lm_findings f = { .say = say, .ctx = &r };

    for (int i = 0; i < 2; i++) {
        r.text[i] = (lm_text){ .out = &part[i], .err = e };
        if (json) {
            lm_jw_begin(&r.json[i], &part[i], 0, e);
            lm_jw_arr(&r.json[i], NULL);
        }
    }
    lm_code rc = lm_model_verify(m, &f, e);
    if (!rc)
        rc = (json ? put_json : put_text)(m, &r, &f, out, e);
    *faults = f.faults;
    lm_buf_fini(&part[0]);
    lm_buf_fini(&part[1]);
    return rc;
}
