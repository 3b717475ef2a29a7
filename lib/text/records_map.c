/* SPDX-License-Identifier: Apache-2.0 */
/* records_map.c -- columns under other names. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/records_impl.h"

static const char *const names[] = { "messages",    "conversations", "instruction",
                                     "input",       "output",        "system",
                                     "history",     "prompt",        "completion",
                                     "chosen",      "rejected",      "label",
                                     "completions", "labels",        "text",
                                     "tools",       "question",      "answer",
                                     "kto_tag",     "response",      "chat_template_kwargs",
                                     "source",      "target",        NULL };

static lm_code add_pair(lm_text_record_map *m, const char *to, size_t to_len, const char *from,
                        size_t from_len, lm_err *e)
{
    char *a = NULL, *b = NULL;
    lm_code rc = lm_asprintf(&a, e, "%.*s", (int)to_len, to);
    rc = rc ? rc : lm_asprintf(&b, e, "%.*s", (int)from_len, from);
    for (size_t i = 0; !rc && i < m->n; i++)
        if (!strcmp(m->pair[i].to, a))
            rc = lm_fail(e, LM_EUSAGE, a, "name one column for it", "is renamed twice");
    bool known = false;
    for (size_t i = 0; !rc && names[i]; i++)
        known = known || !strcmp(names[i], a);
    if (!rc && !known) {
        const char *near = lm_nearest(a, names);
        char todo[120] = "names are messages, prompt, completion, chosen, rejected, label, text";
        if (near)
            snprintf(todo, sizeof todo, "did you mean '%s'?", near);
        rc = lm_fail(e, LM_EUSAGE, a, todo, "is not a key of records");
    }
    if (!rc)
        rc = lm_grow(&m->pair, &m->cap, m->n + 1, sizeof *m->pair, "renamed columns", e);
    if (rc) {
        lm_free(a);
        lm_free(b);
        return rc;
    }
    m->pair[m->n].to = a;
    m->pair[m->n++].from = b;
    return LM_OK;
}

lm_code lm_text_record_map_add(lm_text_record_map *m, const char *text, lm_err *e)
{
    for (const char *at = text;; at++) {
        size_t n = strcspn(at, ",");
        const char *eq = memchr(at, '=', n);
        if (!eq || eq == at || eq == at + n - 1)
            return lm_fail(e, LM_EUSAGE, text, "write prompt=question,completion=answer",
                           "is not a list of KEY=COLUMN");
        if (add_pair(m, at, (size_t)(eq - at), eq + 1, (size_t)(at + n - eq - 1), e))
            return e->code;
        at += n;
        if (!*at)
            return LM_OK;
    }
}

void lm_text_record_map_fini(lm_text_record_map *m)
{
    for (size_t i = 0; i < m->n; i++) {
        lm_free(m->pair[i].to);
        lm_free(m->pair[i].from);
    }
    lm_free(m->pair);
    *m = (lm_text_record_map){ 0 };
}

/* The key of the top level, or A.B under A. */
static json_t *get_path(const json_t *o, const char *path)
{
    json_t *v = json_object_get(o, path);
    const char *dot = strchr(path, '.');
    char head[128];
    if (v || !dot || (size_t)(dot - path) >= sizeof head)
        return v;
    memcpy(head, path, (size_t)(dot - path));
    head[dot - path] = 0;
    v = json_object_get(o, head);
    return json_is_object(v) ? get_path(v, dot + 1) : NULL;
}

/* All columns are read before any is written, so that two can exchange their names. */
lm_code record_rename(const lm_text_record_map *m, json_t *o, const char *where, lm_err *e)
{
    json_t *moved = json_object();
    if (!moved)
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory");
    for (size_t i = 0; i < m->n; i++) {
        json_t *v = get_path(o, m->pair[i].from);
        if (!v || json_object_set(moved, m->pair[i].to, v)) {
            json_decref(moved);
            return lm_fail(e, LM_EFORMAT, where, "name a column that every record has",
                           "no column \"%s\" for \"%s\"", m->pair[i].from, m->pair[i].to);
        }
    }
    for (size_t i = 0; i < m->n; i++)
        json_object_del(o, m->pair[i].from);
    int bad = json_object_update(o, moved);
    json_decref(moved);
    return bad ? lm_fail(e, LM_ELIMIT, where, NULL, "no memory") : LM_OK;
}
