/* SPDX-License-Identifier: Apache-2.0 */
/* run_options.c -- the options of a run in its checkpoints. */
#include <string.h>

#include "train/resume.h"
#include "train/run.h"

static lm_code add_tiers(json_t *o, const lm_run_tiers *t, lm_err *e)
{
    json_t *list = json_array();
    lm_buf text = { 0 };
    for (int i = 0; i < t->n && !e->code; i++) {
        text.len = 0;
        if (!lm_run_tier_text(&t->at[i], &text, e))
            json_array_append_new(list, json_string(text.data));
    }
    lm_buf_fini(&text);
    json_object_set_new(o, "save-to", list);
    return e->code;
}

static lm_code add_paths(json_t *o, const lm_run_paths *p, lm_err *e)
{
    if (lm_run_keep_path(o, "data", p->data, e) || lm_run_keep_path(o, "val", p->val, e) ||
        lm_run_keep_path(o, "base", p->base, e) ||
        lm_run_keep_path(o, "tensorboard", p->tensorboard, e))
        return e->code;
    if (p->tiers && p->tiers->n && add_tiers(o, p->tiers, e))
        return e->code;
    if (p->data_digest)
        json_object_set_new(o, "data_digest", json_string(p->data_digest));
    if (p->metrics && !strncmp(p->metrics, "fd:", 3))
        json_object_set_new(o, "metrics", json_null()); /* open in this process only */
    else if (p->metrics && strcmp(p->metrics, "-"))
        return lm_run_keep_path(o, "metrics", p->metrics, e);
    return LM_OK;
}

lm_code lm_run_options(const char *tool, const lm_buf *options, const lm_run_paths *paths,
                       const lm_schedule *s, lm_buf *out, lm_err *e)
{
    json_t *o = NULL;
    lm_jw w;
    lm_code rc = lm_json_parse(options->data, options->len, "options", &o, e);
    if (!rc)
        rc = lm_resume_keep_schedule(o, s, e);
    if (!rc)
        rc = add_paths(o, paths, e);
    if (!rc && json_object_set_new(o, "tool", json_string(tool)))
        rc = lm_fail(e, LM_ELIMIT, "options", NULL, "no memory");
    if (!rc) {
        lm_jw_begin(&w, out, 0, e);
        lm_jw_json(&w, NULL, o);
        rc = lm_jw_end(&w);
    }
    json_decref(o);
    return rc;
}
