/* SPDX-License-Identifier: Apache-2.0 */
/* jinja.c -- compiling a template: newlines, tokens, tree. */
#include "text/jinja.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "text/jinja_node.h"

lm_code lm_jinja_wrong(const lm_jinja *t, int line, int col, lm_err *e, const char *what, ...)
{
    char text[256], where[sizeof e->where];
    va_list ap;

    va_start(ap, what);
    vsnprintf(text, sizeof text, what, ap);
    va_end(ap);
    snprintf(where, sizeof where, "%.200s: line %d, column %d", t->where, line, col);
    return lm_fail(e, LM_EFORMAT, where, NULL, "%s", text);
}

lm_code lm_jinja_str(lm_jinja *t, const char *s, size_t len, const lm_jstr **out, lm_err *e)
{
    lm_jstr *made = NULL;
    char *copy = NULL;
    lm_code rc = lm_arena_alloc(t->mem, &made, 1, sizeof *made, e);

    if (!rc)
        rc = lm_arena_strdup(t->mem, &copy, s ? s : "", s ? len : 0, e);
    if (rc)
        return rc;
    made->s = copy;
    made->len = s ? len : 0;
    made->chars = -1;
    made->chars = lm_jv_chars(made);
    *out = made;
    return LM_OK;
}

/* Copy with \r\n and \r as \n, and without one newline at the end. */
static size_t normalise(const char *text, size_t len, char *out)
{
    size_t n = 0;

    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\r' && i + 1 < len && text[i + 1] == '\n')
            continue;
        out[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    return n && out[n - 1] == '\n' ? n - 1 : n;
}

static lm_code compile(lm_jinja *t, const char *text, size_t len, lm_err *e)
{
    lm_jtoken *token = NULL;
    char *source = NULL;
    size_t n = 0;
    lm_code rc = lm_alloc_n(&source, len + 1, 1, "a chat template", e);

    if (!rc)
        rc = lm_jinja_lex(t, source, normalise(text, len, source), &token, &n, e);
    if (!rc)
        rc = lm_jinja_parse(t, token, n, e);
    lm_free(token);
    lm_free(source);
    return rc;
}

lm_code lm_jinja_compile(const char *text, size_t len, const char *where, lm_jinja **out, lm_err *e)
{
    lm_jinja *t = NULL;
    lm_code rc;

    *out = NULL;
    if (len > LM_JINJA_MAX_BYTES)
        return lm_fail(e, LM_ELIMIT, where, NULL, "a template of %zu bytes: at most %d are read",
                       len, LM_JINJA_MAX_BYTES);
    if (lm_utf8_valid(text, len) < len)
        return lm_fail(e, LM_EFORMAT, where, NULL, "byte %zu is not UTF-8",
                       lm_utf8_valid(text, len));
    rc = lm_alloc_n(&t, 1, sizeof *t, "a chat template", e);
    if (!rc)
        rc = lm_arena_new(&t->mem, 16 << 10, e);
    if (!rc)
        rc = lm_strdup(&t->where, where, e);
    if (!rc)
        rc = compile(t, text, len, e);
    if (rc) {
        lm_jinja_free(t);
        return rc;
    }
    *out = t;
    return LM_OK;
}

void lm_jinja_free(lm_jinja *t)
{
    if (!t)
        return;
    lm_arena_free(t->mem);
    lm_free(t->where);
    lm_free(t->name);
    lm_free(t);
}

bool lm_jinja_marks(const lm_jinja *t)
{
    return t->marks;
}

bool lm_jinja_reads(const lm_jinja *t, const char *name)
{
    for (size_t i = 0; i < t->n_names; i++)
        if (t->name[i]->len == strlen(name) && !memcmp(t->name[i]->s, name, strlen(name)))
            return true;
    return false;
}

lm_code lm_text_spans_add(lm_text_spans *s, size_t from, size_t to, lm_err *e)
{
    lm_code rc = lm_grow(&s->v, &s->cap, s->n + 1, sizeof *s->v, "spans of a text", e);

    if (!rc)
        s->v[s->n++] = (lm_text_span){ from, to };
    return rc;
}

void lm_text_spans_fini(lm_text_spans *s)
{
    lm_free(s->v);
    *s = (lm_text_spans){ 0 };
}
